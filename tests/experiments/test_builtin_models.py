from __future__ import annotations

import io
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from metabridge.experiments import ExperimentOptions, builtin_models, builtin_training, load_experiment
from metabridge.training import load


@pytest.fixture
def few(monkeypatch) -> None:
    """Evaluate on few tasks, and train for few steps."""
    settings = builtin_models.Settings(tasks=4, images_per_class=6, shots=(1,), ways=2, queries=2)
    monkeypatch.setitem(builtin_models.SETTINGS, "quick", settings)


def write_mini_imagenet(folder) -> None:
    """Write a data set of 100 classes with 7 images each, in the parquet format of mini-ImageNet."""
    folder.mkdir(parents=True)
    rng, names = np.random.default_rng(0), [f"n{number:08}" for number in range(100)]
    info = json.dumps({"info": {"features": {"label": {"names": names}}}})
    schema_metadata = {b"huggingface": info.encode()}
    for split, labels in {"train": range(64), "validation": range(64, 80), "test": range(80, 100)}.items():
        rows = []
        for label in labels:
            for _ in range(7):
                file = io.BytesIO()
                Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8)).save(file, "webp")
                rows.append({"image": {"bytes": file.getvalue(), "path": f"{len(rows)}.webp"}, "label": label})
        table = pyarrow.Table.from_pylist(rows).replace_schema_metadata(schema_metadata)
        pyarrow.parquet.write_table(table, folder / f"{split}-00000-of-00001.parquet")


def test_the_photo_model_is_evaluated_on_a_folder_of_the_test_classes_only(few, tmp_path):
    write_mini_imagenet(tmp_path / "data" / "mini-imagenet")
    options = ExperimentOptions("quick", data=tmp_path / "data", progress=False)
    (tmp_path / "folder").mkdir()
    name, _, images = next(builtin_models.test_images(options, tmp_path / "folder"))
    assert name == "photos"
    assert list(images.splits) == ["test"]
    assert images.class_names == tuple(f"class {number:02}" for number in range(20))
    assert images.images.shape[0] == 20 * 6
    outcome = load_experiment("builtin-models").run(options)
    assert [row.name for row in outcome.result.rows] == [
        "photos, folder of mini-ImageNet files, 2-way 1-shot",
        "characters, glyphs, 2-way 1-shot",
    ]


def test_without_data_sets_the_character_model_is_evaluated_on_glyphs(few):
    outcome = load_experiment("builtin-models").run(ExperimentOptions("quick", progress=False))
    (row,) = outcome.result.rows
    assert row.ours > 75  # random guessing: 50


def test_both_models_are_trained_as_configured(few, tmp_path, monkeypatch):
    monkeypatch.setattr(builtin_training, "SHOTS", (1,))
    outcome = builtin_training.EXPERIMENT.run(
        ExperimentOptions("quick", out=tmp_path, only=("characters",), progress=False)
    )
    assert set(outcome.data) == {"characters"}
    run = load(tmp_path / "runs" / "builtin-characters-quick-0")
    assert run.settings["model"]["widths"] == [8, 8, 16, 16]
    assert run.settings["training"]["optimizer"] == "muon"
    builtin_training.EXPERIMENT.draw(outcome, tmp_path / "figure.png")


def test_the_configured_sizes_are_those_of_the_models_in_the_package():
    for name, config in builtin_training.CONFIGS.items():
        recipe = builtin_models.load_model(name).net.recipe
        assert (recipe["model"], recipe["widths"]) == (config.model, config.model_options["widths"])
