"""First-order ANIL, MAML and Burer–Monteiro of a linear net on the points of finitely many tasks (D eq. 2–4, 12).

The gradients of x ↦ ⟨Bw, x⟩ are written out, so that a step is a few batched products over all tasks of all runs side
by side, each of which reads the points once. No second moment of a task is formed: XᵀX has more entries than X.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from metabridge.cuda_graph import CapturedGraph
from metabridge.episodes import Episodes
from metabridge.errors import InputError
from metabridge.learners.method import balance
from metabridge.theory.anil import AnilSettings

NetParams = tuple[Tensor, Tensor]  # B (runs, d, k') and w (runs, k')


class TaskPoints(NamedTuple):
    """The points that every task adapts on and is judged on: x (runs, tasks, points, d), y (runs, tasks, points)."""

    x_in: Tensor
    y_in: Tensor
    x_out: Tensor
    y_out: Tensor

    @classmethod
    def from_episodes(cls, runs: list[Episodes]) -> TaskPoints:
        """Put the tasks of several runs side by side."""
        if any(run.support_y.shape[-1] != 1 for run in runs):
            raise InputError("targets have several values, but a linear net of this kind has one output.")
        x_in, y_in, x_out, y_out = (torch.stack(part) for part in zip(*(run.tensors()[:4] for run in runs)))
        return cls(x_in, y_in[..., 0], x_out, y_out[..., 0])

    def to(self, device: torch.device | str, dtype: torch.dtype) -> TaskPoints:
        """Move to a device and a dtype."""
        return TaskPoints(*(tensor.to(device, dtype).contiguous() for tensor in self))


def first_order_step(
    B: Tensor, w: Tensor, points: TaskPoints, rates: AnilSettings, adapts: Literal["head", "all"] = "head"
) -> NetParams:
    """Take one outer step of FO-ANIL, or of FO-MAML where all layers adapt, on all tasks (D eq. 2, 3).

    With g the slope of a task's loss in θ = Bw, the inner step is wᵢ = w − αBᵀg, and Bᵢ = B − αgwᵀ if it adapts.
    `rates.m_in` is not used: the points are counted.
    """
    alpha = rates.alpha
    runs, tasks, _, dimension = points.x_in.shape
    u = B @ w[..., None]
    errors = (points.x_in.flatten(1, 2) @ u).view_as(points.y_in) - points.y_in
    inner = _weighted(errors, points.x_in)
    heads = w[:, None] - alpha * (inner @ B)
    slopes = heads @ B.mT
    if adapts == "all":
        slopes = slopes - alpha * inner * (heads @ w[..., None])
    errors = torch.bmm(points.x_out.flatten(0, 1), slopes.view(runs * tasks, dimension, 1)).view_as(points.y_out)
    outer = _weighted(errors - points.y_out, points.x_out)
    descent = (outer.mean(1)[:, None] @ B)[:, 0]
    if adapts == "all":
        descent = descent - alpha * w * (inner * outer).sum(-1).mean(-1, keepdim=True)
    return B - rates.beta * (outer.mT @ heads) / tasks, w - rates.beta * descent


def _weighted(errors: Tensor, x: Tensor) -> Tensor:
    """Return Xᵀ(errors)/m of every task."""
    sums = torch.bmm(errors.flatten(0, 1)[:, None], x.flatten(0, 1))
    return sums.view(*x.shape[:2], x.shape[-1]) / x.shape[2]


def factorisation_loss(B: Tensor, W: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Burer–Monteiro's objective: the mean over tasks of ½‖XBwᵢ − y‖²/m, and ⅛‖BᵀB − WᵀW‖² (D eq. 12).

    The rows of `W` (tasks, k') are the heads; `x` is (tasks, points, d) and `y` (tasks, points).
    """
    errors = torch.bmm(x, (W @ B.mT)[..., None])[..., 0] - y
    return errors.square().mean() / 2 + balance({"features.weight": B.mT, "heads.weight": W})


class RepeatedStep:
    """A step taken again and again, which on a GPU is recorded once as a CUDA graph and replayed.

    >>> halved = RepeatedStep(lambda B, w: (B / 2, w / 2), (torch.ones(1, 1, 1), torch.ones(1, 1)))
    >>> halved.advance(3)
    >>> halved.state[0].item()
    0.125
    """

    def __init__(self, step: Callable[[Tensor, Tensor], NetParams], start: NetParams) -> None:
        self.step = step
        self.state: NetParams = (start[0].clone(), start[1].clone())
        self._recording: CapturedGraph[None] | None = None

    def advance(self, steps: int) -> None:
        """Take some steps, and return when they are done."""
        if steps and self._recording is None and self.state[0].is_cuda:
            self._recording = self._recorded()
        for _ in range(steps):
            if self._recording is None:
                self._once()
            else:
                self._recording.replay()
        if self._recording is not None:
            torch.cuda.synchronize()

    def _once(self) -> None:
        for place, value in zip(self.state, self.step(*self.state)):
            place.copy_(value)

    def _recorded(self) -> CapturedGraph[None]:
        before = [tensor.clone() for tensor in self.state]
        recording = CapturedGraph(self._once)
        for place, value in zip(self.state, before):
            place.copy_(value)
        return recording
