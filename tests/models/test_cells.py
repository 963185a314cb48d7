from __future__ import annotations

import json
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cases import relative_error
from metabridge import InputError
from metabridge.kernels.empirical import EmpiricalKernel
from metabridge.models import BatchNorm, DropPath, Network, build, cell_triton_layers, cells, fused_layers, mlp
from metabridge.models.cells import Cells, cell_network, set_active_operators, supernet
from metabridge.nas import OPERATORS, ActiveOperators, Architecture, random_architecture
from metabridge.training import load
from metabridge.training.model_images import image_shape

NORMAL_CELL = (
    ((0, "sep_conv_3x3"), (1, "skip")),
    ((1, "conv_3x3"), (2, "max_pool_3x3")),
    ((0, "dil_conv_3x3"), (3, "conv_1x5_5x1")),
)
REDUCTION_CELL = (
    ((0, "skip"), (1, "avg_pool_3x3")),
    ((0, "conv_1x5_5x1"), (1, "sep_conv_3x3")),
    ((2, "skip"), (3, "conv_3x3")),
)
ARCHITECTURE = Architecture(NORMAL_CELL, REDUCTION_CELL)
SMALL = {"cells": 3, "channels": 4}


def images(count: int, size: int = 16, channels: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(seed))


def count_parameters(module: nn.Module) -> int:
    return sum(value.numel() for value in module.parameters())


def supernet_and_network(**options) -> tuple[Network, Network]:
    """Return a masked supernet and the network of `ARCHITECTURE` with the same weights.

    In the masked supernet, only the operators of `ARCHITECTURE` are active.
    """
    net = cell_network(ARCHITECTURE, **SMALL, drop_rate=0, seed=1, **options)
    masked = supernet(ActiveOperators.full(), **SMALL, **options)
    missing, surplus = net.load_state_dict(masked.state_dict(), strict=False)
    assert (missing, bool(surplus)) == ([], True)
    set_active_operators(masked, ARCHITECTURE.active_operators)
    return masked, net


@pytest.mark.parametrize("size", [32, 84, 28, 21])
@pytest.mark.parametrize(
    "make", [lambda **o: supernet(ActiveOperators.full(), **o), lambda **o: cell_network(ARCHITECTURE, **o)]
)
def test_networks_of_cells_accept_images_of_any_size(make, size):
    net = make(**SMALL, image_channels=1, size=size, outputs=7)
    x = images(2, size, channels=1)
    assert net.features(x).shape == (2, 3 * 4 * 4)  # three nodes with 4 channels, doubled twice
    assert net(x).shape == (2, 7)


