"""Figures of the results of experiments, and the parts that several of them share."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from metabridge.intervals import mean_interval
from metabridge.report.figures import COLOURS, LIGHT, MARKERS, Theme, plain_numbers
from metabridge.report.results import Result, Row

X = TypeVar("X", int, float)


def published_and_ours(result: Result, theme: Theme = LIGHT) -> Figure:
    """Draw our numbers and the published ones, one line for each row with the metric of the first row."""
    figure = compared_rows([row for row in result.rows if row.metric == result.rows[0].metric], theme)
    if result.scale == "quick":
        figure.suptitle("quick scale: far less data and training than published", fontsize=10)
    return figure


def compared_rows(rows: Sequence[Row], theme: Theme = LIGHT) -> Figure:
    """Draw our numbers with their 95 % intervals and the published ones, one line for each row."""
    with theme.context():
        figure = Figure(figsize=(6.4, 1.4 + 0.36 * len(rows)), layout="constrained")
        axes = figure.subplots()
        heights = np.arange(len(rows))
        published = [(row.published, height) for row, height in zip(rows, heights) if row.published is not None]
        if published:
            axes.plot(*zip(*published), "D", color=COLOURS[1], label="published")
        axes.errorbar(
            [row.ours for row in rows],
            heights,
            xerr=[row.ci95 or 0 for row in rows],
            fmt="o",
            color=COLOURS[0],
            label="ours, with 95 % intervals",
            capsize=2,
        )
        axes.set_yticks(heights, [row.name for row in rows])
        axes.invert_yaxis()
        axes.set(xlabel=rows[0].metric.replace(" %", ", %"))
        figure.legend(loc="outside upper center", ncols=2)
    return figure


def accuracy_over_time(curves: Mapping[str, Sequence[tuple[float, float, float]]], theme: Theme = LIGHT) -> Figure:
    """Draw validation accuracies with 95 % intervals; each curve consists of (minutes, mean, half-width)."""
    with theme.context():
        figure = Figure(figsize=(5.6, 4.2), layout="constrained")
        axes = figure.subplots()
        for (name, points), colour, marker in zip(curves.items(), itertools.cycle(COLOURS), itertools.cycle(MARKERS)):
            minutes, means, margins = (np.array(column) for column in zip(*points))
            low, high = 100 * (means - margins), 100 * (means + margins)
            axes.fill_between(minutes, low, high, color=colour, alpha=0.15, linewidth=0)
            axes.plot(minutes, 100 * means, f"-{marker}", color=colour, label=name, linewidth=1.6, markersize=4)
        axes.set(xlabel="minutes of training", ylabel="validation accuracy, %", xscale="log")
        plain_numbers(axes.xaxis)
        figure.legend(loc="outside upper center", ncols=4)
    return figure


def plot_means(axes: Axes, curves: Mapping[str, Mapping[X, Sequence[float]]]) -> None:
    """Plot the means over runs with their 95 % intervals; a curve maps each x to the values of all runs."""
    widths = itertools.count(3.2, -0.6)  # thinner each time, so that lines that coincide all stay visible
    for (name, points), colour, marker, width in zip(curves.items(), COLOURS, MARKERS, widths):
        xs = list(points)
        means, margins = (np.array(column) for column in zip(*map(mean_interval, points.values())))
        axes.fill_between(xs, means - margins, means + margins, color=colour, alpha=0.12, linewidth=0)
        axes.plot(xs, means, f"-{marker}", color=colour, label=name, linewidth=width, markersize=2 * width + 2)


def plot_power(axes: Axes, points: Mapping[int, Sequence[float]], exponent: int) -> None:
    """Plot L^exponent in grey, scaled to pass through the first mean of a curve over depths L."""
    depths = list(points)
    start = mean_interval(points[depths[0]])[0]
    line = [start * (depth / depths[0]) ** exponent for depth in depths]
    axes.plot(depths, line, "--" if exponent == -1 else ":", color="grey", label=f"proportional to $L^{{{exponent}}}$")


def depth_axes(axes: Axes, depths: Sequence[int]) -> None:
    """Make both axes logarithmic, with the depths as ticks on x."""
    axes.set(xscale="log", yscale="log", xlabel="depth L of the network")
    axes.set_xticks(depths, [str(depth) for depth in depths])
    axes.xaxis.set_minor_locator(NullLocator())
    plain_numbers(axes.yaxis)


def legends_below(panels: Iterable[Axes]) -> None:
    """Put a legend below each panel."""
    for axes in panels:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14))
