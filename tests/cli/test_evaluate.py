from __future__ import annotations

import json
from pathlib import Path

import pytest

from metabridge.heads import SVM, Head
from small_runs import EVALUATE, TRAIN


def test_two_runs_are_reported_with_classes_calibration_and_paired_differences(metabridge, runs, tmp_path):
    file = tmp_path / "report.json"
    status, printed, errors = metabridge(
        "evaluate", runs["mtl"], runs["anil"], "--shots", "1,2", *EVALUATE, "--json", file
    )
    assert (status, errors) == (0, "")
    report = {(Path(entry["model"]).name, entry["shots"]): entry for entry in json.loads(file.read_text())}
    assert set(report) == {("mtl", 1), ("mtl", 2), ("anil", 1), ("anil", 2)}
    for (name, shots), entry in report.items():
        assert entry["tasks"] == 10
        assert 0 < len(entry["classes"]) <= 50
        assert sum(bin["share"] for bin in entry["calibration"]) == pytest.approx(1)
        error = sum(bin["share"] * abs(bin["confidence"] - bin["accuracy"]) for bin in entry["calibration"])
        assert entry["calibration_error"] == pytest.approx(error)
        worst = min(entry["classes"], key=entry["classes"].get)
        row = next(line for line in printed.splitlines() if f"{name} " in line and f" {shots} │" in line)
        assert f"{100 * entry['accuracy']:.1f} ± {100 * entry['ci95']:.1f}" in row
        assert f"{100 * entry['classes'][worst]:.1f} %" in row
        if name == "mtl":
            assert entry["difference"] is None
        else:
            difference = entry["accuracy"] - report["mtl", shots]["accuracy"]
            assert entry["difference"]["mean"] == pytest.approx(difference)
            assert f"{100 * difference:.1f} ±" in row
    assert printed.splitlines()[-1] == f"All results are in {file}"


def test_the_table_of_several_runs_has_a_column_of_differences_and_that_of_one_run_has_none(metabridge, runs):
    one, two = (
        metabridge("evaluate", *names, "--shots", 1, *EVALUATE)[1] for names in ([runs["mtl"]], [runs["mtl"]] * 2)
    )
    assert "Test split, 5-way, 10 tasks per number of shots" in one
    assert "difference" not in one
    assert "difference from first model" in two


def test_a_run_does_not_differ_from_itself_on_any_task(metabridge, runs, tmp_path):
    metabridge("evaluate", runs["mtl"], runs["mtl"], "--shots", 1, *EVALUATE, "--json", tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())[1]["difference"] == {"mean": 0.0, "ci95": 0.0}


def test_heads_penalties_copies_and_mirror_images_are_passed_to_the_evaluation(metabridge, runs, monkeypatch):
    import metabridge.training.assessment as assessment

    recorded, original = [], assessment.assess

    def record_and_assess(run, environment, **options):
        recorded.append((run.method.test_solver, options["augmentation"].copies, options["augmentation"].mirrored))
        return original(run, environment, **options)

    monkeypatch.setattr(assessment, "assess", record_and_assess)
    options = ["--head", "svm", "--penalty", 0.25, "--copies", 2, "--mirrored"]
    assert metabridge("evaluate", runs["mtl"], "--shots", 1, *EVALUATE, *options)[0] == 0
    assert recorded == [(SVM(C=4.0), 2, True)]  # C is 1 / penalty


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shots", "one"], "--shots is 'one', but must be integers separated by commas, such as 1,5."),
        (["--shots", "0"], "--shots is 0, but must be an integer of at least 1."),
        (["--shots", "1,100000000000000000000"], "--shots is 100000000000000000000, but must be 2147483647 or less."),
        (["--penalty", "0.1"], "--penalty requires a head. Select one with --head."),
        (["--head", "centroid", "--penalty", "1"], "--penalty is 1.0, but the head 'centroid' has no penalty"),
        (["--head", "svm", "--penalty", "0"], "--penalty is 0.0, but must be a positive number."),
        (["--head", "forest"], f"--head is 'forest', but must be one of {', '.join(sorted(Head.registry))}."),
        (["--split", "dev"], "--split is 'dev', but must be one of 'train'"),
        (["--queries", "100"], "class '"),
        (["--ways", "6"], "A label is 5, but the head has 5 outputs"),
        (["--copies", "1"], "augmentation is 1 copies, but this model's features depend on the task"),
    ],
)
def test_invalid_arguments_print_one_line_and_exit_with_status_2(metabridge, runs, arguments, message):
    status, _, errors = metabridge("evaluate", runs["anil"], *arguments, "--tasks", 2, "--device", "cpu")
    assert status == 2
    assert errors.startswith(f"metabridge evaluate: {message}")
    assert errors.count("\n") == 1


def test_a_folder_without_a_run_is_named_in_the_error(metabridge, tmp_path):
    status, _, errors = metabridge("evaluate", tmp_path / "nothing")
    assert (status, errors) == (
        2,
        f"metabridge evaluate: there is no run at {tmp_path / 'nothing'}. "
        "Pass the folder that fit(out=...) or metabridge train --out wrote.\n",
    )


