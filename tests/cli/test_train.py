from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from metabridge.learners.heads import SVM
from metabridge.training import load

TRAIN = ("train", "--device", "cpu", "--iterations", 4, "--validate-every", 2, "--validate-tasks", 4, "--queries", 2)
TRAIN += ("--batch", 2, "--model-option", "filters=6")
EVALUATE = ("--tasks", 10, "--queries", 4, "--device", "cpu")


@pytest.fixture(scope="module")
def runs(glyphs, tmp_path_factory) -> dict[str, Path]:
    """Finished runs on the glyphs."""
    from metabridge.environments.datasets import load as load_images
    from metabridge.training.plan import PLANS

    root, made = tmp_path_factory.mktemp("runs"), {}
    for name in ("mtl", "anil"):
        short = {"iterations": 4, "validate_every": 2, "validate_tasks": 4, "queries": 2, "batch": 2}
        plan = type(PLANS[name])(**vars(PLANS[name]) | short | {"model_options": {"filters": 6}})
        plan.train(load_images("glyphs"), out=root / name, progress=False)
        made[name] = root / name
    return made


def test_training_leaves_the_run_in_its_folder_and_the_same_command_does_not_train_again(
    metabridge, tmp_path, monkeypatch
):
    out = tmp_path / "run"
    status, printed, complained = metabridge(*TRAIN, "--method", "mtl", "--out", out)
    assert (status, complained.strip()) == (0, "")  # drawing the glyphs for the first time leaves an empty line
    assert {file.name for file in out.iterdir()} == {
        "settings.json",
        "weights.safetensors",
        "state.safetensors",
        "metrics.jsonl",
        "curves.png",
    }
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [json.loads(line)["iteration"] for line in (out / "metrics.jsonl").read_text().splitlines()] == [2, 4]
    best = load(out).best
    assert f"Best on 4 5-way validation tasks: {best.told()}" in printed
    assert f"The run is in {out}. Next: metabridge evaluate {out} --ways 5 --shots 1,5" in printed
    before = (out / "weights.safetensors").read_bytes()
    monkeypatch.setattr("metabridge.training.loop.Loop.step", lambda self: pytest.fail("trained again"))
    status, again, _ = metabridge(*TRAIN, "--method", "mtl", "--out", out)
    assert status == 0
    assert again.splitlines()[-2:] == printed.splitlines()[-2:]
    assert (out / "weights.safetensors").read_bytes() == before


def test_a_run_that_was_stopped_goes_on_with_the_same_command(metabridge, tmp_path):
    command = (*TRAIN, "--method", "anil", "--out", tmp_path / "run")
    status, printed, complained = metabridge(*command, "--minutes", 0)
    assert (status, complained) == (0, "")
    assert printed.splitlines()[-1] == "Stopped after 0 minutes. The same command goes on from there."
    assert not (tmp_path / "run" / "weights.safetensors").exists()
    assert metabridge(*command)[0] == 0
    assert load(tmp_path / "run").finished
    metabridge(*command[:-1], tmp_path / "once")
    stopped, once = load(tmp_path / "run"), load(tmp_path / "once")
    assert all(torch.equal(value, once.params[name]) for name, value in stopped.params.items())


def test_a_folder_with_one_class_to_validate_on_is_trained_and_judged_by_its_own_ways(metabridge, tmp_path):
    generator = np.random.default_rng(0)
    for name in "abcdefgh":
        (tmp_path / "photos" / name).mkdir(parents=True)
        for place in range(9):
            picture = Image.fromarray(generator.integers(0, 256, (16, 16), dtype=np.uint8))
            picture.save(tmp_path / "photos" / name / f"{place}.png")
    command = (*TRAIN, "--data", tmp_path / "photos", "--size", 16, "--ways", 2, "--out", tmp_path / "run")
    status, printed, _ = metabridge(*command, "--method", "anil")
    assert status == 0
    assert "There are no two classes to validate on, so the last weights are kept." in printed
    assert f"Next: metabridge evaluate {tmp_path / 'run'} --ways 2" in printed
    status, printed, _ = metabridge("evaluate", tmp_path / "run", "--shots", 1, *EVALUATE)
    assert status == 0
    assert "2-way tasks of the test split" in printed


def test_another_setting_in_the_same_folder_is_refused(metabridge, runs):
    status, _, complained = metabridge(*TRAIN, "--method", "anil", "--lr", 0.5, "--out", runs["anil"])
    assert status == 2
    assert "holds a run with other settings (training.lr is 0.001 there and 0.5 here)" in complained


