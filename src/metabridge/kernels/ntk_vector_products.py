"""The empirical kernel from NTK-vector products, which hold the gradients of only a few columns at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap

from metabridge.kernels.gradient_products import Outputs
from metabridge.kernels.jacobian import PerSampleGradients
from metabridge.kernels.strategy import Strategy
from metabridge.models.network import Params, call_with_params


def fill_by_products(
    gradients: PerSampleGradients, strategy: Strategy, outputs: Outputs, x: Tensor, z: Tensor | None, grid: Tensor
) -> None:
    """Write Θ into a grid column by column: J(x)(J(z)ᵀe) for each sample of z and each output, with unit vector e.

    Args:
        gradients: The network and its parameters.
        strategy: Numbers of rows and columns that are computed at a time.
        outputs: How the outputs are reduced.
        x: The n samples of the rows.
        z: The m samples of the columns. If None, they are `x`, and entries below the diagonal may remain unset.
        grid: The result, (n, r, m, r), with r the number of outputs for "full" and 1 otherwise. It must be zero. For
            "mean", the sum over outputs is not divided by their number.
    """
    params = {name: gradients.params[name] for name in gradients.names}
    fixed = {name: value for name, value in gradients.params.items() if name not in params}
    column_samples = x if z is None else z

    def apply_to(samples: Tensor) -> Callable[[Params], Tensor]:
        def apply(params: Params) -> Tensor:
            copy = samples.clone(memory_format=torch.contiguous_format)  # the network may change its input
            y: Tensor = call_with_params(gradients.net, fixed | params, copy)
            return y.sum(1, keepdim=True) if gradients.sum_outputs else y

        return apply

    def gradient(sample: Tensor, output: Tensor) -> Params:
        y, backward = vjp(apply_to(sample.unsqueeze(0)), params)[:2]
        cotangent = torch.zeros_like(y).scatter(1, output.view(1, 1), 1.0)
        return backward(cotangent)[0]  # type: ignore[no-any-return]

    with torch.no_grad():
        k = apply_to(x[:1])(params).shape[1]
        for start in range(0, len(column_samples) * k, strategy.chunk):
            pairs = torch.arange(start, min(start + strategy.chunk, len(column_samples) * k), device=x.device)
            column_indices, output_indices = pairs // k, pairs % k
            directions = vmap(gradient)(column_samples[column_indices], output_indices)
            rows_end = len(x) if z is not None else int(column_indices[-1]) + 1  # skip rows below the diagonal
            for i in range(0, rows_end, strategy.tile):
                apply = apply_to(x[i : min(i + strategy.tile, rows_end)])
                columns = vmap(lambda direction: jvp(apply, (params,), (direction,))[1])(directions)  # noqa: B023
                rows = slice(i, i + columns.shape[1])
                if outputs == "full":
                    grid[rows].flatten(2)[:, :, start : start + len(pairs)] = columns.movedim(0, -1)
                else:
                    same_output = columns[torch.arange(len(pairs)), :, output_indices]
                    grid[rows, 0, :, 0].index_add_(1, column_indices, same_output.mT)
