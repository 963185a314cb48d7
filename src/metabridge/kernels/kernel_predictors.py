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
from metabridge.kernels import meta_kernels
from metabridge.kernels.analytic_kernel import AnalyticKernel
from metabridge.kernels.kernel import Kernel
from metabridge.kernels.kernel_systems import (
    Solution,
    cholesky_solve,
    condition_number,
    conjugate_gradient_solve,
    refuse_duplicates,
)

KernelMethod = Literal["mtl", "anil", "maml", "anil-split"]

_PART = 2**26  # bytes at a time on a CPU, where larger tensors cost more to get from the system than to fill


@dataclass(frozen=True)
class KernelLearner:
    """The closed-form twin of a method, at infinite width.

    - "mtl" and "anil" train without a query-support split (A lemma 1): F = G_ŝ(X, X', Y') + Φ'Φ⁻¹(Y − G_s).
    - "maml" and "anil-split" train with one (B thm 2): F = G_M(X, X', Y') + Φ T_Φ(Y − G_M).

    `inner_time` is s = λτ of the inner loop in training, `test_time` is ŝ at test (the same where it is None),
    `outer_time` is ηt, infinite for training to the end. `ridge` is added to the matrix over training points
    and `inner_ridge` to those over supports. `heads` says whether all heads start from the same value (A's
    formulas) or independently. With class labels, targets are one-hot. Where the matrix over training points
    would take more than `memory` bytes it is never formed, if `outer_time` is infinite.

    >>> from metabridge.environments import Quadratic
    >>> from metabridge.kernels import fully_connected_kernel
    >>> generator = torch.Generator().manual_seed(0)
    >>> train, test = (Quadratic().sample(tasks, generator) for tasks in (20, 3))
    >>> KernelLearner(fully_connected_kernel(depth=3), "mtl").fit(train).predict(test).shape
    torch.Size([3, 10, 1])
    """

    kernel: Kernel
    method: KernelMethod
    inner_time: float = math.inf
    test_time: float | None = None
    outer_time: float = math.inf
    ridge: float = 0.0
    inner_ridge: float = 0.0
    heads: meta_kernels.Heads = "shared"
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

    def fit(self, episodes: Episodes) -> FittedKernelLearner:
        """Solve for what training on these tasks would learn."""
        episodes = self.prepared(episodes, "training task")
        return FittedKernelLearner(self, episodes if self.splits else episodes.without_split())

    def prepared(self, episodes: Episodes, of: str) -> Episodes:
        """Return the tasks in float64, images flattened for a kernel of vectors; refuse points without a kernel."""
        episodes = episodes.to(dtype=torch.float64)
        if isinstance(self.kernel, AnalyticKernel) and not self.kernel.space:
            episodes = episodes.map_inputs(lambda x: x.flatten(2))
        for name, x in (("support", episodes.support_x), ("query", episodes.query_x)):
            values = x.flatten(2)
            _refuse(~values.isfinite().all(2), f"{name} points of {of}s hold NaN or infinity", "mend them", of)
            zero = ~values.any(2)
            if zero.any() and not self._takes(x[zero][:1]):
                way_out = "give the network a bias_variance"
                _refuse(zero, f"{name} points of {of}s are zero, where the kernel vanishes", way_out, of)
        return episodes

    def _takes(self, point: Tensor) -> bool:
        try:
            self.kernel.nngp(point)
        except InputError:
            return False
        return True


