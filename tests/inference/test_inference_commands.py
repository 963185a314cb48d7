"""The commands adapt, predict and export, from folders to files."""

from __future__ import annotations

import csv
import json
import shutil
from importlib.util import find_spec

import numpy as np
import pytest

from metabridge import FewShotClassifier
from metabridge.training.checkpoint import RunFolder


def rows_of(file):
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.fixture
def metabridge_on_cpu(metabridge):
    return lambda *arguments: metabridge(*arguments, "--device", "cpu")


def test_adapt_writes_what_the_classifier_predicts_and_prints_the_accuracy(
    metabridge_on_cpu, run, folders, support, query, tmp_path
):
    file = tmp_path / "new" / "predictions.csv"
    status, printed, errors = metabridge_on_cpu(
        "adapt", run, "--support", folders / "support", "--query", folders / "query", "--out", file
    )
    assert (status, errors) == (0, "")
    rows, classifier = rows_of(file), FewShotClassifier(run).fit(*support)
    assert list(rows[0]) == ["path", "prediction", "probability", *classifier.classes_]
    assert [row["path"] for row in rows] == [str(path) for path in query[0]]
    assert [row["prediction"] for row in rows] == classifier.predict(query[0]).tolist()
    probabilities = classifier.predict_proba(query[0])
    np.testing.assert_allclose([[float(row[name]) for name in classifier.classes_] for row in rows], probabilities)
    np.testing.assert_allclose([float(row["probability"]) for row in rows], probabilities.max(1))
    num_correct = sum(row["prediction"] == label for row, label in zip(rows, query[1]))
    # there are 24 query images: 6 images of each of 4 classes
    assert f"Accuracy {100 * num_correct / 24:.1f} %: {num_correct} of 24 images" in printed
    assert "First 10 of 24 images" in printed
    assert str(query[0][9]) in printed
    assert str(query[0][10]) not in printed
    assert f"The predictions are in {file}" in printed


def test_predict_with_a_saved_model_writes_what_adapt_wrote(metabridge_on_cpu, run, folders, tmp_path):
    copied_run = shutil.copytree(run, tmp_path / "run")
    arguments = ["--query", folders / "query", "--out"]
    adapt_arguments = ["--support", folders / "support", "--head", "ridge", "--save", tmp_path / "adapted"]
    assert metabridge_on_cpu("adapt", copied_run, *adapt_arguments, *arguments, tmp_path / "1.csv")[0] == 0
    shutil.rmtree(copied_run)
    assert metabridge_on_cpu("predict", tmp_path / "adapted", *arguments, tmp_path / "2.csv")[0] == 0
    assert (tmp_path / "1.csv").read_bytes() == (tmp_path / "2.csv").read_bytes()
    assert [file.name for file in (tmp_path / "adapted").iterdir()] == ["adapted.safetensors"]


def test_unlabeled_images_have_no_accuracy_and_unreadable_ones_are_listed(
    metabridge_on_cpu, run, folders, query, tmp_path
):
    mixed_folder = tmp_path / "mixed"
    (mixed_folder / "sub" / "folder").mkdir(parents=True)
    shutil.copy(query[0][0], mixed_folder / "a.png")
    shutil.copy(query[0][1], mixed_folder / "sub" / "folder" / "b.PNG")
    (mixed_folder / "broken.png").write_bytes(b"no image")
    (mixed_folder / "notes.txt").write_text("no image either, and none is expected")
    status, printed, errors = metabridge_on_cpu(
        "adapt", run, "--support", folders / "support", "--query", mixed_folder, "--out", tmp_path / "predictions.csv"
    )
    assert status == 1
    assert "Accuracy" not in printed
    assert [row["path"] for row in rows_of(tmp_path / "predictions.csv")] == [
        str(mixed_folder / "a.png"),
        str(mixed_folder / "sub" / "folder" / "b.PNG"),
    ]
    assert errors == (
        f"1 of 3 images could not be read:\n  {mixed_folder / 'broken.png'} (it is not an image that Pillow reads)\n"
    )


