"""C's figures 4 and 5: where NAL and MAML have their minima if all tasks are equally hard, and if one is harder.

The paper finds the two minima the same in the first case; in the second MAML's is nearer to the hard task and does
better after adaptation. It gives no neurons and no rate: here the neurons are the corners of a square in both
cases, so that nothing but the hardness of one task differs. Since a square would make the minima of equally hard
tasks the same by its symmetry alone, neurons without any are looked at as well.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch.func import vmap

from metabridge.experiments.landscape_nets import (
    RATES,
    SCALES,
    SQUARE,
    Minima,
    World,
    draw_landscape,
    draw_world,
    find_minima,
    mark,
    minima_rows,
    plane,
)
from metabridge.experiments.landscape_thm1 import TITLE, Check, check_theorem, draw_theorem, theorem_rows
from metabridge.experiments.result import Result, Row, UnportedExperiment, Work, environment
from metabridge.theory.teachers import TeacherTask

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ID = "landscape-fig4"
LOPSIDED = ((1.5, 0.0), (-0.5, 1.0), (-0.5, -1.0), (-1.0, 0.0))
WORLDS = (
    World("four easy tasks", "softplus", support=250, easy=SQUARE, apart=False),
    World("one hard task", "softplus", support=250, easy=SQUARE[1:], hard=SQUARE[:1], apart=True),
    World("four easy tasks, lopsided", "softplus", support=250, easy=LOPSIDED, apart=False),
)


@dataclass(frozen=True)
class Outcome:
    """The result, the minima in every environment, and theorem 1."""

    result: Result
    minima: tuple[Minima, ...]
    checks: list[Check]


def run(work: Work) -> Outcome:
    """Find the minima in every environment, and check theorem 1 for Softplus."""
    scale, started = SCALES[work.scale], time.perf_counter()
    minima = tuple(find_minima(world, scale, work.seed) for world in WORLDS)
    checks = check_theorem("softplus", scale.pairs, work.seed)
    rows = [row for own in minima for row in minima_rows(own)]
    rows += [curvature_row(WORLDS[0].tasks[0], "easy task 1"), curvature_row(WORLDS[1].tasks[0], "hard task 1")]
    result = Result(
        id=ID,
        scale=work.scale,
        seed=work.seed,
        settings=asdict(scale) | {"worlds": [asdict(world) for world in WORLDS], "rate": RATES["softplus"]},
        environment=environment("cpu"),
        seconds=time.perf_counter() - started,
        rows=(*rows, *theorem_rows(checks)),
    )
    return Outcome(result, minima, checks)


def curvature_row(task: TeacherTask, name: str) -> Row:
    """Give how fast gradient descent comes to a task's own neuron, which is what hard and easy mean."""
    least, most = task.curvatures(task.neurons)[[0, -1]].tolist()
    return Row(name, "least curvature at its neuron", ours=least, note=f"the largest is {most:.3f}")


def figure(outcome: Outcome, file: Path) -> None:
    """Draw the landscapes of the square, the loss of each task by itself, and theorem 1."""
    from matplotlib.figure import Figure

    from metabridge.report import figures

    with figures.LIGHT.context():
        picture = Figure(figsize=(15, 11.5), layout="constrained")
        top, middle, bottom = picture.subfigures(3, 1, squeeze=False)[:, 0]
        for part, minima in zip(top.subfigures(1, 2, squeeze=False)[0], outcome.minima):
            part.suptitle(f"{minima.world.name.capitalize()}: mean loss of a Softplus neuron", fontsize=12)
            panels = part.subplots(1, 2)
            draw_world(panels, minima)
        picture.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize=11)
        middle.suptitle("Four easy tasks: the loss of each by itself", fontsize=12)
        for number, (axes, task) in enumerate(zip(middle.subplots(1, 4), WORLDS[0].tasks), 1):
            draw_task(axes, task, f"task {number}", "easy")
        left, right = bottom.subfigures(1, 2, width_ratios=(1, 3))
        left.suptitle("Task 1 when it is hard", fontsize=12)
        draw_task(left.subplots(), WORLDS[1].tasks[0], "inputs of half the variance", "hard")
        right.suptitle(TITLE, fontsize=12)
        axes = right.subplots()
        draw_theorem(axes, outcome.checks)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    figures.save(picture, file)


def draw_task(axes: Axes, task: TeacherTask, title: str, kind: str) -> None:
    """Draw the population loss of one task, and its neuron."""
    draw_landscape(axes, vmap(task.loss, chunk_size=256)(plane(31).reshape(-1, 1, 2)).reshape(31, 31), title)
    mark(axes, {kind: task.neurons.tolist()}, {})


EXPERIMENT = UnportedExperiment("landscape-fig4", run, figure)
