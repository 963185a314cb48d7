from __future__ import annotations

import json
from pathlib import Path

import pytest

from metabridge.heads import SVM, Head
from small_runs import EVALUATE, TRAIN


def test_evaluation_of_two_runs_tells_classes_calibration_and_paired_differences(metabridge, runs, tmp_path):
    file = tmp_path / "report.json"
    status, printed, complained = metabridge(
        "evaluate", runs["mtl"], runs["anil"], "--shots", "1,2", *EVALUATE, "--json", file
    )
    assert (status, complained) == (0, "")
    report = {(Path(each["run"]).name, each["shots"]): each for each in json.loads(file.read_text())}
    assert set(report) == {("mtl", 1), ("mtl", 2), ("anil", 1), ("anil", 2)}
    for (name, shots), each in report.items():
        assert each["tasks"] == 10
        assert 0 < len(each["classes"]) <= 50
        assert sum(bin["share"] for bin in each["calibration"]) == pytest.approx(1)
        error = sum(bin["share"] * abs(bin["confidence"] - bin["accuracy"]) for bin in each["calibration"])
        assert each["calibration_error"] == pytest.approx(error)
        worst = min(each["classes"], key=each["classes"].get)
        row = next(line for line in printed.splitlines() if f"{name} " in line and f" {shots} │" in line)
        assert f"{100 * each['accuracy']:.1f} ± {100 * each['ci95']:.1f}" in row
        assert f"{100 * each['classes'][worst]:.1f} %" in row
        if name == "mtl":
            assert each["difference"] is None
        else:
            gap = each["accuracy"] - report["mtl", shots]["accuracy"]
            assert each["difference"]["mean"] == pytest.approx(gap)
            assert f"{100 * gap:.1f} ±" in row
    assert printed.splitlines()[-1] == f"All results, including the accuracy of every class, are in {file}"


def test_only_several_runs_have_a_column_of_differences(metabridge, runs):
    one, two = (
        metabridge("evaluate", *names, "--shots", 1, *EVALUATE)[1] for names in ([runs["mtl"]], [runs["mtl"]] * 2)
    )
    assert "Test split, 5-way, 10 tasks per number of shots" in one
    assert "difference" not in one
    assert "difference from first run" in two


def test_a_run_against_itself_differs_by_nothing_in_every_task(metabridge, runs, tmp_path):
    metabridge("evaluate", runs["mtl"], runs["mtl"], "--shots", 1, *EVALUATE, "--json", tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())[1]["difference"] == {"mean": 0.0, "ci95": 0.0}


def test_heads_penalties_copies_and_mirror_images_reach_the_evaluation(metabridge, runs, monkeypatch):
    import metabridge.training.assessment as module

    asked, original = [], module.assess

    def noted(run, environment, **options):
        asked.append((run.method.test_solver, options["augmentation"].copies, options["augmentation"].mirrored))
        return original(run, environment, **options)

    monkeypatch.setattr(module, "assess", noted)
    options = ["--head", "svm", "--penalty", 0.25, "--copies", 2, "--mirrored"]
    assert metabridge("evaluate", runs["mtl"], "--shots", 1, *EVALUATE, *options)[0] == 0
    assert asked == [(SVM(C=4.0), 2, True)]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
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
def test_what_cannot_be_evaluated_is_named_in_one_line_with_status_2(metabridge, runs, arguments, complaint):
    status, _, complained = metabridge("evaluate", runs["anil"], *arguments, "--tasks", 2, "--device", "cpu")
    assert status == 2
    assert complained.startswith(f"metabridge evaluate: {complaint}")
    assert complained.count("\n") == 1


def test_a_folder_that_holds_no_run_is_named(metabridge, tmp_path):
    status, _, complained = metabridge("evaluate", tmp_path / "nothing")
    assert (status, complained) == (
        2,
        f"metabridge evaluate: there is no run at {tmp_path / 'nothing'}. "
        "Pass the folder that fit(out=...) or metabridge train --out wrote.\n",
    )


def test_a_run_that_names_no_data_asks_for_some(metabridge, runs, tmp_path):
    for file in runs["anil"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "settings.json").read_text())
    settings["tasks"]["data"] = None
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    status, _, complained = metabridge("evaluate", tmp_path, *EVALUATE)
    assert status == 2
    assert "do not contain its data set. Specify one with --data." in complained
    assert metabridge("evaluate", tmp_path, *EVALUATE, "--shots", 1, "--data", "glyphs")[0] == 0


