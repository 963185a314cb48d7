"""Kernels of a network as it is: inner products of the gradients of its outputs.

J_o(x) = ∂f_o(x)/∂θ, and Θ_ou(x, z) = J_o(x)·J_u(z) for outputs o and u. A gradient belongs to one sample
only where samples do not mix, so batch norm must use fixed statistics (evaluation mode, which is what is
used for a net as given) or be replaced by group norm (`with_group_norm`, which is another network).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from metabridge.cuda_graph import CapturedGraph
from metabridge.errors import InputError, check_positive, describe
from metabridge.kernels.cost_model import Survey, examine, saved_bytes
from metabridge.kernels.gradient_products import Outputs, inner
from metabridge.kernels.jacobian import Gradients, Rows
from metabridge.kernels.layer_overrides import cached
from metabridge.kernels.ntk_vector_products import by_products
from metabridge.kernels.strategy import Plan, Problem, Way
from metabridge.models.batch_norm import BatchNorm
from metabridge.models.drop_path import Drop
from metabridge.models.network import Network, Params, call_with_params, frozen_names

log = logging.getLogger("metabridge")

Part = Literal["all", "head", "body"]

PLAIN = (bool, int, float, str)  # what a layer is told, also several at once: its window, its mode, ...


@dataclass
class _Seen:
    """What was found out about a network in some state, and a recording of what was last computed.

    Its tensors are kept, so that no others take their places.
    """

    state: tuple[object, ...]
    tensors: list[Tensor]
    names: frozenset[str]
    survey: Survey
    recordable: bool  # as a computation on a GPU is, unless it has failed
    pushable: bool = True  # unless products of the kernel with a vector have failed
    sizes: tuple[int, int | None] | None = None  # of what was last computed
    recording: _Replayed | None = None


class _Replayed:
    """A kernel's computation on a GPU, recorded in the precision that is set at that time, with samples of its own."""

    def __init__(self, compute: Callable[[Tensor, Tensor | None], Tensor], x: Tensor, z: Tensor | None) -> None:
        self._x, self._z = x.clone(), None if z is None else z.clone()
        self._recording = CapturedGraph(lambda: compute(self._x, self._z), warmup=1)

    def __call__(self, x: Tensor, z: Tensor | None) -> Tensor:
        self._x.copy_(x)
        if z is not None and self._z is not None:
            self._z.copy_(z)
        return self._recording.replay().clone()


