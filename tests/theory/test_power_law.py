from __future__ import annotations

import pytest
import torch

from metabridge.theory.power_law import PowerLaw, last_exponents, last_slopes


def test_the_interval_of_a_fitted_exponent_covers_the_true_one():
    generator = torch.Generator().manual_seed(0)
    covered_count = 0
    for _ in range(200):
        noise = torch.randn(3, 4, generator=generator).mul(0.2).exp().tolist()
        values_by_width = {
            width: [3 * width**-0.5 * factor for factor in factors] for width, factors in zip((64, 128, 256), noise)
        }
        law = PowerLaw.fit(values_by_width)
        covered_count += abs(law.exponent + 0.5) <= law.ci95
    assert 180 <= covered_count <= 198  # 190 expected, with a standard deviation of 3


def test_an_exact_power_law_is_recovered():
    assert PowerLaw.fit({width: [3 * width**-0.5] for width in (64, 128, 256)})(100) == pytest.approx(0.3)


def test_exponents_and_slopes_between_the_last_two_sizes_are_computed_for_every_run():
    values = {5: [100.0, 100.0], 10: [10.0, 3 * 10**-2.0], 40: [40.0, 3 * 40**-2.0]}
    assert last_exponents(values) == pytest.approx([1, -2])
    assert last_slopes(values)[0] == pytest.approx(1)
