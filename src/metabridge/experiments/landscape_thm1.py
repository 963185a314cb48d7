"""Collins et al. 2022, theorem 1: how much MAML favors the harder of two tasks, at stationary points of its loss.

The stationary points of MAML's population loss are found numerically. There, the gradient norm ‖∇f₁‖ of the hard task 1
is at most (1 − αβ₂)/(1 − αL₁) times the gradient norm ‖∇f₂‖ of the easy task 2, if each gradient is evaluated after the
inner step on its task (eq. 33). If both are evaluated before the step, the factor is the square of this one, up to
O(α²) (eq. 36); the theorem itself has (1 − 2αβ₂)/(1 − αL₁)². α is the size of the inner step, β₂ the smallest curvature
of task 2, and L₁ the largest curvature of task 1. Both curvatures are measured at the stationary point, which gives the
tightest bound. The theorem assumes that the inputs of both tasks have the covariance Σ = I, but its proof does not need
this: here the inputs of the hard task have half the variance, as in the figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from metabridge.environments.teacher_networks import Activation
from metabridge.report.results import Row
from metabridge.theory.teachers import HardTaskPreference, TeacherTask, maml_loss, stationary_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HARD, EASY = 0.5, 1.0  # variance of the inputs
LABELS: dict[Activation, str] = {"softplus": "Softplus", "sigmoid": "Sigmoid", "tanh": "tanh", "relu": "ReLU"}
RELATIVE_ALPHAS = (0.1, 0.25, 0.5, 0.9)  # α·L₂
TITLE = (
    "Theorem 1: stationary points of MAML's loss on a hard task 1 and an easy task 2, and the bound on the gradients\n"
    r"($α$: size of the inner step; $β_2$: smallest curvature of task 2; $L_1$, $L_2$: largest curvatures of the tasks)"
)


@dataclass(frozen=True)
class BoundCheck:
    """Results of checking theorem 1 at stationary points for many pairs of a hard and an easy task, for one α·L₂."""

    activation: Activation
    relative_alpha: float  # α·L₂
    num_stationary: int  # number of stationary points
    applicable: tuple[HardTaskPreference, ...]  # for those points that satisfy the conditions of the theorem


def check_theorem(activation: Activation, pairs: int, seed: int) -> list[BoundCheck]:
    """Check theorem 1 at stationary points of MAML's population loss, for pairs of teachers drawn from N(0, I).

    A teacher is the network of one neuron that produces the labels of a task. There is one check for each α·L₂. L₂ is
    the largest curvature of the easy task at its neuron. The searches for stationary points start at both neurons and
    at their midpoint.
    """
    generator = torch.Generator().manual_seed(seed)
    teachers = torch.randn(pairs, 2, 1, 2, generator=generator, dtype=torch.float64)
    checks = []
    for relative_alpha in RELATIVE_ALPHAS:
        preferences: list[HardTaskPreference] = []
        for first, second in teachers:
            hard, easy = TeacherTask(first, activation, HARD), TeacherTask(second, activation, EASY)
            alpha = relative_alpha / float(easy.curvatures(second)[-1])
            points = stationary_points(maml_loss([hard, easy], alpha), (first, second, (first + second) / 2))
            preferences += [HardTaskPreference.measure(point, hard, easy, alpha) for point in points]
        applicable = tuple(preference for preference in preferences if preference.applies)
        checks.append(BoundCheck(activation, relative_alpha, len(preferences), applicable))
    return checks


def theorem_rows(checks: Iterable[BoundCheck]) -> Iterator[Row]:
    """Yield both sides of the bounds after and before adaptation, and the number of points that satisfy the bounds."""
    for check in checks:
        if not check.applicable:
            continue
        yield _row(check, "after a step", [(point.adapted_ratio, point.adapted_bound) for point in check.applicable])
        # `printed_bound` is the bound of the theorem as printed, without its O(α²) term.
        satisfied = sum(point.ratio <= point.printed_bound for point in check.applicable)
        excess = max(0, *(point.ratio - point.printed_bound for point in check.applicable))
        note = (
            f"; {satisfied} satisfy (1 − 2αβ₂)/(1 − αL₁)², eq. 13 without its O(α²) term, which would have to be "
            f"{excess / check.relative_alpha**2:.2f} (αL₂)²‖∇f₂‖"
        )
        yield _row(check, "before adaptation", [(point.ratio, point.bound) for point in check.applicable], note)


def _row(check: BoundCheck, stage: str, sides: Sequence[tuple[float, float]], note: str = "") -> Row:
    """Return a row with both sides of a bound, divided by ‖∇f₂‖, at the point where their ratio is largest."""
    ratio, bound = max(sides, key=lambda pair: pair[0] / pair[1])
    satisfied = sum(ratio <= bound * (1 + 1e-9) for ratio, bound in sides)
    return Row(
        f"theorem 1, {LABELS[check.activation]}, α = {check.relative_alpha:g}/L₂, {stage}",
        "‖∇f₁‖/‖∇f₂‖",
        published=bound,
        ours=ratio,
        agrees=satisfied == len(sides),
        note=f"{len(sides)} of {check.num_stationary} stationary points satisfy the conditions and {satisfied} the "
        f"bound{note}",
    )


def draw_theorem(axes: Axes, checks: Sequence[BoundCheck]) -> None:
    """Draw the ratio of gradient norms before adaptation as a function of its bound, at all points and for each α."""
    from metabridge.report.figures import COLORS, MARKERS, plain_numbers

    for check, color, marker in zip(checks, COLORS, MARKERS):
        bounds = [point.bound for point in check.applicable]
        ratios = [point.ratio for point in check.applicable]
        axes.plot(bounds, ratios, marker, color=color, markersize=5, label=f"α = {check.relative_alpha:g}/$L_2$")
    values = [value for check in checks for point in check.applicable for value in (point.bound, point.ratio)]
    limits = (0.8 * min([1.0, *values]), 1.25 * max([1.0, *values]))
    axes.plot(limits, limits, "k-", linewidth=1, label="ratio = bound")
    axes.axhline(1, color="gray", linestyle="--", linewidth=1, label="NAL's stationary points")
    axes.set(xscale="log", yscale="log", xlabel="bound $((1-αβ_2)/(1-αL_1))^2$")
    axes.set_ylabel("gradient norm of the hard task\n/ gradient norm of the easy task")
    for axis in (axes.xaxis, axes.yaxis):
        plain_numbers(axis)
