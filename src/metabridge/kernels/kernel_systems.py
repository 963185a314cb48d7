"""Solving with kernel matrices: never silently, and without the matrix where it would not fit."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from metabridge.conjugate_gradients import Product, conjugate_gradients
from metabridge.errors import InputError
from metabridge.kernels.kernel import Kernel

log = logging.getLogger("metabridge")

MOST_CONDITION = 1e12  # of the kernel between two points that it can tell apart
MOST_JITTER = 1e-6  # of the mean of the diagonal; what needs more is not solved but refused


@dataclass(frozen=True, eq=False)
class Solution:
    """What a solve found, and what it took: `jitter` was added to the diagonal, beyond any ridge asked for."""

    values: Tensor
    jitter: float


def cholesky_solve(matrix: Tensor, target: Tensor, ridge: float = 0.0) -> Solution:
    """Solve (M + ridge·I)v = target for a positive semi-definite M.

    Where rounding has made M indefinite, the least of some jitters that mends it is added, and said in a warning.

    >>> cholesky_solve(2 * torch.eye(1), torch.ones(1, 1)).values
    tensor([[0.5000]])
    """
    mean = float(matrix.diagonal().mean())
    jitters = [0.0] + [mean * 10.0**power for power in range(-14, -5) if 10.0**power <= MOST_JITTER]
    for jitter in jitters:
        shifted = matrix.clone()
        shifted.diagonal().add_(ridge + jitter)
        factor, failed = torch.linalg.cholesky_ex(shifted)
        if not failed and float(factor.diagonal().min()) ** 2 > mean * torch.finfo(matrix.dtype).eps:
            if jitter:
                log.warning("a kernel matrix of %d points needed a jitter of %.1e to be solved.", len(matrix), jitter)
            return Solution(torch.cholesky_solve(target, factor), jitter)
    raise InputError(
        f"a kernel matrix of {len(matrix)} points is singular: adding {MOST_JITTER:g} of its diagonal does not help. "
        "Give a ridge, or look for points that are the same or not finite."
    )


def condition_number(matrix: Tensor, ridge: float = 0.0, eps: float | None = None) -> float:
    """σ_max/σ_min of M + ridge·I; infinite where the smallest eigenvalue is lost in rounding.

    Entries are right to `eps`, relative to the largest: to the precision of their dtype unless given.

    >>> condition_number(torch.diag(torch.tensor([4.0, 1.0])))
    4.0
    """
    values = torch.linalg.eigvalsh(matrix) + ridge
    least, most = float(values[0]), float(values[-1])
    eps = torch.finfo(matrix.dtype).eps if eps is None else eps
    return most / least if least > most * len(matrix) * eps else float("inf")


def conjugate_gradient_solve(
    product: Product,
    target: Tensor,
    precondition: Product,
    *,
    tolerance: float = 1e-10,
    max_steps: int = 1000,
) -> Solution:
    """Solve Mv = target, columns side by side, where only products with M can be had.

    >>> conjugate_gradient_solve(lambda v: 2 * v, torch.ones(1, 1), lambda v: v).values
    tensor([[0.5000]])
    """
    values, solved = conjugate_gradients(product, target, precondition, over=0, fall=tolerance**2, steps=max_steps)
    if not solved.all():
        worst = float(((product(values) - target).norm(dim=0) / target.norm(dim=0)).nan_to_num().max())
        log.warning("conjugate gradient stopped after %d steps with a relative residual of %.1e.", max_steps, worst)
    return Solution(values, 0.0)


def refuse_duplicates(kernel: Kernel, x: Tensor, where: str) -> None:
    """Raise if two points, (points, ...), are the same, or the same up to length and the kernel sees no length."""
    unit = torch.nn.functional.normalize(x.flatten(1).double(), dim=1)
    order = torch.unique((unit * 1e6).round(), dim=0, return_inverse=True)[1]
    alike: dict[int, list[int]] = {}
    for row, group in enumerate(order.tolist()):
        for other in alike.setdefault(group, []):
            if condition_number(kernel.ntk(x[[other, row]])) > MOST_CONDITION:
                raise InputError(
                    f"points {other} and {row} of {where} are the same, or the same up to length, so the kernel is "
                    "singular. Remove one of them, or give a ridge."
                )
        alike[group].append(row)
