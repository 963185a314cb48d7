"""What a diagnosis recommends, and what it weighs: the kernel twins of the methods, and their costs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from metabridge.diagnosis.estimates import Prediction
from metabridge.environments.environment import Environment
from metabridge.kernels import kernel_predictors as kernels
from metabridge.kernels.kernel import Kernel
from metabridge.kernels.kernel_predictors import KernelLearner
from metabridge.learners.method import PRESETS, Method
from metabridge.models.network import Network
from metabridge.progress import track_progress
from metabridge.solvers import GradientDescent
from metabridge.training.evaluation import Score, evaluate

WORTH = 1.25  # the least ratio of risks for which adaptation in training is recommended
NOTICEABLE = 0.001  # the least share of the whole loss for which it is
DECISIVE = 0.8  # the least share of resampled sets of tasks that must agree
NOTHING = "no method is expected to beat plain pre-training here"
TWINS: tuple[kernels.KernelMethod, ...] = ("mtl", "anil", "maml")
TRAINING_POINTS, CHOOSING_TASKS, JUDGED_TASKS = 1600, 40, 100  # of the twins
RIDGES = (0.01, 1.0, 100.0)  # where the mean of the kernel's diagonal is 1
DISTINCT = 1.5  # times faster, below which hard and easy tasks may be of one kind
SLOW = 0.5  # of what can be explained, left after a step
THROUGH = 3  # gradients' worth of a step that is differentiated through: its own, and a Hessian times a vector


@dataclass(frozen=True)
class Twin:
    """What the kernel of an infinitely wide net predicts for a method, and how that differs from the support alone."""

    method: str
    metric: str
    mean: float
    ci95: float
    gain: float
    gain_ci95: float


@dataclass(frozen=True)
class Cost:
    """What a method costs.

    - `moved`: parameters that adapt to a task at test.
    - `gradients`: evaluations of the network's gradient for that.
    - `training`: gradients of the whole network for each training task, 1 for plain pre-training. Counted, not timed.
    """

    method: str
    moved: int
    gradients: int
    training: float


@dataclass(frozen=True)
class Advice:
    """A method, whether it adapts in training, why, and the share of resampled sets of tasks that say the same.

    Where the evidence supports no recommendation, both are None, and `doubt` says why and what to do.
    """

    method: str | None
    adapts: bool | None
    confidence: float
    reasons: tuple[str, ...]
    doubt: str | None = None

    @property
    def headline(self) -> str:
        """The recommendation in one sentence."""
        if self.method is None:
            return f"Undecided: {self.doubt}."
        said = f"train with {self.method.upper()}" if self.adapts else f"{NOTHING} ({self.method.upper()})"
        return f"{said[0].upper()}{said[1:]}. Resampled tasks agree in {100 * self.confidence:.0f} % of cases."


def kernel_twins(kernel: Kernel, environment: Environment, seed: int, *, progress: bool = False) -> tuple[Twin, ...]:
    """Return what the twins of MTL, ANIL and MAML predict on new tasks, beside regression on the support alone.

    Supports are fitted to the end. The ridge of training is the best of `RIDGES` on tasks that are not judged on.
    """
    example = environment.sample(1, torch.Generator().manual_seed(seed)).without_split().support_x
    training = environment.sample(max(2, TRAINING_POINTS // example.shape[1]), torch.Generator().manual_seed(seed))
    prepared = KernelLearner(kernel, "maml").prepare(training, "training task")
    scale = float(kernel.ntk(prepared.support_x[0]).diagonal().mean())
    alone = KernelLearner(kernel, "maml", outer_time=0.0).fit(training)
    base = evaluate(alone, environment, tasks=JUDGED_TASKS, seed=seed + 2)
    found = [_twin("support alone", base, base.minus(base))]
    for name in track_progress(TWINS, "kernels", progress):
        options: dict[str, Any] = {"inner_time": 1 / scale} if name == "anil" else {}
        grid = [
            KernelLearner(kernel, name, ridge=ridge * scale, test_time=math.inf, **options).fit(training)
            for ridge in RIDGES
        ]
        tried = [evaluate(fitted, environment, tasks=CHOOSING_TASKS, seed=seed + 1) for fitted in grid]
        best = 0
        for place, score in enumerate(tried):
            best = place if score.beats(tried[best]) else best
        score = evaluate(grid[best], environment, tasks=JUDGED_TASKS, seed=seed + 2)
        found.append(_twin(name, score, score.minus(base)))
    return tuple(found)


def _twin(name: str, score: Score, gain: Score) -> Twin:
    better = 1 if score.metric == "accuracy" else -1
    return Twin(name, score.metric, score.mean, score.ci95, better * gain.mean, gain.ci95)


def costs(names: tuple[str, ...], net: Network | None, dimension: int) -> tuple[Cost, ...]:
    """Return the costs of methods as their presets have them; without a net, of a linear model of so many inputs."""
    total, head = dimension, dimension
    if net is not None:
        total = sum(value.numel() for value in net.parameters())
        head = sum(value.numel() for value in net.head.parameters())
    return tuple(_cost(name, PRESETS[name], total, head) for name in names)


def _cost(name: str, method: Method, total: int, head: int) -> Cost:
    solver = method.inner or method.test
    adapts_all = method.adapts == "all" or isinstance(method.test, GradientDescent)
    steps = getattr(solver, "steps", 0)
    inner = 0 if method.inner is None else steps * (THROUGH if method.outer == "exact" else 1)
    share = 1.0 if adapts_all else head / total
    return Cost(name, total if adapts_all else head, steps if adapts_all else 0, 1 + inner * share)


def _apart(faster: float) -> str:
    if faster < 1 / DISTINCT:
        return ": those named hard are the fast ones"
    return "" if faster >= DISTINCT else ", so that little tells them apart"


def advise(
    prediction: Prediction,
    plain: str,
    adaptive: str,
    rates: tuple[float, float],
    twins: tuple[Twin, ...],
    doubts: tuple[str, ...] = (),
) -> Advice:
    """Weigh the predicted ratio of risks, and say what else speaks for or against.

    `rates` are those of hard and of easy tasks. `adaptive` is the cheapest method that adapts; MAML takes its place
    where its twin is the better one beyond the interval. With `doubts` about the prediction nothing is recommended, nor
    where resampled tasks do not agree.
    """
    ratio = prediction.ratio
    worth = (prediction.ratios >= WORTH) & (prediction.savings >= NOTICEABLE)
    share = float(worth.double().mean())
    adapts = share > 0.5  # what most resampled tasks say, which the estimate itself may miss where it is unsure
    agreeing = share if adapts else 1 - share
    told = f"plain pre-training is predicted to have {ratio.told()} times the risk of training that adapts"
    faster = rates[1] / rates[0]
    reasons = [
        f"{told}; from {WORTH:g} times on it is worth the cost",
        f"adapting saves {prediction.saved.percent()} of the whole loss, noise included",
        f"gradient descent is {faster:.2g} times as fast on easy tasks as on hard ones" + _apart(faster),
    ]
    if not adapts and prediction.saved.value < NOTICEABLE:
        reasons.append(f"less than {100 * NOTICEABLE:g} % of the loss is no difference, whatever the ratio of risks")
    if not ratio.bounded:
        unbounded = "the risk left after adaptation may be zero, so the ratio of risks has no upper bound"
        if ratio.low < WORTH and prediction.saved.high >= NOTICEABLE:
            doubts += (f"{unbounded}, and its lower end {ratio.low:#.3g} is below {WORTH:g}: sample more tasks",)
        else:
            reasons.append(unbounded)
    if agreeing < DECISIVE:
        doubts += (
            f"{100 * share:.0f} % of resampled sets of tasks favour adaptation and {100 - 100 * share:.0f} % plain "
            "pre-training: sample more tasks, or take the cheaper method",
        )
    if prediction.left > SLOW:
        reasons.append(
            f"after a step {100 * prediction.left:.0f} % of what the features can explain is still to be learnt: "
            "better features would help more than a better start, and which method learns them the formulas do not say"
        )
    if twins:
        better = [twin.method.upper() for twin in twins if twin.gain > twin.gain_ci95]
        found = f"{', '.join(better)} better than" if better else "nothing better than"
        reasons.append(f"kernels of wide nets find {found} regression on the support alone")
        twin = {twin.method: twin for twin in twins}
        if twin["maml"].gain - twin["anil"].gain > math.hypot(twin["maml"].gain_ci95, twin["anil"].gain_ci95):
            adaptive = "maml"
    if doubts:
        return Advice(None, None, agreeing, (*doubts[1:], *reasons), doubts[0])
    return Advice(adaptive if adapts else plain, adapts, agreeing, tuple(reasons))
