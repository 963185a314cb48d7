"""Collins et al. 2022, theorems 2 and 3: how fast solutions from finite samples approach the population solutions.

For T tasks, the distance between these solutions is bounded by Õ(1/√n) + Õ(1/√T) for non-adaptive learning (NAL) with n
points per task (eq. 45), and by Õ(1/√τ) + Õ(1/√T) for MAML with τ episodes per task (eq. 81). The two terms are
measured separately, as in the proofs. The first is the distance to w^{(T)*}, the population solution of the T sampled
tasks, and decreases with n or τ. The second is the remaining distance, which decreases with T for any n or τ. The paper
has proofs but no experiment for these theorems.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from metabridge.environments.linear_tasks import Landscape, LinearTasks, TaskGroup
from metabridge.experiments.experiment import Experiment, ExperimentOptions, Outcome
from metabridge.report.results import Row
from metabridge.theory.landscape import empirical_maml, empirical_nal, maml_solution, nal_solution
from metabridge.theory.power_law import PowerLaw, ValuesBySize

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXPONENT = -0.5  # according to the theorems
TOLERANCE = 0.05  # allowed error of the exponent in addition to its 95 % interval
ALPHA, DIMENSION = 0.5, 5  # step size α of MAML, dimension of the inputs
INNER = OUTER = 10  # n₂ and n₁, support and query examples of an episode
SIZE_LABELS = {  # for each series of distances, the label of the axis of the size that varies
    "NAL, points n": "n, points of each of 20 tasks",
    "NAL, tasks T": "T, tasks of 20 points",
    "MAML, episodes τ": "τ, episodes of each of 20 tasks",
    "MAML, tasks T": "T, tasks of one episode",
}


@dataclass(frozen=True)
class Settings:
    """The values of n, τ and T, and the number of runs for each."""

    points: tuple[int, ...]  # n
    episodes: tuple[int, ...]  # τ
    tasks: tuple[int, ...]  # T
    runs: int
    fixed: int = 20  # number of tasks T while n or τ varies


SETTINGS = {
    "quick": Settings((32, 128, 512, 2048), (8, 32, 128, 512), (64, 256, 1024, 4096), runs=8),
    "paper": Settings(
        tuple(2**power for power in range(5, 14)),
        tuple(2**power for power in range(3, 12)),
        tuple(2**power for power in range(6, 15)),
        runs=20,
    ),
}

Distances = dict[str, ValuesBySize]  # of every run, by the keys of `SIZE_LABELS` and by the size that varies


def landscape() -> Landscape:
    """Return three groups of tasks whose covariances differ in size and direction."""
    generator = torch.Generator().manual_seed(0)
    groups = []
    for center, largest_eigenvalue in ((1.0, 0.3), (-1.0, 1.0), (0.0, 1.5)):
        rotation = torch.linalg.qr(torch.randn(DIMENSION, DIMENSION, generator=generator).double())[0]
        eigenvalues = torch.linspace(0.3, 1.0, DIMENSION, dtype=torch.float64) * largest_eigenvalue
        covariance = (rotation * eigenvalues) @ rotation.mT
        covariance = (covariance + covariance.mT) / 2  # exactly symmetric, in spite of rounding errors
        groups.append(TaskGroup(covariance, center, spread=0.5, noise=0.25, probability=1 / 3))
    return Landscape(tuple(groups), DIMENSION)


def measure(options: ExperimentOptions) -> Distances:
    """Return the distances of solutions from the population solutions, for both methods and each n, τ and T."""
    settings, generator = SETTINGS[options.scale], torch.Generator().manual_seed(options.seed)
    population = landscape()
    tasks = LinearTasks(population, INNER, OUTER)

    # In `nal_points` and `maml_episodes`, every sampled task is a group of its own, so that sampling from every group
    # gives all tasks the same number of points or episodes.
    def nal_points(n: int) -> Tensor:
        sampled = population.sample_finite(settings.fixed, generator)
        episodes = LinearTasks(sampled, n // 2, n - n // 2).sample_every_group(1, generator)
        return empirical_nal(episodes) - nal_solution(sampled)

    def nal_tasks(T: int) -> Tensor:
        return empirical_nal(tasks.sample(T, generator)) - nal_solution(population)

    def maml_episodes(tau: int) -> Tensor:
        sampled = population.sample_finite(settings.fixed, generator)
        episodes = LinearTasks(sampled, INNER, OUTER).sample_every_group(tau, generator)
        return empirical_maml(episodes, ALPHA) - maml_solution(sampled, ALPHA, INNER)

    def maml_tasks(T: int) -> Tensor:
        return empirical_maml(tasks.sample(T, generator), ALPHA) - maml_solution(population, ALPHA, INNER)

    def distances(sizes: tuple[int, ...], difference: Callable[[int], Tensor]) -> ValuesBySize:
        return {size: [float(difference(size).norm()) for _ in range(settings.runs)] for size in sizes}

    return {
        "NAL, points n": distances(settings.points, nal_points),
        "NAL, tasks T": distances(settings.tasks, nal_tasks),
        "MAML, episodes τ": distances(settings.episodes, maml_episodes),
        "MAML, tasks T": distances(settings.tasks, maml_tasks),
    }


def rows(distances: Distances, _: ExperimentOptions) -> Iterator[Row]:
    """Yield the fitted exponents and the mean distances.

    An exponent agrees with −½ if it differs by at most the half-width of its interval plus `TOLERANCE`.
    """
    for name, points in distances.items():
        law = PowerLaw.fit(points)
        agrees = abs(law.exponent - EXPONENT) <= law.ci95 + TOLERANCE
        yield Row(name, "exponent", published=EXPONENT, ours=law.exponent, ci95=law.ci95, agrees=agrees)
        for size, values in points.items():
            yield Row.mean(f"{name} = {size}", "distance", values)


def figure(outcome: Outcome[Distances]) -> Figure:
    """Draw the distances as functions of the varied size, with the fitted power laws."""
    from metabridge.report import figures, result_figures

    title = "Distance of solutions from finitely many points or tasks to the population solution"
    figure, panels = result_figures.subplots(title, 1, 4, (13, 3.9), sharey=True)
    for axes, (name, points) in zip(panels, outcome.data.items()):
        color, law = figures.COLORS[0 if name.startswith("MAML") else 1], PowerLaw.fit(points)
        sizes, values = zip(*((size, value) for size, values in points.items() for value in values))
        axes.plot(sizes, values, "o", color=color, markersize=3, alpha=0.5)
        axes.plot(list(points), [law(size) for size in points], color="black")
        axes.set(xscale="log", yscale="log", xlabel=SIZE_LABELS[name])
        axes.set(title=f"{name}\nexponent {result_figures.format_exponent(law)}")
    panels[0].set(ylabel="distance")
    return figure


CONSTANTS = {"alpha": ALPHA, "dimension": DIMENSION, "n2": INNER, "n1": OUTER}
EXPERIMENT = Experiment("landscape-rates", measure, rows, figure, SETTINGS, CONSTANTS, on_cpu=True)