def test_options_reach_the_method_the_model_and_the_training(metabridge, tmp_path):
    options = ["--option", "steps=3", "-o", "lr=0.25", "--model-option", "filters=5", "--schedule", "step"]
    options += ["--optimizer", "sgd", "--weight-decay", 0.01, "--ways", 3, "--shots", 2, "--patience", 2, "--augment"]
    status, _, _ = metabridge(*TRAIN, "--method", "anil", *options, "--out", tmp_path / "run", "--seed", 4)
    assert status == 0
    settings = json.loads((tmp_path / "run" / "settings.json").read_text())
    assert settings["method"]["inner"] == {"solver": "GradientDescent", "steps": 3, "lr": 0.25, "rates": "fixed"}
    assert (settings["model"]["filters"], settings["model"]["outputs"], settings["model"]["seed"]) == (5, 3, 4)
    assert (settings["tasks"]["ways"], settings["tasks"]["shots"], settings["tasks"]["queries"]) == (3, 2, 2)
    training = settings["training"]
    assert (training["optimizer"], training["weight_decay"], training["schedule"]["name"]) == ("sgd", 0.01, "step")
    assert (training["patience"], training["augment"]["padding"], training["seed"]) == (2, 4, 4)
    assert settings["tasks"]["data"]["name"] == "glyphs"


def test_what_is_left_out_is_what_the_method_is_usually_trained_with(metabridge, tmp_path):
    metabridge("train", "--method", "rfs", "--iterations", 1, "--batch", 2, "--minutes", 0, "--out", tmp_path / "run")
    settings = json.loads((tmp_path / "run" / "settings.json").read_text())
    assert settings["tasks"]["environment"] == "ImageBatches"
    assert settings["model"]["statistics"] == "running"
    assert (settings["training"]["optimizer"], settings["training"]["lr"]) == ("sgd", 0.05)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--method", "magic"], "There is no method 'magic'. The methods are maml"),
        (
            ["--method", "anil", "--model", "vgg"],
            "model is 'vgg', but must be one of conv4, resnet12, mlp, timm:NAME or FILE.json",
        ),
        (["--method", "anil", "--option", "stepz=3"], "anil has no option 'stepz'. Its options are lr, rates, steps"),
        (["--method", "anil", "--option", "steps"], "--option is 'steps', but must be KEY=VALUE, such as steps=5."),
        (["--method", "anil", "--option", "steps=many"], "steps is 'many', but must be a whole number"),
        (["--method", "anil", "--option", "lr=high"], "--option is lr=high, which anil cannot take"),
        (["--method", "anil", "--option", "inner=5"], "--option is inner=5, which anil cannot take"),
        (["--method", "anil", "--option", "test=5"], "test is 5, but must be one of GradientDescent"),
        (["--method", "anil", "--option", "test=lasso"], "head is 'lasso' with penalty None, but must be logistic"),
        (["--method", "anil", "--option", "head=foo"], "head is 'foo', but must be one of 'learned', 'frozen'"),
        (["--method", "anil", "--option", "split=no"], "split is 'no', but must be true or false"),
        (["--method", "anil", "--option", "loss=5"], "loss is 5, but must be a function"),
        (["--method", "anil", "--model-option", "depth=3"], "conv4 has no option 'depth'."),
        (["--method", "anil", "--model-option", "filters=many"], "filters is 'many', but must be a whole number"),
        (["--schedule", "linear"], "schedule is 'linear', but must be one of constant, step, cosine, plateau."),
        (["--optimizer", "lion"], "optimizer is 'lion', but must be one of adam, adamw, radam, sgd."),
        (["--precision", "float8"], "precision is 'float8', but must be 'float32' or 'bfloat16'."),
        (["--lr", "-1"], "lr is -1.0, but must be a positive number."),
        (["--data", "nowhere"], "the data set is 'nowhere', but the known ones are"),
        (["--size", "32"], "size is 32, but 'glyphs' does not take it."),
        (["--ways", "5000"], "ways is 5000, but split 'train' has"),
        (["--iterations", "0"], "Invalid value for '--iterations'"),
    ],
)
def test_what_cannot_be_trained_is_named_in_one_line_with_status_2(metabridge, glyphs, tmp_path, arguments, complaint):
    status, _, complained = metabridge("train", *arguments, "--device", "cpu", "--out", tmp_path / "run")
    assert status == 2
    assert complained.startswith(f"metabridge train: {complaint}")
    assert complained.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--optimizer", "lion"], "optimizer is 'lion'"),
        (["--lr", "-1"], "lr is -1.0"),
        (["--out", __file__], f"--out is {__file__}, which is a file. Name a folder."),
    ],
)
def test_what_needs_no_images_is_refused_before_they_are_read(metabridge, monkeypatch, arguments, complaint):
    monkeypatch.setattr("metabridge.environments.datasets.load", lambda *_, **__: pytest.fail("read images"))
    status, _, complained = metabridge("train", "--device", "cpu", *arguments)
    assert status == 2
    assert complained.startswith(f"metabridge train: {complaint}")


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
    assert printed.splitlines()[-1] == f"Every class is in {file}"


