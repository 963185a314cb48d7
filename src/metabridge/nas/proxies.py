"""What an untrained network promises: a well-conditioned kernel, and many linear regions (B §5).

A proxy that cannot be told is not a number: its `Score` says why, and whoever ranks puts it last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from metabridge.episodes import Episodes
from metabridge.errors import InputError
from metabridge.kernels import kernel_systems
from metabridge.kernels.empirical import EmpiricalKernel
from metabridge.kernels.meta_kernels import Adapts, residual_operator, sandwich

KernelName = Literal["maml", "anil", "ntk"]

_ADAPTS: dict[KernelName, Adapts] = {"maml": "all", "anil": "head"}
NOT_FINITE = "the network's outputs are NaN or infinite"
_AT_ONCE = 2**21  # numbers of inputs that go through the network in one pass
_AT_ZERO, _AT_BOTH_ENDS = (  # operations by where their slope changes
    {getattr(torch.ops.aten, name).default for name in names}
    for names in (("relu", "relu_", "leaky_relu", "leaky_relu_", "_prelu_kernel"), ("hardtanh", "hardtanh_"))
)


@dataclass(frozen=True)
class Score:
    """A proxy's value, or the `trouble` for which there is none to trust.

    >>> mean([Score(2.0), Score(4.0)])
    Score(value=3.0, trouble=None)
    >>> mean([Score(2.0), Score(math.inf, "the smallest eigenvalue is lost in rounding")]).trouble
    'the smallest eigenvalue is lost in rounding'
    """

    value: float
    trouble: str | None = None

    def __post_init__(self) -> None:
        if self.trouble is None and not math.isfinite(self.value):
            object.__setattr__(self, "trouble", f"the value is {self.value}")


def mean(scores: Sequence[Score]) -> Score:
    """The mean over repeats; one that is in trouble puts all of it there."""
    trouble = next((score.trouble for score in scores if score.trouble is not None), None)
    return Score(math.nan if trouble else sum(score.value for score in scores) / len(scores), trouble)


class Grams(NamedTuple):
    """Θ over the points of all tasks, each task's queries before its supports, and K where the head adapts."""

    ntk: Tensor
    nngp: Tensor | None


@dataclass(frozen=True)
class Conditioning:
    """The condition number σ_max/σ_min of a kernel of the network as it is (B eq. 14), the lower the better.

    - kernel="maml", "anil": the MetaNTK between the queries of all tasks (B eq. 106 and 112), after `time` λτ of
      adaptation, with `ridge` added to what is inverted
    - kernel="ntk": Θ over all images, as in TE-NAS

    Gradients are those of the summed outputs.

    >>> from metabridge.datasets import load
    >>> from metabridge.models import mlp
    >>> tasks = load("glyphs").tasks("train", shots=1, queries=1).sample(3, torch.Generator().manual_seed(0))
    >>> Conditioning("maml")(mlp(28 * 28, 5), tasks).value > 1
    True
    """

    kernel: KernelName = "maml"
    time: float = math.inf
    ridge: float = 1e-3

    def __post_init__(self) -> None:
        if self.kernel not in get_args(KernelName):
            wanted = ", ".join(map(repr, get_args(KernelName)))
            raise InputError(f"kernel is {self.kernel!r}, but must be one of {wanted}.")
        if not self.time > 0:
            raise InputError(f"time is {self.time}, but λτ must be positive; inf adapts to the end.")
        if not (math.isfinite(self.ridge) and self.ridge >= 0):
            raise InputError(f"ridge is {self.ridge}, but must be 0 or a positive number.")

    def __call__(self, net: nn.Module, tasks: Episodes) -> Score:
        """The condition number for these tasks, of `net` at its own parameters."""
        x = points(tasks)
        with torch.no_grad():
            if not _finite(net(x)):
                return Score(math.nan, NOT_FINITE)
        return self.of_grams(self.grams(net, x), len(tasks), tasks.query_x.shape[1])

    def grams(self, net: nn.Module, x: Tensor) -> Grams:
        """The kernels of `net` that the condition number is made of."""
        kernel = EmpiricalKernel(net, outputs="sum")
        return Grams(kernel.ntk(x), kernel.nngp(x) if self.kernel == "anil" else None)

    def of_grams(self, grams: Grams, tasks: int, queries: int) -> Score:
        """The condition number out of Θ and K over the points of `tasks` tasks with so many queries each.

        What follows is small, so it is done in double precision; what counts as lost in rounding is decided by
        the precision that Θ and K were computed in.
        """
        eps = torch.finfo(grams.ntk.dtype).eps
        table = _Table(_precise(grams.ntk), None if grams.nngp is None else _precise(grams.nngp))
        if not all(_finite(gram) for gram in (table.theta, table.k) if gram is not None):
            return Score(math.nan, "the kernel holds values that are NaN or infinite")
        if self.kernel == "ntk":
            return condition_number(table.theta, eps)
        try:
            return self._between_tasks(table, torch.arange(len(table.theta)).view(tasks, -1), queries, eps)
        except InputError as error:  # `adaptation_operator` names the points that cannot be told apart
            return Score(math.inf, str(error))

    def _between_tasks(self, table: _Table, places: Tensor, queries: int, eps: float) -> Score:
        """The condition number of Φ = RΘRᵀ, to which Θ brings errors of eps σ_max(Θ) ‖R‖², however small Φ is."""
        ends = places[:, :queries], places[:, queries:]
        left = residual_operator(table, *ends, _ADAPTS[self.kernel], self.time, self.ridge, eps)
        matrix = sandwich(left, table.theta, left)
        theta, phi = (float(torch.linalg.matrix_norm(each, 2)) for each in (table.theta, matrix))
        error = eps * theta * float(torch.linalg.matrix_norm(left, 2).max()) ** 2
        return condition_number(matrix, error / phi if phi else math.inf)


