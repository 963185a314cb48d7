"""C's figures 2 and 8: MAML starts nearer to the hard task, and so has the smaller risk, if m is large enough.

One hard task with w* = 1 and Σ = ρ_H·I, one easy task with w* = −1 and Σ = I, in 10 dimensions, σ² = 0.01, α = 1.
Closed forms (C eq. 8, and 𝓔_m as in eq. 6 and 7, which eq. 9 has up to the factor ‖w₁* − w₂*‖²/4) with the ends of
SGD beside them. The caption of figure 2 has m = 100 where its text has 500; both are here.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from metabridge.environments.linear_tasks import Landscape, LinearTasks, TaskGroup
from metabridge.experiments.landscape_linear import (
    NAMES,
    End,
    Ends,
    Outcome,
    Scale,
    compared,
    completed,
    descend,
    draw_runs,
    judge,
    learners,
)
from metabridge.experiments.result import Row, UnportedExperiment, Work
from metabridge.theory.landscape import Solution, noise_floor, risk_above_floor, solution

ID = "landscape-fig2"
ALPHA, NOISE = 1.0, 0.01
GRID = tuple(place / 10 for place in range(1, 11))  # ρ_H


@dataclass(frozen=True)
class Settings:
    """How SGD goes, and where."""

    sgd: Scale
    samples: tuple[int, ...]  # m = n₂
    hardness: tuple[float, ...]  # ρ_H


SCALES = {
    "quick": Settings(Scale(judged=500, runs=5), (500, 50), GRID[::3]),
    "paper": Settings(Scale(), (2000, 500, 100, 50), GRID),
}


def world(rho: float) -> Landscape:
    """Return the two tasks, the hard one first."""
    return Landscape((TaskGroup(rho, 1.0, 0.0, NOISE, 0.5), TaskGroup(1.0, -1.0, 0.0, NOISE, 0.5)), dimension=10)


def run(work: Work) -> Outcome:
    """Let SGD go to its end for every m and ρ_H, and judge the ends."""
    settings, started = SCALES[work.scale], time.perf_counter()
    generator = torch.Generator().manual_seed(work.seed)
    ends: Ends = {}
    for m in settings.samples:
        for rho in settings.hardness:
            tasks = LinearTasks(world(rho), m, settings.sgd.outer)
            floor = noise_floor(tasks.landscape, ALPHA, m)
            found = descend(tasks, learners(ALPHA, m), settings.sgd, generator)
            ends[m, rho] = {
                name: End(w[:, 0], judge(tasks, w, ALPHA, settings.sgd, generator) - floor) for name, w in found.items()
            }
    about = asdict(settings) | {"alpha": ALPHA, "noise": NOISE, "dimension": 10}
    return Outcome(completed(work, ID, started, rows(ends), about), ends)


def theory(name: Solution, rho: float, m: float) -> tuple[float, float]:
    """Return the first coordinate of a solution and its 𝓔_m."""
    w = solution(name, world(rho), ALPHA, m)
    return float(w[0]), float(risk_above_floor(world(rho), w, ALPHA, m))


def rows(ends: Ends) -> list[Row]:
    """Give every end of SGD beside the closed form."""
    found = []
    for (m, rho), own in ends.items():
        for name, end in own.items():
            coordinate, risk = theory(name, rho, m)
            label = f"{NAMES[name]}, m = {m}, ρ_H = {rho:g}"
            found.append(compared(label, "first coordinate", end.coordinate, coordinate))
            found.append(compared(label, "𝓔_m", end.risk, risk))
    return found


def figure(outcome: Outcome, file: Path) -> None:
    """Draw first coordinates above and risks below, a column for each m."""
    from matplotlib.figure import Figure

    from metabridge.report import figures

    sizes = sorted({m for m, _ in outcome.ends}, reverse=True)
    places = [place / 200 for place in range(1, 201)]
    with figures.LIGHT.context():
        picture = Figure(figsize=(2 + 3.2 * len(sizes), 6.4), layout="constrained")
        picture.suptitle("One hard and one easy task: closed forms and the ends of SGD, with 95 % intervals over runs")
        grid = picture.subplots(2, len(sizes), sharex=True, sharey="row")
        for m, above, below in zip(sizes, *grid):
            above.axhline(1, color="black", linestyle=":", label="w* of the hard task")
            above.axhline(-1, color=figures.COLOURS[6], linestyle=":", label="w* of the easy task")
            for (name, label), colour in zip(NAMES.items(), (figures.COLOURS[1], figures.COLOURS[0])):
                coordinates, risks = zip(*(theory(name, rho, m) for rho in places))
                above.plot(places, coordinates, color=colour, label=f"{label}, closed form")
                below.plot(places, risks, color=colour)
                for axes, quantity in ((above, "coordinate"), (below, "risk")):
                    points = _along(outcome.ends, m, name, quantity)
                    draw_runs(axes, points, colour, f"{label}, SGD")
            above.set(title=f"m = $n_2$ = {m}")
            below.set(xlabel="$ρ_H$ (small: very hard; $ρ_E$ = 1)")
        grid[0, 0].set(ylabel="first coordinate of the solution")
        grid[1, 0].set(ylabel="risk above the floor, $\\mathcal{E}_m$", ylim=(0, None))
        picture.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figures.save(picture, file)


def _along(ends: Ends, m: int, name: Solution, quantity: str) -> dict[float, Tensor]:
    return {rho: getattr(own[name], quantity) for (size, rho), own in ends.items() if size == m}


EXPERIMENT = UnportedExperiment("landscape-fig2", run, figure)
