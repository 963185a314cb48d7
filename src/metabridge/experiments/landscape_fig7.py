"""Collins et al. 2022, figure 7: logistic regression is like linear regression; MAML starts closer to the hard task.

The two tasks of figure 2 with labels instead of values, m = n₂ = 500. The paper does not print its α. The inverse of
the easy task's smoothness, its choice for linear regression, is 4/ρ_E here, since the logistic loss has curvature ¼ at
most; α = 1/ρ_E is included as well. The risk is F_m(w) minus the loss at each task's w*.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from metabridge.environments.linear_tasks import Landscape, LogisticTasks, TaskGroup
from metabridge.experiments.experiment import Experiment, ExperimentOptions, Outcome
from metabridge.experiments.landscape_linear import (
    LABELS,
    CoordinateAndRisk,
    Ends,
    SgdSettings,
    draw_ends,
    train_and_test,
)
from metabridge.intervals import mean_interval
from metabridge.report.results import Row
from metabridge.theory.landscape import SolutionName
from metabridge.theory.linear_sgd import LinearLearner

if TYPE_CHECKING:
    from matplotlib.figure import Figure

M, DIMENSION = 500, 10
ALPHAS = {4.0: "inverse of the easy task's smoothness", 1.0: "$1/ρ_E$"}
LR = 0.05  # of SGD, for both learners; the paper prints none for this figure
PAPER_ALPHA = 4.0  # the α that the paper's claims are tested with
ALL_HARDNESS = tuple(i / 10 for i in range(1, 11))


@dataclass(frozen=True)
class Settings:
    """How SGD runs, and for which ρ_H."""

    sgd: SgdSettings
    hardness: tuple[float, ...]  # ρ_H


SETTINGS = {
    "quick": Settings(SgdSettings(iterations=2500, test_tasks=500, runs=5), ALL_HARDNESS[::3]),
    "paper": Settings(SgdSettings(), ALL_HARDNESS),
}


def landscape(rho: float) -> Landscape:
    """Return the hard task and the easy task."""
    return Landscape((TaskGroup(rho, 1.0, probability=0.5), TaskGroup(1.0, -1.0, probability=0.5)), DIMENSION)


def label_entropy(landscape: Landscape) -> float:
    """Return the expected loss at each task's w*, the entropy of its labels, for groups of one task.

    ⟨w*, x⟩ is normal with variance w*ᵀΣw*, so the mean over x is a one-dimensional integral, here by Gauss–Hermite
    quadrature with 200 nodes.
    """
    law = landscape.distribution
    variance = torch.einsum("gi,gij,gj->g", law.centre, law.covariance, law.centre)
    nodes, weights = (torch.from_numpy(values) for values in np.polynomial.hermite_e.hermegauss(200))
    logits = variance.sqrt()[:, None] * nodes
    entropy = torch.nn.functional.softplus(logits) - logits.sigmoid() * logits
    return float(law.probability @ (entropy @ weights)) / math.sqrt(2 * math.pi)


def measure(options: ExperimentOptions) -> Ends:
    """Train NAL and MAML by SGD for each α and ρ_H, and measure their risks."""
    settings, generator = SETTINGS[options.scale], torch.Generator().manual_seed(options.seed)
    ends: Ends = {}
    for alpha in ALPHAS:
        learners: dict[SolutionName, LinearLearner] = {
            "nal": LinearLearner(LR),
            "maml": LinearLearner(LR, alpha),
        }
        for rho in settings.hardness:
            tasks = LogisticTasks(landscape(rho), M, settings.sgd.queries)
            floor = label_entropy(tasks.landscape)
            trained = train_and_test(tasks, learners, alpha, settings.sgd, generator)
            ends[alpha, rho] = {name: CoordinateAndRisk(w[:, 0], loss - floor) for name, (w, loss) in trained.items()}
    return ends


def rows(ends: Ends, _: ExperimentOptions) -> Iterator[Row]:
    """Give each end of SGD, and the differences of the learners, which agree if their intervals are above 0."""
    for (alpha, rho), measured in ends.items():
        parameters = f"α = {alpha:g}, ρ_H = {rho:g}"
        nal, maml = measured["nal"], measured["maml"]
        values = {
            (f"{LABELS[name]}, {parameters}", metric): data
            for name, end in measured.items()
            for metric, data in (("first coordinate", end.coordinate), ("risk above the floor", end.risk))
        }
        for (name, metric), data in values.items():
            mean, margin = mean_interval(data.tolist())
            yield Row(name, metric, ours=mean, ci95=margin)
        for metric, difference, claim in (
            ("first coordinate, MAML − NAL", maml.coordinate - nal.coordinate, "MAML starts closer to the hard task"),
            ("risk, NAL − MAML", nal.risk - maml.risk, "MAML has the smaller risk for appropriate ρ_H"),
        ):
            mean, margin = mean_interval(difference.tolist())
            agrees = mean > margin if rho < 1 and alpha == PAPER_ALPHA else None
            note = f"the paper: {claim}"
            yield Row(f"MAML against NAL, {parameters}", metric, ours=mean, ci95=margin, agrees=agrees, note=note)


def figure(outcome: Outcome[Ends]) -> Figure:
    """Draw first coordinates above and risks below, one column per α."""
    columns = {alpha: f"α = {alpha:g}, {meaning}" for alpha, meaning in ALPHAS.items()}
    title = f"Logistic regression on one hard and one easy task, m = $n_2$ = {M}:\nends of SGD with 95 % intervals"
    return draw_ends(outcome.data, columns, title, width=8.4)


CONSTANTS = {"m": M, "alphas": tuple(ALPHAS), "step": LR, "dimension": DIMENSION}
EXPERIMENT = Experiment("landscape-fig7", measure, rows, figure, SETTINGS, CONSTANTS, on_cpu=True)
