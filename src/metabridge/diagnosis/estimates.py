"""Estimate the landscape of hard and easy tasks from sampled tasks, and predict risks by closed forms.

The closed forms are those of Collins et al. (2022, sec. 3), in `metabridge.theory.landscape`. w* is the solution of a
task, z are its features and Σ is their covariance. The noise floor is the part of the expected loss that is due to
noise. 𝓔_m is the excess risk: the expected loss after an adaptation step on m samples, minus the noise floor. F_m is
𝓔_m plus the noise floor. Q^{(m)} is the matrix of the quadratic form 𝓔_m.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from metabridge.diagnosis.moments import SplitMoments, convergence_rates, gaussian_deviances, largest_curvatures
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

MIN_TASKS_PER_GROUP = 5
DIVERGENCE_LIMIT = 2  # a step of size α diverges along an eigenvector with eigenvalue λ if αλ is this or more
MAX_DEFAULT_STEP = 1.9  # the default step size α is so short that αλ_max is at most this on every single task
# Minimum numbers of effective tasks and examples (see `heavy_tails`), as fractions of all in the group.
MIN_EFFECTIVE_TASKS, MIN_EFFECTIVE_EXAMPLES = 0.1, 0.01
RESAMPLINGS = 200  # bootstrap samples
TINY = 1e-300  # lower limit of denominators, so that 0/0 gives 0
UNBOUNDED = 1e4  # a larger ratio of risks means that the denominator may be zero


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % confidence interval.

    Args:
        value: The estimate.
        low: Lower end of the interval.
        high: Upper end of the interval.

    >>> print(Interval(2.0, 1.5, 2.75))
    2.00 (1.50 to 2.75)
    >>> print(Interval(2.0, 1.5, 3e7))
    2.00 (1.50 and more)
    >>> print(Interval(2e7, 1.5, 3e7))
    more than 10000 (1.50 and more)
    """

    value: float
    low: float
    high: float

    @classmethod
    def symmetric(cls, value: float, margin: float) -> Interval:
        """Return an interval from its center and its half-width.

        Args:
            value: The estimate.
            margin: Half-width of the interval.

        Returns:
            The interval.

        >>> Interval.symmetric(2.0, 0.5)
        Interval(value=2.0, low=1.5, high=2.5)
        """
        return cls(value, value - margin, value + margin)

    def __str__(self) -> str:
        value = f"{self.value:#.3g}" if self.value < UNBOUNDED else f"more than {UNBOUNDED:.0f}"
        return f"{value} ({self.low:#.3g} {f'to {self.high:#.3g}' if self.has_upper_bound else 'and more'})"

    @property
    def has_upper_bound(self) -> bool:
        """Whether the upper end is meaningful, and not a quotient with a denominator close to zero."""
        return self.high < UNBOUNDED

    def as_percent(self) -> str:
        """Return the value and the interval as percentages.

        Returns:
            The text.

        >>> Interval(0.2, 0.15, 0.275).as_percent()
        '20.0 % (15.0 to 27.5 %)'
        """
        return f"{100 * self.value:.1f} % ({100 * self.low:.1f} to {100 * self.high:.1f} %)"

    def overlaps(self, other: Interval) -> bool:
        """Return whether two intervals overlap.

        Args:
            other: The other interval.

        Returns:
            True if they have a point in common.

        >>> Interval(2.0, 1.5, 2.75).overlaps(Interval(3.0, 2.5, 4.0))
        True
        """
        return self.low <= other.high and other.low <= self.high


class Prediction(NamedTuple):
    """Risks predicted by the closed forms.

    - `risks`: 𝓔_m of NAL and MAML
    - `ratio`: the risk of NAL divided by the risk of MAML
    - `saved`: the share of NAL's whole loss F_m, noise included, that MAML saves
    - `remaining`: the risk of MAML after the step, divided by the risk of NAL before the step
    - `resampled_ratios`, `resampled_savings`: `ratio` and `saved` for each resampling of the tasks
    """

    risks: Risks
    ratio: Interval
    saved: Interval
    remaining: float
    resampled_ratios: Tensor
    resampled_savings: Tensor