def test_adapt_warns_that_images_are_predicted_together(metabridge_on_cpu, anil, folders, tmp_path):
    file = tmp_path / "predictions.csv"
    status, _, errors = metabridge_on_cpu(
        "adapt", anil, "--support", folders / "support", "--query", folders / "query", "--out", file
    )
    assert status == 0
    assert errors.startswith("Note: the batch norm of this network uses batch statistics")
    assert "or train with --statistics running to predict each image independently." in errors
    assert errors.count("\n") == 1


def test_adapt_names_the_support_folder_if_the_head_has_another_number_of_classes(
    metabridge_on_cpu, anil, folders, tmp_path
):
    shutil.copytree(folders / "support", tmp_path / "support")
    shutil.rmtree(min((tmp_path / "support").iterdir()))
    classes = len(list((tmp_path / "support").iterdir()))
    status, _, errors = metabridge_on_cpu(
        "adapt", anil, "--support", tmp_path / "support", "--query", folders / "query"
    )
    assert status == 2
    assert errors.startswith(f"metabridge adapt: --support has {classes} classes, but the run was trained for ")
    assert "or use --head logistic, which fits a new head" in errors


@pytest.fixture
def broken_folders(folders, tmp_path):
    """Return a folder with subfolders that cannot be used; each is named after its flaw."""
    for name in ("void", "loose", "unreadable", "one/only", "gap/a", "gap/b", "gap/c", "bad/a", "bad/b"):
        (tmp_path / name).mkdir(parents=True)
    image = next((folders / "query").rglob("*.png"))
    for name in ("loose/1.png", "one/only/1.png", "gap/a/1.png", "gap/b/1.png", "bad/a/1.png"):
        shutil.copy(image, tmp_path / name)
    for name in ("bad/b/2.png", "unreadable/3.png"):
        (tmp_path / name).write_bytes(b"no image")
    return tmp_path


@pytest.mark.parametrize(
    ("support", "query", "message"),
    [
        ("nowhere", "good", "--support is {}/nowhere, which does not exist. Pass a folder of images."),
        ("good", "loose/1.png", "--query is {}/loose/1.png, which is not a folder."),
        (
            "void",
            "good",
            "--support is {}/void, but at least 2 subfolders with images are needed, and it has 0.",
        ),
        ("loose", "good", "--support is {}/loose, but at least 2 subfolders with images are needed, and it has 0"),
        ("one", "good", "--support is {}/one, but at least 2 subfolders with images are needed, and it has 1"),
        ("gap", "good", "class 'c' in {}/gap has no images. Add some, or remove the folder."),
        (
            "bad",
            "good",
            "{}/bad/b/2.png cannot be read (it is not an image that Pillow reads). Fix or remove it.",
        ),
        ("good", "void", "--query is {}/void, which contains no images"),
        ("good", "unreadable", "--query is {}/unreadable, but none of its images can be read ("),
    ],
)
def test_folders_that_cannot_be_used_are_named_and_nothing_is_written(
    metabridge_on_cpu, run, folders, broken_folders, support, query, message
):
    arguments = [
        folders / part if name == "good" else broken_folders / name
        for part, name in (("support", support), ("query", query))
    ]
    status, printed, errors = metabridge_on_cpu(
        "adapt", run, "--support", arguments[0], "--query", arguments[1], "--out", broken_folders / "predictions.csv"
    )
    assert (status, printed) == (2, "")
    assert errors.startswith(f"metabridge adapt: {message.format(broken_folders)}")
    assert errors.count("\n") == 1
    assert not (broken_folders / "predictions.csv").exists()


def test_predict_without_an_adapted_model_says_how_to_create_one(metabridge_on_cpu, run, folders, tmp_path):
    status, _, errors = metabridge_on_cpu(
        "predict", run, "--query", folders / "query", "--out", tmp_path / "predictions.csv"
    )
    assert status == 2
    assert errors.startswith(f"metabridge predict: {run} contains no adapted model. Create one with metabridge adapt")


@pytest.mark.skipif(find_spec("onnxscript") is None, reason="onnxscript is not installed")
def test_export_writes_the_onnx_model_and_the_head_next_to_it(metabridge, anil, folders, tmp_path):
    file = tmp_path / "features.onnx"
    status, printed, errors = metabridge(
        "export", anil, "--out", file, "--support", folders / "support", "--head", "logistic"
    )
    assert status == 0
    assert f"The ONNX model is in {file}" in printed
    assert f"The head for 4 classes is in {tmp_path / 'features.json'}" in printed
    assert "the features of an image depend on the other images of its batch" in errors
    assert json.loads((tmp_path / "features.json").read_text())["normalize"]
    assert file.stat().st_size > 1000


