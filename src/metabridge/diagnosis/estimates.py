"""Estimate groups of hard and easy tasks from sampled tasks, and predict risks with closed-form expressions.

The risk of MAML is compared with that of non-adaptive learning (NAL), which trains without adaptation. The expressions
are those of Collins et al. (2022, §3), in `metabridge.theory.landscape`. w* is the solution of a task, x are its
features, Σ is their covariance E[xxᵀ], and y are its targets. F_m is the expected loss after an adaptation step on m
samples. The noise floor is the part of F_m that is due to label noise, and the excess risk 𝓔_m is F_m minus the noise
floor. 𝓔_m of weights w is a quadratic form in w − w* with the matrix Q^{(m)}, averaged over the tasks.
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
MAX_STEP_TIMES_CURVATURE = 1.9  # upper limit of αλ_max over the tasks for the default step size α
# Minimum effective sample sizes of a group, as fractions of its numbers of tasks and examples; see
# `heavy_tailed_variables`.
MIN_EFFECTIVE_TASKS, MIN_EFFECTIVE_EXAMPLES = 0.1, 0.01
BOOTSTRAP_SAMPLES = 200
TINY = 1e-300  # lower limit of denominators, so that 0/0 gives 0
MAX_RATIO = 1e4  # larger risk ratios are reported as unbounded, because their denominator may be zero


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
    2.00 (at least 1.50)
    >>> print(Interval(2e7, 1.5, 3e7))
    more than 10000 (at least 1.50)
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
        value = f"{self.value:#.3g}" if self.value < MAX_RATIO else f"more than {MAX_RATIO:.0f}"
        interval = f"{self.low:#.3g} to {self.high:#.3g}" if self.has_upper_bound else f"at least {self.low:#.3g}"
        return f"{value} ({interval})"

    @property
    def has_upper_bound(self) -> bool:
        """Whether `high` is below `MAX_RATIO`. Larger values result from a denominator close to zero."""
        return self.high < MAX_RATIO

    def as_percent(self) -> str:
        """Format the value and the interval as percentages.

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

    def contains(self, true_value: float) -> bool:
        """Return whether a value is in the interval.

        Args:
            true_value: The value.

        Returns:
            True if the value is between both ends.

        >>> Interval(2.0, 1.5, 2.75).contains(2.5)
        True
        """
        return self.low <= true_value <= self.high

    def relative_deviation(self, true_value: float) -> float:
        """Return the true value minus the estimate, as a multiple of the half-width of the interval on that side.

        Args:
            true_value: The true value.

        Returns:
            The deviation. It is between −1 and 1 if the interval contains the true value.

        >>> interval = Interval(2.0, 1.5, 3.0)
        >>> interval.relative_deviation(2.5), interval.relative_deviation(1.0)
        (0.5, -2.0)
        """
        half_width = self.high - self.value if true_value > self.value else self.value - self.low
        return (true_value - self.value) / max(half_width, 1e-12)

    def excess_percent(self) -> Interval:
        """Return by how many percent a ratio exceeds 1.

        Returns:
            The interval of the percentage.

        >>> Interval(1.5, 1.25, 1.75).excess_percent()
        Interval(value=50.0, low=25.0, high=75.0)
        """
        return Interval(*(100 * (ratio - 1) for ratio in (self.value, self.low, self.high)))


class Prediction(NamedTuple):
    """Excess risks predicted with closed-form expressions.

    - `risks`: the excess risks 𝓔_m of NAL and MAML
    - `ratio`: the excess risk of NAL divided by that of MAML
    - `relative_gain`: the relative reduction of the expected loss, 1 − F_m(MAML)/F_m(NAL)
    - `residual_fraction`: the excess risk of MAML after the step, divided by that of NAL before the step
    - `bootstrap_ratios`, `bootstrap_relative_gains`: `ratio` and `relative_gain` for each bootstrap sample of the tasks
    """

    risks: Risks
    ratio: Interval
    relative_gain: Interval
    residual_fraction: float
    bootstrap_ratios: Tensor
    bootstrap_relative_gains: Tensor


