"""Loss landscapes of NAL and MAML for students of a single neuron, of which C's figures 4 to 6 are made.

A task is a teacher of one neuron in the plane (M = 1, d = 2); hard tasks have inputs of half the variance. From
every task come τ episodes of n₂ support and n₁ query points. MAML's loss is that of the queries after one step of
gradient descent on the support; NAL's is that of the same τn₁ = n queries without it (C §4, app. C.3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from metabridge.environments.teacher_networks import Activation, FixedNeurons, TeacherTasks, neuron_sum
from metabridge.episodes import Episodes
from metabridge.experiments.power_law import mean
from metabridge.experiments.result import Row
from metabridge.models.network import Params
from metabridge.solvers import GradientDescent, Problem, task_loss
from metabridge.theory.teachers import TeacherTask, maml_loss, nal_loss, stationary_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Neuron = tuple[float, float]

HARD, EASY = 0.5, 1.0  # the variance of the inputs (C §4)
EDGE = 2.0  # landscapes reach from −2 to 2 along both axes
SEARCH = 25  # points along an axis of the grid from whose lowest point a minimum is sought
PRECISION = 1e-4  # of a minimum's place
NAMES: dict[Activation, str] = {"softplus": "Softplus", "sigmoid": "Sigmoid", "tanh": "tanh", "relu": "ReLU"}
SQUARE: tuple[Neuron, ...] = ((1.0, 1.0), (-1.0, 1.0), (-1.0, -1.0), (1.0, -1.0))
# α, of which the paper says nothing: the inverse of an easy task's curvature at the origin, σ'(0)² or ½ for ReLU.
# So one step solves an easy task as far as the net is linear, as α = 1/ρ_E does in C's corollary 2.
RATES: dict[Activation, float] = {"softplus": 4.0, "sigmoid": 16.0, "tanh": 1.0, "relu": 2.0}


@dataclass(frozen=True)
class Scale:
    """How much is sampled and looked at. n₁, τ and n₂ are the paper's at every scale."""

    draws: int  # samples of all episodes, each with minima of its own
    grid: int  # points along an axis of the landscapes that are drawn
    tests: int  # fresh episodes of every task, on which the minima are judged
    pairs: int  # of teachers, on which theorem 1 is checked
    episodes: int = 25  # τ
    queries: int = 20  # n₁


SCALES = {
    "quick": Scale(draws=3, grid=41, tests=100, pairs=3),
    "paper": Scale(draws=10, grid=81, tests=400, pairs=12),
}


@dataclass(frozen=True)
class World:
    """An environment of a few tasks; `apart` is whether the paper finds the two minima apart, if it shows it."""

    name: str
    activation: Activation
    support: int  # n₂ = m
    easy: tuple[Neuron, ...]
    hard: tuple[Neuron, ...] = ()
    apart: bool | None = None

    @property
    def tasks(self) -> list[TeacherTask]:
        """The tasks, the hard ones first."""
        kinds = [(neuron, HARD) for neuron in self.hard] + [(neuron, EASY) for neuron in self.easy]
        return [
            TeacherTask(torch.tensor([neuron], dtype=torch.float64), self.activation, variance)
            for neuron, variance in kinds
        ]

    def sample(self, episodes: int, queries: int, generator: torch.Generator) -> Episodes:
        """Draw as many episodes of every task."""
        parts = [
            TeacherTasks(
                FixedNeurons(task.neurons[None]),
                task.activation,
                covariance=task.covariance,
                shots=self.support,
                queries=queries,
            ).sample(episodes, generator)
            for task in self.tasks
        ]
        return Episodes.concatenate(parts)


@dataclass(frozen=True, eq=False)
class LossSurface:
    """The loss of a student with one neuron on given episodes, after one step of rate α, or as it is without."""

    activation: Activation
    episodes: Episodes
    rate: float | None = None

    def __call__(self, neurons: Tensor) -> Tensor:
        """Return the mean loss over the episodes of every neuron (..., 2)."""

        def apply(params: Params, x: Tensor) -> Tensor:
            return neuron_sum(self.activation, params["neurons"], x)

        def loss(neuron: Tensor, *task: Tensor) -> Tensor:
            student = {"neurons": neuron[None]}
            if self.rate is not None:
                problem = Problem(apply, task_loss, task[0], task[1])
                student = GradientDescent(steps=1, lr=self.rate).solve(problem, student, {}, exact=False)
            return task_loss(apply(student, task[2]), task[3])

        each = vmap(vmap(loss, (None, 0, 0, 0, 0)), (0, None, None, None, None), chunk_size=32)
        return each(neurons.reshape(-1, 2), *self.episodes.tensors()).mean(1).reshape(neurons.shape[:-1])

    def minimum(self) -> Tensor:
        """Return the neuron with the least loss, sought from the lowest point of a grid on with ever shorter steps.

        The search looks at values alone: with ReLU the loss after a step jumps where an input changes sides.
        """
        grid, offsets, step = plane(SEARCH).reshape(-1, 2), plane(5).reshape(-1, 2) / EDGE, 2 * EDGE / (SEARCH - 1)
        values = self(grid)
        place, least = grid[values.argmin()], values.min()
        while step > PRECISION:
            around = place + step * offsets
            values = self(around)
            if values.min() < least:
                place, least = around[values.argmin()], values.min()
            else:
                step /= 2
        return place


