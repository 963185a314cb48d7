from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from metabridge.theory.linear_problems import MAX_STEP, LinearProblem


@pytest.mark.parametrize("isotropic", [True, False])
def test_risks_after_training_approach_the_population_risks(isotropic):
    problem = replace(LinearProblem.random(2 if isotropic else 3, isotropic=isotropic), m=40)
    trained, population = problem.trained_risks(2000, 25, seed=0), problem.population_risks()
    assert trained == pytest.approx(population, rel=0.05)
    assert population.ratio >= 1


def test_steps_of_random_problems_do_not_diverge():
    for seed in (1, 3, 700007):
        problem = LinearProblem.random(seed, isotropic=False)
        curvature = float(torch.linalg.eigvalsh(problem.landscape.distribution.covariance).max())
        assert problem.alpha * curvature <= MAX_STEP * (1 + 1e-9)
        assert problem.population_risks().ratio >= 1


def test_covariances_are_multiples_of_the_identity_only_in_isotropic_problems():
    for isotropic in (True, False):
        hard, _ = LinearProblem.random(0, isotropic=isotropic).landscape.distribution.covariance
        is_multiple = torch.equal(hard, hard[0, 0] * torch.eye(len(hard), dtype=hard.dtype))
        assert is_multiple is isotropic
