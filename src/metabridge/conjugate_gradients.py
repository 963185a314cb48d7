"""Conjugate gradients for positive definite linear systems whose matrices are given by matrix-vector products."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Matvec = Callable[[Tensor], Tensor]


def conjugate_gradients(
    matvec: Matvec,
    target: Tensor,
    precondition: Matvec,
    *,
    dim: int | tuple[int, ...],
    squared_rtol: float,
    squared_atol: Tensor | float = 0.0,
    max_steps: int,
) -> tuple[Tensor, Tensor]:
    """Solve Ax = target for many systems at once, each until its residual is small enough.

    The squared residual of x is ⟨r, M⁻¹r⟩ with r = target − Ax and the preconditioner M. A system is solved when its
    squared residual is at most `squared_rtol` times that of x = 0, or at most `squared_atol`. Residuals that small
    count as rounding errors, which further steps along directions of almost no curvature would amplify. The solution of
    a solved system stays the same while the unsolved systems take further steps.

    Args:
        matvec: Returns Av for the positive definite matrices A.
        target: The right-hand sides of all systems, in one tensor.
        precondition: Returns M⁻¹v, an approximation of A⁻¹v.
        dim: The dimensions of `target` that index the entries of one system. The other dimensions index the systems.
        squared_rtol: Tolerance of the squared residual, relative to that of x = 0.
        squared_atol: Absolute tolerance of the squared residual.
        max_steps: Maximum number of steps.

    Returns:
        The solutions, and for each system whether it is solved.

    >>> conjugate_gradients(lambda v: 2 * v, torch.ones(1, 1), lambda v: v, dim=0, squared_rtol=1e-20, max_steps=9)
    (tensor([[0.5000]]), tensor([[True]]))
    """
    solution, solved = _iterate(
        lambda v: [matvec(v[0])],
        [target],
        lambda v: [precondition(v[0])],
        lambda left, right: (left[0] * right[0]).sum(dim, keepdim=True),
        squared_rtol,
        squared_atol,
        max_steps,
    )
    return solution[0], solved


def conjugate_gradients_fixed_steps(
    matvec: Callable[[dict[str, Tensor]], dict[str, Tensor]], target: dict[str, Tensor], steps: int
) -> dict[str, Tensor]:
    """Solve Ax = target for one system of named tensors, in a fixed number of steps.

    No control flow depends on the values of tensors, so the function can be mapped by `torch.func.vmap` and captured in
    a CUDA graph. Once the residual is zero, further steps do not change the solution.

    Args:
        matvec: Returns Av for the positive definite matrix A.
        target: The right-hand side.
        steps: The number of steps.

    >>> conjugate_gradients_fixed_steps(lambda v: {"a": 2 * v["a"]}, {"a": torch.ones(1)}, steps=2)
    {'a': tensor([0.5000])}
    """
    names = list(target)

    def list_matvec(v: list[Tensor]) -> list[Tensor]:
        product = matvec(dict(zip(names, v)))
        return [product[name] for name in names]

    def dot(left: list[Tensor], right: list[Tensor]) -> Tensor:
        return torch.stack([(a * b).sum() for a, b in zip(left, right)]).sum()

    solution, _ = _iterate(list_matvec, list(target.values()), lambda v: v, dot, None, 0.0, steps)
    return dict(zip(names, solution))


def _iterate(
    matvec: Callable[[list[Tensor]], list[Tensor]],
    target: list[Tensor],
    precondition: Callable[[list[Tensor]], list[Tensor]],
    dot: Callable[[list[Tensor], list[Tensor]], Tensor],
    squared_rtol: float | None,
    squared_atol: Tensor | float,
    max_steps: int,
) -> tuple[list[Tensor], Tensor]:
    """Return the solutions, and for each system whether it is solved. If `squared_rtol` is None, take all steps.

    A vector is a list of tensors. `dot` returns the inner product of two vectors, separately for each system.
    """
    solution, residual = [torch.zeros_like(tensor) for tensor in target], target
    direction = preconditioned = precondition(residual)
    squared_residual = dot(residual, preconditioned)
    threshold: Tensor | float = 0.0
    if squared_rtol is not None:
        threshold = (squared_rtol * squared_residual).clamp_min(squared_atol)
    for _ in range(max_steps):
        unsolved = squared_residual > threshold
        if squared_rtol is not None and not unsolved.any():
            break
        A_direction = matvec(direction)
        curvature = dot(direction, A_direction)
        # Rounding errors can make the curvature negative or zero.
        step_size = torch.where(unsolved & (curvature > 0), squared_residual / curvature, 0)
        solution = [x + step_size * d for x, d in zip(solution, direction)]
        residual = [r - step_size * Ad for r, Ad in zip(residual, A_direction)]
        preconditioned = precondition(residual)
        previous_squared_residual, squared_residual = squared_residual, dot(residual, preconditioned)
        residual_ratio = torch.where(unsolved, squared_residual / previous_squared_residual, 0)
        direction = [z + residual_ratio * d for z, d in zip(preconditioned, direction)]
    return solution, squared_residual <= threshold
