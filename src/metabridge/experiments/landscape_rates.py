"""C's theorems 2 and 3: what NAL and MAML find on T tasks with n points each comes to their population solutions.

The distance is bounded by Õ(1/√n) + Õ(1/√T) for NAL (eq. 45), and by Õ(1/√τ) + Õ(1/√T) for MAML with τ episodes of each
task (eq. 81). As in the proofs, the first term is the distance to w^{(T)*}, the population solution of the T drawn
tasks, and falls with the points of each; the other is about the tasks, and falls with T whatever n or τ is.
The paper proves it and shows no experiment; this is one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from metabridge.environments.linear_tasks import Landscape, LinearTasks, TaskGroup
from metabridge.experiments.landscape_linear import completed
from metabridge.experiments.power_law import Points, PowerLaw, mean
from metabridge.experiments.result import Result, Row, UnportedExperiment, Work
from metabridge.theory.landscape import empirical_maml, empirical_nal, maml_solution, nal_solution

ID = "landscape-rates"
ALPHA, DIMENSION = 0.5, 5
INNER = OUTER = 10  # n₂ and n₁
TOLERANCE = 0.05  # of the exponent −½
LAWS = {
    "NAL, points n": "n, points of each of 20 tasks",
    "NAL, tasks T": "T, tasks of 20 points",
    "MAML, episodes τ": "τ, episodes of each of 20 tasks",
    "MAML, tasks T": "T, tasks of one episode",
}


@dataclass(frozen=True)
class Scale:
    """How far n, τ and T go, and how often each is drawn."""

    points: tuple[int, ...]
    episodes: tuple[int, ...]
    tasks: tuple[int, ...]
    runs: int
    fixed: int = 20  # T while n and τ grow


SCALES = {
    "quick": Scale((32, 128, 512, 2048), (8, 32, 128, 512), (64, 256, 1024, 4096), runs=8),
    "paper": Scale(
        tuple(2**power for power in range(5, 14)),
        tuple(2**power for power in range(3, 12)),
        tuple(2**power for power in range(6, 15)),
        runs=20,
    ),
}


@dataclass(frozen=True)
class Outcome:
    """The result, and the distances of every run by what grows."""

    result: Result
    distances: dict[str, Points]


def world() -> Landscape:
    """Return three groups of tasks whose covariances differ in size and in direction."""
    generator = torch.Generator().manual_seed(0)
    groups = []
    for centre, largest in ((1.0, 0.3), (-1.0, 1.0), (0.0, 1.5)):
        turn = torch.linalg.qr(torch.randn(DIMENSION, DIMENSION, generator=generator).double())[0]
        values = torch.linspace(0.3, 1.0, DIMENSION, dtype=torch.float64) * largest
        covariance = (turn * values) @ turn.mT
        groups.append(TaskGroup((covariance + covariance.mT) / 2, centre, 0.5, 0.25, 1 / 3))
    return Landscape(tuple(groups), DIMENSION)


def run(work: Work) -> Outcome:
    """Measure the distance of both solutions for every n, τ and T."""
    scale, started = SCALES[work.scale], time.perf_counter()
    generator = torch.Generator().manual_seed(work.seed)
    landscape = world()

    def in_points(n: int) -> Tensor:
        few = landscape.sample_finite(scale.fixed, generator)
        return empirical_nal(LinearTasks(few, n // 2, n - n // 2).sample_every_group(1, generator)) - nal_solution(few)

    def in_episodes(tau: int) -> Tensor:
        few = landscape.sample_finite(scale.fixed, generator)
        episodes = LinearTasks(few, INNER, OUTER).sample_every_group(tau, generator)
        return empirical_maml(episodes, ALPHA) - maml_solution(few, ALPHA, INNER)

    tasks = LinearTasks(landscape, INNER, OUTER)

    def nal_in_tasks(T: int) -> Tensor:
        return empirical_nal(tasks.sample(T, generator)) - nal_solution(landscape)

    def maml_in_tasks(T: int) -> Tensor:
        return empirical_maml(tasks.sample(T, generator), ALPHA) - maml_solution(landscape, ALPHA, INNER)

    def measured(sizes: tuple[int, ...], gap: Callable[[int], Tensor]) -> Points:
        return {size: [float(gap(size).norm()) for _ in range(scale.runs)] for size in sizes}

    found = (
        measured(scale.points, in_points),
        measured(scale.tasks, nal_in_tasks),
        measured(scale.episodes, in_episodes),
        measured(scale.tasks, maml_in_tasks),
    )
    distances = dict(zip(LAWS, found))
    about = asdict(scale) | {"alpha": ALPHA, "dimension": DIMENSION, "n2": INNER, "n1": OUTER}
    return Outcome(completed(work, ID, started, rows(distances), about), distances)


def rows(distances: dict[str, Points]) -> list[Row]:
    """Give the exponents, which agree if their intervals come to within TOLERANCE of −½, and the mean distances."""
    found = []
    for name, points in distances.items():
        law = PowerLaw.fit(points)
        agrees = abs(law.exponent + 0.5) <= law.ci95 + TOLERANCE
        found.append(Row(name, "exponent", published=-0.5, ours=law.exponent, ci95=law.ci95, agrees=agrees))
        for size, values in points.items():
            distance, margin = mean(values)
            found.append(Row(f"{name} = {size}", "distance", ours=distance, ci95=margin))
    return found


def figure(outcome: Outcome, file: Path) -> None:
    """Draw every distance against what grows, with the power law through them."""
    from matplotlib.figure import Figure

    from metabridge.report import figures

    with figures.LIGHT.context():
        picture = Figure(figsize=(13, 3.9), layout="constrained")
        picture.suptitle("Distance of what is found on finitely many points and tasks from the population solution")
        panels = picture.subplots(1, 4, sharey=True)
        for axes, (name, points) in zip(panels, outcome.distances.items()):
            colour = figures.COLOURS[0 if name.startswith("MAML") else 1]
            law = PowerLaw.fit(points)
            xs, ys = zip(*((size, value) for size, values in points.items() for value in values))
            axes.plot(xs, ys, "o", color=colour, markersize=3, alpha=0.5)
            axes.plot(list(points), [law(size) for size in points], color="black")
            exponent = f"{law.exponent:.2f} ± {law.ci95:.2f}".replace("-", "−")
            axes.set(xscale="log", yscale="log", xlabel=LAWS[name], title=f"{name}\nexponent {exponent}")
        panels[0].set(ylabel="distance")
    figures.save(picture, file)


EXPERIMENT = UnportedExperiment("landscape-rates", run, figure)
