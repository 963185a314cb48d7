from __future__ import annotations

import dataclasses
import json
import sys

import pytest
import torch
from torch import nn

from backbones import features_of_images, library, photographs, with_random_statistics
from metabridge import InputError, method, parameters
from metabridge.environments import LabeledImages
from metabridge.models import BatchNorm, build, rebuild, timm
from metabridge.models.backbone_inputs import Normalize
from metabridge.training import Model, evaluate


@pytest.fixture(scope="module")
def timm_library():
    return library("timm")


@pytest.fixture(scope="module")
def checkpoint(timm_library, tmp_path_factory):
    """Return a function that saves the weights of a model of timm once, and returns the model and the file."""
    folder, saved = tmp_path_factory.mktemp("weights"), {}

    def get(name, **options):
        key = (name, *options.items())
        if key not in saved:
            torch.manual_seed(0)
            model = with_random_statistics(timm_library.create_model(name, **options))
            torch.save(model.state_dict(), folder / f"{len(saved)}.pth")
            model.reset_classifier(0)
            saved[key] = model, folder / f"{len(saved)}.pth"
        return saved[key]

    return get


def features_in_timm(model, images, **changes):
    from timm.data import create_transform, resolve_data_config

    transform = create_transform(**{**resolve_data_config(model=model), **changes})
    with torch.no_grad():
        return model(torch.stack([transform(image) for image in images]))


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_efficientnet"])
def test_features_of_images_equal_those_of_timm_with_its_transform(checkpoint, name):
    images = photographs()
    model, file = checkpoint(name)
    expected = features_in_timm(model, images)
    net = build(f"timm:{name}", weights=file)
    torch.testing.assert_close(features_of_images(net, images), expected, rtol=0, atol=1e-5)
    net.features[0].mean += 0.1
    assert (features_of_images(net, images) - expected).abs().max() > 1e-3
    net.features[0].mean -= 0.1
    net.decode_options = dataclasses.replace(net.decode_options, resize=net.decode_options.size)
    assert (features_of_images(net, images) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("crop_mode", ["squash", "border"])
def test_images_are_squashed_if_timm_does_so_and_other_ways_raise_an_error(checkpoint, monkeypatch, crop_mode):
    images, (model, file) = photographs(), checkpoint("test_resnet")
    config = dataclasses.replace(model_config("test_resnet"), crop_mode=crop_mode, crop_pct=0.9)
    monkeypatch.setattr("timm.models.get_pretrained_cfg", lambda name: config)
    if crop_mode == "border":
        with pytest.raises(InputError, match=r"crop_mode='border' of timm is not supported\)\. Pass decode_options"):
            build("timm:test_resnet", weights=file)
        options = {"size": 160, "channels": 3, "crop": True}
        assert build("timm:test_resnet", weights=file, decode_options=options).decode_options.crop
        return
    net = build("timm:test_resnet", weights=file)
    expected = features_in_timm(model, images, crop_mode="squash", crop_pct=0.9)
    torch.testing.assert_close(features_of_images(net, images), expected, rtol=0, atol=1e-5)


def model_config(name):
    from timm.models import get_pretrained_cfg

    return get_pretrained_cfg(name)


def test_vision_transformers_interpolate_position_embeddings_as_timm_does(timm_library, checkpoint):
    images, (_, file) = photographs(), checkpoint("test_vit")
    overlay = {"file": str(file)}
    options = {"img_size": 96, "num_classes": 0, "pretrained": True, "pretrained_cfg_overlay": overlay}
    model = timm_library.create_model("test_vit", **options).eval()
    net = build("timm:test_vit", weights=file, size=96)
    assert (net.decode_options.size, net.decode_options.resize) == (96, 101)
    expected = features_in_timm(model, images, input_size=(3, 96, 96))
    torch.testing.assert_close(features_of_images(net, images), expected, rtol=0, atol=1e-5)
    with pytest.raises(InputError, match=r"patches have 16 pixels, but size is 100, .*Use size=96 or size=112"):
        build("timm:test_vit", size=100)


def test_convolutional_networks_take_any_size_and_keep_the_proportion_of_the_crop(checkpoint):
    images, (model, file) = photographs(), checkpoint("test_resnet")
    net = build("timm:test_resnet", weights=file, size=101)
    expected = features_in_timm(model, images, input_size=(3, 101, 101))
    torch.testing.assert_close(features_of_images(net, images), expected, rtol=0, atol=1e-5)


def test_gray_images_are_processed_like_rgb_images_without_color(checkpoint):
    _, file = checkpoint("test_resnet")  # whose colors are all normalized with 0.5
    gray, color = (build("timm:test_resnet", weights=file, channels=channels) for channels in (1, 3))
    images = [image.convert("L") for image in photographs()]
    torch.testing.assert_close(features_of_images(gray, images), features_of_images(color, images))
    assert gray.decode_options.channels == 1


def test_batch_norms_keep_the_statistics_of_the_weights(checkpoint):
    model, file = checkpoint("test_resnet")
    net = build("timm:test_resnet", weights=file)
    layers = [layer for layer in net.modules() if isinstance(layer, BatchNorm)]
    expected = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    assert len(layers) == len(expected) > 5
    for layer, original in zip(layers, expected):
        assert torch.equal(layer.mean, original.running_mean)
        assert torch.equal(layer.variance, original.running_var)
        assert layer.eps == original.eps


def test_a_pretrained_network_can_be_evaluated_without_training(checkpoint):
    _, file = checkpoint("test_resnet")
    net = build("timm:test_resnet", weights=file, size=32).eval()
    images = torch.randint(0, 256, (12, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    splits = {"test": torch.arange(3)}
    labels = torch.arange(12) % 3
    data = LabeledImages(images, labels, ("a", "b", "c"), torch.zeros(3, dtype=torch.int64), ("all",), splits)
    frozen = method("frozen")
    model = Model(frozen, net, parameters(frozen, net))
    assert 0 <= evaluate(model, data.tasks("test", ways=3, shots=1, queries=2), tasks=3).mean <= 1


def test_networks_without_pretrained_weights_normalize_but_do_not_determine_how_images_are_decoded(timm_library):
    net = build("timm:test_resnet", size=32, outputs=3)
    assert isinstance(net.features[0], Normalize)
    assert net.decode_options is None
    assert net.recipe["name"] == "test_resnet"
    assert str(build(**net.recipe)) == str(net)


def test_a_network_is_rebuilt_from_its_recipe_without_its_file_of_weights(checkpoint, tmp_path):
    _, file = checkpoint("test_vit")
    copy = tmp_path / "copy.pth"
    copy.write_bytes(file.read_bytes())
    net = build("timm:test_vit", weights=copy, size=96).eval()
    copy.unlink()
    again = rebuild(json.loads(json.dumps(net.recipe))).eval()
    again.load_state_dict(net.state_dict())
    x = torch.rand(2, 3, 96, 96)
    assert torch.equal(again(x), net(x))
    assert again.decode_options == net.decode_options


def test_recipes_of_version_0_2_are_rebuilt_without_normalization(timm_library):
    recipe = {"model": "timm", "name": "test_efficientnet", "channels": 3, "size": 32, "outputs": 5}
    net = rebuild({**recipe, "pretrained": True, "statistics": "running", "seed": 0})
    assert not any(isinstance(layer, Normalize) for layer in net.modules())
    assert {"features.conv_stem.weight", "features.bn1.weight", "head.weight"} <= net.state_dict().keys()
    assert net.decode_options is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("layer4.0.conv1.weight"), "they lack 'layer4.0.conv1.weight'"),
        (
            lambda weights: weights.update({"layer1.0.bn1.bias": torch.ones(3)}),
            "'layer1.0.bn1.bias' has another shape",
        ),
        (
            lambda weights: weights.update({f"layer9.{n}": torch.ones(1) for n in range(5)}),
            "they contain 'layer9.0', 'layer9.1', 'layer9.2' and 2 more, which it lacks",
        ),
    ],
)
def test_weights_of_another_model_raise_an_error_that_names_them(checkpoint, tmp_path, change, message):
    weights = torch.load(checkpoint("test_resnet")[1], weights_only=True)
    change(weights)
    torch.save(weights, tmp_path / "changed.pth")
    with pytest.raises(InputError) as caught:
        build("timm:test_resnet", weights=tmp_path / "changed.pth")
    assert str(caught.value) == (
        f"weights do not belong to 'timm:test_resnet': {message}. Use the model for which they were saved."
    )


