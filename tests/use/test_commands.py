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
def on_cpu(metabridge):
    return lambda *arguments: metabridge(*arguments, "--device", "cpu")


def test_adapt_writes_what_the_classifier_predicts_and_prints_the_accuracy(
    on_cpu, run, folders, support, query, tmp_path
):
    file = tmp_path / "new" / "told.csv"
    status, printed, complained = on_cpu(
        "adapt", run, "--support", folders / "support", "--query", folders / "query", "--out", file
    )
    assert (status, complained) == (0, "")
    rows, classifier = rows_of(file), FewShotClassifier(run).fit(*support)
    assert list(rows[0]) == ["path", "prediction", "probability", *classifier.classes_]
    assert [row["path"] for row in rows] == [str(path) for path in query[0]]
    assert [row["prediction"] for row in rows] == classifier.predict(query[0]).tolist()
    chances = classifier.predict_proba(query[0])
    np.testing.assert_allclose([[float(row[name]) for name in classifier.classes_] for row in rows], chances)
    np.testing.assert_allclose([float(row["probability"]) for row in rows], chances.max(1))
    right = sum(row["prediction"] == label for row, label in zip(rows, query[1]))
    assert f"Accuracy {100 * right / 24:.1f} %: {right} of 24 images" in printed
    assert "The first 10 of 24" in printed
    assert str(query[0][9]) in printed
    assert str(query[0][10]) not in printed
    assert f"The predictions are in {file}" in printed


def test_predict_does_with_a_saved_model_what_adapt_did(on_cpu, run, folders, tmp_path):
    moved = shutil.copytree(run, tmp_path / "run")
    arguments = ["--query", folders / "query", "--out"]
    adapted = ["--support", folders / "support", "--head", "ridge", "--save", tmp_path / "adapted"]
    assert on_cpu("adapt", moved, *adapted, *arguments, tmp_path / "1.csv")[0] == 0
    shutil.rmtree(moved)
    assert on_cpu("predict", tmp_path / "adapted", *arguments, tmp_path / "2.csv")[0] == 0
    assert (tmp_path / "1.csv").read_bytes() == (tmp_path / "2.csv").read_bytes()
    assert [file.name for file in (tmp_path / "adapted").iterdir()] == ["adapted.safetensors"]


def test_loose_images_have_no_accuracy_and_those_that_cannot_be_read_are_named(on_cpu, run, folders, query, tmp_path):
    mixed = tmp_path / "mixed"
    (mixed / "deep" / "er").mkdir(parents=True)
    shutil.copy(query[0][0], mixed / "a.png")
    shutil.copy(query[0][1], mixed / "deep" / "er" / "b.PNG")
    (mixed / "broken.png").write_bytes(b"no image")
    (mixed / "notes.txt").write_text("no image either, and none is expected")
    status, printed, complained = on_cpu(
        "adapt", run, "--support", folders / "support", "--query", mixed, "--out", tmp_path / "told.csv"
    )
    assert status == 1
    assert "Accuracy" not in printed
    assert [row["path"] for row in rows_of(tmp_path / "told.csv")] == [
        str(mixed / "a.png"),
        str(mixed / "deep" / "er" / "b.PNG"),
    ]
    assert complained == (
        f"1 of 3 images could not be read:\n  {mixed / 'broken.png'} (it is not an image that Pillow reads)\n"
    )


def test_adapt_says_that_images_are_predicted_together(on_cpu, anil, folders, tmp_path):
    status, _, complained = on_cpu(
        "adapt", anil, "--support", folders / "support", "--query", folders / "query", "--out", tmp_path / "told.csv"
    )
    assert status == 0
    assert complained.startswith("Note: this network normalises each set of images by the set's own statistics")
    assert complained.count("\n") == 1


@pytest.fixture
def broken(folders, tmp_path):
    """Folders in which something is missing, by what it is."""
    for name in ("void", "loose", "unreadable", "one/only", "gap/a", "gap/b", "gap/c", "bad/a", "bad/b"):
        (tmp_path / name).mkdir(parents=True)
    image = next((folders / "query").rglob("*.png"))
    for place in ("loose/1.png", "one/only/1.png", "gap/a/1.png", "gap/b/1.png", "bad/a/1.png"):
        shutil.copy(image, tmp_path / place)
    for place in ("bad/b/2.png", "unreadable/3.png"):
        (tmp_path / place).write_bytes(b"no image")
    return tmp_path


@pytest.mark.parametrize(
    ("support", "query", "complaint"),
    [
        ("nowhere", "good", "support is {}/nowhere, which does not exist. Name a folder of images."),
        ("good", "loose/1.png", "query is {}/loose/1.png, which is not a folder."),
        (
            "void",
            "good",
            "support is {}/void, which has too few folders with images (0): 2 classes or more are needed.",
        ),
        ("loose", "good", "support is {}/loose, which has too few folders with images (0)"),
        ("one", "good", "support is {}/one, which has too few folders with images (1)"),
        ("gap", "good", "class 'c' in {}/gap has no images. Put some there, or remove the folder."),
        (
            "bad",
            "good",
            "{}/bad/b/2.png cannot be read (it is not an image that Pillow reads). Mend it or leave it out.",
        ),
        ("good", "void", "query is {}/void, which holds no images"),
        ("good", "unreadable", "query is {}/unreadable, of which no image can be read (1 tried; "),
    ],
)
def test_folders_that_cannot_be_used_are_named_and_nothing_is_written(
    on_cpu, run, folders, broken, support, query, complaint
):
    given = [
        folders / side if name == "good" else broken / name for side, name in (("support", support), ("query", query))
    ]
    status, printed, complained = on_cpu(
        "adapt", run, "--support", given[0], "--query", given[1], "--out", broken / "told.csv"
    )
    assert (status, printed) == (2, "")
    assert complained.startswith(f"metabridge adapt: {complaint.format(broken)}")
    assert complained.count("\n") == 1
    assert not (broken / "told.csv").exists()


