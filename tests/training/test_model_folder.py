from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import metabridge as mb
from metabridge.decode_options import DecodeOptions
from metabridge.models import Network, conv4
from metabridge.training import Model, from_pretrained, load_model, save_pretrained
from metabridge.training.model_folder import CARD_FILE, CONFIG_FILE, WEIGHTS_FILE


@pytest.fixture
def model() -> Model:
    learner, net = mb.method("r2d2"), conv4(1, 28, filters=4, statistics="running").eval()
    for layer in net.modules():
        if hasattr(layer, "variance"):
            layer.variance.fill_(2.0)
    return Model(learner, net, mb.parameters(learner, net))


def test_a_saved_model_computes_the_same_features_and_adapts_with_the_same_method(model, tmp_path):
    loaded = from_pretrained(save_pretrained(model, tmp_path / "hub"))
    images = torch.rand(3, 1, 28, 28)
    assert torch.equal(loaded.features(images), model.features(images))
    assert loaded.method == model.method
    assert sorted(path.name for path in (tmp_path / "hub").iterdir()) == [CARD_FILE, CONFIG_FILE, WEIGHTS_FILE]


def test_half_precision_halves_the_file_and_changes_the_features_little(model, tmp_path):
    full, half = save_pretrained(model, tmp_path / "full"), save_pretrained(model, tmp_path / "half", half=True)
    sizes = [(folder / WEIGHTS_FILE).stat().st_size for folder in (full, half)]
    assert sizes[1] < 0.85 * sizes[0]  # the header with the names is as long in both
    images = torch.rand(3, 1, 28, 28)
    loaded = from_pretrained(half)
    assert all(value.dtype == torch.float32 for value in loaded.params.values() if value.is_floating_point())
    torch.testing.assert_close(loaded.features(images), model.features(images), rtol=1e-2, atol=1e-2)


def test_the_folder_keeps_how_images_are_decoded(model, tmp_path):
    model.net.decode_options = DecodeOptions(28, 1, crop=True, invert="auto", resize=32, interpolation="bicubic")
    loaded = from_pretrained(save_pretrained(model, tmp_path))
    assert loaded.net.decode_options == model.net.decode_options


def test_the_folder_of_a_run_omits_the_head_rows_of_training_classes(tmp_path):
    mtl, net = mb.method("mtl"), conv4(1, 28, filters=4)
    loaded = from_pretrained(save_pretrained(Model(mtl, net, mb.parameters(mtl, net, classes=700)), tmp_path))
    assert not any(name.startswith("heads.") for name in loaded.params)


def test_the_card_has_the_metadata_of_the_hub_and_can_be_replaced(model, tmp_path):
    card = (save_pretrained(model, tmp_path / "a") / CARD_FILE).read_text()
    assert card.startswith("---\nlibrary_name: metabridge\npipeline_tag: image-feature-extraction\n")
    assert (save_pretrained(model, tmp_path / "b", card="# Mine") / CARD_FILE).read_text() == "# Mine"


def test_models_that_a_folder_cannot_describe_are_refused(model, tmp_path):
    with pytest.raises(mb.InputError, match=r"not built by metabridge\.models"):
        save_pretrained(replace(model, net=Network(nn.Flatten(), nn.Linear(784, 5))), tmp_path)
    model.params["head.weight"].data[0, 0] = 1e6
    with pytest.raises(mb.InputError, match=r"'head\.weight' has values that are too large for float16"):
        save_pretrained(model, tmp_path, half=True)


def edit_config(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / CONFIG_FILE).read_text())
        change(config)
        (folder / CONFIG_FILE).write_text(json.dumps(config))

    return edit


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda folder: (folder / CONFIG_FILE).unlink(), "is not the folder of a model"),
    "no JSON": (lambda folder: (folder / CONFIG_FILE).write_text("{"), "it is not JSON"),
    "another library": (edit_config(lambda config: config.update(library_name="timm")), "is not a model of metabridge"),
    "another format": (edit_config(lambda config: config.update(format_version=9)), "was written in format 9"),
    "no method": (edit_config(lambda config: config.pop("method")), "is damaged"),
    "an unknown network": (edit_config(lambda config: config["model"].update(model="os.system")), "is damaged"),
    "a huge network": (edit_config(lambda config: config["model"].update(filters=10**6)), "too large to build"),
    "a huge image": (edit_config(lambda config: config["decode_options"].update(size=10**9)), "size is 1000000000"),
    "another shape": (edit_config(lambda config: config["model"].update(filters=5)), "the network has"),
    "no weights": (lambda folder: (folder / WEIGHTS_FILE).unlink(), "cannot be read"),
    "damaged weights": (lambda folder: (folder / WEIGHTS_FILE).write_bytes(b"\x80pickle"), "is damaged"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_an_error_that_names_the_problem(name, model, tmp_path):
    damage, message = DAMAGES[name]
    damage(save_pretrained(model, tmp_path))
    with pytest.raises(mb.InputError, match=message):
        from_pretrained(tmp_path)


def test_a_pickle_in_place_of_the_weights_is_not_executed(model, tmp_path):
    save_pretrained(model, tmp_path)
    file = tmp_path / "created"

    class Payload:
        def __reduce__(self):
            return open, (str(file), "w")

    torch.save({"head.weight": Payload()}, tmp_path / WEIGHTS_FILE)
    with pytest.raises(mb.InputError, match="is damaged"):
        from_pretrained(tmp_path)
    assert not file.exists()


def test_load_model_takes_the_folder_a_run_and_a_model(model, tmp_path, run):
    assert load_model(save_pretrained(model, tmp_path / "hub")).method == model.method
    assert isinstance(load_model(run), mb.Run)
    copy = load_model(model)
    copy.params["head.weight"].data.zero_()
    assert model.params["head.weight"].any()


@pytest.fixture
def run(glyphs, tmp_path) -> Path:
    net = conv4(1, 28, filters=4)
    mb.fit(net, mb.method("anil"), glyphs.tasks("train"), iterations=1, out=tmp_path / "run", progress=False)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("phots", {}, "model is phots, which is neither a folder nor the name of a model.*photos, characters"),
        (Path("runs/none"), {}, "there is no run at runs/none"),
        ("photos", {"size": 64}, "model is photos, which contains its weights and options. Omit size"),
        ("photos", {"weights": "a.safetensors"}, "Omit weights"),
    ],
)
def test_a_model_that_does_not_exist_is_an_error_with_the_way_out(source, options, message):
    with pytest.raises(mb.InputError, match=message):
        load_model(source, **options)


def test_an_adapted_model_is_not_taken_for_a_model(model, tmp_path, glyphs):
    images, labels = glyphs.images[:40, 0].numpy(), glyphs.labels[:40].numpy() % 2
    mb.FewShotClassifier(model, head="ridge").fit(images, labels).save(tmp_path)
    with pytest.raises(mb.InputError, match="contains an adapted model, which knows its classes already"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["photos", "characters"])
def test_built_in_models_load_without_network_and_have_finite_features(name):
    model = load_model(name)
    options = model.net.decode_options
    features = model.features(torch.rand(2, options.channels, options.size, options.size))
    assert features.isfinite().all()
    assert model.method == mb.method("frozen")
