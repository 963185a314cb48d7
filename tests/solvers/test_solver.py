"""What holds for every inner solver; their gradients are tested with `cases.METHODS`."""

from __future__ import annotations

import pytest
import torch

from cases import METHODS
from metabridge.learners import OUTER_RULES
from metabridge.models.network import apply_head
from metabridge.solvers import IterativeSolver, Problem, Solver, task_loss

every_solver = pytest.mark.parametrize("kind", Solver.registry.values(), ids=Solver.registry.keys())


@every_solver
def test_every_outer_gradient_that_a_solver_admits_is_registered_and_tested(kind):
    assert set(kind.outer_rules) <= OUTER_RULES.keys()
    tested = {method.outer for method in METHODS.values() if isinstance(method.inner, kind)}
    assert tested == set(kind.outer_rules)


@every_solver
def test_a_solver_lowers_the_support_loss_of_a_head(kind):
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(3).repeat(4)
    x = torch.eye(3)[y] @ torch.randn(3, 5, generator=generator) + 0.1 * torch.randn(12, 5, generator=generator)
    problem, solver = Problem(apply_head, task_loss, x, y), kind()
    start = {"head.weight": torch.zeros(3, 5)}
    adapted = solver.solve(problem, start, solver.solver_params(start), exact=False)
    assert problem.support_loss(adapted) < problem.support_loss(start) - 0.01


@every_solver
def test_learned_parameters_of_a_solver_have_names_that_say_so(kind):
    start = {"head.weight": torch.zeros(3, 5)}
    for name, value in kind().solver_params(start).items():
        assert name.startswith(("rates.", "solver."))
        assert value.isfinite().all()


@every_solver
def test_a_solver_in_closed_form_takes_no_steps(kind):
    assert kind.closed_form != issubclass(kind, IterativeSolver)
