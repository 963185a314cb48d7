"""The empirical kernel, computed by NTK-vector products, which keep the gradients of only a few columns in memory."""

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
    """Write Θ into a grid, column by column: J(x)(J(z)ᵀe) for each sample of z and the unit vector e of each output.

    Args:
        gradients: The network and its parameters.
        strategy: Numbers of rows and columns that are computed at a time.
        outputs: "full" for the kernel of all pairs of outputs; "mean" or "sum" for one number per pair of samples. For
            "mean", it is the sum over outputs, which the caller divides by their number.
        x: The n row samples.
        z: The m column samples. If None, they are `x`, and entries below the diagonal may remain zero.
        grid: The result, (n, r, m, r), where r is the number of outputs for "full" and 1 otherwise. Initially zero.
    """
    params = {name: gradients.params[name] for name in gradients.names}
    fixed = {name: value for name, value in gradients.params.items() if name not in params}
    column_samples = x if z is None else z

    def outputs_for(samples: Tensor) -> Callable[[Params], Tensor]:
        def apply(params: Params) -> Tensor:
            copy = samples.clone(memory_format=torch.contiguous_format)  # the network may change its input in-place
            y: Tensor = call_with_params(gradients.net, fixed | params, copy)
            return y.sum(1, keepdim=True) if gradients.sum_outputs else y

        return apply

    def gradient(sample: Tensor, output_index: Tensor) -> Params:
        y, backward = vjp(outputs_for(sample.unsqueeze(0)), params)[:2]
        cotangent = torch.zeros_like(y).scatter(1, output_index.view(1, 1), 1.0)
        return backward(cotangent)[0]  # type: ignore[no-any-return]

    with torch.no_grad():
        k = outputs_for(x[:1])(params).shape[1]  # number of outputs; 1 if they are summed
        for start in range(0, len(column_samples) * k, strategy.chunk):
            # Pairs of a sample of z and an output, numbered sample by sample.
            pairs = torch.arange(start, min(start + strategy.chunk, len(column_samples) * k), device=x.device)
            column_indices, output_indices = pairs // k, pairs % k
            directions = vmap(gradient)(column_samples[column_indices], output_indices)  # J(z)ᵀe of each pair
            row_count = len(x) if z is not None else int(column_indices[-1]) + 1  # skip rows below the diagonal
            for i in range(0, row_count, strategy.tile):
                apply = outputs_for(x[i : min(i + strategy.tile, row_count)])
                columns = vmap(lambda direction: jvp(apply, (params,), (direction,))[1])(directions)  # noqa: B023
                rows = slice(i, i + columns.shape[1])
                if outputs == "full":
                    grid[rows].flatten(2)[:, :, start : start + len(pairs)] = columns.movedim(0, -1)
                else:
                    same_output_columns = columns[torch.arange(len(pairs)), :, output_indices]
                    grid[rows, 0, :, 0].index_add_(1, column_indices, same_output_columns.mT)
