from __future__ import annotations

import json
import re
import shlex
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from metabridge.decode_options import DecodeOptions
from metabridge.learners import method, parameters
from metabridge.models import conv4
from metabridge.training import Model, image_training, load
from small_runs import EVALUATE, TRAIN


def test_training_writes_a_run_and_the_same_command_does_not_train_again(metabridge, tmp_path, monkeypatch):
    out = tmp_path / "run"
    status, printed, errors = metabridge(*TRAIN, "--method", "mtl", "--out", out)
    assert status == 0
    assert "metabridge train:" not in errors
    assert [line for line in errors.splitlines() if line.startswith("mtl 2/4: loss")]  # progress goes to stderr
    assert "2/4" not in printed
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
    assert f"Best score on 4 validation tasks (5-way): {best!s}" in printed
    assert f"The run is in {out}. Next: metabridge evaluate {out} --ways 5 --shots 1,5" in printed
    before = (out / "weights.safetensors").read_bytes()
    monkeypatch.setattr("metabridge.training.trainer.Trainer.step", lambda self: pytest.fail("trained again"))
    status, again, _ = metabridge(*TRAIN, "--method", "mtl", "--out", out)
    assert status == 0
    assert again.splitlines()[-2:] == printed.splitlines()[-2:]
    assert (out / "weights.safetensors").read_bytes() == before


def test_a_stopped_run_is_continued_by_the_same_command(metabridge, tmp_path):
    command = (*TRAIN, "--method", "anil", "--out", tmp_path / "run")
    status, printed, errors = metabridge(*command, "--minutes", 0)
    assert status == 0
    assert "metabridge train:" not in errors
    assert printed.splitlines()[-1] == "Stopped after 0 minutes. Run the same command again to continue."
    assert not (tmp_path / "run" / "weights.safetensors").exists()
    assert metabridge(*command)[0] == 0
    assert load(tmp_path / "run").finished
    metabridge(*command[:-1], tmp_path / "once")
    stopped, once = load(tmp_path / "run"), load(tmp_path / "once")
    assert all(torch.equal(value, once.params[name]) for name, value in stopped.params.items())