def test_a_run_without_a_stored_data_set_needs_the_option_data(metabridge, runs, tmp_path):
    for file in runs["anil"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "settings.json").read_text())
    settings["tasks"]["data"] = None
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    status, _, errors = metabridge("evaluate", tmp_path, *EVALUATE)
    assert status == 2
    assert "do not contain its data set. Specify one with --data." in errors
    assert metabridge("evaluate", tmp_path, *EVALUATE, "--shots", 1, "--data", "glyphs")[0] == 0


def test_runs_trained_on_different_data_are_compared_only_with_the_option_data(metabridge, runs, tmp_path):
    for file in runs["anil"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "settings.json").read_text())
    settings["tasks"]["data"]["seed"] = 1
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    both = ("evaluate", runs["anil"], tmp_path, *EVALUATE, "--shots", 1)
    status, _, errors = metabridge(*both)
    assert status == 2
    assert f"the runs in {runs['anil']} and {tmp_path} were trained on different data" in errors
    assert metabridge(*both, "--data", "glyphs")[0] == 0


def test_evaluating_on_training_classes_raises_an_error(metabridge, photographs, tmp_path):
    out, tasks = tmp_path / "run", ["--ways", 3, "--shots", 1, "--size", 16, "--data", photographs]
    for method in ("mtl", "rfs"):
        assert metabridge(*TRAIN, "--method", method, *tasks, "--out", out / method)[0] == 0
    (photographs / "train" / "train 1").rename(photographs / "test" / "train 1")
    options = ("--ways", 3, "--shots", 1, "--tasks", 4, "--queries", 2, "--device", "cpu")
    for method in ("mtl", "rfs"):
        status, _, errors = metabridge("evaluate", out / method, *options)
        assert status == 2
        assert f"class 'train 1' is in the test split, but the run in {out / method} was trained on it" in errors
        with_data = ("evaluate", out / method, *options, "--data", photographs)
        status, printed, errors = metabridge(*with_data)
        assert (status, printed) == (2, "")
        assert "1 of 4 classes in the test split, such as 'train 1', have names of classes that the run in" in errors
        assert "add --allow-same-names if only the names are the same." in errors
        assert metabridge(*with_data, "--allow-same-names")[0] == 0
        assert metabridge("evaluate", out / method, *options, "--split", "train")[0] == 0


def test_json_to_a_folder_raises_an_error_before_the_evaluation(metabridge, runs, tmp_path, monkeypatch):
    monkeypatch.setattr("metabridge.training.assessment.assess", lambda *_, **__: pytest.fail("evaluated first"))
    status, _, errors = metabridge("evaluate", runs["mtl"], *EVALUATE, "--json", tmp_path)
    assert (status, errors.strip()) == (2, f"metabridge evaluate: {tmp_path} is a folder. Choose a file.")


def test_other_data_is_loaded_with_the_image_size_and_channels_of_the_run(metabridge, photographs, runs, tmp_path):
    out = tmp_path / "run"
    tasks = ["--ways", 3, "--shots", 1, "--size", 16, "--data", photographs]
    assert metabridge(*TRAIN, "--method", "anil", *tasks, "--out", out)[0] == 0
    command = ("evaluate", out, "--ways", 3, "--shots", 1, "--tasks", 4, "--queries", 2, "--device", "cpu")
    assert metabridge(*command, "--data", photographs)[1] == metabridge(*command)[1]
    status, _, errors = metabridge(*command, "--data", "glyphs")
    assert status == 2
    assert "glyphs have 1 channel and 28×28 pixels, but the model needs 3 channels and 16×16 pixels" in errors


def test_all_shots_are_checked_before_the_first_evaluation(metabridge, runs, monkeypatch):
    monkeypatch.setattr("metabridge.training.assessment.assess", lambda *_, **__: pytest.fail("evaluated first"))
    status, _, errors = metabridge("evaluate", runs["mtl"], "--shots", "1,90", "--device", "cpu")
    assert status == 2
    assert "90 shots" in errors


def test_json_to_standard_output_prints_nothing_else(metabridge, runs):
    status, printed, _ = metabridge("evaluate", runs["mtl"], "--shots", 1, *EVALUATE, "--json", "-")
    assert status == 0
    assert [entry["shots"] for entry in json.loads(printed)] == [1]


def test_a_stored_data_set_that_does_not_fit_the_network_raises_an_error(metabridge, photographs, tmp_path):
    run = tmp_path / "run"
    shape = ("--ways", 3, "--shots", 1, "--queries", 2)
    assert metabridge(*TRAIN, "--data", photographs, "--size", 16, *shape, "--out", run)[0] == 0
    settings = json.loads((run / "settings.json").read_text())
    settings["tasks"]["data"]["channels"] = 1
    (run / "settings.json").write_text(json.dumps(settings))
    status, _, errors = metabridge("evaluate", run, "--tasks", 2, "--queries", 2, "--shots", 1)
    assert status == 2
    assert "do not fit its network" in errors
