"""C's figure 1: MAML gains much over NAL only where tasks differ in hardness and the hard ones lie close together.

Four landscapes of hard and easy tasks, with the solutions of both and their risks above the floor. The paper prints
ρ, m and d, but neither R nor r: those here give risks of the size of its bars.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from metabridge.environments.linear_tasks import HardEasy, Landscape, LinearTasks
from metabridge.experiments.landscape_linear import NAMES, Scale, compared, completed, judge
from metabridge.experiments.power_law import mean
from metabridge.experiments.result import Result, Row, UnportedExperiment, Work
from metabridge.theory.landscape import Solution, hard_easy_risks, noise_floor, solution

ID = "landscape-fig1"
M = 500  # samples of the step at test, and n₂
WORLDS = {
    "equally hard": HardEasy(0.9, 0.9, R=5.0, r_hard=2.0, r_easy=2.0),
    "hard ones far apart": HardEasy(0.1, 0.9, R=5.0, r_hard=25.0, r_easy=2.0),
    "all close together": HardEasy(0.1, 0.9, R=0.5, r_hard=0.2, r_easy=0.2),
    "hard ones close, far from easy": HardEasy(0.1, 0.9, R=5.0, r_hard=2.0, r_easy=2.0),
}
KINDS = (("hard", "black", "^"), ("easy", "grey", "o"))  # of tasks, as they are drawn
SCALES = {"quick": Scale(judged=300, runs=5), "paper": Scale()}


@dataclass(frozen=True)
class Outcome:
    """The result, and the measured 𝓔_m of both solutions in every landscape, for each run."""

    result: Result
    risks: dict[str, dict[Solution, Tensor]]


def run(work: Work) -> Outcome:
    """Judge both solutions of every landscape on tasks drawn from it."""
    scale, started = SCALES[work.scale], time.perf_counter()
    generator = torch.Generator().manual_seed(work.seed)
    risks = {name: _measured(world, scale, generator) for name, world in WORLDS.items()}
    settings = asdict(scale) | {"m": M, "worlds": {name: asdict(world) for name, world in WORLDS.items()}}
    return Outcome(completed(work, ID, started, rows(risks), settings), risks)


def _measured(world: HardEasy, scale: Scale, generator: torch.Generator) -> dict[Solution, Tensor]:
    tasks, alpha = LinearTasks(world.landscape, M, scale.outer), 1 / world.rho_easy
    floor = noise_floor(world.landscape, alpha, M)
    starts = {name: solution(name, world.landscape, alpha, M).float() for name in NAMES}
    return {name: judge(tasks, w, alpha, scale, generator) - floor for name, w in starts.items()}


def rows(risks: dict[str, dict[Solution, Tensor]]) -> list[Row]:
    """Give every measured risk beside the closed form, and the ratios, of which the paper says which is largest."""
    found, ratios = [], {}
    for place, (name, own) in zip("abcd", risks.items()):
        theory = hard_easy_risks(WORLDS[name], 1 / WORLDS[name].rho_easy, M)
        found += [compared(f"({place}) {name}, {NAMES[each]}", "𝓔_m", own[each], getattr(theory, each)) for each in own]
        ratios[f"({place}) {name}"] = mean((own["nal"] / own["maml"]).tolist())
    largest = max(ratios, key=lambda name: ratios[name][0])
    last = list(ratios)[-1]
    for name, (ratio, margin) in ratios.items():
        if name == last:
            note = "the paper has about 3 and says neither R nor r; agrees if this ratio is the largest of the four"
            row = Row(name, "ratio", published=3.0, ours=ratio, ci95=margin, agrees=largest == last, note=note)
        else:
            row = Row(name, "ratio", ours=ratio, ci95=margin)
        found.append(row)
    return found


def figure(outcome: Outcome, file: Path) -> None:
    """Draw the solutions of tasks with those of NAL and MAML, and under each landscape the risks of the two."""
    from matplotlib.figure import Figure

    from metabridge.report import figures

    orange, blue = figures.COLOURS[1], figures.COLOURS[0]
    with figures.LIGHT.context():
        picture = Figure(figsize=(14, 5.6), layout="constrained")
        picture.suptitle("MAML pays where the hard tasks are slow to learn, close together and far from the easy ones")
        grid = picture.subplots(2, 4, height_ratios=(3, 1))
        for place, (name, world), above, below in zip("abcd", WORLDS.items(), *grid):
            for group, (label, colour, marker) in zip(world.landscape.groups, KINDS):
                one = Landscape((replace(group, probability=1.0),), world.dimension)
                first, second = one.sample_finite(50, torch.Generator().manual_seed(0)).distribution.centre.T[:2]
                above.plot(first, second, marker, color=colour, markersize=4, label=f"w* of {label} tasks")
            for (each, label), colour, marker in zip(NAMES.items(), (orange, blue), "sD"):
                w = solution(each, world.landscape, 1 / world.rho_easy, M)
                above.plot(*w[:2], marker, color=colour, markersize=9, label=f"solution of {label}")
                value, margin = mean(outcome.risks[name][each].tolist())
                below.barh(label, value, xerr=margin, color=colour, height=0.6)
            above.set(title=f"({place}) {name}\n{_settings(world)}", xlabel="coordinate 1 of w")
            below.set(xlabel="risk above the floor after a step, $\\mathcal{E}_m$")
            below.grid(visible=False, axis="y")
            below.invert_yaxis()
        grid[0, 0].set(ylabel="coordinate 2 of w")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        picture.legend(handles, labels, loc="outside lower center", ncols=4)
    figures.save(picture, file)


def _settings(world: HardEasy) -> str:
    return f"$ρ_H/ρ_E$ = {world.rho_hard / world.rho_easy:.2g}, R = {world.R:g}, $r_H$ = {world.r_hard:g}"


EXPERIMENT = UnportedExperiment("landscape-fig1", run, figure)