def test_a_finished_run_is_extended_with_more_iterations(metabridge, runs, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(runs["mtl"], out)
    command = [*TRAIN, "--method", "mtl", "--out", out, "--iterations"]
    status, _, errors = metabridge(*command, 5)
    assert status == 0, errors
    assert [point.iteration for point in load(out).curve] == [2, 4, 5]
    status, _, errors = metabridge(*command, 4)
    assert status == 2
    assert "has done 5 iterations, but iterations is 4. Use --iterations 5 or more" in errors


DAMAGES = {
    "tasks": (lambda s: s.update(tasks=[1]), "its tasks is [1]"),
    "data": (lambda s: s["tasks"].update(data=5), "data of its tasks is 5"),
    "source": (lambda s: s["tasks"]["data"].update(color="red"), "its data {'name': 'glyphs'"),
    "names": (lambda s: s["tasks"].update(class_names=7), "class_names of its tasks is 7"),
    "outputs": (lambda s: s["model"].update(outputs="x"), "its settings cannot be read"),
    "filters": (lambda s: s["model"].update(filters=10**9), "too large to build"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_evaluating_a_run_with_damaged_settings_prints_one_line(metabridge, runs, tmp_path, damage):
    out, (apply_damage, message) = tmp_path / "run", DAMAGES[damage]
    shutil.copytree(runs["mtl"], out)
    settings = json.loads((out / "settings.json").read_text())
    apply_damage(settings)
    (out / "settings.json").write_text(json.dumps(settings))
    status, _, errors = metabridge("evaluate", out, "--shots", 1, *EVALUATE)
    assert status == 2
    assert errors.splitlines()[-1].startswith(f"metabridge evaluate: {out}/settings.json is damaged: ")
    assert message in errors


def test_a_folder_with_one_validation_class_is_trained_and_evaluated_with_the_ways_of_training(metabridge, tmp_path):
    generator = np.random.default_rng(0)
    for name in "abcdefgh":
        (tmp_path / "photos" / name).mkdir(parents=True)
        for index in range(9):
            picture = Image.fromarray(generator.integers(0, 256, (16, 16), dtype=np.uint8))
            picture.save(tmp_path / "photos" / name / f"{index}.png")
    command = (*TRAIN, "--data", tmp_path / "photos", "--size", 16, "--ways", 2, "--out", tmp_path / "run")
    status, printed, errors = metabridge(*command, "--method", "anil")
    assert status == 0
    assert "Fewer than two validation classes: keeping the last weights instead of the best." in errors
    assert f"Next: metabridge evaluate {tmp_path / 'run'} --ways 2" in printed
    status, printed, _ = metabridge("evaluate", tmp_path / "run", "--shots", 1, *EVALUATE)
    assert status == 0
    assert "Test split, 2-way, 10 tasks per number of shots" in printed


def test_another_setting_in_the_same_folder_raises_an_error(metabridge, runs):
    status, _, errors = metabridge(*TRAIN, "--method", "anil", "--lr", 0.5, "--out", runs["anil"])
    assert status == 2
    assert "contains a run with other settings (training.lr was 0.001 and is now 0.5)" in errors


def test_options_are_passed_to_the_method_the_model_and_the_training(metabridge, tmp_path):
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


def test_the_inner_solver_is_chosen_by_name_and_the_method_is_created_once(metabridge, tmp_path, monkeypatch):
    create, names = image_training.create_method, []
    monkeypatch.setattr(
        image_training, "create_method", lambda name, **options: names.append(name) or create(name, **options)
    )
    options = ("--option", "inner=proximal", "--option", "outer=implicit", "--minutes", 0)
    status, _, _ = metabridge(*TRAIN, "--method", "anil", *options, "--out", tmp_path / "run")
    assert status == 0
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["method"]["inner"]["solver"] == "Proximal"
    assert names == ["anil"]


def test_omitted_options_have_the_defaults_of_the_method(metabridge, tmp_path):
    metabridge(
        "train", "--method", "rfs", "--iterations", 1, "--batch-size", 2, "--minutes", 0, "--out", tmp_path / "run"
    )
    settings = json.loads((tmp_path / "run" / "settings.json").read_text())
    assert settings["tasks"]["environment"] == "ImageBatches"
    assert settings["model"]["statistics"] == "running"
    assert (settings["training"]["optimizer"], settings["training"]["lr"]) == ("sgd", 0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "magic"], "--method is 'magic', but must be one of maml"),
        (
            ["--method", "anil", "--model", "vgg"],
            "--model is 'vgg', but must be conv4, hf:NAME, mlp, resnet12, timm:NAME, wide, "
            "package.module:function or the path of an architecture.json",
        ),
        (["--method", "anil", "--option", "stepz=3"], "anil has no option 'stepz'. Its options are lr, rates, steps"),
        (["--method", "anil", "--option", "steps"], "--option is 'steps', but must be KEY=VALUE, such as steps=5."),
        (["--method", "anil", "--option", "steps=many"], "--option steps is 'many', but must be an integer"),
        (["--method", "anil", "--option", "lr=high"], "--option lr is 'high', but must be a positive number."),
        (
            ["--method", "anil", "--option", "inner=5"],
            "--option inner is 5, but must be a solver such as GradientDescent()",
        ),
        (
            ["--method", "anil", "--option", "test_solver=5"],
            "--option test_solver is 5, but must be one of GradientDescent",
        ),
        (
            ["--method", "anil", "--option", "test_solver=lasso"],
            "--option test_solver is 'lasso', but must be one of centroid",
        ),
        (
            ["--method", "anil", "--option", "training_head=foo"],
            "--option training_head is 'foo', but must be one of 'learned', 'frozen'",
        ),
        (["--method", "anil", "--option", "split=no"], "--option split is 'no', but must be true or false"),
        (["--method", "anil", "--option", "loss=5"], "--option loss is 5, but must be a function"),
        (["--method", "anil", "--model-option", "depth=3"], "conv4 has no option 'depth'."),
        (
            ["--model-option", "size=32"],
            "--model-option size is 32, but this option of the model is set by --size. Use --size 32.",
        ),
        (
            ["--model-option", "outputs=3"],
            "--model-option outputs is 3, but this option of the model is set by --ways. Use --ways 3.",
        ),
        (
            ["--model-option", "channels=3"],
            "--model-option channels is 3, but the images determine it. Omit it.",
        ),
        (
            ["--freeze", "features.0", "--freeze", "features.7"],
            "--freeze is 'features.7', but the network has no such part. Use one of features.0, features.1,",
        ),
        (["--init", "absent"], "--init is absent, which is neither a folder nor the name of a model."),
        (["--init", "absent", "--model", "mlp"], "--model is passed, but --init determines the network. Omit --model."),
        (
            ["--method", "anil", "--model-option", "filters=many"],
            "--model-option filters is 'many', but must be an integer",
        ),
        (["--schedule", "linear"], "--schedule is 'linear', but must be one of constant, step, cosine, plateau."),
        (["--optimizer", "lion"], "--optimizer is 'lion', but must be one of adam, adamw, radam, sgd, muon."),
        (["--precision", "float8"], "--precision is 'float8', but must be one of float32, bfloat16."),
        (["--lr", "-1"], "--lr is -1.0, but must be a positive number."),
        (
            ["--data", "nowhere"],
            "--data is 'nowhere', which is neither the name of a data set nor an existing path. Pass",
        ),
        (["--size", "32"], "--size is 32, but 'glyphs' does not accept it."),
        (["--ways", "5000"], "--ways is 5000, but split 'train' has"),
        (["--iterations", "0"], "--iterations is 0, but must be an integer of at least 1."),
    ],
)
def test_invalid_arguments_print_one_line_and_exit_with_status_2(metabridge, glyphs, tmp_path, arguments, message):
    status, _, errors = metabridge("train", *arguments, "--device", "cpu", "--out", tmp_path / "run")
    assert status == 2
    assert errors.startswith(f"metabridge train: {message}")
    assert errors.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizer", "lion"], "--optimizer is 'lion'"),
        (["--lr", "-1"], "--lr is -1.0"),
        (["--out", __file__], f"--out is {__file__}, which is a file. Pass a folder."),
        (["--model", "vgg"], "--model is 'vgg'"),
        (["--model", "absent.json"], "the architecture absent.json cannot be read"),
        (["--model-option", "filter=8"], "conv4 has no option 'filter'"),
    ],
)
def test_errors_independent_of_images_are_raised_before_reading_them(metabridge, monkeypatch, arguments, message):
    monkeypatch.setattr("metabridge.datasets.load", lambda *_, **__: pytest.fail("read images"))
    status, _, errors = metabridge("train", "--device", "cpu", *arguments)
    assert status == 2
    assert errors.startswith(f"metabridge train: {message}")


