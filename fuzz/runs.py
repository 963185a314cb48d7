"""Readers of the files of runs, adapted models, searches and experiments."""

from __future__ import annotations

import fcntl
import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save

from fuzz import mutate
from fuzz.cases import Expected, Files, Hostile, Link, Node, Reader, lay_out
from fuzz.datasets import changer
from fuzz.images import run_command
from metabridge.environments import LabeledImages, Sinusoid
from metabridge.errors import InputError
from metabridge.experiments import ExperimentOptions
from metabridge.experiments.training_records import TrainingRecord, config_dict
from metabridge.files import LOCK_FILE, FolderLock
from metabridge.inference import FewShotClassifier
from metabridge.learners import method, parameters
from metabridge.learners.method import PRESETS
from metabridge.models import build, conv4, mlp
from metabridge.models.architecture import EDGES, OPERATORS, random_architecture
from metabridge.nas.proxies import ProxyScore
from metabridge.nas.pruning import CandidateScores, SearchLog
from metabridge.report.results import Machine, Result, Row
from metabridge.training import Model, checkpoint, fit, from_pretrained, load, save_pretrained
from metabridge.training.checkpoint import write_method
from metabridge.training.config import ImageTrainingConfig, TrainingConfig
from metabridge.training.head_selection import SplitAccuracy
from metabridge.training.trainer import Trainer

RUN_FILES = ("settings.json", "weights.safetensors", "state.safetensors", "metrics.jsonl")
SETTINGS = TrainingConfig(iterations=4, batch_size=2, validate_every=2, validate_tasks=2)


@contextmanager
def _counting_clock() -> Iterator[None]:
    """Replace the clock with a counter of its calls, so that files that contain times are reproducible."""
    with mock.patch("time.perf_counter", itertools.count().__next__):
        yield


def _read_back(folder: Path) -> Files:
    """Return the files of all runs in a folder."""
    files = [
        file
        for file in sorted(folder.rglob("*"))
        if file.is_file() and (file.name in RUN_FILES or file.name == "adapted.safetensors")
    ]
    return {
        file.relative_to(folder).as_posix(): (
            _with_sorted_metadata(file) if file.suffix == ".safetensors" else file.read_bytes()
        )
        for file in files
    }


def _with_sorted_metadata(file: Path) -> bytes:
    """Return the content of a safetensors file with sorted metadata, because its order is random."""
    header, values = checkpoint._split_header(file.read_bytes())
    content = json.loads(header[8:])
    content["__metadata__"] = dict(sorted(content["__metadata__"].items())) | {
        checkpoint.CHECKSUM: checkpoint._NO_CHECKSUM
    }
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    checksum = checkpoint._checksum(header, values, checkpoint._NO_CHECKSUM)
    blank, entry = checkpoint._checksum_entry(checkpoint._NO_CHECKSUM), checkpoint._checksum_entry(checksum)
    return header.replace(blank, entry, 1) + values


def _sinusoid_trainer(folder: Path) -> Trainer:
    net = mlp(1, 1, width=4)
    return Trainer(
        net, method("maml", steps=1), Sinusoid(), SETTINGS, validate=Sinusoid(), mode="loop", out=folder / "run"
    )


def _few_images() -> LabeledImages:
    return LabeledImages(
        images=torch.arange(12 * 256, dtype=torch.int64).view(12, 1, 16, 16).to(torch.uint8),
        labels=torch.arange(12) % 3,
        class_names=("a", "b", "c"),
        superclasses=torch.zeros(3, dtype=torch.int64),
        superclass_names=("all",),
        splits={"train": torch.arange(3)},
    )


def _image_run(folder: Path) -> None:
    tasks = _few_images().tasks("train", ways=2, shots=1, queries=1)
    net = conv4(1, 16, 2, filters=2, statistics="running")
    fit(net, method("mtl"), tasks, iterations=2, batch_size=2, out=folder / "run", progress=False)


