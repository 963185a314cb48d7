"""Collins et al. 2022, figure 1: MAML is much better than NAL only if hard tasks are similar and far from easy ones.

The solutions of non-adaptive learning (NAL) and MAML are compared on four landscapes of hard and easy tasks, together
with their excess risks 𝓔_m: the loss after a gradient step on m samples, minus the noise floor. ρ is the variance of
the inputs of a task, d their dimension, R the distance between the centers of hard and easy tasks, and r the dispersion
of the tasks of a group. The size α of the step is 1/ρ of the easy tasks. The paper gives ρ, m and d, but neither R nor
r. R and r are chosen here such that the risks are similar to the bars of the paper's figure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from metabridge.environments.linear_tasks import HardEasy, Landscape, LinearTasks
from metabridge.experiments.experiment import Experiment, ExperimentOptions, Outcome
from metabridge.experiments.landscape_linear import LABELS, SgdSettings, compare_with_theory, loss_on_new_tasks
from metabridge.intervals import mean_interval
from metabridge.report.results import Row
from metabridge.theory.landscape import SolutionName, hard_easy_risks, noise_floor, solution

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PUBLISHED_RATIO = 3.0  # approximate ratio of the excess risks of NAL and MAML in landscape (d)
LANDSCAPES = {  # the first two numbers are ρ of hard and of easy tasks
    "(a) equally hard": HardEasy(0.9, 0.9, R=5.0, r_hard=2.0, r_easy=2.0),
    "(b) hard ones far apart": HardEasy(0.1, 0.9, R=5.0, r_hard=25.0, r_easy=2.0),
    "(c) all close together": HardEasy(0.1, 0.9, R=0.5, r_hard=0.2, r_easy=0.2),
    "(d) hard ones close, far from easy": HardEasy(0.1, 0.9, R=5.0, r_hard=2.0, r_easy=2.0),
}
M = 500  # number of samples of the gradient step, at test time (m) and in training (n₂)
SETTINGS = {"quick": SgdSettings(test_tasks=300, runs=5), "paper": SgdSettings()}

Risks = dict[str, dict[SolutionName, Tensor]]  # measured excess risk 𝓔_m of each run, by landscape and learner


def measure(options: ExperimentOptions) -> Risks:
    """Return the excess risks of NAL and MAML on tasks sampled from each landscape."""
    sgd, generator = SETTINGS[options.scale], torch.Generator().manual_seed(options.seed)
    risks: Risks = {}
    for name, hard_easy in LANDSCAPES.items():
        landscape, alpha = hard_easy.landscape, 1 / hard_easy.rho_easy
        tasks, floor = LinearTasks(landscape, M, sgd.queries), noise_floor(landscape, alpha, M)
        solutions = {learner: solution(learner, landscape, alpha, M).float() for learner in LABELS}
        losses = {learner: loss_on_new_tasks(tasks, w, alpha, sgd, generator) for learner, w in solutions.items()}
        risks[name] = {learner: loss - floor for learner, loss in losses.items()}
    return risks


def rows(risks: Risks, _: ExperimentOptions) -> Iterator[Row]:
    """Compare the excess risks with the closed forms. Their ratio NAL / MAML must be largest in landscape (d)."""
    for name, measured in risks.items():
        theory = hard_easy_risks(LANDSCAPES[name], 1 / LANDSCAPES[name].rho_easy, M)
        for learner, values in measured.items():
            yield compare_with_theory(f"{name}, {LABELS[learner]}", "𝓔_m", values, getattr(theory, learner))
    ratio_rows = [
        Row.mean(name, "𝓔_m of NAL / 𝓔_m of MAML", (values["nal"] / values["maml"]).tolist())
        for name, values in risks.items()
    ]
    *other_rows, last_row = ratio_rows
    yield from other_rows
    note = "the paper has about 3 and gives neither R nor r; agrees if this ratio is the largest of the four"
    is_largest = last_row.ours == max(row.ours for row in ratio_rows)
    yield replace(last_row, published=PUBLISHED_RATIO, agrees=is_largest, note=note)


def figure(outcome: Outcome[Risks]) -> Figure:
    """Draw the solutions of the tasks, of NAL and of MAML in each landscape, and below them the risks of both."""
    from metabridge.report import figures, result_figures

    title = "MAML pays off if the hard tasks are slow to learn, close together and far from the easy ones"
    figure, grid = result_figures.subplots(title, 2, 4, (14, 5.6), height_ratios=(3, 1))
    for (name, risks), above, below in zip(outcome.data.items(), *grid):
        hard_easy = LANDSCAPES[name]
        for group, label, color, marker in zip(hard_easy.landscape.groups, ("hard", "easy"), ("black", "gray"), "^o"):
            group_landscape = Landscape((replace(group, probability=1.0),), hard_easy.dimension)
            solutions = group_landscape.sample_finite(50, torch.Generator().manual_seed(0)).distribution.center
            above.plot(*solutions.T[:2], marker, color=color, markersize=4, label=f"w* of {label} tasks")
        for (learner, label), color, marker in zip(LABELS.items(), (figures.COLORS[1], figures.COLORS[0]), "sD"):
            w = solution(learner, hard_easy.landscape, 1 / hard_easy.rho_easy, M)
            above.plot(*w[:2], marker, color=color, markersize=9, label=f"solution of {label}")
            risk, margin = mean_interval(risks[learner].tolist())
            below.barh(label, risk, xerr=margin, color=color, height=0.6)
        ratio = hard_easy.rho_hard / hard_easy.rho_easy
        parameters = f"$ρ_H/ρ_E$ = {ratio:.2g}, R = {hard_easy.R:g}, $r_H$ = {hard_easy.r_hard:g}"
        above.set(title=f"{name}\n{parameters}", xlabel="coordinate 1 of w")
        below.set(xlabel="risk above the noise floor after a step, $\\mathcal{E}_m$")
        below.grid(visible=False, axis="y")
        below.invert_yaxis()
    grid[0, 0].set(ylabel="coordinate 2 of w")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


CONSTANTS = {"m": M, "landscapes": {name: asdict(landscape) for name, landscape in LANDSCAPES.items()}}
EXPERIMENT = Experiment("landscape-fig1", measure, rows, figure, SETTINGS, CONSTANTS, on_cpu=True)