@pytest.mark.parametrize(("cells", "reduction_indices"), [(3, [1, 2]), (5, [1, 3]), (8, [2, 5])])
def test_cells_at_one_and_two_thirds_of_the_depth_halve_the_size_and_double_the_channels(cells, reduction_indices):
    net, shapes = cell_network(ARCHITECTURE, cells=cells, channels=4), []
    for cell in net.features.cells:
        cell.register_forward_hook(lambda cell, inputs, output: shapes.append(tuple(output.shape[1:])))
    net(images(2, 16))
    assert [index for index, cell in enumerate(net.features.cells) if cell.reduction] == reduction_indices
    # the number of reduction cells up to each cell; at first, three nodes have four channels each
    counts = [sum(reduction <= index for reduction in reduction_indices) for index in range(cells)]
    assert shapes == [(12 * 2**count, 16 // 2**count, 16 // 2**count) for count in counts]


def test_a_cell_has_the_number_of_parameters_counted_by_hand():
    cell = cell_network(ARCHITECTURE, channels=48).features.cells[0]
    c, source_channels = 48, 3 * 48  # channels of a node, and of each input of the cell
    input_layers = 2 * (source_channels * c + 2 * c)  # a 1×1 convolution and a norm for each of the two previous cells
    separable = 9 * c + c * c + 2 * c
    # in the order of NORMAL_CELL; a skip with stride 1 has no parameters
    operators = 2 * separable + 0 + separable + 2 * c + separable + (5 * c * c + 5 * c * c + 2 * c)
    assert count_parameters(cell) == input_layers + operators

    reduction_cell = cell_network(ARCHITECTURE, channels=48).features.cells[1]
    c = 96
    input_layers = 2 * (source_channels * c + 2 * c)
    separable = 9 * c + c * c + 2 * c
    skip = c * c + 2 * c  # with stride 2
    # in the order of REDUCTION_CELL
    operators = skip + 2 * c + (10 * c * c + 2 * c) + 2 * separable + 0 + separable
    assert count_parameters(reduction_cell) == input_layers + operators


def test_published_cells_have_the_published_mean_number_of_parameters():
    """The cells from the public code of Wang et al. 2022 for mini-ImageNet, whose mean in the paper is 1.77 M."""
    sep, dil, conv, fac, pool = "sep_conv_3x3", "dil_conv_3x3", "conv_3x3", "conv_1x5_5x1", "max_pool_3x3"
    published = [
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
        count_parameters(cell_network({"normal": normal, "reduction": reduction}, outputs=64))
        for normal, reduction in published
    ]
    assert sum(counts) / 3 == pytest.approx(1.77e6, rel=0.03)


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_a_masked_supernet_computes_the_same_as_the_network_of_the_architecture(norm):
    masked, net = supernet_and_network(norm=norm, statistics="batch")
    x = images(4)
    with torch.no_grad():
        assert torch.equal(masked(x), net(x))
        set_active_operators(masked, ActiveOperators.full())
        assert relative_error(masked(x), net(x)) > 0.1


def test_the_kernel_of_a_masked_supernet_equals_that_of_the_network():
    masked, net = supernet_and_network(norm="group")
    x = images(4)
    masked_kernel, kernel = (EmpiricalKernel(net.double(), outputs="sum").ntk(x.double()) for net in (masked, net))
    assert relative_error(masked_kernel, kernel) < 1e-12
    assert torch.linalg.cond(kernel) < 1e6  # the network distinguishes the four images


def test_exactly_the_active_operators_get_gradients():
    generator, active = torch.Generator().manual_seed(0), ActiveOperators.full()
    for operator in list(active):
        if torch.rand((), generator=generator) < 0.4:
            active = active.without(operator)
    net = supernet(ActiveOperators.full(), **SMALL)
    set_active_operators(net, active)
    net(images(3)).square().sum().backward()
    cells = net.features.cells
    for cell in cells:
        cell_operators = active.reduction if cell.reduction else active.normal
        for operators, edge in zip(cell_operators, cell.edges):
            assert set(edge) == set(OPERATORS)
            for name, operator in edge.items():
                grads = [value.grad for value in operator.parameters()]
                if name in operators:
                    assert all(grad is not None and grad.any() for grad in grads)
                else:
                    assert all(grad is None for grad in grads)
    outside_operators = [value for name, value in net.named_parameters() if ".edges." not in name]
    assert all(value.grad is not None and value.grad.any() for value in outside_operators)


def test_every_edge_adds_up_its_operators():
    net = supernet(ActiveOperators.full(), **SMALL)
    cell = net.features.cells[0]
    source_0, source_1 = images(2, channels=12), images(2, channels=12, seed=1)
    convolution = frozenset({"conv_3x3"})
    without_skip = (convolution,) * 9
    with_skip = (convolution, convolution | {"skip"}, *without_skip[2:])
    node_0_with_skip, node_0 = (cell(source_0, source_1, active)[:, :4] for active in (with_skip, without_skip))
    assert torch.allclose(node_0_with_skip - node_0, cell.last(source_1), atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_the_fused_forward_pass_equals_that_of_the_modules(masked, monkeypatch):
    """The kernels are replaced by PyTorch's operations; `test_fused_layers` checks the kernels."""
    if masked:
        net = supernet(ActiveOperators.full(), **SMALL, norm="batch", statistics="batch")
        set_active_operators(net, ARCHITECTURE.active_operators)
    else:
        net = cell_network(ARCHITECTURE, cells=5, channels=4, drop_rate=0.2)
    net, x = net.double(), images(6, 13).double()

    def loss_and_gradients() -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        loss = net(x).square().sum()
        return [loss.detach(), *torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)]

    def norm_leaky_relu(x, weight, bias, eps, slope=1.0):
        return F.leaky_relu(F.batch_norm(x, None, None, weight, bias, training=True, eps=eps), slope)

    def add_norm(total, x, weight, bias, eps, factor):
        term = norm_leaky_relu(x, weight, bias, eps) * (1 if factor is None else factor)
        return term if total is None else total + term

    unfused = loss_and_gradients()
    monkeypatch.setattr(cells, "can_fuse", lambda x, channels: True)
    monkeypatch.setattr(fused_layers, "norm_leaky_relu", norm_leaky_relu)
    monkeypatch.setattr(fused_layers, "add_norm", add_norm)
    monkeypatch.setattr(
        cell_triton_layers, "relu_concat", relu_concat := Mock(side_effect=lambda *maps: F.relu(torch.cat(maps, 1)))
    )
    monkeypatch.setattr(cell_triton_layers, "_with_input", lambda layer, x, *weight: (layer.reference(x, *weight), x))
    for value, expected in zip(loss_and_gradients(), unfused, strict=True):
        assert (value is None) == (expected is None)
        assert value is None or relative_error(value, expected) < 1e-9
    # called once for each cell except the last, so the fused forward pass was used
    assert relu_concat.call_count == len(net.features.cells) - 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("stride", [1, 2])
def test_gradients_of_average_pooling_are_right_on_a_gpu_with_channels_last_maps(stride):
    x, grads = images(2, 9), []
    for maps in (x, x.cuda().to(memory_format=torch.channels_last)):
        leaf = maps.requires_grad_()
        y = cells.AvgPool(stride)(leaf)
        grads.append(torch.autograd.grad((y * torch.arange(y.numel(), device=y.device).view_as(y)).sum(), leaf)[0])
    assert relative_error(grads[1].cpu(), grads[0]) < 1e-6


def test_group_norm_normalizes_each_image_separately_and_keeps_features_of_images_different():
    net = supernet(ActiveOperators.full(), **SMALL)
    x = images(6)
    batched, separate = net(x), torch.cat([net(image[None]) for image in x])
    assert torch.allclose(batched, separate, atol=1e-4)
    assert bool((batched.std(0) > 0.01).all())
    # from the number of channels to its largest divisor up to 16
    groups = {layer.num_channels: layer.num_groups for layer in net.modules() if isinstance(layer, nn.GroupNorm)}
    assert groups == {12: 12, 4: 4, 8: 8, 16: 16, 48: 16}


@pytest.mark.parametrize("statistics", ["batch", "running"])
def test_batch_norms_of_cells_have_the_requested_statistics(statistics):
    net = cell_network(ARCHITECTURE, **SMALL, statistics=statistics)
    norms = [layer for layer in net.modules() if isinstance(layer, BatchNorm)]
    assert norms
    assert {layer.statistics for layer in norms} == {statistics}
    assert not any(isinstance(layer, nn.GroupNorm) for layer in net.modules())


def test_the_same_seed_gives_the_same_weights_and_their_variance_is_kaimings():
    rng_state = torch.get_rng_state()
    net, same, other = (supernet(ActiveOperators.full(), cells=3, channels=16, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(rng_state, torch.get_rng_state())
    x = images(2)
    assert torch.equal(net(x), same(x))
    assert not torch.equal(net(x), other(x))
    for layer in net.modules():
        # small layers have too few weights for an accurate estimate of the variance
        if isinstance(layer, nn.Conv2d | nn.Linear) and layer.weight.numel() > 2000:
            variance = 2 / layer.weight[0].numel()
            assert float(layer.weight.detach().var()) == pytest.approx(variance, rel=0.2)


def test_drop_path_drops_all_maps_of_an_image_and_keeps_the_mean():
    torch.manual_seed(0)
    drop = DropPath(0.2)
    out = drop(torch.ones(4000, 2, 3, 3))
    assert torch.equal(out.amax((1, 2, 3)), out.amin((1, 2, 3)))
    assert float((out == 0).float().mean()) == pytest.approx(0.2, abs=0.02)  # standard deviation 0.006
    assert float(out.mean()) == pytest.approx(1.0, abs=0.03)
    assert torch.equal(drop.eval()(out), out)
    drop.train().rate.fill_(0.0)
    assert torch.equal(drop(out), out)


def test_drop_path_applies_to_all_operators_except_identities():
    cell = cell_network(ARCHITECTURE, **SMALL, drop_rate=0.5).features.cells[0]
    cell.drop.rate.fill_(1 - 1e-7)  # drops practically everything
    inputs = images(3, channels=12), images(3, channels=12, seed=1)
    nodes = cell(*inputs, ARCHITECTURE.active_operators.normal).split(4, 1)
    assert torch.equal(nodes[0], cell.last(inputs[1]))  # the output of its skip
    assert not nodes[1].any()
    assert all(node.any() for node in cell.eval()(*inputs, ARCHITECTURE.active_operators.normal).split(4, 1))


def test_build_accepts_the_name_that_version_0_1_0_stored_in_runs():
    net = build("network", architecture=json.loads(ARCHITECTURE.to_json()), **SMALL)
    assert isinstance(net.features, Cells)
    assert net.recipe["model"] == "cell_network"


def test_build_with_a_path_returns_the_network_of_the_architecture(tmp_path):
    file = ARCHITECTURE.save(tmp_path / "architecture.json")
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
    file, out = ARCHITECTURE.save(tmp_path / "architecture.json"), tmp_path / "run"
    options = ["--iterations", 2, "--batch-size", 4, "--validate-every", 2, "--validate-tasks", 2, "--device", "cpu"]
    options += ["--model-option", "channels=4", "--model-option", "cells=3", "--out", out]
    status, _, errors = metabridge("train", "--method", "rfs", "--model", file, *options)
    assert status == 0, errors
    file.unlink()  # the run contains its architecture
    run = load(out)
    assert isinstance(run.net.features, Cells)
    assert Architecture.from_dict(run.net.recipe["architecture"]) == ARCHITECTURE
    assert (run.net.recipe["image_channels"], run.net.recipe["size"]) == (1, 28)
    drops = [layer for layer in run.net.modules() if isinstance(layer, DropPath)]
    # one layer for each of the three cells; the rate begins at 0
    assert [(layer.full_rate, float(layer.rate)) for layer in drops] == [(0.2, 0.0)] * 3
    with torch.no_grad():
        assert run.net.eval()(images(2, 28, channels=1)).isfinite().all()


def test_networks_of_random_architectures_can_be_built_and_trained():
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        net = cell_network(random_architecture(generator), **SMALL)
        net(images(2, 8)).sum().backward()
        assert all(value.grad is not None for value in net.head.parameters())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: supernet(ActiveOperators.full(), cells=2), "cells is 2, but must be at least 3"),
        (lambda: supernet(ActiveOperators.full(), channels=0), "channels is 0, but must be an integer of at least 1"),
        (lambda: supernet(ActiveOperators.full(), channels=2.5), "channels is 2.5, but must be an integer"),
        (lambda: cell_network(ARCHITECTURE, cells=5.0), "cells is 5.0, but must be an integer"),
        (lambda: cell_network(ARCHITECTURE, outputs=0), "outputs is 0, but must be an integer"),
        (lambda: supernet(ActiveOperators.full(), norm="layer"), "norm is 'layer', but must be 'batch' or 'group'"),
        (lambda: cell_network(ARCHITECTURE, statistics="layer"), "statistics is 'layer', but must be"),
        (lambda: cell_network(ARCHITECTURE, drop_rate=1.0), "drop_rate is 1.0, but must be at least 0"),
        (lambda: cell_network({"normal": NORMAL_CELL}), "an architecture must have the keys 'normal' and 'reduction'"),
        (
            lambda: set_active_operators(mlp(4, 2), ActiveOperators.full()),
            "net is not a network of cells, so it has no operators to deactivate",
        ),
        (
            lambda: set_active_operators(cell_network(ARCHITECTURE, **SMALL), ActiveOperators.full()),
            "the supernet was built without 'avg_pool_3x3' on edge 0 of the normal cell. Build another supernet.",
        ),
    ],
)
def test_impossible_options_raise_an_input_error(make, message):
    with pytest.raises(InputError, match=message):
        make()