@pytest.mark.parametrize("method", ["mtl", "rfs"])
def test_a_folder_of_images_is_trained_and_evaluated(metabridge, photographs, tmp_path, method):
    out = tmp_path / "run"
    tasks = ["--ways", 3, "--shots", 1, "--size", 16, "--data", photographs]
    assert metabridge(*TRAIN, "--method", method, *tasks, "--out", out)[0] == 0
    settings = json.loads((out / "settings.json").read_text())
    assert settings["training"]["augment"]["padding"] == 4  # images in color are augmented
    assert settings["tasks"]["data"] == {"name": "folder", "root": str(photographs.resolve()), "size": 16}
    status, printed, _ = metabridge(
        "evaluate", out, "--ways", 3, "--queries", 3, "--shots", "1,2", "--tasks", 30, "--device", "cpu"
    )
    assert status == 0
    accuracies = [float(found) for found in re.findall(r"│ +[12] │ +([\d.]+) ±", printed)]
    assert len(accuracies) == 2
    assert min(accuracies) > 50  # the hues of the classes differ; guessing has an accuracy of 33 %


@pytest.mark.parametrize(
    ("test_classes", "hint"),
    [(3, "Next: metabridge evaluate {out} --ways 3 "), (1, "Fewer than two test classes: evaluate the run")],
)
def test_the_next_command_fits_the_number_of_test_classes(metabridge, photographs, tmp_path, test_classes, hint):
    for label in range(test_classes, 3):
        shutil.rmtree(photographs / "test" / f"test {label}")
    out = tmp_path / "run"
    tasks = ["--ways", 4, "--shots", 1, "--size", 16, "--data", photographs]
    status, printed, _ = metabridge(*TRAIN, "--method", "mtl", *tasks, "--out", out)
    assert status == 0
    assert f"The run is in {out}. {hint.format(out=out)}" in printed


