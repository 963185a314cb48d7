"""Empirical NTK and NNGP kernel of a finite network: inner products of the gradients of its outputs.

For a network f with parameters θ and J_o(x) = ∂f_o(x)/∂θ, the NTK is Θ_ou(x, z) = J_o(x)·J_u(z) for outputs o and u.
Per-sample gradients exist only if the output for a sample does not depend on other samples. Batch norm must therefore
use fixed statistics (evaluation mode) or be replaced with group norm (`with_group_norm`), which changes the function
that the network computes.
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
from metabridge.kernels.cost_model import NetworkProfile, profile_network, record_saved_bytes
from metabridge.kernels.gradient_products import Outputs, add_inner_products
from metabridge.kernels.jacobian import JacobianRows, PerSampleGradients
from metabridge.kernels.layer_overrides import on_cpu
from metabridge.kernels.ntk_vector_products import fill_by_products
from metabridge.kernels.strategy import KernelProblem, Strategy, StrategyName
from metabridge.models.batch_norm import BatchNorm
from metabridge.models.drop_path import Drop, DropPath
from metabridge.models.network import Network, Params, call_with_params, frozen_names
from metabridge.models.resnet12 import DropBlock

log = logging.getLogger("metabridge")

Part = Literal["all", "head", "body"]

# Layer attributes of these types, or tuples of them, are settings: if one changes, the network is profiled again.
SETTING_TYPES = (bool, int, float, str)


@dataclass
class _PreparedNetwork:
    """The profile of a network with its current parameters and layers, and the CUDA graph of the last computation.

    Args:
        fingerprint: State of the network when it was profiled; see `_fingerprint`.
        tensors: Parameters and buffers of the network, kept alive so that no other tensors get their addresses.
        names: Names of the parameters whose gradients are computed.
        profile: Sizes and costs of the network.
        capturable: Whether computations may be captured as CUDA graphs; false on a CPU and after a failure.
        supports_products: Whether to try NTK-vector products; false after they have failed.
        last_sizes: Numbers of row and column samples of the last computation with strategy "gradients"; the second is
            None if `z` was None.
        captured: The captured computation; None if there is none.
    """

    fingerprint: tuple[object, ...]
    tensors: list[Tensor]
    names: frozenset[str]
    profile: NetworkProfile
    capturable: bool
    supports_products: bool = True
    last_sizes: tuple[int, int | None] | None = None
    captured: _CapturedKernel | None = None


class _CapturedKernel:
    """The computation of a kernel, captured as a CUDA graph with static input tensors."""

    def __init__(self, compute: Callable[[Tensor, Tensor | None], Tensor], x: Tensor, z: Tensor | None) -> None:
        self._x, self._z = x.clone(), None if z is None else z.clone()
        self._graph = CapturedGraph(lambda: compute(self._x, self._z), warmup=1)

    def __call__(self, x: Tensor, z: Tensor | None) -> Tensor:
        self._x.copy_(x)
        if z is not None and self._z is not None:
            self._z.copy_(z)
        return self._graph.replay().clone()


@dataclass(frozen=True, eq=False, repr=False)
class EmpiricalKernel:
    """The empirical NTK and NNGP kernel of a finite network with k outputs.

    The first call profiles the network: it estimates costs from the first sample. The network is profiled again for a
    new sample shape, and after its parameters or layers have changed.

    On a GPU, the second consecutive call with the same numbers of samples captures the computation as a CUDA graph, and
    later calls replay the graph. This requires that the gradients of all samples are computed layer by layer in one
    forward and backward pass, and that all layers are layers of PyTorch or metabridge without hooks. The graph keeps
    its memory, and the precision (TF32 or not) that was set when it was captured.

    NTK-vector products J(x)(J(z)ᵀe), with unit vectors e, keep few gradients in memory, but need forward-mode
    derivatives under `vmap`, which some operations lack (recurrent layers, fused attention, weight norm). For networks
    with such operations, `strategy="auto"` uses per-sample gradients.

    Args:
        net: The network. Parameters with `requires_grad=False` are excluded from the kernel.
        params: Parameters that replace those of the network, by name.
        part: The parameters with respect to which gradients are taken: "all", "head" (the linear layer that computes
            the network's outputs) or "body" (all other layers).
        outputs: How the k outputs are reduced: "mean" for Θ(x, z) = (1/k) Σ_o J_o(x)·J_o(z), the kernel per output;
            "sum" for Θ(x, z) = (Σ_o J_o(x))·(Σ_u J_u(z)), the kernel of the summed outputs as in the
            architecture searches TE-NAS and MetaNTK-NAS; "full" for Θ_ou(x, z) = J_o(x)·J_u(z), (n, m, k, k).
        memory: Approximate maximum number of bytes used in addition to inputs and result.
        strategy: "gradients" for per-sample gradients, computed layer by layer; "products" for NTK-vector products;
            "auto" for the strategy with the lower estimated cost.

    Raises:
        InputError: If a setting is invalid, parameters are missing or of different dtypes or devices, a batch norm
            normalizes by the batch, or dropout is active.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from metabridge.kernels import EmpiricalKernel
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
    strategy: StrategyName = "auto"
    _prepared: dict[tuple[Part, torch.Size], _PreparedNetwork] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_positive("memory", self.memory)
        for name, literal in (("part", Part), ("outputs", Outputs), ("strategy", StrategyName)):
            if getattr(self, name) not in get_args(literal):
                allowed = ", ".join(map(repr, get_args(literal)))
                raise InputError(f"{name} is {getattr(self, name)!r}, but must be one of {allowed}.")
        _check_network(self.net, self._all_params())

    def __repr__(self) -> str:
        net = repr(self.net) if isinstance(self.net, Network) else type(self.net).__name__
        return f"EmpiricalKernel({net}, part={self.part!r}, outputs={self.outputs!r})"

    def __getstate__(self) -> dict[str, object]:
        """Return the state for copying and pickling, without profiles and CUDA graphs: graphs cannot be copied."""
        return {**vars(self), "_prepared": {}}

    def ntk(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Return the NTK.

        Args:
            x: The n row samples.
            z: The m column samples; `x` if None, which makes the result exactly symmetric.

        Returns:
            Θ(x, z), (n, m), or (n, m, k, k) for outputs="full".

        Raises:
            InputError: If the kernel is undefined for these samples, or the memory is too small.

        Example:
            >>> net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
            >>> EmpiricalKernel(net, outputs="full").ntk(torch.randn(4, 2), torch.randn(5, 2)).shape
            torch.Size([4, 5, 3, 3])
        """
        return self._ntk(self.part, x, z)

    def _ntk(self, part: Part, x: Tensor, z: Tensor | None) -> Tensor:
        gradients, prepared = self._prepare(part, x, z)
        sizes = len(x), None if z is None else len(z)
        if prepared.captured is not None and prepared.last_sizes == sizes:
            result = prepared.captured(x, z)
            _check_finite(x, z)  # after the replay, since the check synchronizes with the GPU
            return result
        _check_finite(x, z)
        n, m = len(x), len(x if z is None else z)
        profile = prepared.profile
        problem = KernelProblem(profile, self.outputs, self.memory, n, m, z is None, on_cpu(x))
        strategy = self._choose_strategy(problem, self.strategy if prepared.supports_products else "gradients")
        if strategy.name == "products":
            try:
                return self._compute(gradients, profile.gradients_per_sample, strategy, x, z)
            except RuntimeError as error:
                self._raise_if_products_are_required(error)
                prepared.supports_products = False
                strategy = self._choose_strategy(problem, "gradients")
        compute = partial(self._compute, gradients, profile.gradients_per_sample, strategy)
        is_repeated, prepared.last_sizes, prepared.captured = prepared.last_sizes == sizes, sizes, None
        in_one_pass = strategy.chunk >= max(n, m)
        if is_repeated and prepared.capturable and in_one_pass and _is_capturable(self.net, profile, strategy):
            try:
                prepared.captured = _CapturedKernel(compute, x, z)
            except RuntimeError as error:
                log.warning("this kernel cannot be captured as a CUDA graph, so every call recomputes it: %s", error)
                prepared.capturable = False
            else:
                return prepared.captured(x, z)
        return compute(x, z)

    def _raise_if_products_are_required(self, error: RuntimeError) -> None:
        """Raise the error of failed NTK-vector products, unless per-sample gradients may be used instead."""
        if isinstance(error, torch.OutOfMemoryError):
            raise error
        if self.strategy == "products":
            raise InputError(
                "strategy is 'products', but this network has an operation without forward-mode derivatives under vmap "
                f"({str(error).splitlines()[0]}). Use strategy='gradients' or strategy='auto'."
            ) from error

    def _compute(
        self, gradients: PerSampleGradients, gradients_per_sample: int, strategy: Strategy, x: Tensor, z: Tensor | None
    ) -> Tensor:
        n, m = len(x), len(x if z is None else z)
        r = gradients_per_sample if self.outputs == "full" else 1  # rows and columns of the result per sample
        result = x.new_zeros(n * r, m * r)
        if strategy.name == "products":
            fill_by_products(gradients, strategy, self.outputs, x, z, result.view(n, r, m, r))
        else:
            self._fill_by_gradients(gradients, strategy, gradients_per_sample, x, z, result)
        if z is None:
            result = result.triu() + result.triu(1).mT
        if self.outputs == "full":
            return result.view(n, r, m, r).transpose(1, 2)
        return result / (gradients_per_sample if self.outputs == "mean" else 1)

    def nngp(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Return the NNGP kernel: the NTK with respect to the head's parameters only.

        For outputs="mean", the kernel is φ(x)·φ(z), plus 1 if the head has a bias, where φ are the input features of
        the head.

        Args:
            x: The n row samples.
            z: The m column samples; `x` if None.

        Returns:
            K(x, z), in the shape of `ntk`.

        Raises:
            InputError: If the network has no head, its kernel is undefined for these samples, or the memory is too
                small.

        Example:
            >>> net = nn.Sequential(nn.Linear(2, 3, bias=False))
            >>> EmpiricalKernel(net).nngp(torch.tensor([[1.0, 2.0]]))
            tensor([[5.]])
        """
        return self._ntk("head", x, z)

    def both(self, x: Tensor, z: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the NTK and the NNGP kernel.

        Args:
            x: The n row samples.
            z: The m column samples; `x` if None.

        Returns:
            Θ(x, z) and K(x, z), in the shapes of `ntk` and `nngp`.

        Raises:
            InputError: If the network has no head, its kernel is undefined for these samples, or the memory is too
                small.
        """
        return self.ntk(x, z), self.nngp(x, z)

    def jacobian(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the Jacobian for successive chunks of samples, with the parameters flattened and concatenated.

        Their order is that of `net.named_parameters()`.

        Args:
            x: The samples.

        Yields:
            Tensors (samples, k, parameters) for outputs="full". Otherwise matrices J with Θ(x, z) = J(x)J(z)ᵀ:
            (samples, k · parameters), divided by √k, for "mean", and (samples, parameters) for "sum".

        Raises:
            InputError: If the kernel is undefined for these samples, or the memory is too small.

        Example:
            >>> net = nn.Sequential(nn.Linear(2, 3))
            >>> [chunk.shape for chunk in EmpiricalKernel(net, outputs="sum").jacobian(torch.randn(4, 2))]
            [torch.Size([4, 9])]
        """
        gradients, prepared = self._prepare(self.part, x, None)
        _check_finite(x, None)
        profile = prepared.profile
        # Only the gradients are computed, no kernel: this problem just determines how many samples fit in memory.
        problem = KernelProblem(profile, self.outputs, self.memory, n=1, m=len(x), symmetric=False, on_cpu=on_cpu(x))
        strategy = problem.gradient_strategy(profile.parameters, ())
        if strategy.tile < 1:
            raise self._memory_error()
        for start in range(0, len(x), strategy.tile):
            rows = gradients.rows(
                x[start : start + strategy.tile],
                profile.parameters,
                (),
                profile.gradients_per_sample,
                strategy.chunk,
                strategy.workspace_bytes,
                strategy.threads,
            ).materialized
            if self.outputs == "full":
                yield rows
            else:
                yield rows.flatten(1).div_(math.sqrt(profile.gradients_per_sample) if self.outputs == "mean" else 1)

    def _all_params(self) -> Params:
        """Return the parameters of the network, replaced by those in `params`."""
        network_params = {name: value.detach() for name, value in self.net.named_parameters()}
        for name, value in (self.params or {}).items():
            if name not in network_params or network_params[name].shape != value.shape:
                expected = describe(network_params[name]) if name in network_params else "no such parameter"
                raise InputError(
                    f"params has {name!r}, {describe(value)}, but the network has {expected}. "
                    "Use names and shapes as in net.named_parameters()."
                )
        return network_params | {name: value.detach() for name, value in (self.params or {}).items()}

    def _prepare(self, part: Part, x: Tensor, z: Tensor | None) -> tuple[PerSampleGradients, _PreparedNetwork]:
        """Return an object that computes gradients, and the prepared network; profile it again if it has changed."""
        if torch.is_inference_mode_enabled():
            raise InputError(
                "gradients cannot be computed under torch.inference_mode(). Use torch.no_grad() or grad mode."
            )
        params = self._all_params()
        _check_shapes(params, x, z)
        tensors = [*params.values(), *self.net.buffers()]
        fingerprint = _fingerprint(self.net, tensors)
        prepared = self._prepared.get((part, x.shape[1:]))
        if prepared is None or prepared.fingerprint != fingerprint:
            _check_finite(x, z)
            prepared = _PreparedNetwork(fingerprint, tensors, *self._profile(part, params, x), x.is_cuda)
            self._prepared[part, x.shape[1:]] = prepared
        profile = prepared.profile
        gradients = PerSampleGradients(
            self.net,
            params,
            prepared.names,
            self.outputs == "sum",
            profile.generic_names,
            profile.batched_backward,
        )
        return gradients, prepared

    def _profile(self, part: Part, params: Params, x: Tensor) -> tuple[frozenset[str], NetworkProfile]:
        """Profile the network with one sample and with two samples, and check that it has a kernel.

        Noise is added to the sample if the network accepts it, since a sample of zeros could hide that a parameter is
        also used outside its layer.
        """
        gradients = PerSampleGradients(self.net, params, frozenset(params), self.outputs == "sum")
        buffers = [(name, value, value._version, value.clone()) for name, value in self.net.named_buffers()]
        noise = torch.randn(x[:1].shape, generator=torch.Generator().manual_seed(0)).to(x)
        try:
            for sample in (x[:1] + noise * (float(x.std(correction=0)) or 1.0), without_noise := x[:1]):
                try:
                    with record_saved_bytes(params) as graph_bytes:
                        y, leaves, calls = gradients.trace(sample)
                    if y.isfinite().all():
                        break
                except (RuntimeError, ValueError, IndexError):  # for example, a token with noise is not a valid index
                    if sample is without_noise:
                        raise
            two_samples = torch.cat([sample, x[:1]])
            with torch.enable_grad():
                two_sample_outputs = call_with_params(self.net, leaves, two_samples.clone())
        except (RuntimeError, ValueError, IndexError) as error:
            raise InputError(f"x is {describe(x)}, which the network does not accept ({error}).") from error
        changed_names = [name for name, value, version, _ in buffers if value._version != version]
        if changed_names:
            for _, value, _, original in buffers:
                value.copy_(original)
            raise InputError(
                f"the network changes its buffer {changed_names[0]!r} in a forward pass, so its kernel depends on the "
                "number of previous calls. Use net.eval()."
            )
        if y.ndim != 2 or len(y) != 1 or len(two_sample_outputs) != 2:
            raise InputError(
                f"the network maps {len(two_samples)} samples to outputs of shape {tuple(two_sample_outputs.shape)}, "
                "but must return one vector per sample, (samples, k)."
            )
        if not y.isfinite().all():
            raise InputError("the network's output for the first sample of x is not finite. Check x and the network.")
        tolerance = 1e-3 * float(y.detach().abs().max())
        if not torch.allclose(two_sample_outputs.detach()[:1], y.detach(), rtol=1e-3, atol=tolerance):
            raise InputError(
                "the network's output for a sample depends on the other samples or on random numbers, so there are no "
                "per-sample gradients. Use evaluation mode, or with_group_norm(net)."
            )
        head = next((call for call in calls if call.output is y and isinstance(call.layer, nn.Linear)), None)
        if head is None and part != "all":
            raise InputError(
                "the network has no head: its last layer is not an nn.Linear. Use part='all', or a metabridge Network."
            )
        head_names = frozenset(head.roles) if head else frozenset()
        names_of_part = {"all": gradients.names, "head": head_names, "body": gradients.names - head_names}
        names = names_of_part[part] - frozen_names(self.net)
        if not names:
            where = "" if part == "all" else f" in its {part}"
            raise InputError(
                f"the network has no parameters{where} with requires_grad=True, so there are no gradients. "
                "Call requires_grad_() on some of them, or use another part."
            )
        gradients_per_sample = 1 if self.outputs == "sum" else y.shape[1]
        # The cotangent is random, since the gradients of the outputs could cancel in their sum.
        cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
        two_sample_cotangent = torch.cat([cotangent, torch.zeros_like(cotangent)])
        exact = torch.autograd.grad(two_sample_outputs, tuple(leaves.values()), two_sample_cotangent, allow_unused=True)
        gradients = replace(gradients, names=names)
        exact_gradients = dict(zip(leaves, exact))
        profile = profile_network(
            gradients, y, calls, two_samples, cotangent, exact_gradients, gradients_per_sample, sum(graph_bytes)
        )
        return names, profile

    def _choose_strategy(self, problem: KernelProblem, name: StrategyName) -> Strategy:
        strategy = problem.cheapest_strategy(name)
        if strategy is None:
            raise self._memory_error()
        return strategy

    def _memory_error(self) -> InputError:
        return InputError(f"memory is {self.memory} bytes, but one sample of this network needs more. Increase memory.")

    def _fill_by_gradients(
        self,
        gradients: PerSampleGradients,
        strategy: Strategy,
        gradients_per_sample: int,
        x: Tensor,
        z: Tensor | None,
        result: Tensor,
    ) -> None:
        """Add Θ to `result`, tile by tile. If `z` is None, compute only the tiles of the upper triangle."""
        r = result.shape[0] // len(x)
        columns = x if z is None else z
        max_elements = self.memory // 4 // x.element_size()

        def rows(samples: Tensor) -> JacobianRows:
            return gradients.rows(
                samples,
                strategy.materialized,
                strategy.factored,
                gradients_per_sample,
                strategy.chunk,
                strategy.workspace_bytes,
                strategy.threads,
            )

        for i in range(0, len(x), strategy.tile):
            left = rows(x[i : i + strategy.tile])
            for j in range(i if z is None else 0, len(columns), strategy.tile):
                right = left
                if z is not None or i != j:
                    right = rows(columns[j : j + strategy.tile])
                tile = result[i * r : (i + strategy.tile) * r, j * r : (j + strategy.tile) * r]
                add_inner_products(left, right, self.outputs, max_elements, tile)
            del left, right  # free memory before the next gradients are computed


def _fingerprint(net: nn.Module, tensors: list[Tensor]) -> tuple[object, ...]:
    """Return the state on which a network's kernel depends.

    The state consists of the layers and their settings, the addresses and versions of the tensors, the `requires_grad`
    flags of the parameters, and whether autocast is enabled. Settings that are not of `SETTING_TYPES`, such as
    functions or hooks, are not included.
    """
    layers = [
        (layer, *((name, value) for name, value in vars(layer).items() if _is_setting(value)))
        for layer in net.modules()
    ]
    versions = [(value.data_ptr(), value._version) for value in tensors]
    flags = [value.requires_grad for value in net.parameters()]
    return *layers, *versions, *flags, torch.is_autocast_enabled(tensors[0].device.type)


def _is_setting(value: object) -> bool:
    return all(isinstance(item, SETTING_TYPES) for item in (value if isinstance(value, tuple) else (value,)))


def _is_capturable(net: nn.Module, profile: NetworkProfile, strategy: Strategy) -> bool:
    """Return whether a CUDA graph can capture the computation, and the fingerprint detects all changes to it."""
    return (
        strategy.name == "gradients"
        and not profile.generic_names
        and all(
            (type(layer).__module__.startswith("torch.nn.") or type(layer) in (Network, BatchNorm, DropBlock, DropPath))
            and not layer._forward_hooks
            and not layer._forward_pre_hooks
            for layer in net.modules()
        )
    )


def _check_network(net: nn.Module, params: Params) -> None:
    if not params:
        raise InputError("the network has no parameters, so its kernel is undefined. Use another network.")
    dtypes_and_devices = {(value.dtype, value.device) for value in params.values()}
    if len(dtypes_and_devices) > 1 or next(iter(dtypes_and_devices))[0] not in (torch.float32, torch.float64):
        listed = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in dtypes_and_devices))
        raise InputError(
            f"parameters are {listed}, but must all be float32 or all float64, on one device. Convert the network."
        )
    for name, layer in net.named_modules():
        uses_batch = isinstance(layer, BatchNorm) and (layer.statistics == "batch" or layer.training)
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            uses_batch = layer.training or layer.running_mean is None
        if uses_batch:
            raise InputError(
                f"batch norm {name!r} normalizes by the batch, which mixes samples, so there are no per-sample "
                "gradients. Use running statistics (statistics='running'), estimate them and call net.eval(); or use "
                "with_group_norm(net, groups=16)."
            )
        if isinstance(layer, Drop | nn.modules.dropout._DropoutNd) and layer.training and _has_drop_rate(layer):
            raise InputError(f"{name!r} drops values at random in training mode. Use net.eval().")


def _has_drop_rate(layer: Drop | nn.modules.dropout._DropoutNd) -> bool:
    return bool(layer.rate if isinstance(layer, Drop) else layer.p)


def _check_shapes(params: Params, x: Tensor, z: Tensor | None) -> None:
    value = next(iter(params.values()))
    for name, samples in (("x", x), ("z", z)):
        if samples is None:
            continue
        if samples.ndim < 1 or not len(samples):
            raise InputError(f"{name} is {describe(samples)}, but must contain at least one sample.")
        if samples.dtype != value.dtype or samples.device != value.device:
            raise InputError(
                f"{name} is {describe(samples)} on {samples.device}, but the parameters are "
                f"{str(value.dtype).removeprefix('torch.')} on {value.device}. Convert one of them."
            )
        if samples.shape[1:] != x.shape[1:]:
            raise InputError(
                f"z is {describe(samples)}, but its samples must have the shape of those of x, {tuple(x.shape[1:])}."
            )


def _check_finite(x: Tensor, z: Tensor | None) -> None:
    for name, samples in (("x", x), ("z", z)):
        if samples is not None and not torch.stack(samples.aminmax()).isfinite().all():  # aminmax propagates NaN
            raise InputError(f"{name} contains values that are NaN or infinite. Fix or remove these samples.")
