from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from metabridge.intervals import half_width, mean_interval, percentile_tail, t_quantile


@pytest.mark.parametrize("degrees", [1, 4, 9, 599])
def test_the_quantile_is_that_of_students_t(degrees):
    assert t_quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees))


def test_a_single_value_has_no_interval():
    assert math.isnan(half_width(torch.tensor([1.0])))


def test_means_over_runs_have_the_same_interval():
    values = [1.0, 2.0, 4.0]
    assert mean_interval(values)[1] == half_width(torch.tensor(values))


@pytest.mark.parametrize("samples", [10, 20, 50])
def test_bootstrap_percentiles_of_a_mean_equal_the_ends_of_its_interval(samples):
    """The samples are evenly spaced, so that the bootstrap distribution of their mean is almost normal."""
    values = torch.linspace(-1, 1, samples, dtype=torch.float64)
    means = np.random.default_rng(0).choice(values.numpy(), (200_000, samples)).mean(1)
    assert np.quantile(means, 1 - percentile_tail(samples)) == pytest.approx(half_width(values), rel=0.06)
