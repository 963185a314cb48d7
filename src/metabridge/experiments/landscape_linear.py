"""Training by SGD, tests on new tasks, rows and figures for the experiments on linear landscapes.

The learners are MAML and non-adaptive learning (NAL). The settings are those of Collins et al. (2022, app. C.1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from metabridge.report.results import Row
from metabridge.theory.landscape import SolutionName
from metabridge.theory.linear_sgd import LinearEnvironment, LinearLearner, sampled_test_loss, train_linear_models

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Name = TypeVar("Name", bound=str)
LABELS: dict[SolutionName, str] = {"nal": "NAL", "maml": "MAML"}
# Learning rates of SGD. `learners` multiplies that of MAML by n₂, the number of samples of its inner step.
LR: dict[SolutionName, float] = {"nal": 0.025, "maml": 1e-4}


@dataclass(frozen=True)
class SgdSettings:
    """Numbers of iterations, test tasks, runs and query examples. The defaults are those of Collins et al. (2022)."""

    iterations: int = 5000  # of SGD, with one batch of tasks each
    test_tasks: int = 3000
    runs: int = 10
    queries: int = 25  # n₁, query examples of a task


class SgdResult(NamedTuple):
    """The weights w of each run after training, (runs, d), and their mean loss on new tasks after a step, (runs,)."""

    w: Tensor
    test_loss: Tensor


class CoordinateAndRisk(NamedTuple):
    """The first coordinate of w and the excess risk, for each run."""

    coordinate: Tensor
    risk: Tensor


SgdResults = dict[tuple[float, float], dict[SolutionName, CoordinateAndRisk]]  # by (m or α) and ρ_H


def learners(alpha: float, n2: int) -> dict[SolutionName, LinearLearner]:
    """Return NAL and MAML with the paper's learning rates. MAML takes an inner step of size `alpha` on `n2` samples."""
    return {"nal": LinearLearner(LR["nal"]), "maml": LinearLearner(LR["maml"] * n2, alpha)}


def train_and_test(
    tasks: LinearEnvironment,
    learners: Mapping[Name, LinearLearner],
    alpha: float,
    sgd: SgdSettings,
    generator: torch.Generator,
    batch_size: int = 1,
) -> dict[Name, SgdResult]:
    """Train all learners on the same tasks, and test each on new tasks after a gradient step of size `alpha`."""
    weights = train_linear_models(
        tasks, learners, generator, iterations=sgd.iterations, runs=sgd.runs, batch_size=batch_size
    )
    return {name: SgdResult(w, loss_on_new_tasks(tasks, w, alpha, sgd, generator)) for name, w in weights.items()}


def loss_on_new_tasks(
    tasks: LinearEnvironment, w: Tensor, alpha: float, sgd: SgdSettings, generator: torch.Generator
) -> Tensor:
    """Return the mean loss of each run on new tasks after a gradient step of size `alpha`."""
    return sampled_test_loss(tasks, w, alpha, generator, test_tasks=sgd.test_tasks, runs=sgd.runs)


def compare_with_theory(name: str, metric: str, values: Tensor, theory: float) -> Row:
    """Return a row that compares the mean over runs with the closed form.

    They agree if they differ by at most twice the half-width of the 95 % interval. Even if every closed form is right,
    a few of a thousand rows differ by more.
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
    """Draw first coordinates (first row) and risks (second row) as functions of ρ_H.

    Args:
        results: The results by (m or α) and ρ_H.
        columns: Title of each column by m or α.
        title: Title of the figure.
        width: Width of the figure in inches.
        closed_form: Returns the coordinate and the risk for the name of a solution, ρ_H, and m or α. If None, only the
            results of SGD are drawn.
    """
    from metabridge.report import figures, result_figures

    figure, grid = result_figures.subplots(
        title, 2, len(columns), (width, 6.4), sharex=True, sharey="row", squeeze=False
    )
    hardness = [i / 200 for i in range(1, 201)]
    for (column, column_title), above, below in zip(columns.items(), *grid):
        above.axhline(1, color="black", linestyle=":", label="w* of the hard task")
        above.axhline(-1, color=figures.COLORS[6], linestyle=":", label="w* of the easy task")
        for (name, label), color in zip(LABELS.items(), (figures.COLORS[1], figures.COLORS[0])):
            if closed_form is not None:
                for axes, values in zip((above, below), zip(*(closed_form(name, rho, column) for rho in hardness))):
                    axes.plot(hardness, values, color=color, label=f"{label}, closed form")
            for i, axes in enumerate((above, below)):
                points = {rho: values[name][i] for (key, rho), values in results.items() if key == column}
                marker = "-o" if closed_form is None else "o"
                result_figures.draw_error_bars(axes, points, color, f"{label}, SGD" if closed_form else label, marker)
        above.set(title=column_title)
        below.set(xlabel="$ρ_H$, variance of the hard task's inputs ($ρ_E$ = 1)")
    grid[0, 0].set(ylabel="first coordinate of w")
    grid[1, 0].set(ylabel="risk above the noise floor after a step", ylim=(0, None))
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3 if closed_form else 4)
    return figure
