"""The commands adapt, predict and export, from folders to files."""

from __future__ import annotations

import csv
import json
import shutil
from importlib.util import find_spec

import numpy as np
import pytest
from PIL import Image, ImageOps

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
    assert list(rows[0]) == ["path", "prediction", "probability", "nearest", *classifier.classes_]
    assert [row["path"] for row in rows] == [str(path) for path in query[0]]
    assert [row["prediction"] for row in rows] == classifier.predict(query[0]).tolist()
    probabilities = classifier.predict_proba(query[0])
    np.testing.assert_allclose([[float(row[name]) for name in classifier.classes_] for row in rows], probabilities)
    np.testing.assert_allclose([float(row["probability"]) for row in rows], probabilities.max(1))
    nearest = classifier.predict_details(query[0]).nearest
    assert [row["nearest"] for row in rows] == [str(support[0][index]) for index in nearest]
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
        ("good", "nowhere", "--query is {}/nowhere, which does not exist. Pass a folder of images, or image files."),
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


@pytest.fixture
def strangers(folders, glyphs, tmp_path):
    """Return a folder with the query images of two classes, and images of two other characters."""
    root = tmp_path / "mixed"
    for name in ("character 0", "character 1"):
        shutil.copytree(folders / "query" / name, root / name)
    for number, label in enumerate(glyphs.splits["test"].tolist()[7:9]):
        (root / f"stranger {number}").mkdir()
        for index, image in enumerate(glyphs.images[glyphs.labels == label, 0].numpy()[:8]):
            Image.fromarray(image).save(root / f"stranger {number}" / f"{index}.png")
    return root


def test_reject_writes_outlier_scores_and_prints_the_rates_of_rejected_images(
    metabridge_on_cpu, run, folders, support, strangers, tmp_path
):
    out = tmp_path / "predictions.csv"
    arguments = ("--query", strangers, "--out", out)
    status, printed, errors = metabridge_on_cpu(
        "adapt", run, "--support", folders / "support", "--reject", 0.2, "--save", tmp_path / "adapted", *arguments
    )
    assert (status, errors) == (0, "")
    rows, classifier = rows_of(out), FewShotClassifier(run, reject=0.2).fit(*support)
    assert list(rows[0])[:6] == ["path", "prediction", "probability", "outlier_score", "rejected", "nearest"]
    paths = [row["path"] for row in rows]
    assert [row["prediction"] for row in rows] == classifier.predict(paths).tolist()
    np.testing.assert_allclose([float(row["outlier_score"]) for row in rows], classifier.outlier_score(paths))
    rejected = np.array([row["rejected"] == "True" for row in rows])
    assert [row["prediction"] == "none of these" for row in rows] == rejected.tolist()
    is_stranger = np.array(["stranger" in path for path in paths])
    known, unknown = int(rejected[~is_stranger].sum()), int(rejected[is_stranger].sum())
    assert f"Rejected {100 * known / 12:.1f} %: {known} of 12 images in class folders." in printed
    assert f"Rejected {100 * unknown / 16:.1f} %: {unknown} of 16 images in other folders." in printed
    assert f"above {classifier.threshold_:.4g} are predicted as 'none of these'" in printed
    # the last row of the confusion matrix counts the images in other folders
    assert [line.split()[-1] for line in printed.splitlines() if "none of these  " in line] == [str(unknown)]
    # the saved model rejects as before, and with another rate on request
    content = out.read_bytes()
    assert metabridge_on_cpu("predict", tmp_path / "adapted", *arguments)[0] == 0
    assert out.read_bytes() == content
    assert metabridge_on_cpu("predict", tmp_path / "adapted", *arguments, "--reject", 0.9)[0] == 0
    assert sum(row["rejected"] == "True" for row in rows_of(out)) > rejected.sum()


def test_without_reject_images_in_other_folders_are_not_counted(metabridge_on_cpu, run, folders, strangers, tmp_path):
    out = tmp_path / "predictions.csv"
    status, printed, _ = metabridge_on_cpu(
        "adapt", run, "--support", folders / "support", "--query", strangers, "--out", out
    )
    assert status == 0
    assert " of 12 images in class folders" in printed
    assert "Rejected" not in printed
    assert len(rows_of(out)) == 28


