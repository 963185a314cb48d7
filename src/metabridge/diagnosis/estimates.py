"""From moments of sampled tasks to a landscape of hard and easy ones, and to what C's formulas say of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from metabridge.diagnosis.moments import Moments, curvatures, misfits, rates
from metabridge.environments.linear_tasks import Landscape, TaskGroup
from metabridge.errors import InputError
from metabridge.intervals import percentile_tail
from metabridge.theory.landscape import (
    Risks,
    adapted_covariance,
    maml_solution,
    nal_solution,
    noise_floor,
    risk_above_floor,
)

FEWEST = 5  # tasks of a group
DIVERGES = 2  # times the inverse of a curvature, from which on a step enlarges the error along it
STEEPEST = 1.9  # the same for the steepest task, at most, where the step is chosen
FEW_TASKS, FEW_POINTS = 0.1, 0.01  # of a group: a variance that rests on fewer is dominated by them
REPEATS = 200  # of the bootstrap
TINY = 1e-300  # where there is nothing to gain and nothing left, the ratio of risks is 1
UNBOUNDED = 1e4  # no ratio of risks is so large, but a quotient by what may be zero is


@dataclass(frozen=True)
class Interval:
    """A number with the interval that holds it 95 times of 100."""

    value: float
    low: float
    high: float

    def told(self) -> str:
        """Say it in a few words.

        >>> Interval(2.0, 1.5, 2.75).told()
        '2.00 (1.50 to 2.75)'
        >>> Interval(2.0, 1.5, 3e7).told()
        '2.00 (1.50 and more)'
        >>> Interval(2e7, 1.5, 3e7).told()
        'more than 10000 (1.50 and more)'
        """
        value = f"{self.value:#.3g}" if self.value < UNBOUNDED else f"more than {UNBOUNDED:.0f}"
        return f"{value} ({self.low:#.3g} {f'to {self.high:#.3g}' if self.bounded else 'and more'})"

    @property
    def bounded(self) -> bool:
        """Whether it says how large the number is at most."""
        return self.high < UNBOUNDED

    def percent(self) -> str:
        """Say a share in percent.

        >>> Interval(0.2, 0.15, 0.275).percent()
        '20.0 % (15.0 to 27.5 %)'
        """
        return f"{100 * self.value:.1f} % ({100 * self.low:.1f} to {100 * self.high:.1f} %)"

    def meets(self, other: Interval) -> bool:
        """Whether the two intervals overlap.

        >>> Interval(2.0, 1.5, 2.75).meets(Interval(3.0, 2.5, 4.0))
        True
        """
        return self.low <= other.high and other.low <= self.high


class Prediction(NamedTuple):
    """What C's formulas say of the estimated landscape."""

    risks: Risks  # 𝓔_m
    ratio: Interval  # of them
    saved: Interval  # the share of NAL's whole loss F_m, noise included, that MAML saves
    left: float  # of the loss of NAL above the noise before it adapts, what MAML has after
    ratios: Tensor  # one for each resampling of the tasks
    savings: Tensor  # the same, of `saved`


