"""Figures of training runs and their scores, with a light and a dark theme."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter
from numpy.typing import NDArray
from PIL import Image

from metabridge.diagnosis import Interval
from metabridge.figure_theme import COLORS as COLORS
from metabridge.figure_theme import DARK as DARK
from metabridge.figure_theme import LIGHT as LIGHT
from metabridge.figure_theme import Theme as Theme
from metabridge.files import write_atomically
from metabridge.training.evaluation import Score
from metabridge.training.trainer import Run

LINE_STYLES = ("-", "--", ":")
MARKERS = ("o", "x", "v", "^", "s")


def png(figure: Figure) -> bytes:
    """Return the figure as a PNG file, reduced to 256 colors, which makes it about three times smaller."""
    full_color, reduced = io.BytesIO(), io.BytesIO()
    figure.savefig(full_color, format="png", dpi=150)
    Image.open(full_color).convert("RGB").quantize(256).save(reduced, "PNG", optimize=True)
    return reduced.getvalue()


def save(figure: Figure, file: Path) -> None:
    """Write the figure as a PNG file."""
    write_atomically(file, png(figure))


def plain_numbers(axis: Axis) -> None:
    """Label a logarithmic axis with numbers such as 0.02 instead of 2e-02."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FormatStrFormatter("%g"))
    axis.set_minor_formatter(NullFormatter())


def learning_curves(runs: Mapping[str, Run], x_axis: Literal["iterations", "seconds"], theme: Theme = LIGHT) -> Figure:
    """Draw the validation accuracies of each run as functions of the iterations or seconds, with 95 % intervals.

    The intervals are confidence intervals over validation tasks.
    """
    with theme.context():
        figure = Figure(figsize=(4.8, 4), layout="constrained")
        axes = figure.subplots()
        for (name, run), (line_style, color) in zip(
            runs.items(), itertools.cycle(itertools.product(LINE_STYLES, COLORS))
        ):
            points = [point for point in run.curve if point.score is not None]
            xs = [point.iteration if x_axis == "iterations" else point.seconds for point in points]
            means, margins = _percent([point.score for point in points if point.score is not None])
            axes.fill_between(xs, means - margins, means + margins, color=color, alpha=0.15, linewidth=0)
            axes.plot(xs, means, line_style, color=color, label=name, linewidth=1.8)
        axes.set(ylabel="validation accuracy, %", ylim=(None, min(100.0, axes.get_ylim()[1])))
        axes.set_xlabel("iterations" if x_axis == "iterations" else "seconds of training")
        figure.legend(loc="outside lower center", ncols=4, columnspacing=1.2)
    return figure


def accuracies(scores: Mapping[str, Mapping[str, Score]], theme: Theme = LIGHT) -> Figure:
    """Draw accuracies with their 95 % confidence intervals.

    Args:
        scores: For each method, its scores by the name of the test, such as "test tasks" or "untrained". The figure has
            one row per method, with one marker per test.
        theme: Colors of the figure.
    """
    with theme.context():
        figure = Figure(figsize=(5.6, 1.6 + 0.6 * len(scores)), layout="constrained")
        axes = figure.subplots()
        test_names = list(next(iter(scores.values())))
        intervals = {
            test: {method: percent_interval(method_scores[test]) for method, method_scores in scores.items()}
            for test in test_names
        }
        draw_intervals(axes, intervals)
        axes.tick_params(axis="y", labelsize=11)
        axes.set(xlabel="accuracy, %")
        figure.legend(loc="outside upper center", ncols=2)
    return figure


def draw_intervals(
    axes: Axes, series: Mapping[str, Mapping[str, Interval]], rows: Sequence[str] | None = None, spacing: float = 0.16
) -> None:
    """Draw values with their 95 % confidence intervals.

    The panel has one row per name. Each series has its own marker and color, and at most one value in each row.

    Args:
        axes: The panel.
        series: For each series, by its label in the legend: the intervals, by the name of the row.
        rows: Names of the rows, from top to bottom. Default: all names in `series`.
        spacing: Distance between the markers of a row, as a fraction of the distance between rows.
    """
    if rows is None:
        rows = list(dict.fromkeys(name for intervals in series.values() for name in intervals))
    for index, ((label, intervals), marker, color) in enumerate(zip(series.items(), MARKERS, COLORS)):
        shift = spacing * (index - (len(series) - 1) / 2)  # so that intervals do not overlap
        values = [interval.value for interval in intervals.values()]
        below = [interval.value - interval.low for interval in intervals.values()]
        above = [interval.high - interval.value for interval in intervals.values()]
        ys = [rows.index(name) + shift for name in intervals]
        axes.errorbar(values, ys, None, [below, above], marker, color=color, label=label, markersize=5, capsize=2)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")


def percent_interval(score: Score) -> Interval:
    """Return the mean accuracy with its 95 % confidence interval, in percent."""
    return Interval.symmetric(100 * score.mean, 100 * score.ci95)


def _percent(scores: Sequence[Score]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the means and the half-widths of their 95 % confidence intervals, in percent."""
    return 100 * np.array([score.mean for score in scores]), 100 * np.array([score.ci95 for score in scores])
