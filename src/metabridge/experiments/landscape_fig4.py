"""Collins et al. 2022, figures 4 and 5: minima of the losses of NAL and MAML, if all tasks are easy or one is hard.

The labels of each task are the outputs of a network with one neuron. In the paper, the minima of non-adaptive learning
(NAL) and MAML coincide if all tasks are easy. If one task is hard, the minimum of MAML is closer to its neuron and has
a lower loss after adaptation. The paper gives neither the weights of the neurons nor the step size α. Here the neurons
of four tasks are the corners of a square in both cases, so that the cases differ only in the hardness of one task. The
symmetry of a square makes the minima of NAL and MAML for four easy tasks coincide, so an asymmetric case is included as
well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch.func import vmap

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
from metabridge.experiments.landscape_thm1 import TITLE, draw_theorem, theorem_rows
from metabridge.report.results import Row
from metabridge.theory.loss_surface import EXTENT, neuron_grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ASYMMETRIC = ((1.5, 0.0), (-0.5, 1.0), (-0.5, -1.0), (-1.0, 0.0))
CASES = (
    Case("four easy tasks", "softplus", support=250, easy=SQUARE, minima_differ=False),
    Case("one hard task", "softplus", support=250, easy=SQUARE[1:], hard=SQUARE[:1], minima_differ=True),
    Case("four easy tasks, asymmetric", "softplus", support=250, easy=ASYMMETRIC, minima_differ=False),
)
SETTINGS = settings_by_scale(CASES)


def measure(options: ExperimentOptions) -> NetData:
    """Return the minima in each case, and check theorem 1 for Softplus."""
    return measure_nets(SETTINGS[options.scale], options)


def rows(data: NetData, _: ExperimentOptions) -> Iterator[Row]:
    """Yield rows of the minima, of the curvatures of an easy and a hard task, and of theorem 1."""
    for minima in data.minima:
        yield from minima_rows(minima)
    for name, case in (("easy task 1", CASES[0]), ("hard task 1", CASES[1])):
        task = case.tasks[0]
        smallest, largest = task.curvatures(task.neurons)[[0, -1]].tolist()
        yield Row(name, "smallest curvature at its neuron", ours=smallest, note=f"the largest is {largest:.3f}")
    for checks in data.checks.values():
        yield from theorem_rows(checks)


def figure(outcome: Outcome[NetData]) -> Figure:
    """Draw the landscapes of the two cases with a square, the loss of each task, and theorem 1."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 11.5), layout="constrained")
    top, middle, bottom = figure.subfigures(3, 1, squeeze=False)[:, 0]
    for subfigure, minima in zip(top.subfigures(1, 2, squeeze=False)[0], outcome.data.minima):
        subfigure.suptitle(f"{minima.case.name.capitalize()}, Softplus: mean loss over tasks", fontsize=12)
        panels = subfigure.subplots(1, 2)
        draw_minima(panels, minima)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize=11)
    middle.suptitle("Four easy tasks: loss of each task", fontsize=12)
    for i, axes in enumerate(middle.subplots(1, 4)):
        draw_task(axes, Case("", "softplus", 0, easy=(SQUARE[i],)), f"task {i + 1}")
    left, right = bottom.subfigures(1, 2, width_ratios=(1, 3))
    left.suptitle("Loss of task 1 if it is hard", fontsize=12)
    draw_task(left.subplots(), Case("", "softplus", 0, easy=(), hard=(SQUARE[0],)), "inputs of half the variance")
    right.suptitle(TITLE, fontsize=12)
    axes = right.subplots()
    draw_theorem(axes, outcome.data.checks["softplus"])
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def draw_task(axes: Axes, case: Case, title: str) -> None:
    """Draw the population loss of a case's first task, and the neuron of the task."""
    from metabridge.report.loss_surface_figures import draw_loss_surface

    losses = vmap(case.tasks[0].loss, chunk_size=256)(neuron_grid(31).reshape(-1, 1, 2)).reshape(31, 31)
    draw_loss_surface(axes, losses, EXTENT, title, case.neurons)


EXPERIMENT = Experiment("landscape-fig4", measure, rows, figure, SETTINGS, {"alpha": ALPHA}, on_cpu=True)
