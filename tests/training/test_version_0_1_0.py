"""Files that version 0.1.0 wrote can be read. They are in tests/data/v0.1.0; write_files.py there created them."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from metabridge import FewShotClassifier, InputError, LabeledImages, evaluate, fit, load, method
from metabridge.environments import Sinusoid
from metabridge.models import conv4, mlp
from metabridge.schedules import Plateau, Step
from metabridge.training import Augment, SoftTargets
from metabridge.training.checkpoint import RunFolder, select_group

DATA = Path(__file__).parent.parent / "data" / "v0.1.0"
EXPECTED = json.loads((DATA / "expected.json").read_text())
RUNS = ["maml-rates", "mtl", "rfs", "metaoptnet", "r2d2", "anil-frozen"]
ADAPTED_FROM = {  # for each adapted model, the run that it was adapted from
    "adapted-anil": "anil-frozen",
    "adapted-metaoptnet": "metaoptnet",
    "adapted-logistic": "mtl",
    "adapted-svm": "rfs",
    "adapted-ridge": "r2d2",
    "adapted-centroid": "rfs",
    "adapted-hinge": "mtl",
}


@cache
def images(size: int, channels: int) -> LabeledImages:
    """Twelve classes of ten images: stripes whose direction and frequency depend on the class, with noise."""
    y, x = np.mgrid[:size, :size] / size
    rng = np.random.RandomState(0)
    pixels = []
    for label in range(12):
        angle, frequency = np.pi * label / 12, 2 + label % 3
        for _ in range(10):
            wave = np.sin(2 * np.pi * frequency * (x * np.cos(angle) + y * np.sin(angle)) + rng.uniform(0, 1))
            shades = np.array([120, 90, 60])[:channels, None, None]
            pixels.append(128 + shades * wave + rng.normal(0, 10, (channels, size, size)))
    return LabeledImages(
        images=torch.from_numpy(np.stack(pixels).clip(0, 255).astype(np.uint8)),
        labels=torch.arange(12).repeat_interleave(10),
        class_names=tuple("abcdefghijkl"),
        superclasses=torch.zeros(12, dtype=torch.int64),
        superclass_names=("all",),
        splits={"train": torch.arange(6), "validation": torch.arange(6, 9), "test": torch.arange(9, 12)},
    )


def images_of(name: str) -> LabeledImages:
    """Return the images of a run."""
    return images(18, 3) if name in ("mtl", "rfs") else images(16, 1)


def environment(name: str, split: str):
    """Return the tasks of a run."""
    if name == "maml-rates":
        return Sinusoid()
    if (name, split) == ("rfs", "train"):
        return images_of(name).batches("train", size=16)
    shots, queries = {"train": (2, 3), "validation": (1, 4), "test": (2, 5)}[split]
    return images_of(name).tasks(split, ways=3, shots=shots, queries=queries)


def net(name: str):
    """Return the untrained network of a run."""
    if name == "maml-rates":
        return mlp(1, 1, width=6)
    if name == "anil-frozen":
        return mlp(256, 3, width=5)
    channels, size = images_of(name).images.shape[1:3]
    return conv4(channels, size, 3, filters=4, statistics="running")


OPTIONS = {
    "maml-rates": {"ema_decay": 0.9},
    "mtl": {"optimizer": "radam", "schedule": Plateau(patience=0), "augment": Augment(padding=2), "patience": 5},
    "rfs": {
        "batch_size": 1,
        "optimizer": "sgd",
        "lr": 0.05,
        "weight_decay": 5e-4,
        "schedule": Step(),
        "soft_targets": SoftTargets(smoothing=0.1),
    },
    "anil-frozen": {"optimizer": "adamw"},
}


def train(name: str, out: Path, **options):
    """Train as version 0.1.0 did."""
    defaults = {"iterations": 6, "validate_every": 2, "validate_tasks": 4, "batch_size": 2, "progress": False}
    learner = method("maml", steps=2, rates="per-tensor") if name == "maml-rates" else method(name)
    validate = environment(name, "validation")
    options = defaults | OPTIONS.get(name, {}) | options
    return fit(net(name), learner, environment(name, "train"), validate=validate, out=out, **options)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_version_0_1_0_is_loaded_and_has_the_same_scores(name):
    run = load(DATA / name)
    expected = EXPECTED[name]
    assert run.finished == (DATA / name / "state.safetensors").exists()  # two runs have no state, to save space
    if run.finished:
        assert run.curve[-1].iteration == expected["iteration"]
    assert run.best.mean == expected["validation"]
    score = evaluate(run, environment(name, "test"), tasks=20)
    assert (score.mean, score.ci95) == pytest.approx((expected["test"], expected["ci95"]), rel=1e-5)


@pytest.mark.parametrize("name", ["maml-rates", "mtl"])
def test_resuming_a_run_of_version_0_1_0_gives_the_weights_of_an_uninterrupted_run(name, tmp_path):
    shutil.copytree(DATA / f"{name}-halfway", tmp_path / "run")
    train(name, tmp_path / "run")
    for file in ("weights", "state"):
        tensors, expected = (RunFolder(folder).read(file)[0] for folder in (tmp_path / "run", DATA / name))
        for group in ("params", "average", "buffers", "moments"):
            torch.testing.assert_close(select_group(tensors, group), select_group(expected, group))
        states = select_group(expected, "random")
        assert all(torch.equal(value, states[key]) for key, value in select_group(tensors, "random").items())


@pytest.mark.parametrize("name", ["maml-rates", "mtl", "rfs", "anil-frozen"])
def test_extending_a_run_of_version_0_1_0_gives_the_same_weights_as_in_version_0_1_0(name, tmp_path):
    shutil.copytree(DATA / name, tmp_path / "run")
    run = train(name, tmp_path / "run", iterations=8)
    assert run.curve[-1].iteration == 8
    absolute_sum = float(sum(value.abs().sum() for value in run.params.values()))
    assert absolute_sum == pytest.approx(EXPECTED[name]["after 8 iterations"], rel=1e-5)
    # the settings were rewritten in the current format, which has the number 2; version 0.1.0 wrote format 1
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["version"] == 2
    assert load(tmp_path / "run").curve[-1].iteration == 8


def test_options_that_differ_from_a_run_of_version_0_1_0_raise_an_error(tmp_path):
    shutil.copytree(DATA / "maml-rates", tmp_path / "run")
    with pytest.raises(InputError, match=r"training\.batch_size was 2 and is now 3"):
        train("maml-rates", tmp_path / "run", batch_size=3)
    with pytest.raises(InputError, match=r"training\.ema_decay was 0\.9 and is now 0\.5"):
        train("maml-rates", tmp_path / "run", ema_decay=0.5)


@pytest.mark.parametrize("name", ADAPTED_FROM)
def test_a_model_that_version_0_1_0_adapted_predicts_the_same_probabilities(name):
    data = images_of(ADAPTED_FROM[name])
    # take the first three images of each of the three test classes, and of these nine images every other one
    image_indices = [10 * label + index for label in (9, 10, 11) for index in range(3)][::2]
    pixels = np.moveaxis(data.images[image_indices].numpy(), 1, -1)
    pixels = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
    classifier = FewShotClassifier.load(DATA / name)
    assert list(classifier.classes_) == ["j", "k", "l"]
    np.testing.assert_allclose(classifier.predict_proba(pixels), EXPECTED[name]["probabilities"], rtol=1e-4, atol=1e-6)
