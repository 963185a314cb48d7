"""Predictions of infinitely wide networks trained by multi-task learning (MTL), ANIL or MAML, without training them.

`KernelLearner.fit` takes training episodes. The fitted learner adapts to test episodes as a trained model does, so
`evaluate` accepts both. Everything is computed in float64.
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
    check_duplicates,
    cholesky_solve,
    condition_number,
    conjugate_gradient_solve,
)

KernelMethod = Literal["mtl", "anil", "maml", "anil-split"]

# Maximum number of bytes of a kernel matrix that are computed at a time on a CPU. Larger tensors take longer to
# allocate than to fill.
_CPU_CHUNK_BYTES = 2**26


@dataclass(frozen=True)
class KernelLearner:
    """A learner that makes the predictions of an infinitely wide network trained by a method.

    "mtl" and "anil" train without a query-support split and predict F = G_ŝ(X, X', Y') + Φ'Φ⁻¹(Y − G_s) (Wang et al.
    2021, lemma 1). "maml" and "anil-split" train with a split and predict F = G_M(X, X', Y') + Φ'T_Φ(Y − G_M) (Wang et
    al. 2022, theorem 2). X are the queries of a test task, X' its support points and Y' their targets; Y are the
    targets of the training tasks. G is the prediction of the inner loop alone. Its index is the time of adaptation (s
    in training, ŝ at test time) or the kernel M of the inner loop (Θ for "maml", K for "anil-split"). Φ is the kernel
    between training tasks, and Φ' the kernel between test and training tasks; see `FittedKernelLearner`. T_Φ is Φ⁻¹
    after training until convergence, and for a finite `outer_time` it also replaces Φ⁻¹ in the first formula; see
    `meta_kernels.adaptation_operator`. Class labels are one-hot encoded.

    Args:
        kernel: The kernel of the network.
        method: "mtl", "anil", "maml" or "anil-split".
        inner_time: Time s = λτ of the inner loop in training (learning rate times number of steps); may be infinite,
            except for "anil". "mtl" trains without an inner loop and uses it only as the default of `test_time`.
        test_time: Time ŝ of adaptation at test time; equal to `inner_time` if None.
        outer_time: Time ηt of the outer loop; infinite for training until convergence.
        ridge: Number added to the diagonal of the kernel matrix of the training tasks.
        inner_ridge: Number added to the diagonals of the Gram matrices of the support sets.
        heads: Whether the heads of all tasks start from the same value ("shared", as the published formulas assume) or
            independently ("independent").
        memory: Maximum number of bytes for three copies of the kernel matrix of the training tasks. If they need more
            and `outer_time` is infinite, the system is solved by conjugate gradients without storing the matrix.

    Raises:
        InputError: If a setting is invalid.

    Example:
        >>> import torch
        >>> from metabridge.environments import Quadratic
        >>> from metabridge.kernels import KernelLearner, fully_connected_kernel
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
                "inner_time is infinite, but without a query-support split, ANIL's head then fits its task exactly and "
                "the body learns nothing. Use a finite inner_time, or method='anil-split'."
            )
        if self.heads not in ("shared", "independent"):
            raise InputError(f"heads is {self.heads!r}, but must be 'shared' or 'independent'.")
        if self.heads == "independent" and self.method not in ("mtl", "anil"):
            raise InputError(f"heads is 'independent', but {self.method} trains one head. Use heads='shared'.")

    @property
    def uses_split(self) -> bool:
        """Whether training adapts to the support set and computes the loss on the queries."""
        return self.method in ("maml", "anil-split")

    def fit(self, episodes: Episodes) -> FittedKernelLearner:
        """Compute the result of training on these tasks.

        Args:
            episodes: The training tasks.

        Returns:
            The fitted learner, which predicts for test tasks.

        Raises:
            InputError: If the kernel is undefined for some points, or the kernel matrix is singular.
        """
        episodes = self.prepare(episodes, "training task")
        return FittedKernelLearner(self, episodes if self.uses_split else episodes.without_split())

    def prepare(self, episodes: Episodes, task_kind: str) -> Episodes:
        """Convert tasks to float64, flatten images if the kernel takes vectors, and check the points.

        Args:
            episodes: The tasks.
            task_kind: What to call one of these tasks in error messages, such as "test task".

        Returns:
            The converted tasks.

        Raises:
            InputError: If points are NaN, infinite or, for a kernel without bias, zero.
        """
        episodes = episodes.to(dtype=torch.float64)
        if isinstance(self.kernel, AnalyticKernel) and not self.kernel.pixel_dims:
            episodes = episodes.map_inputs(lambda x: x.flatten(2))
        for name, x in (("support", episodes.support_x), ("query", episodes.query_x)):
            values = x.flatten(2)
            _check_points(
                ~values.isfinite().all(2), f"{name} points of {task_kind}s are NaN or infinite", "", task_kind
            )
            zero = ~values.any(2)
            if zero.any() and not self._is_defined_at(x[zero][:1]):
                alternative = " or give the network a bias_variance"
                problem = f"{name} points of {task_kind}s are zero, where the kernel vanishes"
                _check_points(zero, problem, alternative, task_kind)
        return episodes

    def _is_defined_at(self, point: Tensor) -> bool:
        try:
            self.kernel.nngp(point)
        except InputError:
            return False
        return True


