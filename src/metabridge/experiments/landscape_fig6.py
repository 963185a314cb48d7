"""Collins et al. 2022, figure 6: minima of NAL and MAML, with and without a common center of hard and easy tasks.

The paper shows networks of one neuron with a Sigmoid; the neuron of a task is the one that produced its labels. If hard
and easy tasks have a common center, the minima of non-adaptive learning (NAL) and MAML are close and equally good. If
the hard tasks are close together and far from the easy ones, the minima differ, and the minimum of MAML is better. The
paper gives neither the weights of the neurons nor the step size α. Here the neurons of the first case are the corners
of a square. In the second case, the neurons of the two easy tasks and those of the two hard tasks are on opposite sides
of the origin. Tanh and ReLU, the other activations of theorem 1, are included as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from metabridge.environments.teacher_networks import Activation
from metabridge.experiments.experiment import Experiment, ExperimentOptions, Outcome
from metabridge.experiments.landscape_nets import (
    ALPHA,
    SQUARE,
    Case,
    NetData,
    draw_minima,
    measure_nets,
    minima_rows,
    settings_by_scale,
)
from metabridge.experiments.landscape_thm1 import LABELS, TITLE, draw_theorem, theorem_rows
from metabridge.report.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PUBLISHED_ACTIVATION = "sigmoid"
ACTIVATIONS: tuple[Activation, ...] = ("sigmoid", "tanh", "relu")
CASES = tuple(
    Case(
        f"{LABELS[activation]}, {name}",
        activation,
        support=80,
        easy=easy,
        hard=hard,
        minima_differ=differ if activation == PUBLISHED_ACTIVATION else None,
    )
    for activation in ACTIVATIONS
    for name, easy, hard, differ in (
        ("common center", SQUARE[1::2], SQUARE[::2], False),
        ("hard tasks apart", ((-1.0, -0.5), (-0.5, -1.0)), ((1.5, 1.0), (1.0, 1.5)), True),
    )
)
SETTINGS = settings_by_scale(CASES)


def measure(options: ExperimentOptions) -> NetData:
    """Return the minima in both cases of each activation, and check theorem 1."""
    return measure_nets(SETTINGS[options.scale], options)


def rows(data: NetData, _: ExperimentOptions) -> Iterator[Row]:
    """Yield rows of the minima and of theorem 1."""
    for minima in data.minima:
        yield from minima_rows(minima)
    for checks in data.checks.values():
        yield from theorem_rows(checks)


def figure(outcome: Outcome[NetData]) -> Figure:
    """Draw the landscapes, one row per activation, and theorem 1 in the last row."""
    from matplotlib.figure import Figure

    minima, checks = outcome.data.minima, outcome.data.checks
    figure = Figure(figsize=(15, 15.5), layout="constrained")
    *activation_rows, bottom = figure.subfigures(len(checks) + 1, 1, squeeze=False)[:, 0]
    for i, activation_row in enumerate(activation_rows):
        subfigures = activation_row.subfigures(1, 2, squeeze=False)[0]
        for subfigure, case_minima in zip(subfigures, minima[2 * i : 2 * i + 2]):
            subfigure.suptitle(f"{case_minima.case.name}: mean loss over tasks", fontsize=12)
            panels = subfigure.subplots(1, 2)
            draw_minima(panels, case_minima)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize=11)
    bottom.suptitle(TITLE, fontsize=12)
    for axes, (activation, activation_checks) in zip(bottom.subplots(1, len(checks), squeeze=False)[0], checks.items()):
        draw_theorem(axes, activation_checks)
        axes.set_title(LABELS[activation], fontsize=10)
    bottom.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return figure


EXPERIMENT = Experiment("landscape-fig6", measure, rows, figure, SETTINGS, {"alpha": ALPHA}, on_cpu=True)