@dataclass(frozen=True, eq=False)
class LandscapeEstimate:
    """Estimates of the task landscape, which consists of a group of hard and a group of easy tasks, and predictions.

    All tasks of a group are assumed to have the same feature covariance.

    Args:
        moments: Moments of the tasks.
        is_hard: Mask of the hard tasks (tasks,).
        m: Number of samples that adaptation uses.
        hard_probability: Probability of hard tasks (default: the fraction of hard tasks in `is_hard`).
    """

    moments: SplitMoments
    is_hard: Tensor
    m: int
    hard_probability: float | None = None

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
        """Feature covariances of the hard and of the easy tasks (2, d, d)."""
        return torch.stack([self.moments.covariance[tasks].mean((0, 1)) for tasks in self.group_indices])

    @cached_property
    def fourth_moments(self) -> Tensor:
        """E[xxᵀΣxxᵀ] of the hard and of the easy tasks (2, d, d).

        E[xxᵀΣxxᵀ] − Σ³ = E[(xxᵀ − Σ)Σ(xxᵀ − Σ)] is positive semi-definite, so negative eigenvalues of its estimate are
        set to zero.
        """
        cubes = self.covariances @ self.covariances @ self.covariances
        fourth_moments = torch.stack([self.moments.fourth_moment[tasks].mean((0, 1)) for tasks in self.group_indices])
        eigenvalues, eigenvectors = torch.linalg.eigh(fourth_moments - cubes)
        return cubes + (eigenvectors * eigenvalues.clamp_min(0)[..., None, :]) @ eigenvectors.mT  # type: ignore[no-any-return]

    def adapted_covariances(self, alpha: float) -> Tensor:
        """Return Q^{(m)} of the hard and of the easy tasks (2, d, d)."""
        return adapted_covariance(self.covariances, alpha, self.m, self.fourth_moments)

    @cached_property
    def kurtosis(self) -> Tensor:
        """tr E[xxᵀΣxxᵀ] of the hard and of the easy tasks (2,), divided by its value for Gaussian features."""
        squares, cubes = (torch.linalg.matrix_power(self.covariances, power) for power in (2, 3))
        return _trace(self.fourth_moments) / (_trace(squares) * _trace(self.covariances) + 2 * _trace(cubes))

    @cached_property
    def curvature(self) -> float:
        """The largest eigenvalue of the covariances of both groups."""
        return float(torch.linalg.eigvalsh(self.covariances).max())

    def default_step_size(self) -> float:
        """Return 1/curvature, but at most `MAX_STEP_TIMES_CURVATURE` divided by the largest curvature of any task."""
        return 1 / max(self.curvature, float(largest_curvatures(self.moments).max()) / MAX_STEP_TIMES_CURVATURE)

    def heavy_tailed_variables(self) -> tuple[str, ...]:
        """Return the variables whose variance is dominated by few tasks or examples, such as "targets of hard tasks".

        The criterion is Kish's effective sample size (Σc)²/Σc² of the squares c of a variable, for the examples and for
        the means of c over each task. If the variable is Gaussian, the effective sample size of n examples is n/3; if
        its variance is infinite, it does not grow with n.
        """
        squares = _trace(self.moments.covariance), self.moments.target_square
        fourth_powers = self.moments.fourth_powers.unbind(-1)
        heavy_tailed = []
        for group, tasks in zip(("hard", "easy"), self.group_indices):
            for name, square, fourth_power in zip(("inputs", "targets"), squares, fourth_powers):
                # (Σc)²/Σc² divided by n is E[c]²/E[c²], where E is the mean over n tasks or over n examples.
                squared_mean = square[tasks].mean().square()
                mean_square_over_tasks = square[tasks].mean(1).square().mean()
                mean_square_over_examples = fourth_power[tasks].mean()
                if (
                    squared_mean < MIN_EFFECTIVE_TASKS * mean_square_over_tasks
                    or squared_mean < MIN_EFFECTIVE_EXAMPLES * mean_square_over_examples
                ):
                    heavy_tailed.append(f"{name} of {group} tasks")
        return tuple(heavy_tailed)

    def landscape(self, alpha: float) -> Landscape:
        """Return the two groups as a `Landscape`, the hard group first.

        The solutions of a group have the covariance rI, where r satisfies tr(Q^{(m)}·rI) = tr(Q^{(m)}·S) for their
        estimated covariance S, or r = 0 if this r is negative. 𝓔_m depends on S only through this trace. S itself
        is not used, because the unbiased estimate may have negative eigenvalues.
        """
        groups = []
        hard_probability = (
            float(self.is_hard.double().mean()) if self.hard_probability is None else self.hard_probability
        )
        probabilities = hard_probability, 1 - hard_probability
        for tasks, covariance, Q, probability in zip(
            self.group_indices, self.covariances, self.adapted_covariances(alpha), probabilities
        ):
            # w* estimated from each half. The halves have independent noise, so products of the two are unbiased.
            w1, w2 = self.solutions[tasks].unbind(1)
            center = (w1.mean(0) + w2.mean(0)) / 2
            S = ((w1 - w1.mean(0)).mT @ (w2 - w2.mean(0))) / (len(tasks) - 1)
            r = float((Q * S).sum() / Q.trace())
            signal_variance = torch.einsum("ti,ij,tj->t", w1, covariance, w2).mean()
            noise = float(self.moments.target_square[tasks].mean() - signal_variance)
            groups.append(TaskGroup(covariance, center, max(r, 0.0), max(noise, 0.0), probability))
        return Landscape(tuple(groups), self.moments.dimension)

    @cached_property
    def group_indices(self) -> tuple[Tensor, Tensor]:
        """Indices of the hard tasks and of the easy tasks."""
        return self.is_hard.nonzero().flatten(), (~self.is_hard).nonzero().flatten()

    def distance(self, landscape: Landscape, alpha: float) -> float:
        """Return the distance R between the centers of the groups, corrected for their sampling error.

        It uses the norm ‖v‖² = vᵀQv / tr Q, where Q is Q^{(m)} of the hard tasks. If Q is a multiple of I and the
        centers are the vectors (0, …, 0) and (R, …, R), as in Collins et al. (2022), the distance is R.
        """
        distribution, Q = landscape.distribution, self.adapted_covariances(alpha)[0]
        gap = distribution.center[0] - distribution.center[1]
        center_covariances = [self.solutions[tasks].mean(1).T.cov() / len(tasks) for tasks in self.group_indices]
        squared_distance = (gap @ Q @ gap - (Q * (center_covariances[0] + center_covariances[1])).sum()) / Q.trace()
        return float(squared_distance.clamp_min(0).sqrt())

    def predict(self, alpha: float, generator: torch.Generator) -> Prediction:
        """Predict the excess risks of NAL and MAML after a step of size `alpha`, with intervals.

        The intervals are from bootstrap samples of the tasks. The sampling error of the estimated centers biases the
        excess risks upward. The bias is estimated with the bootstrap and subtracted.
        """
        terms = self._loss_terms(alpha)
        bootstrap_samples = (self._bootstrap_sample(generator) for _ in range(BOOTSTRAP_SAMPLES))
        # A step size that is stable for these tasks may diverge for a bootstrap sample; it is then reduced.
        bootstrap_terms = torch.stack(
            [
                sample._loss_terms(min(alpha, 0.999 * DIVERGENCE_LIMIT / sample.curvature))
                for sample in bootstrap_samples
            ]
        )
        bias = bootstrap_terms.mean(0) - terms
        # Lower limits of the first two terms: the gain, 𝓔_m(NAL) − 𝓔_m(MAML), and MAML's risk, which is a denominator.
        lower_limits = torch.tensor([0.0, 1e-9 * float(terms[1])], dtype=torch.float64)
        gain, maml_risk = (terms - bias)[:2].clamp_min(lower_limits).tolist()
        # twice the bias: the sample of the tasks has it once, and a bootstrap sample of these tasks a second time
        gains, maml_risks = (bootstrap_terms - 2 * bias)[:, :2].clamp_min(lower_limits).unbind(1)
        floor, nal_risk_before_step = terms[2:].tolist()
        ratios = 1 + gains / maml_risks.clamp_min(TINY)
        relative_gains = gains / (gains + maml_risks + bootstrap_terms[:, 2]).clamp_min(TINY)
        return Prediction(
            Risks(maml_risk + gain, maml_risk),
            self._interval(1 + gain / max(maml_risk, TINY), ratios),
            self._interval(gain / max(gain + maml_risk + floor, TINY), relative_gains),
            maml_risk / max(nal_risk_before_step, TINY),
            ratios,
            relative_gains,
        )

    def _interval(self, value: float, bootstrap_values: Tensor) -> Interval:
        """Return the expanded percentile interval (Hesterberg 2015), extended to contain `value` if necessary."""
        tail = percentile_tail(min(map(len, self.group_indices)))
        low, high = bootstrap_values.quantile(torch.tensor([tail, 1 - tail], dtype=bootstrap_values.dtype)).tolist()
        return Interval(value, min(low, value), max(high, value))

    def _loss_terms(self, alpha: float) -> Tensor:
        """Return 𝓔_m(NAL) − 𝓔_m(MAML), 𝓔_m(MAML), the noise floor, and 𝓔_m(NAL) for a step of size 0.

        The inner step of MAML during training is assumed to use as many samples as the step at test time.
        """
        landscape, m = self.landscape(alpha), self.m
        solutions = torch.stack(
            [nal_solution(landscape), maml_solution(landscape, alpha, m, fourth_moments=self.fourth_moments)]
        )
        nal, maml = risk_above_floor(landscape, solutions, alpha, m, fourth_moments=self.fourth_moments)
        nal_before_step = risk_above_floor(landscape, solutions[0], 0.0, m)
        return torch.stack([nal - maml, maml, nal.new_tensor(noise_floor(landscape, alpha, m)), nal_before_step])

    def _bootstrap_sample(self, generator: torch.Generator) -> LandscapeEstimate:
        """Return the estimate for a bootstrap sample of the tasks, stratified by group if `hard_probability` is set."""
        while True:
            if self.hard_probability is None:
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

    def project_solutions(self) -> Tensor:
        """Project the solution of every task to two dimensions (tasks, 2).

        The origin is the center of the easy tasks. The first axis points to the center of the hard tasks; the second
        is the orthogonal direction of largest variance. Lengths are in the norm ‖v‖² = vᵀΣv, where Σ is the mean
        feature covariance of all tasks.
        """
        eigenvalues, eigenvectors = torch.linalg.eigh(self.moments.covariance.mean((0, 1)))
        solutions = self.solutions.mean(1) @ (eigenvectors * eigenvalues.clamp_min(0).sqrt()) @ eigenvectors.T
        solutions = solutions - solutions[~self.is_hard].mean(0)
        first_axis = torch.nn.functional.normalize(solutions[self.is_hard].mean(0), dim=0)
        residuals = solutions - (solutions @ first_axis)[:, None] * first_axis
        second_axis = torch.linalg.eigh(residuals.T @ residuals).eigenvectors[:, -1]
        return torch.stack([solutions @ first_axis, residuals @ second_axis], 1)


