"""The HTML page of `metabridge demo`, which compares methods on the built-in glyphs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from metabridge.environments.image_tasks import ImageTasks
from metabridge.files import make_folder, write_atomically
from metabridge.report import figures, task_pictures
from metabridge.report.html_pages import Picture, render
from metabridge.report.method_table import taxonomy_row
from metabridge.report.results import Result
from metabridge.training import Model, Run, Score

SHOWN_TASKS = 4  # number of test tasks in the picture of each method
X_AXES: tuple[Literal["iterations", "seconds"], ...] = ("iterations", "seconds")


def write(
    folder: str | Path,
    result: Result,
    runs: Mapping[str, Run],
    scores: Mapping[str, Mapping[str, Score]],
    test_tasks: ImageTasks,
    *,
    builtin: Model,
    builtin_score: Score,
) -> Path:
    """Write `index.html`, and its pictures as separate PNG files.

    Args:
        folder: Folder for the files.
        result: The result of the comparison.
        runs: The trained model of each method.
        scores: For each method, its scores by the name of the test, such as "test tasks" or "untrained".
        test_tasks: The environment from which the shown test tasks are sampled.
        builtin: The built-in model for characters, which is shown for comparison.
        builtin_score: Its score on the test tasks.

    Returns:
        The path of `index.html`.
    """
    folder = make_folder(folder)
    shown_tasks = test_tasks.sample(SHOWN_TASKS, torch.Generator().manual_seed(result.seed))
    curves = [
        Picture.draw(
            f"learning-curves-{x}",
            f"Validation accuracy of each method as a function of the {x} of training.",
            partial(figures.learning_curves, runs, x),
        )
        for x in X_AXES
    ]
    accuracies = Picture.draw(
        "accuracies", "Accuracies of each method with 95 % intervals.", partial(figures.accuracies, scores)
    )
    predictions = {
        name: Picture.draw(
            f"tasks-{name}",
            f"Test tasks with the correct and wrong predictions of {name}.",
            lambda theme, run=run: task_pictures.picture(run, shown_tasks, theme=theme),  # type: ignore[misc]
        )
        for name, run in {"built-in": builtin, **runs}.items()
    }
    for picture in (*curves, accuracies, *predictions.values()):
        write_atomically(folder / f"{picture.name}.png", picture.light)
    html = render(
        "demo.html.jinja",
        result=result,
        tasks=test_tasks,
        task_counts={test: score.tasks for test, score in next(iter(scores.values())).items()},
        rows=[_table_row(name, run, scores[name]) for name, run in runs.items()],
        curves=curves,
        accuracies=accuracies,
        predictions=predictions,
        builtin_score=builtin_score,
    )
    return write_atomically(folder / "index.html", html)


def _table_row(name: str, run: Run, scores: Mapping[str, Score]) -> dict[str, str]:
    """Return the cells of a method in the table, by column heading."""
    taxonomy = taxonomy_row(run.method)
    return {
        "method": name,
        **{test: str(score).removesuffix(" %") for test, score in scores.items()},
        "training": f"{run.seconds:.0f} s",
        "iterations": f"{run.curve[-1].iteration}",
        **{heading: taxonomy[heading] for heading in ("adapts", "inner solve", "outer gradient")},
    }
