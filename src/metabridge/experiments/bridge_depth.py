"""Theorem 1 of Wang et al. 2021 and the lemmas of its proof, for deep plain and residual ReLU networks.

Θ is the NTK, K is the NNGP kernel, and L is the depth. Φ_ANIL and Φ_MTL are the kernels of ANIL and of multi-task
learning (MTL) at infinite width. For ANIL without adaptation in training, Φ_ANIL = Θ. Kernel matrices of N tasks with n
points each are divided by K(x, x).

- Lemma 4: The largest eigenvalue of Φ_ANIL and Φ_MTL grows as (Nn + 3)L/4, all other eigenvalues as 3L/4.
- Lemma 5: ‖Θ⁻¹ − Φ_MTL⁻¹‖ decreases as 1/L².
- Theorem 1: The gap between the predictions of ANIL and MTL decreases at least as fast as 1/L.
- Corollary 1.1: Theorem 1 also holds for residual networks, with and without LayerNorm.

The output of a residual block is the sum of its input and of its residual branch, which have the same variance under He
initialization. After division by K(x, x), the kernel of the output is therefore the mean of the kernel of the input and
the kernel after a plain layer. Each block changes the kernel half as much as a plain layer, so lemma 4 holds with L/2
instead of L.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from metabridge.episodes import Episodes
from metabridge.experiments.bridge_gap import GAP_LABEL, draw_tasks, fit_anil_and_mtl, prediction_gap
from metabridge.experiments.experiment import Experiment, ExperimentOptions, Outcome
from metabridge.kernels import Kernel, fully_connected_kernel, residual_kernel
from metabridge.kernels.kernel_systems import extreme_eigenvalues
from metabridge.report.results import Row
from metabridge.theory.power_law import last_exponents, last_slopes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The networks: functions that return the kernel of a network with a given depth.
NETS: dict[str, Callable[[int], Kernel]] = {
    "plain": fully_connected_kernel,
    "residual": residual_kernel,
    "residual with LayerNorm": partial(residual_kernel, layer_norm=True),
}
TOLERANCE = 0.1  # relative tolerance at finite depth, because the limits hold for infinite depth
LAYER_NORM_TOLERANCE = 1e-4  # relative tolerance for rounding: LayerNorm rescales the kernels but keeps the gap


@dataclass(frozen=True)
class Settings:
    """Numbers of runs and tasks, and the depths. Every run draws new tasks."""

    runs: int
    depths: tuple[int, ...]
    training_tasks: int = 20
    test_tasks: int = 20


SETTINGS = {
    "quick": Settings(3, (10, 40, 160)),
    "paper": Settings(5, (5, 10, 20, 40, 80, 160, 320)),
}


class KernelMeasurements(NamedTuple):
    """The measurements of one run of one network at one depth. Kernel matrices are divided by K(x, x)."""

    gap: float
    anil_smallest_eigenvalue: float
    anil_largest_eigenvalue: float
    mtl_smallest_eigenvalue: float
    mtl_largest_eigenvalue: float
    inverse_difference: float  # ‖Θ⁻¹ − Φ_MTL⁻¹‖, spectral norm


class DepthMeasurements(NamedTuple):
    """The number Nn of training points of all tasks, and the measurements of every run, by network and depth."""

    num_points: int
    by_net: dict[str, dict[int, list[KernelMeasurements]]]

    def values(self, net: str, quantity: str) -> dict[int, list[float]]:
        """Return the values of a field of `KernelMeasurements` in all runs, by depth."""
        return {depth: [getattr(run, quantity) for run in runs] for depth, runs in self.by_net[net].items()}

    @property
    def depth_range_label(self) -> str:
        """The label of the two largest depths, between which exponents and growth are measured."""
        *_, depth_1, depth_2 = self.by_net["plain"]
        return f"L from {depth_1} to {depth_2}"


def measure(options: ExperimentOptions) -> DepthMeasurements:
    """Measure the gap and the kernel matrices of every network at every depth."""
    settings = SETTINGS[options.scale]
    tasks_by_seed = draw_tasks(
        settings.runs, settings.training_tasks, settings.test_tasks, options.seed, options.device
    )
    tasks = list(tasks_by_seed.values())
    by_net = {
        name: {depth: [measure_run(kernel(depth), train, test) for train, test in tasks] for depth in settings.depths}
        for name, kernel in NETS.items()
    }
    train = tasks[0][0]
    return DepthMeasurements(len(train) * train.without_split().support_x.shape[1], by_net)


def measure_run(kernel: Kernel, train: Episodes, test: Episodes) -> KernelMeasurements:
    """Fit MTL, and ANIL without adaptation in training. Compare their predictions and their kernel matrices."""
    anil, mtl = fit_anil_and_mtl(kernel, train)
    variance = float(kernel.nngp(test.query_x[0, :1]))  # K(x, x), the same for all points, as all have the same norm
    theta, phi_mtl = anil.matrix / variance, mtl.matrix / variance
    inverse_difference = float(torch.linalg.matrix_norm(theta.inverse() - phi_mtl.inverse(), 2))
    gap = prediction_gap(anil, mtl, test)
    return KernelMeasurements(gap, *extreme_eigenvalues(theta), *extreme_eigenvalues(phi_mtl), inverse_difference)


def rows(measurements: DepthMeasurements, _: ExperimentOptions) -> list[Row]:
    """Return the rows for theorem 1 and for the lemmas."""
    return gap_rows(measurements) + kernel_rows(measurements)


def gap_rows(measurements: DepthMeasurements) -> list[Row]:
    """Return the gap at every depth, its exponent between the two largest depths, and how LayerNorm changes it."""
    rows = []
    for net in measurements.by_net:
        gaps = measurements.values(net, "gap")
        rows += [Row.mean(f"{net}, L = {depth}", "gap", values) for depth, values in gaps.items()]
        name = f"{net}, gap, {measurements.depth_range_label}"
        row = Row.mean(name, "exponent of L", last_exponents(gaps), published=-1.0)
        note = "theorem 1 is an upper bound: agrees if at most −0.9"
        rows.append(replace(row, agrees=row.ours <= -1 + TOLERANCE, note=note))
    gaps_without, gaps_with = (measurements.values(net, "gap") for net in ("residual", "residual with LayerNorm"))
    pairs = (pair for depth in gaps_without for pair in zip(gaps_without[depth], gaps_with[depth]))
    largest_change = max(abs(gap_without / gap_with - 1) for gap_without, gap_with in pairs)
    rows.append(
        Row(
            "with and without LayerNorm",
            "relative change of the gap",
            published=0.0,
            ours=largest_change,
            agrees=largest_change <= LAYER_NORM_TOLERANCE,
            note=f"the largest over depths and runs; agrees if at most {LAYER_NORM_TOLERANCE:g}",
        )
    )
    return rows


def kernel_rows(measurements: DepthMeasurements) -> list[Row]:
    """Return how the extreme eigenvalues and ‖Θ⁻¹ − Φ_MTL⁻¹‖ change between the two largest depths."""
    rows = []
    for net in measurements.by_net:
        depth_factor = 1.0 if net == "plain" else 0.5  # for residual networks, lemma 4 holds with L/2
        limits = {"largest": depth_factor * (measurements.num_points + 3) / 4, "smallest": depth_factor * 3 / 4}
        agreement = f"agrees if within {TOLERANCE:.0%}"
        note = agreement if depth_factor == 1 else f"{agreement}; lemma 4 with L/2 instead of L"
        for kernel, label in (("anil", "Φ_ANIL = Θ"), ("mtl", "Φ_MTL")):
            for extreme, limit in limits.items():
                name = f"{net}, {extreme} eigenvalue of {label}, {measurements.depth_range_label}"
                growth = last_slopes(measurements.values(net, f"{kernel}_{extreme}_eigenvalue"))
                rows.append(Row.mean(name, "growth per layer / K(x, x)", growth).with_published(limit, TOLERANCE, note))
        name = f"{net}, ‖Θ⁻¹ − Φ_MTL⁻¹‖, {measurements.depth_range_label}"
        exponents = last_exponents(measurements.values(net, "inverse_difference"))
        rows.append(Row.mean(name, "exponent of L", exponents).with_published(-2.0, TOLERANCE, agreement))
    return rows


def figure(outcome: Outcome[DepthMeasurements]) -> Figure:
    """Draw the gap, the extreme eigenvalues and ‖Θ⁻¹ − Φ_MTL⁻¹‖ against depth."""
    from metabridge.report.result_figures import depth_axes, legends_below, plot_means, plot_power, subplots

    measurements, num_runs = outcome.data, outcome.result.settings["runs"]
    depths = list(measurements.by_net["plain"])
    title = f"Kernels of ANIL and MTL at infinite width: means of {num_runs} runs, 95 % intervals"
    figure, (left, middle, right) = subplots(title, 1, 3, (13, 5.2))
    for axes, quantity, exponents in ((left, "gap", (-1, -2)), (right, "inverse_difference", (-2,))):
        plot_means(axes, {f"ReLU net, {net}": measurements.values(net, quantity) for net in NETS})
        for exponent in exponents:
            plot_power(axes, measurements.values("plain", quantity), exponent)
    left.set(title="gap between ANIL and MTL (theorem 1)", ylabel=GAP_LABEL)
    right.set(title="difference of the inverse kernels (lemma 5)", ylabel="$\\|Θ^{-1} - Φ_{MTL}^{-1}\\|\\cdot K(x, x)$")
    kernels = {"anil": "$Φ_{ANIL} = Θ$", "mtl": "$Φ_{MTL}$"}
    curves = {
        f"{extreme} eigenvalue of {label}": measurements.values("plain", f"{kernel}_{extreme}_eigenvalue")
        for extreme in ("largest", "smallest")
        for kernel, label in kernels.items()
    }
    plot_means(middle, curves)
    for factor, style, label in (((measurements.num_points + 3) / 4, "--", "(Nn + 3)L/4"), (3 / 4, ":", "3L/4")):
        middle.plot(depths, [factor * depth for depth in depths], style, color="gray", label=label)
    title = f"eigenvalues, plain net, Nn = {measurements.num_points} points (lemma 4)"
    middle.set(title=title, ylabel="eigenvalue / K(x, x)")
    for axes in (left, middle, right):
        depth_axes(axes, depths)
    legends_below((left, middle, right))
    return figure


EXPERIMENT = Experiment("bridge-depth", measure, rows, figure, SETTINGS)
