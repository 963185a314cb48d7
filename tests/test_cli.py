from __future__ import annotations

import subprocess
import sys

import pytest

import metabridge as library
from metabridge import InputError, __version__, cli
from metabridge.learners import PRESETS
from metabridge.report.results import Result


def test_version(metabridge):
    assert metabridge("--version") == (0, f"metabridge {__version__}\n", "")


def test_help_of_every_command_shows_an_example(metabridge):
    for command in cli.app.registered_commands:
        name = command.callback.__name__
        status, printed, _ = metabridge(name, "--help")
        assert status == 0
        assert f"Example: metabridge {name}" in printed


def test_the_help_shows_what_to_type_for_a_value(metabridge):
    help_texts = {
        name: " ".join(metabridge(name, "--help")[1].replace("│", "").split())
        for name in ("train", "evaluate", "score")
    }
    for text in help_texts.values():
        assert not any(type_name in text for type_name in ("<bool", "<int", "<str", "list[", "[default"))
    assert "--optimizer NAME Optimizer: adam, adamw, radam, sgd or muon." in help_texts["train"]
    assert "--rotated-classes Add the training classes" in help_texts["train"]
    assert "--teacher DIR Folder" in help_texts["train"]
    assert "--training-ways INT [x>=2] Number of classes per training task" in help_texts["train"]
    assert "such as mtl. Default: --ways." in help_texts["train"]
    assert "--split train|validation|test Split of the data set. Default: test." in help_texts["evaluate"]
    assert (
        "--seed INT [x>=0] Random seed. Results are deterministic for a given seed and machine. Default: 0."
        in help_texts["evaluate"]
    )
    assert "--mirrored Test-time" in help_texts["evaluate"]
    assert "--kernel maml|anil|ntk Kernel to compute. Can be repeated. Default: all." in help_texts["score"]


def test_an_error_about_a_method_option_does_not_name_the_flag_of_the_same_name(metabridge):
    options = ("--method", "maml", "--device", "cpu")
    assert metabridge("train", *options, "--lr", -1)[2].startswith("metabridge train: --lr is -1.0, but")
    for pair in (("--option", "lr=-1"), ("--option=lr=-1",), ("-olr=-1",)):
        assert metabridge("train", *options, *pair)[2].startswith("metabridge train: --option lr is -1, but")


def test_reproduce_rejects_a_data_folder_that_does_not_exist(metabridge, tmp_path):
    folder = tmp_path / "nodir"
    status, _, errors = metabridge("reproduce", "glyphs", "--data", folder, "--out", tmp_path, "--device", "cpu")
    assert (status, errors) == (
        2,
        f"metabridge reproduce: --data is {folder}, which does not exist. Pass a folder of data sets, or omit --data "
        "to use the built-in glyphs.\n",
    )


def test_help_does_not_import_torch_or_numpy():
    program = (
        "import sys; sys.modules.update(torch=None, numpy=None, sklearn=None, matplotlib=None); "
        "from metabridge.cli import app; sys.exit(app(sys.argv[1:], standalone_mode=False))"
    )
    for words in (["--version"], ["--help"], ["train", "--help"], ["data", "check", "--help"]):
        subprocess.run([sys.executable, "-c", program, *words], check=True, capture_output=True)


@pytest.mark.parametrize("package", ["models", "nas", "kernels", "learners"])
def test_a_package_can_be_imported_on_its_own(package):
    subprocess.run([sys.executable, "-c", f"import metabridge.{package}"], check=True)


def test_public_names_are_imported_on_first_use():
    import metabridge.diagnosis

    assert set(library.__all__) <= {*dir(library)}
    assert all(getattr(library, name) is not None for name in library.__all__)
    assert library.diagnose is metabridge.diagnosis.diagnose
    with pytest.raises(AttributeError, match="module 'metabridge' has no attribute 'diagnoses'"):
        library.diagnoses  # noqa: B018
    assert not hasattr(library, "__wrapped__")


def test_without_a_command_the_help_is_shown(metabridge):
    status, printed, _ = metabridge()
    assert status == 0
    assert "demo" in printed
    assert "reproduce" in printed


def test_methods_lists_all_methods(metabridge):
    status, printed, _ = metabridge("methods")
    assert status == 0
    # the first word of each row of the table, after the border
    first_words = {line.split()[1] for line in printed.splitlines() if len(line.split()) > 2}
    assert set(PRESETS) <= first_words
    assert "gradient descent: steps 5, lr 0.01" in printed


def test_the_demo_writes_its_page_and_prints_its_path(metabridge, tiny, tmp_path):
    status, printed, _ = metabridge("demo", "--out", tmp_path / "demo", "--device", "cpu")
    assert status == 0
    assert printed.endswith(f"The page is in {tmp_path / 'demo' / 'index.html'}\n")
    result = Result.read(tmp_path / "demo" / "glyphs.json")
    assert result.scale == "quick"
    anil_row = next(row for row in result.rows if row.name == "anil, test tasks")
    assert f"{anil_row.ours:.1f} ± {anil_row.ci95:.1f}" in printed


