from __future__ import annotations

import pytest
import torch
from torch import nn

from metabridge import InputError
from metabridge.models import DropBlock, Network, build, conv4, mlp, resnet12, wide


@pytest.mark.parametrize(
    ("make", "shape", "dimension"),
    [
        (lambda: conv4(1, 28), (1, 28, 28), 32),
        (lambda: conv4(3, 84, filters=64), (3, 84, 84), 1600),
        (lambda: resnet12(3, 32), (3, 32, 32), 640),
        (lambda: mlp(12, 5), (3, 2, 2), 40),
    ],
)
def test_features_have_the_dimension_of_the_heads_input(make, shape, dimension):
    net = make()
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    assert net.features(x).shape == (2, dimension)
    assert net(x).shape == (2, 5)


def test_building_a_network_does_not_seed_the_generators_of_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("a GPU generator was seeded"))
    conv4(1, 16, 3, filters=4)


def test_the_same_seed_gives_the_same_weights_and_keeps_the_global_random_state():
    rng_state = torch.get_rng_state()
    net, same, other = conv4(1, 28, seed=3), conv4(1, 28, seed=3), conv4(1, 28, seed=4)
    assert torch.equal(rng_state, torch.get_rng_state())
    assert torch.equal(net.features[0][0].weight, same.features[0][0].weight)
    assert not torch.equal(net.features[0][0].weight, other.features[0][0].weight)


def test_pooling_before_relu_gives_the_same_result():
    net = conv4(1, 28)
    x = torch.randn(3, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    relu_before_pooling = x
    for convolution, norm, pooling, relu in net.features[:4]:
        relu_before_pooling = pooling(relu(norm(convolution(relu_before_pooling))))
    assert torch.equal(net.features(x), relu_before_pooling.flatten(1))


def test_resnet12_has_the_published_number_of_weights():
    """12.4 million for widths of 64, 160, 320 and 640; papers do not count the head."""
    body = sum(value.numel() for value in resnet12(3, 84).features.parameters())
    assert body == pytest.approx(12.42e6, rel=0.01)


def test_drop_block_drops_squares_at_its_rate_and_keeps_the_mean():
    torch.manual_seed(0)
    block = DropBlock(0.2, 3)
    out = block(torch.ones(200, 8, 12, 12))
    assert float((out == 0).float().mean()) == pytest.approx(0.2, abs=0.03)
    assert float(out.mean()) == pytest.approx(1.0, abs=0.01)
    dropped = (out == 0).float()
    corners = -nn.functional.max_pool2d(-dropped, 3, stride=1)  # 1 where a whole square is dropped
    covered = nn.functional.max_pool2d(nn.functional.pad(corners, [2] * 4), 3, stride=1)
    assert torch.equal(covered, dropped)  # every dropped pixel lies in a square that is dropped completely
    assert torch.equal(block.eval()(out), out)


def test_around_accepts_any_module_whose_output_is_a_feature_vector_per_input():
    features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net = Network.around(features, torch.randn(2, 3, 8, 8), outputs=7)
    assert net(torch.randn(4, 3, 8, 8)).shape == (4, 7)
    with pytest.raises(InputError, match=r"nn.Flatten\(\) or global pooling"):
        Network.around(features[:3], torch.randn(2, 3, 8, 8), outputs=7)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: conv4(1, 8), "at least 16×16"),
        (lambda: resnet12(3, 8), "at least 16×16"),
        (lambda: mlp(4, 2, depth=0), "depth is 0"),
        (lambda: mlp(4, 2, activation="gelu"), "activation is 'gelu'"),
        (lambda: wide(4, activation="gelu"), "activation is 'gelu'"),
        (lambda: wide(4, width=0), "width is 0"),
        (lambda: wide(4, weight_variance=-1.0), "weight_variance is -1.0"),
        (lambda: wide(4, bias_variance=-1.0), "bias_variance is -1.0"),
        (lambda: DropBlock(1.5, 3), "^rate is 1.5"),
        (lambda: resnet12(3, 84, drop_rate=1.5), "drop_rate is 1.5"),
    ],
)
def test_impossible_options_raise_an_input_error(make, message):
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "options", "build_directly"),
    [
        ("conv4", {"channels": 1, "size": 28, "filters": 8}, lambda: conv4(1, 28, filters=8)),
        ("resnet12", {"size": 16, "widths": [4, 4, 4, 4]}, lambda: resnet12(size=16, widths=(4, 4, 4, 4))),
        ("mlp", {"inputs": 3, "outputs": 2}, lambda: mlp(3, 2)),
    ],
)
def test_build_with_a_name_gives_the_network_of_the_builder(name, options, build_directly):
    built, expected = build(name, **options), build_directly()
    assert str(built) == str(expected)
    assert all(torch.equal(value, expected.state_dict()[key]) for key, value in built.state_dict().items())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "conv5",
            {},
            "model is 'conv5', but must be conv4, hf:NAME, mlp, resnet12, timm:NAME, wide, "
            "package.module:function or the path of an architecture.json from metabridge search.",
        ),
        (
            "timm",
            {},
            "model is 'timm', but must be conv4, hf:NAME, mlp, resnet12, timm:NAME, wide, "
            "package.module:function or the path of an architecture.json from metabridge search.",
        ),
        (
            "timm:",
            {},
            "model is 'timm:', but must be conv4, hf:NAME, mlp, resnet12, timm:NAME, wide, "
            "package.module:function or the path of an architecture.json from metabridge search.",
        ),
        (
            "conv4:wide",
            {},
            "model is 'conv4:wide', but must be conv4, hf:NAME, mlp, resnet12, timm:NAME, wide, package",
        ),
        (
            "conv4",
            {"depth": 5},
            "conv4 has no option 'depth'. Its options are channels, size, outputs, filters, statistics, seed.",
        ),
        ("conv4", {"channels": "many"}, "conv4 cannot be built with channels='many' ("),
        ("conv4", {"filters": "many"}, "filters is 'many', but must be an integer of at least 1."),
        ("resnet12", {"widths": [4, 0]}, "widths is 0, but must be an integer of at least 1."),
        ("mlp", {"inputs": 3, "outputs": 2, "width": -1}, "width is -1, but must be an integer of at least 1."),
        ("conv4", {"statistics": "layer"}, "statistics is 'layer', but must be 'batch' or 'running'."),
        ("mlp", {"inputs": 3}, "mlp cannot be built with inputs=3 ("),
    ],
)
def test_an_unknown_model_or_option_raises_an_input_error(name, options, message):
    with pytest.raises(InputError) as caught:
        build(name, **options)
    assert str(caught.value).startswith(message)


def test_only_the_first_line_of_an_error_of_pytorch_is_shown(monkeypatch):
    def fail(*arguments, **options):
        raise TypeError("empty() received an invalid combination of arguments\n * (tuple of ints size)")

    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(InputError) as caught:
        build("mlp", inputs=3, outputs=2)
    assert str(caught.value).endswith("(empty() received an invalid combination of arguments).")
