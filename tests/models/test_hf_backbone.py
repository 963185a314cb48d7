from __future__ import annotations

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from backbones import features_of_images, library, photographs, small_transformer, with_random_statistics
from metabridge import InputError
from metabridge.models import build, hf, rebuild
from metabridge.models.backbone_inputs import Normalize

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
TEXT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 9}


@pytest.fixture(scope="module")
def transformers():
    module = library("transformers")
    module.utils.logging.set_verbosity_error()
    module.utils.logging.disable_progress_bar()
    return module


def options_of(config):
    return {name: value for name, value in config.items() if name not in ("model_type", "intermediate_size")}


def pixel_size(size):
    return {"height": size, "width": size}


# for each model, its class and its image processor, and the features in its output
def dinov2(transformers):
    model = transformers.Dinov2Model(transformers.Dinov2Config(**options_of(small_transformer("dinov2"))))
    size = {"size": {"shortest_edge": 32}, "crop_size": pixel_size(28)}
    processor = transformers.BitImageProcessorPil(**size, image_mean=MEAN, image_std=STD)
    return model, processor, lambda x: model(x).pooler_output


def siglip(transformers):
    vision = options_of(small_transformer("siglip_vision_model"))
    model = transformers.SiglipModel(transformers.SiglipConfig(text_config=TEXT, vision_config=vision))
    processor = transformers.SiglipImageProcessorPil(size=pixel_size(28))
    return model, processor, lambda x: model.vision_model(x).pooler_output


def clip(transformers):
    vision = options_of(small_transformer("clip_vision_model"))
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=TEXT, vision_config=vision))
    processor = transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=pixel_size(28))
    return model, processor, lambda x: model.vision_model(x).pooler_output


def vit(transformers):
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**options_of(small_transformer("vit"))))
    processor = transformers.ViTImageProcessorPil(size=pixel_size(28))
    return model, processor, lambda x: model.vit(x).last_hidden_state[:, 0]


def convnext(transformers):
    model = transformers.ConvNextModel(transformers.ConvNextConfig(hidden_sizes=[8] * 4, depths=[1] * 4))
    processor = transformers.ConvNextImageProcessorPil(size={"shortest_edge": 64})
    return model, processor, lambda x: model(x).pooler_output


def resnet(transformers):
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8] * 4, depths=[1] * 4)
    model = transformers.ResNetModel(config)
    processor = transformers.ConvNextImageProcessorPil(size={"shortest_edge": 384}, do_normalize=False)
    return model, processor, lambda x: model(x).pooler_output.flatten(1)


MODELS = [dinov2, siglip, clip, vit, convnext, resnet]


@pytest.fixture(scope="module")
def saved(transformers, tmp_path_factory):
    """Return a function that saves a model once; it returns the processor, the function of features and the folder."""
    results = {}

    def get(make):
        if make not in results:
            torch.manual_seed(0)
            model, processor, features = make(transformers)
            folder = tmp_path_factory.mktemp(make.__name__)
            with_random_statistics(model).save_pretrained(folder)
            processor.save_pretrained(folder)
            results[make] = processor, features, folder
        return results[make]

    return get


def expected_features(processor, features, images):
    with torch.no_grad():
        return features(processor(images=images, return_tensors="pt")["pixel_values"])


@pytest.mark.parametrize("make", MODELS)
def test_features_of_images_equal_those_of_transformers_with_its_image_processor(saved, make):
    images, (processor, features, folder) = photographs(), saved(make)
    net = build(f"hf:{folder}", pretrained=True)
    expected = expected_features(processor, features, images)
    torch.testing.assert_close(features_of_images(net, images), expected, rtol=0, atol=1e-5)
    net.features[0].mean += 0.1
    assert (features_of_images(net, images) - expected).abs().max() > 1e-4