@dataclass(frozen=True, eq=False)
class EmpiricalKernel:
    """The empirical kernels of `net` at `params` (its own unless given), with k outputs reduced in one of three ways.

    - outputs="mean": Θ(x, z) = (1/k) Σ_o J_o(x)·J_o(z), the kernel per output, (n, m)
    - outputs="sum": Θ(x, z) = (Σ_o J_o(x))·(Σ_u J_u(z)), of the summed outputs as in TE-NAS and MetaNTK-NAS, (n, m)
    - outputs="full": Θ_ou(x, z) = J_o(x)·J_u(z), (n, m, k, k)

    `part` says which parameters the gradients are of: all, those of the head (the linear layer whose outputs
    are the network's), or the body, all but the head's. Those with `requires_grad=False` in the network are left out
    in each case. Computing takes at most about `memory` bytes beside
    inputs and result. `way` is chosen by estimated cost: gradients layer by layer, or NTK-vector products
    J(x)(J(z)ᵀe), which need no more than one gradient at a time. Products need forward-mode derivatives under `vmap`,
    which some operations lack (recurrent layers, fused attention, weight norm): way="auto" then uses gradients.

    What a network does with a sample is looked at once, and again when its parameters or layers have changed. On a
    GPU a computation that is asked for a second time, with as many samples of the same shape, is recorded and from
    then on replayed, if the memory holds all samples and all layers are PyTorch's; its memory stays taken, and its
    precision (TF32 or not) is that of the recording.

    >>> net = nn.Sequential(nn.Linear(2, 3, bias=False))
    >>> EmpiricalKernel(net).ntk(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
    tensor([[5., 2.],
            [2., 1.]])
    """

    net: nn.Module
    params: Params | None = None
    part: Part = "all"
    outputs: Outputs = "mean"
    memory: int = 2**30
    way: Way = "auto"
    _seen: dict[tuple[Part, torch.Size], _Seen] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_positive("memory", self.memory)
        for name, kinds in (("part", Part), ("outputs", Outputs), ("way", Way)):
            if getattr(self, name) not in get_args(kinds):
                wanted = ", ".join(map(repr, get_args(kinds)))
                raise InputError(f"{name} is {getattr(self, name)!r}, but must be one of {wanted}.")
        _check_network(self.net, self._params())

    def __getstate__(self) -> dict[str, object]:
        """What a copy takes with it: no recordings, which lie on a GPU."""
        return {**vars(self), "_seen": {}}

    def ntk(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Θ(x, z), or Θ(x, x), which is exactly symmetric; its shape is as `outputs` says.

        >>> net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
        >>> EmpiricalKernel(net, outputs="full").ntk(torch.randn(4, 2), torch.randn(5, 2)).shape
        torch.Size([4, 5, 3, 3])
        """
        return self._ntk(self.part, x, z)

    def _ntk(self, part: Part, x: Tensor, z: Tensor | None) -> Tensor:
        gradients, seen = self._survey(part, x, z)
        sizes = len(x), None if z is None else len(z)
        if seen.recording is not None and seen.sizes == sizes:
            result = seen.recording(x, z)
            _check_values(x, z)  # while the GPU is at work
            return result
        _check_values(x, z)
        n, m = len(x), len(x if z is None else z)
        problem = Problem(seen.survey, self.outputs, self.memory, n, m, z is None, cached(x))
        plan = self._plan(problem, self.way if seen.pushable else "gradients")
        if plan.way == "products":
            try:
                return self._computed(gradients, seen.survey.outputs, plan, x, z)
            except RuntimeError as error:
                self._check_products(error)
                seen.pushable = False
                plan = self._plan(problem, "gradients")
        compute = partial(self._computed, gradients, seen.survey.outputs, plan)
        again, seen.sizes, seen.recording = seen.sizes == sizes, sizes, None
        if again and seen.recordable and plan.chunk >= max(n, m) and _replayable(self.net, seen.survey, plan):
            try:
                seen.recording = _Replayed(compute, x, z)
            except RuntimeError as error:
                log.warning("this kernel cannot be recorded as a CUDA graph and is computed anew each time: %s", error)
                seen.recordable = False
            else:
                return seen.recording(x, z)
        return compute(x, z)

    def _check_products(self, error: RuntimeError) -> None:
        """Raise a clear error if gradients must not be used instead of products, which have failed."""
        if isinstance(error, torch.OutOfMemoryError):
            raise error
        if self.way == "products":
            raise InputError(
                "way is 'products', but this network has an operation without forward-mode derivatives under vmap "
                f"({str(error).splitlines()[0]}). Use way='gradients' or way='auto'."
            ) from error

    def _computed(self, gradients: Gradients, outputs: int, plan: Plan, x: Tensor, z: Tensor | None) -> Tensor:
        n, m = len(x), len(x if z is None else z)
        r = outputs if self.outputs == "full" else 1
        result = x.new_zeros(n * r, m * r)
        if plan.way == "products":
            by_products(gradients, plan, self.outputs, x, z, result.view(n, r, m, r))
        else:
            self._by_gradients(gradients, plan, outputs, x, z, result)
        if z is None:
            result = result.triu() + result.triu(1).mT
        if self.outputs == "full":
            return result.view(n, r, m, r).transpose(1, 2)
        return result / (outputs if self.outputs == "mean" else 1)

    def nngp(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """K(x, z), the part of Θ that the head's weights and bias make: φ(x)·φ(z), + 1 with a bias, per output.

        >>> net = nn.Sequential(nn.Linear(2, 3, bias=False))
        >>> EmpiricalKernel(net).nngp(torch.tensor([[1.0, 2.0]]))
        tensor([[5.]])
        """
        return self._ntk("head", x, z)

    def both(self, x: Tensor, z: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Θ(x, z) and K(x, z)."""
        return self.ntk(x, z), self.nngp(x, z)

    def jacobian(self, x: Tensor) -> Iterator[Tensor]:
        """Yield J, some samples at a time, in order: parameters flattened in the net's own order.

        Chunks are (samples, k, parameters) for outputs="full". Otherwise they are matrices J, such that
        Θ(x, z) = J(x)J(z)ᵀ: (samples, k · parameters), divided by √k, for "mean", and (samples, parameters) for "sum".

        >>> net = nn.Sequential(nn.Linear(2, 3))
        >>> [chunk.shape for chunk in EmpiricalKernel(net, outputs="sum").jacobian(torch.randn(4, 2))]
        [torch.Size([4, 9])]
        """
        gradients, seen = self._survey(self.part, x, None)
        _check_values(x, None)
        survey = seen.survey
        problem = Problem(survey, self.outputs, self.memory, 1, len(x), False, cached(x))
        plan = problem.rows(survey.blocks, ())
        if plan.tile < 1:
            raise self._too_little()
        for start in range(0, len(x), plan.tile):
            points = x[start : start + plan.tile]
            rows = gradients.rows(points, survey.blocks, (), survey.outputs, plan.chunk, plan.room, plan.cores).formed
            if self.outputs == "full":
                yield rows
            else:
                yield rows.flatten(1).div_(math.sqrt(survey.outputs) if self.outputs == "mean" else 1)

    def _params(self) -> Params:
        own = {name: value.detach() for name, value in self.net.named_parameters()}
        for name, value in (self.params or {}).items():
            if name not in own or own[name].shape != value.shape:
                wanted = describe(own[name]) if name in own else "no such parameter"
                raise InputError(f"params has {name!r}, {describe(value)}, but the network has {wanted}.")
        return own | {name: value.detach() for name, value in (self.params or {}).items()}

    def _survey(self, part: Part, x: Tensor, z: Tensor | None) -> tuple[Gradients, _Seen]:
        """What is known of the net's way with such samples, looked up where nothing has changed since it was found."""
        if torch.is_inference_mode_enabled():
            raise InputError("no gradients can be taken under torch.inference_mode(). Use torch.no_grad(), or neither.")
        params = self._params()
        _check_forms(params, x, z)
        tensors = [*params.values(), *self.net.buffers()]
        state = _state(self.net, tensors)
        seen = self._seen.get((part, x.shape[1:]))
        if seen is None or seen.state != state:
            _check_values(x, z)
            seen = _Seen(state, tensors, *self._look(part, params, x), x.is_cuda)
            self._seen[part, x.shape[1:]] = seen
        survey = seen.survey
        return Gradients(self.net, params, seen.names, self.outputs == "sum", survey.others, survey.batched), seen

    def _look(self, part: Part, params: Params, x: Tensor) -> tuple[frozenset[str], Survey]:
        """Send a sample through the net, and one beside another, and see which parameters are whose and what they cost.

        It is one with noise, if the net takes that: a blank one could hide that a parameter has a use beside its
        layer's.
        """
        gradients = Gradients(self.net, params, frozenset(params), self.outputs == "sum")
        buffers = [(name, value, value._version, value.clone()) for name, value in self.net.named_buffers()]
        noise = torch.randn(x[:1].shape, generator=torch.Generator().manual_seed(0)).to(x)
        try:
            for sample in (x[:1] + noise * (float(x.std(correction=0)) or 1.0), own := x[:1]):
                try:
                    with saved_bytes(params) as graph:
                        y, leaves, calls = gradients.trace(sample)
                    if y.isfinite().all():
                        break
                except (RuntimeError, ValueError, IndexError):  # tokens cannot take noise
                    if sample is own:
                        raise
            pair = torch.cat([sample, x[:1]])
            with torch.enable_grad():
                both = call_with_params(self.net, leaves, pair.clone())
        except (RuntimeError, ValueError, IndexError) as error:
            raise InputError(f"x is {describe(x)}, which the network does not take ({error}).") from error
        moved = [name for name, value, version, _ in buffers if value._version != version]
        if moved:
            for _, value, _, before in buffers:
                value.copy_(before)
            raise InputError(
                f"the network changes its buffer {moved[0]!r} in a forward pass, so that its kernel depends on how "
                "often it was called. Use net.eval()."
            )
        if y.ndim != 2 or len(y) != 1 or len(both) != 2:
            raise InputError(
                f"the network maps {len(both)} samples to {tuple(both.shape)}, but must give (samples, k)."
            )
        if not y.isfinite().all():
            raise InputError("the network's output for the first sample of x is not finite. Check x and the net.")
        if not torch.allclose(both.detach()[:1], y.detach(), rtol=1e-3, atol=1e-3 * float(y.detach().abs().max())):
            raise InputError(
                "the network's output for a sample depends on the other samples or on chance, so that it has no "
                "gradient of its own. Use evaluation mode, or with_group_norm(net)."
            )
        head = next((call for call in calls if call.output is y and isinstance(call.layer, nn.Linear)), None)
        if head is None and part != "all":
            raise InputError(
                "the network has no head: no nn.Linear's outputs are the network's. Use part='all', or a Network."
            )
        heads = frozenset(head.roles) if head else frozenset()
        names = {"all": gradients.names, "head": heads, "body": gradients.names - heads}[part] - frozen_names(self.net)
        if not names:
            of = "" if part == "all" else f" in its {part}"
            raise InputError(f"the network has no parameters{of} that count: those with requires_grad=False do not.")
        outputs = 1 if self.outputs == "sum" else y.shape[1]
        seed = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)  # a sum could cancel
        first = torch.cat([seed, torch.zeros_like(seed)])
        exact = torch.autograd.grad(both, tuple(leaves.values()), first, allow_unused=True)
        gradients = replace(gradients, names=names)
        return names, examine(gradients, y, calls, pair, seed, dict(zip(leaves, exact)), outputs, sum(graph))

    def _plan(self, problem: Problem, way: Way) -> Plan:
        plan = problem.cheapest(way)
        if plan is None:
            raise self._too_little()
        return plan

    def _too_little(self) -> InputError:
        return InputError(f"memory is {self.memory} bytes, too few for one sample of this network. Allow more.")

    def _by_gradients(
        self, gradients: Gradients, plan: Plan, outputs: int, x: Tensor, z: Tensor | None, result: Tensor
    ) -> None:
        r = result.shape[0] // len(x)
        z_or_x = x if z is None else z
        work = self.memory // 4 // x.element_size()

        def rows(points: Tensor) -> Rows:
            return gradients.rows(points, plan.formed, plan.factored, outputs, plan.chunk, plan.room, plan.cores)

        for i in range(0, len(x), plan.tile):
            left = rows(x[i : i + plan.tile])
            for j in range(i if z is None else 0, len(z_or_x), plan.tile):
                right = left
                if z is not None or i != j:
                    right = rows(z_or_x[j : j + plan.tile])
                place = result[i * r : (i + plan.tile) * r, j * r : (j + plan.tile) * r]
                inner(left, right, self.outputs, work, place)
            del left, right  # before the next are made