def plane(points: int) -> Tensor:
    """The neurons on a grid, (points, points, 2), the first coordinate along the first axis.

    >>> plane(3)[2, 0]
    tensor([ 2., -2.], dtype=torch.float64)
    """
    axis = torch.linspace(-EDGE, EDGE, points, dtype=torch.float64)
    return torch.cartesian_prod(axis, axis).reshape(points, points, 2)


@dataclass(frozen=True, eq=False)
class Minima:
    """The minima of NAL and MAML in every draw, their risks, and the landscapes of the first draw."""

    world: World
    places: Mapping[str, Tensor]  # by method, (draws, 2)
    risks: Mapping[str, list[float]]  # the loss after a step on m fresh samples, C's F_m
    landscapes: Mapping[str, Tensor]  # on the plane

    def distances(self, method: str, neurons: Sequence[Neuron]) -> list[float]:
        """Return the mean distance to the neurons, for every draw."""
        return torch.cdist(self.places[method], torch.tensor(neurons, dtype=torch.float64)).mean(1).tolist()


def find_minima(world: World, scale: Scale, seed: int) -> Minima:
    """Draw episodes, look for the minima of both losses on each, and judge both on the same fresh episodes."""
    generator, rate = torch.Generator().manual_seed(seed), RATES[world.activation]
    places: dict[str, list[Tensor]] = {"NAL": [], "MAML": []}
    risks: dict[str, list[float]] = {"NAL": [], "MAML": []}
    landscapes: dict[str, Tensor] = {}
    for _ in range(scale.draws):
        episodes = world.sample(scale.episodes, scale.queries, generator)
        judge = LossSurface(world.activation, world.sample(scale.tests, 100, generator), rate)
        for method, own in (("NAL", None), ("MAML", rate)):
            landscape = LossSurface(world.activation, episodes, own)
            if method not in landscapes:
                landscapes[method] = landscape(plane(scale.grid))
            places[method].append(landscape.minimum())
            risks[method].append(float(judge(places[method][-1])))
    return Minima(world, {method: torch.stack(own) for method, own in places.items()}, risks, landscapes)


def minima_rows(minima: Minima) -> list[Row]:
    """Give where the minima are, how far from the neurons, what they risk, and what the paper says of it."""
    world, rows = minima.world, []
    about = f"over {len(minima.risks['NAL'])} draws of all episodes"
    groups = {kind: own for kind, own in (("hard", world.hard), ("easy", world.easy)) if own}

    def row(name: str, metric: str, values: Sequence[float], note: str = about) -> Row:
        ours, margin = mean(values)
        return Row(f"{world.name}: {name}", metric, ours=ours, ci95=margin, note=note)

    for method in ("NAL", "MAML"):
        for axis, label in enumerate(("first", "second")):
            rows.append(row(f"minimum of {method}, {label} coordinate", "w", minima.places[method][:, axis].tolist()))
        for kind, neurons in groups.items():
            rows.append(row(f"{method} to {kind} tasks", "mean distance", minima.distances(method, neurons)))
        note = f"F_m, with m = {world.support} samples; {about}"
        rows.append(row(f"risk of {method}", "loss after a step", minima.risks[method], note))
    ratios = [nal / maml for nal, maml in zip(minima.risks["NAL"], minima.risks["MAML"])]
    gain = row("risk of NAL over that of MAML", "ratio", ratios)
    if world.hard:
        pairs = zip(*(minima.distances(method, world.hard) for method in ("NAL", "MAML")))
        nearer = row("MAML nearer to hard tasks than NAL by", "distance", [nal - maml for nal, maml in pairs])
        rows.append(_judged(nearer, 0.0) if world.apart else nearer)
    rows.append(_judged(gain, 1.0) if world.apart else gain)
    return rows + population_rows(minima)


