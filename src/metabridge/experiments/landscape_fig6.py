"""C's figure 6: where NAL and MAML have their minima if hard and easy tasks share a centre, and if they do not.

The paper shows Sigmoid: with a common centre the minima are close and do as well as each other; with the hard tasks
close together and far from the easy ones they are apart, and MAML's does better. It gives no neurons and no rate.
Here the neurons are the corners of a square, and two pairs on opposite sides; tanh and ReLU, of which the paper's
theorem 1 is as well, are shown beside it.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

from metabridge.environments.teacher_networks import Activation
from metabridge.experiments.landscape_nets import (
    NAMES,
    RATES,
    SCALES,
    SQUARE,
    Minima,
    World,
    draw_world,
    find_minima,
    minima_rows,
)
from metabridge.experiments.landscape_thm1 import TITLE, Check, check_theorem, draw_theorem, theorem_rows
from metabridge.experiments.result import Result, UnportedExperiment, Work, environment

ID = "landscape-fig6"
ACTIVATIONS: tuple[Activation, ...] = ("sigmoid", "tanh", "relu")
PUBLISHED = "sigmoid"
WORLDS = tuple(
    World(f"{NAMES[activation]}, {name}", activation, 80, easy, hard, apart if activation == PUBLISHED else None)
    for activation in ACTIVATIONS
    for name, easy, hard, apart in (
        ("common centre", SQUARE[1::2], SQUARE[::2], False),
        ("hard tasks apart", ((-1.0, -0.5), (-0.5, -1.0)), ((1.5, 1.0), (1.0, 1.5)), True),
    )
)


@dataclass(frozen=True)
class Outcome:
    """The result, the minima in all environments, and theorem 1 for every activation."""

    result: Result
    minima: tuple[Minima, ...]
    checks: dict[Activation, list[Check]]


def run(work: Work) -> Outcome:
    """Find the minima in both environments of every activation, and check theorem 1."""
    scale, started = SCALES[work.scale], time.perf_counter()
    minima = tuple(find_minima(world, scale, work.seed) for world in WORLDS)
    checks = {activation: check_theorem(activation, scale.pairs, work.seed) for activation in ACTIVATIONS}
    result = Result(
        id=ID,
        scale=work.scale,
        seed=work.seed,
        settings=asdict(scale) | {"worlds": [asdict(world) for world in WORLDS], "rates": RATES},
        environment=environment("cpu"),
        seconds=time.perf_counter() - started,
        rows=(
            *(row for own in minima for row in minima_rows(own)),
            *(row for own in checks.values() for row in theorem_rows(own)),
        ),
    )
    return Outcome(result, minima, checks)


def figure(outcome: Outcome, file: Path) -> None:
    """Draw the landscapes, a line for every activation, and theorem 1 below them."""
    from matplotlib.figure import Figure

    from metabridge.report import figures

    with figures.LIGHT.context():
        picture = Figure(figsize=(15, 15.5), layout="constrained")
        *lines, bottom = picture.subfigures(len(ACTIVATIONS) + 1, 1, squeeze=False)[:, 0]
        for line, start in zip(lines, range(0, len(WORLDS), 2)):
            for part, minima in zip(line.subfigures(1, 2, squeeze=False)[0], outcome.minima[start : start + 2]):
                part.suptitle(f"{minima.world.name}: mean loss of a neuron", fontsize=12)
                panels = part.subplots(1, 2)
                draw_world(panels, minima)
        picture.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize=11)
        bottom.suptitle(TITLE, fontsize=12)
        for axes, (activation, checks) in zip(bottom.subplots(1, len(ACTIVATIONS)), outcome.checks.items()):
            draw_theorem(axes, checks)
            axes.set_title(NAMES[activation], fontsize=10)
        bottom.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=6)
    figures.save(picture, file)


EXPERIMENT = UnportedExperiment("landscape-fig6", run, figure)