def _state(net: nn.Module, tensors: list[Tensor]) -> tuple[object, ...]:
    """What a network does depends on: its layers, their numbers and modes, and where which tensors lie.

    What else a layer may hold, such as functions or hooks, is not seen.
    """
    layers = [
        (layer, *((name, value) for name, value in vars(layer).items() if _is_plain(value))) for layer in net.modules()
    ]
    places = [(value.data_ptr(), value._version) for value in tensors]
    flags = [value.requires_grad for value in net.parameters()]
    return *layers, *places, *flags, torch.is_autocast_enabled(tensors[0].device.type)


def _is_plain(value: object) -> bool:
    return all(isinstance(each, PLAIN) for each in (value if isinstance(value, tuple) else (value,)))


def _replayable(net: nn.Module, survey: Survey, plan: Plan) -> bool:
    """Whether nothing but what `_state` holds can change the way of samples through the net, and nothing waits."""
    return (
        plan.way == "gradients"
        and not survey.others
        and all(
            (type(layer).__module__.startswith("torch.nn.") or type(layer) in (Network, BatchNorm, Drop))
            and not layer._forward_hooks
            and not layer._forward_pre_hooks
            for layer in net.modules()
        )
    )


def _check_network(net: nn.Module, params: Params) -> None:
    if not params:
        raise InputError("the network has no parameters, so there are no gradients to make a kernel of.")
    kinds = {(value.dtype, value.device) for value in params.values()}
    if len(kinds) > 1 or next(iter(kinds))[0] not in (torch.float32, torch.float64):
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise InputError(f"parameters are {found}, but must all be float32 or all float64, on one device.")
    for name, layer in net.named_modules():
        batch = isinstance(layer, BatchNorm) and (layer.statistics == "batch" or layer.training)
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            batch = layer.training or layer.running_mean is None
        if batch:
            raise InputError(
                f"batch norm {name!r} normalises by the batch, which mixes samples, so that none has a gradient of its "
                "own. Use evaluation mode with statistics='running', estimated, or with_group_norm(net, groups=16)."
            )
        if isinstance(layer, Drop | nn.modules.dropout._DropoutNd) and layer.training and _drops(layer):
            raise InputError(f"{name!r} drops at random in training mode. Use net.eval().")


def _drops(layer: Drop | nn.modules.dropout._DropoutNd) -> bool:
    return bool(layer.rate if isinstance(layer, Drop) else layer.p)


def _check_forms(params: Params, x: Tensor, z: Tensor | None) -> None:
    value = next(iter(params.values()))
    for name, points in (("x", x), ("z", z)):
        if points is None:
            continue
        if points.ndim < 1 or not len(points):
            raise InputError(f"{name} is {describe(points)}, but needs at least one sample.")
        if points.dtype != value.dtype or points.device != value.device:
            raise InputError(
                f"{name} is {describe(points)} on {points.device}, but the parameters are "
                f"{str(value.dtype).removeprefix('torch.')} on {value.device}. Convert one of them."
            )
        if points.shape[1:] != x.shape[1:]:
            raise InputError(f"z is {describe(points)}, but its samples must have x's shape, {tuple(x.shape[1:])}.")


def _check_values(x: Tensor, z: Tensor | None) -> None:
    for name, points in (("x", x), ("z", z)):
        if points is not None and not torch.stack(points.aminmax()).isfinite().all():  # NaN is both
            raise InputError(f"{name} holds values that are NaN or infinite. Leave those samples out.")