def find_hard_tasks(moments: SplitMoments) -> Tensor:
    """Return a mask of the hard tasks (tasks,), the group with the lower convergence rates.

    The tasks are first split by convergence rate. Then each task is assigned to the group whose covariance makes its
    examples more likely: a rate depends on a single direction of the features, whereas covariances also distinguish
    groups with overlapping rates. Tasks are reassigned only once, because repeated reassignment can converge to groups
    that do not differ in hardness.
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
    """Return a mask of the tasks with low convergence rates.

    The threshold on the log rates minimizes the within-group sum of squares.

    >>> split_by_rate(torch.tensor([0.1] * 5 + [1.0] * 7)).sum()
    tensor(5)
    """
    if len(rates) < 2 * MIN_TASKS_PER_GROUP:
        raise InputError(
            f"there are {len(rates)} tasks, but two groups need at least {2 * MIN_TASKS_PER_GROUP}. Sample more tasks."
        )
    log_rates = rates.double().log().sort().values
    sizes = range(MIN_TASKS_PER_GROUP, len(log_rates) - MIN_TASKS_PER_GROUP + 1)
    hard_count = min(
        sizes, key=lambda size: float(_sum_of_squares(log_rates[:size]) + _sum_of_squares(log_rates[size:]))
    )
    ranks = rates.argsort().argsort()
    return ranks < hard_count


def _trace(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1).sum(-1)


def _sum_of_squares(values: Tensor) -> Tensor:
    return (values - values.mean()).square().sum()