@pytest.mark.parametrize("make", [dinov2, siglip, clip, vit])
def test_vision_transformers_interpolate_position_embeddings_as_transformers_does(saved, make):
    _, features, folder = saved(make)
    net = build(f"hf:{folder}", pretrained=True, size=42).eval()
    x = torch.rand(2, 3, 42, 42)
    model = features.__closure__[0].cell_contents
    tower = getattr(model, "vit", getattr(model, "vision_model", model))
    options = {} if make is dinov2 else {"interpolate_pos_encoding": True}
    with torch.no_grad():
        output = tower(net.features[0](x), **options)
        expected = output.last_hidden_state[:, 0] if make is vit else output.pooler_output
        torch.testing.assert_close(net.features(x), expected)
    with pytest.raises(InputError, match=r"patches have 14 pixels, but size is 40, .*Use size=28 or size=42"):
        build(f"hf:{folder}", size=40)


def test_images_of_another_size_are_cropped_in_the_same_proportion(saved):
    _, _, folder = saved(dinov2)
    options = build(f"hf:{folder}", pretrained=True, size=56).decode_options
    assert (options.size, options.resize, options.round_crop) == (56, 64, False)


def test_gray_images_are_processed_as_rgb_images(saved):
    _, _, folder = saved(dinov2)
    gray, color = (build(f"hf:{folder}", pretrained=True, channels=channels) for channels in (1, 3))
    images = [image.convert("L") for image in photographs()]
    torch.testing.assert_close(features_of_images(gray, images), features_of_images(color, images))


@pytest.mark.parametrize("make", MODELS)
def test_a_network_is_rebuilt_from_its_recipe_without_files(saved, make, monkeypatch):
    _, _, folder = saved(make)
    net = build(f"hf:{folder}", pretrained=True).eval()
    for name in ("_model_folder", "read_weights", "_read_processor"):
        monkeypatch.setattr(f"metabridge.models.hf_backbone.{name}", lambda *arguments, **options: pytest.fail("read"))
    again = rebuild(json.loads(json.dumps(net.recipe))).eval()
    again.load_state_dict(net.state_dict())
    x = torch.rand(1, 3, net.recipe["size"], net.recipe["size"])
    assert torch.equal(again(x), net(x))
    assert again.decode_options == net.decode_options


def test_weights_can_be_in_several_files_or_in_another_file(saved, tmp_path):
    _, _, folder = saved(dinov2)
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for part, part_names in parts.items():
        save_file({name: weights[name] for name in part_names}, tmp_path / part)
    weight_map = {name: part for part, part_names in parts.items() for name in part_names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for file in ("config.json", "preprocessor_config.json"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    torch.save({f"module.{name}": value for name, value in weights.items()}, tmp_path / "wrapped.pth")
    x = torch.rand(1, 3, 28, 28)
    expected = build(f"hf:{folder}", pretrained=True).eval().features(x)
    assert torch.equal(build(f"hf:{tmp_path}", pretrained=True).eval().features(x), expected)
    assert torch.equal(build(f"hf:{folder}", weights=tmp_path / "wrapped.pth").eval().features(x), expected)


@pytest.mark.parametrize("path", ["/etc/passwd", "../other.safetensors", 7])
def test_an_index_of_weights_cannot_name_files_of_other_folders(saved, tmp_path, path):
    _, _, folder = saved(dinov2)
    for file in ("config.json", "preprocessor_config.json"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": path}}))
    with pytest.raises(InputError, match="does not name the files of the weights"):
        build(f"hf:{tmp_path}", pretrained=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("layernorm.weight"), "they lack 'layernorm.weight'"),
        (lambda weights: weights.update({"layernorm.bias": torch.ones(3)}), "'layernorm.bias' has another shape"),
    ],
)
def test_weights_of_another_model_raise_an_error_that_names_them(saved, tmp_path, change, message):
    _, _, folder = saved(dinov2)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "changed.safetensors")
    with pytest.raises(InputError) as caught:
        build(f"hf:{folder}", weights=tmp_path / "changed.safetensors")
    assert str(caught.value).startswith(f"weights do not belong to 'hf:{folder}': {message}.")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rescale_factor": 1.0}, "rescale_factor is 1.0"),
        ({"do_center_crop": False}, "size is"),
        ({"do_resize": False}, "does not resize"),
        ({"crop_size": pixel_size(40)}, "but must be at least size"),
    ],
)
def test_image_processors_that_cannot_be_followed_raise_an_error_with_the_way_out(saved, tmp_path, changes, reason):
    _, _, folder = saved(dinov2)
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    processor = json.loads((folder / "preprocessor_config.json").read_text()) | changes
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    size = {"size": 28} if "crop_size" not in changes else {"size": 42}
    with pytest.raises(InputError, match=rf"image processor is not supported \(.*{reason}.*Pass mean, std and decode"):
        build(f"hf:{tmp_path}", pretrained=True, **size)
    options = {"decode_options": {"size": 28, "channels": 3, "crop": True}, "mean": MEAN, "std": STD}
    assert build(f"hf:{tmp_path}", pretrained=True, **options).decode_options.crop


