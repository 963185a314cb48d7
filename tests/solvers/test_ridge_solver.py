from __future__ import annotations

import pytest
import torch

from metabridge.models.network import apply_head
from metabridge.solvers import Problem, RidgeSolver, task_loss


@pytest.mark.parametrize("penalty", [1e-3, 1e-6])
def test_ridge_regression_with_two_equal_points_is_accurate_in_float32(penalty):
    generator = torch.Generator().manual_seed(0)
    x, y = 5 * torch.randn(5, 64, generator=generator), torch.randn(5, 3, generator=generator)
    x[1] = x[0]
    queries = torch.randn(9, 64, generator=generator)

    def predict(dtype):
        problem = Problem(apply_head, task_loss, x.to(dtype), y.to(dtype))
        start, solver = {"head.weight": torch.zeros(3, 64, dtype=dtype)}, RidgeSolver(penalty)
        return apply_head(
            solver.solve(problem, start, solver.solver_params(start), exact=True), queries.to(dtype)
        ).double()

    torch.testing.assert_close(predict(torch.float32), predict(torch.float64), rtol=1e-3, atol=1e-4)
