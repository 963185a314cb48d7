"""Kernels between tasks: what MTL, ANIL and MAML make of a network's NTK Θ and NNGP kernel K.

Points of tasks come with a leading task axis, (tasks, points, ...); kernels between them are matrices over
all points, task after task. All are per output: k outputs have k independent copies.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from metabridge.errors import InputError
from metabridge.kernels.kernel import Kernel

Heads = Literal["shared", "independent"]
Adapts = Literal["all", "head"]

_SHARED = 128  # points of tasks that share a call of the kernel: more are wasted on pairs of different tasks


def adaptation_operator(gram: Tensor, time: float, ridge: float = 0.0, eps: float | None = None) -> Tensor:
    """T = M⁻¹(I − e^{−sM}), what `time` s = λτ of gradient flow on a support with the Gram matrix M does (A eq. 17).

    In the eigenbasis each mode is −expm1(−sκ)/κ, which tends to s as κ → 0 and to 1/κ as s → ∞: no inverse
    of a near-singular matrix is ever formed. `ridge` is added to M, whose entries are right to `eps`, relative to the
    largest: to the precision of their dtype unless given.

    >>> adaptation_operator(2 * torch.eye(1), time=math.inf)
    tensor([[0.5000]])
    """
    values, vectors = _modes(gram, ridge)
    if math.isinf(time):
        eps = torch.finfo(gram.dtype).eps if eps is None else eps
        lost = values <= values.amax(-1, keepdim=True) * gram.shape[-1] * eps
        if lost.any():
            raise InputError(
                f"a support set of {gram.shape[-1]} points has a Gram matrix that cannot be inverted: "
                f"{_most_alike(gram, lost)} are the same, or the kernel cannot tell them apart. Remove one of them, or "
                "give a ridge or a finite time."
            )
        return (vectors / values[..., None, :]) @ vectors.mT
    safe = torch.where(values > 0, values, 1)
    modes = torch.where(values > 0, -torch.expm1(-time * safe) / safe, time)
    return (vectors * modes[..., None, :]) @ vectors.mT


def residual_decay(gram: Tensor, time: float, ridge: float = 0.0) -> Tensor:
    """I − M T, what is left of a residual after `time` s of gradient flow: e^{−sM} without a ridge.

    >>> residual_decay(torch.eye(1), time=math.log(2))
    tensor([[0.5000]])
    """
    values, vectors = _modes(gram, ridge)
    left = torch.zeros_like(values) if math.isinf(time) else torch.exp(-time * values)
    if ridge:
        left = left + ridge * (1 - left) / values
    return (vectors * left[..., None, :]) @ vectors.mT


def mtl_kernel(kernel: Kernel, x: Tensor, heads: Heads = "shared") -> Tensor:
    """Φ_MTL[i, j] = Θ(X_i, X_j) − 1[i≠j] K(X_i, X_j) (A lemma 1).

    The body's part Θ − K stands between all tasks where their heads start from the same value. Where heads
    start independently it vanishes between tasks as the width grows. A sum of positive semi-definite
    matrices, so positive semi-definite itself.
    """
    ntk, nngp = kernel.both(x.flatten(0, 1))
    return shared_parameter_kernel(ntk, nngp, same_task(len(x), x.shape[1], ntk), "mtl", heads)


def anil_kernel(kernel: Kernel, x: Tensor, time: float, heads: Heads = "shared") -> Tensor:
    """Φ_ANIL[i, j] = e^{−sK_i} Θ(X_i, X_j) e^{−sK_j}, K_i = K(X_i, X_i), without a query-support split (A lemma 1)."""
    tasks, points = x.shape[:2]
    ntk, nngp = kernel.both(x.flatten(0, 1))
    left = residual_decay(diagonal_blocks(nngp, points), time)
    return sandwich(left, shared_parameter_kernel(ntk, nngp, same_task(tasks, points, ntk), "anil", heads), left)


def shared_parameter_kernel(ntk: Tensor, nngp: Tensor, own: Tensor, method: str, heads: Heads) -> Tensor:
    """What the parameters that tasks share put between their points; `own` says where points are of one task."""
    if heads == "independent":
        return torch.where(own, ntk, 0)
    return torch.where(own, ntk, ntk - nngp) if method == "mtl" else ntk


def split_kernel(
    kernel: Kernel,
    query: Tensor,
    support: Tensor,
    others: tuple[Tensor, Tensor] | None = None,
    *,
    adapts: Adapts,
    time: float,
    ridge: float = 0.0,
) -> Tensor:
    """The MetaNTK between the queries of tasks with a query-support split (B def. 2, eq. 106 and 112).

    Φ = R Θ R'ᵀ over queries and supports, R = [I, −M(X, X')T_M(X')]: adaptation takes from each query's gradient
    the part that the support explains. M is Θ for MAML (`adapts="all"`) and K for ANIL ("head"). `others` are
    the queries and supports of other tasks for the columns. Positive semi-definite by construction.
    """
    points = torch.cat([query, support], 1)
    rows = residual_operator(kernel, query, support, adapts, time, ridge)
    if others is None:
        return sandwich(rows, kernel.ntk(points.flatten(0, 1)), rows)
    columns = residual_operator(kernel, *others, adapts, time, ridge)
    middle = kernel.ntk(points.flatten(0, 1), torch.cat(others, 1).flatten(0, 1))
    return sandwich(rows, middle, columns)


def residual_operator(
    kernel: Kernel,
    query: Tensor,
    support: Tensor,
    adapts: Adapts,
    time: float,
    ridge: float = 0.0,
    eps: float | None = None,
) -> Tensor:
    """R = [I, −M(X, X')T_M(X')] of every task, (tasks, queries, queries + supports)."""
    own = task_grams(kernel, torch.cat([query, support], 1), adapts)
    queries = query.shape[1]
    explained = own[:, :queries, queries:] @ adaptation_operator(own[:, queries:, queries:], time, ridge, eps)
    identity = torch.eye(queries, dtype=own.dtype, device=own.device).expand(len(query), -1, -1)
    return torch.cat([identity, -explained], -1)


def task_grams(kernel: Kernel, x: Tensor, adapts: Adapts) -> Tensor:
    """The Gram matrix of every task's own points, (tasks, points, points): of Θ, or of K where the head adapts."""
    choose = kernel.ntk if adapts == "all" else kernel.nngp
    tasks, points = x.shape[:2]
    # Between vectors a call costs more than its pairs, so some tasks share one; between images every pair is dear.
    together = max(1, _SHARED // points) if x.ndim == 3 else 1
    parts = [x[first : first + together] for first in range(0, tasks, together)]
    return torch.cat([diagonal_blocks(choose(part.flatten(0, 1)), points) for part in parts])


def diagonal_blocks(matrix: Tensor, points: int) -> Tensor:
    """The diagonal blocks of a matrix over the points of tasks, (tasks, points, points)."""
    tasks = len(matrix) // points
    return matrix.reshape(tasks, points, tasks, points).diagonal(dim1=0, dim2=2).movedim(-1, 0)


def sandwich(left: Tensor, matrix: Tensor, right: Tensor) -> Tensor:
    """blockdiag(left) · matrix · blockdiag(right)ᵀ, for left (tasks, a, b) and right (tasks', c, d)."""
    product = torch.einsum("iab,ibk->iak", left, matrix.reshape(len(left), left.shape[2], -1)).flatten(0, 1)
    wide = product.reshape(len(product), len(right), right.shape[2])
    return torch.einsum("nkd,kcd->nkc", wide, right).flatten(1)


def same_task(tasks: int, points: int, like: Tensor) -> Tensor:
    """Where row and column belong to the same task."""
    task = torch.arange(tasks, device=like.device).repeat_interleave(points)
    return task[:, None] == task


def _modes(gram: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(gram)
    return values.clamp_min(0) + ridge, vectors


def _most_alike(gram: Tensor, lost: Tensor) -> str:
    """Name the two points with the highest correlation in the first task that has lost modes."""
    task = int(lost.reshape(-1, gram.shape[-1]).any(1).int().argmax())
    own = gram.reshape(-1, *gram.shape[-2:])[task]
    scale = own.diagonal().clamp_min(torch.finfo(own.dtype).tiny).rsqrt()
    correlation = (own * scale * scale[:, None]).fill_diagonal_(-math.inf)
    first, second = divmod(int(correlation.argmax()), len(own))
    return f"its points {first} and {second}" + (f", in task {task}," if gram.ndim > 2 else "")
