"""Comparison of optimizers, soft targets and weight averaging, for a classifier of all mini-ImageNet training classes.

No paper has published such numbers. Every case changes some options of the case "muon".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial

from metabridge.errors import InputError
from metabridge.experiments.experiment import ExperimentOptions, TrainingExperiment
from metabridge.experiments.mini_imagenet_training_runs import (
    EVALUATIONS,
    SHOTS,
    VIEWS,
    configs,
    load_images,
)
from metabridge.experiments.training_records import TrainingRecord, train_or_load
from metabridge.report.results import Row
from metabridge.training import Model, load
from metabridge.training.config import ImageTrainingConfig, SoftTargets
from metabridge.training.head_selection import best_in_validation

STEPS = {"quick": 20, "paper": 12_000}
TEST_VIEWS = {"quick": VIEWS[1:2], "paper": VIEWS[1:3]}
# For each case, the options that differ from "muon", and the case whose network is the teacher in distillation.
CASES: dict[str, tuple[dict[str, object], str | None]] = {
    "sgd": ({"optimizer": "sgd"}, None),
    "muon": ({}, None),
    "smoothing": ({"soft_targets": SoftTargets(smoothing=0.1)}, None),
    "mixup": ({"soft_targets": SoftTargets(mixup=0.2)}, None),
    "mixup-strong": ({"soft_targets": SoftTargets(mixup=1.0)}, None),
    "average": ({"ema_decay": 0.999}, None),
    "distilled": ({"soft_targets": SoftTargets(distillation=0.5)}, "muon"),
    "distilled-alone": ({"soft_targets": SoftTargets(distillation=1.0)}, "muon"),
    "distilled-twice": ({"soft_targets": SoftTargets(distillation=0.5)}, "distilled"),
}


def measure(options: ExperimentOptions) -> dict[str, TrainingRecord]:
    """Return the records of the finished cases, after training those that `options.only` selects."""
    options.check_selected_names(CASES)
    images = cache(lambda: load_images(options))
    evaluation = replace(EVALUATIONS[options.scale], views=TEST_VIEWS[options.scale])
    records: dict[str, TrainingRecord] = {}

    def load_teacher(teacher: str, student: str) -> Model:
        if teacher not in records:
            raise InputError(f"{student} needs the trained run of {teacher}. Add {teacher} to --only.")
        return load(options.out / "runs" / record_name(options, teacher), device=options.device)

    for name, (changes, teacher) in CASES.items():
        config = replace(base_config(options), **changes)  # type: ignore[arg-type]
        teacher_loader = None if teacher is None else partial(load_teacher, teacher, name)
        record = train_or_load(options, name, record_name(options, name), config, images, evaluation, teacher_loader)
        if record is not None:
            records[name] = record
    return records


def base_config(options: ExperimentOptions) -> ImageTrainingConfig:
    """Return the training configuration of the case "muon"."""
    steps = STEPS[options.scale]
    rfs = configs(options.scale)["rfs"]
    return replace(rfs, optimizer="muon", iterations=steps, validate_every=steps // 4, seed=options.seed)


def record_name(options: ExperimentOptions, name: str) -> str:
    """Return the name of the record of a case, which is also the name of the run's folder."""
    return f"recipe-{options.data_name('mini-imagenet')}-{name}-{options.scale}-{options.seed}"


def rows(records: Mapping[str, TrainingRecord], _: ExperimentOptions) -> list[Row]:
    """Return the accuracies of every case."""
    rows = []
    for name, record in records.items():
        for shots in SHOTS:
            test, validation = record.selected_accuracy(shots), best_in_validation(record.scores, shots)
            note = f"validation {100 * validation.mean:.2f} %; {record.minutes:.1f} minutes; {test}"
            ours, ci95 = 100 * test.mean, 100 * test.ci95
            rows.append(Row(f"{name}, {shots}-shot", "accuracy %", ours=ours, ci95=ci95, note=note))
    return rows


EXPERIMENT = TrainingExperiment("recipe", measure, rows)