def test_the_next_command_fits_the_number_of_images_per_class(metabridge, photographs, tmp_path):
    out = tmp_path / "run"
    tasks = ["--ways", 3, "--shots", 1, "--size", 16, "--data", photographs]
    printed = metabridge(*TRAIN, "--method", "mtl", *tasks, "--out", out)[1]
    hint = printed.partition("Next: metabridge ")[2].split()
    assert hint[2:] == ["--ways", "3", "--shots", "1", "--queries", "4"]  # with five images per class
    assert metabridge(*hint, "--tasks", 4, "--device", "cpu")[0] == 0


def test_the_next_command_quotes_paths_with_spaces(metabridge, photographs, tmp_path):
    out = tmp_path / "my run"
    tasks = ["--ways", 4, "--shots", 1, "--size", 16, "--data", photographs]
    _, printed, errors = metabridge(*TRAIN, "--method", "mtl", *tasks, "--out", out)
    assert shlex.split(printed.partition("Next: metabridge ")[2])[:2] == ["evaluate", str(out)]
    assert "Only 3 validation classes: validation tasks have 3 ways." in errors
    assert "Best score on 4 validation tasks (3-way)" in printed


def test_a_run_is_not_continued_if_a_class_was_renamed(metabridge, photographs, tmp_path):
    command = (*TRAIN, "--ways", 3, "--shots", 1, "--size", 16, "--data", photographs, "--out", tmp_path / "run")
    assert metabridge(*command)[0] == 0
    (photographs / "train" / "train 1").rename(photographs / "train" / "other")
    status, _, errors = metabridge(*command)
    assert status == 2
    assert "contains a run with other settings (tasks.class_names[0] was train 0 and is now other)" in errors


def test_a_search_in_the_folder_of_a_run_raises_an_error(metabridge, runs):
    status, _, errors = metabridge("search", "--out", runs["mtl"], "--device", "cpu")
    assert status == 2
    assert f"--out is {runs['mtl']}, which contains a training run. Choose another folder." in errors


def test_the_folder_of_a_command_that_failed_before_its_first_step_can_be_used_again(metabridge, tmp_path, monkeypatch):
    monkeypatch.setattr("metabridge.learners.engine.Engine.__call__", lambda *_: _run_out_of_memory())
    status, _, errors = metabridge(*TRAIN, "--method", "mtl", "--lr", 0.5, "--out", tmp_path / "run")
    assert status == 2
    assert "not enough memory. Use smaller images" in errors
    monkeypatch.undo()
    assert metabridge(*TRAIN, "--method", "mtl", "--out", tmp_path / "run")[0] == 0


def _run_out_of_memory() -> None:
    raise RuntimeError("out of memory")


def test_mtl_can_be_trained_with_soft_targets_and_a_teacher(metabridge, tmp_path):
    assert metabridge(*TRAIN, "--method", "mtl", "--out", tmp_path / "teacher")[0] == 0
    options = ("--smoothing", 0.1, "--mixup", 0.2, "--ema-decay", 0.9, "--optimizer", "muon")
    student = (*TRAIN, "--method", "mtl", *options, "--teacher", tmp_path / "teacher", "--out", tmp_path / "student")
    assert metabridge(*student)[0] == 0
    training = json.loads((tmp_path / "student" / "settings.json").read_text())["training"]
    assert training["soft_targets"] == {"smoothing": 0.1, "mixup": 0.2, "distillation": 0.5, "temperature": 1.0}
    assert (training["ema_decay"], training["optimizer"]) == (0.9, "muon")
    status, _, errors = metabridge(*TRAIN, "--method", "anil", "--smoothing", 0.1, "--out", tmp_path / "other")
    assert status == 2
    assert "but only methods whose head covers all training classes, such as mtl and rfs, support it" in errors
    assert errors.endswith("Remove --smoothing.\n")


