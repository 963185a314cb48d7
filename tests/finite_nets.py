"""Small networks of every kind, and their kernels by definition."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F

from metabridge.errors import InputError
from metabridge.kernels import layer_overrides
from metabridge.kernels.empirical import EmpiricalKernel
from metabridge.kernels.strategy import Problem
from metabridge.models import conv4, estimate_statistics, mlp, resnet12
from metabridge.models.network import with_group_norm


class Odd(nn.Module):
    """A layer used twice, tied weights, a grouped convolution, and parameters that no known layer owns."""

    def __init__(self) -> None:
        super().__init__()
        self.spread = nn.Conv2d(2, 4, 3, stride=2, padding="valid", dilation=2, groups=2)
        self.mirror = nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")
        self.twice, self.tied, self.loose = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.tied.weight = self.twice.weight
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.unused = nn.Parameter(torch.ones(2))
        self.norm, self.rectifier, self.last = nn.LayerNorm(4), nn.ReLU(inplace=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.rectifier(self.mirror(self.spread(x)))
        x = self.twice(self.norm(x.flatten(2).mT)).tanh()  # a linear layer at several positions
        x = self.tied(self.twice(x).tanh()).mean(1) * self.scale
        return self.last(F.linear(x.tanh() + self.loose(x), self.loose.weight))


class Branching(nn.Module):
    """Two first convolutions whose normed maps are pooled, one with windows that overlap, one rectified in between."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Conv2d(2, 6, 3, stride=2, padding=1, padding_mode="circular")
        self.plain = nn.Sequential(first, nn.GroupNorm(3, 6), nn.MaxPool2d(3, 2, padding=1), nn.ReLU(inplace=True))
        norm = nn.BatchNorm2d(4).eval()
        self.rectified = nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.head = nn.Linear(6 + 4, 3)
        for value in self.parameters():
            nn.init.normal_(value)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.plain(x), self.rectified(x)
        return self.head(torch.cat([part.square().mean((2, 3)) for part in parts], 1))  # type: ignore[no-any-return]


class Wasteful(nn.Module):
    """Norms of maps and of vectors, windows that overlap behind them, and a layer whose output is thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.pool, self.second = nn.MaxPool2d(3, 2, padding=1), nn.Conv2d(4, 6, 3)
        self.spare, self.vectors, self.head = nn.Linear(6, 2), nn.GroupNorm(3, 6), nn.Linear(6, 3)
        for value in self.parameters():
            nn.init.normal_(value)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.pool(self.norm(self.first(x)).tanh())).mean((2, 3))
        self.spare(x)
        return self.head(self.vectors(x).tanh())  # type: ignore[no-any-return]


def running(net: nn.Module, x: Tensor) -> nn.Module:
    estimate_statistics(net, [x])
    return net.eval()


def seen(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


def conv4_of(statistics: str) -> nn.Module:
    return conv4(2, 16, 3, filters=4, statistics=statistics).double()  # type: ignore[arg-type]


def resnet12_of() -> nn.Module:
    return resnet12(2, 16, 3, widths=(4, 6, 6, 8)).double()


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().double()


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: mlp(5, 3, width=7).double(), (5,)),
    "mlp without bias": (lambda: mlp(5, 3, width=7, depth=1, activation="tanh", bias=False).double(), (5,)),
    "conv4, evaluation mode": (lambda: running(conv4_of("running"), seen(9, 8, 2, 16, 16)), (2, 16, 16)),
    "conv4, group norm": (lambda: with_group_norm(conv4_of("batch"), groups=2), (2, 16, 16)),
    "resnet12, evaluation mode": (lambda: running(resnet12_of(), seen(9, 8, 2, 16, 16)), (2, 16, 16)),
    "resnet12, group norm": (lambda: with_group_norm(resnet12_of()).eval(), (2, 16, 16)),
    "odd": (lambda: seeded(Odd), (2, 9, 9)),
    "branching": (lambda: seeded(Branching), (2, 11, 11)),
    "wasteful": (lambda: seeded(Wasteful), (2, 9, 9)),
}
OUTPUTS = ("mean", "sum", "full")
WAYS = ("gradients", "products")


def explicit(net: nn.Module, x: Tensor, z: Tensor, outputs: str, keep: Callable[[str], bool]) -> Tensor:
    """Θ from whole Jacobians, one sample and one output after another."""
    params = {name: value.detach() for name, value in net.named_parameters() if keep(name)}

    def jacobian(points: Tensor) -> Tensor:
        rows = [jacrev(lambda p: functional_call(net, p, (point[None],))[0])(params) for point in points]  # noqa: B023
        return torch.stack([torch.cat([value.flatten(1) for value in row.values()], 1) for row in rows])

    full = torch.einsum("iop,jup->ijou", jacobian(x), jacobian(z))
    if outputs == "mean":
        return full.diagonal(dim1=2, dim2=3).mean(-1)
    return full.sum((2, 3)) if outputs == "sum" else full


def error(found: Tensor, exact: Tensor) -> float:
    assert found.shape == exact.shape
    return float((found - exact.detach()).norm() / exact.detach().norm())


def least(kernel: EmpiricalKernel, x: Tensor) -> int:
    """The least memory, to a few per cent, that the kernel does not refuse."""
    survey, memory = kernel._survey(kernel.part, x, None)[1].survey, 2**10
    while True:
        try:
            kernel._plan(
                Problem(survey, kernel.outputs, memory, len(x), len(x), True, layer_overrides.cached(x)), kernel.way
            )
        except InputError:
            memory += memory // 16
        else:
            return memory