def test_reproduce_writes_numbers_and_figure(metabridge, tiny, tmp_path):
    status, _, _ = metabridge("reproduce", "glyphs", "--out", tmp_path, "--device", "cpu", "--seed", 2)
    assert status == 0
    assert Result.read(tmp_path / "glyphs.json").seed == 2
    assert (tmp_path / "glyphs.png").read_bytes().startswith(b"\x89PNG")


def test_reproduce_without_matplotlib_still_writes_the_numbers(metabridge, tiny, tmp_path, monkeypatch):
    for module in [name for name in sys.modules if name.startswith("metabridge.report.figures")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delattr("metabridge.report.figures", raising=False)
    for module in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    status, printed, _ = metabridge("reproduce", "glyphs", "--out", tmp_path, "--device", "cpu")
    assert status == 0
    assert "glyphs.png was not drawn, because matplotlib is not installed." in printed
    assert [file.name for file in tmp_path.iterdir()] == ["glyphs.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["reproduce", "figure-1"],
            "metabridge reproduce: there is no experiment 'figure-1'. The experiments are anil-fig2",
        ),
        (["reproduce"], "metabridge reproduce: Missing argument 'ID'"),
        (["demo", "--speed", "9"], "metabridge demo: No such option: --speed"),
        (["demo", "--seed", "-1"], "metabridge demo: --seed is -1, but must be an integer of at least 0."),
        (["demo", "--seed", "x"], "metabridge demo: --seed is x, but must be an integer of at least 0."),
        (["demo", "--device", "abacus"], "metabridge demo: --device is abacus, but must be auto, cpu or cuda."),
        (
            ["demo", "--seed", 10**20],
            f"metabridge demo: --seed is {10**20}, which is too large. Use {2**63 - 1} or less.",
        ),
        (["train", "--size", 100_000], "metabridge train: --size is 100000, but must be an integer from 8 to 1024."),
        (["train", "--minutes", "nan"], "metabridge train: --minutes is nan, but must be a number of at least 0."),
        (["train", "--lr", "fast"], "metabridge train: --lr is fast, but must be a number."),
        (
            ["score", "--model", "conv4", "--kernel", "foo"],
            "metabridge score: --kernel is foo, but must be maml, anil or",
        ),
        (["score", "--model", "conv4", "--adaptation-time", "nan"], "metabridge score: --adaptation-time is nan, but"),
        (["score", "--model", "conv4", "--ridge", "nan"], "metabridge score: --ridge is nan, but must be a number"),
        (["search", "--channels", 10**9], "metabridge search: --channels is 1000000000, but must be an integer from"),
        (["dance"], "metabridge: No such command 'dance'"),
    ],
)
def test_wrong_arguments_end_with_a_message_of_one_line_and_status_2(metabridge, arguments, message):
    status, printed, errors = metabridge(*arguments)
    assert (status, printed) == (2, "")
    assert errors.startswith(message)
    assert errors.count("\n") == 1


@pytest.mark.parametrize("words", [("--option", "steps=many"), ("-o", "steps=many"), ("--option=steps=many",)])
def test_an_error_about_a_method_option_names_the_flag_that_passed_it(metabridge, tmp_path, words):
    status, _, errors = metabridge("train", "--method", "maml", *words, "--out", tmp_path / "run")
    assert status == 2
    assert errors.startswith("metabridge train: --option steps is 'many', but must be an integer")


@pytest.mark.parametrize(
    ("message", "printed"),
    [
        ("ways is 9. Use ways=7 or fewer.", "--ways is 9. Use --ways 7 or fewer."),
        (
            "min_images is 0. Use a smaller min_images, or omit data.",
            "--min-images is 0. Use a smaller --min-images, or omit --data.",
        ),
        ("size is 84. Leave size out.", "--size is 84. Leave --size out."),
        ("steps is 0. Remove shots and queries.", "steps is 0. Remove --shots and --queries."),
        ("the data set is 'x'. Remove the data set.", "--data is 'x'. Remove the data set."),
        ("Omit classes, or use groups='hardness' (--groups hardness).", "Omit classes, or use --groups hardness."),
        ("Use min_images=3 or fewer.", "Use --min-images 3 or fewer."),
        ("Use groups='hardness'.", "Use --groups hardness."),
        ("Use shots=1 and queries=3 or fewer.", "Use --shots 1 and --queries 3 or fewer."),
        ("Use adapts='head'.", "Use adapts='head'."),  # not an option of the command
        ("--option is ways=7, which anil cannot take.", "--option is ways=7, which anil cannot take."),
    ],
)
def test_advice_of_the_library_names_the_option_of_the_command(metabridge, monkeypatch, tmp_path, message, printed):
    monkeypatch.chdir(tmp_path)  # where diagnose creates its output folder

    def refuse(*_, **__):
        raise InputError(message)

    monkeypatch.setattr("metabridge.datasets.load", refuse)
    assert metabridge("diagnose", "--device", "cpu", "--data", "glyphs") == (2, "", f"metabridge diagnose: {printed}\n")


