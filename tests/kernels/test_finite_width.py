"""Kernels between tasks against Gram matrices of the gradients of finite networks, by definition.

Entries of such a Gram matrix are means over units of a layer, so that it departs from its limit in proportion to
1/√width: nets four times as wide have half the error. Means over six nets have room for 0.7.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from metabridge import Episodes, method, parameters
from metabridge.experiments.meta_ntk_descent import meta_ntk, squared
from metabridge.kernels import EmpiricalKernel, anil_kernel, fully_connected_kernel, mtl_kernel, split_kernel
from metabridge.models import wide

KERNEL = fully_connected_kernel(depth=3)
WIDTHS = (32, 128, 512)
NETS = 6
TIME, STEPS = 0.1, 10  # of the inner loop, whose steps are so small that it follows gradient flow
INNER = {"steps": STEPS, "lr": TIME / STEPS, "loss": squared}


@pytest.fixture(scope="module")
def episodes():
    """Three tasks of two support and three query points on a sphere, each with a head of its own for MTL."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(3, 5, size, generator=generator, dtype=torch.float64) for size in (4, 1))
    x = 2 * torch.nn.functional.normalize(x, dim=-1)
    return Episodes(x[:, :2], y[:, :2], x[:, 2:], y[:, 2:], torch.arange(3)[:, None])


def errors(compare):
    """The mean relative error over nets, for every width; `compare` gives what is found and what is wanted."""
    means = []
    for width in WIDTHS:
        pairs = [compare(wide(4, width=width, depth=3, seed=10 * net + width).double()) for net in range(NETS)]
        means.append(sum(float((found - wanted).norm() / wanted.norm()) for found, wanted in pairs) / NETS)
    return means


def fall_as_theory_says(means):
    return all(wider < 0.7 * narrower for narrower, wider in pairwise(means))


def test_the_composed_metantk_approaches_its_definition_by_second_order_gradients(episodes):
    """B eq. 106 of the net's own NTK against eq. 4: what parts them is how the NTK moves with the parameters."""
    maml = method("maml", **INNER)

    def compare(net):
        composed = split_kernel(EmpiricalKernel(net), episodes.query_x, episodes.support_x, adapts="all", time=TIME)
        return meta_ntk(maml, net, parameters(maml, net), episodes), composed

    means = errors(compare)
    assert fall_as_theory_says(means)
    assert means[-1] < 0.03


def test_the_mtl_kernel_is_the_limit_of_the_gradients_in_the_body_and_a_head_for_each_task(episodes):
    mtl, x = method("mtl", loss=squared), episodes.without_split().support_x
    for heads in ("shared", "independent"):

        def compare(net, heads=heads):
            params = parameters(mtl, net, classes=3)
            generator = torch.Generator().manual_seed(net.recipe["seed"])
            drawn = torch.randn(params["heads.weight"].shape, dtype=torch.float64, generator=generator)
            params["heads.weight"].data.copy_(drawn if heads == "independent" else drawn[:1])
            return meta_ntk(mtl, net, params, episodes), mtl_kernel(KERNEL, x, heads)

        means = errors(compare)
        assert fall_as_theory_says(means)
        assert means[-1] < 0.15


def test_between_tasks_with_independent_heads_the_bodys_part_of_the_mtl_kernel_vanishes(episodes):
    mtl, tasks, points = method("mtl", loss=squared), 3, 5
    own = torch.block_diag(*torch.ones(tasks, points, points, dtype=torch.float64))
    limit = (1 - own) * mtl_kernel(KERNEL, episodes.without_split().support_x)

    def compare(net):
        params = parameters(mtl, net, classes=tasks)
        generator = torch.Generator().manual_seed(net.recipe["seed"])
        params["heads.weight"].data.normal_(generator=generator)
        between = (1 - own) * meta_ntk(mtl, net, params, episodes)
        return limit + between, limit  # so that the error is the part between tasks, of what it is with shared heads

    means = errors(compare)
    assert fall_as_theory_says(means)
    assert means[-1] < 0.15


def test_the_anil_kernel_is_the_limit_of_the_gradients_through_the_adaptation_of_the_head(episodes):
    anil = method("anil", **INNER, split=False)
    limit = anil_kernel(KERNEL, episodes.without_split().support_x, TIME)
    means = errors(lambda net: (meta_ntk(anil, net, parameters(anil, net), episodes), limit))
    assert fall_as_theory_says(means)
    assert means[-1] < 0.15
