"""SGD for MAML and non-adaptive learning (NAL) on linear models (Collins et al. 2022, app. C.1).

Many independent runs are trained at once. The gradients are computed by explicit formulas instead of autograd, so one
step of all runs is a few batched products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from metabridge.environments.linear_tasks import Landscape, LinearTasks, LogisticTasks
from metabridge.episodes import Episodes

LinearEnvironment = LinearTasks | LogisticTasks
LearnerName = TypeVar("LearnerName", bound=str)
MAX_SAMPLED_VALUES = 4_000_000  # maximum number of input elements per call of `sample`, which limits the memory


@dataclass(frozen=True)
class LinearLearner:
    """How SGD trains a linear model.

    Args:
        lr: Step size of SGD.
        alpha: Step size of the inner step of MAML; None trains without adaptation (NAL).
        hard_weight: Weight of tasks of the first (hard) group in the mean gradient of a batch; other tasks have
            weight 1.

    Example:
        >>> LinearLearner(lr=0.1, alpha=0.5)
        LinearLearner(lr=0.1, alpha=0.5, hard_weight=1.0)
    """

    lr: float
    alpha: float | None = None
    hard_weight: float = 1.0


@dataclass(frozen=True)
class SquaredLoss:
    """The loss ½ mean (⟨w, x⟩ − y)² over the n points of each task, computed from second moments.

    Args:
        xx: XᵀX/n, (..., d, d).
        xy: Xᵀy/n, (..., d).

    Example:
        >>> loss = SquaredLoss.from_points(torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 1.0]))
        >>> loss.grad(torch.zeros(1))
        tensor([-1.5000])
    """

    xx: Tensor
    xy: Tensor

    @classmethod
    def from_points(cls, x: Tensor, y: Tensor) -> SquaredLoss:
        """Compute the moments.

        Args:
            x: Points of each task, (..., n, d).
            y: Targets, (..., n).

        Returns:
            The loss.
        """
        return cls(x.mT @ x / x.shape[-2], _mean_product(x, y))

    def __getitem__(self, index: int) -> SquaredLoss:
        """Index the first axis."""
        return SquaredLoss(self.xx[index], self.xy[index])

    def grad(self, w: Tensor) -> Tensor:
        """Return the gradient of each task's loss.

        Args:
            w: Weights, (..., d).

        Returns:
            The gradients, (..., d).
        """
        return self.hvp(w, w) - self.xy

    def hvp(self, w: Tensor, v: Tensor) -> Tensor:
        """Return the product of each task's Hessian with a vector.

        Args:
            w: Weights at which the Hessian is taken, (..., d). The Hessian of this loss does not depend on them.
            v: The vector, (..., d).

        Returns:
            The products, (..., d).
        """
        return _predict(self.xx, v)

    @staticmethod
    def pointwise_loss(predictions: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each point.

        Args:
            predictions: ⟨w, x⟩ of each point.
            y: Targets, in the same shape.

        Returns:
            The losses, in the same shape.
        """
        return (predictions - y).square() / 2


