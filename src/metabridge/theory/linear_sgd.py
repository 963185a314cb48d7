"""SGD of MAML and NAL on linear models, many independent runs together (Collins et al. 2022, app. C.1).

The gradients are written out by hand, so that one step of all runs is a few small batched products.
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

Tasks = LinearTasks | LogisticTasks
Name = TypeVar("Name", bound=str)
VALUES_PER_SAMPLE = 4_000_000  # input values sampled in one call, which bounds the memory


@dataclass(frozen=True)
class LinearLearner:
    """How one linear model is trained by SGD.

    Args:
        lr: Step size of SGD.
        alpha: Size of the inner step for MAML; None trains without adaptation (NAL).
        hard_weight: Weight of the gradient of a task of the first (hard) group; other tasks have weight 1.
    """

    lr: float
    alpha: float | None = None
    hard_weight: float = 1.0


@dataclass(frozen=True)
class SquaredLoss:
    """½ mean (⟨w, x⟩ − y)² over the points of each task, from its second moments XᵀX/n and Xᵀy/n."""

    xx: Tensor
    xy: Tensor

    @classmethod
    def from_points(cls, x: Tensor, y: Tensor) -> SquaredLoss:
        """Compute the moments of inputs x (..., n, d) and targets y (..., n)."""
        return cls(x.mT @ x / x.shape[-2], _mean_product(x, y))

    def __getitem__(self, index: int) -> SquaredLoss:
        """Index the first axis."""
        return SquaredLoss(self.xx[index], self.xy[index])

    def gradient(self, w: Tensor) -> Tensor:
        """Return the gradients at w (..., d)."""
        return self.hvp(w, w) - self.xy

    def hvp(self, w: Tensor, direction: Tensor) -> Tensor:
        """Return the Hessians at w times a direction (..., d)."""
        return _predict(self.xx, direction)

    @staticmethod
    def value(predictions: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each point from its prediction ⟨w, x⟩."""
        return (predictions - y).square() / 2


