"""First-order ANIL, first-order MAML and Burer–Monteiro factorization of linear networks on finitely many tasks.

They are defined in Yüksel et al. 2023, eq. 2–4 and 12. The gradients of x ↦ ⟨Bw, x⟩ are computed by explicit formulas
instead of autograd, so a step is a few batched products over all tasks of all runs. Second moments XᵀX are not
computed, since they have more entries than X if a task has fewer points than dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from metabridge.cuda_graph import CapturedGraph
from metabridge.episodes import Episodes
from metabridge.errors import InputError
from metabridge.learners.method import balancing_regularizer
from metabridge.theory.anil import AnilSettings

NetParams = tuple[Tensor, Tensor]  # B (runs, d, k') and w (runs, k')


class TaskPoints(NamedTuple):
    """Points and targets of the inner loop and of the outer loop, for all tasks of several runs.

    Args:
        x_in: Points of the inner loop, (runs, tasks, points, d).
        y_in: Targets of the inner loop, (runs, tasks, points).
        x_out: Points of the outer loop, with the same axes.
        y_out: Targets of the outer loop, with the same axes.

    Example:
        >>> from metabridge.environments import SharedRepresentation
        >>> environment = SharedRepresentation(dimension=8, variances=(1.0, 2.0), shots=6, pool=30)
        >>> TaskPoints.from_episodes([environment.tasks]).x_in.shape
        torch.Size([1, 30, 6, 8])
    """

    x_in: Tensor
    y_in: Tensor
    x_out: Tensor
    y_out: Tensor

    @classmethod
    def from_episodes(cls, runs: list[Episodes]) -> TaskPoints:
        """Stack the tasks of several runs.

        Args:
            runs: The tasks of each run, with the same number of tasks and points.

        Returns:
            The points: support sets for the inner loop, query sets for the outer loop.

        Raises:
            InputError: If a target has more than one output.
        """
        if any(run.support_y.shape[-1] != 1 for run in runs):
            raise InputError("targets have several outputs, but this linear network has only one. Use one output.")
        x_in, y_in, x_out, y_out = (torch.stack(tensors) for tensors in zip(*(run.tensors()[:4] for run in runs)))
        return cls(x_in, y_in[..., 0], x_out, y_out[..., 0])

    def to(self, device: torch.device | str, dtype: torch.dtype) -> TaskPoints:
        """Return the points on a device and in a dtype.

        Args:
            device: The device.
            dtype: The dtype.

        Returns:
            The points as contiguous tensors.
        """
        return TaskPoints(*(tensor.to(device, dtype).contiguous() for tensor in self))


def first_order_step(
    B: Tensor, w: Tensor, points: TaskPoints, settings: AnilSettings, adapts: Literal["head", "all"] = "head"
) -> NetParams:
    """Take one outer step of first-order ANIL or MAML on all tasks (Yüksel et al. 2023, eq. 2, 3).

    With the gradient g of a task's loss with respect to θ = Bw, the inner step is wᵢ = w − αBᵀg, and for MAML also
    Bᵢ = B − αgwᵀ.

    Args:
        B: Representations, (runs, d, k').
        w: Heads, (runs, k').
        points: Points of the tasks.
        settings: Step sizes α and β. `m_in` is ignored, as `points` determines the number of points.
        adapts: "head" for ANIL, "all" for MAML.

    Returns:
        B and w after the step.

    Example:
        >>> from metabridge.environments import SharedRepresentation
        >>> environment = SharedRepresentation(dimension=8, variances=(1.0, 2.0), shots=6, pool=30)
        >>> points = TaskPoints.from_episodes([environment.tasks])
        >>> B, w = first_order_step(torch.zeros(1, 8, 4), torch.zeros(1, 4), points, AnilSettings())
        >>> B.shape, w.shape
        (torch.Size([1, 8, 4]), torch.Size([1, 4]))
    """
    alpha = settings.alpha
    runs, tasks, _, dimension = points.x_in.shape
    theta = B @ w[..., None]
    predictions = (points.x_in.flatten(1, 2) @ theta).view_as(points.y_in)
    inner_grads = _mean_products(predictions - points.y_in, points.x_in)
    heads = w[:, None] - alpha * (inner_grads @ B)
    adapted_theta = heads @ B.mT
    if adapts == "all":
        adapted_theta = adapted_theta - alpha * inner_grads * (heads @ w[..., None])
    adapted_theta = adapted_theta.view(runs * tasks, dimension, 1)
    predictions = torch.bmm(points.x_out.flatten(0, 1), adapted_theta).view_as(points.y_out)
    outer_grads = _mean_products(predictions - points.y_out, points.x_out)
    w_grad = (outer_grads.mean(1)[:, None] @ B)[:, 0]
    if adapts == "all":
        w_grad = w_grad - alpha * w * (inner_grads * outer_grads).sum(-1).mean(-1, keepdim=True)
    return B - settings.beta * (outer_grads.mT @ heads) / tasks, w - settings.beta * w_grad


def _mean_products(errors: Tensor, x: Tensor) -> Tensor:
    """Return Xᵀe/m of every task for its errors e, (runs, tasks, d)."""
    sums = torch.bmm(errors.flatten(0, 1)[:, None], x.flatten(0, 1))
    return sums.view(*x.shape[:2], x.shape[-1]) / x.shape[2]


def factorization_loss(B: Tensor, W: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the objective of Burer–Monteiro factorization (Yüksel et al. 2023, eq. 12).

    It is the mean over tasks of ½‖XBwᵢ − y‖²/m, with the m points X of a task, plus ⅛‖BᵀB − WᵀW‖².

    Args:
        B: Representation, (d, k').
        W: Heads, one row per task, (tasks, k').
        x: Points of the tasks, (tasks, points, d).
        y: Targets, (tasks, points).

    Returns:
        The loss, a scalar.

    Example:
        >>> eye = torch.eye(2)
        >>> factorization_loss(eye, eye, eye.expand(2, 2, 2), torch.zeros(2, 2))
        tensor(0.2500)
    """
    errors = torch.bmm(x, (W @ B.mT)[..., None])[..., 0] - y
    return errors.square().mean() / 2 + balancing_regularizer({"features.weight": B.mT, "heads.weight": W})


class RepeatedStep:
    """A step that is taken many times. On a GPU it is captured as a CUDA graph and replayed.

    Args:
        step: Function that maps B and w to their values after a step.
        initial_params: Initial B and w.

    Example:
        >>> halving = RepeatedStep(lambda B, w: (B / 2, w / 2), (torch.ones(1, 1, 1), torch.ones(1, 1)))
        >>> halving.advance(3)
        >>> halving.params[0].item()
        0.125
    """

    def __init__(self, step: Callable[[Tensor, Tensor], NetParams], initial_params: NetParams) -> None:
        self.step = step
        self.params: NetParams = (initial_params[0].clone(), initial_params[1].clone())
        self._graph: CapturedGraph[None] | None = None

    def advance(self, steps: int) -> None:
        """Take a number of steps, and wait until the GPU has finished them.

        Args:
            steps: Number of steps.
        """
        if steps and self._graph is None and self.params[0].is_cuda:
            self._graph = self._capture()
        for _ in range(steps):
            if self._graph is None:
                self._step_in_place()
            else:
                self._graph.replay()
        if self._graph is not None:
            torch.cuda.synchronize()

    def _step_in_place(self) -> None:
        for param, value in zip(self.params, self.step(*self.params)):
            param.copy_(value)

    def _capture(self) -> CapturedGraph[None]:
        params_before = [param.clone() for param in self.params]
        graph = CapturedGraph(self._step_in_place)  # capturing changes the parameters
        for param, value in zip(self.params, params_before):
            param.copy_(value)
        return graph
