"""Options of a command in a YAML or JSON file (`--config`)."""

from __future__ import annotations

import json
import sys

import pytest

from metabridge import InputError
from metabridge.cli import app
from metabridge.cli.config_file import MAX_BYTES, read_config_file
from small_runs import TRAIN

YAML = """\
# options of a small training run
method: maml
batch-size: 2
iterations: 4
validate_every: 2   # underscores and hyphens are the same
validate-tasks: 4
queries: 2
lr: 1e-3            # YAML 1.1 reads this as text
option: {steps: 2, lr: 0.3}
model-option:
  - filters=6
rotated-classes: true
size: null
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str | bytes | dict, name: str = "settings.yaml"):
        file = tmp_path / name
        content = json.dumps(text) if isinstance(text, dict) else text
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return file

    return write


def settings(run):
    return json.loads((run / "settings.json").read_bytes())


def test_a_file_gives_the_same_run_as_the_options(metabridge, write, tmp_path):
    command = ("train", "--device", "cpu", "--minutes", 0)
    assert metabridge(*command, "--config", write(YAML), "--out", tmp_path / "a")[0] == 0
    options = ("--method", "maml", "--option", "steps=2", "--option", "lr=0.3", "--lr", "1e-3", "--rotated-classes")
    assert metabridge(*TRAIN, *options, "--minutes", 0, "--out", tmp_path / "b")[0] == 0
    assert settings(tmp_path / "a") == settings(tmp_path / "b")
    assert settings(tmp_path / "a")["method"]["inner"]["steps"] == 2


def test_options_on_the_command_line_take_precedence_in_any_order(metabridge, write, tmp_path):
    file = write(YAML)
    for out, words in (("a", ("--batch-size", 3, "--config", file)), ("b", ("--config", file, "--batch-size", 3))):
        options = ("--option", "steps=1", "--minutes", 0, "--out", tmp_path / out)
        assert metabridge("train", "--device", "cpu", *words, *options)[0] == 0
        run = settings(tmp_path / out)
        assert run["training"]["batch_size"] == 3
        # a repeatable option on the command line replaces the one in the file
        assert (run["method"]["inner"]["steps"], run["method"]["inner"]["lr"]) == (1, 0.01)


def test_every_kind_of_option_can_be_in_json(metabridge, write, glyphs, tmp_path):
    values = {"kernel": ["ntk"], "model": "conv4", "tasks": 1, "ways": 2, "repeats": 1, "region_inputs": 20}
    file = write(values | {"json": str(tmp_path / "scores.json"), "adaptation-time": float("inf")}, "score.json")
    assert metabridge("score", "--config", file)[0] == 0
    names = [row["proxy"] for row in json.loads((tmp_path / "scores.json").read_bytes())]
    assert names == ["condition number, NTK", "linear regions"]


def test_a_comma_separated_option_can_be_a_list(metabridge, write, glyphs, tmp_path):
    file = write({"operators": ["skip", "conv_3x3"], "kernel": "random", "out": str(tmp_path / "search")}, "s.json")
    assert metabridge("search", "--config", file)[0] == 0
    log = json.loads((tmp_path / "search" / "search.jsonl").read_text().splitlines()[0])
    assert log["settings"]["operators"] == ["skip", "conv_3x3"]


def test_every_command_has_the_option(metabridge):
    groups = [group.typer_instance.registered_commands for group in app.registered_groups]
    names = [(command.callback.__name__,) for command in app.registered_commands]
    for words in [*names, *(("data", command.callback.__name__) for group in groups for command in group)]:
        status, printed, _ = metabridge(*words, "--help")
        assert (status, "--config FILE YAML or JSON" in " ".join(printed.replace("│", "").split())) == (0, True)


def test_text_of_a_method_option_stays_text(metabridge, write, tmp_path):
    file = write("method: maml\noption: {steps: '3'}\n")
    _, _, errors = metabridge("train", "--config", file, "--out", tmp_path / "run")
    assert "steps is '3', but must be an integer" in errors


@pytest.mark.parametrize(
    ("command", "text", "message"),
    [
        ("train", "batchsize: 8", "'batchsize' is not an option of metabridge train. Use batch-size."),
        ("train", "zzz: 8", "'zzz' is not an option of metabridge train. See metabridge train --help for the options."),
        ("train", "config: other.yaml", "'config' is not an option of metabridge train."),
        ("train", "batch-size: 8\nbatch_size: 9", "the option batch-size is there twice. Remove one of them."),
        ("train", "batch-size: 8\nbatch-size: 9", "the key 'batch-size' is there twice. Remove one of them."),
        ("train", "batch-size: many", "batch-size is many, but must be an integer of at least 1."),
        ("train", "batch-size: 2.5", "batch-size is 2.5, but must be an integer of at least 1."),
        ("train", "batch-size: true", "batch-size is True, but must be text or a number."),
        ("train", "batch-size: [8]", "batch-size is [8], but must be text or a number."),
        ("train", "batch-size: {a: 8}", "batch-size is {'a': 8}, but must be text or a number."),
        ("train", "batch-size: 0", "batch-size is 0, but must be an integer of at least 1."),
        ("train", f"seed: {10**20}", f"seed is {10**20}, which is too large."),
        ("train", "lr: fast", "lr is fast, but must be a number."),
        ("train", "minutes: .nan", "minutes is nan, but must be a number of at least 0."),
        ("train", "data: 2020-01-01", "data is datetime.date(2020, 1, 1), but must be text or a number. Put text in"),
        ("train", "rotated-classes: 1", "rotated-classes is 1, but must be true or false."),
        ("train", "option: [{steps: 5}]", "option is {'steps': 5}, but must be text or a number."),
        ("train", "option: {a: 2020-01-01}", "option a is datetime.date(2020, 1, 1), but must be a value that JSON"),
        ("score", "kernel: [mamll]", "kernel is mamll, but must be maml, anil or ntk."),
        ("demo", "device: abacus", "device is abacus, but must be auto, cpu or cuda."),
    ],
)
def test_an_unknown_key_or_a_wrong_value_is_named_with_its_file(metabridge, write, command, text, message):
    file = write(text)
    status, printed, errors = metabridge(command, "--config", file)
    assert (status, printed, errors.count("\n")) == (2, "", 1)
    assert errors.startswith(f"metabridge {command}: {file}: {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("!!python/object/apply:os.system ['touch {}']", "it contains the tag tag:yaml.org,2002:python/object/apply"),
        ("data: !!python/name:os.system", "it contains the tag tag:yaml.org,2002:python/name:os.system."),
        ("data: !!binary aGk=", "it contains the tag tag:yaml.org,2002:binary. Remove it"),
        ("a: &a [x, x]\nb: [*a, *a]", "it contains the alias *a. Write the value again instead."),
        ("a: " + "[" * 30 + "]" * 30, "it has more than 16 levels of nesting."),
        ("- 1\n- 2", "must contain options and their values, such as batch-size: 8."),
        ("just text", "must contain options and their values, such as batch-size: 8."),
        ("a: [", "is not a valid YAML file (while parsing a flow"),
        ("a: 1\n---\nb: 2", "is not a valid YAML file (expected a single document"),
        ("{[1]: 2}", "is not a valid YAML file"),
        ("<<: {a: 1}", "is not a valid YAML file"),
        (b"\xff\xfe", "is not a valid YAML file"),
        (f"a: {'9' * 5000}", "is not a valid YAML file"),
        ("a: [" + "1:" * 5000 + "1]", "is not a valid YAML file (Exceeds the limit"),
        (b"#" * (MAX_BYTES + 1), f"which is larger than {MAX_BYTES // 1024} KiB. Use a smaller file."),
    ],
)
def test_yaml_that_is_not_plain_options_is_refused_and_runs_no_code(write, tmp_path, text, message):
    if isinstance(text, str):
        text = text.replace("{}", str(tmp_path / "executed"))
    with pytest.raises(InputError) as caught:
        read_config_file(write(text))
    assert message in str(caught.value)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "null x", "[" * 10_000, '{"a": 1, "a": 2}'])
def test_json_that_is_not_an_object_is_refused(write, text):
    with pytest.raises(InputError, match=r"settings\.json"):
        read_config_file(write(text, "settings.json"))


def test_an_empty_yaml_file_has_no_options(write):
    assert read_config_file(write("# nothing\n")) == {}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("settings.toml", "its name must end in .yaml, .yml or .json."),
        ("nowhere.yaml", "which cannot be read (No such file or directory)."),
        ("folder.yaml", "which cannot be read (Is a directory)."),
    ],
)
def test_a_file_that_cannot_be_read_is_named(metabridge, tmp_path, name, message):
    (tmp_path / "folder.yaml").mkdir()
    file = tmp_path / name
    status, _, errors = metabridge("methods", "--config", file)
    assert (status, errors) == (
        2,
        f"metabridge methods: --config is {file}, {'but ' if '.toml' in name else ''}{message}\n",
    )


def test_without_pyyaml_json_works_and_yaml_names_the_package(metabridge, write, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    _, _, errors = metabridge("methods", "--config", write("json: x.json"))
    assert "reading YAML needs PyYAML. Install it with pip install 'metabridge[yaml]', or use a JSON file." in errors
    assert metabridge("methods", "--config", write({"json": "-"}, "settings.json"))[0] == 0