def test_predict_without_an_adapted_model_says_how_to_make_one(on_cpu, run, folders, tmp_path):
    status, _, complained = on_cpu("predict", run, "--query", folders / "query", "--out", tmp_path / "told.csv")
    assert status == 2
    assert complained.startswith(f"metabridge predict: {run} holds no adapted model. Make one with metabridge adapt")


@pytest.mark.skipif(find_spec("onnxscript") is None, reason="onnxscript is not installed")
def test_export_writes_the_graph_and_the_head_beside_it(metabridge, anil, folders, tmp_path):
    file = tmp_path / "features.onnx"
    status, printed, complained = metabridge(
        "export", anil, "--out", file, "--support", folders / "support", "--head", "logistic"
    )
    assert status == 0
    assert f"The features are in {file}" in printed
    assert f"The head for 4 classes is in {tmp_path / 'features.json'}" in printed
    assert "the features of an image depend on the others" in complained
    assert json.loads((tmp_path / "features.json").read_text())["normalise"]
    assert file.stat().st_size > 1000


@pytest.mark.skipif(find_spec("onnxscript") is None, reason="onnxscript is not installed")
def test_export_writes_the_graph_to_standard_output(metabridge, anil, folders, tmp_path, monkeypatch):
    written: list[bytes] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("metabridge.files._write_stdout", written.append)
    status, printed, complained = metabridge("export", anil, "--out", "-")
    assert (status, printed) == (0, "")
    assert "The features are in -" in complained
    assert [len(content) > 1000 for content in written] == [True]
    assert not list(tmp_path.iterdir())
    status, _, complained = metabridge("export", anil, "--out", "-", "--support", folders / "support")
    assert status == 2
    assert complained.startswith("metabridge export: --out is -, but the head goes beside the graph. Name a file")


def test_export_does_not_write_the_head_over_the_graph(metabridge, run, folders, tmp_path):
    file = tmp_path / "both.json"
    status, _, complained = metabridge("export", run, "--out", file, "--support", folders / "support")
    assert status == 2
    assert f"--out is {file}, where the head goes. Name the graph otherwise, such as both.onnx." in complained
    assert not file.exists()


def test_photographs_that_pillow_does_not_read_are_named(on_cpu, run, folders, tmp_path):
    shutil.copytree(folders / "query", tmp_path / "query")
    (tmp_path / "query" / "IMG_1.HEIC").write_bytes(b"\0\0\0\x18ftypheic")
    asked = ("--support", folders / "support", "--query", tmp_path / "query", "--out", tmp_path / "told.csv")
    status, printed, complained = on_cpu("adapt", run, *asked)
    assert status == 1
    assert "IMG_1.HEIC (it is not an image that Pillow reads)" in complained
    assert printed.startswith(f"{len(list((folders / 'support').iterdir()))} classes: character 0, ")


def test_export_of_a_head_needs_images_to_solve_it_on(metabridge, run, tmp_path):
    status, _, complained = metabridge("export", run, "--out", tmp_path / "features.onnx", "--head", "ridge")
    assert status == 2
    assert complained == (
        "metabridge export: --head is ridge, but a head is solved on labelled images. Give --support too.\n"
    )


@pytest.mark.parametrize("where", ["run", "adapted"])
def test_weights_that_are_not_finite_predict_nothing(on_cpu, run, folders, tmp_path, where):
    query = ("--query", folders / "query", "--out", tmp_path / "told.csv")
    broken = shutil.copytree(run, tmp_path / "run")
    asked = ("adapt", broken, "--support", folders / "support")
    if where == "adapted":
        assert on_cpu(*asked, *query, "--save", tmp_path / "adapted")[0] == 0
        (tmp_path / "told.csv").unlink()
        broken, asked = tmp_path / "adapted", ("predict", tmp_path / "adapted")
    name = "weights" if where == "run" else "adapted"
    tensors, notes = RunFolder(broken).read(name)
    tensors["params.features.0.0.weight"].view(-1)[0] = np.nan
    RunFolder(broken).write(name, tensors, notes)
    status, printed, complained = on_cpu(*asked, *query)
    assert (status, printed) == (2, "")
    assert "the weight 'features.0.0.weight' holds NaN or infinite values: training diverged." in complained
    assert not (tmp_path / "told.csv").exists()


def test_predictions_go_to_standard_output_and_nothing_else_does(on_cpu, run, folders, tmp_path):
    asked = ("adapt", run, "--support", folders / "support", "--query", folders / "query", "--out")
    status, printed, complained = on_cpu(*asked, "-")
    assert status == 0
    on_cpu(*asked, tmp_path / "told.csv")
    assert printed == (tmp_path / "told.csv").read_text()
    assert "4 classes: " in complained
    assert "Accuracy " in complained