def _runs(folder: Path) -> list[Files]:
    """Return the files of a finished and of an interrupted training run on sinusoids."""
    runs = list[Files]()
    for steps in (4, 2):
        lay_out(folder, {})
        with _counting_clock():
            trainer = _sinusoid_trainer(folder)
            for _ in range(steps):
                trainer.step()
            trainer.save()
        runs.append(_read_back(folder))
        trainer.close()
    return runs


def read_run(folder: Path) -> object:
    """Load a run for use."""
    run = load(folder / "run")
    return run.params, run.curve, run.seconds, run.settings, run.finished, write_method(run.method), run.net.recipe


def resume_run(folder: Path) -> object:
    """Resume a run on sinusoids without taking a step."""
    trainer = _sinusoid_trainer(folder)
    try:
        moments = trainer.optimizer.state_dict()["state"]
        random_states = {name: generator.get_state() for name, generator in trainer.generators.items()}
        progress = trainer.iteration, trainer.seconds, trainer.curve
        return trainer.params, moments, random_states, trainer.loss_sum, progress, trainer.best_weights
    finally:
        trainer.close()


def _change_tensors(name: str) -> Callable[[Files, random.Random, Sequence[Files]], tuple[Files, Expected]]:
    """Return a function that changes the content of a safetensors file, or damages its bytes.

    A reader must not accept a damaged file as different data.
    """

    def change(files: Files, rng: random.Random, all_files: Sequence[Files]) -> tuple[Files, Expected]:
        content, other = files[name], rng.choice(all_files)[name]
        assert isinstance(content, bytes)
        assert isinstance(other, bytes)
        if rng.random() < 0.5:
            return {**files, name: mutate.change_safetensors(content, rng)}, "any"
        return {**files, name: mutate.damage(content, rng, [other])}, "same"

    return change


def _with_tensors(files: Files, name: str, edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Files:
    content = files[name]
    assert isinstance(content, bytes)
    size = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + size])["__metadata__"]
    return {**files, name: save(edit(load_tensors(content)), metadata)}


