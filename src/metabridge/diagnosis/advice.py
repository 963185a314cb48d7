"""Recommend a method, and compute the kernel predictions and costs that a diagnosis reports."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from metabridge.diagnosis.estimates import Prediction
from metabridge.environments.environment import Environment
from metabridge.kernels import kernel_predictors
from metabridge.kernels.kernel import Kernel
from metabridge.kernels.kernel_predictors import KernelLearner
from metabridge.learners.method import PRESETS, Method
from metabridge.models.network import Network
from metabridge.progress import track_progress
from metabridge.solvers import Solver
from metabridge.training.evaluation import Score, evaluate, select_model

# Smallest ratio of the risk of non-adaptive learning (NAL) to that of MAML for which adaptation is recommended.
MIN_RATIO = 1.25
MIN_RELATIVE_GAIN = 0.001  # smallest relative reduction of the expected loss for which adaptation is recommended
MIN_AGREEMENT = 0.8  # smallest fraction of bootstrap samples that must give the same recommendation
NO_GAIN = "training with adaptation is not expected to be worth its cost"
KERNEL_METHODS: tuple[kernel_predictors.KernelMethod, ...] = ("mtl", "anil", "maml")
NO_META_TRAINING = "no meta-training"  # name of the baseline of kernel predictions
# Numbers of training examples, validation tasks and test tasks of kernel predictions.
TRAINING_EXAMPLES, VALIDATION_TASKS, TEST_TASKS = 1600, 40, 100
RIDGES = (0.01, 1.0, 100.0)  # candidate ridges of kernel predictions, relative to the mean of the NTK's diagonal
# Smallest ratio of the convergence rates of easy and hard tasks at which the groups clearly differ.
MIN_RATE_RATIO = 1.5
# If a larger fraction of the reducible loss remains after an adaptation step, the features limit the accuracy.
MAX_RESIDUAL_FRACTION = 0.5
# Costs, in gradient evaluations, of a Hessian-vector product, and of an inner step through which the outer gradient is
# backpropagated. Such a step needs a gradient and a Hessian-vector product.
HESSIAN_VECTOR_COST = 2
BACKPROPAGATED_STEP_COST = 1 + HESSIAN_VECTOR_COST


@dataclass(frozen=True)
class KernelPrediction:
    """The score of a method at infinite width, where training is equivalent to kernel regression.

    Args:
        method: Name of the method, or "no meta-training" for the baseline: kernel regression on the support set.
        metric: "accuracy" or "squared error".
        mean: Mean of the metric over test tasks.
        ci95: Half-width of the 95 % confidence interval of `mean`.
        gain: Improvement of the metric over the baseline, positive if the method is better.
        gain_ci95: Half-width of the 95 % confidence interval of `gain`.

    >>> prediction = KernelPrediction("maml", "accuracy", mean=0.8, ci95=0.02, gain=0.05, gain_ci95=0.01)
    >>> prediction.gain > prediction.gain_ci95
    True
    """

    method: str
    metric: str
    mean: float
    ci95: float
    gain: float
    gain_ci95: float


@dataclass(frozen=True)
class MethodCost:
    """The cost of a method, computed from its default settings.

    Args:
        method: Name of the method.
        adapted_parameters: Number of parameters that adapt to a test task.
        test_gradients: Number of gradient evaluations of the network to adapt to a test task; 0 if only the head of a
            larger network adapts.
        training_gradients: Cost of a training task in gradient evaluations of the network: 1 for the outer gradient,
            and the costs of the inner steps and of the Hessian-vector products, times the fraction of the parameters
            that adapt. It is 1 for pre-training without adaptation.

    >>> cost = MethodCost("maml", adapted_parameters=5000, test_gradients=5, training_gradients=16.0)
    >>> f"{cost.method} costs {cost.training_gradients:.0f} times as much as pre-training"
    'maml costs 16 times as much as pre-training'
    """

    method: str
    adapted_parameters: int
    test_gradients: int
    training_gradients: float


@dataclass(frozen=True)
class Advice:
    """The recommended method, with reasons.

    Args:
        method: The recommended method, or None if there is not enough evidence.
        adapts: Whether this method adapts to tasks during training, or None if `method` is None.
        confidence: Fraction of bootstrap samples of the tasks that give the same recommendation.
        problem: The first problem: why no method is recommended and what to do about it. None if there are no problems.
        reasons: All other problems, followed by the reasons for and against the recommendation.

    >>> Advice("maml", adapts=True, confidence=0.95, reasons=()).headline
    'Train with MAML. 95 % of bootstrap samples give the same recommendation.'
    """

    method: str | None
    adapts: bool | None
    confidence: float
    reasons: tuple[str, ...]
    problem: str | None = None

    @property
    def headline(self) -> str:
        """The recommendation in one line."""
        if self.method is None:
            return f"Undecided: {self.problem}."
        name = self.method.upper()
        text = f"Train with {name}" if self.adapts else f"Pre-train without adaptation ({name}); {NO_GAIN}"
        return f"{text}. {100 * self.confidence:.0f} % of bootstrap samples give the same recommendation."


def predict_with_kernels(
    kernel: Kernel, environment: Environment, seed: int, *, progress: bool = False
) -> tuple[KernelPrediction, ...]:
    """Predict the scores of infinitely wide networks on new tasks.

    The networks are compared without meta-training, and with multi-task learning (MTL), ANIL and MAML. At test time,
    the support sets are fitted to convergence. The ridge of each method is selected from `RIDGES` on validation tasks.

    Args:
        kernel: The kernel of the network.
        environment: The environment of the tasks.
        seed: Seed of the training tasks. The validation and test tasks use the next two seeds.
        progress: Whether to show a progress bar.

    Returns:
        The predictions: first the baseline without meta-training, then MTL, ANIL and MAML.
    """
    task_x = environment.sample(1, torch.Generator().manual_seed(seed)).without_split().support_x
    count = max(2, TRAINING_EXAMPLES // task_x.shape[1])
    training_tasks = environment.sample(count, torch.Generator().manual_seed(seed))
    prepared_tasks = KernelLearner(kernel, "maml").prepare(training_tasks, "training task")
    ntk_scale = float(kernel.ntk(prepared_tasks.support_x[0]).diagonal().mean())
    # The outer loop trains for time 0, so there is no meta-training: the predictions use only the support set.
    support_predictor = KernelLearner(kernel, "maml", outer_time=0.0).fit(training_tasks)
    baseline = evaluate(support_predictor, environment, tasks=TEST_TASKS, seed=seed + 2)
    # the gain of the baseline is 0 by definition
    predictions = [_kernel_prediction(NO_META_TRAINING, baseline, baseline.minus(baseline))]
    for name in track_progress(KERNEL_METHODS, "kernels", progress):
        # the default inner time is infinite, for which ANIL's body would learn nothing
        options: dict[str, Any] = {"inner_time": 1 / ntk_scale} if name == "anil" else {}
        predictors = (
            KernelLearner(kernel, name, ridge=ridge * ntk_scale, test_time=math.inf, **options).fit(training_tasks)
            for ridge in RIDGES
        )
        predictor = select_model(predictors, environment, tasks=VALIDATION_TASKS, seed=seed + 1)
        score = evaluate(predictor, environment, tasks=TEST_TASKS, seed=seed + 2)
        predictions.append(_kernel_prediction(name, score, score.minus(baseline)))
    return tuple(predictions)


def _kernel_prediction(name: str, score: Score, difference: Score) -> KernelPrediction:
    sign = 1 if score.metric == "accuracy" else -1
    return KernelPrediction(name, score.metric, score.mean, score.ci95, sign * difference.mean, difference.ci95)


def method_costs(names: tuple[str, ...], net: Network | None, dimension: int) -> tuple[MethodCost, ...]:
    """Return the cost of each preset for a network or a linear model.

    Args:
        names: Names of the presets.
        net: The network; None for a linear model, which consists of a head only.
        dimension: Number of parameters of the linear model. Not used if there is a network.

    Returns:
        The costs, in the order of `names`.
    """
    net_size, head_size = dimension, dimension
    if net is not None:
        net_size = sum(param.numel() for param in net.parameters())
        head_size = sum(param.numel() for param in net.head.parameters())
    return tuple(_method_cost(name, PRESETS[name], net_size, head_size) for name in names)


def _method_cost(name: str, method: Method, net_size: int, head_size: int) -> MethodCost:
    """Return the cost of a method for a network of `net_size` parameters, `head_size` of them in the head."""
    test_solver = method.inner if method.test_solver is None else method.test_solver
    adapted_in_training = net_size if method.adapts == "all" else head_size
    adapted_in_test = adapted_in_training if isinstance(test_solver, Solver) else head_size
    test_gradients = getattr(test_solver, "steps", 0) if adapted_in_test == net_size else 0
    training_gradients = 1 + _inner_gradients(method) * (adapted_in_training / net_size)
    return MethodCost(name, adapted_in_test, test_gradients, training_gradients)


def _inner_gradients(method: Method) -> int:
    """Return the cost of the inner loop and of its derivative, in gradients with respect to the adapted parameters."""
    if method.inner is None:
        return 0
    steps: int = getattr(method.inner, "steps", 0)
    if method.outer == "exact":
        return steps * BACKPROPAGATED_STEP_COST
    if method.outer == "implicit" and method.inner.implicit_system is not None:
        return steps + method.inner.implicit_system.cg_steps * HESSIAN_VECTOR_COST
    return steps


def _join(names: list[str]) -> str:
    """Return names as text, such as "MTL, ANIL and MAML"."""
    return " and ".join([*filter(None, [", ".join(names[:-1])]), *names[-1:]])


def _describe_rate_ratio(ratio: float) -> str:
    if ratio < 1 / MIN_RATE_RATIO:
        return ", so the group of hard tasks is learned faster"
    return "" if ratio >= MIN_RATE_RATIO else ", so the two groups hardly differ"


def advise(
    prediction: Prediction,
    pretraining_method: str,
    adaptive_method: str,
    rates: tuple[float, float],
    kernel_predictions: tuple[KernelPrediction, ...],
    problems: tuple[str, ...] = (),
) -> Advice:
    """Recommend a method based on the predicted risk ratio, and give the reasons for and against it.

    Args:
        prediction: Predicted excess risks.
        pretraining_method: Name of the method without adaptation during training.
        adaptive_method: Name of the cheapest method with adaptation during training. MAML replaces it if the kernel
            prediction of MAML is significantly better than that of ANIL.
        rates: Mean convergence rates of the hard tasks and of the easy tasks.
        kernel_predictions: Result of `predict_with_kernels`; empty if no kernel is used.
        problems: Reasons not to trust the prediction. If there are any, no method is recommended.

    Returns:
        The recommendation. Its `method` is None if there are problems or the bootstrap samples disagree.
    """
    ratio = prediction.ratio
    favors_adaptation = (prediction.bootstrap_ratios >= MIN_RATIO) & (
        prediction.bootstrap_relative_gains >= MIN_RELATIVE_GAIN
    )
    adaptive_fraction = float(favors_adaptation.double().mean())
    adapts = adaptive_fraction > 0.5  # decided by the bootstrap majority, which may differ from the point estimate
    agreement = adaptive_fraction if adapts else 1 - adaptive_fraction
    rate_ratio = rates[1] / rates[0]
    reasons = [
        f"the predicted risk ratio of pre-training without adaptation to training with adaptation is {ratio}; "
        f"adaptation is recommended only if this ratio is at least {MIN_RATIO:g}",
        f"adaptation reduces the expected loss, including label noise, by {prediction.relative_gain.as_percent()}",
        f"gradient descent converges {rate_ratio:.2g} times as fast on easy tasks as on hard tasks"
        + _describe_rate_ratio(rate_ratio),
    ]
    if not adapts and prediction.relative_gain.value < MIN_RELATIVE_GAIN:
        reasons.append(f"a loss reduction below {100 * MIN_RELATIVE_GAIN:g} % is negligible, whatever the risk ratio")
    if not ratio.has_upper_bound:
        unbounded_reason = "the risk after adaptation may be zero, so the risk ratio has no upper bound"
        if ratio.low < MIN_RATIO and prediction.relative_gain.high >= MIN_RELATIVE_GAIN:
            problems += (
                f"{unbounded_reason}, and the lower end of its interval, {ratio.low:#.3g}, is below {MIN_RATIO:g}: "
                "sample more tasks",
            )
        else:
            reasons.append(unbounded_reason)
    if agreement < MIN_AGREEMENT:
        problems += (
            f"{100 * adaptive_fraction:.0f} % of bootstrap samples favor training with adaptation and "
            f"{100 - 100 * adaptive_fraction:.0f} % favor pre-training without adaptation: sample more tasks, or use "
            "the cheaper method",
        )
    if prediction.residual_fraction > MAX_RESIDUAL_FRACTION:
        reasons.append(
            f"{100 * prediction.residual_fraction:.0f} % of the reducible loss remains after an adaptation step: "
            "better features would help more than a better initialization, and the formulas do not predict which "
            "method learns better features"
        )
    if kernel_predictions:
        better_methods = [result.method.upper() for result in kernel_predictions if result.gain > result.gain_ci95]
        reasons.append(
            f"according to the infinite-width kernel predictions, {_join(better_methods) or 'no method'} "
            f"{'are' if len(better_methods) > 1 else 'is'} significantly better than regression on the support set "
            "without meta-training"
        )
        predictions = {result.method: result for result in kernel_predictions}
        maml, anil = predictions["maml"], predictions["anil"]
        if maml.gain - anil.gain > math.hypot(maml.gain_ci95, anil.gain_ci95):
            adaptive_method = "maml"
    if problems:
        return Advice(None, None, agreement, (*problems[1:], *reasons), problems[0])
    return Advice(adaptive_method if adapts else pretraining_method, adapts, agreement, tuple(reasons))
