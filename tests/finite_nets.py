"""Small networks of many kinds, and their empirical kernels computed by definition, from full Jacobians."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F

from metabridge.errors import InputError
from metabridge.kernels import layer_overrides
from metabridge.kernels.empirical import EmpiricalKernel
from metabridge.kernels.strategy import KernelProblem
from metabridge.models import conv4, estimate_statistics, mlp, resnet12
from metabridge.models.network import with_group_norm


class Unusual(nn.Module):
    """A layer that is used twice, tied weights, a grouped convolution, and parameters outside of known layers."""

    def __init__(self) -> None:
        super().__init__()
        self.spread = nn.Conv2d(2, 4, 3, stride=2, padding="valid", dilation=2, groups=2)
        self.mirror = nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")
        self.twice, self.tied, self.loose = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.tied.weight = self.twice.weight
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.unused = nn.Parameter(torch.ones(2))
        self.norm, self.relu, self.last = nn.LayerNorm(4), nn.ReLU(inplace=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.mirror(self.spread(x)))
        x = self.twice(self.norm(x.flatten(2).mT)).tanh()  # a linear layer at several positions
        x = self.tied(self.twice(x).tanh()).mean(1) * self.scale
        return self.last(F.linear(x.tanh() + self.loose(x), self.loose.weight))


class Branching(nn.Module):
    """Two branches of convolution, norm and max pooling, one with overlapping windows, one with ReLU before pooling."""

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
        outputs = self.plain(x), self.rectified(x)
        return self.head(torch.cat([output.square().mean((2, 3)) for output in outputs], 1))  # type: ignore[no-any-return]


class DiscardedOutput(nn.Module):
    """Norms of maps and of vectors, max pooling with overlapping windows, and a layer whose output is discarded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.pool, self.second = nn.MaxPool2d(3, 2, padding=1), nn.Conv2d(4, 6, 3)
        self.discarded, self.vector_norm, self.head = nn.Linear(6, 2), nn.GroupNorm(3, 6), nn.Linear(6, 3)
        for value in self.parameters():
            nn.init.normal_(value)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.pool(self.norm(self.first(x)).tanh())).mean((2, 3))
        self.discarded(x)
        return self.head(self.vector_norm(x).tanh())  # type: ignore[no-any-return]


def with_running_statistics(net: nn.Module, x: Tensor) -> nn.Module:
    estimate_statistics(net, [x])
    return net.eval()


def random_normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


def small_conv4(statistics: str) -> nn.Module:
    return conv4(2, 16, 3, filters=4, statistics=statistics).double()  # type: ignore[arg-type]


def small_resnet12() -> nn.Module:
    return resnet12(2, 16, 3, widths=(4, 6, 6, 8)).double()


def build_seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().double()


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: mlp(5, 3, width=7).double(), (5,)),
    "mlp without bias": (lambda: mlp(5, 3, width=7, depth=1, activation="tanh", bias=False).double(), (5,)),
    "conv4, evaluation mode": (
        lambda: with_running_statistics(small_conv4("running"), random_normal(9, 8, 2, 16, 16)),
        (2, 16, 16),
    ),
    "conv4, group norm": (lambda: with_group_norm(small_conv4("batch"), groups=2), (2, 16, 16)),
    "resnet12, evaluation mode": (
        lambda: with_running_statistics(small_resnet12(), random_normal(9, 8, 2, 16, 16)),
        (2, 16, 16),
    ),
    "resnet12, group norm": (lambda: with_group_norm(small_resnet12()).eval(), (2, 16, 16)),
    "unusual": (lambda: build_seeded(Unusual), (2, 9, 9)),
    "branching": (lambda: build_seeded(Branching), (2, 11, 11)),
    "discarded output": (lambda: build_seeded(DiscardedOutput), (2, 9, 9)),
}
OUTPUTS = ("mean", "sum", "full")  # see `explicit_kernel`
STRATEGIES = ("gradients", "products")  # two ways in which `EmpiricalKernel` can compute the same kernel


def explicit_kernel(net: nn.Module, x: Tensor, z: Tensor, outputs: str, keep: Callable[[str], bool]) -> Tensor:
    """Return the NTK between inputs x and z of the parameters whose names `keep` accepts, from the full Jacobians.

    `outputs` is "full" for the kernel of every pair of outputs, "mean" for the mean over the pairs of an output with
    itself, and "sum" for the sum over all pairs.
    """
    params = {name: value.detach() for name, value in net.named_parameters() if keep(name)}

    def jacobian(batch: Tensor) -> Tensor:
        rows = [jacrev(lambda p: functional_call(net, p, (value[None],))[0])(params) for value in batch]  # noqa: B023
        return torch.stack([torch.cat([value.flatten(1) for value in row.values()], 1) for row in rows])

    full = torch.einsum("iop,jup->ijou", jacobian(x), jacobian(z))
    if outputs == "mean":
        return full.diagonal(dim1=2, dim2=3).mean(-1)
    return full.sum((2, 3)) if outputs == "sum" else full


def relative_error(value: Tensor, exact: Tensor) -> float:
    assert value.shape == exact.shape
    return float((value - exact.detach()).norm() / exact.detach().norm())


def minimum_memory(kernel: EmpiricalKernel, x: Tensor) -> int:
    """Return the smallest memory limit, to a few percent, with which the kernel can be computed."""
    profile, memory = kernel._prepare(kernel.part, x, None)[1].profile, 2**10
    while True:
        try:
            problem = KernelProblem(profile, kernel.outputs, memory, len(x), len(x), True, layer_overrides.on_cpu(x))
            kernel._choose_strategy(problem, kernel.strategy)
        except InputError:
            memory += memory // 16
        else:
            return memory
