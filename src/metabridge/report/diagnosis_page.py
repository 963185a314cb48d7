"""The page of a diagnosis, with its pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from metabridge.diagnosis import Diagnosis
from metabridge.files import make_folder, write_atomically
from metabridge.report.figures import COLOURS, LIGHT, MARKERS, Theme, plain_numbers
from metabridge.report.html_pages import Picture, render

PLAIN = ("rfs", "nal", "mtl")  # methods that do not adapt in training
APART = 1.08
GROUP_COLOURS = dict(zip(("hard", "easy"), (COLOURS[1], COLOURS[0])))


def write(diagnosis: Diagnosis, folder: str | Path) -> Path:
    """Write `diagnosis.json`, `index.html` and its pictures into the folder, and return the page's path."""
    folder = make_folder(folder)
    pictures = [
        Picture.draw("hardness", "Tasks by the rate of gradient descent on them.", lambda t: hardness(diagnosis, t)),
        Picture.draw("map", "Solutions of hard and easy tasks in two dimensions.", lambda t: solutions(diagnosis, t)),
        Picture.draw("gain", "Predicted gain of each method against its cost.", lambda t: gain(diagnosis, t)),
    ]
    text = f"{diagnosis.to_json()}\n".encode(errors="backslashreplace")
    html = render("diagnosis.html.jinja", found=diagnosis, pictures={picture.name: picture for picture in pictures})
    for picture in pictures:
        write_atomically(folder / f"{picture.name}.png", picture.light)
    write_atomically(folder / "diagnosis.json", text)
    return write_atomically(folder / "index.html", html)


def hardness(diagnosis: Diagnosis, theme: Theme = LIGHT) -> Figure:
    """How many tasks there are at each rate, a colour for each group."""
    logs = np.log10(diagnosis.rates)
    edges = np.linspace(logs.min(), logs.max() + 1e-9, 25)
    with theme.context():
        figure = Figure(figsize=(5.2, 3.6), layout="constrained")
        axes = figure.subplots()
        own = [logs[np.array(diagnosis.hard) == (group.name == "hard")] for group in diagnosis.groups]
        labels = [f"{group.tasks} {group.name} tasks" for group in diagnosis.groups]
        colours = list(GROUP_COLOURS.values())
        axes.hist([10**values for values in own], (10**edges).tolist(), stacked=True, color=colours, label=labels)
        axes.set(xscale="log", xlabel="rate of gradient descent: harder to the left", ylabel="tasks")
        plain_numbers(axes.xaxis)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(visible=False, axis="x")
        figure.legend(loc="outside upper center", ncols=2)
    return figure


def solutions(diagnosis: Diagnosis, theme: Theme = LIGHT) -> Figure:
    """Where each task has its solution, along the line between the groups' centres and across it."""
    places = np.array(diagnosis.places)
    with theme.context():
        figure = Figure(figsize=(5.2, 4.4), layout="constrained")
        axes = figure.subplots()
        for group, marker in zip(diagnosis.groups, MARKERS):
            own = places[np.array(diagnosis.hard) == (group.name == "hard")]
            colour = GROUP_COLOURS[group.name]
            axes.plot(own[:, 0], own[:, 1], marker, color=colour, markersize=4, alpha=0.6, label=f"{group.name} tasks")
            x, y = own.mean(0)
            axes.plot(
                x, y, "P", color=colour, markeredgecolor=theme.ink, markersize=12, label=f"centre of the {group.name}"
            )
        axes.set(xlabel="along the line between the centres", ylabel="across it")
        axes.set_aspect("equal", adjustable="datalim")
        figure.legend(loc="outside upper center", ncols=2)
    return figure


def gain(diagnosis: Diagnosis, theme: Theme = LIGHT) -> Figure:
    """The share of the loss that each method saves beside plain pre-training, against its cost; its kernel's score."""
    spent: dict[str, float] = {}
    for cost in diagnosis.costs:  # those of about one cost a little apart, so that they do not cover each other
        near = sum(abs(other / cost.training - 1) < 0.3 for other in spent.values())
        spent[cost.method] = cost.training * APART**near
    style = dict(zip(spent, zip(COLOURS, MARKERS)))
    twins = {twin.method: twin for twin in diagnosis.twins}
    saved = diagnosis.saved
    with theme.context():
        figure = Figure(figsize=(5.2 + 4.0 * bool(twins), 3.8), layout="constrained")
        first, *others = figure.subplots(1, 1 + bool(twins), squeeze=False)[0]
        for name, (colour, marker) in style.items():
            low, value, high = (0, 0, 0) if name in PLAIN else (saved.low, saved.value, saved.high)
            margins = [[100 * (value - low)], [100 * (high - value)]]
            label = f"{name.upper()}{' (plain)' if name in PLAIN else ''}"
            first.errorbar(spent[name], 100 * value, margins, fmt=marker, color=colour, capsize=3, label=label)
        least, most = first.get_ylim()
        first.set(ylim=(min(least, -5), max(most, 5)), ylabel="loss saved beside plain pre-training, %")
        for axes in others:
            alone = twins["support alone"]
            axes.axhspan(alone.mean - alone.ci95, alone.mean + alone.ci95, color=theme.line, label="the support alone")
            for name, (colour, marker) in style.items():
                if name in twins:
                    mean, margin = twins[name].mean, twins[name].ci95
                    axes.errorbar(spent[name], mean, margin, fmt=marker, color=colour, capsize=3)
            axes.set(ylabel=f"{alone.metric} of the kernels of wide nets")
        for axes in (first, *others):
            axes.set(xscale="log", xlim=(0.8, 2 * max(spent.values())))
            axes.set_xlabel("gradients for each training task\n(methods of nearly one cost are set apart)")
            plain_numbers(axes.xaxis)
        figure.legend(loc="outside upper center", ncols=5)
    return figure
