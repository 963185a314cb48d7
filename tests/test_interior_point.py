"""Compare the interior-point solver with SciPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import optimize
from torch import Tensor

from metabridge.interior_point import solve_qp


def random_normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def program(seed: int, b: int = 2, n: int = 5, m: int = 2) -> tuple[Tensor, ...]:
    """Return Q, e, A, r, lo and hi of a feasible program with two-sided, one-sided and absent bounds."""
    root = random_normal(b, n, n, seed=seed)
    A, feasible_point = random_normal(b, m, n, seed=seed + 1), random_normal(b, n, seed=seed + 2)
    bound_kind = torch.arange(b * n).reshape(b, n) % 4
    lo = torch.where(bound_kind < 2, feasible_point - 0.3, -torch.inf)
    hi = torch.where(bound_kind % 2 == 0, feasible_point + 0.5, torch.inf)
    return root @ root.mT, random_normal(b, n, seed=seed + 3), A, (A @ feasible_point[..., None])[..., 0].sum(0), lo, hi


@pytest.mark.parametrize("seed", range(5))
def test_the_solution_equals_that_of_scipy(seed):
    Q, e, A, r, lo, hi = program(seed)
    blocks, linear, rows = torch.block_diag(*Q).numpy(), e.flatten().numpy(), torch.cat(list(A), -1).numpy()
    reference = optimize.minimize(
        lambda a: a @ blocks @ a / 2 - linear @ a,
        np.zeros(linear.size),
        jac=lambda a: blocks @ a - linear,
        method="SLSQP",
        bounds=list(zip(lo.flatten().tolist(), hi.flatten().tolist())),
        constraints={"type": "eq", "fun": lambda a: rows @ a - r.numpy(), "jac": lambda a: rows},
        options={"ftol": 1e-14, "maxiter": 1000},
    )
    solution = solve_qp(Q, e, A, r, lo, hi)
    np.testing.assert_allclose(solution.alpha.flatten().numpy(), reference.x, rtol=1e-5, atol=1e-5)
    assert solution.gap < 1e-8
    assert solution.residual < 1e-8


def test_batched_and_mapped_solutions_equal_those_of_single_programs():
    programs = [program(seed) for seed in range(0, 24, 4)]
    batch = [torch.stack(tensors) for tensors in zip(*programs)]
    single = torch.stack([solve_qp(*program_tensors).alpha for program_tensors in programs])
    folded = solve_qp(*(tensor.unflatten(0, (2, 3)) for tensor in batch)).alpha
    torch.testing.assert_close(folded.flatten(0, 1), single)
    torch.testing.assert_close(torch.func.vmap(solve_qp)(*batch).alpha, single)


def test_a_program_without_inequalities_equals_its_linear_system():
    Q, e, A, r, lo, _ = program(0)
    infinity = torch.full_like(lo, torch.inf)
    solution = solve_qp(Q, e, A, r, -infinity, infinity)
    rows = torch.cat(list(A), -1)
    system = torch.cat([torch.cat([torch.block_diag(*Q), -rows.mT], 1), torch.cat([rows, rows.new_zeros(2, 2)], 1)])
    torch.testing.assert_close(
        torch.cat([solution.alpha.flatten(), solution.dual]), torch.linalg.solve(system, torch.cat([e.flatten(), r]))
    )