def _judged(row: Row, least: float) -> Row:
    """The paper claims a sign: ours agrees if the whole interval has it."""
    assert row.ci95 is not None
    return replace(row, agrees=row.ours - row.ci95 > least, note=f"the paper claims more than {least:g}; {row.note}")


def population_rows(minima: Minima) -> list[Row]:
    """Give the distance between the minima of the losses that infinitely many samples have.

    They are stationary points that the minima of the draws lead to. There is no row where none is as low as those:
    with ReLU the minimum may lie on a kink.
    """
    world, tasks = minima.world, minima.world.tasks
    found = []
    for method, loss in (("NAL", nal_loss(tasks)), ("MAML", maml_loss(tasks, RATES[world.activation]))):
        starts = list(minima.places[method][:, None])
        lowest = min([*stationary_points(loss, starts), *starts], key=lambda point: float(loss(point)))
        if any(lowest is start for start in starts):
            return []
        found.append(lowest)
    nal, maml = found
    gap = float((nal - maml).norm())
    places = ", ".join(
        f"{method} ({point[0, 0]:.3f}, {point[0, 1]:.3f})" for method, point in (("NAL", nal), ("MAML", maml))
    )
    same = world.apart is False
    return [
        Row(
            f"{world.name}: population minima of NAL and MAML",
            "distance",
            published=0.0 if same else None,
            ours=gap,
            agrees=gap < 1e-3 if same else None,
            note=f"m = ∞; {places}{'; the same in the paper, at neurons that it does not give' if same else ''}",
        )
    ]


def draw_landscape(axes: Axes, values: Tensor, title: str) -> None:
    """Draw a loss over the plane by contours at equal ratios, with the scale of its colours beside it."""
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import FuncFormatter

    numbers = values.numpy()
    low = max(numbers.min(), 1e-4 * numbers.max())  # a loss that reaches 0 has no logarithm
    levels = np.geomspace(low * (1 - 1e-9), numbers.max() * (1 + 1e-9), 16)
    axis = np.linspace(-EDGE, EDGE, len(numbers))
    drawn = axes.contourf(axis, axis, numbers.T.clip(low), levels, cmap="viridis", norm=LogNorm(levels[0], levels[-1]))
    axes.contour(axis, axis, numbers.T.clip(low), levels[1:-1], colors="white", linewidths=0.3, alpha=0.6)
    bar = axes.figure.colorbar(drawn, ax=axes, shrink=0.82, pad=0.03, ticks=levels[::5])
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda level, _: f"{level:.2g}"))
    bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=8)
    axes.set(aspect="equal", xlim=(-EDGE, EDGE), ylim=(-EDGE, EDGE), xticks=range(-2, 3), yticks=range(-2, 3))
    axes.set(xlabel="first weight of the neuron", ylabel="second weight")
    axes.set_title(title, fontsize=10)
    axes.grid(visible=False)


def mark(axes: Axes, neurons: Mapping[str, Sequence[Neuron]], places: Mapping[str, Tensor]) -> None:
    """Mark the neurons of teachers by kind, and the minima of the first draw."""
    styles = {"easy": ("o", "white"), "hard": ("*", "#ff5a36"), "NAL": ("X", "#ffd23f"), "MAML": ("^", "#ff9df5")}
    sizes = {"easy": 75, "hard": 150, "NAL": 140, "MAML": 55}  # both minima show where they coincide
    labels = {"easy": "neuron of an easy task", "hard": "neuron of a hard task"}
    spots = {kind: list(own) for kind, own in neurons.items() if own}
    spots |= {method: [tuple(own[0].tolist())] for method, own in places.items()}
    for kind, points in spots.items():
        marker, colour = styles[kind]
        first, second = zip(*points)
        axes.scatter(
            first,
            second,
            marker=marker,
            color=colour,
            edgecolor="black",
            linewidth=0.8,
            s=sizes[kind],
            label=labels.get(kind, f"minimum of {kind}'s loss"),
            zorder=3,
        )


def draw_world(panels: Sequence[Axes], minima: Minima) -> None:
    """Draw NAL's landscape and MAML's, each with all neurons and both minima."""
    for axes, (method, values) in zip(panels, minima.landscapes.items()):
        when = "before adaptation" if method == "NAL" else "after one step"
        draw_landscape(axes, values, f"{method}: loss {when}")
        mark(axes, {"easy": minima.world.easy, "hard": minima.world.hard}, minima.places)
