"""Collins et al. 2022, figure 3: the ratio of the excess risks of NAL and MAML depends on R²/r_H.

NAL is non-adaptive learning. The excess risk 𝓔_m is the loss after a gradient step on m samples, minus the noise floor.
R is the distance between the centers of hard and easy tasks, r_H and r_E are the dispersions of hard and easy tasks.
The inputs have d = 10 dimensions and the variances ρ_H = 0.1 in hard and ρ_E = 0.9 in easy tasks. The gradient step has
500 samples, at test time (m) and in training (n₂). In one setting, the hard tasks are far apart (R²/r_H = 0.5 and
R²/r_E = 10). In the other, the easy tasks are far apart (R²/r_H = 10 and R²/r_E = 0.5). The last panel of the figure
shows how the ratio approaches 1 + R²/r_H, its limit for ρ_H/ρ_E → 0 and m → ∞ (corollary 2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from metabridge.environments.linear_tasks import HardEasy, LinearTasks
from metabridge.experiments.experiment import Experiment, ExperimentOptions, Outcome
from metabridge.experiments.landscape_linear import (
    LABELS,
    SgdSettings,
    compare_with_theory,
    learners,
    train_and_test,
)
from metabridge.report.results import Row
from metabridge.theory.landscape import SolutionName, asymptotic_ratio, hard_easy_risks, noise_floor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FAR, CLOSE = "hard tasks far apart", "hard tasks close together"
SQUARED_RATIOS = {FAR: (0.5, 10.0), CLOSE: (10.0, 0.5)}  # R²/r_H and R²/r_E
M, RHO_HARD, RHO_EASY = 500, 0.1, 0.9
NOISE = 0.01  # variance of the noise on targets
ALPHA = 1 / RHO_EASY  # step size α
LIMIT_SAMPLES = tuple(10**power for power in range(2, 9))  # m of the last panel
LIMIT_HARDNESS = (0.1, 0.01, 0.001)  # ρ_H/ρ_E of the last panel


@dataclass(frozen=True)
class Settings:
    """The settings of SGD, and the distances R."""

    sgd: SgdSettings
    distances: tuple[float, ...]


SETTINGS = {
    "quick": Settings(SgdSettings(iterations=2500, test_tasks=500, runs=5), (1.0, 3.0, 5.0)),
    "paper": Settings(SgdSettings(), tuple(i / 2 for i in range(1, 11))),
}

Risks = dict[str, dict[float, dict[SolutionName, Tensor]]]  # excess risk 𝓔_m of each run, by setting, R and learner


def tasks_at(setting: str, R: float, hardness: float = RHO_HARD / RHO_EASY) -> HardEasy:
    """Return the tasks of a setting (`FAR` or `CLOSE`) at distance R, with `hardness` = ρ_H/ρ_E."""
    hard_ratio, easy_ratio = SQUARED_RATIOS[setting]
    return HardEasy(hardness * RHO_EASY, RHO_EASY, R=R, r_hard=R**2 / hard_ratio, r_easy=R**2 / easy_ratio, noise=NOISE)


def measure(options: ExperimentOptions) -> Risks:
    """Train NAL and MAML by SGD at each distance, and return their excess risks."""
    settings, generator = SETTINGS[options.scale], torch.Generator().manual_seed(options.seed)
    risks: Risks = {setting: {} for setting in SQUARED_RATIOS}
    for setting in SQUARED_RATIOS:
        for R in settings.distances:
            tasks = LinearTasks(tasks_at(setting, R).landscape, M, settings.sgd.queries)
            floor = noise_floor(tasks.landscape, ALPHA, M)
            by_learner = train_and_test(tasks, learners(ALPHA, M), ALPHA, settings.sgd, generator)
            risks[setting][R] = {name: result.test_loss - floor for name, result in by_learner.items()}
    return risks


def rows(risks: Risks, _: ExperimentOptions) -> Iterator[Row]:
    """Compare the excess risks and their ratios with closed forms, and a closed form with the limit of corollary 2."""
    for setting, by_distance in risks.items():
        for R, measured in by_distance.items():
            theory = hard_easy_risks(tasks_at(setting, R), ALPHA, M)
            for name, values in measured.items():
                yield compare_with_theory(f"{LABELS[name]}, {setting}, R = {R:g}", "𝓔_m", values, getattr(theory, name))
            ratios = measured["nal"] / measured["maml"]
            yield compare_with_theory(f"NAL / MAML, {setting}, R = {R:g}", "ratio of 𝓔_m", ratios, theory.ratio)
    for setting in SQUARED_RATIOS:
        tasks, m = tasks_at(setting, 1.0, LIMIT_HARDNESS[-1]), LIMIT_SAMPLES[-1]
        ratio, limit = hard_easy_risks(tasks, ALPHA, m).ratio, asymptotic_ratio(tasks)
        note = f"ours: closed form at ρ_H/ρ_E = {LIMIT_HARDNESS[-1]:g}, m = {m}; published: 1 + R²/r_H"
        agrees = abs(ratio / limit - 1) < 0.02
        row_name = f"limit of NAL / MAML, {setting}"
        yield Row(row_name, "ratio of 𝓔_m", published=limit, ours=ratio, agrees=agrees, note=note)


def figure(outcome: Outcome[Risks]) -> Figure:
    """Draw the risks as functions of R for both settings, their ratios, and how the ratio approaches its limit."""
    from metabridge.report import figures, result_figures

    title = "Closed forms, and means over runs of SGD with 95 % intervals"
    figure, (*left, middle, right) = result_figures.subplots(title, 1, 4, (15, 5))
    distances = [i / 20 for i in range(1, 101)]
    for axes, (setting, by_distance) in zip(left, outcome.data.items()):
        for (name, label), color in zip(LABELS.items(), (figures.COLORS[1], figures.COLORS[0])):
            theory = [getattr(hard_easy_risks(tasks_at(setting, R), ALPHA, M), name) for R in distances]
            axes.plot(distances, theory, color=color, label=f"{label}, closed form")
            points = {R: measured[name] for R, measured in by_distance.items()}
            result_figures.draw_error_bars(axes, points, color, f"{label}, SGD")
        axes.set(xlabel="R, distance between hard and easy tasks")
        axes.set(ylabel="risk above the noise floor, $\\mathcal{E}_m$")
        hard_ratio, easy_ratio = SQUARED_RATIOS[setting]
        axes.set(title=f"{setting}\n$R^2/r_H$ = {hard_ratio:g}, $R^2/r_E$ = {easy_ratio:g}", ylim=(0, None))
    for (setting, by_distance), color, marker in zip(outcome.data.items(), figures.COLORS[3:1:-1], "sD"):
        ratios = {R: measured["nal"] / measured["maml"] for R, measured in by_distance.items()}
        middle.axhline(hard_easy_risks(tasks_at(setting, 1.0), ALPHA, M).ratio, color=color)
        result_figures.draw_error_bars(middle, ratios, color, f"{setting}, SGD", marker)
    middle.set(xlabel="R, distance between hard and easy tasks")
    middle.set(ylabel="$\\mathcal{E}_m$(NAL) / $\\mathcal{E}_m$(MAML)")
    middle.set(title=f"ratio of the risks of NAL and MAML\nm = {M}", ylim=(1, None))
    for hardness, line_style in zip(LIMIT_HARDNESS, figures.LINE_STYLES[::-1]):
        limit_ratios = [hard_easy_risks(tasks_at(CLOSE, 1.0, hardness), ALPHA, m).ratio for m in LIMIT_SAMPLES]
        right.plot(LIMIT_SAMPLES, limit_ratios, line_style, color=figures.COLORS[2], label=f"$ρ_H/ρ_E$ = {hardness:g}")
    right.axhline(asymptotic_ratio(tasks_at(CLOSE, 1.0)), color="black", linewidth=1, label="1 + $R^2/r_H$")
    title = f"{CLOSE},\nratio for growing m"
    right.set(xscale="log", xlabel="m, samples of the step", ylim=(1, None), title=title)
    for axes, columns in zip((*left, middle, right), (2, 2, 1, 2)):
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=columns)
    return figure


CONSTANTS = {"m": M, "alpha": ALPHA, "rho_hard": RHO_HARD, "rho_easy": RHO_EASY, "noise": NOISE}
EXPERIMENT = Experiment("landscape-fig3", measure, rows, figure, SETTINGS, CONSTANTS, on_cpu=True)
