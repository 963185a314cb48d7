"""The inner problem of one task, and the default loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from metabridge.autodiff import grad
from metabridge.models.network import Params

Loss = Callable[[Tensor, Tensor], Tensor]


def task_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy for class labels, or ½ mean ‖prediction − target‖² for values.

    Args:
        prediction: The outputs, (points, outputs).
        target: Class labels, int64 (points,), or values, (points, outputs).

    Returns:
        The loss, a scalar tensor.

    >>> import torch
    >>> task_loss(torch.zeros(2, 1), torch.tensor([[1.0], [3.0]]))
    tensor(2.5000)
    """
    if target.is_floating_point():
        return (prediction - target).square().sum(-1).mean() / 2
    return F.cross_entropy(prediction, target)


@dataclass(frozen=True)
class Problem:
    """The inner problem of one task: fit `apply(params, x)` to `y` under `loss`.

    Args:
        apply: The function of parameters and inputs that is fitted.
        loss: The loss of predictions and targets.
        x: The support inputs, or their features.
        y: The support targets.

    >>> import torch
    >>> problem = Problem(lambda params, x: x * params["a"], task_loss, torch.ones(4, 1), torch.ones(4, 1))
    >>> problem.support_loss({"a": torch.zeros(())})
    tensor(0.5000)
    """

    apply: Callable[[Params, Tensor], Tensor]
    loss: Loss
    x: Tensor
    y: Tensor

    def support_loss(self, params: Params) -> Tensor:
        """Return the support loss ℓ(params)."""
        return self.loss(self.apply(params, self.x), self.y)

    def detached(self) -> Problem:
        """Return the same problem with its inputs as constants."""
        return Problem(self.apply, self.loss, self.x.detach(), self.y)

    def grad(self, params: Params, *, exact: bool) -> Params:
        """Return the gradient of the support loss, as a constant unless `exact`."""
        problem = self
        if not exact:
            problem, params = self.detached(), {name: value.detach() for name, value in params.items()}
        return grad(problem.support_loss, params)

    def one_hot_targets(self, outputs: int) -> Tensor:
        """Return class labels one-hot in the dtype of `x`; return values as they are."""
        if self.y.is_floating_point():
            return self.y
        # F.one_hot reads the labels, which neither vmap nor a CUDA graph allows
        return (self.y[:, None] == torch.arange(outputs, device=self.y.device)).to(self.x.dtype)
