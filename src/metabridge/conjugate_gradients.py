"""Conjugate gradients for positive definite systems that are given by products with their matrices."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]


def conjugate_gradients(
    product: Product,
    target: Tensor,
    precondition: Product,
    *,
    dim: int | tuple[int, ...],
    tolerance: float,
    floor: Tensor | float = 0.0,
    steps: int,
) -> tuple[Tensor, Tensor]:
    """Solve product(v) = target for many systems at once, each to a tolerance.

    A system is solved when its squared residual, as `precondition` measures it, is at most `tolerance` times that of
    v = 0, or at most `floor`. Below the floor, residuals are rounding errors, which directions of almost no curvature
    would magnify. A solved system stays as it is while others are iterated.

    Args:
        product: The product with the positive definite matrices.
        target: The right-hand sides.
        precondition: The product with an approximate inverse.
        dim: The dimensions of one system in `target`.
        tolerance: The relative tolerance on squared residuals.
        floor: The absolute tolerance on squared residuals.
        steps: The largest number of steps.

    Returns:
        The solutions, and which systems are solved.

    >>> conjugate_gradients(lambda v: 2 * v, torch.ones(1, 1), lambda v: v, dim=0, tolerance=1e-20, steps=9)
    (tensor([[0.5000]]), tensor([[True]]))
    """
    solution, solved = _iterate(
        lambda v: [product(v[0])],
        [target],
        lambda v: [precondition(v[0])],
        lambda left, right: (left[0] * right[0]).sum(dim, keepdim=True),
        tolerance,
        floor,
        steps,
    )
    return solution[0], solved


def fixed_conjugate_gradients(
    product: Callable[[dict[str, Tensor]], dict[str, Tensor]], target: dict[str, Tensor], steps: int
) -> dict[str, Tensor]:
    """Solve product(v) = target for one system of named tensors, in a fixed number of steps.

    Nothing depends on values, so it can be mapped by `torch.func.vmap` and captured in a CUDA graph. A system whose
    residual has vanished stays as it is.

    Args:
        product: The product with the positive definite matrix.
        target: The right-hand side.
        steps: The number of steps.

    >>> fixed_conjugate_gradients(lambda v: {"a": 2 * v["a"]}, {"a": torch.ones(1)}, steps=2)
    {'a': tensor([0.5000])}
    """
    names = list(target)

    def list_product(v: list[Tensor]) -> list[Tensor]:
        image = product(dict(zip(names, v)))
        return [image[name] for name in names]

    def dot(left: list[Tensor], right: list[Tensor]) -> Tensor:
        return torch.stack([(a * b).sum() for a, b in zip(left, right)]).sum()

    solution, _ = _iterate(list_product, list(target.values()), lambda v: v, dot, None, 0.0, steps)
    return dict(zip(names, solution))


def _iterate(
    product: Callable[[list[Tensor]], list[Tensor]],
    target: list[Tensor],
    precondition: Callable[[list[Tensor]], list[Tensor]],
    dot: Callable[[list[Tensor], list[Tensor]], Tensor],
    tolerance: float | None,
    floor: Tensor | float,
    steps: int,
) -> tuple[list[Tensor], Tensor]:
    """Return the solutions and which systems are solved; without a tolerance, take all steps."""
    solution, residual = [torch.zeros_like(part) for part in target], target
    direction = scaled = precondition(residual)
    size = dot(residual, scaled)
    enough: Tensor | float = 0.0 if tolerance is None else (tolerance * size).clamp_min(floor)
    for _ in range(steps):
        unsolved = size > enough
        if tolerance is not None and not unsolved.any():
            break
        image = product(direction)
        curvature = dot(direction, image)
        length = torch.where(unsolved & (curvature > 0), size / curvature, 0)  # rounding can make it negative
        solution = [part + length * step for part, step in zip(solution, direction)]
        residual = [part - length * step for part, step in zip(residual, image)]
        scaled = precondition(residual)
        previous, size = size, dot(residual, scaled)
        ratio = torch.where(unsolved, size / previous, 0)
        direction = [part + ratio * step for part, step in zip(scaled, direction)]
    return solution, size <= enough
