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
from metabridge.kernels import solve
from metabridge.kernels.empirical import Empirical
from metabridge.kernels.meta import Adapts, split_kernel

KernelName = Literal["maml", "anil", "ntk"]

_ADAPTS: dict[KernelName, Adapts] = {"maml": "all", "anil": "head"}
_AT_ONCE = 2**21  # numbers of inputs that go through the network in one pass


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

    >>> from metabridge.environments.datasets import load
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
            raise InputError(f"time is {self.time}, but λτ must be positive; math.inf adapts to the end.")
        if not (math.isfinite(self.ridge) and self.ridge >= 0):
            raise InputError(f"ridge is {self.ridge}, but must be 0 or a positive number.")

    def __call__(self, net: nn.Module, tasks: Episodes) -> Score:
        """The condition number for these tasks, of `net` at its own parameters."""
        return self.of_grams(self.grams(net, points(tasks)), len(tasks), tasks.query_x.shape[1])

    def grams(self, net: nn.Module, x: Tensor) -> Grams:
        """The kernels of `net` that the condition number is made of."""
        kernel = Empirical(net, outputs="sum")
        return Grams(kernel.ntk(x), kernel.nngp(x) if self.kernel == "anil" else None)

    def of_grams(self, grams: Grams, tasks: int, queries: int) -> Score:
        """The condition number out of Θ and K over the points of `tasks` tasks with so many queries each.

        What follows is small, so it is done in double precision; what counts as lost in rounding is decided by
        the precision that Θ and K were computed in.
        """
        table = _Table(_precise(grams.ntk), None if grams.nngp is None else _precise(grams.nngp))
        if not all(bool(gram.isfinite().all()) for gram in (table.theta, table.k) if gram is not None):
            return Score(math.nan, "the kernel holds values that are NaN or infinite")
        try:
            matrix = table.theta if self.kernel == "ntk" else self._between_tasks(table, tasks, queries)
        except InputError as error:  # of `adaptation`, which names the points that cannot be told apart
            return Score(math.inf, str(error))
        return condition_number(matrix, torch.finfo(grams.ntk.dtype).eps)

    def _between_tasks(self, table: _Table, tasks: int, queries: int) -> Tensor:
        places = torch.arange(len(table.theta)).view(tasks, -1)
        adapts = _ADAPTS[self.kernel]
        ends = places[:, :queries], places[:, queries:]
        return split_kernel(table, *ends, adapts=adapts, time=self.time, ridge=self.ridge)


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
    if not bool(matrix.isfinite().all()):
        return Score(math.nan, "the kernel holds values that are NaN or infinite")
    value = solve.condition_number(matrix, eps=eps)
    if math.isinf(value):
        return Score(value, f"the smallest of {len(matrix)} eigenvalues is lost in rounding")
    return Score(value)


@torch.no_grad()
def regions(net: nn.Module, inputs: Tensor) -> Score:
    """How many linear regions of `net` the inputs lie in: distinct patterns of its ReLUs being on or off (B eq. 15).

    LeakyReLU counts as well.

    >>> regions(nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1)), torch.zeros(5, 2))
    Score(value=1.0, trouble=None)
    """
    found: set[bytes] = set()
    for chunk in inputs.split(max(1, _AT_ONCE // inputs[0].numel())):
        with _Signs() as signs:
            outputs = net(chunk)
        if not signs.patterns:
            return Score(math.nan, "the network has no ReLU, so it has no linear regions to count")
        if not bool(outputs.isfinite().all()):
            return Score(math.nan, "the network's outputs are NaN or infinite")
        found.update(_rows(signs.patterns))
    return Score(float(len(found)))


class _Signs(TorchDispatchMode):
    """Notes where the input of every ReLU is positive, however the network calls it."""

    KINDS = tuple(getattr(torch.ops.aten, name).default for name in ("relu", "relu_", "leaky_relu", "leaky_relu_"))

    def __init__(self) -> None:
        super().__init__()
        self.patterns: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in self.KINDS:
            self.patterns.append((args[0] > 0).flatten(1))
        return func(*args, **(kwargs or {}))


def _rows(patterns: list[Tensor]) -> Iterator[bytes]:
    """Every sample's pattern, eight signs to a byte."""
    bits = torch.cat(patterns, 1)
    bits = nn.functional.pad(bits, (0, -bits.shape[1] % 8)).unflatten(1, (-1, 8))
    weights = 2 ** torch.arange(8, device=bits.device, dtype=torch.uint8)
    packed = (bits * weights).sum(-1, dtype=torch.uint8)
    return map(bytes, packed.cpu().numpy())