@dataclass(frozen=True, eq=False)
class LandscapeEstimate:
    """Estimates for a group of hard tasks and a group of easy tasks.

    All tasks of a group are assumed to have the same covariance of the features.

    Args:
        moments: Moments of the tasks.
        is_hard: Whether each task is hard (tasks,).
        m: Number of samples that adaptation uses.
        hard_share: Probability of hard tasks; None to estimate it by the share of hard tasks in `is_hard`.
    """

    moments: SplitMoments
    is_hard: Tensor
    m: int
    hard_share: float | None = None

    def __post_init__(self) -> None:
        for name, count in (("hard", int(self.is_hard.sum())), ("easy", int((~self.is_hard).sum()))):
            if count < MIN_TASKS_PER_GROUP:
                raise InputError(
                    f"there are {count} {name} tasks, but a group needs at least {MIN_TASKS_PER_GROUP}. "
                    "Sample more tasks."
                )

    @cached_property
    def solutions(self) -> Tensor:
        """Estimates of w* from each half of each task (tasks, 2, d)."""
        return self.moments.solutions(self.covariances[(~self.is_hard).long()])

    @cached_property
    def covariances(self) -> Tensor:
        """Covariances of the hard and of the easy tasks (2, d, d)."""
        return torch.stack([self.moments.covariance[tasks].mean((0, 1)) for tasks in self.group_indices])

    @cached_property
    def fourth_moments(self) -> Tensor:
        """E[zzᵀΣzzᵀ] of the hard and of the easy tasks (2, d, d).

        The matrix minus Σ³ is E[(zzᵀ − Σ)Σ(zzᵀ − Σ)], which is positive semi-definite. Negative eigenvalues of the
        estimated difference are therefore set to zero.
        """
        cubes = self.covariances @ self.covariances @ self.covariances
        fourths = torch.stack([self.moments.fourth[tasks].mean((0, 1)) for tasks in self.group_indices])
        values, vectors = torch.linalg.eigh(fourths - cubes)
        return cubes + (vectors * values.clamp_min(0)[..., None, :]) @ vectors.mT  # type: ignore[no-any-return]

    def adapted_covariances(self, alpha: float) -> Tensor:
        """Return Q^{(m)} of the hard and of the easy tasks (2, d, d)."""
        return adapted_covariance(self.covariances, alpha, self.m, self.fourth_moments)

    @cached_property
    def kurtosis(self) -> Tensor:
        """tr E[zzᵀΣzzᵀ] of the hard and of the easy tasks (2,), divided by its value for normal features."""
        squares, cubes = (torch.linalg.matrix_power(self.covariances, power) for power in (2, 3))
        return _trace(self.fourth_moments) / (_trace(squares) * _trace(self.covariances) + 2 * _trace(cubes))

    @cached_property
    def curvature(self) -> float:
        """The largest eigenvalue of the covariances of both groups."""
        return float(torch.linalg.eigvalsh(self.covariances).max())

    def stable_step(self) -> float:
        """Return 1/curvature, but at most `MAX_DEFAULT_STEP` divided by the largest curvature of a single task."""
        return 1 / max(self.curvature, float(largest_curvatures(self.moments).max()) / MAX_DEFAULT_STEP)

    def heavy_tails(self) -> tuple[str, ...]:
        """Return the variables whose variance is dominated by a few tasks or examples, such as "targets of hard tasks".

        For a sum of n contributions c, the number of effective contributions is (Σc)²/Σc²: a sum of this number of
        equal contributions has the same relative error. For squares of a variable, it is n/3 if the variable is normal,
        and does not grow with n if its variance is infinite.
        """
        squares = _trace(self.moments.covariance), self.moments.target_square
        fourth_powers = self.moments.fourth_powers.unbind(-1)
        heavy_tailed = []
        for group, tasks in zip(("hard", "easy"), self.group_indices):
            for name, square, fourth in zip(("inputs", "targets"), squares, fourth_powers):
                squared_mean = square[tasks].mean().square()
                task_mean_square, example_mean_square = square[tasks].mean(1).square().mean(), fourth[tasks].mean()
                if (
                    squared_mean < MIN_EFFECTIVE_TASKS * task_mean_square
                    or squared_mean < MIN_EFFECTIVE_EXAMPLES * example_mean_square
                ):
                    heavy_tailed.append(f"{name} of {group} tasks")
        return tuple(heavy_tailed)

    def landscape(self, alpha: float) -> Landscape:
        """Return the two groups as a `Landscape`, the hard one first.

        The spread of a group is rI, with r such that tr(Q^{(m)}·rI) equals tr(Q^{(m)}·S) for the estimated covariance
        S of the solutions, or 0 if this r is negative. 𝓔_m depends on S only through this trace. S itself cannot be
        used, since the estimate is unbiased and may have negative eigenvalues.
        """
        groups = []
        hard_share = float(self.is_hard.double().mean()) if self.hard_share is None else self.hard_share
        probabilities = hard_share, 1 - hard_share
        for tasks, covariance, Q, probability in zip(
            self.group_indices, self.covariances, self.adapted_covariances(alpha), probabilities
        ):
            first, second = self.solutions[tasks].unbind(1)
            center = (first.mean(0) + second.mean(0)) / 2
            # The halves have independent noise, so their product estimates the covariance without bias from noise.
            S = ((first - first.mean(0)).mT @ (second - second.mean(0))) / (len(tasks) - 1)
            r = float((Q * S).sum() / Q.trace())
            explained = torch.einsum("ti,ij,tj->t", first, covariance, second).mean()
            noise = float(self.moments.target_square[tasks].mean() - explained)
            groups.append(TaskGroup(covariance, center, max(r, 0.0), max(noise, 0.0), probability))
        return Landscape(tuple(groups), self.moments.dimension)

    @cached_property
    def group_indices(self) -> tuple[Tensor, Tensor]:
        """Indices of the hard tasks and of the easy tasks."""
        return self.is_hard.nonzero().flatten(), (~self.is_hard).nonzero().flatten()

    def distance(self, landscape: Landscape, alpha: float) -> float:
        """Return the distance R between the centers of the groups, corrected for the noise of the centers.

        It is measured in the norm of Q/tr Q, where Q is Q^{(m)} of the hard tasks. If Q is a multiple of I and the
        centers are the vectors (0, …, 0) and (R, …, R), this is R in Collins et al. (2022).
        """
        distribution, Q = landscape.distribution, self.adapted_covariances(alpha)[0]
        gap = distribution.center[0] - distribution.center[1]
        center_covariances = [self.solutions[tasks].mean(1).T.cov() / len(tasks) for tasks in self.group_indices]
        squared_distance = (gap @ Q @ gap - (Q * (center_covariances[0] + center_covariances[1])).sum()) / Q.trace()
        return float(squared_distance.clamp_min(0).sqrt())

    def predict(self, alpha: float, generator: torch.Generator) -> Prediction:
        """Return the risks of NAL and MAML after a step `alpha`, with intervals from resampling the tasks.

        The noise of the estimated centers increases the risks. Resampling increases them by the same amount once more.
        Therefore the difference between the resampled and the original risks is subtracted.
        """
        losses = self._losses(alpha)
        resampled = (self._resample(generator) for _ in range(RESAMPLINGS))
        # A step that is stable for these tasks may diverge for resampled tasks. In this case it is shortened.
        resampled_losses = torch.stack(
            [sample._losses(min(alpha, 0.999 * DIVERGENCE_LIMIT / sample.curvature)) for sample in resampled]
        )
        bias = resampled_losses.mean(0) - losses
        minimum = torch.tensor([0.0, 1e-9 * float(losses[1])], dtype=torch.float64)  # of the gain and MAML's risk
        gain, maml_risk = (losses - bias)[:2].clamp_min(minimum).tolist()
        gains, maml_risks = (resampled_losses - 2 * bias)[:, :2].clamp_min(minimum).unbind(1)
        floor, nal_before = losses[2:].tolist()
        ratios = 1 + gains / maml_risks.clamp_min(TINY)
        savings = gains / (gains + maml_risks + resampled_losses[:, 2]).clamp_min(TINY)
        return Prediction(
            Risks(maml_risk + gain, maml_risk),
            self._interval(1 + gain / max(maml_risk, TINY), ratios),
            self._interval(gain / max(gain + maml_risk + floor, TINY), savings),
            maml_risk / max(nal_before, TINY),
            ratios,
            savings,
        )

    def _interval(self, value: float, resampled: Tensor) -> Interval:
        """Return the expanded percentile interval of resampled values, extended to contain `value`."""
        tail = percentile_tail(min(map(len, self.group_indices)))
        low, high = resampled.quantile(torch.tensor([tail, 1 - tail], dtype=resampled.dtype)).tolist()
        return Interval(value, min(low, value), max(high, value))

    def _losses(self, alpha: float) -> Tensor:
        """Return 𝓔_m(NAL) − 𝓔_m(MAML), 𝓔_m(MAML), the noise floor, and 𝓔_m(NAL) for a step of size 0.

        MAML is trained with n₂ = m samples in the inner step.
        """
        landscape, m = self.landscape(alpha), self.m
        solutions = torch.stack(
            [nal_solution(landscape), maml_solution(landscape, alpha, m, fourth=self.fourth_moments)]
        )
        nal, maml = risk_above_floor(landscape, solutions, alpha, m, fourth=self.fourth_moments)
        nal_before = risk_above_floor(landscape, solutions[0], 0.0, m)
        return torch.stack([nal - maml, maml, nal.new_tensor(noise_floor(landscape, alpha, m)), nal_before])

    def _resample(self, generator: torch.Generator) -> LandscapeEstimate:
        """Return the estimate for as many tasks drawn with replacement, by group if `hard_share` is known."""
        while True:
            if self.hard_share is None:
                tasks = torch.randint(len(self.is_hard), (len(self.is_hard),), generator=generator)
            else:
                tasks = torch.cat(
                    [
                        indices[torch.randint(len(indices), (len(indices),), generator=generator)]
                        for indices in self.group_indices
                    ]
                )
            is_hard = self.is_hard[tasks]
            if min(int(is_hard.sum()), int((~is_hard).sum())) >= MIN_TASKS_PER_GROUP:
                return replace(self, moments=self.moments.select(tasks), is_hard=is_hard)

    def solution_map(self) -> Tensor:
        """Return the solution of every task in two dimensions (tasks, 2).

        The origin is the center of the easy tasks. The first axis points to the center of the hard tasks, the second
        axis is the direction with the largest remaining variance. Lengths are measured in the norm of the mean
        covariance of the features.
        """
        values, vectors = torch.linalg.eigh(self.moments.covariance.mean((0, 1)))
        solutions = self.solutions.mean(1) @ (vectors * values.clamp_min(0).sqrt()) @ vectors.T
        solutions = solutions - solutions[~self.is_hard].mean(0)
        first_axis = torch.nn.functional.normalize(solutions[self.is_hard].mean(0), dim=0)
        residuals = solutions - (solutions @ first_axis)[:, None] * first_axis
        second_axis = torch.linalg.eigh(residuals.T @ residuals).eigenvectors[:, -1]
        return torch.stack([solutions @ first_axis, residuals @ second_axis], 1)


