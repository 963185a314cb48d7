from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
import torch
from scipy import stats

from metabridge.intervals import Coefficient, half_width, mean_interval, percentile_tail, rank_correlation, t_quantile


@pytest.mark.parametrize("degrees", [1, 4, 9, 599])
def test_the_quantile_is_that_of_students_t(degrees):
    assert t_quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees))


def test_a_single_value_has_no_interval():
    assert math.isnan(half_width(torch.tensor([1.0])))


def test_mean_interval_returns_the_half_width():
    values = [1.0, 2.0, 4.0]
    assert mean_interval(values)[1] == half_width(torch.tensor(values))


@pytest.mark.parametrize("samples", [10, 20, 50])
def test_bootstrap_percentiles_of_a_mean_equal_the_ends_of_its_interval(samples):
    """The samples are evenly spaced, so that the bootstrap distribution of their mean is almost normal."""
    values = torch.linspace(-1, 1, samples, dtype=torch.float64)
    means = np.random.default_rng(0).choice(values.numpy(), (200_000, samples)).mean(1)
    assert np.quantile(means, 1 - percentile_tail(samples)) == pytest.approx(half_width(values), rel=0.06)


@pytest.mark.parametrize("coefficient", get_args(Coefficient))
def test_rank_correlations_depend_only_on_the_order(coefficient):
    def correlate(y: list[float], resamples: int = 50) -> tuple[float, float, float]:
        return rank_correlation(coefficient, x, y, resamples=resamples, seed=0)

    x = [float(value) for value in range(20)]
    assert correlate([value**3 for value in x]) == pytest.approx((1, 1, 1))
    assert correlate([-math.inf if value == 19 else -value for value in x])[0] == pytest.approx(-1)
    _, low, high = correlate(torch.rand(20, generator=torch.Generator().manual_seed(0)).tolist(), resamples=200)
    assert low < 0 < high
    assert correlate([1.0] * 20, resamples=5)[0] == 0


def test_the_interval_of_a_rank_correlation_is_as_wide_as_for_independent_values():
    y = torch.rand(20, generator=torch.Generator().manual_seed(0)).tolist()
    _, low, high = rank_correlation("Spearman", [float(x) for x in range(20)], y, resamples=500, seed=0)
    assert 0.7 < high - low < 1.2  # about 2 · 1.96/√(n − 1) for n = 20 independent pairs
