"""The lemmas behind theorem 1 of Wang et al. 2021, at depths where their limits show, for plain and residual ReLU nets.

Lemma 4: divided by K(x, x), the kernels over Nn training points have one eigenvalue that grows as (Nn + 3)L/4 with the
depth L; all others grow as 3L/4. Lemma 5: ‖Θ⁻¹ − Φ_MTL⁻¹‖ decreases as 1/L². Theorem 1: hence the gap between ANIL and
MTL decreases at least as 1/L. Corollary 1.1: the same holds for residual nets, with and without LayerNorm.

A residual block with He's variance doubles the variance of its input, so it changes the kernels half as much as a plain
layer: for residual nets lemma 4 holds with L/2 instead of L.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from metabridge.episodes import Episodes
from metabridge.experiments.bridge_gap import GAP_LABEL, draw_tasks, fit_anil_and_mtl, prediction_gap
from metabridge.experiments.experiment import Experiment, ExperimentOptions, Outcome
from metabridge.intervals import mean_interval
from metabridge.kernels import Kernel, fully_connected_kernel, residual_kernel
from metabridge.report.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NETS: dict[str, Callable[[int], Kernel]] = {
    "plain": fully_connected_kernel,
    "residual": residual_kernel,
    "residual with LayerNorm": partial(residual_kernel, layer_norm=True),
}
TOLERANCE = 0.1  # relative, for limits that hold as the depth goes to infinity
LAYER_NORM_TOLERANCE = 1e-4  # relative: LayerNorm rescales the kernels, which does not change the gap


@dataclass(frozen=True)
class Settings:
    """The depths. Every run draws new tasks."""

    runs: int
    depths: tuple[int, ...]
    training_tasks: int = 20
    test_tasks: int = 20


SETTINGS = {
    "quick": Settings(3, (10, 40, 160)),
    "paper": Settings(5, (5, 10, 20, 40, 80, 160, 320)),
}


class Run(NamedTuple):
    """One run of one net: eigenvalues divided by K(x, x), and the difference of the inverses multiplied by it."""

    gap: float
    anil_largest: float
    anil_smallest: float
    mtl_largest: float
    mtl_smallest: float
    inverses: float  # ‖Θ⁻¹ − Φ_MTL⁻¹‖, the largest singular value


class Spectra(NamedTuple):
    """The number Nn of training points, and all runs by net and depth."""

    points: int
    runs: dict[str, dict[int, list[Run]]]

    def values(self, net: str, quantity: str) -> dict[int, list[float]]:
        """Return a quantity of all runs, by depth."""
        return {depth: [getattr(run, quantity) for run in runs] for depth, runs in self.runs[net].items()}


def measure(options: ExperimentOptions) -> Spectra:
    """Measure the gap and the spectra of every net at every depth."""
    settings = SETTINGS[options.scale]
    drawn = draw_tasks(settings.runs, settings.training_tasks, settings.test_tasks, options.seed, options.device)
    tasks = list(drawn.values())
    runs = {
        name: {depth: [measure_run(net(depth), train, test) for train, test in tasks] for depth in settings.depths}
        for name, net in NETS.items()
    }
    train = tasks[0][0]
    return Spectra(len(train) * train.without_split().support_x.shape[1], runs)


def measure_run(kernel: Kernel, train: Episodes, test: Episodes) -> Run:
    """Fit ANIL with λτ = 0, whose kernel matrix is Θ, and MTL, and compare their predictions and matrices."""
    anil, mtl = fit_anil_and_mtl(kernel, train)
    unit = float(kernel.nngp(test.query_x[0, :1]))  # the same for all points, since all have the same length
    theta, phi = anil.matrix / unit, mtl.matrix / unit
    anil_spectrum, mtl_spectrum = torch.linalg.eigvalsh(theta), torch.linalg.eigvalsh(phi)
    return Run(
        gap=prediction_gap(anil, mtl, test),
        anil_largest=float(anil_spectrum[-1]),
        anil_smallest=float(anil_spectrum[0]),
        mtl_largest=float(mtl_spectrum[-1]),
        mtl_smallest=float(mtl_spectrum[0]),
        inverses=float(torch.linalg.matrix_norm(torch.linalg.inv(theta) - torch.linalg.inv(phi), 2)),
    )


def rows(spectra: Spectra, _: ExperimentOptions) -> list[Row]:
    """Return the rows of theorem 1 and of the lemmas."""
    return gap_rows(spectra) + kernel_rows(spectra)


def gap_rows(spectra: Spectra) -> list[Row]:
    """Return the gap at every depth, the exponent of its decrease at the end, and the effect of LayerNorm on it."""
    rows = []
    for net in spectra.runs:
        gaps = spectra.values(net, "gap")
        for depth, values in gaps.items():
            size, margin = mean_interval(values)
            rows.append(Row(f"{net}, L = {depth}", "gap", ours=size, ci95=margin))
        ours, margin = mean_interval(last_exponents(gaps))
        rows.append(
            Row(
                f"{net}, gap, {last_interval(gaps)}",
                "exponent of L",
                published=-1.0,
                ours=ours,
                ci95=margin,
                agrees=ours <= -1 + TOLERANCE,
                note="theorem 1 is an upper bound: agrees if at most −0.9",
            )
        )
    without, with_norm = (spectra.values(net, "gap") for net in ("residual", "residual with LayerNorm"))
    pairs = (pair for depth in without for pair in zip(without[depth], with_norm[depth]))
    change = max(abs(gap / normed - 1) for gap, normed in pairs)
    rows.append(
        Row(
            "with and without LayerNorm",
            "relative change of the gap",
            published=0.0,
            ours=change,
            agrees=change <= LAYER_NORM_TOLERANCE,
            note=f"the largest over depths and runs; agrees if at most {LAYER_NORM_TOLERANCE:g}",
        )
    )
    return rows


def kernel_rows(spectra: Spectra) -> list[Row]:
    """Return how the extreme eigenvalues and the difference of the inverses change between the two largest depths."""
    rows = []
    for net in spectra.runs:
        depth_factor = 1.0 if net == "plain" else 0.5
        limits = {"largest": depth_factor * (spectra.points + 3) / 4, "smallest": depth_factor * 3 / 4}
        for kernel, label in (("anil", "Φ_ANIL = Θ"), ("mtl", "Φ_MTL")):
            for end, limit in limits.items():
                values = spectra.values(net, f"{kernel}_{end}")
                name = f"{net}, {end} eigenvalue of {label}, {last_interval(values)}"
                growth = growth_per_layer(values)
                rows.append(_limit_row(name, "growth per layer / K(x, x)", limit, growth, depth_factor))
        values = spectra.values(net, "inverses")
        name = f"{net}, ‖Θ⁻¹ − Φ_MTL⁻¹‖, {last_interval(values)}"
        rows.append(_limit_row(name, "exponent of L", -2.0, last_exponents(values), 1.0))
    return rows


def _limit_row(name: str, metric: str, limit: float, values: list[float], depth_factor: float) -> Row:
    ours, margin = mean_interval(values)
    note = f"agrees if within {TOLERANCE:.0%}" + ("" if depth_factor == 1 else "; lemma 4 with L/2 instead of L")
    agrees = abs(ours - limit) <= TOLERANCE * abs(limit)
    return Row(name, metric, published=limit, ours=ours, ci95=margin, agrees=agrees, note=note)


def last_exponents(values: Mapping[int, list[float]]) -> list[float]:
    """Return d log(value) / d log(L) between the two largest depths, for every run."""
    (first, before), (last, after) = list(values.items())[-2:]
    return [math.log(new / old) / math.log(last / first) for old, new in zip(before, after)]


def growth_per_layer(values: Mapping[int, list[float]]) -> list[float]:
    """Return the growth per layer between the two largest depths, for every run."""
    (first, before), (last, after) = list(values.items())[-2:]
    return [(new - old) / (last - first) for old, new in zip(before, after)]


def last_interval(values: Mapping[int, object]) -> str:
    """Name the two largest depths."""
    first, last = list(values)[-2:]
    return f"L from {first} to {last}"


def figure(outcome: Outcome[Spectra]) -> Figure:
    """Draw the gap, the extreme eigenvalues and the difference of the inverses against depth."""
    from matplotlib.figure import Figure

    from metabridge.report.result_figures import depth_axes, legends_below, plot_means, plot_power

    spectra, runs = outcome.data, outcome.result.settings["runs"]
    depths = list(spectra.runs["plain"])
    page = Figure(figsize=(13, 5.2), layout="constrained")
    page.suptitle(f"Kernels of ANIL and MTL at infinite width: means of {runs} runs, 95 % intervals")
    left, middle, right = page.subplots(1, 3)
    for axes, quantity, exponents in ((left, "gap", (-1, -2)), (right, "inverses", (-2,))):
        plot_means(axes, {f"ReLU net, {net}": spectra.values(net, quantity) for net in NETS})
        for exponent in exponents:
            plot_power(axes, spectra.values("plain", quantity), exponent)
    left.set(title="ANIL and MTL (theorem 1)", ylabel=GAP_LABEL)
    right.set(title="inverses of their kernels (lemma 5)", ylabel="$\\|Θ^{-1} - Φ_{MTL}^{-1}\\|\\cdot K(x, x)$")
    kernels = {"anil": "$Φ_{ANIL} = Θ$", "mtl": "$Φ_{MTL}$"}
    curves = {
        f"{end} eigenvalue of {label}": spectra.values("plain", f"{kernel}_{end}")
        for end in ("largest", "smallest")
        for kernel, label in kernels.items()
    }
    plot_means(middle, curves)
    for factor, style, label in (((spectra.points + 3) / 4, "--", "(Nn + 3)L/4"), (3 / 4, ":", "3L/4")):
        middle.plot(depths, [factor * depth for depth in depths], style, color="gray", label=label)
    middle.set(title=f"plain net, Nn = {spectra.points} points (lemma 4)", ylabel="eigenvalue / K(x, x)")
    for axes in (left, middle, right):
        depth_axes(axes, depths)
    legends_below((left, middle, right))
    return page


EXPERIMENT = Experiment("bridge-depth", measure, rows, figure, SETTINGS)
