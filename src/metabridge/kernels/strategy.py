"""Which way to compute an empirical kernel, and how much of it at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from metabridge.kernels.cost_model import Survey
from metabridge.kernels.gradient_products import Outputs
from metabridge.kernels.jacobian import Block

Way = Literal["auto", "gradients", "products"]

CPU_PASS = 2**27  # bytes that a pass over some samples holds on a CPU: larger ones gain little there
ELEMENTWISE = 30  # multiplications of a matrix product in the time of one that goes through memory


class Plan(NamedTuple):
    """How a kernel is computed, and what that is estimated to cost in multiplications."""

    way: Literal["gradients", "products"]
    cost: float
    tile: int  # samples whose gradients are held
    chunk: int  # samples, or for products pairs of a sample and an output, that go through the net at a time
    room: int = 0  # bytes beside them for forming a layer's gradients on a GPU
    cores: int = 1  # that take such chunks side by side
    formed: tuple[Block, ...] = ()
    factored: tuple[Block, ...] = ()


class Problem(NamedTuple):
    """A kernel between n and m samples, or n and the same, to be computed in so many bytes."""

    survey: Survey
    outputs: Outputs
    memory: int
    n: int
    m: int
    symmetric: bool
    cached: bool  # whether the device is a CPU, which gains by small pieces that stay in its cache

    def cheapest(self, way: Way) -> Plan | None:
        """The cheapest plan that the memory holds, if it holds any."""
        blocks = self.survey.blocks
        plans: list[Plan] = []
        if way != "products":
            fast = [block for block in blocks if self._factored_cost(block) >= self._formed_cost(block)]
            small = [block for block in blocks if not self._shorter_factored(block)]
            plans += [self._by_gradients(fast), self._by_gradients(small)]
        if way != "gradients":
            plans.append(self._by_products())
        return min((plan for plan in plans if plan.tile >= 1), key=lambda plan: plan.cost, default=None)

    def _by_gradients(self, formed: Sequence[Block]) -> Plan:
        names = {block.name for block in formed}
        factored = [block for block in self.survey.blocks if block.name not in names]
        plan = self.rows(formed, factored)
        contraction = sum(map(self._formed_cost, formed)) + sum(map(self._factored_cost, factored))
        return plan._replace(cost=plan.cost + contraction)

    def rows(self, formed: Sequence[Block], factored: Sequence[Block]) -> Plan:
        """Hold as many samples' gradients as fit beside a pass over some samples; the cost is that of the gradients."""
        survey, cpu = self.survey, self.cached
        stored = survey.outputs * sum(block.size for block in formed)
        stored += sum(block.positions * (block.inputs + survey.outputs * block.outputs) for block in factored)
        stored *= survey.itemsize
        passing = survey.graph + survey.passing + (survey.forming if cpu else 0)
        if survey.others:
            passing = max(passing, 2 * (survey.outputs + 1) * survey.graph + stored)
        share, room = max(passing, self.memory // 4), 0 if cpu else max(survey.forming, self.memory // 4)
        left, most = self.memory - share - room, max(self.n, self.m)
        whole = most * stored * (1 if self.symmetric else 2) <= left
        tile = most if whole else left // (2 * stored)
        if tile < 1:
            return Plan("gradients", math.inf, 0, 1)
        tiles = -(-self.n // tile)
        samples = (self.n * (tiles + 1) // 2) if self.symmetric else self.n + tiles * self.m
        cores = max(1, min(torch.get_num_threads(), share // passing)) if cpu else 1
        free = left - tile * stored * (1 if whole and self.symmetric else 2)
        held = min(share // cores, CPU_PASS) if cpu else share + free  # a GPU is quickest with all samples at once
        passes = -(-tile // max(1, held // passing))
        chunk = -(-tile // passes)
        cost = samples * survey.work * (1 + survey.outputs) * (3 if survey.others else 1)
        return Plan("gradients", cost, tile, chunk, room, cores, tuple(formed), tuple(factored))

    def _by_products(self) -> Plan:
        """Push pairs of a sample and an output forward together, as many as fit, over as many samples as fit."""
        survey, half = self.survey, self.memory // 2
        size = 3 * survey.itemsize * sum(block.size for block in survey.blocks)
        pairs = int(min(self.m * survey.outputs, half // (size + 2 * survey.graph)))
        tile = int(min(self.n, half // (max(1, pairs) * 3 * survey.graph))) if pairs else 0
        if pairs > 1 and not tile:
            pairs, tile = 1, int(min(self.n, half // (3 * survey.graph)))
        return Plan("products", 3 * self.m * survey.outputs * (1 + self.n) * survey.work, tile, pairs)

    def _formed_cost(self, block: Block) -> float:
        k, products = self.survey.outputs, self.n * self.m * self.survey.outputs
        return k * (self.n + self.m) * block.work + products * (k if self.outputs == "full" else 1) * block.size

    def _factored_cost(self, block: Block) -> float:
        if not block.positions:
            return math.inf
        r, fold = (self.survey.outputs, 1) if self.outputs == "full" else (1, self.survey.outputs)
        pair = block.inputs + r * r * (fold * block.outputs + ELEMENTWISE)
        return self.n * self.m * block.positions**2 * pair

    def _shorter_factored(self, block: Block) -> bool:
        k = self.survey.outputs
        return 0 < block.positions * (block.inputs + k * block.outputs) < k * block.size
