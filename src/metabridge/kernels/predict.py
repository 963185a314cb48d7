"""Predicting what a wide network trained by MTL, ANIL or MAML would predict, without training it.

A `KernelLearner` takes training episodes once and then adapts to test episodes as a trained model does, so
that `evaluate` judges both alike. Everything is computed in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from metabridge.episodes import Episodes
from metabridge.errors import InputError
from metabridge.kernels import meta
from metabridge.kernels.kernel import Kernel
from metabridge.kernels.solve import Solution, cholesky_solve, condition_number, conjugate_gradient, refuse_duplicates

Twin = Literal["mtl", "anil", "maml", "anil-split"]


@dataclass(frozen=True)
class KernelLearner:
    """The closed-form twin of a method, at infinite width.

    - "mtl" and "anil" train without a query-support split (A lemma 1): F = G_ŝ(X, X', Y') + Φ'Φ⁻¹(Y − G_s).
    - "maml" and "anil-split" train with one (B thm 2): F = G_M(X, X', Y') + Φ T_Φ(Y − G_M).

    `inner_time` is s = λτ of the inner loop in training, `test_time` is ŝ at test (the same where it is None),
    `outer_time` is ηt, infinite for training to the end. `ridge` is added to the matrix over training points
    and `inner_ridge` to those over supports. `heads` says whether all heads start from the same value (A's
    formulas) or independently. With class labels, targets are one-hot. Where the matrix over training points
    would take more than `memory` bytes it is never formed.

    >>> from metabridge.environments import Quadratic
    >>> from metabridge.kernels import fully_connected
    >>> generator = torch.Generator().manual_seed(0)
    >>> train, test = (Quadratic().sample(tasks, generator) for tasks in (20, 3))
    >>> KernelLearner(fully_connected(depth=3), "mtl").fit(train).predict(test).shape
    torch.Size([3, 10, 1])
    """

    kernel: Kernel
    method: Twin
    inner_time: float = math.inf
    test_time: float | None = None
    outer_time: float = math.inf
    ridge: float = 0.0
    inner_ridge: float = 0.0
    heads: meta.Heads = "shared"
    memory: int = 2**32

    def __post_init__(self) -> None:
        if self.method not in ("mtl", "anil", "maml", "anil-split"):
            raise InputError(f"method is {self.method!r}, but must be 'mtl', 'anil', 'maml' or 'anil-split'.")
        for name in ("inner_time", "test_time", "outer_time", "ridge", "inner_ridge"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise InputError(f"{name} is {value}, but must not be negative.")
        if self.method == "anil" and math.isinf(self.inner_time):
            raise InputError(
                "inner_time is infinite, but without a split ANIL's head then fits its own task exactly and nothing is "
                "left to learn from. Give a finite inner_time, or use 'anil-split'."
            )
        if self.heads not in ("shared", "independent"):
            raise InputError(f"heads is {self.heads!r}, but must be 'shared' or 'independent'.")
        if self.heads == "independent" and self.method not in ("mtl", "anil"):
            raise InputError(f"heads is 'independent', but {self.method} trains one head. Use heads='shared'.")

    @property
    def splits(self) -> bool:
        """Whether training judges a task on other points than it adapts to."""
        return self.method in ("maml", "anil-split")

    def fit(self, episodes: Episodes) -> FittedKernel:
        """Solve for what training on these tasks would learn."""
        episodes = episodes.to(dtype=torch.float64)
        return FittedKernel(self, episodes if self.splits else episodes.without_split())


class FittedKernel:
    """A twin that has seen its training tasks.

    Both lemmas have one form. With R_i taking from the gradients of task i's points what its inner loop explains,
    Φ[i, j] = R_i C(Z_i, Z_j) R_jᵀ over the points Z, and F = G + R C'(Z, Z_train) Rᵀ Φ⁻¹(Y − G_train). With a split,
    R = [I, −M(X, X')T(X')] over queries and supports, and C = C' = Θ. Without, R = e^{−sK} in training, and C' = Θ − K
    since the test head is a new one; for MTL R = I and C = Θ − K between different tasks.
    """

    def __init__(self, learner: KernelLearner, episodes: Episodes) -> None:
        self.learner, self.kernel, self.shape = learner, learner.kernel, episodes.query_x.shape[2:]
        if learner.splits:
            self.points = torch.cat([episodes.query_x, episodes.support_x], 1)
            self.left, explained = self._adapted(episodes, learner.inner_time)
            target = _targets(episodes, episodes.query_y) - explained
        else:
            self.points = episodes.support_x
            time = learner.inner_time if learner.method == "anil" else 0.0
            self.left = meta.decay(meta.own_grams(self.kernel, self.points, "head"), time)
            target = self.left @ _targets(episodes, episodes.support_y)  # Y − G_s(X, X, Y) = e^{−sK}Y
        self.solution = self._solve(target.flatten(0, 1))
        weights = self.left.mT @ self.solution.values.unflatten(0, target.shape[:2])
        self.weights = weights.flatten(0, 1)  # RᵀΦ⁻¹(Y − G), one for every training point

    @property
    def device(self) -> torch.device:
        """Where the training tasks are."""
        return self.points.device

    @property
    def jitter(self) -> float:
        """What was added to the diagonal of Φ beyond any ridge asked for."""
        return self.solution.jitter

    @cached_property
    def matrix(self) -> Tensor:
        """Φ between all training points or queries."""
        return meta.sandwich(self.left, self._middle(slice(0, len(self.points))), self.left)

    def condition_number(self) -> float:
        """σ_max/σ_min of Φ with its ridge."""
        return condition_number(self.matrix, self.learner.ridge)

    def predict(self, episodes: Episodes) -> Tensor:
        """Adapt to the supports and return the outputs for the queries, (tasks, queries, outputs)."""
        if episodes.query_x.shape[2:] != self.shape:
            raise InputError(
                f"the points are of shape {tuple(episodes.query_x.shape[2:])}, but those of the training tasks of "
                f"shape {tuple(self.shape)}."
            )
        given = episodes.query_x.dtype
        episodes = episodes.to(dtype=torch.float64)
        share = self._share(episodes.query_x.shape[1] + episodes.support_x.shape[1])
        parts = [self._predict(episodes[first : first + share]) for first in range(0, len(episodes), share)]
        return torch.cat(parts).to(given)

    def _predict(self, episodes: Episodes) -> Tensor:
        learner = self.learner
        left, explained = self._adapted(
            episodes, learner.inner_time if learner.test_time is None else learner.test_time
        )
        if learner.heads == "independent":
            return explained  # the body learnt nothing that a head which starts elsewhere could use
        points = torch.cat([episodes.query_x, episodes.support_x], 1)
        ntk, nngp = self.kernel.both(points.flatten(0, 1), self.points.flatten(0, 1))
        body = (ntk if learner.splits else ntk - nngp) @ self.weights
        return explained + left @ body.unflatten(0, points.shape[:2])  # type: ignore[no-any-return]

    def _adapted(self, episodes: Episodes, time: float) -> tuple[Tensor, Tensor]:
        """R of every task with a split, and G(X, X', Y'), what the inner loop alone predicts."""
        adapts: meta.Adapts = "all" if self.learner.method == "maml" else "head"
        x, support = episodes.query_x, episodes.support_x
        left = meta.residual(self.kernel, x, support, adapts, time, self.learner.inner_ridge)
        return left, -left[..., x.shape[1] :] @ _targets(episodes, episodes.support_y)

    def _middle(self, tasks: slice) -> Tensor:
        """C between the points of some training tasks and of all."""
        count, points = self.points.shape[:2]
        everything = self.points.flatten(0, 1)
        whole = tasks == slice(0, count)
        ntk, nngp = self.kernel.both(*((everything,) if whole else (self.points[tasks].flatten(0, 1), everything)))
        same = meta.own_task(count, points, ntk)[tasks.start * points : tasks.stop * points]
        if self.learner.heads == "independent":
            return torch.where(same, ntk, 0)
        return torch.where(same, ntk, ntk - nngp) if self.learner.method == "mtl" else ntk

    def _solve(self, target: Tensor) -> Solution:
        """T_Φ target: Φ⁻¹ at the end of training, or what `outer_time` of it does."""
        learner = self.learner
        if learner.outer_time < math.inf:
            return Solution(meta.adaptation(self.matrix, learner.outer_time, learner.ridge) @ target, 0.0)
        if learner.ridge == 0:
            refuse_duplicates(self.points.flatten(0, 1), "the training tasks")
        if 3 * 8 * len(target) * self.points.shape[0] * self.points.shape[1] <= learner.memory:
            return cholesky_solve(self.matrix, target, learner.ridge)
        own = self.left @ meta.own_grams(self.kernel, self.points, "all") @ self.left.mT
        own.diagonal(dim1=-2, dim2=-1).add_(learner.ridge)
        factor = torch.linalg.cholesky(own)  # of each task's own block, which is most of Φ

        def precondition(v: Tensor) -> Tensor:
            return torch.cholesky_solve(v.unflatten(0, own.shape[:2]), factor).flatten(0, 1)

        return conjugate_gradient(self._product, target, precondition)

    def _product(self, v: Tensor) -> Tensor:
        """(Φ + ridge)v, the rows of some tasks at a time."""
        tasks, share = len(self.points), self._share(self.points.shape[1])
        pulled = (self.left.mT @ v.unflatten(0, self.left.shape[:2])).flatten(0, 1)
        images = []
        for start in range(0, tasks, share):
            some = slice(start, min(start + share, tasks))
            images.append(self.left[some] @ (self._middle(some) @ pulled).unflatten(0, (-1, self.points.shape[1])))
        return torch.cat(images).flatten(0, 1) + self.learner.ridge * v

    def _share(self, points: int) -> int:
        """How many tasks of so many points to take at a time, for their kernel with the training points to fit."""
        return max(1, int(self.learner.memory // (8 * 4 * points * self.points.shape[0] * self.points.shape[1])))


def predict_mtl(kernel: Kernel, train: Episodes, test: Episodes, *, test_time: float = math.inf) -> Tensor:
    """F_MTL for the queries of the test tasks (A lemma 1)."""
    return KernelLearner(kernel, "mtl", test_time=test_time).fit(train).predict(test)


def predict_anil(
    kernel: Kernel, train: Episodes, test: Episodes, *, inner_time: float, test_time: float | None = None
) -> Tensor:
    """F_ANIL for the queries of the test tasks (A lemma 1)."""
    return KernelLearner(kernel, "anil", inner_time=inner_time, test_time=test_time).fit(train).predict(test)


def predict_maml(
    kernel: Kernel, train: Episodes, test: Episodes, *, inner_time: float = math.inf, test_time: float | None = None
) -> Tensor:
    """F_MAML for the queries of the test tasks (B thm 2)."""
    return KernelLearner(kernel, "maml", inner_time=inner_time, test_time=test_time).fit(train).predict(test)


def _targets(episodes: Episodes, y: Tensor) -> Tensor:
    """Values as they are; labels one-hot."""
    if not episodes.classification:
        return y
    outputs = int(episodes.support_y.max()) + 1 if episodes.classes is None else episodes.classes.shape[1]
    return one_hot(y, outputs).double()
