"""The HTML report of a diagnosis, with its figures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from metabridge.diagnosis import Diagnosis
from metabridge.diagnosis.advice import NO_META_TRAINING
from metabridge.files import make_folder, write_atomically
from metabridge.report.figures import COLORS, LIGHT, MARKERS, Theme, plain_numbers
from metabridge.report.html_pages import Picture, render

WITHOUT_ADAPTATION = ("rfs", "nal", "mtl")  # methods that do not adapt in training
COST_OFFSET = 1.08  # in the figure, a cost is multiplied by this factor for each similar cost, to separate the points
GROUP_COLORS = dict(zip(("hard", "easy"), (COLORS[1], COLORS[0])))


def write(diagnosis: Diagnosis, folder: str | Path) -> Path:
    """Write `diagnosis.json`, `index.html` and its figures as PNG files, and return the path of `index.html`."""
    folder = make_folder(folder)
    pictures = [
        Picture.draw("hardness", "Histogram of convergence rates.", lambda theme: rate_histogram(diagnosis, theme)),
        Picture.draw("map", "Solutions of the tasks in two dimensions.", lambda theme: solution_map(diagnosis, theme)),
        Picture.draw(
            "gain", "Predicted gain of each method as a function of its cost.", lambda theme: gains(diagnosis, theme)
        ),
    ]
    json_file = f"{diagnosis.to_json()}\n".encode(errors="backslashreplace")
    pictures_by_name = {picture.name: picture for picture in pictures}
    html = render("diagnosis.html.jinja", diagnosis=diagnosis, pictures=pictures_by_name)
    for picture in pictures:
        write_atomically(folder / f"{picture.name}.png", picture.light)
    write_atomically(folder / "diagnosis.json", json_file)
    return write_atomically(folder / "index.html", html)


def rate_histogram(diagnosis: Diagnosis, theme: Theme = LIGHT) -> Figure:
    """Draw a histogram of the tasks' convergence rates, with one color per group."""
    log_rates = np.log10(diagnosis.rates)
    log_edges = np.linspace(log_rates.min(), log_rates.max() + 1e-9, 25)
    with theme.context():
        figure = Figure(figsize=(5.2, 3.6), layout="constrained")
        axes = figure.subplots()
        rates = [10 ** log_rates[np.array(diagnosis.is_hard) == (group.name == "hard")] for group in diagnosis.groups]
        labels = [f"{group.tasks} {group.name} tasks" for group in diagnosis.groups]
        axes.hist(rates, (10**log_edges).tolist(), stacked=True, color=list(GROUP_COLORS.values()), label=labels)
        axes.set(xscale="log", xlabel="rate of gradient descent (harder to the left)", ylabel="tasks")
        plain_numbers(axes.xaxis)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(visible=False, axis="x")
        figure.legend(loc="outside upper center", ncols=2)
    return figure


def solution_map(diagnosis: Diagnosis, theme: Theme = LIGHT) -> Figure:
    """Draw the solution of each task, with the line between the groups' centers as the horizontal axis."""
    solutions = np.array(diagnosis.projected_solutions)
    with theme.context():
        figure = Figure(figsize=(5.2, 4.4), layout="constrained")
        axes = figure.subplots()
        for group, marker in zip(diagnosis.groups, MARKERS):
            group_solutions = solutions[np.array(diagnosis.is_hard) == (group.name == "hard")]
            color = GROUP_COLORS[group.name]
            axes.plot(*group_solutions.T, marker, markersize=4, alpha=0.6, label=f"{group.name} tasks", color=color)
            x, y = group_solutions.mean(0)
            label = f"center of the {group.name} tasks"
            axes.plot(x, y, "P", markeredgecolor=theme.text, markersize=12, label=label, color=color)
        axes.set(xlabel="along the line between the centers", ylabel="perpendicular to this line")
        axes.set_aspect("equal", adjustable="datalim")
        figure.legend(loc="outside upper center", ncols=2)
    return figure


def gains(diagnosis: Diagnosis, theme: Theme = LIGHT) -> Figure:
    """Draw the fraction of the loss that each method saves, as a function of its cost.

    If the diagnosis has kernel predictions, draw them in a second panel.
    """
    drawn_costs: dict[str, float] = {}
    for cost in diagnosis.costs:
        similar_count = sum(abs(other / cost.training_gradients - 1) < 0.3 for other in drawn_costs.values())
        drawn_costs[cost.method] = cost.training_gradients * COST_OFFSET**similar_count
    styles = dict(zip(drawn_costs, zip(COLORS, MARKERS)))
    predictions = {prediction.method: prediction for prediction in diagnosis.kernel_predictions}
    gain = diagnosis.relative_gain
    with theme.context():
        figure = Figure(figsize=(5.2 + 4.0 * bool(predictions), 3.8), layout="constrained")
        formula_axes, *kernel_axes = figure.subplots(1, 1 + bool(predictions), squeeze=False)[0]
        for name, (color, marker) in styles.items():
            low, value, high = (0, 0, 0) if name in WITHOUT_ADAPTATION else (gain.low, gain.value, gain.high)
            margins = [[100 * (value - low)], [100 * (high - value)]]
            label = f"{name.upper()}{' (pre-training)' if name in WITHOUT_ADAPTATION else ''}"
            formula_axes.errorbar(
                drawn_costs[name], 100 * value, margins, fmt=marker, color=color, capsize=3, label=label
            )
        bottom, top = formula_axes.get_ylim()
        formula_axes.set(
            ylim=(min(bottom, -5), max(top, 5)), ylabel="reduction of the loss compared with pre-training, %"
        )
        for axes in kernel_axes:
            baseline = predictions[NO_META_TRAINING]
            low, high = baseline.mean - baseline.ci95, baseline.mean + baseline.ci95
            axes.axhspan(low, high, color=theme.grid, label="regression on the support set only")
            for name, (color, marker) in styles.items():
                if name in predictions:
                    mean, margin = predictions[name].mean, predictions[name].ci95
                    axes.errorbar(drawn_costs[name], mean, margin, fmt=marker, color=color, capsize=3)
            axes.set(ylabel=f"{baseline.metric} of kernels of infinitely wide networks")
        for axes in (formula_axes, *kernel_axes):
            axes.set(xscale="log", xlim=(0.8, 2 * max(drawn_costs.values())))
            axes.set_xlabel("gradients per training task\n(points with similar costs are shifted)")
            plain_numbers(axes.xaxis)
        figure.legend(loc="outside upper center", ncols=5)
    return figure
