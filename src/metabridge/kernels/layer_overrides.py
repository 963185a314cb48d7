"""Replacements of layers' forward methods that make per-sample gradients cheaper but return the same outputs.

The main case is a convolution of the network's input, followed by a normalization layer and max pooling. For each
sample, convolution and normalization together are one affine map Va + v of the centered input patches a, and max
pooling selects one patch per window and channel. Since the input needs no gradient, the gradient with respect to V is a
sum over the selected patches only. The gradients with respect to the parameters of both layers follow from the
gradients with respect to V and v by the chain rule.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F

from metabridge.models.batch_norm import BatchNorm
from metabridge.models.network import Params

ForwardOverride = Callable[[Any, Tensor], Tensor]  # function of a layer and its input

NORMS = (BatchNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.LayerNorm)


def on_cpu(x: Tensor) -> bool:
    """Return whether `x` is on a CPU.

    Code paths differ: a CPU is fastest with blocks that fit in its cache, a GPU with few kernel launches.
    """
    return x.device.type == "cpu"


@contextlib.contextmanager
def override_forward(overrides: dict[nn.Module, ForwardOverride]) -> Iterator[None]:
    """Replace the forward methods of some layers inside the context."""

    def bind(layer: nn.Module, function: ForwardOverride) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: function(layer, *args, *kwargs.values())

    originals = {layer: vars(layer).get("forward") for layer in overrides}
    for layer, function in overrides.items():
        vars(layer)["forward"] = bind(layer, function)
    try:
        yield
    finally:
        for layer, forward in originals.items():
            del vars(layer)["forward"]
            if forward is not None:
                vars(layer)["forward"] = forward


def pool_settings(layer: nn.MaxPool2d) -> list[list[int]]:
    """Return the kernel size, stride, padding and dilation of max pooling, each as [height, width]."""
    settings = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    return [[setting, setting] if isinstance(setting, int) else list(setting) for setting in settings]


def max_pool(layer: nn.MaxPool2d, x: Tensor) -> Tensor:
    """Apply max pooling without saving its input for the backward pass."""
    pool: Callable[..., Tensor] = torch.max_pool2d if x.ndim == 3 else _MaxPool.apply
    return pool(x, *pool_settings(layer), layer.ceil_mode)


class PooledConv(NamedTuple):
    """The result of max pooling the feature maps Va + v, where V and v depend on the sample.

    Args:
        maxima: The pooled feature maps, (samples, channels, height, width).
        argmax: Positions of the patches that attain the maxima, (samples, channels, pooled positions).
        patches: The centered patches a, (samples, positions, in_features).
        weight: V, (samples, channels, in_features), as a differentiable function of the parameters.
        bias: v, (samples, channels), as a differentiable function of the parameters.
    """

    maxima: Tensor
    argmax: Tensor
    patches: Tensor
    weight: Tensor
    bias: Tensor

    def vjp(self, grads: Sequence[Tensor], params: Sequence[Tensor], step: int) -> list[Tensor]:
        """Return the gradients (samples, outputs, ...) with respect to the parameters on which V and v depend.

        The gradient with respect to V is the sum of the selected patches, each multiplied by the gradient with respect
        to its maximum.

        Args:
            grads: For each network output, its gradient with respect to the maxima.
            params: The parameters, one copy per sample.
            step: Number of samples that are processed at a time on a GPU.
        """
        if on_cpu(self.patches):
            samples = zip(self.patches, self.argmax, *grads)
            weight_grads = [self._weight_gradients_of_sample(*sample) for sample in samples]
        else:
            starts = range(0, len(self.patches), step)
            weight_grads = [self._weight_gradients_of_samples(grads, slice(start, start + step)) for start in starts]
        cotangents = torch.cat(weight_grads, 1), torch.stack([grad.sum((2, 3)) for grad in grads])

        def backward(*cotangents: Tensor) -> tuple[Tensor, ...]:
            return torch.autograd.grad((self.weight, self.bias), params, cotangents)

        return [gradient.transpose(0, 1) for gradient in vmap(backward)(*cotangents)]

    def _weight_gradients_of_sample(self, patches: Tensor, argmax: Tensor, *grads: Tensor) -> Tensor:
        """Return the gradient with respect to V for one sample, (outputs, 1, channels, in_features)."""
        weights, positions = torch.cat(grads).flatten(1), argmax.repeat(len(grads), 1)
        sums = F.embedding_bag(positions, patches, mode="sum", per_sample_weights=weights)
        return sums.view(len(grads), 1, -1, sums.shape[1])

    def _weight_gradients_of_samples(self, grads: Sequence[Tensor], samples: slice) -> Tensor:
        """Return the gradient with respect to V for several samples, (outputs, samples, channels, in_features)."""
        patches = self.patches[samples]
        indices = torch.arange(len(patches), dtype=torch.int, device=patches.device)
        offsets = indices.mul_(patches.shape[1]).view(-1, 1, 1)
        selected = F.embedding(self.argmax[samples] + offsets, patches.flatten(0, 1))
        stacked = torch.stack([grad[samples].flatten(2) for grad in grads], 2)
        return (stacked @ selected).movedim(2, 0)


def pooled_conv(pool: nn.MaxPool2d, windows: Tensor, norm: Any, conv_params: Params, norm_params: Params) -> PooledConv:
    """Apply a convolution, a normalization layer and max pooling as one operation.

    With the mean m of the patches and the centered patches a, the convolution of weight W and bias b is Wa + (Wm + b).
    The statistics of group norm follow from m and the covariance C of the patches, since the feature maps have the
    means Wm + b and the variances diag(W C Wᵀ). Therefore V and v are functions of the parameters, and the feature maps
    need not be normalized.

    Args:
        pool: The max pooling layer.
        windows: The input windows of the convolution, (samples, channels, *window_size, *output_size).
        norm: The normalization layer.
        conv_params: Parameters of the convolution, one copy per sample.
        norm_params: Parameters of the normalization layer, one copy per sample.

    Returns:
        The pooled feature maps and the tensors that their gradients depend on.
    """
    weight, (patches, m) = conv_params["weight"].flatten(2), _centered_patches(windows)
    channel_mean = (weight @ m).squeeze(-1) + conv_params.get("bias", 0.0)
    if isinstance(norm, nn.GroupNorm):
        # One matrix product per row of an image, since fewer and longer products would not occupy a GPU.
        image_rows = patches.unflatten(1, windows.shape[4:])
        channel_variance = (weight @ ((image_rows.mT @ image_rows).sum(1) / patches.shape[1]) * weight).sum(-1)
        grouped_means, grouped_variances = (
            value.unflatten(1, (norm.num_groups, -1)) for value in (channel_mean, channel_variance)
        )
        group_mean = grouped_means.mean(2, keepdim=True)
        group_variance = (grouped_variances + (grouped_means - group_mean).square()).mean(2, keepdim=True)
        mean, variance = (value.expand_as(grouped_means).flatten(1) for value in (group_mean, group_variance))
    else:
        mean, variance = _running_statistics(norm)
    scale = norm_params["weight"] * torch.rsqrt(variance + norm.eps)
    shift = (channel_mean - mean) * scale + norm_params.get("bias", 0.0)
    weight = weight * scale.unsqueeze(-1)
    if on_cpu(patches):
        maps = torch.baddbmm(shift.detach().unsqueeze(1), patches, weight.detach().mT).mT
    else:
        maps = torch.baddbmm(shift.detach().unsqueeze(2), weight.detach(), patches.mT)
    maxima, argmax = _max_pool_with_indices(maps.unflatten(2, windows.shape[4:]), *pool_settings(pool), pool.ceil_mode)
    return PooledConv(maxima, argmax.flatten(2).int(), patches, weight, shift)


def _centered_patches(windows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the centered patches (samples, positions, in_features) and their mean (samples, in_features, 1)."""
    if on_cpu(windows):  # on a CPU, it is faster to copy contiguous memory first and then transpose
        a = windows.flatten(1, 3).flatten(2)
        m = a.mean(-1, keepdim=True)
        return (a - m).mT.contiguous(), m
    m, transposed = windows.mean((4, 5)), windows.permute(0, 4, 5, 1, 2, 3)
    patches = torch.sub(transposed, m[:, None, None], out=windows.new_empty(transposed.shape))
    return patches.flatten(3).flatten(1, 2), m.flatten(1).unsqueeze(2)