@dataclass(frozen=True, eq=False)
class Geography:
    """Where tasks of a hard and an easy group have their solutions.

    Tasks of a group are taken to share a covariance. `hard` says which tasks are hard.
    """

    moments: Moments
    hard: Tensor
    m: int
    share: float | None = None  # of hard tasks, where it is known

    def __post_init__(self) -> None:
        for name, count in (("hard", int(self.hard.sum())), ("easy", int((~self.hard).sum()))):
            if count < FEWEST:
                raise InputError(
                    f"there are {count} {name} tasks, but a group needs at least {FEWEST}. Sample more tasks."
                )

    @cached_property
    def solutions(self) -> Tensor:
        """w* of each half of each task, (tasks, 2, d)."""
        return self.moments.solutions(self.covariances[(~self.hard).long()])

    @cached_property
    def covariances(self) -> Tensor:
        """Of the hard tasks and of the easy ones, (2, d, d)."""
        return torch.stack([self.moments.covariance[tasks].mean((0, 1)) for tasks in self.members])

    @cached_property
    def fourths(self) -> Tensor:
        """E[zzᵀΣzzᵀ] of the hard tasks and of the easy ones, (2, d, d).

        It is no less than Σ³: the difference is E[(zzᵀ − Σ)Σ(zzᵀ − Σ)].
        """
        cubes = self.covariances @ self.covariances @ self.covariances
        fourths = torch.stack([self.moments.fourth[tasks].mean((0, 1)) for tasks in self.members])
        values, vectors = torch.linalg.eigh(fourths - cubes)
        return cubes + (vectors * values.clamp_min(0)[..., None, :]) @ vectors.mT  # type: ignore[no-any-return]

    def adapted(self, alpha: float) -> Tensor:
        """Return Q^{(m)} of the hard tasks and of the easy ones, (2, d, d)."""
        return adapted_covariance(self.covariances, alpha, self.m, self.fourths)

    @cached_property
    def kurtosis(self) -> Tensor:
        """tr E[zzᵀΣzzᵀ] of the hard tasks and of the easy ones (2,), of what it is for normal inputs: 1 for those."""
        squares, cubes = (torch.linalg.matrix_power(self.covariances, power) for power in (2, 3))
        return _trace(self.fourths) / (_trace(squares) * _trace(self.covariances) + 2 * _trace(cubes))

    @cached_property
    def curvature(self) -> float:
        """The largest curvature of the two groups' covariances."""
        return float(torch.linalg.eigvalsh(self.covariances).max())

    def stable_step(self) -> float:
        """Return the inverse of the groups' largest curvature, or less: a step that diverges on no single task."""
        return 1 / max(self.curvature, float(curvatures(self.moments).max()) / STEEPEST)

    def heavy_tails(self) -> tuple[str, ...]:
        """Return what has a variance that a few tasks or points dominate, such as "targets of hard tasks".

        With contributions c to a mean, n of them count like (Σc)²/Σc² equal ones. For squares of a normal variable that
        is n/3. Where no variance exists it stays the same however large n is.
        """
        squares = _trace(self.moments.covariance), self.moments.square
        found = []
        for kind, tasks in zip(("hard", "easy"), self.members):
            for what, square, fourth in zip(("inputs", "targets"), squares, self.moments.tails.unbind(-1)):
                total = square[tasks].mean().square()
                of_tasks, of_points = square[tasks].mean(1).square().mean(), fourth[tasks].mean()
                if total < FEW_TASKS * of_tasks or total < FEW_POINTS * of_points:
                    found.append(f"{what} of {kind} tasks")
        return tuple(found)

    def landscape(self, alpha: float) -> Landscape:
        """Return the two groups, the hard one first.

        A group's spread is rI with the r that Q^{(m)} feels as it feels the spread measured, which is unbiased and so
        may have negative eigenvalues: 𝓔_m depends on tr(Q·spread) alone.
        """
        groups = []
        hard = float(self.hard.double().mean()) if self.share is None else self.share
        each = zip(self.members, self.covariances, self.adapted(alpha), (hard, 1 - hard))
        for tasks, covariance, Q, probability in each:
            first, second = self.solutions[tasks].unbind(1)
            centre = (first.mean(0) + second.mean(0)) / 2
            # halves share the task alone: their product is of its solution, without the noise of either
            products = ((first - first.mean(0)).mT @ (second - second.mean(0))) / (len(tasks) - 1)
            r = float((Q * products).sum() / Q.trace())
            explained = torch.einsum("ti,ij,tj->t", first, covariance, second).mean()
            noise = float(self.moments.square[tasks].mean() - explained)
            groups.append(TaskGroup(covariance, centre, max(r, 0.0), max(noise, 0.0), probability))
        return Landscape(tuple(groups), self.moments.dimension)

    @cached_property
    def members(self) -> tuple[Tensor, Tensor]:
        """The numbers of the hard tasks, and of the easy ones."""
        return self.hard.nonzero().flatten(), (~self.hard).nonzero().flatten()

    def distance(self, landscape: Landscape, alpha: float) -> float:
        """R between the groups' centres, as the hard tasks' Q^{(m)} feels it, less what the noise of centres adds.

        With Q a multiple of I and centres 0 and R·1 it is C's R.
        """
        law, Q = landscape.distribution, self.adapted(alpha)[0]
        gap = law.centre[0] - law.centre[1]
        noise = [self.solutions[tasks].mean(1).T.cov() / len(tasks) for tasks in self.members]
        squared = (gap @ Q @ gap - (Q * (noise[0] + noise[1])).sum()) / Q.trace()
        return float(squared.clamp_min(0).sqrt())

    def predict(self, alpha: float, generator: torch.Generator) -> Prediction:
        """Return the risks of NAL and MAML after a step `alpha`, with intervals from resampling the tasks.

        An estimated distance between centres is longer than the true one by the noise of both. Resampling adds that
        noise once more, so what it adds to the risks is taken off them.
        """
        plain = self._losses(alpha)
        samples = (self._resampled(generator) for _ in range(REPEATS))
        # a step chosen for these tasks might diverge on resampled ones
        repeats = torch.stack([one._losses(min(alpha, 0.999 * DIVERGES / one.curvature)) for one in samples])
        added = repeats.mean(0) - plain
        least = torch.tensor([0.0, 1e-9 * float(plain[1])], dtype=torch.float64)
        gain, maml = (plain - added)[:2].clamp_min(least).tolist()
        gains, mamls = (repeats - 2 * added)[:, :2].clamp_min(least).unbind(1)
        floor, before = plain[2:].tolist()
        ratios = 1 + gains / mamls.clamp_min(TINY)
        savings = gains / (gains + mamls + repeats[:, 2]).clamp_min(TINY)
        return Prediction(
            Risks(maml + gain, maml),
            self._interval(1 + gain / max(maml, TINY), ratios),
            self._interval(gain / max(gain + maml + floor, TINY), savings),
            maml / max(before, TINY),
            ratios,
            savings,
        )

    def _interval(self, value: float, repeats: Tensor) -> Interval:
        """A value with the 95 % interval of its repeats."""
        tail = percentile_tail(min(map(len, self.members)))
        low, high = repeats.quantile(torch.tensor([tail, 1 - tail], dtype=repeats.dtype)).tolist()
        return Interval(value, min(low, value), max(high, value))

    def _losses(self, alpha: float) -> Tensor:
        """What MAML (n₂ = m) saves of NAL's 𝓔_m, its own 𝓔_m, the noise floor, and 𝓔 of NAL before it adapts."""
        landscape, m = self.landscape(alpha), self.m
        solutions = torch.stack([nal_solution(landscape), maml_solution(landscape, alpha, m, fourth=self.fourths)])
        nal, maml = risk_above_floor(landscape, solutions, alpha, m, fourth=self.fourths)
        before = risk_above_floor(landscape, solutions[0], 0.0, m)
        return torch.stack([nal - maml, maml, nal.new_tensor(noise_floor(landscape, alpha, m)), before])

    def _resampled(self, generator: torch.Generator) -> Geography:
        """Draw as many tasks with replacement, each for its group; a group keeps its size where shares are known."""
        while True:
            if self.share is None:
                tasks = torch.randint(len(self.hard), (len(self.hard),), generator=generator)
            else:
                own = [one[torch.randint(len(one), (len(one),), generator=generator)] for one in self.members]
                tasks = torch.cat(own)
            hard = self.hard[tasks]
            if min(int(hard.sum()), int((~hard).sum())) >= FEWEST:
                return replace(self, moments=self.moments.of_tasks(tasks), hard=hard)

    def map(self) -> Tensor:
        """Return every task's solution in two dimensions (tasks, 2): along the line between the centres, and across it.

        Lengths are those that the mean covariance feels. The second axis is the one with the most variance left.
        """
        values, vectors = torch.linalg.eigh(self.moments.covariance.mean((0, 1)))
        points = self.solutions.mean(1) @ (vectors * values.clamp_min(0).sqrt()) @ vectors.T
        points = points - points[~self.hard].mean(0)
        along = torch.nn.functional.normalize(points[self.hard].mean(0), dim=0)
        rest = points - (points @ along)[:, None] * along
        across = torch.linalg.eigh(rest.T @ rest).eigenvectors[:, -1]
        return torch.stack([points @ along, rest @ across], 1)


