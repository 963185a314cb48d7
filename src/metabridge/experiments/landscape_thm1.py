"""Collins et al. 2022, theorem 1: how much MAML favors the hard one of two tasks, at numerically found points.

At a point where the population loss of MAML with a full inner step is stationary, the gradient norm of the hard task 1
is at most (1 − αβ₂)/(1 − αL₁) times that of the easy task 2 if each is taken after the task's own step (eq. 33). Before
the step the factor is the square of this, up to O(α²) (eq. 36); theorem 1 prints (1 − 2αβ₂)/(1 − αL₁)². Here β₂ and L₁
are taken at the point itself, where the bound is tightest. The theorem assumes Σ = I for both tasks, but its proof does
not need that: here the inputs of the hard task have half the variance, as in the figures.
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
SHARES = (0.1, 0.25, 0.5, 0.9)  # the values of α, as shares of 1/L₂
TITLE = (
    "Theorem 1: stationary points of MAML's loss on a hard task 1 and an easy task 2, and the bound on the gradients\n"
    r"($α$: size of the inner step, $β_2$: smallest curvature of task 2, $L_1$ and $L_2$: largest of each task)"
)


@dataclass(frozen=True)
class BoundCheck:
    """Theorem 1 at the stationary points of many pairs of a hard and an easy task, for one share α of 1/L₂."""

    activation: Activation
    share: float
    stationary: int  # number of stationary points
    applicable: tuple[HardTaskPreference, ...]  # those that satisfy the conditions of the theorem


def check_theorem(activation: Activation, pairs: int, seed: int) -> list[BoundCheck]:
    """Find stationary points of MAML's population loss for pairs of teachers drawn from N(0, I).

    L₂ is the largest curvature of the easy task at its neuron. The search starts at both neurons and halfway between.
    """
    generator = torch.Generator().manual_seed(seed)
    teachers = torch.randn(pairs, 2, 1, 2, generator=generator, dtype=torch.float64)
    checks = []
    for share in SHARES:
        preferences: list[HardTaskPreference] = []
        for first, second in teachers:
            hard, easy = TeacherTask(first, activation, HARD), TeacherTask(second, activation, EASY)
            alpha = share / float(easy.curvatures(second)[-1])
            points = stationary_points(maml_loss([hard, easy], alpha), (first, second, (first + second) / 2))
            preferences += [HardTaskPreference.measure(point, hard, easy, alpha) for point in points]
        applicable = tuple(preference for preference in preferences if preference.applies)
        checks.append(BoundCheck(activation, share, len(preferences), applicable))
    return checks


def theorem_rows(checks: Iterable[BoundCheck]) -> Iterator[Row]:
    """Give both sides of the bounds after and before adaptation, and the number of points that satisfy them."""
    for check in checks:
        if not check.applicable:
            continue
        yield _row(check, "after a step", [(p.adapted_ratio, p.adapted_bound) for p in check.applicable])
        satisfied = sum(p.ratio <= p.printed_bound for p in check.applicable)
        excess = max(0, *(p.ratio - p.printed_bound for p in check.applicable))
        note = (
            f"; {satisfied} satisfy (1 − 2αβ₂)/(1 − αL₁)², eq. 13 without its O(α²) term, which would have to be "
            f"{excess / check.share**2:.2f} (αL₂)²‖∇f₂‖"
        )
        yield _row(check, "before adaptation", [(p.ratio, p.bound) for p in check.applicable], note)


def _row(check: BoundCheck, when: str, sides: Sequence[tuple[float, float]], note: str = "") -> Row:
    """Compare both sides, divided by ‖∇f₂‖, at the point where they are closest."""
    ratio, bound = max(sides, key=lambda pair: pair[0] / pair[1])
    satisfied = sum(ratio <= bound * (1 + 1e-9) for ratio, bound in sides)
    return Row(
        f"theorem 1, {LABELS[check.activation]}, α = {check.share:g}/L₂, {when}",
        "‖∇f₁‖/‖∇f₂‖",
        published=bound,
        ours=ratio,
        agrees=satisfied == len(sides),
        note=f"{len(sides)} of {check.stationary} stationary points satisfy the conditions and {satisfied} the bound"
        f"{note}",
    )


def draw_theorem(axes: Axes, checks: Sequence[BoundCheck]) -> None:
    """Draw the ratio of gradients at each stationary point against its bound, by α."""
    from metabridge.report.figures import COLORS, MARKERS, plain_numbers

    for check, color, marker in zip(checks, COLORS, MARKERS):
        bounds, ratios = [p.bound for p in check.applicable], [p.ratio for p in check.applicable]
        axes.plot(bounds, ratios, marker, color=color, markersize=5, label=f"α = {check.share:g}/$L_2$")
    sides = [value for check in checks for p in check.applicable for value in (p.bound, p.ratio)]
    ends = (0.8 * min([1.0, *sides]), 1.25 * max([1.0, *sides]))
    axes.plot(ends, ends, "k-", linewidth=1, label="ratio = bound")
    axes.axhline(1, color="gray", linestyle="--", linewidth=1, label="NAL's stationary points")
    axes.set(xscale="log", yscale="log", xlabel="bound $((1-αβ_2)/(1-αL_1))^2$")
    axes.set_ylabel("gradient of the hard task\nover that of the easy task")
    for axis in (axes.xaxis, axes.yaxis):
        plain_numbers(axis)
