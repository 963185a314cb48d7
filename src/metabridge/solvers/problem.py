"""The inner problem of one task, and the default loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from metabridge.autodiff import grad
from metabridge.errors import describe
from metabridge.models.network import Params

Loss = Callable[[Tensor, Tensor], Tensor]


def task_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy for class labels, or ½ mean ‖prediction − target‖² for regression targets.

    Args:
        prediction: The outputs, (examples, outputs).
        target: Class labels, int64 (examples,), or regression targets, (examples, outputs).

    Returns:
        The loss, a scalar tensor.

    >>> import torch
    >>> import metabridge as mb
    >>> mb.task_loss(torch.zeros(2, 1), torch.tensor([[1.0], [3.0]]))
    tensor(2.5000)
    """
    if target.is_floating_point():
        return (prediction - target).square().sum(-1).mean() / 2
    return F.cross_entropy(prediction, target)


@dataclass(frozen=True, repr=False)
class Problem:
    """The inner problem of one task: fit `apply(params, x)` to `y` under `loss`.

    Args:
        apply: The function of parameters and `x` that computes the predictions: the network or its adapted last layers.
        loss: The loss of predictions and targets.
        x: The support inputs; if only the last layers are adapted, the features that enter these layers.
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

    def __repr__(self) -> str:
        return f"Problem(x: {describe(self.x)}, y: {describe(self.y)})"

    def support_loss(self, params: Params) -> Tensor:
        """Return the support loss ℓ(params).

        Args:
            params: The parameters of `apply`.

        Returns:
            The loss, a scalar tensor.
        """
        return self.loss(self.apply(params, self.x), self.y)

    def detached(self) -> Problem:
        """Return the same problem with detached `x`: no gradient flows to the layers that compute `x`."""
        return Problem(self.apply, self.loss, self.x.detach(), self.y)

    def grad(self, params: Params, *, exact: bool) -> Params:
        """Return the gradient of the support loss.

        Args:
            params: The parameters at which to compute the gradient.
            exact: Whether the gradient can itself be differentiated, for second derivatives. If false, it is a constant
                with the same value.

        Returns:
            The gradient by parameter name.
        """
        problem = self
        if not exact:
            problem, params = self.detached(), {name: value.detach() for name, value in params.items()}
        return grad(problem.support_loss, params)

    def one_hot_targets(self, outputs: int) -> Tensor:
        """Return the support targets as real values: class labels one-hot encoded, regression targets unchanged.

        Args:
            outputs: The number of outputs, one for each class. It is not used for regression targets.

        Returns:
            The targets, (examples, outputs). One-hot labels have the dtype of `x`.
        """
        if self.y.is_floating_point():
            return self.y
        # F.one_hot reads the values of the labels, which neither vmap nor a CUDA graph allows.
        return (self.y[:, None] == torch.arange(outputs, device=self.y.device)).to(self.x.dtype)
