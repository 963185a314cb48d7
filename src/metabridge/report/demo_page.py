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
from metabridge.training import Run, Score

EXAMPLES = 4  # test tasks in the pictures of each method
X_AXES: tuple[Literal["iterations", "seconds"], ...] = ("iterations", "seconds")


def write(
    folder: str | Path,
    result: Result,
    runs: Mapping[str, Run],
    scores: Mapping[str, Mapping[str, Score]],
    test_tasks: ImageTasks,
) -> Path:
    """Write `index.html` and its pictures as PNG files.

    Args:
        folder: Folder for the files.
        result: The result of the comparison.
        runs: The trained model of each method.
        scores: The scores of each method, by what was tested.
        test_tasks: The tasks to show examples of.

    Returns:
        The path of `index.html`.
    """
    folder = make_folder(folder)
    examples = test_tasks.sample(EXAMPLES, torch.Generator().manual_seed(result.seed))
    curves = [
        Picture.draw(
            f"learning-curves-{x}",
            f"Validation accuracy of each method against {x} of training.",
            partial(figures.learning_curves, runs, x),
        )
        for x in X_AXES
    ]
    accuracies = Picture.draw(
        "accuracies", "Accuracies of each method with their intervals.", partial(figures.accuracies, scores)
    )
    answers = {
        name: Picture.draw(
            f"tasks-{name}",
            f"Test tasks with the right and wrong answers of {name}.",
            lambda theme, run=run: task_pictures.picture(run, examples, theme=theme),  # type: ignore[misc]
        )
        for name, run in runs.items()
    }
    for picture in (*curves, accuracies, *answers.values()):
        write_atomically(folder / f"{picture.name}.png", picture.light)
    html = render(
        "demo.html.jinja",
        result=result,
        tasks=test_tasks,
        task_counts={kind: score.tasks for kind, score in next(iter(scores.values())).items()},
        lines=[_line(name, run, scores[name]) for name, run in runs.items()],
        curves=curves,
        accuracies=accuracies,
        answers=answers,
    )
    return write_atomically(folder / "index.html", html)


def _line(name: str, run: Run, scores: Mapping[str, Score]) -> dict[str, str]:
    """Return the cells of a method's line in the table, by heading."""
    description = taxonomy_row(run.method)
    return {
        "method": name,
        **{kind: str(score).removesuffix(" %") for kind, score in scores.items()},
        "training": f"{run.seconds:.0f} s",
        "iterations": f"{run.curve[-1].iteration}",
        **{heading: description[heading] for heading in ("adapts", "inner solve", "outer gradient")},
    }