def test_a_run_against_itself_differs_by_nothing_in_every_task(metabridge, runs, tmp_path):
    metabridge("evaluate", runs["mtl"], runs["mtl"], "--shots", 1, *EVALUATE, "--json", tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())[1]["difference"] == {"mean": 0.0, "ci95": 0.0}


def test_heads_penalties_copies_and_mirror_images_reach_the_evaluation(metabridge, runs, monkeypatch):
    import metabridge.training.assess as module

    asked, original = [], module.assess

    def noted(run, environment, **options):
        asked.append((run.method.test, options["views"].copies, options["views"].mirrored))
        return original(run, environment, **options)

    monkeypatch.setattr(module, "assess", noted)
    options = ["--head", "svm", "--penalty", 0.25, "--copies", 2, "--mirrored"]
    assert metabridge("evaluate", runs["mtl"], "--shots", 1, *EVALUATE, *options)[0] == 0
    assert asked == [(SVM(C=4.0), 2, True)]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--shots", "one"], "shots is 'one', but must be whole numbers with commas between, such as 1,5."),
        (["--shots", "0"], "shots is 0, but must be a whole number of at least 1."),
        (["--penalty", "0.1"], "penalty is given without the head that it is of. Name it with --head."),
        (["--head", "centroid", "--penalty", "1"], "head is 'centroid' with penalty 1.0, but must be logistic"),
        (["--head", "svm", "--penalty", "0"], "penalty is 0.0, but must be a positive number."),
        (["--head", "forest"], "Invalid value for '--head'"),
        (["--split", "dev"], "split is 'dev', but these images have 'train'"),
        (["--queries", "100"], "class '"),
        (["--ways", "6"], "A label is 5, but the head has 5 outputs"),
        (["--copies", "1"], "views asks for 1 copies, but this model's features change with the task"),
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
        "Name the folder that was given to train as --out.\n",
    )


def test_a_run_that_names_no_data_asks_for_some(metabridge, runs, tmp_path):
    for file in runs["anil"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "settings.json").read_text())
    settings["tasks"]["data"] = None
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    status, _, complained = metabridge("evaluate", tmp_path, *EVALUATE)
    assert status == 2
    assert "does not say what data it was trained on. Name some with --data." in complained
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


@pytest.fixture
def photographs(tmp_path) -> Path:
    """Class folders of small PNG files in colour, each class with a hue of its own, split by folders."""
    draw = np.random.default_rng(0)
    for split, classes in (("train", 4), ("validation", 3), ("test", 3)):
        for label in range(classes):
            folder = tmp_path / "photographs" / split / f"{split} {label}"
            folder.mkdir(parents=True)
            hue = draw.integers(0, 200, 3)
            for index in range(5):
                pixels = hue + draw.integers(0, 55, (20, 18 + index, 3))
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{index}.png")
    return tmp_path / "photographs"


@pytest.mark.parametrize("method", ["mtl", "rfs"])
def test_a_folder_of_pictures_trains_and_evaluates_from_end_to_end(metabridge, photographs, tmp_path, method):
    out = tmp_path / "run"
    tasks = ["--ways", 3, "--shots", 1, "--size", 16, "--data", photographs]
    assert metabridge(*TRAIN, "--method", method, *tasks, "--out", out)[0] == 0
    settings = json.loads((out / "settings.json").read_text())
    assert settings["training"]["augment"]["padding"] == 4  # images in colour are augmented
    assert settings["tasks"]["data"] == {"name": "folder", "root": str(photographs.resolve()), "size": 16}
    status, printed, _ = metabridge(
        "evaluate", out, "--ways", 3, "--queries", 3, "--shots", "1,2", "--tasks", 30, "--device", "cpu"
    )
    assert status == 0
    accuracies = [float(found) for found in re.findall(r"│ +[12] │ +([\d.]+) ±", printed)]
    assert len(accuracies) == 2
    assert min(accuracies) > 50  # hues tell the classes apart, where guessing gives 33 %


@pytest.mark.parametrize(
    ("left", "hint"),
    [(3, "Next: metabridge evaluate {out} --ways 3 "), (1, "There is no second class left to test on")],
)
def test_what_to_do_next_can_be_done_with_the_classes_that_are_left(metabridge, photographs, tmp_path, left, hint):
    for label in range(left, 3):
        shutil.rmtree(photographs / "test" / f"test {label}")
    out = tmp_path / "run"
    tasks = ["--ways", 4, "--shots", 1, "--size", 16, "--data", photographs]
    status, printed, _ = metabridge(*TRAIN, "--method", "mtl", *tasks, "--out", out)
    assert status == 0
    assert f"The run is in {out}. {hint.format(out=out)}" in printed