def find_hard_tasks(moments: SplitMoments) -> Tensor:
    """Return whether each task belongs to the group of hard tasks, which has the lower rates (tasks,).

    Tasks are first split by their rates. Then each task is assigned to the group under whose covariance its examples
    are more likely. A rate describes only one direction of the features, while covariances also distinguish groups
    whose rates overlap. Tasks are reassigned only once, because repeated reassignment can converge to groups that do
    not differ in hardness.
    """
    rates = convergence_rates(moments)
    is_hard = split_by_rate(rates)
    covariances = torch.stack([moments.covariance[group].mean((0, 1)) for group in (is_hard, ~is_hard)])
    deviances = gaussian_deviances(moments, covariances)
    reassigned = deviances[:, 0] < deviances[:, 1]
    if min(int(reassigned.sum()), int((~reassigned).sum())) < MIN_TASKS_PER_GROUP:
        return is_hard
    first_rate, second_rate = (float(rates[group].log().mean()) for group in (reassigned, ~reassigned))
    return reassigned if first_rate <= second_rate else ~reassigned


def split_by_rate(rates: Tensor) -> Tensor:
    """Return whether each task has a low rate, by the split of the log rates with the smallest variance within groups.

    >>> split_by_rate(torch.tensor([0.1] * 5 + [1.0] * 7)).sum()
    tensor(5)
    """
    if len(rates) < 2 * MIN_TASKS_PER_GROUP:
        raise InputError(
            f"tasks is {len(rates)}, but two groups need at least {2 * MIN_TASKS_PER_GROUP}. Sample more tasks."
        )
    values = rates.double().log().sort().values
    sizes = range(MIN_TASKS_PER_GROUP, len(values) - MIN_TASKS_PER_GROUP + 1)
    hard_count = min(sizes, key=lambda size: float(_sum_of_squares(values[:size]) + _sum_of_squares(values[size:])))
    return rates.argsort().argsort() < hard_count


def _trace(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1).sum(-1)


def _sum_of_squares(values: Tensor) -> Tensor:
    return (values - values.mean()).square().sum()
