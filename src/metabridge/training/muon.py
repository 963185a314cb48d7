"""The Muon optimizer: orthogonalized momentum for convolutions (Jordan et al. 2024), SGD for everything else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from metabridge.cuda_graph import CapturedGraph
from metabridge.errors import check_not_negative, check_positive

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # coefficients of a polynomial that moves singular values in (0, 1] towards 1
ITERATIONS = 3  # number of times that the polynomial is applied
FILTER_RATE = 0.1  # ratio of the learning rates of filter banks and of SGD


class Muon(Optimizer):
    """SGD with Nesterov momentum that takes semi-orthogonal steps for the weights of convolutions.

    The filter bank of a convolution, of shape (out, in, height, width), is treated as a matrix with `out` rows. Before
    each step it is rescaled to norm √out, which does not change the outputs if batch norm follows. Its step has
    singular values near 1 and the learning rate `0.1 * lr`. All other parameters are trained by SGD, including
    convolutions whose filters have one input channel, such as depthwise ones.

    On a GPU, the first step runs eagerly, and each later step replays a CUDA graph.

    Args:
        params: Parameters to train.
        lr: Learning rate of SGD.
        momentum: Decay of the momentum.
        weight_decay: Weight decay of SGD. Filter banks have none, since their norm is fixed.

    Raises:
        InputError: If `lr` is not positive or `weight_decay` is negative.

    >>> layer = torch.nn.Conv2d(3, 8, 3)
    >>> optimizer = Muon(layer.parameters(), lr=0.1)
    >>> layer(torch.randn(2, 3, 8, 8)).square().mean().backward()
    >>> optimizer.step()
    """

    def __init__(self, params: Iterable[Any], lr: float, *, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        check_positive("lr", lr)
        check_not_negative("weight_decay", weight_decay)
        self._graphed_update: _GraphedUpdate | None = None
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step with the gradients of the parameters.

        Args:
            closure: Not used.
        """
        params = [param for group in self.param_groups for param in group["params"]]
        is_first_step = not self.state
        for param in params:
            if param not in self.state:
                self.state[param]["momentum_buffer"] = torch.zeros_like(param)
        if is_first_step or params[0].device.type != "cuda":
            self.update({param: _grad(param) for param in params}, [group["lr"] for group in self.param_groups])
            return
        if self._graphed_update is None:
            self._graphed_update = _GraphedUpdate(self, params)
        self._graphed_update.replay()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the momentum.

        Args:
            state_dict: The state, from a call of `state_dict`.
        """
        super().load_state_dict(state_dict)
        self._graphed_update = None  # the CUDA graph reads the replaced tensors

    def update(self, grads: dict[Tensor, Tensor], rates: Sequence[float | Tensor]) -> None:
        """Update parameters and momentum in place.

        Args:
            grads: Gradient of each parameter.
            rates: Learning rate of each parameter group.
        """
        for group, rate in zip(self.param_groups, rates):
            banks = [param for param in group["params"] if is_filter_bank(param)]
            sgd_params = [param for param in group["params"] if not is_filter_bank(param)]
            if sgd_params:
                sgd_grads = [grads[param] for param in sgd_params]
                decayed_grads = torch._foreach_add(sgd_grads, sgd_params, alpha=group["weight_decay"])
                steps = self._nesterov_steps(sgd_params, list(decayed_grads), group["momentum"])
                torch._foreach_sub_(sgd_params, torch._foreach_mul(steps, rate))
            if banks:
                steps = self._nesterov_steps(banks, [grads[param] for param in banks], group["momentum"])
                norms = torch._foreach_norm(banks)
                torch._foreach_mul_(banks, [len(bank) ** 0.5 / norm for bank, norm in zip(banks, norms)])
                torch._foreach_sub_(banks, torch._foreach_mul(orthogonalize(steps), rate * FILTER_RATE))

    def _nesterov_steps(self, params: list[Tensor], grads: list[Tensor], decay: float) -> list[Tensor]:
        """Update the momentum buffers with the gradients, and return the steps of Nesterov momentum."""
        buffers = [self.state[param]["momentum_buffer"] for param in params]
        torch._foreach_mul_(buffers, decay)
        torch._foreach_add_(buffers, grads)
        return list(torch._foreach_add(grads, buffers, alpha=decay))


def is_filter_bank(param: Tensor) -> bool:
    """Return whether a parameter is the weight of a 2D convolution whose filters have several input channels."""
    return param.ndim == 4 and param.shape[1] > 1


def orthogonalize(banks: Sequence[Tensor]) -> list[Tensor]:
    """Return filter banks with the same singular vectors, but with singular values near 1.

    Banks of the same shape are computed as one batch.

    >>> bank = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    >>> bool((torch.linalg.svdvals(orthogonalize([bank])[0].flatten(1)) - 1).abs().max() < 0.5)
    True
    """
    result: dict[int, Tensor] = {}
    for shape in {bank.shape: None for bank in banks}:
        indices = [index for index, bank in enumerate(banks) if bank.shape == shape]
        matrices = torch.stack([banks[index].flatten(1) for index in indices])
        for index, matrix in zip(indices, _newton_schulz(matrices)):
            result[index] = matrix.view(shape)
    return [result[index] for index in range(len(banks))]


def _newton_schulz(matrices: Tensor) -> Tensor:
    """Return matrices with the same singular vectors, but with singular values near 1."""
    is_wide = matrices.shape[1] <= matrices.shape[2]
    x = matrices if is_wide else matrices.mT
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    if x.device.type == "cuda":
        x = x.bfloat16()  # precise enough, since the result is only approximately orthogonal
    a, b, c = NEWTON_SCHULZ
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)  # ax + (bG + cG²)x
    return (x if is_wide else x.mT).to(matrices.dtype)


def _grad(param: Tensor) -> Tensor:
    """Return the gradient of a parameter, zero if it has none."""
    return torch.zeros_like(param) if param.grad is None else param.grad


class _GraphedUpdate:
    """The update as a CUDA graph, which reads gradients and learning rates from fixed tensors."""

    def __init__(self, optimizer: Muon, params: list[Tensor]) -> None:
        self.optimizer, self.params = optimizer, params
        self.grads = {param: torch.zeros_like(param) for param in params}
        self.rates = [torch.zeros((), device=params[0].device) for _ in optimizer.param_groups]
        self._graph = CapturedGraph(lambda: optimizer.update(self.grads, self.rates), warmup=0)

    def replay(self) -> None:
        """Copy gradients and learning rates into the fixed tensors, and run the graph."""
        torch._foreach_copy_(list(self.grads.values()), [_grad(param) for param in self.params])
        for rate, group in zip(self.rates, self.optimizer.param_groups):
            rate.fill_(group["lr"])
        self._graph.replay()
