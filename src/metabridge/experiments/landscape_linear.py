"""SGD on the objectives of MAML and of NAL for linear models, many runs side by side (C app. C.1).

Gradients are written out, so that a step of all runs is a few small batched products.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from metabridge.environments.linear_tasks import LinearTasks, LogisticTasks
from metabridge.episodes import Episodes
from metabridge.experiments.power_law import mean
from metabridge.experiments.result import Result, Row, Work, environment
from metabridge.theory.landscape import Solution

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Tasks = LinearTasks | LogisticTasks
Name = TypeVar("Name", bound=str)
NAMES: dict[Solution, str] = {"nal": "NAL", "maml": "MAML"}
STEPS: dict[Solution, float] = {"nal": 0.025, "maml": 1e-4}  # of SGD; MAML's is for each inner sample (C app. C.1)
AT_ONCE = 4_000_000  # numbers drawn at a time, which bounds the memory


@dataclass(frozen=True)
class Scale:
    """How long SGD goes on, how many tasks judge its end, and how often all of it is repeated (C app. C.1)."""

    iterations: int = 5000
    judged: int = 3000
    runs: int = 10
    outer: int = 25  # n₁


@dataclass(frozen=True)
class End:
    """Where the runs of SGD ended, by their first coordinates, and what it is worth."""

    coordinate: Tensor
    risk: Tensor


Ends = dict[tuple[float, float], dict[Solution, End]]  # by m or α, and ρ_H


@dataclass(frozen=True)
class Outcome:
    """The result and the ends of SGD."""

    result: Result
    ends: Ends


@dataclass(frozen=True)
class Learner:
    """A step size of SGD; α if the learner adapts in training; the weight of a hard task, where an easy one's is 1."""

    step: float
    alpha: float | None = None
    hard: float = 1.0


def learners(alpha: float, n2: int) -> dict[Solution, Learner]:
    """Return NAL and MAML with the paper's step sizes."""
    return {"nal": Learner(STEPS["nal"]), "maml": Learner(STEPS["maml"] * n2, alpha)}


@dataclass(frozen=True)
class Squared:
    """½ mean (⟨w, x⟩ − y)² over the points of each task, of which XᵀX/n and Xᵀy/n say all but a constant."""

    second: Tensor
    pull: Tensor

    @classmethod
    def of(cls, x: Tensor, y: Tensor) -> Squared:
        """Take points x (..., n, d) and their values y (..., n)."""
        return cls(x.mT @ x / x.shape[-2], _pulled(x, y))

    def at(self, place: int) -> Squared:
        """Return one place of the first axis."""
        return Squared(self.second[place], self.pull[place])

    def gradient(self, w: Tensor) -> Tensor:
        """Return the gradients at w (..., d)."""
        return self.bend(w, w) - self.pull

    def bend(self, w: Tensor, direction: Tensor) -> Tensor:
        """Return the Hessians at w times a direction (..., d)."""
        return _scores(self.second, direction)

    @staticmethod
    def value(scores: Tensor, y: Tensor) -> Tensor:
        """Return the loss of every point from ⟨w, x⟩."""
        return (scores - y).square() / 2


@dataclass(frozen=True)
class CrossEntropy:
    """The mean logistic loss over the points of each task, x (..., n, d) with labels y (..., n) of 0 or 1."""

    x: Tensor
    y: Tensor

    def at(self, place: int) -> CrossEntropy:
        """Return one place of the first axis."""
        return CrossEntropy(self.x[place], self.y[place])

    def gradient(self, w: Tensor) -> Tensor:
        """Return the gradients at w (..., d)."""
        return _pulled(self.x, _scores(self.x, w).sigmoid() - self.y)

    def bend(self, w: Tensor, direction: Tensor) -> Tensor:
        """Return the Hessians at w times a direction (..., d)."""
        chance = _scores(self.x, w).sigmoid()
        return _pulled(self.x, chance * (1 - chance) * _scores(self.x, direction))

    @staticmethod
    def value(scores: Tensor, y: Tensor) -> Tensor:
        """Return the loss of every point from ⟨w, x⟩."""
        return F.softplus(scores) - y * scores


Loss = Squared | CrossEntropy


def maml_gradient(inner: Loss, outer: Loss, w: Tensor, alpha: float) -> Tensor:
    """(I − α∇²inner(w)) ∇outer(w − α∇inner(w)), the gradient of MAML's objective with one step (C eq. 4)."""
    slope = outer.gradient(w - alpha * inner.gradient(w))
    return slope - alpha * inner.bend(w, slope)


