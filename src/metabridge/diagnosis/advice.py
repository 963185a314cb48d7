"""The recommendation of a diagnosis, and the kernel predictions and costs that it shows besides the risks."""

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

MIN_RATIO = 1.25  # smallest ratio of risks for which adaptation in training is recommended
MIN_SAVING = 0.001  # smallest saved share of the whole loss for which adaptation in training is recommended
MIN_AGREEMENT = 0.8  # smallest share of resampled sets of tasks that must favor the same recommendation
NO_GAIN = "no method is expected to beat plain pre-training here"
KERNEL_METHODS: tuple[kernel_predictors.KernelMethod, ...] = ("mtl", "anil", "maml")
TRAINING_EXAMPLES, VALIDATION_TASKS, TEST_TASKS = 1600, 40, 100  # for kernel predictions
RIDGES = (0.01, 1.0, 100.0)  # as multiples of the mean of the NTK's diagonal
MIN_RATE_RATIO = 1.5  # smallest ratio of the rates of easy and hard tasks for which the groups differ clearly
LARGE_REMAINDER = 0.5  # if a larger share of the explainable loss remains after a step, the features are the problem
DIFFERENTIATED_STEP_COST = 3  # in gradients: one for the step, and two for a Hessian-vector product


@dataclass(frozen=True)
class KernelPrediction:
    """The score of a method at infinite width, where training is equivalent to a prediction with a kernel.

    Args:
        method: Name of the method, or "support alone" for regression on the support set without training.
        metric: "accuracy" or "squared error".
        mean: Mean of the metric over test tasks.
        ci95: Half-width of the 95 % confidence interval of `mean`.
        gain: Improvement of the metric over "support alone", positive if the method is better.
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
        test_gradients: Number of gradients of the network for this adaptation; 0 if only the head adapts.
        training_gradients: Number of gradients of the whole network per training task; 1 for plain pre-training.

    >>> cost = MethodCost("maml", adapted_parameters=5000, test_gradients=5, training_gradients=16.0)
    >>> f"{cost.method} costs {cost.training_gradients:.0f} times as much as plain pre-training"
    'maml costs 16 times as much as plain pre-training'
    """

    method: str
    adapted_parameters: int
    test_gradients: int
    training_gradients: float