class FittedKernelLearner:
    """A twin that has seen its training tasks.

    Both lemmas have one form. With R_i taking from the gradients of task i's points what its inner loop explains,
    Φ[i, j] = R_i C(Z_i, Z_j) R_jᵀ over the points Z, and F = G + R C'(Z, Z_train) Rᵀ Φ⁻¹(Y − G_train). With a split,
    R = [I, −M(X, X')T(X')] over queries and supports, and C = C' = Θ. Without, R = I − KT(X) in training,
    e^{−sK} where there is no inner ridge, and C' = Θ − K since the test head is a new one; for MTL R = I and C = Θ − K
    between different tasks.
    """

    def __init__(self, learner: KernelLearner, episodes: Episodes) -> None:
        self.learner, self.kernel, self.shape = learner, learner.kernel, episodes.query_x.shape[2:]
        self.form = _form(episodes)
        if learner.splits:
            self.points = torch.cat([episodes.query_x, episodes.support_x], 1)
            self.left, explained = self._adapted(episodes, learner.inner_time)
            target = _targets(episodes, episodes.query_y) - explained
        else:
            self.points = episodes.support_x
            time = learner.inner_time if learner.method == "anil" else 0.0
            self.left = meta_kernels.residual_decay(
                meta_kernels.task_grams(self.kernel, self.points, "head"), time, learner.inner_ridge
            )
            target = self.left @ _targets(episodes, episodes.support_y)  # Y − G_s(X, X, Y)
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
        return meta_kernels.sandwich(self.left, self._middle(slice(0, len(self.points))), self.left)

    def condition_number(self) -> float:
        """σ_max/σ_min of Φ with its ridge."""
        return condition_number(self.matrix, self.learner.ridge)

    def predict(self, episodes: Episodes) -> Tensor:
        """Adapt to the supports and return the outputs for the queries, (tasks, queries, outputs).

        All tasks are adapted to at once. Their kernel with the training points, which is most of the work, is computed
        for some tasks at a time, as many as `memory` holds at most.
        """
        learner, given = self.learner, episodes.query_x.dtype
        episodes = learner.prepared(episodes, "test task")
        self._check(episodes)
        time = learner.inner_time if learner.test_time is None else learner.test_time
        left, explained = self._adapted(episodes, time)
        if learner.heads == "independent":
            return explained.to(given)  # the body learnt nothing that a head which starts elsewhere could use
        points = torch.cat([episodes.query_x, episodes.support_x], 1)
        share = self._share(points.shape[1])
        body = torch.cat([self._body(points[first : first + share]) for first in range(0, len(points), share)])
        return (explained + left @ body).to(given)

    def _body(self, points: Tensor) -> Tensor:
        """What the training tasks' weights say of the points before they are adapted to."""
        ntk, nngp = self.kernel.both(points.flatten(0, 1), self.points.flatten(0, 1))
        body = (ntk if self.learner.splits else ntk - nngp) @ self.weights
        return body.unflatten(0, points.shape[:2])  # type: ignore[no-any-return]

    def _check(self, episodes: Episodes) -> None:
        """Refuse tasks of another form than those of training."""
        if episodes.query_x.shape[2:] != self.shape:
            raise InputError(
                f"the points are of shape {tuple(episodes.query_x.shape[2:])}, but those of the training tasks of "
                f"shape {tuple(self.shape)}. Give both the same features, or the same size of images."
            )
        if _form(episodes) != self.form:
            raise InputError(
                f"the test tasks have {_form(episodes)}, but the training tasks have {self.form}. Give both the same."
            )
        if episodes.device != self.device:
            raise InputError(
                f"the test tasks are on {episodes.device}, but the training tasks on {self.device}. "
                f"Use episodes.to('{self.device}')."
            )

    def _adapted(self, episodes: Episodes, time: float) -> tuple[Tensor, Tensor]:
        """R of every task with a split, and G(X, X', Y'), what the inner loop alone predicts."""
        adapts: meta_kernels.Adapts = "all" if self.learner.method == "maml" else "head"
        x, support = episodes.query_x, episodes.support_x
        left = meta_kernels.residual_operator(self.kernel, x, support, adapts, time, self.learner.inner_ridge)
        return left, -left[..., x.shape[1] :] @ _targets(episodes, episodes.support_y)

    def _middle(self, tasks: slice) -> Tensor:
        """C between the points of some training tasks and of all."""
        count, points = self.points.shape[:2]
        everything = self.points.flatten(0, 1)
        whole = tasks == slice(0, count)
        ntk, nngp = self.kernel.both(*((everything,) if whole else (self.points[tasks].flatten(0, 1), everything)))
        own = meta_kernels.same_task(count, points, ntk)[tasks.start * points : tasks.stop * points]
        return meta_kernels.shared_parameter_kernel(ntk, nngp, own, self.learner.method, self.learner.heads)

    def _solve(self, target: Tensor) -> Solution:
        """T_Φ target: Φ⁻¹ at the end of training, or what `outer_time` of it does."""
        learner = self.learner
        if learner.outer_time < math.inf:
            return Solution(
                meta_kernels.adaptation_operator(self.matrix, learner.outer_time, learner.ridge) @ target, 0.0
            )
        if learner.ridge == 0:
            self._refuse_duplicates()
        if 3 * 8 * (self.points.shape[0] * self.points.shape[1]) ** 2 <= learner.memory:
            return cholesky_solve(self.matrix, target, learner.ridge)
        own = self.left @ meta_kernels.task_grams(self.kernel, self.points, "all") @ self.left.mT
        own.diagonal(dim1=-2, dim2=-1).add_(learner.ridge)
        factor, failed = torch.linalg.cholesky_ex(own)  # of each task's own block, which is most of Φ
        if failed.any():
            raise InputError(
                f"training task {int(failed.bool().int().argmax())} has a singular kernel matrix: the kernel cannot "
                "tell its points apart. Remove those that are alike, or give a ridge."
            )

        def precondition(v: Tensor) -> Tensor:
            return torch.cholesky_solve(v.unflatten(0, own.shape[:2]), factor).flatten(0, 1)

        return conjugate_gradient_solve(self._product, target, precondition)

    def _refuse_duplicates(self) -> None:
        try:
            refuse_duplicates(self.kernel, self.points.flatten(0, 1), "the training tasks")
        except InputError as error:
            order = "queries before supports" if self.learner.splits else "supports before queries"
            raise InputError(
                f"{error} Points are counted task after task, {self.points.shape[1]} each, {order}."
            ) from error

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
        memory = self.learner.memory if self.points.is_cuda else min(self.learner.memory, _PART)
        return max(1, int(memory // (8 * 4 * points * self.points.shape[0] * self.points.shape[1])))


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
    return one_hot(y, _outputs(episodes)).double() if episodes.is_classification else y


def _outputs(episodes: Episodes) -> int:
    if not episodes.is_classification:
        return episodes.support_y.shape[2]
    if episodes.classes is not None:
        return episodes.classes.shape[1]
    return 1 + int(max(episodes.support_y.max(), episodes.query_y.max()))


def _form(episodes: Episodes) -> str:
    """Say what kind of targets there are."""
    return f"{_outputs(episodes)} {'classes' if episodes.is_classification else 'outputs'}"


def _refuse(bad: Tensor, what: str, way_out: str, of: str) -> None:
    """Raise if any point is bad, (tasks, points), and name the first ones."""
    places = bad.nonzero().tolist()
    if places:
        named = ", ".join(f"{point} of {of} {task}" for task, point in places[:3]) + (", …" if len(places) > 3 else "")
        raise InputError(f"{what}: {named}. Leave them out, or {way_out}.")
