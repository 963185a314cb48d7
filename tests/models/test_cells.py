from __future__ import annotations

import json
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cases import relative
from metabridge import InputError
from metabridge.kernels.empirical import EmpiricalKernel
from metabridge.models import BatchNorm, DropPath, Network, build, cell_triton_layers, cells, fused_layers, mlp
from metabridge.models.cells import Cells, cell_network, mask, supernet
from metabridge.nas import OPERATORS, ActiveOperators, Architecture, random_architecture
from metabridge.training import load
from metabridge.use.image_input import image_shape

MIXED = (
    ((0, "sep_conv_3x3"), (1, "skip")),
    ((1, "conv_3x3"), (2, "max_pool_3x3")),
    ((0, "dil_conv_3x3"), (3, "conv_1x5_5x1")),
)
POOLED = (
    ((0, "skip"), (1, "avg_pool_3x3")),
    ((0, "conv_1x5_5x1"), (1, "sep_conv_3x3")),
    ((2, "skip"), (3, "conv_3x3")),
)
ARCHITECTURE = Architecture(MIXED, POOLED)
SMALL = {"cells": 3, "channels": 4}


def images(count: int, size: int = 16, channels: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(seed))


def count(module: nn.Module) -> int:
    return sum(value.numel() for value in module.parameters())


def twins(**options) -> tuple[Network, Network]:
    """A supernet masked by an architecture, and that architecture's network with the same weights."""
    made = cell_network(ARCHITECTURE, **SMALL, drop_rate=0, seed=1, **options)
    whole = supernet(ActiveOperators.full(), **SMALL, **options)
    missing, surplus = made.load_state_dict(whole.state_dict(), strict=False)
    assert (missing, bool(surplus)) == ([], True)
    mask(whole, ARCHITECTURE.active_operators)
    return whole, made


@pytest.mark.parametrize("size", [32, 84, 28, 21])
@pytest.mark.parametrize(
    "make", [lambda **o: supernet(ActiveOperators.full(), **o), lambda **o: cell_network(ARCHITECTURE, **o)]
)
def test_images_of_any_size_become_as_many_outputs_as_asked_for(make, size):
    net = make(**SMALL, image_channels=1, size=size, outputs=7)
    x = images(2, size, channels=1)
    assert net.features(x).shape == (2, 3 * 4 * 4)  # three nodes, and channels doubled twice
    assert net(x).shape == (2, 7)


