"""Exact NTK and NNGP matrices for the candidates of a search round. A candidate is the supernet without one operator.

- The NTK matrix is Θ = Σ_l J_l J_lᵀ over the layers l. A row of J_l is the gradient of the summed outputs for one image
  with respect to the parameters of the layer. Each layer adds its term when the backward pass reaches it, for all
  images at once, so the gradients of the whole network are never stored. The backward pass is written by hand with the
  fastest operations of each device.
- The NNGP matrix K is the term of Θ that belongs to the head.
- On a CPU, candidates are run one by one. Layers that do not depend on the removed operator are run only once, in a
  forward pass of the supernet, and their results are reused.
- On a GPU, several candidates share one forward and backward pass. The batch contains one copy of the images per
  candidate, and the output of a removed operator is set to zero in the copy of the candidate that lacks it. This is
  exact, because the network processes each image independently.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metabridge.errors import InputError, check_count
from metabridge.kernels.layer_calls import input_patches
from metabridge.models.architecture import ActiveOperators, EdgeOperator
from metabridge.models.cells import check_active_operators
from metabridge.models.network import Network
from metabridge.nas.cached_forward import CachedForward, CellTrace, FirstStep, ForwardCache, ForwardTrace, LayerRunner
from metabridge.nas.proxies import KernelMatrices

CANDIDATES_PER_PASS = 8  # on a GPU
# on a GPU, number of gradient entries per sample that are multiplied in one matrix product
GRADIENT_ENTRIES_PER_PRODUCT = 2**18
# each product is split into this many shorter ones, because few long rows do not occupy the whole GPU
PRODUCT_PARTS = 64


class _GramSum:
    """The sum of J_l J_lᵀ over layers, separately for each group of samples: (groups, samples, samples).

    Gradients are collected until there are `entries_per_product` entries per sample, and then multiplied in one
    product. If `entries_per_product` is None, the gradients of each layer are multiplied immediately. The products are
    added to `initial_sum` in place.
    """

    def __init__(self, initial_sum: Tensor, entries_per_product: int | None) -> None:
        self._total, self._entries_per_product = initial_sum, entries_per_product
        self._pending: list[Tensor] = []

    def add(self, gradients: Tensor) -> None:
        """Add the term of a layer. `gradients` has shape (groups · samples, ...)."""
        rows = gradients.reshape(*self._total.shape[:2], -1)
        if self._entries_per_product is None:
            self._total.baddbmm_(rows, rows.mT)
            return
        self._pending.append(rows)
        if sum(pending.shape[2] for pending in self._pending) >= self._entries_per_product:
            self._multiply_pending()

    def total(self) -> Tensor:
        """Return the sum."""
        if self._pending:
            self._multiply_pending()
        return self._total

    def _multiply_pending(self) -> None:
        padding = -sum(pending.shape[2] for pending in self._pending) % PRODUCT_PARTS
        rows = torch.cat([*self._pending, self._total.new_zeros(*self._total.shape[:2], padding)], 2)
        self._pending.clear()
        parts = rows.unflatten(2, (PRODUCT_PARTS, -1)).transpose(1, 2).contiguous()
        self._total += (parts @ parts.mT).sum(1)


class _OutputAndVjp(NamedTuple):
    """The output of some layers and their backward pass, which computes a vector-Jacobian product (VJP).

    `backward(grad, theta)` returns the gradient at the input for the gradient `grad` at the output, and adds the terms
    of the layers to Θ.
    """

    output: Tensor
    backward: Callable[[Tensor, _GramSum], Tensor]


LayerFunction = LayerRunner[_OutputAndVjp]


class CandidateKernels:
    """Computes the kernel matrices of the candidates of a search round, from gradients of the summed outputs.

    If `candidates_per_pass` is 1, several threads may call `matrices` of one object at the same time.

    Args:
        net: Supernet with group norm. Its weights must not change afterwards.
        active: Operators of the supernet that are active.
        x: Images (images, channels, height, width).
        candidates_per_pass: Number of candidates that share one forward and backward pass; by default 8 on a GPU and
            1 on a CPU. It is halved whenever memory does not suffice.

    Raises:
        InputError: If `net` is not a supernet with these operators, or has batch norm, or if `candidates_per_pass` is
            not a positive integer.

    >>> from metabridge.models.cells import supernet
    >>> active = ActiveOperators.full()
    >>> kernels = CandidateKernels(supernet(active, cells=3, channels=2, size=8), active, torch.rand(4, 3, 8, 8))
    >>> [matrices.ntk.shape for _, matrices in kernels.matrices([None, ("normal", 0, "skip")])]
    [torch.Size([4, 4]), torch.Size([4, 4])]
    """

    def __init__(
        self, net: Network, active: ActiveOperators, x: Tensor, candidates_per_pass: int | None = None
    ) -> None:
        features = check_active_operators(net, active)
        if not all(isinstance(layer, nn.GroupNorm) for layer in net.modules() if "Norm" in type(layer).__name__):
            raise InputError("the supernet has batch norm, which mixes images. Build it with norm='group'.")
        if candidates_per_pass is not None:
            check_count("candidates_per_pass", candidates_per_pass)
        self.active, self._x, self._head = active, x.contiguous(), net.head
        self._candidates_per_pass = candidates_per_pass or (CANDIDATES_PER_PASS if x.is_cuda else 1)
        self._one_by_one = self._candidates_per_pass == 1
        self._masks: dict[EdgeOperator, Tensor] = {}  # whether each sample is of a copy that lacks the operator
        self._forward = CachedForward(features, _make_runner, self._mask_output)
        self._supernet_cache = ForwardCache()
        if self._one_by_one:
            with torch.no_grad():
                self._forward(self._x, active, self._supernet_cache)

    @torch.no_grad()
    def matrices(self, removals: Sequence[EdgeOperator | None]) -> Iterator[tuple[EdgeOperator | None, KernelMatrices]]:
        """Yield each removal with the kernel matrices of the supernet without that operator.

        Args:
            removals: Operators to remove, one for each candidate; None stands for the whole supernet.

        Yields:
            The removal, and Θ and K in CPU memory.
        """
        start = 0
        while start < len(removals):
            chunk = removals[start : start + self._candidates_per_pass]
            try:
                kernels = self._run_one(chunk[0]) if self._one_by_one else self._run_copies(chunk)
            except torch.OutOfMemoryError:
                if len(chunk) == 1:
                    raise
                self._candidates_per_pass = len(chunk) // 2
                continue
            ntk, nngp = (matrices.cpu() for matrices in kernels)
            for index, removal in enumerate(chunk):
                yield removal, KernelMatrices(ntk[index], nngp[index])
            start += len(chunk)

    def _run_one(self, removal: EdgeOperator | None) -> tuple[Tensor, Tensor]:
        active = self.active.without(removal)
        return self._backward(self._x[None], self._forward(self._x, active, ForwardCache(self._supernet_cache)))

    def _run_copies(self, removals: Sequence[EdgeOperator | None]) -> tuple[Tensor, Tensor]:
        """Run one copy of the images for each removal, with the removed operator masked in its copy."""
        copies = self._x.expand(len(removals), *self._x.shape).contiguous()
        operators = [removal for removal in removals if removal is not None]
        is_removed = torch.tensor([[removal == operator for removal in removals] for operator in operators])
        is_removed = is_removed.to(self._x.device)
        self._masks = dict(zip(operators, is_removed.repeat_interleave(len(self._x), -1)[..., None, None, None]))
        return self._backward(copies, self._forward(copies.flatten(0, 1), self.active, ForwardCache()))

    def _backward(self, x: Tensor, trace: ForwardTrace[_OutputAndVjp]) -> tuple[Tensor, Tensor]:
        """Return Θ and K of each copy of the images by a backward pass from the summed outputs."""
        entries_per_product = None if self._one_by_one else GRADIENT_ENTRIES_PER_PRODUCT
        theta = _GramSum(x.new_zeros(len(x), x.shape[1], x.shape[1]), entries_per_product)
        maps = trace.end.output
        # The gradient of the summed outputs at the feature maps, through the head and the global average pooling.
        grad = (self._head.weight.sum(0) / maps[0, 0].numel()).view(-1, 1, 1).expand_as(maps)
        grads: dict[int, Tensor] = {}  # gradients at the cell outputs, by cell index; index -1 is the stem
        _accumulate(grads, len(trace.cells) - 1, trace.end.backward(grad, theta))
        for index in reversed(range(len(trace.cells))):
            source_grads = _cell_backward(trace.cells[index], grads.pop(index), theta)
            _accumulate(grads, max(index - 2, -1), source_grads[0])
            _accumulate(grads, index - 1, source_grads[1])
        trace.stem.backward(grads[-1], theta)
        features = maps.mean((-2, -1)).unflatten(0, x.shape[:2])
        # The term of the head in Θ: for each output, the gradient of its weight is the features, and of its bias is 1.
        nngp = self._head.out_features * (features @ features.mT + (self._head.bias is not None))
        return theta.total() + nngp, nngp

    def _mask_output(self, operator: EdgeOperator, layer: LayerFunction) -> LayerFunction:
        """Return a function that also sets the output of an operator to zero in the copies without the operator."""
        if self._one_by_one:
            return layer

        def run(x: Tensor) -> _OutputAndVjp:
            y, backward = layer(x)
            is_removed = self._masks.get(operator)
            if is_removed is None:
                return _OutputAndVjp(y, backward)
            return _OutputAndVjp(
                y.masked_fill(is_removed, 0), lambda grad, theta: backward(grad.masked_fill(is_removed, 0), theta)
            )

        return run


def _accumulate(grads: dict[Any, Tensor], key: object, grad: Tensor) -> None:
    """Add `grad` to `grads[key]`, or store it there.

    Stored tensors are modified in place, so they must not be used elsewhere.
    """
    if key in grads:
        grads[key].add_(grad)
    else:
        grads[key] = grad


def _cell_backward(trace: CellTrace[_OutputAndVjp], grad: Tensor, theta: _GramSum) -> list[Tensor]:
    """Return the gradients at the two inputs of a cell, which are its sources 0 and 1."""
    first_grads: dict[FirstStep[_OutputAndVjp], Tensor] = {}  # gradients at the outputs of the shared first steps
    input_grads = []
    node_grads = grad.chunk(len(trace.operators), 1)  # the output of the cell is the concatenation of its nodes
    for source in reversed(range(2 + len(node_grads))):
        terms = [
            trace.first_steps[first_step].backward(first_grads[first_step], theta)
            for first_step in first_grads
            if first_step[0] == source
        ]
        if source >= 2:
            node = source - 2
            total = functools.reduce(torch.add, terms, node_grads[node]).contiguous()
            for first_step, result in trace.operators[node]:
                _accumulate(first_grads, first_step, result.backward(total, theta))
        else:
            relu, preprocessed = trace.preprocessing[source]
            total = functools.reduce(torch.add, terms) if terms else torch.zeros_like(preprocessed.output)
            input_grads.append(relu.backward(preprocessed.backward(total, theta), theta))
    return input_grads[::-1]


def _make_runner(modules: Sequence[nn.Module]) -> LayerFunction:
    return _chain([_layer(module) for module in modules])


def _chain(layers: Sequence[LayerFunction]) -> LayerFunction:
    """Return the composition of layer functions."""

    def run(x: Tensor) -> _OutputAndVjp:
        backwards = []
        for layer in layers:
            x, backward = layer(x)
            backwards.append(backward)

        def backward_through_all(grad: Tensor, theta: _GramSum) -> Tensor:
            for backward in reversed(backwards):
                grad = backward(grad, theta)
            return grad

        return _OutputAndVjp(x, backward_through_all)

    return run


def _layer(module: Any) -> LayerFunction:
    """Return a function that runs `module` and returns its output with its backward pass."""
    if isinstance(module, nn.Conv2d):
        return _convolution(module)
    if isinstance(module, nn.GroupNorm):
        return _group_norm(module)
    if isinstance(module, nn.MaxPool2d):
        return functools.partial(_max_pool, cast(int, module.stride))
    if isinstance(module, nn.AvgPool2d):
        return functools.partial(_avg_pool, cast(int, module.stride))
    if isinstance(module, nn.ReLU):
        return _relu
    if isinstance(module, nn.Identity):
        return _identity
    return _factorized_reduce(module)


def _identity(x: Tensor) -> _OutputAndVjp:
    return _OutputAndVjp(x, lambda grad, theta: grad.clone())


def _relu(x: Tensor) -> _OutputAndVjp:
    y = x.relu()
    return _OutputAndVjp(y, lambda grad, theta: torch.ops.aten.threshold_backward(grad, y, 0))


def _max_pool(stride: int, x: Tensor) -> _OutputAndVjp:
    # On a CPU, PyTorch's pooling is several times faster in channels-last format; its norms and convolutions are not.
    memory_format = torch.contiguous_format if x.is_cuda else torch.channels_last
    options = [3, 3], [stride, stride], [1, 1], [1, 1], False  # kernel size, stride, padding, dilation, ceil mode
    x = x.contiguous(memory_format=memory_format)
    y, indices = torch.ops.aten.max_pool2d_with_indices(x, *options)

    def backward(grad: Tensor, theta: _GramSum) -> Tensor:
        grad = grad.contiguous(memory_format=memory_format)
        input_grad: Tensor = torch.ops.aten.max_pool2d_with_indices_backward(grad, x, *options, indices)
        return input_grad.contiguous()

    return _OutputAndVjp(y.contiguous(), backward)


def _avg_pool(stride: int, x: Tensor) -> _OutputAndVjp:
    """Compute average pooling as a convolution with ones, which is faster than `avg_pool2d`.

    The sums are divided by the number of pixels in each pooling window, without padding.
    """
    channels, geometry = x.shape[1], ((stride, stride), (1, 1), (1, 1))
    ones = x.new_ones(channels, 1, 3, 3)
    pixel_counts = _convolve(x.new_ones(1, 1, *x.shape[2:]), ones[:1], geometry, 1)

    def backward(grad: Tensor, theta: _GramSum) -> Tensor:
        return _convolution_backward(grad / pixel_counts, x, ones, geometry, channels, (True, False, False))[0]

    return _OutputAndVjp(_convolve(x, ones, geometry, channels) / pixel_counts, backward)


def _factorized_reduce(module: Any) -> LayerFunction:
    """Return a function that runs `module` and returns its output with its backward pass.

    The module is a `FactorizedReduce`. Its ReLU is skipped, because its input is already rectified.
    """
    halves = [
        _chain([functools.partial(_every_second_pixel, start), functools.partial(_pointwise_convolution, layer)])
        for start, layer in enumerate((module.even, module.odd))
    ]
    norm = _group_norm(module.norm)

    def run(x: Tensor) -> _OutputAndVjp:
        (even, even_backward), (odd, odd_backward) = (half(x) for half in halves)
        y, norm_backward = norm(torch.cat([even, odd], 1))

        def backward(grad: Tensor, theta: _GramSum) -> Tensor:
            grads = norm_backward(grad, theta).split([even.shape[1], odd.shape[1]], 1)
            return even_backward(grads[0], theta) + odd_backward(grads[1], theta)

        return _OutputAndVjp(y, backward)

    return run


def _every_second_pixel(start: int, x: Tensor) -> _OutputAndVjp:
    """Return the pixels in rows and columns `start`, `start` + 2, …

    If `start` is 1, an odd height or width is padded by 1.
    """
    height, width = x.shape[-2:]
    padded = F.pad(x, (0, width % 2, 0, height % 2)) if start else x

    def backward(grad: Tensor, theta: _GramSum) -> Tensor:
        input_grad = torch.zeros_like(x)
        selected = input_grad[..., start::2, start::2]
        selected.copy_(grad[..., : selected.shape[-2], : selected.shape[-1]])
        return input_grad

    return _OutputAndVjp(padded[..., start::2, start::2].contiguous(), backward)


def _convolution(layer: nn.Conv2d) -> LayerFunction:
    if layer.kernel_size == (1, 1):
        return functools.partial(_pointwise_convolution, layer)
    if layer.stride == layer.dilation == (2, 2):  # reads only the pixels in even rows and columns
        layer = copy.copy(layer)
        layer.stride, layer.padding, layer.dilation = (1, 1), (1, 1), (1, 1)
        return _chain([functools.partial(_every_second_pixel, 0), _spatial_convolution(layer)])
    return _spatial_convolution(layer)


def _pointwise_convolution(layer: nn.Conv2d, x: Tensor) -> _OutputAndVjp:
    """Apply a 1×1 convolution to every pixel."""
    weight, pixels = layer.weight.flatten(1).expand(len(x), -1, -1), x.flatten(2)

    def backward(grad: Tensor, theta: _GramSum) -> Tensor:
        grad = grad.flatten(2)
        theta.add(grad @ pixels.mT)
        return torch.bmm(weight.mT, grad).view_as(x)

    return _OutputAndVjp(torch.bmm(weight, pixels).unflatten(2, x.shape[2:]), backward)


def _spatial_convolution(layer: nn.Conv2d) -> LayerFunction:
    """Return the layer function of a convolution.

    The kernel size must be odd, and the convolution dense or depthwise.
    """
    geometry = layer.stride, layer.padding, layer.dilation
    weight, groups = layer.weight, layer.groups
    flipped_weight = (weight if groups > 1 else weight.transpose(0, 1)).flip(2, 3).contiguous().detach()

    def weight_gradients(grad: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of the weight for every sample."""
        flat_grad, flat_x = (maps.view(1, -1, *maps.shape[2:]) for maps in (grad, x))  # samples as channels
        if layer.dilation == (2, 2) and not x.is_cuda:  # depthwise; on a CPU, a forward convolution is faster
            dilation_as_stride = (2, 2), (2, 2), (1, 1)  # entries of the weight are two pixels apart
            return _convolve(flat_x, flat_grad.transpose(0, 1), dilation_as_stride, flat_x.shape[1])
        if groups == 1 and x.is_cuda:
            return grad.flatten(2) @ input_patches(layer, x)[:, 0].mT
        weights = weight.new_empty(len(x) * len(weight), *weight.shape[1:])  # one weight per sample
        return _convolution_backward(flat_grad, flat_x, weights, geometry, len(x) * groups, (False, True, False))[1]

    def run(x: Tensor) -> _OutputAndVjp:
        def backward(grad: Tensor, theta: _GramSum) -> Tensor:
            grad = grad.contiguous()
            theta.add(weight_gradients(grad, x))
            if layer.stride == (1, 1):  # the input gradient is a convolution too, which is faster to compute directly
                return _convolve(grad, flipped_weight, geometry, groups)
            return _convolution_backward(grad, x, weight, geometry, groups, (True, False, False))[0]

        return _OutputAndVjp(_convolve(x, weight, geometry, groups), backward)

    return run


