"""C's figure 7: logistic regression behaves as linear regression does, MAML starting nearer to the hard task.

The two tasks of figure 2 with labels instead of values, m = n₂ = 500. The paper does not say its α. The inverse of the
easy task's smoothness, its choice for linear regression, is 4/ρ_E here, since the logistic loss bends by at most ¼;
α = 1/ρ_E is shown beside it. What is drawn is F_m(w) less the loss of every task's own w*.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from metabridge.environments.linear_tasks import Landscape, LogisticTasks, TaskGroup
from metabridge.experiments.landscape_linear import (
    NAMES,
    End,
    Ends,
    Learner,
    Outcome,
    Scale,
    completed,
    descend,
    draw_runs,
    judge,
)
from metabridge.experiments.power_law import mean
from metabridge.experiments.result import Row, UnportedExperiment, Work
from metabridge.theory.landscape import Solution

ID = "landscape-fig7"
M = 500
ALPHAS = (4.0, 1.0)
STEP = 0.05  # of SGD, for both; the paper names none for this figure
GRID = tuple(place / 10 for place in range(1, 11))  # ρ_H


@dataclass(frozen=True)
class Settings:
    """How SGD goes, and for which ρ_H."""

    sgd: Scale
    hardness: tuple[float, ...]


SCALES = {
    "quick": Settings(Scale(iterations=2500, judged=500, runs=5), GRID[::3]),
    "paper": Settings(Scale(), GRID),
}


def world(rho: float) -> Landscape:
    """Return the two tasks, the hard one first."""
    return Landscape((TaskGroup(rho, 1.0, probability=0.5), TaskGroup(1.0, -1.0, probability=0.5)), dimension=10)


def label_floor(landscape: Landscape) -> float:
    """Return the expected loss of every task's own w*, which is the entropy of its labels, for groups of one task.

    ⟨w*, x⟩ is normal with variance w*ᵀΣw*, so the mean over x is an integral over a line: 200 nodes of Gauss and
    Hermite.
    """
    law = landscape.distribution
    variance = torch.einsum("gi,gij,gj->g", law.centre, law.covariance, law.centre)
    nodes, weights = (torch.from_numpy(each) for each in np.polynomial.hermite_e.hermegauss(200))
    logits = variance.sqrt()[:, None] * nodes
    entropy = torch.nn.functional.softplus(logits) - logits.sigmoid() * logits
    return float(law.probability @ (entropy @ weights)) / math.sqrt(2 * math.pi)


def run(work: Work) -> Outcome:
    """Let SGD go to its end for every α and ρ_H, and judge the ends."""
    settings, started = SCALES[work.scale], time.perf_counter()
    generator = torch.Generator().manual_seed(work.seed)
    ends: Ends = {}
    for alpha in ALPHAS:
        chosen: dict[Solution, Learner] = {"nal": Learner(STEP), "maml": Learner(STEP, alpha)}
        for rho in settings.hardness:
            tasks = LogisticTasks(world(rho), M, settings.sgd.outer)
            floor = label_floor(tasks.landscape)
            found = descend(tasks, chosen, settings.sgd, generator)
            ends[alpha, rho] = {
                name: End(w[:, 0], judge(tasks, w, alpha, settings.sgd, generator) - floor) for name, w in found.items()
            }
    about = asdict(settings) | {"m": M, "alphas": ALPHAS, "step": STEP, "dimension": 10}
    return Outcome(completed(work, ID, started, rows(ends), about), ends)


def rows(ends: Ends) -> list[Row]:
    """Give every end, and how much nearer to the hard task MAML is, which agrees with the paper if it surely is."""
    found = []
    for (alpha, rho), own in ends.items():
        where = f"α = {alpha:g}, ρ_H = {rho:g}"
        for name, end in own.items():
            coordinate, risk = mean(end.coordinate.tolist()), mean(end.risk.tolist())
            found.append(Row(f"{NAMES[name]}, {where}", "first coordinate", ours=coordinate[0], ci95=coordinate[1]))
            found.append(Row(f"{NAMES[name]}, {where}", "risk above the floor", ours=risk[0], ci95=risk[1]))
        nearer, margin = mean((own["maml"].coordinate - own["nal"].coordinate).tolist())
        saved, saved_margin = mean((own["nal"].risk - own["maml"].risk).tolist())
        as_claimed = rho < 1 and alpha == ALPHAS[0]
        label = f"MAML against NAL, {where}"
        note = "the paper: MAML starts nearer to the hard task"
        agrees = nearer > margin if as_claimed else None
        found.append(Row(label, "first coordinate, MAML less NAL", ours=nearer, ci95=margin, agrees=agrees, note=note))
        agrees = saved > saved_margin if as_claimed else None
        note = "the paper: MAML has the smaller risk for appropriate ρ_H"
        found.append(Row(label, "risk, NAL less MAML", ours=saved, ci95=saved_margin, agrees=agrees, note=note))
    return found


def figure(outcome: Outcome, file: Path) -> None:
    """Draw first coordinates and risks against ρ_H, a column for each α."""
    from matplotlib.figure import Figure

    from metabridge.report import figures

    with figures.LIGHT.context():
        picture = Figure(figsize=(8.4, 6.4), layout="constrained")
        picture.suptitle(
            f"Logistic regression on one hard and one easy task, m = $n_2$ = {M}:\nends of SGD with 95 % intervals"
        )
        grid = picture.subplots(2, len(ALPHAS), sharex=True, sharey="row")
        for alpha, above, below in zip(ALPHAS, *grid):
            above.axhline(1, color="black", linestyle=":", label="w* of the hard task")
            above.axhline(-1, color=figures.COLOURS[6], linestyle=":", label="w* of the easy task")
            for (name, label), colour in zip(NAMES.items(), (figures.COLOURS[1], figures.COLOURS[0])):
                for axes, quantity in ((above, "coordinate"), (below, "risk")):
                    draw_runs(axes, _along(outcome.ends, alpha, name, quantity), colour, label, "-o")
            inverse = "inverse of the easy task's smoothness" if alpha == ALPHAS[0] else "$1/ρ_E$"
            above.set(title=f"α = {alpha:g}, {inverse}")
            below.set(xlabel="$ρ_H$, variance of the hard task's inputs ($ρ_E$ = 1)")
        grid[0, 0].set(ylabel="first coordinate of w")
        grid[1, 0].set(ylabel="loss after a step, above the floor", ylim=(0, None))
        picture.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figures.save(picture, file)


def _along(ends: Ends, alpha: float, name: Solution, quantity: str) -> dict[float, Tensor]:
    return {rho: getattr(own[name], quantity) for (own_alpha, rho), own in ends.items() if own_alpha == alpha}


EXPERIMENT = UnportedExperiment("landscape-fig7", run, figure)