def test_a_configuration_that_names_code_runs_none(saved, tmp_path, monkeypatch):
    _, _, folder = saved(dinov2)
    created = tmp_path / "created"
    (tmp_path / "code.py").write_text(f"open({str(created)!r}, 'w')\nclass Model: pass\nclass Config: pass\n")
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    names = {"AutoConfig": "code.Config", "AutoModel": "code.Model", "AutoImageProcessor": "code.Model"}
    for file in ("config.json", "preprocessor_config.json"):
        content = json.loads((folder / file).read_text()) | {"auto_map": names, "_attn_implementation": "owner/kernel"}
        (tmp_path / file).write_text(json.dumps(content))
    net = build(f"hf:{tmp_path}", pretrained=True)
    assert "auto_map" not in net.recipe["config"]
    assert net.features[1].model.config._attn_implementation == "sdpa"
    assert not created.exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "bert"},
            r"whose type 'bert' is not supported\. Use one of ViTModel, .*package\.module:function",
        ),
        ({}, "whose type None is not supported"),
        ({"model_type": "siglip", "vision_config": {"hidden_size": "many"}}, "whose configuration is invalid"),
        (small_transformer("vit", hidden_size="many"), "whose configuration is invalid"),
        (small_transformer("vit", hidden_size=10**9), "contains 1000000000, which is too large to build"),
        (small_transformer("vit", num_hidden_layers=10**12), "which is too large to build"),
        (small_transformer("vit", id2label={"a": 10**12}, hidden_act="os.system"), "cannot be built with"),
    ],
)
def test_configurations_that_cannot_be_built_raise_an_error(transformers, config, message):
    with pytest.raises(InputError, match=message):
        rebuild({"model": "hf", "name": "x", "size": 28, "config": config})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("owner/model", {"pretrained": True}, r"not in the local cache.*download=True"),
        ("owner/model", {}, r"not in the local cache"),
        ("owner/model", {"pretrained": True, "weights": "x"}, "Pass only one of them"),
        ("owner/model", {"channels": 2}, "channels is 2, but"),
    ],
)
def test_models_and_options_that_cannot_be_used_raise_an_error(
    transformers, tmp_path, monkeypatch, name, options, message
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InputError, match=message):
        build(f"hf:{name}", **options)


def test_a_folder_without_a_model_raises_an_error(transformers, tmp_path):
    with pytest.raises(InputError, match=r"config.json cannot be read"):
        build(f"hf:{tmp_path}", pretrained=True)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(InputError, match=r"config.json is damaged: it is not JSON"):
        build(f"hf:{tmp_path}", pretrained=True)


def test_a_recipe_without_configuration_is_not_rebuilt(transformers, tmp_path):
    with pytest.raises(InputError, match="without a configuration"):
        rebuild({"model": "hf", "name": str(tmp_path), "outputs": 5})


def test_a_configuration_without_processor_is_built_without_normalization(transformers):
    net = hf("any", config=small_transformer("dinov2"), outputs=3)
    assert not any(isinstance(layer, Normalize) for layer in net.modules())
    assert (net.head.in_features, net.decode_options) == (16, None)


def test_without_transformers_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError) as caught:
        build("hf:owner/model")
    assert str(caught.value) == (
        "model is 'hf:owner/model', but transformers is not installed. Install it with: pip install 'metabridge[hf]'"
    )