def test_runs_on_different_data_are_not_compared_unless_some_is_named_for_both(metabridge, runs, tmp_path):
    for file in runs["anil"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "settings.json").read_text())
    settings["tasks"]["data"]["seed"] = 1
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    both = ("evaluate", runs["anil"], tmp_path, *EVALUATE, "--shots", 1)
    status, _, complained = metabridge(*both)
    assert status == 2
    assert f"the runs in {runs['anil']} and {tmp_path} were trained on different data" in complained
    assert metabridge(*both, "--data", "glyphs")[0] == 0


def test_classes_that_a_run_was_trained_on_do_not_test_it(metabridge, photographs, tmp_path):
    out, tasks = tmp_path / "run", ["--ways", 3, "--shots", 1, "--size", 16, "--data", photographs]
    for method in ("mtl", "rfs"):
        assert metabridge(*TRAIN, "--method", method, *tasks, "--out", out / method)[0] == 0
    (photographs / "train" / "train 1").rename(photographs / "test" / "train 1")
    asked = ("--ways", 3, "--shots", 1, "--tasks", 4, "--queries", 2, "--device", "cpu")
    for method in ("mtl", "rfs"):
        status, _, complained = metabridge("evaluate", out / method, *asked)
        assert status == 2
        assert f"class 'train 1' is in the test split, but the run in {out / method} was trained on it" in complained
        other = ("evaluate", out / method, *asked, "--data", photographs)
        status, printed, complained = metabridge(*other)
        assert (status, printed) == (2, "")
        assert (
            "1 of 4 classes in the test split, such as 'train 1', have names of classes that the run in" in complained
        )
        assert "add --allow-same-names if only the names are the same." in complained
        assert metabridge(*other, "--allow-same-names")[0] == 0
        assert metabridge("evaluate", out / method, *asked, "--split", "train")[0] == 0


def test_a_result_that_would_be_a_folder_is_refused_before_the_work(metabridge, runs, tmp_path, monkeypatch):
    monkeypatch.setattr("metabridge.training.assessment.assess", lambda *_, **__: pytest.fail("judged first"))
    status, _, complained = metabridge("evaluate", runs["mtl"], *EVALUATE, "--json", tmp_path)
    assert (status, complained.strip()) == (2, f"metabridge evaluate: {tmp_path} is a folder. Choose a file.")


def test_other_data_comes_in_the_form_that_the_run_takes(metabridge, photographs, runs, tmp_path):
    out = tmp_path / "run"
    tasks = ["--ways", 3, "--shots", 1, "--size", 16, "--data", photographs]
    assert metabridge(*TRAIN, "--method", "anil", *tasks, "--out", out)[0] == 0
    asked = ("evaluate", out, "--ways", 3, "--shots", 1, "--tasks", 4, "--queries", 2, "--device", "cpu")
    assert metabridge(*asked, "--data", photographs)[1] == metabridge(*asked)[1]
    status, _, complained = metabridge(*asked, "--data", "glyphs")
    assert status == 2
    assert (
        "glyphs have 1 channel and 28×28 pixels, but the network of the run needs 3 channels and 16×16 pixels"
        in complained
    )


def test_all_shots_are_checked_before_any_is_judged(metabridge, runs, monkeypatch):
    monkeypatch.setattr("metabridge.training.assessment.assess", lambda *_, **__: pytest.fail("judged first"))
    status, _, complained = metabridge("evaluate", runs["mtl"], "--shots", "1,90", "--device", "cpu")
    assert status == 2
    assert "90 shots" in complained


def test_json_alone_goes_to_standard_output(metabridge, runs):
    status, printed, _ = metabridge("evaluate", runs["mtl"], "--shots", 1, *EVALUATE, "--json", "-")
    assert status == 0
    assert [each["shots"] for each in json.loads(printed)] == [1]


def test_settings_whose_data_are_not_images_that_the_network_takes_are_named(metabridge, photographs, tmp_path):
    run = tmp_path / "run"
    shape = ("--ways", 3, "--shots", 1, "--queries", 2)
    assert metabridge(*TRAIN, "--data", photographs, "--size", 16, *shape, "--out", run)[0] == 0
    settings = json.loads((run / "settings.json").read_text())
    settings["tasks"]["data"]["channels"] = 1
    (run / "settings.json").write_text(json.dumps(settings))
    status, _, complained = metabridge("evaluate", run, "--tasks", 2, "--queries", 2, "--shots", 1)
    assert status == 2
    assert "do not fit its network" in complained