def _convolve(x: Tensor, weight: Tensor, geometry: tuple[Any, ...], groups: int) -> Tensor:
    """Return a convolution without bias; `geometry` is its stride, padding and dilation."""
    return torch.ops.aten.convolution(x, weight, None, *geometry, False, (0, 0), groups)  # type: ignore[no-any-return]


def _convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    geometry: tuple[Any, ...],
    groups: int,
    output_mask: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the input, weight and bias that `output_mask` selects."""
    return torch.ops.aten.convolution_backward(  # type: ignore[no-any-return]
        grad, x, weight, None, *geometry, False, (0, 0), groups, output_mask
    )


def _group_norm(layer: nn.GroupNorm) -> LayerFunction:
    """Return the layer function of a group norm that computes parameter gradients per sample.

    The channels of all samples are treated as the channels of one sample.
    """

    @functools.cache
    def repeated_parameters(samples: int) -> tuple[Tensor, Tensor]:
        return layer.weight.repeat(samples), layer.bias.repeat(samples)

    def run(x: Tensor) -> _OutputAndVjp:
        weight, bias = repeated_parameters(len(x))
        shape = 1, len(weight), x.shape[2:].numel(), len(x) * layer.num_groups  # samples, channels, pixels, groups
        y, *moments = torch.ops.aten.native_group_norm(x, weight, bias, *shape, layer.eps)

        def backward(grad: Tensor, theta: _GramSum) -> Tensor:
            input_grad, *parameter_grads = torch.ops.aten.native_group_norm_backward(
                grad.contiguous(), x, *moments, weight, *shape, (True, True, True)
            )
            for parameter_grad in parameter_grads:
                theta.add(parameter_grad)
            return input_grad.view_as(x)  # type: ignore[no-any-return]

        return _OutputAndVjp(y.view_as(x), backward)

    return run
