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
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    on_sinusoids(folder)
    return folder


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    for file in finished.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def cut(name: str):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-50])


def settings(change):
    def apply(folder):
        saved = json.loads((folder / "settings.json").read_text())
        (folder / "settings.json").write_text(json.dumps(change(saved)))

    return apply


DAMAGES = {
    "another version": (
        settings(lambda s: s | {"version": 3}),
        "was written in format 3, but this version .* format 2",
    ),
    "no version": (settings(lambda s: [s]), "is not a run: metabridge did not write its settings.json"),
    "a missing setting": (settings(lambda s: {"version": 1}), "settings.json is damaged: the model is missing"),
    "no JSON": (lambda f: (f / "settings.json").write_text('{"version": 1, '), "settings.json is damaged: it is not"),
    "no text": (lambda f: (f / "settings.json").write_bytes(b"\xff\xfe\x00"), "settings.json is damaged: it is not"),
    "truncated weights": (cut("weights.safetensors"), "weights.safetensors is damaged or not of a run"),
    "truncated state": (cut("state.safetensors"), "state.safetensors is damaged or not of a run"),
    "empty weights": (lambda f: (f / "weights.safetensors").write_bytes(b""), "weights.safetensors is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run_raises_an_error_in_load_and_in_fit(copy, damage):
    harm, sentence = DAMAGES[damage]
    harm(copy)
    for use in (load, on_sinusoids):
        with pytest.raises(InputError, match=sentence) as caught:
            use(copy)
        assert "\n" not in str(caught.value)


def test_a_run_without_weights_raises_an_error(copy):
    (copy / "weights.safetensors").unlink()
    with pytest.raises(InputError, match="has no weights yet"):
        load(copy)
    with pytest.raises(InputError, match=r"has lost its best weights: weights.safetensors is missing"):
        on_sinusoids(copy)


def test_a_path_that_is_not_a_run_raises_an_error(tmp_path):
    with pytest.raises(InputError, match=r"there is no run at .*\. Pass the folder that fit\(out=...\) or"):
        load(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"is not a run: settings.json cannot be read \(No such file or directory\)"):
        load(tmp_path)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match="cannot be created"):
        on_sinusoids(tmp_path / "file")


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("a file was unpickled",)


@pytest.mark.parametrize("name", ["settings.json", *FILES])
def test_files_of_other_programs_are_not_overwritten(tmp_path, name):
    (tmp_path / name).write_text('{"editor.fontSize": 14}')
    with pytest.raises(InputError, match=rf"(did not write its|contains) {name}\b.* another folder"):
        on_sinusoids(tmp_path)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [(name, '{"editor.fontSize": 14}')]


def test_reading_a_run_unpickles_nothing(copy, monkeypatch):
    assert {file.name for file in copy.iterdir()} == {
        "settings.json",
        "weights.safetensors",
        "state.safetensors",
        "metrics.jsonl",
    }
    with monkeypatch.context() as patch:
        for function in ("pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load"):
            patch.setattr(function, lambda *_, **__: pytest.fail("a file was unpickled"))
        load(copy)
        on_sinusoids(copy)
    (copy / "weights.safetensors").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(InputError, match="is damaged or not of a run"):
        load(copy)


def test_a_loaded_run_predicts_the_same_as_the_trained_run(tmp_path):
    runs = {"maml": on_sinusoids(tmp_path / "maml"), "rfs": on_colors("rfs", tmp_path / "rfs")}
    environments = {"maml": Sinusoid(), "rfs": colors().tasks("validation", ways=3, shots=2, queries=3)}
    for name, run in runs.items():
        loaded, again = (load(tmp_path / name) for _ in range(2))
        episodes = environments[name].sample(3, torch.Generator().manual_seed(0))
        assert torch.equal(loaded.predict(episodes), run.predict(episodes))
        assert loaded.method == run.method
        assert loaded.finished
        assert loaded.settings["training"] == json.loads(json.dumps(run.settings["training"]))
        assert [point.iteration for point in loaded.curve] == [point.iteration for point in run.curve]
        assert loaded.best.mean == run.best.mean
        assert all(torch.equal(value, again.params[key]) for key, value in loaded.params.items())


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


def test_a_layer_in_two_places_is_stored_once_and_loaded_into_both(tmp_path):
    def net(seed: int) -> Network:
        torch.manual_seed(seed)
        layer = nn.Linear(4, 4)
        return Network(nn.Sequential(nn.Linear(1, 4), layer, nn.Tanh(), layer), nn.Linear(4, 1))

    run = fit(net(0), method("maml"), Sinusoid(), iterations=2, out=tmp_path, mode="loop", progress=False)
    assert "features.3.weight" not in run.params
    again = load(tmp_path, net=net(1)).net
    assert again.features[1] is again.features[3]
    for each in (again, run.net):
        assert isinstance(each.features[3].weight, nn.Parameter)
        assert torch.equal(each.features[3].weight, run.params["features.1.weight"])


@pytest.mark.parametrize(
    "damage",
    [
        lambda saved: saved["method"].pop("inner"),
        lambda saved: saved["method"]["inner"].update(solver="Newton"),
        lambda saved: saved["method"]["inner"].update(momentum=0.9),
        lambda saved: saved.update(training=None),
        lambda saved: saved["model"].pop("model"),
    ],
)
def test_settings_of_another_type_raise_an_error(tmp_path, damage):
    on_sinusoids(tmp_path)
    saved = RunFolder(tmp_path).settings()
    damage(saved)
    (tmp_path / "settings.json").write_text(json.dumps(saved))
    with pytest.raises(InputError, match=r"settings.json is damaged: its (settings cannot be read|training is None)"):
        load(tmp_path)


def test_a_pretrained_network_is_built_without_a_download(tmp_path, monkeypatch):
    run = on_sinusoids(tmp_path)
    recipes = []

    def built(**recipe):
        recipes.append(recipe)
        return mlp(1, 1, width=8)

    folder = RunFolder(tmp_path)
    saved = folder.settings()
    saved["model"] |= {"pretrained": True}
    tensors, notes = folder.read("weights")
    folder.write("weights", tensors, notes | {"settings": fingerprint(saved)})
    (tmp_path / "settings.json").write_text(json.dumps(saved))
    monkeypatch.setattr("metabridge.training.checkpoint.build", built)
    assert torch.equal(load(tmp_path).params["head.weight"], run.params["head.weight"])
    assert recipes[0]["pretrained"] is False


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


@pytest.mark.parametrize("change", [{"loss": lambda p, y: (p - y).square().mean()}, {"regularizer": lambda p: 0.0}])
def test_a_method_with_a_custom_function_can_be_trained_but_not_saved(tmp_path, change):
    chosen = method("maml", **change) if "loss" in change else method("maml", steps=1)
    if "regularizer" in change:
        chosen = replace(chosen, regularizer=lambda params: params["head.weight"].square().sum())
    options = {"iterations": 1, "progress": False}
    with pytest.raises(InputError, match="a custom loss or regularizer cannot be saved"):
        fit(mlp(1, 1), chosen, Sinusoid(), out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
    assert fit(mlp(1, 1), chosen, Sinusoid(), **options).finished


def test_tensors_in_channels_last_layout_are_loaded_with_the_same_values(tmp_path):
    data = colors().tasks("train", ways=WAYS, shots=1, queries=1)
    run = fit(
        conv4(3, 18, WAYS), method("anil"), data, iterations=2, precision="bfloat16", out=tmp_path, progress=False
    )
    assert run.params["features.1.0.weight"].is_contiguous(memory_format=torch.channels_last)
    loaded = load(tmp_path)
    assert all(torch.equal(value, loaded.params[name]) for name, value in run.params.items())


@pytest.mark.parametrize("name", ["weights", "state"])
def test_every_flipped_bit_is_detected(copy, name):
    file, folder = copy / f"{name}.safetensors", RunFolder(copy)
    content, draw = file.read_bytes(), random.Random(0)
    header = 8 + int.from_bytes(content[:8], "little")
    bits = [*range(8 * header), *draw.sample(range(8 * header, 8 * len(content)), 500)]
    for bit in draw.sample(bits, 1500):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        with pytest.raises(InputError, match=rf"{name}\.safetensors is damaged or not of a run"):
            folder.read(name)


def old_form(folder: Path, name: str, notes: bytes) -> None:
    """Write tensors with other notes and without a checksum, as 0.1.0 did."""
    from safetensors.torch import save

    tensors, _ = RunFolder(folder).read(name)
    content = save(tensors, {"metabridge": notes.decode(errors="replace")})
    (folder / f"{name}.safetensors").write_bytes(content)


@pytest.mark.parametrize("part", ["settings", "weights", "state"])
def test_any_damage_gives_a_run_or_a_one_line_error(copy, part):
    draw, errors = random.Random(0), []
    clean = {file: file.read_bytes() for file in copy.iterdir()}
    intact = RunFolder(copy).settings() if part == "settings" else RunFolder(copy).read(part)[1]
    for _ in range(120):
        for file, content in clean.items():
            file.write_bytes(content)
        if part == "settings":
            (copy / "settings.json").write_bytes(damaged_json(intact, draw))
        else:
            old_form(copy, part, damaged_json(intact, draw))
        for use in (load, on_sinusoids):
            try:
                use(copy)
            except InputError as error:
                errors.append(str(error))
    assert len(errors) > 40
    assert not any("\n" in each for each in errors)


@pytest.mark.parametrize(
    "size", [{"depth": 10**9}, {"depth": 10**9, "width": 1}, {"width": 10**4}, {"inputs": 10**12}, {"outputs": 10**30}]
)
def test_settings_of_a_network_larger_than_its_weights_raise_an_error_before_it_is_built(copy, size):
    saved = RunFolder(copy).settings()
    saved["model"] |= size
    (copy / "settings.json").write_text(json.dumps(saved))
    with pytest.raises(InputError, match=r"settings.json is damaged: .* too large to build"):
        load(copy)


@pytest.mark.parametrize("name", ["weights", "state"])
def test_a_file_without_read_permission_is_not_reported_as_damaged(copy, name, monkeypatch):
    opened = os.open

    def forbidden(path, *arguments):
        if str(path).endswith(f"{name}.safetensors"):
            raise PermissionError(13, "Permission denied")
        return opened(path, *arguments)

    monkeypatch.setattr(os, "open", forbidden)
    for use in (load, on_sinusoids):
        with pytest.raises(InputError, match=rf"{name}.safetensors cannot be read \(Permission denied\)") as caught:
            use(copy)
        assert "elete" not in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("name", ["settings.json", "weights.safetensors", "state.safetensors"])
def test_a_pipe_in_place_of_a_file_raises_an_error_without_waiting(copy, name):
    (copy / name).unlink()
    os.mkfifo(copy / name)
    with pytest.raises(InputError, match=r"cannot be read \(Not a regular file\)"):
        load(copy)


def test_weights_of_another_dtype_raise_an_error(copy):
    tensors, notes = RunFolder(copy).read("weights")
    RunFolder(copy).write("weights", {key: value.double() for key, value in tensors.items()}, notes)
    for use in (load, on_sinusoids):
        with pytest.raises(InputError, match=r"in torch.float32, but the run in .* in torch.float64"):
            use(copy)


@pytest.mark.parametrize(
    "change",
    [
        lambda saved: saved["method"]["inner"].update(lr=0.03),
        lambda saved: saved["method"].update(outer="first-order"),
        lambda saved: saved["model"].update(activation="tanh"),
    ],
)
def test_settings_of_another_model_or_method_than_the_weights_raise_an_error(copy, change):
    saved = RunFolder(copy).settings()
    change(saved)
    (copy / "settings.json").write_text(json.dumps(saved))
    with pytest.raises(InputError, match=r"its model or method is not what the weights were trained with"):
        load(copy)


@pytest.mark.parametrize("model", ["/dev/zero.json", "nowhere.json", "timm:resnet18", 7, None, ["mlp"]])
def test_settings_that_name_a_file_or_an_unknown_model_raise_an_error_without_opening_the_file(
    copy, model, monkeypatch
):
    settings(lambda s: s | {"model": s["model"] | {"model": model}})(copy)
    monkeypatch.setattr(Architecture, "load", lambda file: pytest.fail(f"{file} was opened"))
    with pytest.raises(InputError, match=r"settings.json is damaged: its settings cannot be read \("):
        load(copy)
