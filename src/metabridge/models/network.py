"""The contract of a model: `features`, any module, followed by a linear `head`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from metabridge.autodiff import transforming
from metabridge.errors import InputError
from metabridge.models.norm import Statistics, replace_batch_norm

Params = dict[str, Tensor]


class Network(nn.Module):
    """Features φ_θ(x) followed by a linear head w.

    >>> net = Network(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 5))
    >>> net(torch.randn(3, 4)).shape
    torch.Size([3, 5])
    """

    def __init__(self, features: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in features.modules()):
            raise InputError(
                "features holds PyTorch batch norms, whose second-order gradients are wrong under vmap. "
                "Use Network.around(features, example, outputs, statistics=...), which replaces them in a copy."
            )
        self.features, self.head = features, head

    @classmethod
    def around(
        cls, features: nn.Module, example: Tensor, outputs: int, *, statistics: Statistics = "batch", seed: int = 0
    ) -> Network:
        """Put a new head on a copy of any module that maps `example` to (points, dimension).

        >>> Network.around(nn.Flatten(), torch.zeros(2, 3, 4, 4), outputs=5).head
        Linear(in_features=48, out_features=5, bias=True)
        """
        features = replace_batch_norm(features, statistics)
        with torch.no_grad():
            shape = tuple(features(example).shape)
        if len(shape) != 2 or shape[0] != len(example):
            raise InputError(
                f"features maps an example of shape {tuple(example.shape)} to {shape}, but must give "
                f"({len(example)}, dimension). Add nn.Flatten() or global pooling at its end."
            )
        with seeded(seed):
            return cls(features, nn.Linear(shape[1], outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return the head's outputs for `x`."""
        return self.head(self.features(x))  # type: ignore[no-any-return]


def apply_features(net: Network, params: Params, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """φ_θ(x) with the `features.` part of `params`, computed in `dtype` and returned in x's own."""
    prefix = "features."
    body = {name[len(prefix) :]: value for name, value in params.items() if name.startswith(prefix)}
    if x.ndim == 4 and x.device.type == "cpu" and not transforming():
        x = x.to(memory_format=torch.channels_last)  # PyTorch's convolutions and poolings are faster so on a CPU
    if dtype is None or dtype == x.dtype:
        return functional_call(net.features, body, (x,))  # type: ignore[no-any-return]
    low = {name: value.to(dtype) for name, value in body.items()}
    return functional_call(net.features, low, (x.to(dtype),)).to(x.dtype)  # type: ignore[no-any-return]


def apply_head(params: Params, features: Tensor) -> Tensor:
    """The head's outputs for features; a head without `head.bias` has none."""
    return F.linear(features, params["head.weight"], params.get("head.bias"))


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw initial weights from `seed`, leaving the global random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