def _max_pool_with_indices(x: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    """Return the maxima of the windows and their positions."""
    if on_cpu(x):  # on a CPU, the channels-last memory format is four times faster
        x = x.contiguous(memory_format=torch.channels_last)
    y, indices = torch.ops.aten.max_pool2d_with_indices(x, *settings)
    return y.contiguous(), indices.contiguous()


class _BatchedBackward(torch.autograd.Function):
    """Applies a function `vjp` to output gradients. Under `vmap`, it is called once with the gradients of all outputs.

    `vjp` takes gradients (outputs, samples, ...). The first dimension has size 1 outside `vmap`.
    """

    @staticmethod
    def forward(vjp: Callable[..., tuple[Tensor, ...]], g: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad.squeeze(0) for grad in vjp(g.unsqueeze(0), *saved))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def vmap(info: Any, axes: tuple[Any, ...], vjp: Callable[..., Any], g: Tensor, *saved: Tensor) -> tuple[Any, ...]:
        grads = vjp(g.movedim(axes[1], 0), *saved)
        return grads, (0,) * len(grads)


class _MaxPool(torch.autograd.Function):
    """Max pooling that does not save its input: the backward pass needs only the input shape and the indices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *settings: Any) -> Tensor:
        y, indices = _max_pool_with_indices(x, *settings)
        ctx.save_for_backward(indices)
        ctx.shape, ctx.num_settings = x.shape, len(settings)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        def vjp(g: Tensor, indices: Tensor) -> tuple[Tensor]:
            grad = g.new_zeros(len(g), *ctx.shape).flatten(3)
            grad.scatter_add_(3, indices.flatten(2).expand(len(g), -1, -1, -1), g.flatten(3))
            return (grad.view(len(g), *ctx.shape),)

        (grad,) = _BatchedBackward.apply(vjp, *grads, *ctx.saved_tensors)
        return grad, *(None,) * ctx.num_settings


class _GroupNorm(torch.autograd.Function):
    """Group norm with a weight and a bias for each sample, and a backward pass with few memory reads.

    Let w be the weight, g the gradient with respect to the output at the positions p, σ the standard deviation of a
    group and x̂ the normalized x. The gradients with respect to the weight and the bias are ĝ = Σ_p g_p x̂_p and
    ḡ = Σ_p g_p. The gradient with respect to x is σ⁻¹(wg − (Σ_c wḡ + x̂ Σ_c wĝ)/N), with sums over the channels c of a
    group of N elements. It is computed as an affine function of g and x for each channel.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: int, eps: float, weight: Tensor, bias: Tensor) -> Tensor:
        samples, channels = weight.shape
        sizes = 1, samples * channels, x[0, 0].numel(), samples * groups  # samples are folded into channels
        y, mean, scale = torch.native_group_norm(x.contiguous(), weight.flatten(), bias.flatten(), *sizes, eps)
        ctx.save_for_backward(x, weight, mean.view(samples, groups, 1), scale.view(samples, groups, 1))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        def vjp(g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
            shape, w = g.shape, weight.view(*mean.shape[:2], -1)
            factor = scale / (-x[0].numel() / w.shape[1])  # −σ⁻¹/N
            g, x = g.reshape(len(g), *w.shape, -1), x.reshape(*w.shape, -1)
            sums = torch.stack([torch.einsum("o...p,...p->o...", g, x), g.sum(-1)])
            grad_weight, grad_bias = sums
            grad_weight.addcmul_(mean, grad_bias, value=-1).mul_(scale)
            group_sums = (w * sums).sum(-1, keepdim=True)
            x_factor = group_sums[0] * (factor * scale)
            shift = (group_sums[1] * factor).addcmul_(x_factor, mean, value=-1)
            g_factor, x_factor, shift = (value.unsqueeze(-1) for value in (w * scale, x_factor, shift))
            grad_x = torch.addcmul(shift, x_factor, x).addcmul_(g_factor, g)
            return grad_x.view(shape), grad_weight.flatten(2), grad_bias.flatten(2)

        grad_x, grad_weight, grad_bias = _BatchedBackward.apply(vjp, *grads, *ctx.saved_tensors)
        return grad_x, None, None, grad_weight, grad_bias


def apply_norm(layer: Any, x: Tensor, copies: Params) -> Tensor:
    """Apply a normalization layer with one copy of its parameters per sample."""
    if isinstance(layer, nn.GroupNorm) and len(copies) == 2 and not on_cpu(x):
        return _GroupNorm.apply(x, layer.num_groups, layer.eps, *copies.values())  # type: ignore[no-any-return]
    if isinstance(layer, nn.GroupNorm):  # fold samples into channels: each sample has its own groups
        flat = {role: value.flatten() for role, value in copies.items()}
        return F.group_norm(x.reshape(1, -1, *x.shape[2:]), len(x) * layer.num_groups, **flat, eps=layer.eps).view_as(x)
    if isinstance(layer, nn.LayerNorm):
        y = F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
        shape = len(x), *(1,) * (x.ndim - 1 - len(layer.normalized_shape)), *layer.normalized_shape
    else:
        y = F.batch_norm(x, *_running_statistics(layer), eps=layer.eps)
        shape = *x.shape[:2], *(1,) * (x.ndim - 2)
    y = y * copies["weight"].view(shape)
    return y + copies["bias"].view(shape) if "bias" in copies else y


def _running_statistics(layer: Any) -> tuple[Tensor, Tensor]:
    """Return the mean and variance of a batch norm in evaluation mode."""
    if isinstance(layer, BatchNorm):
        return layer.mean, layer.variance
    return layer.running_mean, layer.running_var
