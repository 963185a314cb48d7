"""The MetaNTK (the NTK of adapted outputs) of finite networks, by its definition, and full-batch gradient descent.

The experiments compare both with networks of infinite width. The loss is ½‖F − Y‖², where F are the outputs for the
queries of all tasks and Y their targets (Wang et al. 2022, eq. 23). This module uses the NTK parameterization, unlike
that paper: at width l, its parameters are the parameters here divided by √l, its learning rate is η₀/l for the learning
rate η₀ here, and its Jacobian is √l·J for the Jacobian J here. Its kernel Φ̂ = (√l·J)(√l·J)ᵀ/l is therefore JJᵀ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from metabridge.episodes import Episodes
from metabridge.kernels.kernel_systems import extreme_eigenvalues
from metabridge.learners.adapt import predict
from metabridge.learners.engine import Engine
from metabridge.learners.method import Method
from metabridge.learners.parameters import adapted_params, initial_heads, parameters, trained_names
from metabridge.models.network import Network, Params, apply_features, apply_head
from metabridge.solvers import Problem


def squared_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """Return ½‖prediction − target‖², summed over queries (Wang et al. 2022, eq. 23)."""
    return (prediction - target).square().sum() / 2


class DescentStep(NamedTuple):
    """One step of gradient descent.

    Args:
        loss: The loss before the step.
        length: The Euclidean length of the step in parameter space.
    """

    loss: float
    length: float


@dataclass(frozen=True)
class ConvergenceRate:
    """Convergence of gradient descent with the kernel Φ and the learning rate η₀ = 1/(σ_max + σ_min).

    Gradient descent converges linearly for learning rates of less than 2/(σ_max + σ_min) (Wang et al. 2022, theorem 1).

    Args:
        smallest_eigenvalue: Smallest eigenvalue σ_min of Φ.
        largest_eigenvalue: Largest eigenvalue σ_max of Φ.

    Example:
        >>> ConvergenceRate.from_kernel(torch.diag(torch.tensor([0.5, 1.5]))).lr
        0.5
    """

    smallest_eigenvalue: float
    largest_eigenvalue: float

    @classmethod
    def from_kernel(cls, kernel: Tensor) -> ConvergenceRate:
        """Return the convergence of gradient descent with this kernel matrix."""
        return cls(*extreme_eigenvalues(kernel))

    @property
    def lr(self) -> float:
        """The learning rate η₀."""
        return 1 / (self.largest_eigenvalue + self.smallest_eigenvalue)

    @property
    def bound_contraction(self) -> float:
        """(1 − η₀σ_min/3)², the factor by which a step reduces the bound on the loss (Wang et al. 2022, eq. 32)."""
        return (1 - self.lr * self.smallest_eigenvalue / 3) ** 2

    @property
    def loss_contraction(self) -> float:
        """(1 − η₀σ_min)², the factor by which a step reduces an infinitely wide network's loss in the slowest mode.

        The slowest mode is the eigenvector of Φ with the eigenvalue σ_min.
        """
        return (1 - self.lr * self.smallest_eigenvalue) ** 2

    def steps(self, remainder: float) -> int:
        """Return the number of steps after which at most a given fraction of the error in the slowest mode remains.

        Args:
            remainder: The fraction of the error that may remain, between 0 and 1.

        Returns:
            The number of steps.

        Example:
            >>> ConvergenceRate(1.0, 1.0).steps(0.1)
            4
        """
        return math.ceil(math.log(remainder) / math.log1p(-self.lr * self.smallest_eigenvalue))


def gradient_descent(engine: Engine, params: Params, episodes: Episodes, lr: float, steps: int) -> list[DescentStep]:
    """Take full-batch steps θ ← θ − η∇L in place, where L is the sum of the losses of all tasks.

    Args:
        engine: The engine that computes the gradient of the method.
        params: The parameters, which are updated in place.
        episodes: The tasks.
        lr: Learning rate η.
        steps: Number of steps.

    Returns:
        The loss before each step, and the length of the step.
    """
    lr *= len(episodes)  # the engine returns the gradient of the mean over tasks
    records = []
    for _ in range(steps):
        loss, gradients = engine(params, episodes)
        with torch.no_grad():
            for name, grad in gradients.items():
                params[name].sub_(lr * grad)
        norm = torch.stack([grad.square().sum() for grad in gradients.values()]).sum().sqrt()
        records.append(DescentStep(len(episodes) * float(loss), lr * float(norm)))
    return records


class CenteredTraining:
    """Gradient descent on F_t − F_0, the outputs of a network minus its initial outputs.

    It satisfies the assumptions of `KernelLearner`: outputs are initially 0, the heads of all tasks start from the same
    values, and without a query-support split, test tasks have new heads.

    Args:
        method: The method.
        net: The network, with one output. Its own parameters stay at their initial values.
        episodes: The training tasks.

    Example:
        >>> from metabridge.environments import Quadratic
        >>> from metabridge.learners.method import method
        >>> from metabridge.models import wide
        >>> maml = method("maml", steps=1, lr=1e-3, loss=squared_loss)
        >>> train, test = (Quadratic().sample(tasks, torch.Generator().manual_seed(0)) for tasks in (4, 2))
        >>> training = CenteredTraining(maml, wide(10, width=16), train)
        >>> first, last = training.descend(lr=1e-4, steps=2)
        >>> last.loss < first.loss, training.predict(maml, test).shape
        (True, torch.Size([2, 10, 1]))
    """

    def __init__(self, method: Method, net: Network, episodes: Episodes) -> None:
        task_indices = torch.arange(len(episodes), device=episodes.device)  # for MTL, task i has row i of the heads
        self.net, self.engine = net, Engine(method, net)
        self.episodes = replace(self._with_initial_outputs(episodes), classes=task_indices[:, None])
        self.params = parameters(method, net, classes=len(task_indices))
        # Without a query-support split, test tasks start from a new head, the initial one.
        self.initial_head = (
            {} if method.split else {f"head.{name}": value for name, value in net.head.named_parameters()}
        )
        for name, value in net.head.named_parameters():
            if f"heads.{name}" in self.params:
                self.params[f"heads.{name}"].data.copy_(value.expand(len(task_indices), *value.shape[1:]))

    def descend(self, lr: float, steps: int) -> list[DescentStep]:
        """Continue training.

        Args:
            lr: Learning rate.
            steps: Number of steps.

        Returns:
            The loss before each step, and the length of the step.
        """
        return gradient_descent(self.engine, self.params, self.episodes, lr, steps)

    def predict(self, method: Method, episodes: Episodes) -> Tensor:
        """Adapt to test tasks and predict for their queries.

        Args:
            method: The method with which to adapt.
            episodes: The test tasks.

        Returns:
            The outputs minus the initial outputs, (tasks, queries, outputs).
        """
        shifted = self._with_initial_outputs(episodes)
        return predict(method, self.net, self.params | self.initial_head, shifted) - (
            shifted.query_y - episodes.query_y
        )

    def _with_initial_outputs(self, episodes: Episodes) -> Episodes:
        """Return the tasks with the initial outputs added to the targets."""
        with torch.no_grad():
            support, query = (
                self.net(x.flatten(0, 1)).unflatten(0, x.shape[:2]) for x in (episodes.support_x, episodes.query_x)
            )
        return replace(episodes, support_y=episodes.support_y + support, query_y=episodes.query_y + query)


def empirical_meta_ntk(method: Method, net: Network, params: Params, episodes: Episodes) -> Tensor:
    """Return Φ̂ = JJᵀ, with the Jacobian J of the adapted outputs through the inner loop (Wang et al. 2022, eq. 4).

    Args:
        method: The method. J is with respect to all parameters that it trains; for MTL, the body and one head per task.
        net: The network.
        params: Its parameters.
        episodes: The tasks.

    Returns:
        The kernel between all query outputs, in the order of the tasks.
    """
    episodes = episodes if method.split else episodes.without_split()
    leaves = {name: params[name].detach().requires_grad_() for name in trained_names(method, net, params)}
    rows = []
    for index in range(len(episodes)):
        for output in _adapted_outputs(method, net, params | leaves, episodes[index]):
            grads = torch.autograd.grad(output, list(leaves.values()), retain_graph=True, materialize_grads=True)
            rows.append(torch.cat([grad.flatten() for grad in grads]))
    jacobian = torch.stack(rows)
    return jacobian @ jacobian.mT


def _adapted_outputs(method: Method, net: Network, params: Params, task: Episodes) -> Tensor:
    """Return the query outputs of one task as a function of the parameters before adaptation."""
    heads = initial_heads(method, params, task)
    initial_params = params | {name: value[0] for name, value in heads.items()}

    def apply(adapted: Params, x: Tensor) -> Tensor:
        return apply_head(initial_params | adapted, apply_features(net, initial_params | adapted, x))

    adapted: Params = {}
    if method.inner is not None:
        problem = Problem(apply, method.loss, task.support_x[0], task.support_y[0])
        adapted = method.inner.solve(problem, adapted_params(method, net, initial_params), {}, exact=True)
    return apply(adapted, task.query_x[0]).flatten()
