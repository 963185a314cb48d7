"""Tests of every registered inner solver; gradients are tested with `cases.METHODS`."""

from __future__ import annotations

import pytest
import torch

from cases import METHODS
from metabridge.learners import OUTER_RULES
from metabridge.models.network import apply_head
from metabridge.solvers import IterativeSolver, Problem, Solver, task_loss

every_solver = pytest.mark.parametrize("cls", Solver.registry.values(), ids=Solver.registry.keys())


@every_solver
def test_every_outer_gradient_that_a_solver_supports_is_registered_and_tested(cls):
    assert set(cls.outer_rules) <= OUTER_RULES.keys()
    tested = {method.outer for method in METHODS.values() if isinstance(method.inner, cls)}
    assert tested == set(cls.outer_rules)


@every_solver
def test_a_solver_that_supports_the_implicit_gradient_defines_its_linear_system(cls):
    if "implicit" in cls.outer_rules:
        system = cls().implicit_system
        assert system is None or (system.strength > 0 and system.cg_steps > 0)
    else:
        with pytest.raises(NotImplementedError, match=f"{cls.__name__} must define implicit_system"):
            cls().implicit_system  # noqa: B018


@every_solver
def test_a_solver_lowers_the_support_loss_of_a_head(cls):
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(3).repeat(4)
    x = torch.eye(3)[y] @ torch.randn(3, 5, generator=generator) + 0.1 * torch.randn(12, 5, generator=generator)
    problem, solver = Problem(apply_head, task_loss, x, y), cls()
    start = {"head.weight": torch.zeros(3, 5)}
    adapted = solver.solve(problem, start, solver.solver_params(start), exact=False)
    assert problem.support_loss(adapted) < problem.support_loss(start) - 0.01


@every_solver
def test_names_of_the_learned_parameters_of_a_solver_have_a_known_prefix(cls):
    start = {"head.weight": torch.zeros(3, 5)}
    for name, value in cls().solver_params(start).items():
        assert name.startswith(("rates.", "solver."))
        assert value.isfinite().all()


@every_solver
def test_a_solver_either_solves_exactly_or_takes_steps(cls):
    assert cls.solves_exactly != issubclass(cls, IterativeSolver)