def test_the_confusion_matrix_is_printed_and_drawn_next_to_the_predictions(
    metabridge_on_cpu, run, folders, support, query, tmp_path
):
    arguments = ("adapt", run, "--support", folders / "support", "--query", folders / "query", "--out")
    _, printed, _ = metabridge_on_cpu(*arguments, tmp_path / "new.csv")
    confusion = FewShotClassifier(run).fit(*support).confusion(*query)
    assert str(confusion) in printed
    for pair in confusion.most_confused(5):
        assert f"of '{pair.true}' predicted as '{pair.predicted}'" in printed
    assert Image.open(tmp_path / "new-confusion.png").format == "PNG"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["new-confusion.png", "new.csv"]
    _, printed, errors = metabridge_on_cpu(*arguments, "-")
    assert str(confusion) in errors
    assert "true class" not in printed


@pytest.mark.parametrize("arguments", [["--out", "predictions.jsonl"], ["--out", "text", "--format", "json"]])
def test_json_lines_have_the_values_of_the_csv_file(metabridge_on_cpu, run, folders, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    adapt = ("adapt", run, "--support", folders / "support", "--query", folders / "query", "--reject", 0.1)
    assert metabridge_on_cpu(*adapt, *arguments)[0] == 0
    assert metabridge_on_cpu(*adapt, "--out", "predictions.csv")[0] == 0
    objects = [json.loads(line) for line in (tmp_path / arguments[1]).read_text().splitlines()]
    rows = rows_of(tmp_path / "predictions.csv")
    flat = [{key: value for key, value in entry.items() if key != "probabilities"} for entry in objects]
    flat = [row | entry["probabilities"] for row, entry in zip(flat, objects)]
    assert [{key: str(value) for key, value in row.items()} for row in flat] == rows
    assert {type(entry["rejected"]) for entry in objects} == {bool}


def test_format_csv_overrides_the_suffix_and_dash_accepts_json(metabridge_on_cpu, run, folders, query, tmp_path):
    adapt = ("adapt", run, "--support", folders / "support", "--query", query[0][0], "--query", query[0][7])
    assert metabridge_on_cpu(*adapt, "--out", tmp_path / "a.jsonl", "--format", "csv")[0] == 0
    assert [row["path"] for row in rows_of(tmp_path / "a.jsonl")] == [str(query[0][0]), str(query[0][7])]
    status, printed, _ = metabridge_on_cpu(*adapt, "--out", "-", "--format", "json")
    assert status == 0
    assert [json.loads(line)["path"] for line in printed.splitlines()] == [str(query[0][0]), str(query[0][7])]


def test_single_files_need_no_suffix(metabridge_on_cpu, run, folders, query, tmp_path):
    file = shutil.copy(query[0][0], tmp_path / "image")
    arguments = ("--query", file, "--out", tmp_path / "predictions.csv")
    status, printed, _ = metabridge_on_cpu("adapt", run, "--support", folders / "support", *arguments)
    assert status == 0
    assert "Accuracy" not in printed
    assert [row["path"] for row in rows_of(tmp_path / "predictions.csv")] == [str(file)]


def test_dark_ink_of_query_files_is_inverted_once(run, folders, metabridge_on_cpu, tmp_path):
    settings = json.loads((run / "settings.json").read_text())
    settings["tasks"]["data"] = {"name": "omniglot:data/omniglot"}
    folder = shutil.copytree(run, tmp_path / "run")
    (folder / "settings.json").write_text(json.dumps(settings))
    for part in ("support", "query"):
        for file in (folders / part).rglob("*.png"):
            target = tmp_path / file.relative_to(folders)
            target.parent.mkdir(parents=True, exist_ok=True)
            ImageOps.invert(Image.open(file)).save(target)
    arguments = ("--out", tmp_path / "predictions.csv")
    metabridge_on_cpu("adapt", run, "--support", folders / "support", "--query", folders / "query", *arguments)
    expected = [row["prediction"] for row in rows_of(tmp_path / "predictions.csv")]
    metabridge_on_cpu("adapt", folder, "--support", tmp_path / "support", "--query", tmp_path / "query", *arguments)
    assert [row["prediction"] for row in rows_of(tmp_path / "predictions.csv")] == expected


def test_a_penalty_needs_a_head_that_has_one(metabridge_on_cpu, run, anil, folders, support, query, tmp_path):
    arguments = ("--support", folders / "support", "--query", folders / "query", "--out", tmp_path / "predictions.csv")
    assert metabridge_on_cpu("adapt", anil, "--head", "ridge", "--penalty", 3, *arguments)[0] == 0
    probabilities = [float(row["probability"]) for row in rows_of(tmp_path / "predictions.csv")]
    classifier = FewShotClassifier(anil, head="ridge", penalty=3).fit(*support)
    assert classifier.penalty_ == 3
    with pytest.warns(UserWarning, match="depends on the other images"):
        np.testing.assert_allclose(probabilities, classifier.predict_proba(query[0]).max(1))
    status, _, errors = metabridge_on_cpu("adapt", anil, "--penalty", 3, *arguments)
    assert status == 2
    assert "penalty is 3.0, but the method of this model fits no test-time head. Choose one" in errors


def test_adapt_without_a_model_uses_the_built_in_photo_model(metabridge_on_cpu, folders, tmp_path):
    file = tmp_path / "predictions.csv"
    arguments = ["--support", folders / "support", "--query", folders / "query", "--out"]
    assert metabridge_on_cpu("adapt", *arguments, file)[0] == 0
    named = tmp_path / "named.csv"
    assert metabridge_on_cpu("adapt", "--model", "photos", *arguments, named)[0] == 0
    assert file.read_text() == named.read_text()


def test_a_run_and_a_model_together_are_refused(metabridge_on_cpu, run, folders, tmp_path):
    status, _, errors = metabridge_on_cpu(
        "adapt", run, "--model", "photos", "--support", folders / "support", "--query", folders / "query"
    )
    assert status == 2
    assert f"both RUN ({run}) and --model (photos) are passed" in errors


def test_json_contains_predictions_accuracy_and_confusion(metabridge_on_cpu, run, folders, tmp_path):
    arguments = ["--support", folders / "support", "--query", folders / "query", "--save", tmp_path / "adapted"]
    status, printed, errors = metabridge_on_cpu(
        "adapt", run, *arguments, "--out", tmp_path / "predictions.csv", "--json", "-"
    )
    report, rows = json.loads(printed), rows_of(tmp_path / "predictions.csv")
    assert status == 0
    assert "The predictions are in" in errors
    assert [row["prediction"] for row in report["predictions"]] == [row["prediction"] for row in rows]
    assert report["accuracy"] == np.trace(report["confusion"]) / len(rows)
    arguments = ["--query", folders / "query", "--out", tmp_path / "later.csv", "--json", tmp_path / "later.json"]
    assert metabridge_on_cpu("predict", tmp_path / "adapted", *arguments)[0] == 0
    assert json.loads((tmp_path / "later.json").read_text())["predictions"] == report["predictions"]


def test_predictions_and_json_cannot_both_go_to_standard_output(metabridge_on_cpu, run, folders):
    arguments = ["--support", folders / "support", "--query", folders / "query", "--out", "-", "--json", "-"]
    status, printed, errors = metabridge_on_cpu("adapt", run, *arguments)
    assert (status, printed) == (2, "")
    assert "--out and --json are both -" in errors


def test_the_exported_hub_folder_adapts_like_the_run(metabridge, metabridge_on_cpu, run, folders, tmp_path):
    hub = tmp_path / "hub"
    status, printed, _ = metabridge("export", run, "--format", "hub", "--out", hub, "--json", tmp_path / "export.json")
    assert (status, json.loads((tmp_path / "export.json").read_text())["folder"]) == (0, str(hub))
    assert f"The model is in {hub}. Complete its model card, README.md." in printed
    arguments = ["--support", folders / "support", "--query", folders / "query", "--out"]
    assert metabridge_on_cpu("adapt", run, *arguments, tmp_path / "run.csv")[0] == 0
    assert metabridge_on_cpu("adapt", "--model", hub, *arguments, tmp_path / "hub.csv")[0] == 0
    assert (tmp_path / "run.csv").read_text() == (tmp_path / "hub.csv").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--half",), "--half needs --format hub"),
        (("--format", "hub", "--support", "labeled"), "--support is for --format onnx"),
    ],
)
def test_options_of_the_other_export_format_are_refused(metabridge, run, arguments, message):
    status, _, errors = metabridge("export", run, *arguments)
    assert status == 2
    assert message in errors