@pytest.mark.parametrize(("cells", "reductions"), [(3, [1, 2]), (5, [1, 3]), (8, [2, 5])])
def test_cells_at_one_and_two_thirds_of_the_depth_halve_the_sides_and_double_the_channels(cells, reductions):
    net, shapes = cell_network(ARCHITECTURE, cells=cells, channels=4), []
    for cell in net.features.cells:
        cell.register_forward_hook(lambda cell, inputs, output: shapes.append(tuple(output.shape[1:])))
    net(images(2, 16))
    assert [index for index, cell in enumerate(net.features.cells) if cell.reduction] == reductions
    passed = [sum(place <= index for place in reductions) for index in range(cells)]
    assert shapes == [(12 * 2**times, 16 // 2**times, 16 // 2**times) for times in passed]


def test_the_parameters_of_one_cell_are_those_counted_by_hand():
    cell = cell_network(ARCHITECTURE, channels=48).features.cells[0]
    c, stem = 48, 3 * 48
    entrances = 2 * (stem * c + 2 * c)  # a 1×1 convolution and a norm for each cell before
    separable = 9 * c + c * c + 2 * c
    operators = 2 * separable + 0 + separable + 2 * c + separable + (5 * c * c + 5 * c * c + 2 * c)
    assert count(cell) == entrances + operators

    halved = cell_network(ARCHITECTURE, channels=48).features.cells[1]
    c = 96
    entrances = 2 * (stem * c + 2 * c)
    separable = 9 * c + c * c + 2 * c
    skip = c * c + 2 * c  # with stride 2
    operators = skip + 2 * c + (10 * c * c + 2 * c) + 2 * separable + 0 + separable
    assert count(halved) == entrances + operators


def test_published_cells_have_the_published_number_of_parameters():
    """The three cells that B's public code gives as found on mini-ImageNet; their paper counts 1.77 M on average."""
    sep, dil, conv, fac, pool = "sep_conv_3x3", "dil_conv_3x3", "conv_3x3", "conv_1x5_5x1", "max_pool_3x3"
    found = [
        (
            [[(0, sep), (1, sep)], [(1, sep), (2, sep)], [(0, conv), (2, sep)]],
            [[(0, sep), (1, sep)], [(1, fac), (2, dil)], [(2, dil), (3, dil)]],
        ),
        (
            [[(0, sep), (1, sep)], [(1, sep), (2, sep)], [(2, conv), (3, sep)]],
            [[(0, sep), (1, dil)], [(1, fac), (2, sep)], [(1, sep), (3, fac)]],
        ),
        (
            [[(0, sep), (1, sep)], [(0, sep), (2, pool)], [(2, dil), (3, sep)]],
            [[(0, dil), (1, sep)], [(1, conv), (2, sep)], [(2, sep), (3, sep)]],
        ),
    ]
    counts = [
        count(cell_network({"normal": normal, "reduction": reduction}, outputs=64)) for normal, reduction in found
    ]
    assert sum(counts) / 3 == pytest.approx(1.77e6, rel=0.03)


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_a_masked_supernet_is_the_network_of_what_is_left(norm):
    whole, made = twins(norm=norm, statistics="batch")
    x = images(4)
    with torch.no_grad():
        assert torch.equal(whole(x), made(x))
        mask(whole, ActiveOperators.full())
        assert relative(whole(x), made(x)) > 0.1


def test_the_kernel_of_a_masked_supernet_is_that_of_the_network():
    whole, made = twins(norm="group")
    x = images(4)
    first, second = (EmpiricalKernel(net.double(), outputs="sum").ntk(x.double()) for net in (whole, made))
    assert relative(first, second) < 1e-12
    assert torch.linalg.cond(second) < 1e6  # four images that the network tells apart


def test_gradients_reach_all_that_is_alive_and_nothing_that_is_dead():
    generator, active = torch.Generator().manual_seed(0), ActiveOperators.full()
    for choice in list(active):
        if torch.rand((), generator=generator) < 0.4:
            active = active.without(choice)
    net = supernet(ActiveOperators.full(), **SMALL)
    mask(net, active)
    net(images(3)).square().sum().backward()
    cells = net.features.cells
    for cell in cells:
        left = active.reduction if cell.reduction else active.normal
        for operators, edge in zip(left, cell.edges):
            assert set(edge) == set(OPERATORS)
            for name, operator in edge.items():
                slopes = [value.grad for value in operator.parameters()]
                if name in operators:
                    assert all(slope is not None and slope.any() for slope in slopes)
                else:
                    assert all(slope is None for slope in slopes)
    others = [value for name, value in net.named_parameters() if ".edges." not in name]
    assert all(value.grad is not None and value.grad.any() for value in others)


def test_every_edge_adds_up_its_operators():
    net = supernet(ActiveOperators.full(), **SMALL)
    cell = net.features.cells[0]
    before, last = images(2, channels=12), images(2, channels=12, seed=1)
    one = frozenset({"conv_3x3"})
    alone = (one,) * 9
    both = (one, one | {"skip"}, *alone[2:])
    difference = cell(before, last, both)[:, :4] - cell(before, last, alone)[:, :4]  # of node 0
    assert torch.allclose(difference, cell.last(last), atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_the_way_through_fused_kernels_is_the_same_as_through_the_modules(masked, monkeypatch):
    """With plain operations in place of the kernels, which have tests of their own."""
    if masked:
        net = supernet(ActiveOperators.full(), **SMALL, norm="batch", statistics="batch")
        mask(net, ARCHITECTURE.active_operators)
    else:
        net = cell_network(ARCHITECTURE, cells=5, channels=4, drop_rate=0.2)
    net, x = net.double(), images(6, 13).double()

    def slopes() -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        loss = net(x).square().sum()
        return [loss.detach(), *torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)]

    def norm_leaky_relu(x, weight, bias, eps, slope=1.0):
        return F.leaky_relu(F.batch_norm(x, None, None, weight, bias, training=True, eps=eps), slope)

    def add_norm(total, x, weight, bias, eps, factor):
        term = norm_leaky_relu(x, weight, bias, eps) * (1 if factor is None else factor)
        return term if total is None else total + term

    plain = slopes()
    monkeypatch.setattr(cells, "can_fuse", lambda x, channels: True)
    monkeypatch.setattr(fused_layers, "norm_leaky_relu", norm_leaky_relu)
    monkeypatch.setattr(fused_layers, "add_norm", add_norm)
    monkeypatch.setattr(
        cell_triton_layers, "relu_concat", relu_concat := Mock(side_effect=lambda *maps: F.relu(torch.cat(maps, 1)))
    )
    monkeypatch.setattr(cell_triton_layers, "_with_input", lambda layer, x, *weight: (layer.plain(x, *weight), x))
    for mine, expected in zip(slopes(), plain, strict=True):
        assert (mine is None) == (expected is None)
        assert mine is None or relative(mine, expected) < 1e-9
    assert relu_concat.call_count == len(net.features.cells) - 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("stride", [1, 2])
def test_means_pull_gradients_back_to_their_own_pixels_on_a_gpu_with_channels_last_too(stride):
    x, slopes = images(2, 9), []
    for form in (x, x.cuda().to(memory_format=torch.channels_last)):
        leaf = form.requires_grad_()
        y = cells.MeanPool(stride)(leaf)
        slopes.append(torch.autograd.grad((y * torch.arange(y.numel(), device=y.device).view_as(y)).sum(), leaf)[0])
    assert relative(slopes[1].cpu(), slopes[0]) < 1e-6


def test_with_group_norm_no_image_depends_on_the_others_and_none_is_like_another():
    net = supernet(ActiveOperators.full(), **SMALL)
    x = images(6)
    together, alone = net(x), torch.cat([net(image[None]) for image in x])
    assert torch.allclose(together, alone, atol=1e-4)
    assert bool((together.std(0) > 0.01).all())
    groups = {layer.num_channels: layer.num_groups for layer in net.modules() if isinstance(layer, nn.GroupNorm)}
    assert groups == {12: 12, 4: 4, 8: 8, 16: 16, 48: 16}


@pytest.mark.parametrize("statistics", ["batch", "running"])
def test_batch_norms_keep_the_statistics_asked_for(statistics):
    net = cell_network(ARCHITECTURE, **SMALL, statistics=statistics)
    norms = [layer for layer in net.modules() if isinstance(layer, BatchNorm)]
    assert norms
    assert {layer.statistics for layer in norms} == {statistics}
    assert not any(isinstance(layer, nn.GroupNorm) for layer in net.modules())


def test_the_same_seed_gives_the_same_weights_of_kaimings_variance():
    before = torch.get_rng_state()
    first, again, other = (supernet(ActiveOperators.full(), cells=3, channels=16, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(before, torch.get_rng_state())
    x = images(2)
    assert torch.equal(first(x), again(x))
    assert not torch.equal(first(x), other(x))
    for layer in first.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear) and layer.weight.numel() > 2000:
            wanted = 2 / layer.weight[0].numel()
            assert float(layer.weight.detach().var()) == pytest.approx(wanted, rel=0.2)


def test_dropped_paths_are_whole_and_keep_the_mean():
    torch.manual_seed(0)
    drop = DropPath(0.2)
    out = drop(torch.ones(4000, 2, 3, 3))
    assert torch.equal(out.amax((1, 2, 3)), out.amin((1, 2, 3)))
    assert float((out == 0).float().mean()) == pytest.approx(0.2, abs=0.02)  # ± 0.006
    assert float(out.mean()) == pytest.approx(1.0, abs=0.03)
    assert torch.equal(drop.eval()(out), out)
    drop.train().rate.fill_(0.0)
    assert torch.equal(drop(out), out)


def test_all_is_dropped_in_training_but_plain_skips():
    cell = cell_network(ARCHITECTURE, **SMALL, drop_rate=0.5).features.cells[0]
    cell.drop.rate.fill_(1 - 1e-7)
    inputs = images(3, channels=12), images(3, channels=12, seed=1)
    nodes = cell(*inputs, ARCHITECTURE.active_operators.normal).split(4, 1)
    assert torch.equal(nodes[0], cell.last(inputs[1]))  # its skip
    assert not nodes[1].any()
    assert all(node.any() for node in cell.eval()(*inputs, ARCHITECTURE.active_operators.normal).split(4, 1))


def test_a_path_builds_the_network_of_the_architecture_there(tmp_path):
    file = ARCHITECTURE.save(tmp_path / "found.json")
    net = build(str(file), channels=4, cells=3, image_channels=1, size=28)
    assert image_shape(net) == (1, 28)
    again = build(**json.loads(json.dumps(net.recipe)))
    assert (str(again), again.recipe["cells"]) == (str(net), 3)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in net.state_dict().items())
    with pytest.raises(InputError, match=r"the architecture .*none.json cannot be read"):
        build(str(tmp_path / "none.json"))
    with pytest.raises(InputError, match=r"cell_network has no option 'filters'\. Its options are architecture, cells"):
        build(str(file), filters=4)


def test_an_architecture_is_trained_and_loaded_by_the_command_line(metabridge, tmp_path):
    file, out = ARCHITECTURE.save(tmp_path / "found.json"), tmp_path / "run"
    options = ["--iterations", 2, "--batch-size", 4, "--validate-every", 2, "--validate-tasks", 2, "--device", "cpu"]
    options += ["--model-option", "channels=4", "--model-option", "cells=3", "--out", out]
    status, _, complained = metabridge("train", "--method", "rfs", "--model", file, *options)
    assert status == 0, complained
    file.unlink()  # the run knows its architecture
    run = load(out)
    assert isinstance(run.net.features, Cells)
    assert Architecture.from_dict(run.net.recipe["architecture"]) == ARCHITECTURE
    assert (run.net.recipe["image_channels"], run.net.recipe["size"]) == (1, 28)
    drops = [layer for layer in run.net.modules() if isinstance(layer, DropPath)]
    assert [(layer.full_rate, float(layer.rate)) for layer in drops] == [(0.2, 0.0)] * 3  # the rate begins at 0
    with torch.no_grad():
        assert run.net.eval()(images(2, 28, channels=1)).isfinite().all()


def test_random_architectures_can_all_be_built_and_trained():
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        net = cell_network(random_architecture(generator), **SMALL)
        net(images(2, 8)).sum().backward()
        assert all(value.grad is not None for value in net.head.parameters())


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: supernet(ActiveOperators.full(), cells=2), "cells is 2, but must be at least 3"),
        (lambda: supernet(ActiveOperators.full(), channels=0), "channels is 0, but must be a positive number"),
        (lambda: supernet(ActiveOperators.full(), norm="layer"), "norm is 'layer', but must be 'batch' or 'group'"),
        (lambda: cell_network(ARCHITECTURE, statistics="layer"), "statistics is 'layer', but must be"),
        (lambda: cell_network(ARCHITECTURE, drop_rate=1.0), "drop_rate is 1.0, but must be at least 0"),
        (lambda: cell_network({"normal": MIXED}), "an architecture must have the keys 'normal' and 'reduction'"),
        (lambda: mask(mlp(4, 2), ActiveOperators.full()), "net is not a network of cells, so it cannot be masked"),
        (
            lambda: mask(cell_network(ARCHITECTURE, **SMALL), ActiveOperators.full()),
            "the supernet was built without 'avg_pool_3x3' on edge 0 of the normal cell. Build another supernet.",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(make, sentence):
    with pytest.raises(InputError, match=sentence):
        make()
