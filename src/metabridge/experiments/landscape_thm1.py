"""C's theorem 1 on stationary points that were found: how much MAML favours the hard one of two tasks.

Where the population loss of MAML with a full inner step is stationary, the gradient of the hard task 1 is bounded
by that of the easy task 2: after each task's step by (1 − αβ₂)/(1 − αL₁) (eq. 33), and before it by the square of
this up to O(α²) (eq. 36), which theorem 1 prints as (1 − 2αβ₂)/(1 − αL₁)². β₂ and L₁ are taken at the point
itself, where they bound best. The theorem has Σ = I for both tasks and its proof does without: here the hard task's
inputs have half the variance, as in the figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from metabridge.environments.teacher_networks import Activation
from metabridge.experiments.landscape_nets import EASY, HARD, NAMES
from metabridge.experiments.result import Row
from metabridge.theory.teachers import Preference, TeacherTask, maml_loss, stationary_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHARES = (0.1, 0.25, 0.5, 0.9)  # of 1/L₂, which the rates α are
TITLE = (
    "Theorem 1: where MAML's loss on a hard task 1 and an easy task 2 is stationary, and the bound on their gradients\n"
    r"($α$: rate of the inner step, $β_2$: least curvature of task 2, $L_1$ and $L_2$: largest of either)"
)


@dataclass(frozen=True)
class Check:
    """Theorem 1 on the stationary points of many pairs of a hard and an easy task, for one share α of 1/L₂."""

    activation: Activation
    share: float
    found: int  # stationary points
    met: tuple[Preference, ...]  # those of them where the theorem's conditions hold


def check_theorem(activation: Activation, pairs: int, seed: int) -> list[Check]:
    """Look for stationary points of MAML's loss between teachers drawn from N(0, I), with infinitely many samples.

    L₂ is the easy task's largest curvature at its own neuron. The search starts at both neurons and between them.
    """
    generator = torch.Generator().manual_seed(seed)
    teachers = torch.randn(pairs, 2, 1, 2, generator=generator, dtype=torch.float64)
    checks = []
    for share in SHARES:
        found: list[Preference] = []
        for first, second in teachers:
            hard, easy = TeacherTask(first, activation, HARD), TeacherTask(second, activation, EASY)
            rate = share / float(easy.curvatures(second)[-1])
            points = stationary_points(maml_loss([hard, easy], rate), (first, second, (first + second) / 2))
            found += [Preference.at(point, hard, easy, rate) for point in points]
        checks.append(Check(activation, share, len(found), tuple(own for own in found if own.applies)))
    return checks


def theorem_rows(checks: Iterable[Check]) -> list[Row]:
    """Give both sides of the bound after a step and of the bound before it, for each share, and who keeps to them."""
    rows = []
    for check in checks:
        if check.met:
            rows.append(_row(check, "after a step", [(own.adapted_ratio, own.adapted_bound) for own in check.met]))
            before = _row(check, "before it", [(own.ratio, own.bound) for own in check.met])
            rows.append(replace(before, note=f"{before.note}; {_printed(check.met, check.share)}"))
    return rows


def _row(check: Check, when: str, sides: Sequence[tuple[float, float]]) -> Row:
    """Both sides, divided by ‖∇f₂‖, of the point where they are closest."""
    left, bound = max(sides, key=lambda pair: pair[0] / pair[1])
    within = sum(left <= bound * (1 + 1e-9) for left, bound in sides)
    return Row(
        f"theorem 1, {NAMES[check.activation]}, α = {check.share:g}/L₂, {when}",
        "‖∇f₁‖/‖∇f₂‖",
        published=bound,
        ours=left,
        agrees=within == len(sides),
        note=f"{len(sides)} of {check.found} stationary points meet the conditions; {within} keep to the bound",
    )


def _printed(met: Sequence[Preference], share: float) -> str:
    """What the form that theorem 1 prints needs of its remainder."""
    within = sum(own.ratio <= own.printed_bound for own in met)
    excess = max(own.ratio - own.printed_bound for own in met)
    return (
        f"{within} keep to (1 − 2αβ₂)/(1 − αL₁)², which is eq. 13 without its O(α²): "
        f"that has to reach {max(excess, 0) / share**2:.2f} (αL₂)²‖∇f₂‖"
    )


def draw_theorem(axes: Axes, checks: Sequence[Check]) -> None:
    """Draw the ratio of gradients at every stationary point against its bound, by rate."""
    from metabridge.report.figures import COLOURS, MARKERS, plain_numbers

    for check, colour, marker in zip(checks, COLOURS, MARKERS):
        bounds, ratios = [own.bound for own in check.met], [own.ratio for own in check.met]
        axes.plot(bounds, ratios, marker, color=colour, markersize=5, label=f"α = {check.share:g}/$L_2$")
    sides = [value for check in checks for own in check.met for value in (own.bound, own.ratio)]
    ends = (0.8 * min([1.0, *sides]), 1.25 * max([1.0, *sides]))
    axes.plot(ends, ends, "k-", linewidth=1, label="ratio = bound")
    axes.axhline(1, color="grey", linestyle="--", linewidth=1, label="NAL's stationary points")
    axes.set(xscale="log", yscale="log", xlabel="bound $((1-αβ_2)/(1-αL_1))^2$")
    axes.set_ylabel("gradient of the hard task\nover that of the easy task")
    for ticks in (axes.xaxis, axes.yaxis):
        plain_numbers(ticks)
