"""The empirical kernel by NTK-vector products, which need no more than one gradient at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap

from metabridge.kernels.gradient_products import Outputs
from metabridge.kernels.jacobian import Gradients
from metabridge.kernels.strategy import Plan
from metabridge.models.network import Params, call_with_params


def by_products(gradients: Gradients, plan: Plan, outputs: Outputs, x: Tensor, z: Tensor | None, grid: Tensor) -> None:
    """Write Θ into the grid (n, r, m, r) column by column: J(x)(J(z)ᵀe) for each sample of z and each output."""
    moving = {name: gradients.params[name] for name in gradients.names}
    fixed = {name: value for name, value in gradients.params.items() if name not in moving}
    points = x if z is None else z

    def function(samples: Tensor) -> Callable[[Params], Tensor]:
        def apply(params: Params) -> Tensor:
            own = samples.clone(memory_format=torch.contiguous_format)  # which the net may change
            y: Tensor = call_with_params(gradients.net, fixed | params, own)
            return y.sum(1, keepdim=True) if gradients.summed else y

        return apply

    def pulled(point: Tensor, output: Tensor) -> Params:
        y, pull = vjp(function(point.unsqueeze(0)), moving)[:2]
        seed = torch.zeros_like(y).scatter(1, output.view(1, 1), 1.0)
        return pull(seed)[0]  # type: ignore[no-any-return]

    with torch.no_grad():
        k = function(x[:1])(moving).shape[1]
        for start in range(0, len(points) * k, plan.chunk):
            pairs = torch.arange(start, min(start + plan.chunk, len(points) * k), device=x.device)
            samples, which = pairs // k, pairs % k
            directions = vmap(pulled)(points[samples], which)
            last = len(x) if z is not None else int(samples[-1]) + 1  # what is below the diagonal is not needed
            for i in range(0, last, plan.tile):
                apply = function(x[i : min(i + plan.tile, last)])
                columns = vmap(lambda direction: jvp(apply, (moving,), (direction,))[1])(directions)  # noqa: B023
                rows = slice(i, i + columns.shape[1])
                if outputs == "full":
                    grid[rows].flatten(2)[:, :, start : start + len(pairs)] = columns.movedim(0, -1)
                else:
                    own = columns[torch.arange(len(pairs)), :, which]
                    grid[rows, 0, :, 0].index_add_(1, samples, own.mT)
