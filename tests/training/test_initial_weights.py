from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from metabridge import InputError, Model, fit, load, method, parameters
from metabridge.decode_options import DecodeOptions
from metabridge.environments import LabeledImages, Sinusoid
from metabridge.models import conv4, mlp
from metabridge.training import Run
from metabridge.training.config import default_config
from metabridge.training.image_training import train_on_images
from metabridge.training.initial_weights import copy_weights, network_like

SHORT = {"iterations": 1, "validate_tasks": 2, "queries": 2, "shots": 1, "ways": 3}


def images(names: str = "abcdefgh") -> LabeledImages:
    """Eight classes of 16-pixel images of noise, six to train on and two to validate on."""
    labels = torch.arange(8).repeat_interleave(4)
    pixels = torch.randint(0, 256, (32, 1, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    splits = {"train": torch.arange(6), "validation": torch.arange(6, 8)}
    return LabeledImages(pixels, labels, tuple(names), torch.zeros(8, dtype=torch.int64), ("all",), splits)


def train(name: str, out=None, *, init: Model | None = None, data: LabeledImages | None = None, **options) -> Run:
    config = replace(default_config(name), **SHORT, batch_size=2, lr=0.01)
    config = replace(config, **{"model_options": {"filters": 4}} | options)
    return train_on_images(config, images() if data is None else data, out=out, init=init, progress=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, Run]:
    """Runs of several methods, with their settings."""
    root = tmp_path_factory.mktemp("trained")
    options = {"maml-rates": {"method_options": {"rates": "per-tensor"}}}
    names = ("maml", "maml-rates", "mtl", "rfs", "r2d2")
    return {name: train(name.removesuffix("-rates"), root / name, **options.get(name, {})) for name in names}


def copied_groups(source: Run, name: str, *, classes: str = "abcdef", outputs: int = 3, **options) -> list[str]:
    """Return the groups whose values equal those of the source, and check that they are those reported."""
    learner, net = method(name, **options), network_like(source, outputs=outputs, seed=9)
    params = parameters(learner, net, classes=len(classes), seed=9)
    before = {key: value.clone() for key, value in params.items()}
    weights = copy_weights(source, learner, net, params, tuple(classes))
    for key, value in params.items():
        copied = key.partition(".")[0] in weights.copied
        assert torch.equal(value, source.params[key] if copied else before[key]), key
    for key, value in net.named_parameters():
        assert torch.equal(value, params[key]), key
    for key, value in net.named_buffers():
        assert torch.equal(value, source.net.get_buffer(key)), key
    return list(weights.copied)


@pytest.mark.parametrize(
    ("source", "target", "options", "copied"),
    [
        ("maml", "maml", {}, ["features", "head"]),
        ("maml", "anil", {}, ["features", "head"]),
        ("maml", "maml", {"outputs": 4}, ["features"]),  # another number of ways
        ("mtl", "maml", {}, ["features"]),  # mtl trains no shared initial head
        ("r2d2", "maml", {}, ["features"]),
        ("maml", "r2d2", {}, ["features"]),
        ("r2d2", "r2d2", {}, ["features", "solver"]),
        ("mtl", "mtl", {}, ["features", "heads"]),
        ("rfs", "mtl", {}, ["features", "heads"]),
        ("mtl", "mtl", {"classes": "abcdeh"}, ["features"]),  # other training classes
        ("mtl", "mtl", {"classes": "bacdef"}, ["features"]),  # the same classes in another order
        ("mtl", "mtl", {"classes": "abcde"}, ["features"]),
        ("maml", "mtl", {}, ["features"]),
        ("maml-rates", "maml", {"rates": "per-tensor"}, ["features", "head", "rates"]),
        ("maml-rates", "maml", {"rates": "per-element"}, ["features", "head"]),  # rates of other shapes
        ("maml", "maml", {"rates": "per-tensor"}, ["features", "head"]),
    ],
)
def test_weights_are_copied_if_they_fit_and_others_are_new(trained, source, target, options, copied):
    assert copied_groups(trained[source], target, **options) == copied


def test_the_summary_names_what_was_copied_and_what_is_new(trained):
    learner, net = method("maml", rates="per-tensor"), network_like(trained["mtl"], outputs=3)
    weights = copy_weights(trained["mtl"], learner, net, parameters(learner, net), ())
    assert weights.summary() == "features; new: initial head, inner learning rates"
    learner = method("rfs")  # has no initial head
    weights = copy_weights(trained["mtl"], learner, net, parameters(learner, net, classes=2), ())
    assert weights.summary() == "features; new: head rows of the training classes"


def test_features_of_another_network_raise_an_error(trained):
    net = conv4(1, 16, 3, filters=5)
    with pytest.raises(InputError, match=r"init is a model with other features: features.0.0.weight has shape \(5, 1"):
        fit(net, method("maml"), images().tasks("train", ways=3, queries=2), init=trained["maml"], progress=False)


@pytest.mark.parametrize(("name", "statistics"), [("mtl", "batch"), ("maml", "running"), ("mtl", None)])
def test_the_network_has_the_statistics_passed_and_is_the_one_that_its_recipe_builds(trained, name, statistics):
    source = trained[name]
    net = network_like(source, outputs=4, statistics=statistics, seed=2)
    expected = statistics or source.net.recipe["statistics"]
    rebuilt = conv4(1, 16, 4, filters=4, statistics=expected, seed=2)
    assert net.recipe == rebuilt.recipe
    assert [(key, value.shape) for key, value in net.state_dict().items()] == [
        (key, value.shape) for key, value in rebuilt.state_dict().items()
    ]
    assert torch.equal(net.head.weight, rebuilt.head.weight)
    assert torch.equal(net.features[0][0].weight, source.params["features.0.0.weight"])
    assert source.net.recipe["outputs"] == 3  # the source does not change


def test_a_pretrained_network_gets_a_new_head_without_being_built_again(trained, monkeypatch):
    net = conv4(1, 16, 7, filters=4)
    net.recipe = net.recipe | {"pretrained": True}
    net.decode_options = DecodeOptions(16, 1)
    monkeypatch.setattr("metabridge.training.initial_weights.build", lambda **options: pytest.fail("built again"))
    frozen = method("frozen")
    copy = network_like(Model(frozen, net, parameters(frozen, net)), outputs=3)
    assert copy.head.out_features == 3
    assert copy.decode_options == net.decode_options


def test_pre_training_and_meta_training(trained):
    run = train("maml", init=trained["rfs"], lr=1e-9)
    assert torch.allclose(run.params["features.0.0.weight"], trained["rfs"].params["features.0.0.weight"], atol=1e-6)
    assert run.net.recipe["filters"] == 4  # the network of the source, whatever the configuration says
    assert run.net.recipe["statistics"] == "running"


def test_training_from_a_model_is_reproducible_and_does_not_change_it(trained):
    source = trained["rfs"]
    before = {name: value.clone() for name, value in source.net.state_dict().items()}
    runs = [train("maml", init=source) for _ in range(2)]
    assert all(torch.equal(value, runs[1].params[name]) for name, value in runs[0].params.items())
    assert all(torch.equal(value, before[name]) for name, value in source.net.state_dict().items())


def test_a_run_continues_only_from_the_same_initial_weights(trained, tmp_path):
    run = train("maml", tmp_path / "a", init=trained["rfs"])
    assert train("maml", tmp_path / "a", init=trained["rfs"]).finished
    assert run.settings["init"]["copied"] == ["features"]
    changed = replace(trained["rfs"], params=trained["rfs"].params | {"features.0.0.weight": torch.ones(4, 1, 3, 3)})
    with pytest.raises(InputError, match=r"^init is a model with other weights than those that the run in"):
        train("maml", tmp_path / "a", init=changed)
    with pytest.raises(InputError, match=r"^init is missing, but the run in .* started from the weights of another"):
        train("maml", tmp_path / "a")
    train("maml", tmp_path / "b")
    with pytest.raises(InputError, match=r"^init is a trained model, but the run in .* did not start from one. Omit"):
        train("maml", tmp_path / "b", init=trained["rfs"])


def test_a_different_running_statistic_changes_the_checksum(trained, tmp_path):
    source = trained["rfs"]
    train("mtl", tmp_path, init=source)
    other = replace(source, net=network_like(source, outputs=3))
    other.net.features[0][1].mean += 1
    with pytest.raises(InputError, match="other weights"):
        train("mtl", tmp_path, init=other)


def test_fit_starts_from_the_weights_of_its_network():
    options = {"batch_size": 2, "progress": False, "schedule": "constant", "optimizer": "sgd"}
    once = fit(mlp(1, 1), method("maml"), Sinusoid(), iterations=2, lr=1e-3, **options)
    weight = once.params["head.weight"].clone()
    again = fit(once.net, method("anil"), Sinusoid(), iterations=1, lr=1e-12, **options)
    assert torch.allclose(again.params["head.weight"], weight, atol=1e-7)


def test_fit_copies_learned_rates_only_with_init():
    learner, options = method("maml", rates="per-tensor"), {"iterations": 1, "batch_size": 2, "progress": False}
    source = fit(mlp(1, 1), learner, Sinusoid(), lr=1e-3, **options)
    new, copied = (fit(source.net, learner, Sinusoid(), lr=1e-9, init=init, **options) for init in (None, source))
    name = next(name for name in source.params if name.startswith("rates."))
    assert torch.allclose(copied.params[name], source.params[name], atol=1e-6)
    assert not torch.allclose(new.params[name], source.params[name], atol=1e-5)


def test_parts_that_were_frozen_are_trained_again_unless_they_are_frozen_again(tmp_path):
    source = train("mtl", tmp_path / "frozen", freeze=("features.0", "features.1"))
    for run in (source, load(tmp_path / "frozen")):
        thawed = train("maml", init=run, freeze=("features.0",))
        assert not thawed.net.features[0][0].weight.requires_grad
        assert torch.equal(thawed.params["features.0.0.weight"], source.params["features.0.0.weight"])
        assert not torch.equal(thawed.params["features.1.0.weight"], source.params["features.1.0.weight"])


def test_images_of_another_shape_than_the_network_decodes_raise_an_error(trained):
    source = replace(trained["mtl"], net=network_like(trained["mtl"], outputs=3))
    source.net.decode_options = DecodeOptions(size=20, channels=1)
    with pytest.raises(InputError, match=r"images have shape \(1, 16, 16\), but the network needs \(1, 20, 20\)"):
        train("maml", init=source)
