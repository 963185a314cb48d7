"""Collins et al. 2022, figures 2 and 8: solutions and risks of NAL and MAML for one hard and one easy task.

The solution of MAML is closer to the hard task than that of non-adaptive learning (NAL). The excess risk 𝓔_m is the
loss after a gradient step on m samples, minus the noise floor. If m is large enough, that of MAML is smaller than that
of NAL. In training, MAML has as many samples for its inner step, n₂ = m. The hard task has the solution w* = 1 and
inputs with the covariance Σ = ρ_H·I. The easy task has w* = −1 and Σ = I. Both have 10 dimensions. The results of SGD
are compared with closed forms: the solutions with eq. 8, and the excess risks with eq. 6 and 7, which equal eq. 9 up to
the factor ‖w₁* − w₂*‖²/4. The caption of figure 2 has m = 100, the text m = 500; both are included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from metabridge.environments.linear_tasks import Landscape, LinearTasks, TaskGroup
from metabridge.experiments.experiment import Experiment, ExperimentOptions, Outcome
from metabridge.experiments.landscape_linear import (
    LABELS,
    CoordinateAndRisk,
    SgdResults,
    SgdSettings,
    compare_with_theory,
    draw_sgd_results,
    learners,
    train_and_test,
)
from metabridge.report.results import Row
from metabridge.theory.landscape import SolutionName, noise_floor, risk_above_floor, solution

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALPHA, NOISE, DIMENSION = 1.0, 0.01, 10  # step size α, variance of the noise on targets, dimension of the inputs
ALL_RHO_HARD = tuple(i / 10 for i in range(1, 11))


@dataclass(frozen=True)
class Settings:
    """The settings of SGD, and the values of m and ρ_H."""

    sgd: SgdSettings
    samples: tuple[int, ...]  # m = n₂
    rho_hard: tuple[float, ...]  # ρ_H, variance of the hard task's inputs


SETTINGS = {
    "quick": Settings(SgdSettings(test_tasks=500, runs=5), (500, 50), ALL_RHO_HARD[::3]),
    "paper": Settings(SgdSettings(), (2000, 500, 100, 50), ALL_RHO_HARD),
}


def landscape(rho: float) -> Landscape:
    """Return the landscape of the hard task, with inputs of variance `rho`, and the easy task."""
    hard = TaskGroup(covariance=rho, center=1.0, noise=NOISE, probability=0.5)
    easy = TaskGroup(covariance=1.0, center=-1.0, noise=NOISE, probability=0.5)
    return Landscape((hard, easy), DIMENSION)


def measure(options: ExperimentOptions) -> SgdResults:
    """Train NAL and MAML by SGD for each m and ρ_H, and return their first coordinates and excess risks."""
    settings, generator = SETTINGS[options.scale], torch.Generator().manual_seed(options.seed)
    results: SgdResults = {}
    for m in settings.samples:
        for rho in settings.rho_hard:
            tasks = LinearTasks(landscape(rho), m, settings.sgd.queries)
            floor = noise_floor(tasks.landscape, ALPHA, m)
            by_learner = train_and_test(tasks, learners(ALPHA, m), ALPHA, settings.sgd, generator)
            results[m, rho] = {name: CoordinateAndRisk(w[:, 0], loss - floor) for name, (w, loss) in by_learner.items()}
    return results


def closed_form(name: SolutionName, rho: float, m: float) -> tuple[float, float]:
    """Return the first coordinate of a solution and its excess risk 𝓔_m."""
    w = solution(name, landscape(rho), ALPHA, m)
    return float(w[0]), float(risk_above_floor(landscape(rho), w, ALPHA, m))


def rows(results: SgdResults, _: ExperimentOptions) -> Iterator[Row]:
    """Compare each result of SGD with the closed form."""
    for (m, rho), measured in results.items():
        for name, result in measured.items():
            coordinate, risk = closed_form(name, rho, m)
            label = f"{LABELS[name]}, m = {m}, ρ_H = {rho:g}"
            yield compare_with_theory(label, "first coordinate", result.coordinate, coordinate)
            yield compare_with_theory(label, "𝓔_m", result.risk, risk)


def figure(outcome: Outcome[SgdResults]) -> Figure:
    """Draw first coordinates in the first row and risks in the second, one column per m."""
    columns = {m: f"m = $n_2$ = {m}" for m in sorted({m for m, _ in outcome.data}, reverse=True)}
    title = "One hard and one easy task: closed forms, and means over runs of SGD with 95 % intervals"
    return draw_sgd_results(outcome.data, columns, title, width=2 + 3.2 * len(columns), closed_form=closed_form)


CONSTANTS = {"alpha": ALPHA, "noise": NOISE, "dimension": DIMENSION}
EXPERIMENT = Experiment("landscape-fig2", measure, rows, figure, SETTINGS, CONSTANTS, on_cpu=True)