@pytest.mark.skipif(find_spec("onnxscript") is None, reason="onnxscript is not installed")
def test_export_writes_the_onnx_model_to_standard_output(metabridge, anil, folders, tmp_path, monkeypatch):
    written: list[bytes] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("metabridge.files._write_stdout", written.append)
    status, printed, errors = metabridge("export", anil, "--out", "-")
    assert (status, printed) == (0, "")
    assert "The ONNX model is in -" in errors
    assert [len(content) > 1000 for content in written] == [True]
    assert not list(tmp_path.iterdir())
    status, _, errors = metabridge("export", anil, "--out", "-", "--support", folders / "support")
    assert status == 2
    assert errors.startswith("metabridge export: --out is -, but --support writes a second file next to the model.")


def test_export_does_not_write_the_head_over_the_onnx_model(metabridge, run, folders, tmp_path):
    file = tmp_path / "both.json"
    status, _, errors = metabridge("export", run, "--out", file, "--support", folders / "support")
    assert status == 2
    assert f"--out is {file}, but the head is written to that file. Use another name, such as both.onnx." in errors
    assert not file.exists()


def test_formats_that_pillow_cannot_read_are_listed(metabridge_on_cpu, run, folders, tmp_path):
    shutil.copytree(folders / "query", tmp_path / "query")
    (tmp_path / "query" / "IMG_1.HEIC").write_bytes(b"\0\0\0\x18ftypheic")
    arguments = ("--support", folders / "support", "--query", tmp_path / "query", "--out", tmp_path / "predictions.csv")
    status, printed, errors = metabridge_on_cpu("adapt", run, *arguments)
    assert status == 1
    assert "IMG_1.HEIC (it is not an image that Pillow reads)" in errors
    assert printed.startswith(f"{len(list((folders / 'support').iterdir()))} classes: character 0, ")


def test_export_of_a_head_needs_support_images(metabridge, run, tmp_path):
    status, _, errors = metabridge("export", run, "--out", tmp_path / "features.onnx", "--head", "ridge")
    assert status == 2
    assert errors == ("metabridge export: --head is ridge, but fitting a head needs labeled images. Add --support.\n")


@pytest.mark.parametrize("damaged_model", ["run", "adapted"])
def test_weights_that_are_not_finite_are_an_error(metabridge_on_cpu, run, folders, tmp_path, damaged_model):
    query = ("--query", folders / "query", "--out", tmp_path / "predictions.csv")
    folder = shutil.copytree(run, tmp_path / "run")
    arguments = ("adapt", folder, "--support", folders / "support")
    if damaged_model == "adapted":
        assert metabridge_on_cpu(*arguments, *query, "--save", tmp_path / "adapted")[0] == 0
        (tmp_path / "predictions.csv").unlink()
        folder, arguments = tmp_path / "adapted", ("predict", tmp_path / "adapted")
    name = "weights" if damaged_model == "run" else "adapted"
    tensors, metadata = RunFolder(folder).read(name)
    tensors["params.features.0.0.weight"].view(-1)[0] = np.nan
    RunFolder(folder).write(name, tensors, metadata)
    status, printed, errors = metabridge_on_cpu(*arguments, *query)
    assert (status, printed) == (2, "")
    assert "the weight 'features.0.0.weight' contains NaN or infinite values: training diverged." in errors
    assert not (tmp_path / "predictions.csv").exists()


def test_predictions_go_to_standard_output_and_nothing_else_does(metabridge_on_cpu, run, folders, tmp_path):
    arguments = ("adapt", run, "--support", folders / "support", "--query", folders / "query", "--out")
    status, printed, errors = metabridge_on_cpu(*arguments, "-")
    assert status == 0
    metabridge_on_cpu(*arguments, tmp_path / "predictions.csv")
    assert printed == (tmp_path / "predictions.csv").read_text()
    assert "4 classes: " in errors
    assert "Accuracy " in errors