def hard_tasks(moments: Moments) -> Tensor:
    """Return which tasks are hard: those with the lower rates, of two groups with a covariance each.

    Rates are cut in two, then every task goes to the group under whose covariance its points are likelier. A rate is
    of one direction, that of the task's solution. A covariance is of all of them, and tells groups apart whose rates
    overlap. This is done once: more rounds would end at whatever two covariances differ most, hard or not.
    """
    speeds = rates(moments)
    hard = split_by_rate(speeds)
    misfit = misfits(moments, torch.stack([moments.covariance[own].mean((0, 1)) for own in (hard, ~hard)]))
    likelier = misfit[:, 0] < misfit[:, 1]
    if min(int(likelier.sum()), int((~likelier).sum())) < FEWEST:
        return hard
    slow, fast = (float(speeds[own].log().mean()) for own in (likelier, ~likelier))
    return likelier if slow <= fast else ~likelier


def split_by_rate(rates: Tensor) -> Tensor:
    """Return which tasks are hard: the cut of log rates into two groups that leaves the least variance within them.

    >>> split_by_rate(torch.tensor([0.1] * 5 + [1.0] * 7)).sum()
    tensor(5)
    """
    if len(rates) < 2 * FEWEST:
        raise InputError(f"tasks is {len(rates)}, but two groups need at least {2 * FEWEST}. Sample more tasks.")
    values = rates.double().log().sort().values
    sizes = range(FEWEST, len(values) - FEWEST + 1)
    hardest = min(sizes, key=lambda size: float(_variation(values[:size]) + _variation(values[size:])))
    return rates.argsort().argsort() < hardest


def _trace(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1).sum(-1)


def _variation(values: Tensor) -> Tensor:
    return (values - values.mean()).square().sum()