def _hostile_tensors(name: str) -> Callable[[Sequence[Files]], list[Hostile]]:
    def hostile(inputs: Sequence[Files]) -> list[Hostile]:
        files = inputs[0]
        content = files[name]
        assert isinstance(content, bytes)
        wrong_sizes = [(size).to_bytes(8, "little") + content[8:] for size in (0, 1, 2**30, 2**63, 2**64 - 1)]
        with_header = lambda value: (lambda text: len(text).to_bytes(8, "little") + text)(json.dumps(value).encode())  # noqa: E731
        huge = {"params.head.weight": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}
        invalid_contents = [
            *wrong_sizes,
            b"",
            with_header({}),
            with_header([]),
            with_header(huge),
            with_header({"__metadata__": {"metabridge": "[" * mutate.NESTING_DEPTH}}),
            with_header({"__metadata__": {"metabridge": "7"}}),
            with_header({"__metadata__": {"metabridge": 7}}),
            with_header(
                {f"t{number}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for number in range(50_000)}
            ),
        ]
        edits: list[Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = [
            lambda tensors: {key: value.double() for key, value in tensors.items()},
            lambda tensors: {key: value.to(torch.uint8) for key, value in tensors.items()},
            lambda tensors: {key: value.flatten() for key, value in tensors.items()},
            lambda tensors: {key: value[:0].clone() if value.ndim else value for key, value in tensors.items()},
            lambda tensors: {},
            lambda tensors: dict(list(tensors.items())[1:]),
            lambda tensors: {f"{key}x": value for key, value in tensors.items()},
            lambda tensors: {key.replace("moments.0", "moments.99"): value for key, value in tensors.items()},
            lambda tensors: {key.replace("moments.0", "moments.x"): value for key, value in tensors.items()},
        ]
        return [
            *(Hostile({**files, name: invalid}, "refused") for invalid in invalid_contents),
            *(Hostile(_with_tensors(files, name, edit), "any") for edit in edits),
        ]

    return hostile


def _with_setting(files: Files, key: str, value: object) -> Files:
    name = "run/settings.json"
    content = files[name]
    assert isinstance(content, bytes)
    return {**files, name: json.dumps(json.loads(content) | {key: value}).encode()}


MODELS: tuple[dict[str, Any], ...] = (  # too large, with an unsafe path, or invalid
    {"model": "mlp", "inputs": 1, "outputs": 1, "width": 10**9},
    {"model": "mlp", "inputs": 1, "outputs": 1, "depth": 10**9},
    {"model": "mlp", "inputs": 10**9, "outputs": 10**9},
    {"model": "conv4", "channels": 1, "size": 28, "outputs": 5, "filters": 10**6},
    {"model": "conv4", "channels": 1, "size": 10**9, "outputs": 5},
    {"model": "conv4", "channels": 1, "size": 28, "outputs": 10**9},
    {"model": "resnet12", "channels": 3, "size": 84, "outputs": 5, "widths": [10**6] * 4},
    {"model": "wide", "inputs": 10**9, "outputs": 1},
    {"model": "timm:../../x", "outputs": 5},
    {"model": "timm", "name": "hf-hub:x/y", "outputs": 5, "pretrained": True},
    {"model": "hf", "name": "../../outside", "outputs": 5},
    {"model": "os:getcwd"},
    {"model": "function_network", "name": "os:getcwd"},
    {"model": "/dev/zero.json"},
    {"model": "../../outside/secret.json"},
    {"model": "nowhere.json"},
    {"model": 7},
    {"model": None},
    {},
)


def _hostile_settings(inputs: Sequence[Files]) -> list[Hostile]:
    valid_files = inputs[0]
    texts = [
        b"",
        b"[" * mutate.NESTING_DEPTH,
        b"\xff",
        b"null",
        b"7",
        b"[]",
        b"{}",
        b'{"version": 1}',
        b'{"version": ' + b"9" * 5000 + b"}",
    ]
    texts.append(b'{"version": "\\u001b[31m"}')
    return [
        *(Hostile(_with_setting(valid_files, "model", model), "refused") for model in MODELS),
        *(Hostile({**valid_files, "run/settings.json": text}, "refused") for text in texts),
        Hostile({**valid_files, "run/settings.json": Node("pipe")}, "refused"),
        Hostile({**valid_files, "run/weights.safetensors": Link("/dev/zero")}, "refused"),
    ]


def _methods(folder: Path) -> list[Files]:
    """Return the files of a run of every method that supports regression."""
    runs = list[Files]()
    for name in PRESETS:
        lay_out(folder, {})
        with _counting_clock(), suppress(InputError):  # raised by methods that need class labels
            net, tasks = mlp(1, 1, width=4), Sinusoid()
            fit(net, method(name), tasks, iterations=1, batch_size=1, out=folder / "run", progress=False)
            runs.append(_read_back(folder))
    return runs


def change_settings(key: str | None) -> Callable[[Files, random.Random, Sequence[Files]], tuple[Files, Expected]]:
    """Return a function that changes one value in the settings or, if `key` is None, any value or raw bytes."""

    def change(files: Files, rng: random.Random, all_files: Sequence[Files]) -> tuple[Files, Expected]:
        name = "run/settings.json"
        content, other = files[name], rng.choice(all_files)[name]
        assert isinstance(content, bytes)
        assert isinstance(other, bytes)
        if key is not None:
            # The changed JSON may be invalid, so it is inserted as text.
            changed = mutate.change_json(json.dumps(json.loads(content)[key]).encode(), rng)
            marked = json.dumps(json.loads(content) | {key: "@@"}).encode().replace(b'"@@"', changed)
            return {**files, name: marked}, "any"
        if rng.random() < 0.5:
            return {**files, name: mutate.change_json(content, rng)}, "any"
        return {**files, name: mutate.damage(content, rng, [other])}, "any"

    return change


def _adapted(folder: Path) -> list[Files]:
    runs, images = list[Files](), _few_images()
    for head in (None, "logistic", "svm"):
        lay_out(folder, {})
        with _counting_clock():
            _image_run(folder)
        support_images, labels = (
            images.images[:8, 0].numpy(),
            [images.class_names[label] for label in images.labels[:8].tolist()],
        )
        # Without a test-time head, the run classifies only two classes.
        rows = [row for row, label in enumerate(labels) if head is not None or label != "c"]
        classifier = FewShotClassifier(load(folder / "run"), head=head)
        classifier.fit(support_images[rows], [labels[row] for row in rows]).save(folder / "run")
        runs.append({"run/adapted.safetensors": _with_sorted_metadata(folder / "run" / "adapted.safetensors")})
    return runs


def use_adapted(folder: Path) -> object:
    """Load an adapted model and predict with it."""
    classifier = FewShotClassifier.load(folder / "run")
    images = np.arange(3 * 256).astype(np.uint8).reshape(3, 16, 16)
    return classifier.classes_, classifier.predict_proba(images), classifier.predict(images).tolist()


def _model_folders(folder: Path) -> list[Files]:
    """Return folders of models in the layout of the Hugging Face hub."""
    folders = list[Files]()
    for name, half in (("r2d2", False), ("frozen", True)):
        lay_out(folder, {})
        learner, net = method(name), conv4(1, 16, 2, filters=2, statistics="running")
        save_pretrained(Model(learner, net, parameters(learner, net)), folder / "model", half=half)
        folders.append({f"model/{file.name}": file.read_bytes() for file in sorted((folder / "model").iterdir())})
    return folders


def use_model_folder(folder: Path) -> object:
    """Load a model in the layout of the Hugging Face hub, and compute the features of an image."""
    model = from_pretrained(folder / "model")
    return model.params, write_method(model.method), model.net.recipe, model.net.decode_options


def lock_again(folder: Path) -> object:
    """Lock a folder that is already locked, and whose lock file names the holder."""
    with (folder / "run" / LOCK_FILE).open("rb") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        return FolderLock(folder / "run")


def _hostile_model_folders(inputs: Sequence[Files]) -> list[Hostile]:
    files = inputs[0]
    content = files["model/config.json"]
    assert isinstance(content, bytes)
    config = json.loads(content)
    changes: list[dict[str, Any]] = [
        *(
            {"model": model} for model in MODELS if "timm" not in str(model)
        ),  # importing torchvision loads a compiled library
        {"model": {"model": "function", "name": "os:system"}},
        {"decode_options": {"size": 10**9, "channels": 3}},
        {"decode_options": {"size": 16, "channels": 1, "invert": "x" * 10**6}},
        {"method": {"solver": "os.system"}},
        {"format_version": 10**400},
    ]
    texts = [*INVALID_TEXTS, *(json.dumps(config | change).encode() for change in changes)]
    return [
        *(Hostile({**files, "model/config.json": text}, "refused") for text in texts),
        Hostile({**files, "model/config.json": Node("pipe")}, "refused"),
        Hostile({**files, "model/model.safetensors": Link("/dev/zero")}, "refused"),
    ]


def _hostile_locks(inputs: Sequence[Files]) -> list[Hostile]:
    holder = {"pid": 1, "host": "abacus", "since": "today", "command": "metabridge train"}
    bad_values: tuple[Any, ...] = ("a\nb", "\x1b[31m", [], None, 10**400)
    texts = [*INVALID_TEXTS, *(json.dumps(holder | {key: value}).encode() for key in holder for value in bad_values)]
    return [Hostile({f"run/{LOCK_FILE}": text}, "refused") for text in (*texts, json.dumps(holder).encode())]


def change_lock(files: Files, rng: random.Random, all_files: Sequence[Files]) -> tuple[Files, Expected]:
    """Change the content of a lock file; the folder stays locked whatever it says."""
    name, holder = (
        f"run/{LOCK_FILE}",
        json.dumps({"pid": 1, "host": "abacus", "since": "today", "command": "train"}).encode(),
    )
    return {name: rng.choice((mutate.change_json, mutate.damage))(holder, rng)}, "refused"


LOG_SETTINGS = {"kernel": "maml", "cells": 3, "channels": 2, "seed": 0}


def read_log(folder: Path) -> object:
    """Resume a search."""
    search_log = SearchLog(folder / "run" / "search.jsonl", LOG_SETTINGS)
    return search_log.scores, search_log.seconds, sorted(search_log._finished_rounds)


def _logs(folder: Path) -> list[Files]:
    (folder / "run").mkdir()
    with _counting_clock():
        search_log = SearchLog(folder / "run" / "search.jsonl", LOG_SETTINGS)
        for round_index, repeat in itertools.product(range(2), range(2)):
            for removal in (None, ("normal", repeat, OPERATORS[repeat])):
                regions = ProxyScore(float("nan"), "it is singular") if repeat else ProxyScore(3.0)
                search_log.add_scores(round_index, repeat, removal, CandidateScores(ProxyScore(1.5 + repeat), regions))
            search_log.add_round(round_index, [("reduction", len(EDGES) - 1, "skip")])
    content = (folder / "run" / "search.jsonl").read_bytes()
    return [{"run/search.jsonl": content}, {"run/search.jsonl": content[: len(content) // 2]}]


def _hostile_logs(inputs: Sequence[Files]) -> list[Hostile]:
    settings_line = json.dumps({"settings": LOG_SETTINGS})
    lines = [
        "[" * mutate.NESTING_DEPTH,
        "7",
        "null",
        "[]",
        '{"round": 1e999}',
        '{"seconds": "x"}',
        '{"seconds": 1e999}',
        "\x00",
        "{}",
    ]
    lines += ['{"round": 0, "repeat": 0, "cell": [1], "edge": {}, "operator": null}', '{"round": [], "gone": 3}']
    lines += ['{"round": 0, "repeat": 0, "cell": "normal", "edge": [], "operator": "skip", "condition": 1}']
    lines += ['{"round": 0, "repeat": 0, "cell": null, "condition": "x", "regions": {}, "condition_trouble": 7}']
    lines += ['{"round": 0, "repeat": 0, "cell": null, "condition": ' + "9" * 400 + "}"]
    first_lines = [
        "",
        "7",
        "[]",
        "{}",
        '{"settings": 7}',
        '{"settings": [["kernel", "maml"]]}',
        '{"settings": {}}',
        "[" * mutate.NESTING_DEPTH,
    ]
    return [
        *(Hostile({"run/search.jsonl": f"{settings_line}\n{line}\n".encode()}) for line in lines),
        *(Hostile({"run/search.jsonl": f'{line}\n{{"round": 0, "gone": []}}\n'.encode()}) for line in first_lines),
    ]


def _architectures(folder: Path) -> list[Files]:
    generator = torch.Generator().manual_seed(0)
    return [{"run/architecture.json": random_architecture(generator).to_json().encode()} for _ in range(2)]


def use_architecture(folder: Path) -> object:
    """Build the network of an architecture."""
    net = build(str(folder / "run" / "architecture.json"), image_channels=1, size=8, outputs=2, cells=3, channels=2)
    return net.recipe


MACHINE = Machine("abacus", "0", "0", None)
CONFIG = config_dict(ImageTrainingConfig("mtl"))


def read_record(folder: Path) -> object:
    """Read the record of a training run."""
    return TrainingRecord.load(ExperimentOptions("quick", out=folder), "name", CONFIG)


def _records(folder: Path) -> list[Files]:
    score = SplitAccuracy("test", 1, 0.5, 0.01, 10, 0.1)
    curve = ({"minutes": 1.0, "iteration": 2.0, "accuracy": 0.5, "ci95": 0.1},)
    record = TrainingRecord("name", CONFIG, MACHINE, 1.0, "glyphs", 2, 3, curve, (score,), 1.0)
    return [{"records/name.json": json.dumps(asdict(record)).encode()}]


def _results(folder: Path) -> list[Files]:
    rows = (Row("MAML", "accuracy %", ours=48.9, ci95=0.4, published=48.7, agrees=True),)
    result = Result("name", "quick", 0, {"a": 1}, MACHINE, 1.0, rows)
    return [{"name.json": json.dumps(asdict(result)).encode()}]


INVALID_TEXTS = [
    b"",
    b"[" * mutate.NESTING_DEPTH,
    b"\xff",
    b"null",
    b"7",
    b"[]",
    b"{}",
    b'{"a": 1, "a": 2}',
    b'{"normal": [], "reduction": []}',
    b'"' + b"x" * 10**6 + b'"',
]
COMMAND = ("train", "--data", "nowhere", "--out", "run", "--method", "maml")
OPTIONS = (
    *(["--option", option] for option in ("steps=5", "lr=0.1", "rates=fixed", "outer=exact", "adapts=all")),
    *(["--model-option", option] for option in ("filters=4", "outputs=5", "size=8")),
    *(["--ways", "5"], ["--shots", "1"], ["--queries", "1"], ["--batch-size", "1"], ["--iterations", "1"]),
    ["--lr", "0.1"],
    *(
        ["--seed", "1"],
        ["--size", "28"],
        ["--min-images", "2"],
        ["--patience", "3"],
        ["--minutes", "1"],
        ["--schedule", "step"],
    ),
    *(
        ["--model", "mlp"],
        ["--optimizer", "sgd"],
        ["--precision", "bfloat16"],
        ["--weight-decay", "0.1"],
        ["--validate-every", "1"],
    ),
)


def run_train(folder: Path) -> object:
    """Run `metabridge train` with a missing data folder, so that options are checked but nothing is trained."""
    words = json.loads((folder / "words.json").read_bytes())
    return run_command(*COMMAND, *words)


def change_options(files: Files, rng: random.Random, all_files: Sequence[Files]) -> tuple[Files, Expected]:
    """Change the values of a command's options."""
    words = list[str]()
    for option in rng.sample(OPTIONS, rng.choice((1, 1, 2, 4))):
        name, value = option
        key, equals, __ = value.partition("=")
        other = rng.choice(mutate.VALUES)
        text = rng.choice((str(other), json.dumps(other)))
        words += [name, f"{key}={text}" if equals else text.replace(".json", "")]  # an existing path would be read
    return {"words.json": json.dumps([word.replace("\0", "").replace("\ud800", "") for word in words]).encode()}, "any"


JSON: dict[str, mutate.Change] = {".json": mutate.change_json, ".jsonl": mutate.change_json_lines}


def _texts(name: str) -> Callable[[Sequence[Files]], list[Hostile]]:
    """Return a function that returns hand-written inputs: the file `name` with each of `INVALID_TEXTS`."""
    return lambda inputs: [Hostile({name: text}, "refused") for text in INVALID_TEXTS]


RUN_READERS = (
    Reader("run-settings", (read_run, resume_run), _runs, change_settings(None), _hostile_settings),
    Reader("run-model", (read_run,), _runs, change_settings("model")),
    Reader("run-method", (read_run,), _methods, change_settings("method")),
    Reader(
        "run-weights",
        (read_run, resume_run),
        lambda folder: _runs(folder)[:1],
        _change_tensors("run/weights.safetensors"),
        _hostile_tensors("run/weights.safetensors"),
    ),
    Reader(
        "run-state",
        (read_run, resume_run),
        lambda folder: _runs(folder)[:1],
        _change_tensors("run/state.safetensors"),
        _hostile_tensors("run/state.safetensors"),
    ),
    Reader(
        "adapted-model",
        (use_adapted,),
        _adapted,
        _change_tensors("run/adapted.safetensors"),
        _hostile_tensors("run/adapted.safetensors"),
    ),
    Reader(
        "model-folder",
        (use_model_folder,),
        _model_folders,
        changer({".json": mutate.change_json, ".safetensors": mutate.change_safetensors}, 0.6, prefix="model/"),
        _hostile_model_folders,
    ),
    Reader("search-log", (read_log,), _logs, changer(JSON, 0.7), _hostile_logs),
    Reader("folder-lock", (lock_again,), lambda folder: [], change_lock, _hostile_locks),
    Reader("architecture", (use_architecture,), _architectures, changer(JSON, 0.7), _texts("run/architecture.json")),
    Reader("record", (read_record,), _records, changer(JSON, 0.7), _texts("records/name.json")),
    Reader(
        "result",
        (lambda folder: Result.read(folder / "name.json"),),
        _results,
        changer(JSON, 0.7),
        _texts("name.json"),
    ),
    Reader("command-line", (run_train,), lambda folder: [], change_options),
)
