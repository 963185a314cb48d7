"""Collins et al. 2022, figure 7: solutions and risks of NAL and MAML in logistic regression.

As in linear regression, the solution of MAML is closer to the hard task than that of non-adaptive learning (NAL). The
two tasks are those of figure 2 with binary labels instead of regression targets. The gradient step has 500 samples, at
test time (m) and in training (n₂). The paper does not give the step size α. For linear regression, the paper uses the
inverse of the smoothness of the easy task, which is the largest curvature of its loss. For logistic regression, this
inverse is 4/ρ_E, because the second derivative of the logistic loss is at most ¼. α = 1/ρ_E is included as well; the
inputs of the easy task have the variance ρ_E = 1. The risk above the floor is F_m(w), the loss after a step on m
samples, minus the mean loss of the tasks at their solutions w*.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from metabridge.environments.linear_tasks import Landscape, LogisticTasks, TaskGroup
from metabridge.experiments.experiment import Experiment, ExperimentOptions, Outcome
from metabridge.experiments.landscape_linear import (
    LABELS,
    CoordinateAndRisk,
    SgdResults,
    SgdSettings,
    draw_sgd_results,
    train_and_test,
)
from metabridge.report.results import Row
from metabridge.theory.landscape import SolutionName
from metabridge.theory.linear_sgd import LinearLearner, label_entropy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

M, DIMENSION = 500, 10
ALPHAS = {4.0: "inverse of the easy task's smoothness", 1.0: "$1/ρ_E$"}
LR = 0.05  # of SGD, for both learners; the paper gives none for this figure
CLAIM_ALPHA = 4.0  # the α for which the paper's claims are tested
ALL_RHO_HARD = tuple(i / 10 for i in range(1, 11))


@dataclass(frozen=True)
class Settings:
    """The settings of SGD, and the values of ρ_H."""

    sgd: SgdSettings
    rho_hard: tuple[float, ...]  # ρ_H, variance of the hard task's inputs


SETTINGS = {
    "quick": Settings(SgdSettings(iterations=2500, test_tasks=500, runs=5), ALL_RHO_HARD[::3]),
    "paper": Settings(SgdSettings(), ALL_RHO_HARD),
}


def landscape(rho: float) -> Landscape:
    """Return the landscape of the hard task, with inputs of variance `rho`, and the easy task."""
    hard = TaskGroup(covariance=rho, center=1.0, probability=0.5)
    easy = TaskGroup(covariance=1.0, center=-1.0, probability=0.5)
    return Landscape((hard, easy), DIMENSION)


def measure(options: ExperimentOptions) -> SgdResults:
    """Train NAL and MAML by SGD for each α and ρ_H, and return their first coordinates and excess risks."""
    settings, generator = SETTINGS[options.scale], torch.Generator().manual_seed(options.seed)
    results: SgdResults = {}
    for alpha in ALPHAS:
        learners: dict[SolutionName, LinearLearner] = {"nal": LinearLearner(LR), "maml": LinearLearner(LR, alpha)}
        for rho in settings.rho_hard:
            tasks = LogisticTasks(landscape(rho), M, settings.sgd.queries)
            floor = label_entropy(tasks.landscape)
            by_learner = train_and_test(tasks, learners, alpha, settings.sgd, generator)
            results[alpha, rho] = {
                name: CoordinateAndRisk(w[:, 0], loss - floor) for name, (w, loss) in by_learner.items()
            }
    return results


def rows(results: SgdResults, _: ExperimentOptions) -> Iterator[Row]:
    """Yield rows of the results of SGD and of the differences between the learners.

    A difference agrees with the paper if its whole interval is above 0.
    """
    for (alpha, rho), measured in results.items():
        parameters = f"α = {alpha:g}, ρ_H = {rho:g}"
        nal, maml = measured["nal"], measured["maml"]
        for name, result in measured.items():
            yield Row.mean(f"{LABELS[name]}, {parameters}", "first coordinate", result.coordinate.tolist())
            yield Row.mean(f"{LABELS[name]}, {parameters}", "risk above the floor", result.risk.tolist())
        for metric, difference, claim in (
            ("first coordinate, MAML − NAL", maml.coordinate - nal.coordinate, "MAML starts closer to the hard task"),
            ("risk, NAL − MAML", nal.risk - maml.risk, "MAML has the smaller risk for appropriate ρ_H"),
        ):
            note = f"the paper claims: {claim}"
            row = Row.mean(f"MAML against NAL, {parameters}", metric, difference.tolist(), note=note)
            assert row.ci95 is not None
            is_claimed = rho < 1 and alpha == CLAIM_ALPHA  # with ρ_H = 1, both tasks are equally hard
            yield replace(row, agrees=row.ours > row.ci95 if is_claimed else None)


def figure(outcome: Outcome[SgdResults]) -> Figure:
    """Draw first coordinates in the first row and risks in the second, one column per α."""
    columns = {alpha: f"α = {alpha:g}, {meaning}" for alpha, meaning in ALPHAS.items()}
    title = (
        f"Logistic regression on one hard and one easy task, m = $n_2$ = {M}:\n"
        "means over runs of SGD with 95 % intervals"
    )
    return draw_sgd_results(outcome.data, columns, title, width=8.4)


CONSTANTS = {"m": M, "alphas": tuple(ALPHAS), "lr": LR, "dimension": DIMENSION}
EXPERIMENT = Experiment("landscape-fig7", measure, rows, figure, SETTINGS, CONSTANTS, on_cpu=True)