@dataclass(frozen=True)
class LogisticLoss:
    """The mean logistic loss over the points of each task, for inputs x (..., n, d) and labels y (..., n) of 0 or 1."""

    x: Tensor
    y: Tensor

    def __getitem__(self, index: int) -> LogisticLoss:
        """Index the first axis."""
        return LogisticLoss(self.x[index], self.y[index])

    def gradient(self, w: Tensor) -> Tensor:
        """Return the gradients at w (..., d)."""
        return _mean_product(self.x, _predict(self.x, w).sigmoid() - self.y)

    def hvp(self, w: Tensor, direction: Tensor) -> Tensor:
        """Return the Hessians at w times a direction (..., d)."""
        probability = _predict(self.x, w).sigmoid()
        return _mean_product(self.x, probability * (1 - probability) * _predict(self.x, direction))

    @staticmethod
    def value(predictions: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each point from its logit ⟨w, x⟩."""
        return F.softplus(predictions) - y * predictions


Loss = SquaredLoss | LogisticLoss


def maml_gradient(inner: Loss, outer: Loss, w: Tensor, alpha: float) -> Tensor:
    """Return (I − α∇²inner(w)) ∇outer(w − α∇inner(w)), MAML's gradient for one inner step (Collins et al. 2022, eq. 4).

    Args:
        inner: Loss of each task on its support points.
        outer: Loss of each task on its query points.
        w: Weights before adaptation, (..., d).
        alpha: Size of the inner step.

    Returns:
        The gradient of each task, (..., d).
    """
    grad = outer.gradient(w - alpha * inner.gradient(w))
    return grad - alpha * inner.hvp(w, grad)


def train_linear_models(
    tasks: Tasks,
    learners: Mapping[Name, LinearLearner],
    generator: torch.Generator,
    *,
    iterations: int,
    runs: int,
    batch_size: int = 1,
) -> dict[Name, Tensor]:
    """Train several learners from w = 0 on the same sequence of tasks, in independent runs.

    NAL trains on the support and query points of a task together. In a batch the weights of the tasks sum to 1.

    Args:
        tasks: The environment that tasks are sampled from.
        learners: The learners by name.
        generator: Random generator for the tasks.
        iterations: Number of SGD steps.
        runs: Number of independent runs, each with its own tasks.
        batch_size: Number of tasks in one step of one run.

    Returns:
        The final weights of each learner, (runs, d).
    """
    weights = {name: torch.zeros(runs, tasks.landscape.dimension) for name in learners}
    for episodes in _sample_in_parts(tasks, iterations, runs * batch_size, generator):
        shape = (-1, runs, batch_size)
        x_in, y_in, x_out, y_out = (part.unflatten(0, shape) for part in _points(episodes))
        inner, outer = _loss(tasks, x_in, y_in), _loss(tasks, x_out, y_out)
        pooled = _loss(tasks, torch.cat([x_in, x_out], -2), torch.cat([y_in, y_out], -1))
        hard = _is_hard(episodes).unflatten(0, shape)
        task_weights = {learner.hard_weight: _task_weights(hard, learner.hard_weight) for learner in learners.values()}
        for i in range(len(x_in)):
            for name, learner in learners.items():
                w = weights[name][:, None]
                if learner.alpha is None:
                    grads = pooled[i].gradient(w)
                else:
                    grads = maml_gradient(inner[i], outer[i], w, learner.alpha)
                weights[name] -= learner.lr * (task_weights[learner.hard_weight][i] * grads).sum(1)
    return weights


def sampled_test_loss(
    tasks: Tasks, w: Tensor, alpha: float, generator: torch.Generator, *, test_tasks: int, runs: int
) -> Tensor:
    """Estimate F_m(w), the mean query loss after one step on the support set of new tasks.

    Args:
        tasks: The environment that tasks are sampled from.
        w: Weights before adaptation: (d), or one row per run, (runs, d).
        alpha: Size of the step.
        generator: Random generator for the tasks.
        test_tasks: Number of tasks per run.
        runs: Number of runs, each with its own tasks.

    Returns:
        The mean loss of each run, (runs).
    """
    losses = []
    for episodes in _sample_in_parts(tasks, test_tasks, runs, generator):
        x_in, y_in, x_out, y_out = (part.unflatten(0, (-1, runs)) for part in _points(episodes))
        loss = _loss(tasks, x_in, y_in)
        adapted = w - alpha * loss.gradient(w)
        losses.append(loss.value(_predict(x_out, adapted), y_out).mean(-1))
    return torch.cat(losses).mean(0)


def label_entropy(landscape: Landscape) -> float:
    """Return the expected logistic loss at each task's w*, the entropy of its labels, for groups of a single task.

    ⟨w*, x⟩ is normal with variance w*ᵀΣw*, so the mean over x is a one-dimensional integral. It is computed by
    Gauss–Hermite quadrature with 200 nodes.

    Args:
        landscape: Groups of tasks with zero spread.

    Returns:
        The mean over tasks.
    """
    tasks = landscape.distribution
    variance = torch.einsum("gi,gij,gj->g", tasks.center, tasks.covariance, tasks.center)
    nodes, weights = (torch.from_numpy(values) for values in np.polynomial.hermite_e.hermegauss(200))
    logits = variance.sqrt()[:, None] * nodes
    entropy = F.softplus(logits) - logits.sigmoid() * logits
    return float(tasks.probability @ (entropy @ weights)) / math.sqrt(2 * math.pi)


def _loss(tasks: Tasks, x: Tensor, y: Tensor) -> Loss:
    return LogisticLoss(x, y) if isinstance(tasks, LogisticTasks) else SquaredLoss.from_points(x, y)


def _predict(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w[..., None]).squeeze(-1)


def _mean_product(x: Tensor, values: Tensor) -> Tensor:
    """Return Xᵀ values / n."""
    return (values[..., None, :] @ x).squeeze(-2) / x.shape[-2]


def _sample_in_parts(
    tasks: Tasks, iterations: int, tasks_per_iteration: int, generator: torch.Generator
) -> Iterator[Episodes]:
    """Yield the tasks of all iterations, those of several iterations in one batch."""
    size = tasks_per_iteration * (tasks.shots + tasks.queries) * tasks.landscape.dimension
    together = max(1, VALUES_PER_SAMPLE // size)
    for first in range(0, iterations, together):
        yield tasks.sample(tasks_per_iteration * min(together, iterations - first), generator)


def _points(episodes: Episodes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return inputs and targets of support and query sets, the targets as numbers without the axis of outputs."""
    y_in, y_out = (
        y.to(episodes.support_x.dtype) if episodes.is_classification else y.squeeze(-1)
        for y in (episodes.support_y, episodes.query_y)
    )
    return episodes.support_x, y_in, episodes.query_x, y_out


def _is_hard(episodes: Episodes) -> Tensor:
    """Return whether each task belongs to the first group."""
    assert episodes.classes is not None
    return episodes.classes[:, 0] == 0


def _task_weights(hard: Tensor, hard_weight: float) -> Tensor:
    """Return the weight of each task within its batch, (..., batch, 1)."""
    weights = torch.where(hard, hard_weight, 1.0)
    return (weights / weights.sum(-1, keepdim=True))[..., None]
