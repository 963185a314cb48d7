"""95 % confidence intervals from few samples, by Student's t distribution or the bootstrap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Coefficient = Literal["Spearman", "Kendall"]


@cache
def t_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution: 1.96 for many degrees of freedom, larger for few.

    >>> round(t_quantile(4), 3)
    2.776
    """
    from scipy.special import stdtrit  # slow to import, and most commands do not need it

    return float(stdtrit(degrees, 0.975))


def half_width(values: Tensor) -> float:
    """Return the half-width of the 95 % interval of the mean of independent values; NaN for a single value.

    >>> import torch
    >>> round(half_width(torch.tensor([1.0, 3.0])), 2)
    12.71
    """
    if len(values) < 2:
        return math.nan
    return t_quantile(len(values) - 1) * float(values.double().std()) / math.sqrt(len(values))


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of independent values and the half-width of its 95 % interval.

    >>> mean_interval([1.0, 3.0])
    (2.0, 12.7...)
    """
    return sum(values) / len(values), half_width(torch.tensor(values, dtype=torch.float64))


@cache
def percentile_tail(samples: int) -> float:
    """Return the tail probability at each end of a 95 % bootstrap interval: 2.5 % for many samples, less for few.

    A bootstrap distribution of n = `samples` values is narrower than the sampling distribution by the factor
    √((n − 1)/n), and ignores that the variance is estimated. The expanded percentile interval (Hesterberg 2015, *What
    teachers should know about the bootstrap*) corrects both. For a mean, it is approximately Student's interval.

    >>> round(percentile_tail(10), 4), round(percentile_tail(10**6), 4)
    (0.0086, 0.025)
    """
    return NormalDist().cdf(-math.sqrt(samples / (samples - 1)) * t_quantile(samples - 1))


def rank_correlation(
    coefficient: Coefficient, x: Sequence[float], y: Sequence[float], *, resamples: int, seed: int
) -> tuple[float, float, float]:
    """Return the rank correlation of x and y, and the lower and upper end of its 95 % interval.

    The interval is from a bootstrap with `resamples` random selections of the pairs. If all values of x or of y are
    equal, the correlation is undefined and counts as 0.

    >>> rank_correlation("Kendall", [1.0, 2.0, 4.0, 5.0], [1.0, 3.0, 9.0, 8.0], resamples=100, seed=0)[0]
    0.66...
    """
    from scipy import stats

    compute = {"Spearman": stats.spearmanr, "Kendall": stats.kendalltau}[coefficient]

    def statistic(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
        return 0.0 if min(np.ptp(x), np.ptp(y)) == 0 else float(compute(x, y).statistic)

    ranks = stats.rankdata(x), stats.rankdata(y)
    low, high = stats.bootstrap(
        ranks,
        statistic,
        paired=True,
        vectorized=False,
        n_resamples=resamples,
        method="percentile",
        confidence_level=1 - 2 * percentile_tail(len(x)),
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return statistic(*ranks), float(low), float(high)