@dataclass(frozen=True)
class LogisticLoss:
    """The mean logistic loss over the n points of each task.

    Args:
        x: Points, (..., n, d).
        y: Labels 0 and 1 as floats, (..., n).

    Example:
        >>> loss = LogisticLoss(torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 0.0]))
        >>> loss.grad(torch.zeros(1))
        tensor([0.2500])
    """

    x: Tensor
    y: Tensor

    def __getitem__(self, index: int) -> LogisticLoss:
        """Index the first axis."""
        return LogisticLoss(self.x[index], self.y[index])

    def grad(self, w: Tensor) -> Tensor:
        """Return the gradient of each task's loss.

        Args:
            w: Weights, (..., d).

        Returns:
            The gradients, (..., d).
        """
        return _mean_product(self.x, _predict(self.x, w).sigmoid() - self.y)

    def hvp(self, w: Tensor, v: Tensor) -> Tensor:
        """Return the product of each task's Hessian with a vector.

        Args:
            w: Weights at which the Hessian is taken, (..., d).
            v: The vector, (..., d).

        Returns:
            The products, (..., d).
        """
        probability = _predict(self.x, w).sigmoid()
        return _mean_product(self.x, probability * (1 - probability) * _predict(self.x, v))

    @staticmethod
    def pointwise_loss(logits: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each point.

        Args:
            logits: ⟨w, x⟩ of each point.
            y: Labels 0 and 1 as floats, in the same shape.

        Returns:
            The losses, in the same shape.
        """
        return F.softplus(logits) - y * logits


Loss = SquaredLoss | LogisticLoss


def maml_gradient(inner: Loss, outer: Loss, w: Tensor, alpha: float) -> Tensor:
    """Return (I − α∇²inner(w)) ∇outer(w − α∇inner(w)), MAML's gradient for one inner step (Collins et al. 2022, eq. 4).

    Args:
        inner: Loss of each task on its support points.
        outer: Loss of each task on its query points.
        w: Weights before adaptation, (..., d).
        alpha: Step size α of the inner step.

    Returns:
        The gradient of each task, (..., d).

    Example:
        >>> loss = SquaredLoss.from_points(torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 1.0]))
        >>> maml_gradient(loss, loss, torch.zeros(1), alpha=0.2)
        tensor([-0.3750])
    """
    grad = outer.grad(w - alpha * inner.grad(w))
    return grad - alpha * inner.hvp(w, grad)


def train_linear_models(
    environment: LinearEnvironment,
    learners: Mapping[LearnerName, LinearLearner],
    generator: torch.Generator,
    *,
    iterations: int,
    runs: int,
    batch_size: int = 1,
) -> dict[LearnerName, Tensor]:
    """Train several learners from w = 0 on the same sequence of tasks, in independent runs.

    Each SGD step follows the weighted mean of its tasks' gradients. MAML adapts to the support points and learns from
    the query points; NAL learns from both.

    Args:
        environment: Environment to sample the tasks from.
        learners: The learners by name.
        generator: Random generator for the tasks.
        iterations: Number of SGD steps.
        runs: Number of independent runs, each with different tasks.
        batch_size: Number of tasks in one step of one run.

    Returns:
        The final weights of each learner, (runs, d).

    Example:
        >>> from metabridge.environments import HardEasy
        >>> environment = LinearTasks(HardEasy(0.25, 1.0, dimension=2).landscape, shots=5, queries=5)
        >>> learners = {"nal": LinearLearner(lr=0.05), "maml": LinearLearner(lr=0.05, alpha=0.5)}
        >>> weights = train_linear_models(environment, learners, torch.Generator().manual_seed(0), iterations=9, runs=3)
        >>> weights["maml"].shape
        torch.Size([3, 2])
    """
    weights = {name: torch.zeros(runs, environment.landscape.dimension) for name in learners}
    for episodes in _sample_chunks(environment, iterations, runs * batch_size, generator):
        shape = (-1, runs, batch_size)
        x_in, y_in, x_out, y_out = (tensor.unflatten(0, shape) for tensor in _inputs_and_targets(episodes))
        inner_loss, outer_loss = _loss(environment, x_in, y_in), _loss(environment, x_out, y_out)
        joint_loss = _loss(environment, torch.cat([x_in, x_out], -2), torch.cat([y_in, y_out], -1))
        is_hard = _is_hard(episodes).unflatten(0, shape)
        task_weights = {
            learner.hard_weight: _task_weights(is_hard, learner.hard_weight) for learner in learners.values()
        }
        for i in range(len(x_in)):
            for name, learner in learners.items():
                w = weights[name][:, None]
                if learner.alpha is None:
                    grads = joint_loss[i].grad(w)
                else:
                    grads = maml_gradient(inner_loss[i], outer_loss[i], w, learner.alpha)
                weights[name] -= learner.lr * (task_weights[learner.hard_weight][i] * grads).sum(1)
    return weights


def sampled_test_loss(
    environment: LinearEnvironment, w: Tensor, alpha: float, generator: torch.Generator, *, test_tasks: int, runs: int
) -> Tensor:
    """Estimate F_m(w), the mean query loss after one step on the support set of new tasks.

    Args:
        environment: Environment to sample the tasks from.
        w: Weights before adaptation: (d), or one row per run, (runs, d).
        alpha: Step size α of the step on the support set.
        generator: Random generator for the tasks.
        test_tasks: Number of tasks per run.
        runs: Number of runs, each with different tasks.

    Returns:
        The mean loss of each run, (runs).

    Example:
        >>> from metabridge.environments import HardEasy
        >>> environment = LinearTasks(HardEasy(0.25, 1.0, dimension=2).landscape, shots=5, queries=5)
        >>> generator = torch.Generator().manual_seed(0)
        >>> sampled_test_loss(environment, torch.zeros(2), 0.5, generator, test_tasks=10, runs=3).shape
        torch.Size([3])
    """
    losses = []
    for episodes in _sample_chunks(environment, test_tasks, runs, generator):
        x_in, y_in, x_out, y_out = (tensor.unflatten(0, (-1, runs)) for tensor in _inputs_and_targets(episodes))
        loss = _loss(environment, x_in, y_in)
        adapted = w - alpha * loss.grad(w)
        losses.append(loss.pointwise_loss(_predict(x_out, adapted), y_out).mean(-1))
    return torch.cat(losses).mean(0)


def label_entropy(landscape: Landscape) -> float:
    """Return the mean over tasks of the logistic loss at the task's own w*, which is the entropy of its labels.

    ⟨w*, x⟩ is normal with variance w*ᵀΣw*, so the mean over x is a one-dimensional integral. It is computed by
    Gauss–Hermite quadrature with 200 nodes.

    Args:
        landscape: Groups of tasks. Their spread must be 0, so that all tasks of a group have the same w*.

    Returns:
        The mean entropy over all tasks.

    Example:
        >>> from metabridge.environments import TaskGroup
        >>> round(label_entropy(Landscape((TaskGroup(1.0, center=0.0),), 2)), 4)  # log 2: the labels are random
        0.6931
    """
    distribution = landscape.distribution
    variance = torch.einsum("gi,gij,gj->g", distribution.center, distribution.covariance, distribution.center)
    nodes, weights = (torch.from_numpy(values) for values in np.polynomial.hermite_e.hermegauss(200))
    logits = variance.sqrt()[:, None] * nodes
    entropy = F.softplus(logits) - logits.sigmoid() * logits
    return float(distribution.probability @ (entropy @ weights)) / math.sqrt(2 * math.pi)


def _loss(environment: LinearEnvironment, x: Tensor, y: Tensor) -> Loss:
    return LogisticLoss(x, y) if isinstance(environment, LogisticTasks) else SquaredLoss.from_points(x, y)


def _predict(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w[..., None]).squeeze(-1)


def _mean_product(x: Tensor, values: Tensor) -> Tensor:
    """Return Xᵀ values / n."""
    return (values[..., None, :] @ x).squeeze(-2) / x.shape[-2]


def _sample_chunks(
    environment: LinearEnvironment, iterations: int, tasks_per_iteration: int, generator: torch.Generator
) -> Iterator[Episodes]:
    """Yield the tasks of all iterations, in chunks of several iterations."""
    points_per_iteration = tasks_per_iteration * (environment.shots + environment.queries)
    values_per_iteration = points_per_iteration * environment.landscape.dimension
    chunk_size = max(1, MAX_SAMPLED_VALUES // values_per_iteration)
    for start in range(0, iterations, chunk_size):
        yield environment.sample(tasks_per_iteration * min(chunk_size, iterations - start), generator)


def _inputs_and_targets(episodes: Episodes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x_in, y_in, x_out and y_out. Targets are floats of shape (tasks, points)."""
    y_in, y_out = (
        y.to(episodes.support_x.dtype) if episodes.is_classification else y.squeeze(-1)
        for y in (episodes.support_y, episodes.query_y)
    )
    return episodes.support_x, y_in, episodes.query_x, y_out


def _is_hard(episodes: Episodes) -> Tensor:
    """Return whether each task belongs to the first group."""
    assert episodes.classes is not None
    return episodes.classes[:, 0] == 0  # group g has the class g in regression, and the classes 2g and 2g + 1 otherwise


def _task_weights(is_hard: Tensor, hard_weight: float) -> Tensor:
    """Return the weight of each task, (..., batch_size, 1); the weights of a batch sum to 1."""
    weights = torch.where(is_hard, hard_weight, 1.0)
    return (weights / weights.sum(-1, keepdim=True))[..., None]