def test_what_to_do_next_can_be_done_with_the_images_that_are_there(metabridge, photographs, tmp_path):
    out = tmp_path / "run"
    tasks = ["--ways", 3, "--shots", 1, "--size", 16, "--data", photographs]
    printed = metabridge(*TRAIN, "--method", "mtl", *tasks, "--out", out)[1]
    hint = printed.partition("Next: metabridge ")[2].split()
    assert hint[2:] == ["--ways", "3", "--shots", "1", "--queries", "4"]  # of five images a class
    assert metabridge(*hint, "--tasks", 4, "--device", "cpu")[0] == 0


def test_what_to_do_next_can_be_pasted_though_a_path_has_blanks(metabridge, photographs, tmp_path):
    out = tmp_path / "my run"
    tasks = ["--ways", 4, "--shots", 1, "--size", 16, "--data", photographs]
    printed = metabridge(*TRAIN, "--method", "mtl", *tasks, "--out", out)[1]
    assert shlex.split(printed.partition("Next: metabridge ")[2])[:2] == ["evaluate", str(out)]
    assert "There are 3 classes to validate on, so tasks of validation have 3 ways." in printed
    assert "Best on 4 3-way validation tasks" in printed


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
        status, printed, _ = metabridge("evaluate", out / method, *asked, "--data", photographs)
        assert status == 0
        assert "Note: 1 of 4 classes have names that the run in" in printed
        assert metabridge("evaluate", out / method, *asked, "--split", "train")[0] == 0


def test_a_run_does_not_go_on_with_other_classes_though_as_many(metabridge, photographs, tmp_path):
    command = (*TRAIN, "--ways", 3, "--shots", 1, "--size", 16, "--data", photographs, "--out", tmp_path / "run")
    assert metabridge(*command)[0] == 0
    (photographs / "train" / "train 1").rename(photographs / "train" / "other")
    status, _, complained = metabridge(*command)
    assert status == 2
    assert "holds a run with other settings (tasks.class_names[0] is train 0 there and other here)" in complained


def test_a_result_that_would_be_a_folder_is_refused_before_the_work(metabridge, runs, tmp_path, monkeypatch):
    monkeypatch.setattr("metabridge.training.assess.assess", lambda *_, **__: pytest.fail("judged first"))
    status, _, complained = metabridge("evaluate", runs["mtl"], *EVALUATE, "--json", tmp_path)
    assert (status, complained.strip()) == (2, f"metabridge evaluate: {tmp_path} is a folder. Name a file.")


def test_a_search_does_not_go_into_the_folder_of_a_run(metabridge, runs):
    status, _, complained = metabridge("search", "--out", runs["mtl"], "--device", "cpu")
    assert status == 2
    assert f"--out is {runs['mtl']}, which holds a run. Name another folder." in complained


def test_other_data_comes_in_the_form_that_the_run_takes(metabridge, photographs, runs, tmp_path):
    out = tmp_path / "run"
    tasks = ["--ways", 3, "--shots", 1, "--size", 16, "--data", photographs]
    assert metabridge(*TRAIN, "--method", "anil", *tasks, "--out", out)[0] == 0
    asked = ("evaluate", out, "--ways", 3, "--shots", 1, "--tasks", 4, "--queries", 2, "--device", "cpu")
    assert metabridge(*asked, "--data", photographs)[1] == metabridge(*asked)[1]
    status, _, complained = metabridge(*asked, "--data", "glyphs")
    assert status == 2
    assert "glyphs have 1 channel and 28×28 pixels, but the run takes images of 3 and 16×16" in complained


def test_all_shots_are_checked_before_any_is_judged(metabridge, runs, monkeypatch):
    monkeypatch.setattr("metabridge.training.assess.assess", lambda *_, **__: pytest.fail("judged first"))
    status, _, complained = metabridge("evaluate", runs["mtl"], "--shots", "1,90", "--device", "cpu")
    assert status == 2
    assert "90 shots" in complained


def test_a_command_that_failed_before_its_first_step_does_not_keep_its_folder(metabridge, tmp_path, monkeypatch):
    monkeypatch.setattr("metabridge.learners.engine.Engine.__call__", lambda *_: _fail())
    with pytest.raises(RuntimeError):
        metabridge(*TRAIN, "--method", "mtl", "--lr", 0.5, "--out", tmp_path / "run")
    monkeypatch.undo()
    assert metabridge(*TRAIN, "--method", "mtl", "--out", tmp_path / "run")[0] == 0


def _fail() -> None:
    raise RuntimeError("out of memory")
