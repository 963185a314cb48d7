"""Choose the cheapest strategy to compute an empirical kernel within a memory budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from metabridge.kernels.cost_model import NetworkProfile
from metabridge.kernels.gradient_products import Outputs
from metabridge.kernels.jacobian import ParameterInfo

StrategyName = Literal["auto", "gradients", "products"]

CPU_PASS_BYTES = 2**27  # maximum memory of a forward and backward pass on a CPU; more is hardly faster
ELEMENTWISE_COST = 30  # cost of an elementwise multiplication relative to one in a matrix product


class Strategy(NamedTuple):
    """How to compute a kernel, and its estimated cost.

    Args:
        name: "gradients" for per-sample gradients, "products" for NTK-vector products.
        cost: Estimated number of multiplications.
        tile: For gradients, number of rows (and of columns) whose gradients are in memory at a time. For products,
            number of rows that are computed at a time.
        chunk: For gradients, number of samples in a forward and backward pass. For products, number of (column, output)
            pairs that are computed at a time.
        workspace_bytes: Memory for computing the gradients of a layer on a GPU, in bytes; 0 on a CPU.
        threads: Number of CPU threads that run forward and backward passes.
        materialized: Parameters whose gradients are materialized, that is, stored as full tensors.
        factored: Parameters whose gradients Σ_p g_p a_pᵀ are stored as the factors a and g (see `jacobian`).
    """

    name: Literal["gradients", "products"]
    cost: float
    tile: int
    chunk: int
    workspace_bytes: int = 0
    threads: int = 1
    materialized: tuple[ParameterInfo, ...] = ()
    factored: tuple[ParameterInfo, ...] = ()


class KernelProblem(NamedTuple):
    """A kernel between n and m samples, with everything on which the choice of a strategy depends.

    Args:
        profile: Sizes and costs of the network.
        outputs: How the outputs are reduced: "mean", "sum" or "full" (all pairs of outputs); see `EmpiricalKernel`.
        memory: Memory budget in bytes.
        n: Number of row samples.
        m: Number of column samples.
        symmetric: Whether row and column samples are the same.
        on_cpu: Whether the device is a CPU.
    """

    profile: NetworkProfile
    outputs: Outputs
    memory: int
    n: int
    m: int
    symmetric: bool
    on_cpu: bool

    def cheapest_strategy(self, name: StrategyName) -> Strategy | None:
        """Return the cheapest strategy that fits in memory, or None if no strategy fits.

        Args:
            name: Name of the strategies to consider; "auto" for all of them.
        """
        parameters = self.profile.parameters
        strategies: list[Strategy] = []
        if name != "products":
            # Two candidates: materialize gradients where that is cheaper than factors, or where it needs less memory.
            lowest_cost = [info for info in parameters if self._factored_cost(info) >= self._materialized_cost(info)]
            least_memory = [info for info in parameters if not self._factors_are_smaller(info)]
            strategies += [self._gradient_strategy_with_total_cost(choice) for choice in (lowest_cost, least_memory)]
        if name != "gradients":
            strategies.append(self._product_strategy())
        feasible = (strategy for strategy in strategies if strategy.tile >= 1)
        return min(feasible, key=lambda strategy: strategy.cost, default=None)

    def _gradient_strategy_with_total_cost(self, materialized: Sequence[ParameterInfo]) -> Strategy:
        """Return `gradient_strategy` with the cost of the inner products added. Other parameters are factored."""
        names = {info.name for info in materialized}
        factored = [info for info in self.profile.parameters if info.name not in names]
        strategy = self.gradient_strategy(materialized, factored)
        product_cost = sum(map(self._materialized_cost, materialized)) + sum(map(self._factored_cost, factored))
        return strategy._replace(cost=strategy.cost + product_cost)

    def gradient_strategy(self, materialized: Sequence[ParameterInfo], factored: Sequence[ParameterInfo]) -> Strategy:
        """Return the gradient strategy with the largest tile that fits in memory.

        Its cost does not include the inner products. If no tile fits, the tile is 0 and the cost is infinite.
        """
        profile, cpu = self.profile, self.on_cpu
        gradient_elements = profile.gradients_per_sample * sum(info.size for info in materialized)
        gradient_elements += sum(
            info.positions * (info.in_features + profile.gradients_per_sample * info.out_features) for info in factored
        )
        gradient_bytes = gradient_elements * profile.itemsize  # per sample
        sample_bytes = profile.graph_bytes + profile.transient_bytes + (profile.workspace_bytes if cpu else 0)
        if profile.generic_names:  # estimate for `vmap` of `jacrev`, which differentiates all outputs at once
            sample_bytes = max(
                sample_bytes, 2 * (profile.gradients_per_sample + 1) * profile.graph_bytes + gradient_bytes
            )
        # A pass gets a quarter of the memory, or more if one sample needs more.
        pass_bytes = max(sample_bytes, self.memory // 4)
        workspace_bytes = 0 if cpu else max(profile.workspace_bytes, self.memory // 4)
        available_bytes, samples = self.memory - pass_bytes - workspace_bytes, max(self.n, self.m)
        all_fit = samples * gradient_bytes * (1 if self.symmetric else 2) <= available_bytes
        tile = samples if all_fit else available_bytes // (2 * gradient_bytes)
        if tile < 1:
            return Strategy("gradients", math.inf, 0, 1)
        tiles = -(-self.n // tile)
        # Number of per-sample gradient computations. Gradients of the columns are recomputed for each tile of rows.
        computations = (self.n * (tiles + 1) // 2) if self.symmetric else self.n + tiles * self.m
        threads = max(1, min(torch.get_num_threads(), pass_bytes // sample_bytes)) if cpu else 1
        free_bytes = available_bytes - tile * gradient_bytes * (1 if all_fit and self.symmetric else 2)
        # A GPU is fastest with all samples in one pass.
        chunk_bytes = min(pass_bytes // threads, CPU_PASS_BYTES) if cpu else pass_bytes + free_bytes
        passes = -(-tile // max(1, chunk_bytes // sample_bytes))
        chunk = -(-tile // passes)
        cost = (
            computations
            * profile.multiplications
            * (1 + profile.gradients_per_sample)  # a forward pass, and a backward pass per gradient
            * (3 if profile.generic_names else 1)  # `vmap` of `jacrev` is estimated to be three times as expensive
        )
        return Strategy("gradients", cost, tile, chunk, workspace_bytes, threads, tuple(materialized), tuple(factored))

    def _product_strategy(self) -> Strategy:
        """Return the product strategy with as many (column, output) pairs as fit in memory, and then as many rows.

        Its factors 2 and 3 are estimates: of the copies of a tensor that exist at once, and of the forward passes that
        cost as much as one Jacobian product.
        """
        profile, half_memory = self.profile, self.memory // 2
        parameter_bytes = 3 * profile.itemsize * sum(info.size for info in profile.parameters)
        chunk = int(
            min(self.m * profile.gradients_per_sample, half_memory // (parameter_bytes + 2 * profile.graph_bytes))
        )
        tile = int(min(self.n, half_memory // (max(1, chunk) * 3 * profile.graph_bytes))) if chunk else 0
        if chunk > 1 and not tile:
            chunk, tile = 1, int(min(self.n, half_memory // (3 * profile.graph_bytes)))
        cost = 3 * self.m * profile.gradients_per_sample * (1 + self.n) * profile.multiplications
        return Strategy("products", cost, tile, chunk)

    def _materialized_cost(self, info: ParameterInfo) -> float:
        """Return the cost of materializing the gradients of a parameter and of their inner products."""
        k = self.profile.gradients_per_sample
        inner_products = self.n * self.m * k * (k if self.outputs == "full" else 1)
        return k * (self.n + self.m) * info.multiplications + inner_products * info.size

    def _factored_cost(self, info: ParameterInfo) -> float:
        """Return the cost of the inner products of a parameter's gradients, computed from their factors."""
        if not info.positions:
            return math.inf
        # For "full", there are inner products of r² pairs of outputs. Otherwise, the gradients of the k outputs are
        # concatenated, so that one inner product is the sum over outputs.
        k = self.profile.gradients_per_sample
        r, concatenated = (k, 1) if self.outputs == "full" else (1, k)
        pair_cost = info.in_features + r * r * (concatenated * info.out_features + ELEMENTWISE_COST)
        return self.n * self.m * info.positions**2 * pair_cost

    def _factors_are_smaller(self, info: ParameterInfo) -> bool:
        k = self.profile.gradients_per_sample
        return 0 < info.positions * (info.in_features + k * info.out_features) < k * info.size
