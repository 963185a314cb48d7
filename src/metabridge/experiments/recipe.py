"""What each part of a better recipe gains: one classifier over mini-ImageNet's training classes, same images seen."""

from __future__ import annotations

from dataclasses import dataclass, replace

from metabridge.environments.image_tasks import LabelledImages
from metabridge.errors import InputError
from metabridge.experiments import beside
from metabridge.experiments.mini_imagenet_trainings import LOOKS, SHOTS, data_name, images_of, plans
from metabridge.experiments.result import Result, Row, UnportedExperiment, Work
from metabridge.experiments.training_runs import Record, recorded, trial
from metabridge.training import load
from metabridge.training.config import Plan
from metabridge.training.soft_targets import SoftTargets

STEPS = {"quick": 20, "paper": 12_000}
BASE = "muon"  # every other case changes one thing of it
# What changes, and for the student of a teacher the case that teaches.
CASES: dict[str, tuple[dict[str, object], str | None]] = {
    "sgd": ({"optimizer": "sgd"}, None),
    "muon": ({}, None),
    "smoothing": ({"soft_targets": SoftTargets(smoothing=0.1)}, None),
    "mixup": ({"soft_targets": SoftTargets(mixup=0.2)}, None),
    "mixup-strong": ({"soft_targets": SoftTargets(mixup=1.0)}, None),
    "average": ({"average": 0.999}, None),
    "distilled": ({"soft_targets": SoftTargets(distillation=0.5)}, "muon"),
    "distilled-alone": ({"soft_targets": SoftTargets(distillation=1.0)}, "muon"),
    "distilled-twice": ({"soft_targets": SoftTargets(distillation=0.5)}, "distilled"),
}


@dataclass(frozen=True)
class Outcome:
    """The result and the records it was made of."""

    result: Result
    records: dict[str, Record]


def run(work: Work) -> Outcome:
    """Train every case, or read what its training measured."""
    work.check_only(CASES)
    records: dict[str, Record] = {}
    images: LabelledImages | None = None
    for name, (_, teacher) in CASES.items():
        label, plan = _label(work, name), _plan(work, name)
        record = recorded(work, label, plan)
        if record is None and (not work.only or name in work.only):
            if teacher is not None and teacher not in records:
                raise InputError(f"{name} needs the trained run of {teacher}. Add {teacher} to --only.")
            tasks, looks = (2000, LOOKS[1:3]) if work.scale == "paper" else (40, LOOKS[1:2])
            taught = None if teacher is None else load(work.out / "runs" / _label(work, teacher), device=work.device)
            images = images or images_of(work)
            record = trial(work, label, plan, images, shots=SHOTS, tasks=tasks, looks=looks, teacher=taught)
        if record is not None:
            records[name] = record
    rows = tuple(row for name, record in records.items() for row in _rows(name, record))
    return Outcome(Result.of(work, "recipe", rows, records), records)


def _plan(work: Work, name: str) -> Plan:
    base = replace(plans(work.scale)["rfs"], optimizer="muon", iterations=STEPS[work.scale], seed=work.seed)
    return replace(base, validate_every=STEPS[work.scale] // 4, **CASES[name][0])  # type: ignore[arg-type]


def _rows(name: str, record: Record) -> list[Row]:
    rows = []
    for shots in SHOTS:
        test = record.chosen(shots)
        best = max(score.mean for score in record.scores if score.split == "validation" and score.shots == shots)
        rows.append(
            Row(
                f"{name}, {shots}-shot",
                "accuracy %",
                ours=100 * test.mean,
                ci95=100 * test.ci95,
                note=f"validation {100 * best:.2f} %; {record.minutes:.1f} minutes; {test.told()}",
            )
        )
    return rows


def _label(work: Work, name: str) -> str:
    return f"recipe-{data_name(work)}-{name}-{work.scale}-{work.seed}"


figure = beside.figure


EXPERIMENT = UnportedExperiment("recipe", run, figure, resumable=True)
