"""Saving and loading of run folders."""

from __future__ import annotations

import json
import os
import pickle
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from cases import METHODS, WAYS
from damage import damaged_json
from metabridge import InputError, fit, method
from metabridge.environments import Sinusoid
from metabridge.heads import SVM, LogisticRegression, NearestCentroid, RidgeClassifier
from metabridge.learners import PRESETS, Method
from metabridge.models import Network, conv4, mlp
from metabridge.models.architecture import Architecture
from metabridge.solvers import GradientDescent, Proximal
from metabridge.training import load
from metabridge.training.checkpoint import FILES, RunFolder, fingerprint, read_method, write_method
from small_runs import colors, on_colors, on_sinusoids


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory) -> Path:
    """Return the folder of a finished run."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    on_sinusoids(folder)
    return folder


@pytest.fixture
def run_copy(finished_run, tmp_path) -> Path:
    """Return a copy of the folder of a finished run, which a test can change."""
    folder = tmp_path / "run"
    folder.mkdir()
    for file in finished_run.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def truncate(name: str):
    """Return a function that removes the last 50 bytes of a file in a folder."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-50])


def change_settings(change):
    """Return a function that changes the settings in a folder."""

    def change_file(folder):
        settings = json.loads((folder / "settings.json").read_text())
        (folder / "settings.json").write_text(json.dumps(change(settings)))

    return change_file


