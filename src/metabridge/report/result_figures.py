"""Figures of results of experiments, and plotting functions that several experiments share."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from metabridge.diagnosis import Interval
from metabridge.intervals import mean_interval
from metabridge.report.figures import COLORS, LIGHT, MARKERS, Theme, plain_numbers
from metabridge.report.results import Result, Row
from metabridge.theory.power_law import PowerLaw, ValuesBySize

if TYPE_CHECKING:
    from torch import Tensor

X = TypeVar("X", int, float)


def published_and_ours(result: Result, theme: Theme = LIGHT) -> Figure:
    """Draw our numbers and the published ones for all rows that have the metric of the first row."""
    figure = compared_rows([row for row in result.rows if row.metric == result.rows[0].metric], theme)
    if result.scale == "quick":
        figure.suptitle("quick scale: far less data and training than published", fontsize=10)
    return figure


def compared_rows(rows: Sequence[Row], theme: Theme = LIGHT) -> Figure:
    """Draw our numbers with their 95 % intervals and the published ones, one line of the figure per row."""
    with theme.context():
        figure = Figure(figsize=(6.4, 1.4 + 0.36 * len(rows)), layout="constrained")
        axes = figure.subplots()
        positions = np.arange(len(rows))
        published = [(row.published, position) for row, position in zip(rows, positions) if row.published is not None]
        if published:
            axes.plot(*zip(*published), "D", color=COLORS[1], label="published")
        axes.errorbar(
            [row.ours for row in rows],
            positions,
            xerr=[row.ci95 or 0 for row in rows],
            fmt="o",
            color=COLORS[0],
            label="ours, with 95 % intervals",
            capsize=2,
        )
        axes.set_yticks(positions, [row.name for row in rows])
        axes.invert_yaxis()
        axes.set(xlabel=rows[0].metric.replace(" %", ", %"))
        figure.legend(loc="outside upper center", ncols=2)
    return figure


def accuracy_over_time(curves: Mapping[str, Sequence[tuple[float, float, float]]], theme: Theme = LIGHT) -> Figure:
    """Draw validation accuracies with 95 % intervals; the points of a curve are (minutes, mean, half-width)."""
    with theme.context():
        figure = Figure(figsize=(5.6, 4.2), layout="constrained")
        axes = figure.subplots()
        for (name, points), color, marker in zip(curves.items(), itertools.cycle(COLORS), itertools.cycle(MARKERS)):
            minutes, means, margins = (np.array(column) for column in zip(*points))
            low, high = 100 * (means - margins), 100 * (means + margins)
            axes.fill_between(minutes, low, high, color=color, alpha=0.15, linewidth=0)
            axes.plot(minutes, 100 * means, f"-{marker}", color=color, label=name, linewidth=1.6, markersize=4)
        axes.set(xlabel="minutes of training", ylabel="validation accuracy, %", xscale="log")
        plain_numbers(axes.xaxis)
        figure.legend(loc="outside upper center", ncols=4)
    return figure


def plot_means(axes: Axes, curves: Mapping[str, Mapping[X, Sequence[float]]]) -> None:
    """Plot the means over runs with their 95 % intervals; a curve maps each x to the values of all runs."""
    widths = itertools.count(3.2, -0.6)  # decreasing, so that coinciding lines stay visible
    for (name, points), color, marker, width in zip(curves.items(), COLORS, MARKERS, widths):
        xs = list(points)
        means, margins = (np.array(column) for column in zip(*map(mean_interval, points.values())))
        axes.fill_between(xs, means - margins, means + margins, color=color, alpha=0.12, linewidth=0)
        axes.plot(xs, means, f"-{marker}", color=color, label=name, linewidth=width, markersize=2 * width + 2)


def plot_power(axes: Axes, points: Mapping[int, Sequence[float]], exponent: int) -> None:
    """Plot L^exponent in gray, scaled to equal the mean over runs at the first depth L.

    `points` maps each depth to the values of all runs.
    """
    depths = list(points)
    first_mean = mean_interval(points[depths[0]])[0]
    power = [first_mean * (depth / depths[0]) ** exponent for depth in depths]
    axes.plot(depths, power, "--" if exponent == -1 else ":", color="gray", label=f"proportional to $L^{{{exponent}}}$")


def depth_axes(axes: Axes, depths: Sequence[int]) -> None:
    """Make both axes logarithmic, with the depths as ticks on x."""
    axes.set(xscale="log", yscale="log", xlabel="depth L of the network")
    axes.set_xticks(depths, [str(depth) for depth in depths])
    axes.xaxis.set_minor_locator(NullLocator())
    plain_numbers(axes.yaxis)


def legends_below(panels: Iterable[Axes]) -> None:
    """Draw a legend below each panel."""
    for axes in panels:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14))


def subplots(title: str, rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Figure, Any]:
    """Return a figure with a title, and its panels as returned by `Figure.subplots`."""
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title)
    return figure, figure.subplots(rows, columns, **options)


def draw_error_bars(
    axes: Axes, runs: Mapping[float, Tensor], color: str, label: str, marker: str = "o", markersize: float = 4
) -> None:
    """Draw means over runs with their 95 % intervals as error bars; `runs` maps each x to the values of all runs."""
    means, margins = zip(*(mean_interval(values.tolist()) for values in runs.values()))
    axes.errorbar(list(runs), means, margins, fmt=marker, color=color, label=label, markersize=markersize, capsize=2)


def plot_mean_and_deviation(
    axes: Axes, xs: Sequence[float], runs: Sequence[Sequence[float]], color: str, label: str, **line_options: Any
) -> None:
    """Plot the mean over runs with a band of ± one standard deviation; a run has one value for each x.

    `line_options` are passed to `Axes.plot`.
    """
    mean, deviation = np.mean(runs, 0), np.std(runs, 0, ddof=1)
    axes.fill_between(xs, mean - deviation, mean + deviation, color=color, alpha=0.2, linewidth=0)
    axes.plot(xs, mean, color=color, label=label, **line_options)


def plot_before_and_after(axes: Axes, groups: Mapping[str, Mapping[str, Sequence[Sequence[float]]]]) -> None:
    """Plot values before (○) and after (●) a change, joined by a line for each run.

    `groups` maps the name of a group to its quantities, and the label of a quantity to the pairs (before, after) of all
    runs. Each group has a position on the x axis, and each of at most four quantities a color.
    """
    for position, quantities in enumerate(groups.values()):
        for index, (label, pairs) in enumerate(quantities.items()):
            color, x = COLORS[index], [position + 0.12 * (index - 1.5)] * len(pairs)
            before, after = zip(*pairs)
            axes.plot([x, x], [before, after], color=color, linewidth=1)
            axes.plot(x, before, "o", color=color, markerfacecolor="none")
            axes.plot(x, after, "o", color=color, label=label if position == 0 else None)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_xlim(-0.6, len(groups) - 0.4)


def draw_power_laws(axes: Axes, points_by_label: Mapping[str, ValuesBySize]) -> None:
    """Draw values as functions of a network's width on logarithmic axes, with fitted power laws and their exponents.

    `points_by_label` maps each label in the legend to the values of all runs at each width.
    """
    for (label, points), color, marker in zip(points_by_label.items(), COLORS, MARKERS):
        law, widths = PowerLaw.fit(points), list(points)
        xs, ys = zip(*((width, value) for width, values in points.items() for value in values))
        axes.plot(xs, ys, marker, color=color, markersize=4, alpha=0.6)
        fitted = [law(width) for width in widths]
        axes.plot(widths, fitted, color=color, label=f"{label}, exponent {format_exponent(law)}")
    # a line for comparison, which starts at the same point as the last power law
    inverse_root = [fitted[0] * (width / widths[0]) ** -0.5 for width in widths]
    axes.plot(widths, inverse_root, "--", color="gray", label="proportional to width$^{-1/2}$")
    axes.set(xscale="log", yscale="log", xlabel="width")
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.xaxis.set_minor_locator(NullLocator())
    plain_numbers(axes.yaxis)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1))


def format_exponent(law: PowerLaw) -> str:
    """Return the exponent with its 95 % interval, such as "−0.50 ± 0.02"."""
    return f"{law.exponent:.2f} ± {law.ci95:.2f}".replace("-", "−")


def draw_predicted_ratios(
    axes: Axes,
    points: Sequence[tuple[float, Interval, bool | None]],
    labels: Mapping[bool | None, str],
    threshold: float,
    threshold_label: str,
) -> None:
    """Draw predicted ratios with their 95 % intervals as functions of the true ratios.

    Args:
        axes: The panel.
        points: For each prediction, the true ratio, the predicted ratio, and whether the prediction is right (None if
            undecided). The last determines color and marker.
        labels: Label in the legend for right, wrong and undecided predictions.
        threshold: Predicted ratio at which to draw a horizontal line.
        threshold_label: Label of the horizontal line in the legend.
    """
    styles = {True: (COLORS[0], "o"), None: (COLORS[6], "s"), False: (COLORS[1], "X")}
    for is_right, label in labels.items():
        color, marker = styles[is_right]
        selected = [(true_ratio, interval) for true_ratio, interval, verdict in points if verdict is is_right]
        margins = [[interval.value - interval.low for _, interval in selected]]
        margins += [[interval.high - interval.value for _, interval in selected]]
        xs, ys = [true_ratio for true_ratio, _ in selected], [interval.value for _, interval in selected]
        label = f"{label} ({len(selected)})"
        axes.errorbar(xs, ys, margins, fmt=marker, color=color, markersize=4, linewidth=0.8, label=label)
    limit = 1.1 * max(max(true_ratio, interval.high) for true_ratio, interval, _ in points)
    axes.plot([0.95, limit], [0.95, limit], color=LIGHT.text, linewidth=0.8, zorder=0)
    axes.axhline(threshold, color=LIGHT.text, linestyle=":", linewidth=0.8, zorder=0, label=threshold_label)
    axes.set(xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        _set_ratio_ticks(axis, limit)
    axes.legend(fontsize=8)


def draw_ratio_errors(axes: Axes, points: Sequence[tuple[float, Interval]]) -> None:
    """Draw errors of predicted ratios, in half-widths of their 95 % intervals, as functions of the true ratios.

    Args:
        axes: The panel.
        points: The true ratio and the predicted ratio of each prediction.
    """
    for is_contained, label, color, marker in (
        (True, "in the 95 % interval", COLORS[0], "o"),
        (False, "outside", COLORS[1], "X"),
    ):
        selected = [(ratio, interval) for ratio, interval in points if interval.contains(ratio) is is_contained]
        xs, ys = [ratio for ratio, _ in selected], [interval.relative_deviation(ratio) for ratio, interval in selected]
        axes.plot(xs, ys, marker, color=color, markersize=4, label=f"{label} ({len(selected)})")
    axes.axhspan(-1, 1, color=LIGHT.grid, alpha=0.5, zorder=0)
    axes.set(xscale="log")
    _set_ratio_ticks(axes.xaxis, 1.1 * max(ratio for ratio, _ in points))
    axes.legend(fontsize=8)


def _set_ratio_ticks(axis: Axis, limit: float) -> None:
    """Set ticks at 1, 1.5, 2, 3, 5, 10, ... below a limit."""
    ticks = [tick for tick in (1, 1.5, 2, 3, 5, 10, 20, 50, 100) if tick < limit]
    axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_ticks([], minor=True)


def draw_rank_agreement(axes: Axes, series: Mapping[str, Mapping[str, tuple[float, str]]]) -> None:
    """Draw Kendall's τ of predicted and measured rankings, one row of the panel per name and one marker per series.

    Args:
        axes: The panel.
        series: For each label in the legend, τ and a text for the right margin, by the name of the row; at most two
            labels.
    """
    rows = list(dict.fromkeys(name for agreement in series.values() for name in agreement))
    for (label, agreement), color, marker, shift in zip(series.items(), COLORS[2:], "sv", (-0.16, 0.16)):
        ys = [rows.index(name) + shift for name in agreement]
        axes.plot([tau for tau, _ in agreement.values()], ys, marker, color=color, label=label)
        for (_, text), y in zip(agreement.values(), ys):
            axes.annotate(text, (1.12, y), fontsize=8, color=color, va="center")
    axes.set(xlim=(-1.1, 1.4))
    axes.set_xticks([-1, -0.5, 0, 0.5, 1])
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.axvline(0, linewidth=0.8, color="gray")
    axes.invert_yaxis()
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