def descend(
    tasks: Tasks, chosen: Mapping[Name, Learner], scale: Scale, generator: torch.Generator, *, batch: int = 1
) -> dict[Name, Tensor]:
    """Train every learner from w = 0 on the same tasks, `batch` of them an iteration, and return its w (runs, d).

    Weights of the tasks of a batch add up to 1. NAL pools the n₁ + n₂ points of a task.
    """
    found = {name: torch.zeros(scale.runs, tasks.landscape.dimension) for name in chosen}
    for episodes in _portions(tasks, scale.iterations, scale.runs * batch, generator):
        shape = (-1, scale.runs, batch)
        x_in, y_in, x_out, y_out = (part.unflatten(0, shape) for part in _points(episodes))
        inner, outer = _loss(tasks, x_in, y_in), _loss(tasks, x_out, y_out)
        pooled = _loss(tasks, torch.cat([x_in, x_out], -2), torch.cat([y_in, y_out], -1))
        hard = _is_hard(episodes).unflatten(0, shape)
        shares = {learner.hard: _shares(hard, learner.hard) for learner in chosen.values()}
        for place in range(len(x_in)):
            for name, learner in chosen.items():
                w = found[name][:, None]
                if learner.alpha is None:
                    slopes = pooled.at(place).gradient(w)
                else:
                    slopes = maml_gradient(inner.at(place), outer.at(place), w, learner.alpha)
                found[name] -= learner.step * (shares[learner.hard][place] * slopes).sum(1)
    return found


def judge(tasks: Tasks, w: Tensor, alpha: float, scale: Scale, generator: torch.Generator) -> Tensor:
    """Return the mean query loss F_m(w) after one step on the support, for each run over new tasks of its own.

    `w` is (d), or (runs, d).
    """
    losses = []
    for episodes in _portions(tasks, scale.judged, scale.runs, generator):
        x_in, y_in, x_out, y_out = (part.unflatten(0, (-1, scale.runs)) for part in _points(episodes))
        loss = _loss(tasks, x_in, y_in)
        adapted = w - alpha * loss.gradient(w)
        losses.append(loss.value(_scores(x_out, adapted), y_out).mean(-1))
    return torch.cat(losses).mean(0)


def compared(name: str, metric: str, values: Tensor, theory: float) -> Row:
    """Give the mean over runs beside the closed form.

    They agree if they are no further apart than twice the 95 % interval reaches, which by chance alone happens once in
    some hundreds of rows.
    """
    middle, margin = mean(values.tolist())
    agrees, note = abs(middle - theory) <= 2 * margin, "beside the value of the paper's formula"
    return Row(name, metric, published=theory, ours=middle, ci95=margin, agrees=agrees, note=note)


def completed(work: Work, name: str, started: float, rows: Sequence[Row], settings: Mapping[str, object]) -> Result:
    """Return the result of work that began at `started`, all of it on the CPU."""
    seconds = time.perf_counter() - started
    return Result(name, work.scale, work.seed, dict(settings), environment("cpu"), seconds, tuple(rows))


def draw_runs(axes: Axes, points: Mapping[float, Tensor], colour: str, label: str, marker: str = "o") -> None:
    """Draw means over runs, by place, with their 95 % intervals."""
    middles, margins = zip(*(mean(values.tolist()) for values in points.values()))
    axes.errorbar(list(points), middles, margins, fmt=marker, color=colour, label=label, markersize=4, capsize=2)


def _loss(tasks: Tasks, x: Tensor, y: Tensor) -> Loss:
    return CrossEntropy(x, y) if isinstance(tasks, LogisticTasks) else Squared.of(x, y)


def _scores(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w[..., None]).squeeze(-1)


def _pulled(x: Tensor, residuals: Tensor) -> Tensor:
    return (residuals[..., None, :] @ x).squeeze(-2) / x.shape[-2]


def _portions(tasks: Tasks, rounds: int, each: int, generator: torch.Generator) -> Iterator[Episodes]:
    """Draw `each` tasks for every round, several rounds at a time."""
    size = each * (tasks.shots + tasks.queries) * tasks.landscape.dimension
    together = max(1, AT_ONCE // size)
    for first in range(0, rounds, together):
        yield tasks.sample(each * min(together, rounds - first), generator)


def _points(episodes: Episodes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs, and targets as numbers without the axis of outputs."""
    targets = (
        y.to(episodes.support_x.dtype) if episodes.is_classification else y.squeeze(-1)
        for y in (episodes.support_y, episodes.query_y)
    )
    y_in, y_out = targets
    return episodes.support_x, y_in, episodes.query_x, y_out


def _is_hard(episodes: Episodes) -> Tensor:
    """Whether a task is of the first group."""
    assert episodes.classes is not None
    return episodes.classes[:, 0] == 0


def _shares(hard: Tensor, weight: float) -> Tensor:
    """The weight of each task in its batch (..., batch, 1)."""
    weights = torch.where(hard, weight, 1.0)
    return (weights / weights.sum(-1, keepdim=True))[..., None]
