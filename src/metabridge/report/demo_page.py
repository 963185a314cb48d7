"""One HTML page about a comparison of methods: everything in one file, nothing fetched from elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from metabridge.experiments.glyph_methods import Outcome, Trial
from metabridge.files import make_folder, write_atomically
from metabridge.report import figures, task_pictures
from metabridge.report.figures import DARK, LIGHT, Theme
from metabridge.report.method_table import described

EXAMPLES = 4  # test tasks drawn for each method
AXES: tuple[Literal["iterations", "seconds"], ...] = ("iterations", "seconds")


@dataclass(frozen=True)
class Picture:
    """A figure for light and for dark paper."""

    name: str
    alt: str
    light: bytes
    dark: bytes

    @classmethod
    def drawn(cls, name: str, alt: str, draw: Callable[[Theme], Figure]) -> Picture:
        """Draw it on both papers."""
        return cls(name, alt, figures.png(draw(LIGHT)), figures.png(draw(DARK)))

    @property
    def html(self) -> Markup:
        """The picture itself, inside the page, as the reader's colour scheme has it."""
        light, dark = (f"data:image/png;base64,{base64.b64encode(png).decode()}" for png in (self.light, self.dark))
        return Markup(
            '<picture><source srcset="{}" media="(prefers-color-scheme: dark)"><img src="{}" alt="{}"></picture>'
        ).format(dark, light, self.alt)


def write(outcome: Outcome, folder: str | Path) -> Path:
    """Write `index.html` and its pictures as PNG files into the folder, and return the page's path."""
    folder = make_folder(folder)
    examples = outcome.examples(EXAMPLES)
    runs = {trial.name: trial.run for trial in outcome.trials}
    curves = [
        Picture.drawn(
            f"learning-curves-{along}",
            f"Validation accuracy of each method against {along} of training.",
            lambda theme, along=along: figures.learning_curves(runs, along, theme),  # type: ignore[misc]
        )
        for along in AXES
    ]
    dots = Picture.drawn(
        "accuracies",
        "Accuracies of each method with their intervals.",
        lambda theme: figures.accuracies({trial.name: trial.scores() for trial in outcome.trials}, theme),
    )
    shown = [
        Picture.drawn(
            f"tasks-{trial.name}",
            f"Test tasks with the right and wrong answers of {trial.name}.",
            lambda theme, trial=trial: task_pictures.picture(trial.run, examples, theme=theme),  # type: ignore[misc]
        )
        for trial in outcome.trials
    ]
    for picture in (*curves, dots, *shown):
        write_atomically(folder / f"{picture.name}.png", picture.light)
    html = rendered(
        "page.html.jinja",
        result=outcome.result,
        tasks=outcome.environment,
        lines=[_line(trial) for trial in outcome.trials],
        trials=outcome.trials,
        curves=curves,
        dots=dots,
        shown=shown,
    )
    return write_atomically(folder / "index.html", html)


def rendered(template: str, **values: object) -> bytes:
    """Fill a template of this folder, in the style of all pages."""
    templates = Environment(
        loader=PackageLoader("metabridge", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return templates.get_template(template).render(**values, light=LIGHT, dark=DARK).encode(errors="backslashreplace")


def _line(trial: Trial) -> dict[str, str]:
    """One line of the table: the numbers, then what the method is."""
    words = described(trial.run.method)
    scores = {kind: score.told().removesuffix(" %") for kind, score in trial.scores().items()}
    return {
        "method": trial.name,
        **scores,
        "training": f"{trial.run.seconds:.0f} s",
        "iterations": f"{trial.setting.iterations}",
        **{heading: words[heading] for heading in ("adapts", "inner solve", "outer gradient")},
    }