@dataclass(frozen=True)
class Advice:
    """A recommendation.

    Args:
        method: The recommended method, or None if there is not enough evidence.
        adapts: Whether this method adapts to tasks during training, or None if `method` is None.
        confidence: Share of resampled sets of tasks that favor the same recommendation.
        reasons: Reasons for and against the recommendation, after all problems but the first.
        problem: The first problem: why no method is recommended and what to do about it. None without problems.

    >>> Advice("maml", adapts=True, confidence=0.95, reasons=()).headline
    'Train with MAML. Resampled tasks agree in 95 % of cases.'
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
        text = f"train with {self.method.upper()}" if self.adapts else f"{NO_GAIN} ({self.method.upper()})"
        return f"{text[0].upper()}{text[1:]}. Resampled tasks agree in {100 * self.confidence:.0f} % of cases."


def predict_with_kernels(
    kernel: Kernel, environment: Environment, seed: int, *, progress: bool = False
) -> tuple[KernelPrediction, ...]:
    """Return the scores of MTL, ANIL and MAML on new tasks at infinite width, and of regression on the support alone.

    At test time, support sets are fitted to convergence. The training ridge is chosen from `RIDGES` on validation
    tasks.
    """
    task_x = environment.sample(1, torch.Generator().manual_seed(seed)).without_split().support_x
    training = environment.sample(max(2, TRAINING_EXAMPLES // task_x.shape[1]), torch.Generator().manual_seed(seed))
    prepared = KernelLearner(kernel, "maml").prepare(training, "training task")
    scale = float(kernel.ntk(prepared.support_x[0]).diagonal().mean())
    untrained = KernelLearner(kernel, "maml", outer_time=0.0).fit(training)
    baseline = evaluate(untrained, environment, tasks=TEST_TASKS, seed=seed + 2)
    predictions = [_kernel_prediction("support alone", baseline, baseline.minus(baseline))]
    for name in track_progress(KERNEL_METHODS, "kernels", progress):
        options: dict[str, Any] = {"inner_time": 1 / scale} if name == "anil" else {}
        learners = (
            KernelLearner(kernel, name, ridge=ridge * scale, test_time=math.inf, **options).fit(training)
            for ridge in RIDGES
        )
        learner = select_model(learners, environment, tasks=VALIDATION_TASKS, seed=seed + 1)
        score = evaluate(learner, environment, tasks=TEST_TASKS, seed=seed + 2)
        predictions.append(_kernel_prediction(name, score, score.minus(baseline)))
    return tuple(predictions)


def _kernel_prediction(name: str, score: Score, difference: Score) -> KernelPrediction:
    sign = 1 if score.metric == "accuracy" else -1
    return KernelPrediction(name, score.metric, score.mean, score.ci95, sign * difference.mean, difference.ci95)


def method_costs(names: tuple[str, ...], net: Network | None, dimension: int) -> tuple[MethodCost, ...]:
    """Return the cost of each preset, for a network, or for a linear model with `dimension` inputs if `net` is None."""
    net_size, head_size = dimension, dimension
    if net is not None:
        net_size = sum(param.numel() for param in net.parameters())
        head_size = sum(param.numel() for param in net.head.parameters())
    return tuple(_method_cost(name, PRESETS[name], net_size, head_size) for name in names)


def _method_cost(name: str, method: Method, net_size: int, head_size: int) -> MethodCost:
    """Return the cost of a method for a network and a head with these numbers of parameters."""
    solver = method.inner or method.test
    adapts_all = method.adapts == "all" or isinstance(method.test, Solver)
    steps = getattr(solver, "steps", 0)
    inner_gradients = 0
    if method.inner is not None:
        inner_gradients = steps * (DIFFERENTIATED_STEP_COST if method.outer == "exact" else 1)
    adapted_size = net_size if adapts_all else head_size
    training_gradients = 1 + inner_gradients * (adapted_size / net_size)
    return MethodCost(name, adapted_size, steps if adapts_all else 0, training_gradients)


def _describe_rate_ratio(ratio: float) -> str:
    if ratio < 1 / MIN_RATE_RATIO:
        return ": the tasks of the hard group are the faster ones"
    return "" if ratio >= MIN_RATE_RATIO else ", so the two groups hardly differ"


def advise(
    prediction: Prediction,
    plain: str,
    adaptive: str,
    rates: tuple[float, float],
    kernel_predictions: tuple[KernelPrediction, ...],
    problems: tuple[str, ...] = (),
) -> Advice:
    """Return a recommendation based on the predicted ratio of risks, with the reasons for and against it.

    Args:
        prediction: Predicted risks.
        plain: Name of the method without adaptation in training.
        adaptive: Name of the cheapest method that adapts. MAML replaces it if the kernel predictions of MAML are
            significantly better than those of ANIL.
        rates: Mean convergence rates of hard and of easy tasks.
        kernel_predictions: Result of `predict_with_kernels`, or ().
        problems: Reasons not to trust the prediction. If there are any, no method is recommended.

    Returns:
        The recommendation, without a method if there are problems or resampled tasks do not agree.
    """
    ratio = prediction.ratio
    favors_adaptation = (prediction.resampled_ratios >= MIN_RATIO) & (prediction.resampled_savings >= MIN_SAVING)
    adaptive_share = float(favors_adaptation.double().mean())
    adapts = adaptive_share > 0.5  # the majority of resamplings; an uncertain estimate may differ from it
    agreement = adaptive_share if adapts else 1 - adaptive_share
    rate_ratio = rates[1] / rates[0]
    reasons = [
        f"plain pre-training is predicted to have {ratio} times the risk of training that adapts; "
        f"adaptation is worth its cost from {MIN_RATIO:g} times",
        f"adapting saves {prediction.saved.as_percent()} of the whole loss, noise included",
        f"gradient descent is {rate_ratio:.2g} times as fast on easy tasks as on hard ones"
        + _describe_rate_ratio(rate_ratio),
    ]
    if not adapts and prediction.saved.value < MIN_SAVING:
        reasons.append(f"less than {100 * MIN_SAVING:g} % of the loss is negligible, whatever the ratio of risks")
    if not ratio.has_upper_bound:
        unbounded = "the risk after adaptation may be zero, so the ratio of risks has no upper bound"
        if ratio.low < MIN_RATIO and prediction.saved.high >= MIN_SAVING:
            problems += (f"{unbounded}, and its lower end {ratio.low:#.3g} is below {MIN_RATIO:g}: sample more tasks",)
        else:
            reasons.append(unbounded)
    if agreement < MIN_AGREEMENT:
        problems += (
            f"{100 * adaptive_share:.0f} % of resampled sets of tasks favor adaptation and "
            f"{100 - 100 * adaptive_share:.0f} % plain pre-training: sample more tasks, or use the cheaper method",
        )
    if prediction.remaining > LARGE_REMAINDER:
        reasons.append(
            f"after a step, {100 * prediction.remaining:.0f} % of the loss that the features can explain remains: "
            "better features would help more than a better initialization, and the formulas do not predict which "
            "method learns better features"
        )
    if kernel_predictions:
        better_methods = [result.method.upper() for result in kernel_predictions if result.gain > result.gain_ci95]
        reasons.append(
            f"by the kernels of infinitely wide networks, {', '.join(better_methods) or 'no method'} "
            f"{'are' if len(better_methods) > 1 else 'is'} better than regression on the support alone"
        )
        by_method = {result.method: result for result in kernel_predictions}
        maml, anil = by_method["maml"], by_method["anil"]
        if maml.gain - anil.gain > math.hypot(maml.gain_ci95, anil.gain_ci95):
            adaptive = "maml"
    if problems:
        return Advice(None, None, agreement, (*problems[1:], *reasons), problems[0])
    return Advice(adaptive if adapts else plain, adapts, agreement, tuple(reasons))
