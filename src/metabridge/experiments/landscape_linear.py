"""Shared parts of the experiments on linear landscapes: settings of SGD, its test, rows and panels.

The settings are those of Collins et al. (2022, app. C.1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from metabridge.report.results import Row
from metabridge.theory.landscape import SolutionName
from metabridge.theory.linear_sgd import LinearLearner, Tasks, sampled_test_loss, train_linear_models

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Name = TypeVar("Name", bound=str)
LABELS: dict[SolutionName, str] = {"nal": "NAL", "maml": "MAML"}
LR: dict[SolutionName, float] = {"nal": 0.025, "maml": 1e-4}  # of SGD; MAML's is per inner sample


@dataclass(frozen=True)
class SgdSettings:
    """Length of training and test, and number of repetitions; the defaults are the paper's."""

    iterations: int = 5000  # of SGD, with one batch of tasks each
    test_tasks: int = 3000
    runs: int = 10
    queries: int = 25  # n₁, query points of a task


class SgdResult(NamedTuple):
    """The final weights of each run, (runs, d), and the mean loss on new tasks after a step, (runs)."""

    w: Tensor
    test_loss: Tensor


class CoordinateAndRisk(NamedTuple):
    """The first coordinate of w and the risk above the floor, of each run."""

    coordinate: Tensor
    risk: Tensor


SgdResults = dict[tuple[float, float], dict[SolutionName, CoordinateAndRisk]]  # by (m or α) and ρ_H


def learners(alpha: float, n2: int) -> dict[SolutionName, LinearLearner]:
    """Return NAL and MAML with the paper's step sizes, for `n2` inner samples."""
    return {"nal": LinearLearner(LR["nal"]), "maml": LinearLearner(LR["maml"] * n2, alpha)}


def train_and_test(
    tasks: Tasks,
    learners: Mapping[Name, LinearLearner],
    alpha: float,
    sgd: SgdSettings,
    generator: torch.Generator,
    batch_size: int = 1,
) -> dict[Name, SgdResult]:
    """Train all learners on the same tasks, then test each on new tasks after a step of size `alpha`."""
    weights = train_linear_models(
        tasks, learners, generator, iterations=sgd.iterations, runs=sgd.runs, batch_size=batch_size
    )
    return {name: SgdResult(w, loss_on_new_tasks(tasks, w, alpha, sgd, generator)) for name, w in weights.items()}


def loss_on_new_tasks(tasks: Tasks, w: Tensor, alpha: float, sgd: SgdSettings, generator: torch.Generator) -> Tensor:
    """Return the mean loss on new tasks after a step of size `alpha`, for each run."""
    return sampled_test_loss(tasks, w, alpha, generator, test_tasks=sgd.test_tasks, runs=sgd.runs)


def compare_with_theory(name: str, metric: str, values: Tensor, theory: float) -> Row:
    """Compare the mean over runs with the closed form.

    They agree if they differ by at most twice the half-width of the 95 % interval. By chance alone, a few rows in a
    thousand differ by more.
    """
    row = Row.mean(name, metric, values.tolist(), published=theory, note="published: the value of the paper's formula")
    assert row.ci95 is not None
    return replace(row, agrees=abs(row.ours - theory) <= 2 * row.ci95)


def draw_sgd_results(
    results: SgdResults,
    columns: Mapping[float, str],
    title: str,
    *,
    width: float,
    closed_form: Callable[[SolutionName, float, float], tuple[float, float]] | None = None,
) -> Figure:
    """Draw first coordinates above and risks below against ρ_H, one column per m or α with its title."""
    from metabridge.report import figures, result_figures

    figure, grid = result_figures.subplots(
        title, 2, len(columns), (width, 6.4), sharex=True, sharey="row", squeeze=False
    )
    hardness = [i / 200 for i in range(1, 201)]
    for (column, heading), above, below in zip(columns.items(), *grid):
        above.axhline(1, color="black", linestyle=":", label="w* of the hard task")
        above.axhline(-1, color=figures.COLORS[6], linestyle=":", label="w* of the easy task")
        for (name, label), color in zip(LABELS.items(), (figures.COLORS[1], figures.COLORS[0])):
            if closed_form is not None:
                for axes, values in zip((above, below), zip(*(closed_form(name, rho, column) for rho in hardness))):
                    axes.plot(hardness, values, color=color, label=f"{label}, closed form")
            for i, axes in enumerate((above, below)):
                points = {rho: values[name][i] for (key, rho), values in results.items() if key == column}
                marker = "-o" if closed_form is None else "o"
                result_figures.draw_means(axes, points, color, f"{label}, SGD" if closed_form else label, marker)
        above.set(title=heading)
        below.set(xlabel="$ρ_H$, variance of the hard task's inputs ($ρ_E$ = 1)")
    grid[0, 0].set(ylabel="first coordinate of w")
    grid[1, 0].set(ylabel="risk above the floor after a step", ylim=(0, None))
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3 if closed_form else 4)
    return figure