def test_a_folder_that_cannot_be_created_is_refused_before_training(metabridge, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr("metabridge.experiments.experiment.Experiment.run", lambda *_: pytest.fail("training started"))
    status, _, errors = metabridge("demo", "--out", tmp_path / "file")
    assert status == 2
    assert f"metabridge demo: the folder {tmp_path / 'file'} cannot be created" in errors


def test_cuda_without_a_gpu_is_refused(metabridge, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    status, _, errors = metabridge("demo", "--out", tmp_path, "--device", "cuda")
    assert status == 2
    assert "no CUDA device is available" in errors


def test_an_interrupt_ends_in_one_line_and_status_130(metabridge, tmp_path, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("metabridge.experiments.experiment.Experiment.run", interrupted)
    assert metabridge("demo", "--out", tmp_path, "--device", "cpu") == (130, "", "metabridge demo: interrupted.\n")


def test_the_options_only_and_minutes_are_refused_by_an_experiment_that_is_computed_as_a_whole(metabridge, tmp_path):
    for option in (("--only", "maml"), ("--minutes", 1)):
        status, _, errors = metabridge("reproduce", "glyphs", "--out", tmp_path, *option)
        assert status == 2
        assert f"glyphs does not support {option[0]}, because it cannot be split into parts" in errors


def test_a_resumable_experiment_refuses_an_unknown_training_run(tmp_path):
    from metabridge.experiments import ExperimentOptions, experiment_modules, load_experiment

    for experiment in map(load_experiment, experiment_modules()):
        if experiment.resumable:
            with pytest.raises(InputError, match="only is no such training"):
                experiment.run(ExperimentOptions("quick", out=tmp_path, only=("no such training",)))


def test_an_interrupted_training_run_says_that_it_can_be_continued(metabridge, monkeypatch):
    monkeypatch.setattr("metabridge.training.image_training.image_trainer", lambda *_, **__: _interrupt())
    assert metabridge("train")[2].endswith("metabridge train: interrupted. Run the same command again to continue.\n")


def _interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("command", ["score", "diagnose"])
def test_an_unknown_model_is_refused_before_images_are_read(metabridge, monkeypatch, tmp_path, command):
    monkeypatch.setattr("metabridge.datasets.load", lambda *_, **__: pytest.fail("images were read"))
    monkeypatch.chdir(tmp_path)
    status, _, errors = metabridge(command, "--model", "vgg", "--device", "cpu")
    assert status == 2
    assert errors.startswith(f"metabridge {command}: --model is 'vgg'")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (
            ["train"],
            "ways shots queries batch-size iterations seed size min-images validate-every validate-tasks patience",
        ),
        (["evaluate", "run"], "ways queries tasks copies seed min-images"),
        (["diagnose"], "ways shots queries tasks size seed"),
        (["search"], "cells channels tasks ways shots queries repeats region-inputs size"),
        (["data", "check", "folder"], "ways shots queries"),
    ],
)
def test_integer_options_have_an_upper_bound(metabridge, command, options):
    for option in options.split():
        status, printed, errors = metabridge(*command, f"--{option}", 10**20)
        assert (status, printed, errors.count("\n")) == (2, "", 1)
        assert f": --{option} is {10**20}, " in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-size", 900_000], "--batch-size is 900000, but the images of such a step take"),
        (["--method", "rfs", "--ways", 10**6, "--model-option", "filters=100000"], "the network has more than"),
        (["--ways", 10**6], "--ways is 1000000, but split 'train' has"),
        (
            ["--training-ways", 10**6],
            "--training-ways is 1000000, but split 'train' has 709 classes. Use --training-ways 709",
        ),
        (
            ["--method", "maml", "--training-ways", 8],
            "--training-ways is 8, but the head of maml has only 5 outputs. Use --training-ways 5 or fewer",
        ),
        (["--shots", 10**6], "class '"),
    ],
)
def test_a_step_or_network_too_large_for_the_memory_is_refused(
    metabridge, glyphs, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.setattr("os.sysconf", lambda name: 2**15)  # 2^15 pages of 2^15 bytes: 1 GiB
    status, printed, errors = metabridge("train", *arguments, "--device", "cpu", "--out", tmp_path / "run")
    assert (status, printed) == (2, "")
    assert errors.splitlines()[-1].startswith(f"metabridge train: {message}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError(13, "Permission denied", "some/file"), "some/file cannot be used (Permission denied)."),
        (MemoryError(), "not enough memory. Use smaller images, networks or batches."),
    ],
)
def test_errors_of_the_system_end_with_a_message_of_one_line(metabridge, tmp_path, monkeypatch, error, message):
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr("metabridge.experiments.experiment.Experiment.run", refuse)
    assert metabridge("demo", "--out", tmp_path, "--device", "cpu") == (2, "", f"metabridge demo: {message}\n")


def test_an_unknown_device_is_refused_with_the_known_ones(metabridge):
    status, _, errors = metabridge("demo", "--device", "gpu")
    assert status == 2
    assert errors == "metabridge demo: --device is gpu, but must be auto, cpu or cuda.\n"
