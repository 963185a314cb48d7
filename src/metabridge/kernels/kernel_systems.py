"""Linear systems of kernel matrices, solved directly or, if the matrix does not fit in memory, by conjugate gradients.

A warning is logged if jitter is added to a matrix, or if conjugate gradients do not converge.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from metabridge.conjugate_gradients import Matvec, conjugate_gradients
from metabridge.errors import InputError
from metabridge.kernels.kernel import Kernel

log = logging.getLogger("metabridge")

MAX_PAIR_CONDITION = 1e12  # two points whose 2×2 kernel matrix has a larger condition number are duplicates
MAX_JITTER = 1e-6  # relative to the mean of the diagonal; a matrix that needs more jitter is singular


@dataclass(frozen=True, eq=False)
class Solution:
    """The solution of a linear system.

    Args:
        values: The solution, in the shape of the target.
        jitter: Number added to the diagonal of the matrix in addition to the ridge.
    """

    values: Tensor
    jitter: float


def cholesky_solve(matrix: Tensor, target: Tensor, ridge: float = 0.0) -> Solution:
    """Solve (M + ridge·I)v = target for a positive semi-definite M.

    If the matrix is not positive definite because of rounding errors, add a jitter and log a warning. The jitter is the
    smallest sufficient power of ten, from 1e-14 to `MAX_JITTER`, times the mean of the diagonal of M.

    Args:
        matrix: M, (n, n).
        target: Right-hand sides, (n, k).
        ridge: Number added to the diagonal.

    Returns:
        The solution and its jitter.

    Raises:
        InputError: If the matrix is singular even with the largest jitter.

    Example:
        >>> cholesky_solve(2 * torch.eye(1), torch.ones(1, 1)).values
        tensor([[0.5000]])
    """
    mean = float(matrix.diagonal().mean())
    jitters = [0.0] + [mean * 10.0**power for power in range(-14, -5) if 10.0**power <= MAX_JITTER]
    for jitter in jitters:
        shifted = matrix.clone()
        shifted.diagonal().add_(ridge + jitter)
        factor, failed = torch.linalg.cholesky_ex(shifted)
        if not failed and float(factor.diagonal().min()) ** 2 > mean * torch.finfo(matrix.dtype).eps:
            if jitter:
                log.warning(
                    "a kernel matrix of %d points is nearly singular: added a jitter of %.1e.", len(matrix), jitter
                )
            return Solution(torch.cholesky_solve(target, factor), jitter)
    raise InputError(
        f"a kernel matrix of {len(matrix)} points is singular, even with a jitter of {MAX_JITTER:g} times the mean of "
        "its diagonal. Use a ridge, or remove points that are duplicates or not finite."
    )


def extreme_eigenvalues(matrix: Tensor) -> tuple[float, float]:
    """Return the smallest and the largest eigenvalue of a symmetric matrix.

    Args:
        matrix: The matrix, (n, n).

    Returns:
        The two eigenvalues.

    Example:
        >>> extreme_eigenvalues(torch.diag(torch.tensor([4.0, 1.0, 2.0])))
        (1.0, 4.0)
    """
    eigenvalues = torch.linalg.eigvalsh(matrix)
    return float(eigenvalues[0]), float(eigenvalues[-1])


def condition_number(matrix: Tensor, ridge: float = 0.0, eps: float | None = None) -> float:
    """Return σ_max/σ_min of M + ridge·I; infinity if σ_min could be zero up to rounding errors.

    Args:
        matrix: A symmetric matrix M.
        ridge: Number added to the diagonal.
        eps: Precision of the entries, relative to the largest one (default: the precision of the dtype).

    Returns:
        The condition number.

    Example:
        >>> condition_number(torch.diag(torch.tensor([4.0, 1.0])))
        4.0
    """
    smallest, largest = (value + ridge for value in extreme_eigenvalues(matrix))
    eps = torch.finfo(matrix.dtype).eps if eps is None else eps
    return largest / smallest if smallest > largest * len(matrix) * eps else float("inf")


def conjugate_gradient_solve(
    product: Matvec,
    target: Tensor,
    precondition: Matvec,
    *,
    tolerance: float = 1e-10,
    max_steps: int = 1000,
) -> Solution:
    """Solve Mv = target by preconditioned conjugate gradients, using only products with M.

    If the solution does not converge in `max_steps`, log a warning with the relative residual.

    Args:
        product: Function that returns Mv.
        target: Right-hand sides, (n, k), solved together.
        precondition: Function that returns an approximation of M⁻¹v.
        tolerance: Residual at which to stop, relative to the initial residual, in the norm of the preconditioner.
        max_steps: Maximum number of steps.

    Returns:
        The solution, with jitter 0.

    Example:
        >>> conjugate_gradient_solve(lambda v: 2 * v, torch.ones(1, 1), lambda v: v).values
        tensor([[0.5000]])
    """
    values, solved = conjugate_gradients(
        product, target, precondition, dim=0, squared_rtol=tolerance**2, max_steps=max_steps
    )
    if not solved.all():
        residual = float(((product(values) - target).norm(dim=0) / target.norm(dim=0)).nan_to_num().max())
        log.warning("conjugate gradients stopped after %d steps with a relative residual of %.1e.", max_steps, residual)
    return Solution(values, 0.0)


def check_duplicates(kernel: Kernel, x: Tensor, description: str) -> None:
    """Raise InputError if the kernel cannot distinguish two points because one is a positive multiple of the other.

    Args:
        kernel: The kernel.
        x: The points, (points, ...).
        description: Description of the points in the error message, such as "the training tasks".
    """
    # Only points whose directions agree when rounded to six decimals are compared.
    unit_vectors = torch.nn.functional.normalize(x.flatten(1).double(), dim=1)
    groups = torch.unique((unit_vectors * 1e6).round(), dim=0, return_inverse=True)[1]
    rows_of_group: dict[int, list[int]] = {}
    for row, group in enumerate(groups.tolist()):
        for other in rows_of_group.setdefault(group, []):
            if condition_number(kernel.ntk(x[[other, row]])) > MAX_PAIR_CONDITION:
                raise InputError(
                    f"points {other} and {row} of {description} are equal up to a positive factor, so the kernel "
                    "matrix is singular. Remove one of them, or use a ridge."
                )
        rows_of_group[group].append(row)
