"""What A's theorem 1 rests on, out to depths where its limits show, for plain and for residual ReLU nets.

Lemma 4: in units of K(x, x), the kernels over Nn training points have one eigenvalue that grows as (Nn + 3)L/4 and a
bulk that grows as 3L/4. Lemma 5: ‖Θ⁻¹ − Φ_MTL⁻¹‖ falls as 1/L². Theorem 1: so the gap between ANIL and MTL falls at
least as 1/L. Corollary 1.1: the same holds of residual nets, with LayerNorm or without.

A residual block of He's variance adds to its input as much again, anew, and so moves the kernels half as far as a
plain layer does: lemma 4 holds of residual nets with L/2 for L.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from metabridge.episodes import Episodes
from metabridge.experiments.bridge_fig1 import (
    GAP,
    ByDepth,
    draw_means,
    draw_power,
    gap,
    intervals,
    label_depths,
    tasks,
    twins,
)
from metabridge.experiments.power_law import mean
from metabridge.experiments.result import Result, Row, UnportedExperiment, Work, environment
from metabridge.kernels import Kernel, fully_connected_kernel, residual_kernel

ID = "bridge-depth"
NETS: dict[str, Callable[[int], Kernel]] = {
    "plain": fully_connected_kernel,
    "residual": residual_kernel,
    "residual with LayerNorm": partial(residual_kernel, layer_norm=True),
}
TOLERANCE = 0.1  # of a limit in the depth, for what is measured on its way there
SAME = 1e-4  # of the gap: the most that LayerNorm may change where it changes nothing but the kernels' scale

Change = Callable[[int, int, float, float], float]  # from two depths, and a value at each


@dataclass(frozen=True)
class Scale:
    """How deep, over how many runs: each draws tasks anew."""

    runs: int
    depths: tuple[int, ...]
    training_tasks: int = 20
    test_tasks: int = 20


SCALES = {
    "quick": Scale(3, (10, 40, 160)),
    "paper": Scale(5, (5, 10, 20, 40, 80, 160, 320)),
}


class Measured(NamedTuple):
    """What one run shows of one net; eigenvalues are in units of K(x, x), and the difference in its inverse."""

    gap: float
    anil_most: float
    anil_least: float
    mtl_most: float
    mtl_least: float
    inverses: float  # ‖Θ⁻¹ − Φ_MTL⁻¹‖, the largest singular value


@dataclass(frozen=True)
class Outcome:
    """The result, how many training points there were, and by net and depth what every run showed."""

    result: Result
    points: int
    measured: dict[str, dict[int, list[Measured]]]

    def of(self, net: str, what: str) -> ByDepth:
        """Return one of the numbers, by depth, for every run."""
        return {depth: [getattr(one, what) for one in own] for depth, own in self.measured[net].items()}


def run(work: Work) -> Outcome:
    """Measure gap and spectra of every net at every depth."""
    scale, started = SCALES[work.scale], time.perf_counter()
    seeds = range(work.seed * scale.runs, (work.seed + 1) * scale.runs)
    drawn = [tasks(seed, scale.training_tasks, scale.test_tasks, work.device) for seed in seeds]
    measured = {
        name: {depth: [measure(net(depth), *each) for each in drawn] for depth in scale.depths}
        for name, net in NETS.items()
    }
    points = len(drawn[0][0]) * drawn[0][0].without_split().support_x.shape[1]
    result = Result(
        id=ID,
        scale=work.scale,
        seed=work.seed,
        settings=asdict(scale),
        environment=environment(work.device),
        seconds=time.perf_counter() - started,
        rows=(*gap_rows(measured), *kernel_rows(measured, points)),
    )
    return Outcome(result, points, measured)


def measure(kernel: Kernel, train: Episodes, test: Episodes) -> Measured:
    """Fit the twins of ANIL at λτ = 0, whose matrix is Θ, and of MTL, and look at both matrices."""
    anil, mtl = twins(kernel, train)
    unit = float(kernel.nngp(test.query_x[0, :1]))  # the same for all points, which are of the same length
    theta, phi = anil.matrix / unit, mtl.matrix / unit
    own, joint = torch.linalg.eigvalsh(theta), torch.linalg.eigvalsh(phi)
    return Measured(
        gap=gap(anil, mtl, test),
        anil_most=float(own[-1]),
        anil_least=float(own[0]),
        mtl_most=float(joint[-1]),
        mtl_least=float(joint[0]),
        inverses=float(torch.linalg.matrix_norm(torch.linalg.inv(theta) - torch.linalg.inv(phi), 2)),
    )


def gap_rows(measured: Mapping[str, Mapping[int, list[Measured]]]) -> list[Row]:
    """Give the gap at every depth, how it falls in the end, and whether LayerNorm changes it."""
    rows = []
    for name, own in measured.items():
        for depth, runs in own.items():
            size, margin = mean([one.gap for one in runs])
            rows.append(Row(f"{name}, L = {depth}", "gap", ours=size, ci95=margin))
        ours, margin = mean(_last(own, "gap", _exponent))
        rows.append(
            Row(
                f"{name}, gap, {_span(own)}",
                "exponent of L",
                published=-1.0,
                ours=ours,
                ci95=margin,
                agrees=ours <= -1 + TOLERANCE,
                note="theorem 1 bounds it from above: agrees if it is at most −0.9",
            )
        )
    pairs = zip(measured["residual"].values(), measured["residual with LayerNorm"].values())
    apart = max(abs(one.gap / other.gap - 1) for some, others in pairs for one, other in zip(some, others))
    note = f"the largest over depths and runs; agrees if it is at most {SAME:g}"
    rows.append(
        Row("LayerNorm against none", "change of the gap", published=0.0, ours=apart, agrees=apart <= SAME, note=note)
    )
    return rows


def kernel_rows(measured: Mapping[str, Mapping[int, list[Measured]]], points: int) -> list[Row]:
    """Give the growth of the extreme eigenvalues a layer, and how the inverses' difference falls, at the deepest."""
    rows = []
    for name, own in measured.items():
        pace = 1.0 if name == "plain" else 0.5
        growth = {"most": pace * (points + 3) / 4, "least": pace * 3 / 4}
        for kernel, label in (("anil", "Φ_ANIL = Θ"), ("mtl", "Φ_MTL")):
            for place, limit in growth.items():
                found = _last(own, f"{kernel}_{place}", _growth)
                where = f"{name}, {place.replace('most', 'largest')} eigenvalue of {label}, {_span(own)}"
                rows.append(_beside_limit(where, "growth a layer / K(x, x)", limit, found, pace))
        where = f"{name}, ‖Θ⁻¹ − Φ_MTL⁻¹‖, {_span(own)}"
        rows.append(_beside_limit(where, "exponent of L", -2.0, _last(own, "inverses", _exponent), 1.0))
    return rows


