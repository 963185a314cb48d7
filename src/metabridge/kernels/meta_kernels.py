"""Kernels between tasks for multi-task learning (MTL), ANIL and MAML, from a network's NTK Θ and NNGP kernel K.

Points have a leading task axis, (tasks, points, ...). Kernels between tasks are matrices over the points of all tasks,
in the order of the tasks. They are per output: for k outputs, the matrix is Φ ⊗ I_k.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from metabridge.errors import InputError
from metabridge.kernels.kernel import Kernel

Heads = Literal["shared", "independent"]
AdaptedPart = Literal["all", "head"]

# Maximum number of points per call of the kernel. With more, most of the time is spent on pairs of different tasks,
# which are not needed.
_POINTS_PER_CALL = 128


def adaptation_operator(gram: Tensor, time: float, ridge: float = 0.0, eps: float | None = None) -> Tensor:
    """Return T = M⁻¹(I − e^{−sM}), the effect of gradient flow on a support set (Wang et al. 2021, eq. 17).

    For initial outputs of zero, T maps the targets of the support set to the coefficients with which the predictions
    after gradient flow sum the kernel over the support points.

    M = G + ridge·I is the Gram matrix G of a support set with a ridge. For each eigenvalue κ of M, T has the eigenvalue
    −expm1(−sκ)/κ, which tends to s as κ → 0 and to 1/κ as s → ∞. If `time` is finite, M is not inverted, so it may be
    singular.

    Args:
        gram: Gram matrices G of the support sets, (..., n, n).
        time: Time s = λτ of gradient flow, the learning rate times the number of steps; may be infinite.
        ridge: Number added to the diagonal of G.
        eps: Only used if `time` is infinite: eigenvalues up to n · eps · (largest eigenvalue) count as zero (default:
            machine epsilon of the dtype).

    Returns:
        T, in the shape of `gram`.

    Raises:
        InputError: If the time is infinite and a matrix is singular.

    Example:
        >>> adaptation_operator(2 * torch.eye(1), time=math.inf)
        tensor([[0.5000]])
    """
    values, vectors = _eigendecomposition(gram, ridge)
    if math.isinf(time):
        singular = _counts_as_zero(values, eps)
        if singular.any():
            raise InputError(_describe_singular(gram, singular))
        return (vectors / values[..., None, :]) @ vectors.mT
    divisor = torch.where(values > 0, values, 1)
    operator_values = torch.where(values > 0, -torch.expm1(-time * divisor) / divisor, time)
    return (vectors * operator_values[..., None, :]) @ vectors.mT


def residual_decay(gram: Tensor, time: float, ridge: float = 0.0) -> Tensor:
    """Return I − GT, the part of a residual left after gradient flow: e^{−sG} without a ridge.

    Here, G is the Gram matrix of a support set, and T the `adaptation_operator`, which contains the ridge. If `time` is
    infinite and G is singular, the part of the residual in the null space of G remains. Eigenvalues up to n · ε ·
    (largest eigenvalue) count as zero, where ε is the machine epsilon of the dtype.

    Args:
        gram: Gram matrices G, (..., n, n).
        time: Time s of gradient flow (learning rate times number of steps); may be infinite.
        ridge: Number added to the diagonal of G in T.

    Returns:
        The decay, in the shape of `gram`.

    Example:
        >>> residual_decay(torch.eye(1), time=math.log(2))
        tensor([[0.5000]])
    """
    values, vectors = _eigendecomposition(gram, ridge)
    decay = _counts_as_zero(values).to(values.dtype) if math.isinf(time) else torch.exp(-time * values)
    if ridge:
        decay = decay + ridge * (1 - decay) / values
    return (vectors * decay[..., None, :]) @ vectors.mT


def mtl_kernel(kernel: Kernel, x: Tensor, heads: Heads = "shared") -> Tensor:
    """Return the kernel of multi-task learning, Φ[i, j] = Θ(X_i, X_j) − 1[i≠j] K(X_i, X_j) (Wang et al. 2021, lemma 1).

    Different tasks share only the body, whose kernel is Θ − K if the heads of all tasks have the same initial weights.
    If their initial weights are independent, the kernel between different tasks vanishes as the width grows. Φ is
    positive semi-definite.

    Args:
        kernel: The kernel of the network.
        x: The points of the tasks, (tasks, points, ...).
        heads: "shared" if the heads of all tasks have the same initial weights, "independent" if their initial weights
            are independent.

    Returns:
        Φ, (tasks · points, tasks · points).

    Example:
        >>> from metabridge.kernels import fully_connected_kernel, mtl_kernel
        >>> mtl_kernel(fully_connected_kernel(depth=2), torch.eye(2)[:, None])
        tensor([[2., 0.],
                [0., 2.]])
    """
    ntk, nngp = kernel.both(x.flatten(0, 1))
    return unadapted_kernel(ntk, nngp, same_task_mask(len(x), x.shape[1], ntk.device), "mtl", heads)


def anil_kernel(kernel: Kernel, x: Tensor, time: float, heads: Heads = "shared") -> Tensor:
    """Return the kernel of ANIL without a query-support split (Wang et al. 2021, lemma 1).

    Φ[i, j] = e^{−sK_i} Θ(X_i, X_j) e^{−sK_j} with K_i = K(X_i, X_i). With independent heads, it vanishes for i ≠ j. If
    `time` is infinite, Φ is the limit, which is zero if all K_i are invertible; see `residual_decay`.

    Args:
        kernel: The kernel of the network.
        x: The points of the tasks, (tasks, points, ...).
        time: Time s = λτ of the inner loop (learning rate times number of steps); may be infinite.
        heads: "shared" if the heads of all tasks have the same initial weights, "independent" if their initial weights
            are independent.

    Returns:
        Φ, (tasks · points, tasks · points).

    Example:
        >>> from metabridge.kernels import anil_kernel, fully_connected_kernel
        >>> anil_kernel(fully_connected_kernel(depth=2), torch.ones(3, 2, 4), time=0.1).shape
        torch.Size([6, 6])
    """
    tasks, points = x.shape[:2]
    ntk, nngp = kernel.both(x.flatten(0, 1))
    decay = residual_decay(diagonal_blocks(nngp, points), time)
    unadapted = unadapted_kernel(ntk, nngp, same_task_mask(tasks, points, ntk.device), "anil", heads)
    return block_diagonal_product(decay, unadapted, decay)


def unadapted_kernel(ntk: Tensor, nngp: Tensor, same_task: Tensor, method: str, heads: Heads) -> Tensor:
    """Return the kernel before adaptation.

    It is Θ for points of the same task, and the kernel of the shared parameters for points of different tasks.

    Args:
        ntk: Θ between the points of some tasks and the points of all tasks.
        nngp: K between the same points.
        same_task: Mask of pairs of points that belong to the same task.
        method: Training method. If "mtl" (with shared initial heads), pairs of different tasks use Θ − K; every other
            method uses Θ.
        heads: "shared" if the heads of all tasks have the same initial weights, "independent" if their initial weights
            are independent.

    Returns:
        The kernel, in the shape of `ntk`.
    """
    if heads == "independent":
        return torch.where(same_task, ntk, 0)
    return torch.where(same_task, ntk, ntk - nngp) if method == "mtl" else ntk


def meta_ntk(
    kernel: Kernel,
    query: Tensor,
    support: Tensor,
    column_tasks: tuple[Tensor, Tensor] | None = None,
    *,
    adapts: AdaptedPart,
    time: float,
    ridge: float = 0.0,
) -> Tensor:
    """Return the MetaNTK between the queries of tasks with a query-support split (Wang et al. 2022, def. 2).

    Φ = R Θ R'ᵀ, with Θ between all points, R = [I, −M(X, X')T_M(X')] for the queries X and support points X' of the
    rows, and R' the same for the columns: adaptation removes from each query's gradient the part that the support set
    explains. M is Θ for MAML (Wang et al. 2022, eq. 106) and K for ANIL (eq. 112), and T_M(X') is the
    `adaptation_operator` of the Gram matrix M(X', X'). If `column_tasks` is None, Φ is positive semi-definite by
    construction.

    Args:
        kernel: The kernel of the network.
        query: Query points, (tasks, queries, ...).
        support: Support points, (tasks, supports, ...).
        column_tasks: Query and support points of the tasks of the columns; `query` and `support` if None.
        adapts: "all" for MAML, "head" for ANIL.
        time: Time s = λτ of the inner loop (learning rate times number of steps); may be infinite.
        ridge: Number added to the diagonals of the Gram matrices of the support sets.

    Returns:
        Φ, (tasks · queries, tasks' · queries').

    Raises:
        InputError: If the time is infinite and a support set has a singular Gram matrix.

    Example:
        >>> from metabridge.kernels import fully_connected_kernel, meta_ntk
        >>> points = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
        >>> kernel = fully_connected_kernel(depth=2)
        >>> meta_ntk(kernel, points[:, :3], points[:, 3:], adapts="all", time=0.1).shape
        torch.Size([9, 9])
    """
    points = torch.cat([query, support], 1)
    rows = query_residual_operator(kernel, query, support, adapts, time, ridge)
    if column_tasks is None:
        return block_diagonal_product(rows, kernel.ntk(points.flatten(0, 1)), rows)
    columns = query_residual_operator(kernel, *column_tasks, adapts, time, ridge)
    ntk = kernel.ntk(points.flatten(0, 1), torch.cat(column_tasks, 1).flatten(0, 1))
    return block_diagonal_product(rows, ntk, columns)


def query_residual_operator(
    kernel: Kernel,
    query: Tensor,
    support: Tensor,
    adapts: AdaptedPart,
    time: float,
    ridge: float = 0.0,
    eps: float | None = None,
) -> Tensor:
    """Return R = [I, −M(X, X')T_M(X')] of every task, where T_M(X') is the `adaptation_operator` for M(X', X').

    Args:
        kernel: The kernel of the network.
        query: Query points X, (tasks, queries, ...).
        support: Support points X', (tasks, supports, ...).
        adapts: "all" for M = Θ, "head" for M = K.
        time: Time s of the inner loop (learning rate times number of steps); may be infinite.
        ridge: Number added to the diagonals of the Gram matrices of the support sets.
        eps: Relative size of eigenvalues that count as zero, see `adaptation_operator`.

    Returns:
        R, (tasks, queries, queries + supports).

    Raises:
        InputError: If the time is infinite and a support set has a singular Gram matrix.
    """
    grams = task_grams(kernel, torch.cat([query, support], 1), adapts)
    queries = query.shape[1]
    explained = grams[:, :queries, queries:] @ adaptation_operator(grams[:, queries:, queries:], time, ridge, eps)
    identity = torch.eye(queries, dtype=grams.dtype, device=grams.device).expand(len(query), -1, -1)
    return torch.cat([identity, -explained], -1)


def task_grams(kernel: Kernel, x: Tensor, adapts: AdaptedPart) -> Tensor:
    """Return the Gram matrix of the points of every task.

    Args:
        kernel: The kernel of the network.
        x: The points of the tasks, (tasks, points, ...).
        adapts: "all" for Θ, "head" for K.

    Returns:
        The Gram matrices, (tasks, points, points).
    """
    gram = kernel.ntk if adapts == "all" else kernel.nngp
    points = x.shape[1]
    # For vectors, the overhead of a call dominates, so one call computes several tasks. For images, pairs of different
    # tasks are expensive, so each call computes one task.
    tasks_per_call = max(1, _POINTS_PER_CALL // points) if x.ndim == 3 else 1
    return torch.cat([diagonal_blocks(gram(chunk.flatten(0, 1)), points) for chunk in x.split(tasks_per_call)])


def diagonal_blocks(matrix: Tensor, points: int) -> Tensor:
    """Return the diagonal blocks, one for each task, of a matrix over the points of all tasks.

    Args:
        matrix: The matrix, (tasks · points, tasks · points).
        points: Number of points of each task.

    Returns:
        The blocks, (tasks, points, points).
    """
    tasks = len(matrix) // points
    return matrix.reshape(tasks, points, tasks, points).diagonal(dim1=0, dim2=2).movedim(-1, 0)


def block_diagonal_product(left: Tensor, matrix: Tensor, right: Tensor) -> Tensor:
    """Return blockdiag(left) · matrix · blockdiag(right)ᵀ.

    Args:
        left: Blocks, (tasks, a, b).
        matrix: A matrix, (tasks · b, tasks' · d).
        right: Blocks, (tasks', c, d).

    Returns:
        The product, (tasks · a, tasks' · c).
    """
    product = torch.einsum("iab,ibk->iak", left, matrix.reshape(len(left), left.shape[2], -1)).flatten(0, 1)
    by_task = product.reshape(len(product), len(right), right.shape[2])
    return torch.einsum("nkd,kcd->nkc", by_task, right).flatten(1)


def same_task_mask(tasks: int, points: int, device: torch.device) -> Tensor:
    """Return the mask of pairs of points that belong to the same task.

    Args:
        tasks: Number of tasks.
        points: Number of points of each task.
        device: Device of the mask.

    Returns:
        The mask, (tasks · points, tasks · points).
    """
    task = torch.arange(tasks, device=device).repeat_interleave(points)
    return task[:, None] == task


def _eigendecomposition(gram: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(gram)
    return values.clamp_min(0) + ridge, vectors


def _counts_as_zero(values: Tensor, eps: float | None = None) -> Tensor:
    """Return the mask of eigenvalues (..., n) that are zero up to rounding errors."""
    eps = torch.finfo(values.dtype).eps if eps is None else eps
    return values <= values.amax(-1, keepdim=True) * values.shape[-1] * eps


def _describe_singular(gram: Tensor, singular: Tensor) -> str:
    """Return an error message for the first singular Gram matrix; `singular` marks eigenvalues that count as zero."""
    points = gram.shape[-1]
    task = int(singular.reshape(-1, points).any(1).int().argmax())
    subject = f"the Gram matrix of the support set{f' of task {task}' if gram.ndim > 2 else ''}"
    if points == 1:
        return f"{subject} is singular: its only point has the kernel value 0. Use a ridge or a finite time."
    task_gram = gram.reshape(-1, points, points)[task]
    scale = task_gram.diagonal().clamp_min(torch.finfo(task_gram.dtype).tiny).rsqrt()
    correlation = (task_gram * scale * scale[:, None]).fill_diagonal_(-math.inf)
    first, second = divmod(int(correlation.argmax()), points)
    return (
        f"{subject} is singular. The most similar of its {points} points are {first} and {second}. Remove duplicates, "
        "or use a ridge or a finite time."
    )