class FittedKernelLearner:
    """A `KernelLearner` that is fitted to training tasks. Created by `KernelLearner.fit`.

    Both published formulas can be written as F = G + R C'(Z, Z_train) R_trainᵀ Φ⁻¹(Y − G_train), with
    Φ[i, j] = R_i C(Z_i, Z_j) R_jᵀ. Z_i are the points of task i, and R_i removes from the gradients at these points the
    part that the inner loop explains. G is the prediction of the inner loop alone. C is the kernel between training
    tasks before adaptation, and C' the one between test and training tasks. For a finite `outer_time`, Φ⁻¹ is
    replaced with T_Φ, the `adaptation_operator` of Φ for this time.

    - With a split, R = [I, −M(X, X')T(X')] for the queries X and the support points X', and C = C' = Θ. M is Θ for MAML
      and K for ANIL. T(X') is the `adaptation_operator` of M(X', X').
    - Without a split, R is the same for test tasks, with M = K. In training, R = I − KT(X) for ANIL, which is e^{−sK}
      without an inner ridge, and R = I for MTL. C is Θ for ANIL; for MTL, it is Θ within a task and Θ − K between
      tasks. C' is Θ − K, since a test task has a new head. If heads start independently, C and C' vanish between
      different tasks.

    Args:
        learner: The learner and its settings.
        episodes: The training tasks, prepared by `KernelLearner.prepare`.

    Example:
        >>> import torch
        >>> from metabridge.environments import Quadratic
        >>> from metabridge.kernels import KernelLearner, fully_connected_kernel
        >>> train = Quadratic().sample(20, torch.Generator().manual_seed(0))
        >>> fitted = KernelLearner(fully_connected_kernel(depth=3), "maml", inner_time=0.5).fit(train)
        >>> fitted, fitted.jitter
        (FittedKernelLearner('maml', tasks=20, points_per_task=15), 0.0)
    """

    def __init__(self, learner: KernelLearner, episodes: Episodes) -> None:
        self.learner, self.kernel, self.point_shape = learner, learner.kernel, episodes.query_x.shape[2:]
        self.target_description = _describe_targets(episodes)
        if learner.uses_split:
            self.points = torch.cat([episodes.query_x, episodes.support_x], 1)
            self.residual_operators, inner_prediction = self._adapt(episodes, learner.inner_time)
            target = _targets(episodes, episodes.query_y) - inner_prediction
        else:
            self.points = episodes.support_x
            time = learner.inner_time if learner.method == "anil" else 0.0
            self.residual_operators = meta_kernels.residual_decay(
                meta_kernels.task_grams(self.kernel, self.points, "head"), time, learner.inner_ridge
            )
            target = self.residual_operators @ _targets(episodes, episodes.support_y)  # Y − G_s(X, X, Y)
        self.solution = self._solve(target.flatten(0, 1))
        weights = self.residual_operators.mT @ self.solution.values.unflatten(0, target.shape[:2])
        self.weights = weights.flatten(0, 1)  # RᵀΦ⁻¹(Y − G), one row per training point

    def __repr__(self) -> str:
        """Return the method and the size of the training set."""
        tasks, points = self.points.shape[:2]
        return f"FittedKernelLearner({self.learner.method!r}, tasks={tasks}, points_per_task={points})"

    @property
    def device(self) -> torch.device:
        """The device of the training tasks."""
        return self.points.device

    @property
    def jitter(self) -> float:
        """Number added to the diagonal of Φ in addition to the ridge."""
        return self.solution.jitter

    @cached_property
    def matrix(self) -> Tensor:
        """Φ between all training points without a split, or between all training queries with a split."""
        operators = self.residual_operators
        return meta_kernels.block_diagonal_product(operators, self._kernel_rows(slice(0, len(self.points))), operators)

    def condition_number(self) -> float:
        """Return σ_max/σ_min of Φ with its ridge."""
        return condition_number(self.matrix, self.learner.ridge)

    def predict(self, episodes: Episodes) -> Tensor:
        """Adapt to the support sets and predict for the queries.

        All tasks are adapted at once. Their kernel with the training points is computed for as many tasks at a time as
        `memory` allows.

        Args:
            episodes: The test tasks.

        Returns:
            The outputs for the queries, (tasks, queries, outputs), in the dtype of the tasks.

        Raises:
            InputError: If the tasks do not match the training tasks, or the kernel is undefined for some points.
        """
        learner, dtype = self.learner, episodes.query_x.dtype
        episodes = learner.prepare(episodes, "test task")
        self._check_test_tasks(episodes)
        time = learner.inner_time if learner.test_time is None else learner.test_time
        operators, inner_prediction = self._adapt(episodes, time)
        if learner.heads == "independent":  # a new head, independent of the trained ones, cannot use what they learned
            return inner_prediction.to(dtype)
        points = torch.cat([episodes.query_x, episodes.support_x], 1)
        chunks = points.split(self._tasks_per_chunk(points.shape[1]))
        output_changes = torch.cat([self._output_changes(chunk) for chunk in chunks])
        return (inner_prediction + operators @ output_changes).to(dtype)

    def _output_changes(self, points: Tensor) -> Tensor:
        """Return how much training has changed the outputs at these points, before adaptation."""
        ntk, nngp = self.kernel.both(points.flatten(0, 1), self.points.flatten(0, 1))
        changes = (ntk if self.learner.uses_split else ntk - nngp) @ self.weights
        return changes.unflatten(0, points.shape[:2])  # type: ignore[no-any-return]

    def _check_test_tasks(self, episodes: Episodes) -> None:
        """Raise InputError if test tasks do not match the training tasks."""
        if episodes.query_x.shape[2:] != self.point_shape:
            raise InputError(
                f"the points of the test tasks have shape {tuple(episodes.query_x.shape[2:])}, but the points of the "
                f"training tasks have shape {tuple(self.point_shape)}. Use the same features or image size for both."
            )
        if _describe_targets(episodes) != self.target_description:
            raise InputError(
                f"the test tasks have {_describe_targets(episodes)}, but the training tasks have "
                f"{self.target_description}. Use the same number for both."
            )
        if episodes.device != self.device:
            raise InputError(
                f"the test tasks are on {episodes.device}, but the training tasks are on {self.device}. "
                f"Use episodes.to('{self.device}')."
            )

    def _adapt(self, episodes: Episodes, time: float) -> tuple[Tensor, Tensor]:
        """Return R (with a split) and G(X, X', Y'), the prediction of the inner loop alone, for every task."""
        adapts: meta_kernels.AdaptedPart = "all" if self.learner.method == "maml" else "head"
        x, support = episodes.query_x, episodes.support_x
        operators = meta_kernels.query_residual_operator(
            self.kernel, x, support, adapts, time, self.learner.inner_ridge
        )
        # R = [I, −M(X, X')T(X')], so the last columns give G = M(X, X')T(X')Y'.
        return operators, -operators[..., x.shape[1] :] @ _targets(episodes, episodes.support_y)

    def _kernel_rows(self, tasks: slice) -> Tensor:
        """Return C between the points of some training tasks and the points of all training tasks."""
        count, points = self.points.shape[:2]
        all_points = self.points.flatten(0, 1)
        if tasks == slice(0, count):
            ntk, nngp = self.kernel.both(all_points)
        else:
            ntk, nngp = self.kernel.both(self.points[tasks].flatten(0, 1), all_points)
        same_task = meta_kernels.same_task_mask(count, points, ntk.device)[tasks.start * points : tasks.stop * points]
        return meta_kernels.unadapted_kernel(ntk, nngp, same_task, self.learner.method, self.learner.heads)

    def _solve(self, target: Tensor) -> Solution:
        """Return T_Φ · target, which is (Φ + ridge·I)⁻¹ · target if `outer_time` is infinite."""
        learner, operators = self.learner, self.residual_operators
        if learner.outer_time < math.inf:
            outer_operator = meta_kernels.adaptation_operator(self.matrix, learner.outer_time, learner.ridge)
            return Solution(outer_operator @ target, 0.0)
        if learner.ridge == 0:
            self._check_duplicates()
        # Three float64 matrices, see `KernelLearner.memory`.
        if 3 * 8 * (self.points.shape[0] * self.points.shape[1]) ** 2 <= learner.memory:
            return cholesky_solve(self.matrix, target, learner.ridge)
        # The preconditioner consists of the diagonal blocks of Φ, one for each task.
        blocks = operators @ meta_kernels.task_grams(self.kernel, self.points, "all") @ operators.mT
        blocks.diagonal(dim1=-2, dim2=-1).add_(learner.ridge)
        factor, failed = torch.linalg.cholesky_ex(blocks)
        if failed.any():
            raise InputError(
                f"training task {int(failed.bool().int().argmax())} has a singular kernel matrix: the kernel cannot "
                "distinguish its points. Remove similar points, or use a ridge."
            )

        def precondition(v: Tensor) -> Tensor:
            return torch.cholesky_solve(v.unflatten(0, blocks.shape[:2]), factor).flatten(0, 1)

        return conjugate_gradient_solve(self._product, target, precondition)

    def _check_duplicates(self) -> None:
        try:
            check_duplicates(self.kernel, self.points.flatten(0, 1), "the training tasks")
        except InputError as error:
            order = "queries before supports" if self.learner.uses_split else "supports before queries"
            raise InputError(
                f"{error} Points are numbered task by task, {self.points.shape[1]} per task, {order}."
            ) from error

    def _product(self, v: Tensor) -> Tensor:
        """Return (Φ + ridge)v, computing the rows of some tasks at a time."""
        operators, points = self.residual_operators, self.points.shape[1]
        tasks, tasks_per_chunk = len(self.points), self._tasks_per_chunk(points)
        point_v = (operators.mT @ v.unflatten(0, operators.shape[:2])).flatten(0, 1)
        chunks = []
        for start in range(0, tasks, tasks_per_chunk):
            chunk = slice(start, min(start + tasks_per_chunk, tasks))
            kernel_v = (self._kernel_rows(chunk) @ point_v).unflatten(0, (-1, points))
            chunks.append(operators[chunk] @ kernel_v)
        return torch.cat(chunks).flatten(0, 1) + self.learner.ridge * v

    def _tasks_per_chunk(self, points: int) -> int:
        """Return the number of tasks, each of `points` points, whose kernel with the training points fits in memory."""
        memory = self.learner.memory if self.points.is_cuda else min(self.learner.memory, _CPU_CHUNK_BYTES)
        # Room for four float64 matrices: Θ, K and intermediate results.
        return max(1, int(memory // (8 * 4 * points * self.points.shape[0] * self.points.shape[1])))


def predict_mtl(kernel: Kernel, train: Episodes, test: Episodes, *, test_time: float = math.inf) -> Tensor:
    """Return the predictions of multi-task learning until convergence (Wang et al. 2021, lemma 1).

    Args:
        kernel: The kernel of the network.
        train: The training tasks.
        test: The test tasks.
        test_time: Time ŝ = λτ of adaptation at test time (learning rate times number of steps); may be infinite.

    Returns:
        F_MTL for the queries of the test tasks, (tasks, queries, outputs).

    Raises:
        InputError: If test and training tasks do not match, or the kernel matrix is singular.

    Example:
        >>> import torch
        >>> from metabridge.environments import Quadratic
        >>> from metabridge.kernels import fully_connected_kernel, predict_mtl
        >>> generator = torch.Generator().manual_seed(0)
        >>> train, test = (Quadratic().sample(tasks, generator) for tasks in (20, 3))
        >>> predict_mtl(fully_connected_kernel(depth=3), train, test).shape
        torch.Size([3, 10, 1])
    """
    return KernelLearner(kernel, "mtl", test_time=test_time).fit(train).predict(test)


def predict_anil(
    kernel: Kernel, train: Episodes, test: Episodes, *, inner_time: float, test_time: float | None = None
) -> Tensor:
    """Return the predictions of ANIL without a query-support split (Wang et al. 2021, lemma 1).

    Args:
        kernel: The kernel of the network.
        train: The training tasks.
        test: The test tasks.
        inner_time: Time s = λτ of the inner loop (learning rate times number of steps); must be finite.
        test_time: Time ŝ of adaptation at test time; equal to `inner_time` if None.

    Returns:
        F_ANIL for the queries of the test tasks, (tasks, queries, outputs).

    Raises:
        InputError: If test and training tasks do not match, or the kernel matrix is singular.

    Example:
        >>> import torch
        >>> from metabridge.environments import Quadratic
        >>> from metabridge.kernels import fully_connected_kernel, predict_anil
        >>> generator = torch.Generator().manual_seed(0)
        >>> train, test = (Quadratic().sample(tasks, generator) for tasks in (20, 3))
        >>> predict_anil(fully_connected_kernel(depth=3), train, test, inner_time=0.3, test_time=1.0).shape
        torch.Size([3, 10, 1])
    """
    return KernelLearner(kernel, "anil", inner_time=inner_time, test_time=test_time).fit(train).predict(test)


def predict_maml(
    kernel: Kernel, train: Episodes, test: Episodes, *, inner_time: float = math.inf, test_time: float | None = None
) -> Tensor:
    """Return the predictions of MAML until convergence (Wang et al. 2022, theorem 2).

    Args:
        kernel: The kernel of the network.
        train: The training tasks.
        test: The test tasks.
        inner_time: Time s = λτ of the inner loop (learning rate times number of steps); may be infinite.
        test_time: Time ŝ of adaptation at test time; equal to `inner_time` if None.

    Returns:
        F_MAML for the queries of the test tasks, (tasks, queries, outputs).

    Raises:
        InputError: If test and training tasks do not match, or the kernel matrix is singular.

    Example:
        >>> import torch
        >>> from metabridge.environments import Quadratic
        >>> from metabridge.kernels import fully_connected_kernel, predict_maml
        >>> generator = torch.Generator().manual_seed(0)
        >>> train, test = (Quadratic().sample(tasks, generator) for tasks in (20, 3))
        >>> predict_maml(fully_connected_kernel(depth=3), train, test, inner_time=0.5).shape
        torch.Size([3, 10, 1])
    """
    return KernelLearner(kernel, "maml", inner_time=inner_time, test_time=test_time).fit(train).predict(test)


def _targets(episodes: Episodes, y: Tensor) -> Tensor:
    """Return one-hot class labels, or real-valued targets unchanged."""
    return one_hot(y, _output_count(episodes)).double() if episodes.is_classification else y


def _output_count(episodes: Episodes) -> int:
    if not episodes.is_classification:
        return episodes.support_y.shape[2]
    if episodes.classes is not None:
        return episodes.classes.shape[1]
    return 1 + int(max(episodes.support_y.max(), episodes.query_y.max()))


def _describe_targets(episodes: Episodes) -> str:
    """Return the number of classes or outputs as text, such as "5 classes"."""
    return f"{_output_count(episodes)} {'classes' if episodes.is_classification else 'outputs'}"


def _check_points(invalid: Tensor, problem: str, alternative: str, task_kind: str) -> None:
    """Raise InputError with the first three invalid points if the mask `invalid` (tasks, points) selects any.

    `alternative` completes the sentence "Remove them" with another way out.
    """
    positions = invalid.nonzero().tolist()
    if positions:
        listed = ", ".join(f"{point} of {task_kind} {task}" for task, point in positions[:3])
        listed += ", …" if len(positions) > 3 else ""
        raise InputError(f"{problem}: {listed}. Remove them{alternative}.")