def test_classifiers_and_wrappers_in_the_file_of_weights_are_ignored(checkpoint, tmp_path):
    model, file = checkpoint("test_resnet")
    weights = {f"module.backbone.{k}": v for k, v in torch.load(file, weights_only=True).items() if k[:3] != "fc."}
    torch.save({"state_dict": weights | {"module.head.weight": torch.ones(4, 4)}}, tmp_path / "wrapped.pth")
    torch.save(torch.load(file, weights_only=True) | {"head.other.weight": torch.ones(4)}, tmp_path / "head.pth")
    for name in ("wrapped.pth", "head.pth"):
        net = build("timm:test_resnet", weights=tmp_path / name)
        assert torch.equal(net.features[1].conv1[0].weight, model.conv1[0].weight)


def test_pretrained_weights_come_from_the_cache_of_the_hub(checkpoint, monkeypatch):
    model, file = checkpoint("test_resnet")
    asked = []

    def find(source, repository, names, *, download):
        asked.append((repository, download))
        return file

    monkeypatch.setattr("metabridge.models.timm_backbone.hub_file", find)
    net = build("timm:test_resnet", pretrained=True)
    assert torch.equal(net.features[1].conv1[0].weight, model.conv1[0].weight)
    build("timm:test_resnet", pretrained=True, download=True)
    assert asked == [("timm/test_resnet.r160_in1k", False), ("timm/test_resnet.r160_in1k", True)]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet9000", {}, "timm has no model 'resnet9000'"),
        ("hf-hub:owner/model", {}, "timm has no model 'hf-hub:owner/model'"),
        ("test_resnet.other", {}, r"timm has no such weights \(Invalid pretrained tag \(other\)"),
        ("test_resnet", {"pretrained": True, "weights": "x"}, "Pass only one of them"),
        ("test_resnet", {"size": 0}, "size is 0, but must be from 1 to 7071 pixels"),
        ("test_resnet", {"weights": "missing.pth"}, "weights is missing.pth, which cannot be read"),
    ],
)
def test_names_and_options_that_cannot_be_used_raise_an_error(timm_library, name, options, message):
    with pytest.raises(InputError, match=message):
        build(f"timm:{name}", **options)


def test_the_error_for_images_that_a_backbone_does_not_accept_names_the_model_and_the_size(timm_library, monkeypatch):
    backbone = nn.Sequential(nn.Conv2d(3, 4, 7), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    monkeypatch.setattr("timm.create_model", lambda name, **options: backbone)
    assert build("timm:test_resnet", size=8).head.in_features == 4
    with pytest.raises(
        InputError, match=r"'timm:test_resnet', which does not accept .*size=5 \(.*Kernel size.*Use another"
    ):
        build("timm:test_resnet", size=5)


@pytest.mark.parametrize("make", [lambda: timm("resnet18"), lambda: build("timm:resnet18", size=32)])
def test_without_timm_the_error_says_how_to_install_it(monkeypatch, make):
    for module in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(InputError) as caught:
        make()
    assert str(caught.value) == (
        "model is 'timm:resnet18', but timm is not installed. Install it with: pip install 'metabridge[timm]'"
    )