DAMAGES = {
    "another version": (
        change_settings(lambda settings: settings | {"version": 3}),
        "was written in format 3, but this version .* format 2",
    ),
    "no version": (
        change_settings(lambda settings: [settings]),
        "is not a run: metabridge did not write its settings.json",
    ),
    "a missing setting": (
        change_settings(lambda settings: {"version": 1}),
        "settings.json is damaged: the model is missing",
    ),
    "no JSON": (lambda f: (f / "settings.json").write_text('{"version": 1, '), "settings.json is damaged: it is not"),
    "no text": (lambda f: (f / "settings.json").write_bytes(b"\xff\xfe\x00"), "settings.json is damaged: it is not"),
    "truncated weights": (truncate("weights.safetensors"), "weights.safetensors is damaged or is not a file of a run"),
    "truncated state": (truncate("state.safetensors"), "state.safetensors is damaged or is not a file of a run"),
    "empty weights": (lambda f: (f / "weights.safetensors").write_bytes(b""), "weights.safetensors is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run_raises_an_error_in_load_and_in_fit(run_copy, damage):
    damage_folder, sentence = DAMAGES[damage]
    damage_folder(run_copy)
    for open_run in (load, on_sinusoids):
        with pytest.raises(InputError, match=sentence) as caught:
            open_run(run_copy)
        assert "\n" not in str(caught.value)


def test_a_run_without_weights_raises_an_error(run_copy):
    (run_copy / "weights.safetensors").unlink()
    with pytest.raises(InputError, match="has no weights yet"):
        load(run_copy)
    with pytest.raises(InputError, match=r"has lost its best weights: weights.safetensors is missing"):
        on_sinusoids(run_copy)


def test_a_path_that_is_not_a_run_raises_an_error(tmp_path):
    with pytest.raises(InputError, match=r"there is no run at .*\. Pass the folder that fit\(out=...\) or"):
        load(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"is not a run: settings.json cannot be read \(No such file or directory\)"):
        load(tmp_path)
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(InputError, match="cannot be created"):
        on_sinusoids(tmp_path / "file")


class Bomb:
    """An object that makes the test fail when it is unpickled."""

    def __reduce__(self):
        return pytest.fail, ("a file was unpickled",)


@pytest.mark.parametrize("name", ["settings.json", *FILES])
def test_files_of_other_programs_are_not_overwritten(tmp_path, name):
    (tmp_path / name).write_text('{"editor.fontSize": 14}')
    with pytest.raises(InputError, match=rf"(did not write its|contains) {name}\b.* another folder"):
        on_sinusoids(tmp_path)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [(name, '{"editor.fontSize": 14}')]


def test_reading_a_run_unpickles_nothing(run_copy, monkeypatch):
    assert {file.name for file in run_copy.iterdir()} == {
        "settings.json",
        "weights.safetensors",
        "state.safetensors",
        "metrics.jsonl",
    }
    with monkeypatch.context() as patch:
        for function in ("pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load"):
            patch.setattr(function, lambda *_, **__: pytest.fail("a file was unpickled"))
        load(run_copy)
        on_sinusoids(run_copy)
    (run_copy / "weights.safetensors").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(InputError, match="is damaged or is not a file of a run"):
        load(run_copy)


def test_a_loaded_run_predicts_the_same_as_the_trained_run(tmp_path):
    runs = {"maml": on_sinusoids(tmp_path / "maml"), "rfs": on_colors("rfs", tmp_path / "rfs")}
    environments = {"maml": Sinusoid(), "rfs": colors().tasks("validation", ways=3, shots=2, queries=3)}
    for name, run in runs.items():
        loaded, loaded_again = (load(tmp_path / name) for _ in range(2))
        episodes = environments[name].sample(3, torch.Generator().manual_seed(0))
        assert torch.equal(loaded.predict(episodes), run.predict(episodes))
        assert loaded.method == run.method
        assert loaded.finished
        assert loaded.settings["training"] == json.loads(json.dumps(run.settings["training"]))
        assert [point.iteration for point in loaded.curve] == [point.iteration for point in run.curve]
        assert loaded.best.mean == run.best.mean
        assert all(torch.equal(value, loaded_again.params[key]) for key, value in loaded.params.items())


def test_a_network_built_by_hand_must_be_passed_to_load_and_must_match(tmp_path):
    def net(width: int = 6) -> Network:
        return Network(nn.Sequential(nn.Linear(1, width), nn.Tanh()), nn.Linear(width, 1))

    run = fit(net(), method("maml"), Sinusoid(), iterations=2, out=tmp_path, progress=False)
    with pytest.raises(
        InputError, match=r"was not built by metabridge.models. Build it and pass it: load\(folder, net=net\)"
    ):
        load(tmp_path)
    with pytest.raises(InputError, match=r"'features.0.weight' of shape \(7, 1\), but the run in .* has \(6, 1\)"):
        load(tmp_path, net=net(7))
    with pytest.raises(InputError, match="has no such tensor"):
        load(tmp_path, net=mlp(1, 1))
    with pytest.raises(InputError, match=r"of shape \(7, 1\), but the run in .* has \(6, 1\).*or use another folder"):
        fit(net(7), method("maml"), Sinusoid(), iterations=2, out=tmp_path, progress=False)
    episodes = Sinusoid().sample(2, torch.Generator().manual_seed(0))
    assert torch.equal(load(tmp_path, net=net()).predict(episodes), run.predict(episodes))


def test_a_shared_layer_is_stored_once_and_is_shared_after_loading(tmp_path):
    def net(seed: int) -> Network:
        torch.manual_seed(seed)
        layer = nn.Linear(4, 4)
        return Network(nn.Sequential(nn.Linear(1, 4), layer, nn.Tanh(), layer), nn.Linear(4, 1))

    run = fit(net(0), method("maml"), Sinusoid(), iterations=2, out=tmp_path, mode="loop", progress=False)
    assert "features.3.weight" not in run.params
    loaded_net = load(tmp_path, net=net(1)).net
    assert loaded_net.features[1] is loaded_net.features[3]
    for network in (loaded_net, run.net):
        assert isinstance(network.features[3].weight, nn.Parameter)
        assert torch.equal(network.features[3].weight, run.params["features.1.weight"])


@pytest.mark.parametrize(
    "damage",
    [
        lambda settings: settings["method"].pop("inner"),
        lambda settings: settings["method"]["inner"].update(solver="Newton"),
        lambda settings: settings["method"]["inner"].update(momentum=0.9),
        lambda settings: settings.update(training=None),
        lambda settings: settings["model"].pop("model"),
    ],
)
def test_settings_that_cannot_be_read_raise_an_error(tmp_path, damage):
    on_sinusoids(tmp_path)
    settings = RunFolder(tmp_path).settings()
    damage(settings)
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match=r"settings.json is damaged: its (settings cannot be read|training is None)"):
        load(tmp_path)


def test_a_pretrained_network_is_built_without_reading_or_downloading_other_weights(tmp_path, monkeypatch):
    run = on_sinusoids(tmp_path)
    recipes = []

    def build(**recipe):
        recipes.append(recipe)
        return mlp(1, 1, width=8)

    folder = RunFolder(tmp_path)
    settings = folder.settings()
    settings["model"] |= {"pretrained": True, "weights": "/dev/zero", "download": True}
    tensors, metadata = folder.read("weights")
    # so that the weights still match the changed settings
    folder.write("weights", tensors, metadata | {"settings": fingerprint(settings)})
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    monkeypatch.setattr("metabridge.models.build", build)
    assert torch.equal(load(tmp_path).params["head.weight"], run.params["head.weight"])
    assert not recipes[0].keys() & {"pretrained", "weights", "download"}


EVERY_METHOD: dict[str, Method] = (
    PRESETS
    | METHODS
    | {
        f"mtl with {head}": method("mtl", test_solver=head)
        for head in (
            LogisticRegression(3.0, False),
            SVM(2.0, "hinge"),
            RidgeClassifier(0.1, True),
            NearestCentroid(True),
        )
    }
    | {
        f"nal with {solver}": method("nal", test_solver=solver)
        for solver in (GradientDescent(3, 0.1), Proximal(steps=2))
    }
)


@pytest.mark.parametrize("name", EVERY_METHOD)
def test_reading_a_written_method_returns_an_equal_method(name):
    assert read_method(json.loads(json.dumps(write_method(EVERY_METHOD[name])))) == EVERY_METHOD[name]


@pytest.mark.parametrize(
    "change",
    [
        {"loss": lambda outputs, targets: (outputs - targets).square().mean()},
        {"regularizer": lambda params: params["head.weight"].square().sum()},
    ],
)
def test_a_method_with_a_custom_function_can_be_trained_but_not_saved(tmp_path, change):
    learner = replace(method("maml", steps=1), **change)
    options = {"iterations": 1, "progress": False}
    with pytest.raises(InputError, match="a custom loss or regularizer cannot be saved"):
        fit(mlp(1, 1), learner, Sinusoid(), out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
    assert fit(mlp(1, 1), learner, Sinusoid(), **options).finished


def test_tensors_in_channels_last_layout_are_loaded_with_the_same_values(tmp_path):
    data = colors().tasks("train", ways=WAYS, shots=1, queries=1)
    run = fit(
        conv4(3, 18, WAYS), method("anil"), data, iterations=2, precision="bfloat16", out=tmp_path, progress=False
    )
    assert run.params["features.1.0.weight"].is_contiguous(memory_format=torch.channels_last)
    loaded = load(tmp_path)
    assert all(torch.equal(value, loaded.params[name]) for name, value in run.params.items())


@pytest.mark.parametrize("name", ["weights", "state"])
def test_flipped_bits_are_detected(run_copy, name):
    file, folder = run_copy / f"{name}.safetensors", RunFolder(run_copy)
    content, rng = file.read_bytes(), random.Random(0)
    header_bits = 8 * (8 + int.from_bytes(content[:8], "little"))
    # all bits of the header and 500 bits of the values
    bits = [*range(header_bits), *rng.sample(range(header_bits, 8 * len(content)), 500)]
    for bit in rng.sample(bits, 1500):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        with pytest.raises(InputError, match=rf"{name}\.safetensors is damaged or is not a file of a run"):
            folder.read(name)


def replace_metadata(folder: Path, name: str, metadata: bytes) -> None:
    """Replace the metadata of a file of tensors, and omit the checksum, as version 0.1.0 did."""
    from safetensors.torch import save

    tensors, _ = RunFolder(folder).read(name)
    content = save(tensors, {"metabridge": metadata.decode(errors="replace")})
    (folder / f"{name}.safetensors").write_bytes(content)


@pytest.mark.parametrize("name", ["settings", "weights", "state"])
def test_any_damage_gives_a_run_or_a_one_line_error(run_copy, name):
    rng, errors = random.Random(0), []
    original_files = {file: file.read_bytes() for file in run_copy.iterdir()}
    original = RunFolder(run_copy).settings() if name == "settings" else RunFolder(run_copy).read(name)[1]
    for _ in range(120):
        for file, content in original_files.items():
            file.write_bytes(content)
        if name == "settings":
            (run_copy / "settings.json").write_bytes(damaged_json(original, rng))
        else:
            replace_metadata(run_copy, name, damaged_json(original, rng))
        for open_run in (load, on_sinusoids):
            try:
                open_run(run_copy)
            except InputError as error:
                errors.append(str(error))
    assert len(errors) > 40  # of 240 attempts, so the damage is often noticed
    assert not any("\n" in error for error in errors)


@pytest.mark.parametrize(
    "size", [{"depth": 10**9}, {"depth": 10**9, "width": 1}, {"width": 10**4}, {"inputs": 10**12}, {"outputs": 10**30}]
)
def test_settings_of_a_network_larger_than_its_weights_raise_an_error_before_it_is_built(run_copy, size):
    settings = RunFolder(run_copy).settings()
    settings["model"] |= size
    (run_copy / "settings.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match=r"settings.json is damaged: .* too large to build"):
        load(run_copy)


@pytest.mark.parametrize("name", ["weights", "state"])
def test_a_file_without_read_permission_is_not_reported_as_damaged(run_copy, name, monkeypatch):
    original_open = os.open

    def open_without_permission(path, *arguments):
        if str(path).endswith(f"{name}.safetensors"):
            raise PermissionError(13, "Permission denied")
        return original_open(path, *arguments)

    monkeypatch.setattr(os, "open", open_without_permission)
    for open_run in (load, on_sinusoids):
        with pytest.raises(InputError, match=rf"{name}.safetensors cannot be read \(Permission denied\)") as caught:
            open_run(run_copy)
        assert "delete" not in str(caught.value).lower()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("name", ["settings.json", "weights.safetensors", "state.safetensors"])
def test_a_pipe_in_place_of_a_file_raises_an_error_without_waiting(run_copy, name):
    (run_copy / name).unlink()
    os.mkfifo(run_copy / name)
    with pytest.raises(InputError, match=r"cannot be read \(Not a regular file\)"):
        load(run_copy)


def test_weights_of_another_dtype_raise_an_error(run_copy):
    tensors, metadata = RunFolder(run_copy).read("weights")
    RunFolder(run_copy).write("weights", {key: value.double() for key, value in tensors.items()}, metadata)
    for open_run in (load, on_sinusoids):
        with pytest.raises(InputError, match=r"in torch.float32, but the run in .* in torch.float64"):
            open_run(run_copy)


@pytest.mark.parametrize(
    "change",
    [
        lambda settings: settings["method"]["inner"].update(lr=0.03),
        lambda settings: settings["method"].update(outer="first-order"),
        lambda settings: settings["model"].update(activation="tanh"),
    ],
)
def test_settings_of_another_model_or_method_than_the_weights_raise_an_error(run_copy, change):
    settings = RunFolder(run_copy).settings()
    change(settings)
    (run_copy / "settings.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match=r"its model or method is not what the weights were trained with"):
        load(run_copy)


@pytest.mark.parametrize("model", ["/dev/zero.json", "nowhere.json", "timm:resnet18", 7, None, ["mlp"]])
def test_settings_that_name_a_file_or_an_unknown_model_raise_an_error_without_opening_the_file(
    run_copy, model, monkeypatch
):
    change_settings(lambda settings: settings | {"model": settings["model"] | {"model": model}})(run_copy)
    monkeypatch.setattr(Architecture, "load", lambda file: pytest.fail(f"{file} was opened"))
    with pytest.raises(InputError, match=r"settings.json is damaged: its settings cannot be read \("):
        load(run_copy)