def _beside_limit(name: str, metric: str, limit: float, found: list[float], pace: float) -> Row:
    ours, margin = mean(found)
    note = f"agrees if within {TOLERANCE:.0%}" + ("" if pace == 1 else "; the lemma's with L/2 for L")
    agrees = abs(ours - limit) <= TOLERANCE * abs(limit)
    return Row(name, metric, published=limit, ours=ours, ci95=margin, agrees=agrees, note=note)


def _last(own: Mapping[int, list[Measured]], what: str, change: Change) -> list[float]:
    """How something changes from the last depth but one to the last, in every run."""
    first, last = list(own)[-2:]
    return [change(first, last, getattr(one, what), getattr(other, what)) for one, other in zip(own[first], own[last])]


def _exponent(first: int, last: int, before: float, after: float) -> float:
    return math.log(after / before) / math.log(last / first)


def _growth(first: int, last: int, before: float, after: float) -> float:
    return (after - before) / (last - first)


def _span(own: Mapping[int, object]) -> str:
    first, last = list(own)[-2:]
    return f"L from {first} to {last}"


def figure(outcome: Outcome, file: Path) -> None:
    """Draw the gap, the extreme eigenvalues and the difference of the inverses against depth."""
    from matplotlib.figure import Figure

    from metabridge.report import figures

    depths = list(outcome.measured["plain"])
    with figures.LIGHT.context():
        picture = Figure(figsize=(13, 5.2), layout="constrained")
        picture.suptitle(f"Kernels of ANIL and of MTL at infinite width: {intervals(outcome.result)}")
        left, middle, right = picture.subplots(1, 3)
        for axes, what, exponents in ((left, "gap", (-1, -2)), (right, "inverses", (-2,))):
            draw_means(axes, {f"ReLU net, {net}": outcome.of(net, what) for net in NETS})
            for exponent in exponents:
                draw_power(axes, outcome.of("plain", what), exponent)
        left.set(title="ANIL against MTL (theorem 1)", ylabel=GAP)
        right.set(title="inverses of their kernels (lemma 5)", ylabel="$\\|Θ^{-1} - Φ_{MTL}^{-1}\\|\\cdot K(x, x)$")
        kernels = {"anil": "$Φ_{ANIL} = Θ$", "mtl": "$Φ_{MTL}$"}
        ends = {"most": "largest", "least": "least"}
        draw_means(
            middle,
            {
                f"{ends[end]} eigenvalue of {kernel}": outcome.of("plain", f"{name}_{end}")
                for end in ends
                for name, kernel in kernels.items()
            },
        )
        for factor, style, label in (((outcome.points + 3) / 4, "--", "(Nn + 3)L/4"), (3 / 4, ":", "3L/4")):
            middle.plot(depths, [factor * depth for depth in depths], style, color="grey", label=label)
        middle.set(title=f"plain net, Nn = {outcome.points} points (lemma 4)", ylabel="eigenvalue / K(x, x)")
        for axes in (left, middle, right):
            label_depths(axes, depths)
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14))
    figures.save(picture, file)


EXPERIMENT = UnportedExperiment("bridge-depth", run, figure)