META_TRAIN = ("train", "--device", "cpu", "--iterations", 2, "--validate-tasks", 4, "--queries", 2, "--batch-size", 2)


def test_training_starts_from_a_run_and_continues_without_it(metabridge, runs, tmp_path):
    source, out = tmp_path / "source", tmp_path / "run"
    shutil.copytree(runs["mtl"], source)
    command = (*META_TRAIN, "--method", "anil", "--ways", 3, "--init", source, "--out", out)
    status, _, errors = metabridge(*command)
    assert status == 0, errors
    assert f"Initial weights from {source}: features; new: initial head." in errors
    settings = json.loads((out / "settings.json").read_text())
    assert (settings["model"]["filters"], settings["model"]["outputs"]) == (6, 3)
    assert settings["model"]["statistics"] == "running"  # of the source, not the default of the method
    assert settings["init"]["copied"] == ["features"]
    assert metabridge("evaluate", out, "--shots", 1, *EVALUATE)[0] == 0
    for other in (("--size", 32), ("--model-option", "filters=6"), ("--model", "conv4")):
        status, _, errors = metabridge(*command, *other)
        assert status == 2
        assert errors.endswith(f"Omit {other[0]}.\n")
    status, _, errors = metabridge(*command[:-4], "--init", runs["anil"], "--out", out)
    assert status == 2
    assert errors.startswith("metabridge train: --init is a model with other weights than those that the run in")
    shutil.rmtree(source)
    status, _, errors = metabridge(*command, "--iterations", 3)
    assert status == 0, errors
    assert "--init cannot be checked: " in errors
    assert "Continuing the run at iteration 2 of 3." in errors
    assert load(out).curve[-1].iteration == 3
    assert json.loads((out / "settings.json").read_text())["init"] == settings["init"]
    status, _, errors = metabridge(*command[:-2], "--out", tmp_path / "new")  # without a run, the source is needed
    assert status == 2


def test_a_run_from_a_network_with_decode_options_is_trained_and_evaluated_on_images_decoded_for_it(
    metabridge, photographs, tmp_path, monkeypatch
):
    net, frozen = conv4(1, 16, 7, filters=4, statistics="running"), method("frozen")
    net.decode_options = DecodeOptions(16, 1, crop=True, resize=20, interpolation="bicubic")
    monkeypatch.setattr(
        "metabridge.training.load_model", lambda name, device: Model(frozen, net, parameters(frozen, net))
    )
    out = tmp_path / "run"
    command = (*META_TRAIN, "--data", photographs, "--ways", 3, "--shots", 1, "--init", "timm:fake", "--out", out)
    status, _, errors = metabridge(*command, "--method", "mtl", "--freeze", "features.0")
    assert status == 0, errors
    assert "Initial weights from timm:fake: features; new: head rows of the training classes." in errors
    monkeypatch.undo()
    settings = json.loads((out / "settings.json").read_text())
    assert settings["tasks"]["data"]["decode_options"] == net.decode_options.to_json()
    assert settings["training"]["freeze"] == ["features.0"]
    run = load(out)
    assert run.net.decode_options == net.decode_options
    assert all((run.params[name] == value).all() for name, value in net.named_parameters() if "features.0" in name)


def test_a_run_that_stopped_early_says_how_to_continue(metabridge, tmp_path):
    options = ("--lr", 1e-9, "--option", "lr=1e-9", "--validate-every", 1, "--out", tmp_path / "run")
    command = (*TRAIN, "--method", "anil", *options, "--iterations", 5)
    hint = "Stopped early at iteration 2 of 5, after 1 validation without a new best score. To continue, use "
    for iterations in (5, 9):  # more iterations do not continue the run
        status, _, errors = metabridge(*command, "--patience", 0, "--iterations", iterations)
        assert status == 0, errors
        assert hint.replace("of 5", f"of {iterations}") + "--patience 1 or more." in errors
    status, _, errors = metabridge(*command, "--patience", 1)
    assert status == 0, errors
    assert "Continuing the run at iteration 2 of 5." in errors
    assert load(tmp_path / "run").curve[-1].iteration == 3
    status, _, errors = metabridge(*command)  # without early stopping
    assert status == 0, errors
    assert load(tmp_path / "run").curve[-1].iteration == 5