@dataclass(frozen=True, eq=False)
class _Table:
    """A kernel that is known at some points; points are given as their places."""

    theta: Tensor
    k: Tensor | None

    def ntk(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        return self.theta[x][:, x if z is None else z]

    def nngp(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        assert self.k is not None
        return self.k[x][:, x if z is None else z]

    def both(self, x: Tensor, z: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.ntk(x, z), self.nngp(x, z)


def _precise(gram: Tensor) -> Tensor:
    return gram.detach().double().cpu()


def points(tasks: Episodes) -> Tensor:
    """The points of all tasks, task after task, each task's queries before its supports."""
    return torch.cat([tasks.query_x, tasks.support_x], 1).flatten(0, 1)


def condition_number(matrix: Tensor, eps: float) -> Score:
    """σ_max/σ_min of a positive semi-definite matrix whose entries are right to `eps`, relative to the largest.

    >>> condition_number(torch.diag(torch.tensor([1.0, 4.0])), eps=1e-7)
    Score(value=4.0, trouble=None)
    >>> condition_number(torch.ones(2, 2), eps=1e-7).trouble
    'the smallest of 2 eigenvalues is lost in rounding'
    """
    if not _finite(matrix):
        return Score(math.nan, "the kernel holds values that are NaN or infinite")
    value = kernel_systems.condition_number(matrix, eps=eps)
    if math.isinf(value):
        return Score(value, f"the smallest of {len(matrix)} eigenvalues is lost in rounding")
    return Score(value)


@torch.no_grad()
def regions(net: nn.Module, inputs: Tensor) -> Score:
    """How many linear regions of `net` the inputs lie in: distinct patterns of its ReLUs being on or off (B eq. 15).

    LeakyReLU and PReLU count as well, ReLU6 and Hardtanh by both of their bends.

    >>> regions(nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1)), torch.zeros(5, 2))
    Score(value=1.0, trouble=None)
    """
    if not len(inputs):
        raise InputError("inputs is empty, but regions are counted by the inputs that lie in them. Give some.")
    for name, layer in net.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and (layer.training or layer.running_mean is None):
            raise InputError(
                f"batch norm {name!r} normalises by the batch, so that an input's region depends on the others. "
                "Use net.eval(), or metabridge.models.with_group_norm(net)."
            )
    found: set[bytes] = set()
    for chunk in inputs.split(max(1, _AT_ONCE // inputs[0].numel())):
        with _Signs() as signs:
            outputs = net(chunk)
        if not signs.patterns:
            return Score(math.nan, "the network has no ReLU, so it has no linear regions to count")
        if not _finite(outputs):
            return Score(math.nan, NOT_FINITE)
        found.update(_rows(signs.patterns))
    return Score(float(len(found)))


def _finite(values: Tensor) -> bool:
    return bool(values.isfinite().all())


def _bends(func: Callable[..., Any], options: Sequence[float]) -> Sequence[float]:
    """Where the slope of an operation changes, if it is a ReLU or one of its like."""
    if func in _AT_ZERO:
        return (0.0,)
    return (*options, *(-1.0, 1.0)[len(options) :]) if func in _AT_BOTH_ENDS else ()


class _Signs(TorchDispatchMode):
    """Notes on which side of every bend the inputs of ReLUs and their like are, however the network calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.patterns: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.patterns += [(args[0] > bend).flatten(1) for bend in _bends(func, args[1:])]
        return func(*args, **(kwargs or {}))


def _rows(patterns: list[Tensor]) -> Iterator[bytes]:
    """Every sample's pattern, eight signs to a byte."""
    bits = torch.cat(patterns, 1)
    bits = nn.functional.pad(bits, (0, -bits.shape[1] % 8)).unflatten(1, (-1, 8))
    weights = 2 ** torch.arange(8, device=bits.device, dtype=torch.uint8)
    packed = (bits * weights).sum(-1, dtype=torch.uint8)
    return map(bytes, packed.cpu().numpy())
