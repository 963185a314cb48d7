"""Training runs on easy and hard tasks, for tables 1 and 2 of Collins et al. 2022 and for `diagnose-images`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from metabridge.environments.environment import Environment
from metabridge.environments.image_tasks import LabeledImages
from metabridge.experiments.experiment import ExperimentOptions
from metabridge.experiments.records import Record, as_json, image_description, run_folder
from metabridge.learners.method import method
from metabridge.models import conv4
from metabridge.report.results import Machine, Row
from metabridge.training import Run, Trainer, TrainingConfig, evaluate, train_interleaved
from metabridge.training.interleaved import concurrent_runs

TASK_KINDS = ("easy train", "hard train", "easy test", "hard test")  # in the order of the published tables


@dataclass(frozen=True)
class NetTraining:
    """How the conv4 network is trained and tested (Collins et al. 2022, app. C.4 and C.5)."""

    method: str
    lr: float
    iterations: int
    batch_size: int
    test_tasks: int  # number of each kind
    filters: int = 64
    steps: int = 1  # adaptation steps; for NAL at test time only
    inner_lr: float = 0.1
    seed: int = 0

    def stored(self) -> dict[str, Any]:
        """Return the fields with the keys that they have in records."""
        keys = {"batch_size": "tasks", "test_tasks": "judged"}
        return {keys.get(key, key): value for key, value in asdict(self).items()}


@dataclass(frozen=True)
class Accuracy:
    """The mean accuracy over tasks and the half-width of its 95 % interval."""

    mean: float
    ci95: float
    tasks: int

    @classmethod
    def pool(cls, scores: Sequence[Accuracy]) -> Accuracy:
        """Return the mean of several accuracies. The interval accounts only for the sampling of tasks.

        >>> Accuracy.pool([Accuracy(0.5, 0.03, 100), Accuracy(0.7, 0.04, 100)])
        Accuracy(mean=0.6, ci95=0.025, tasks=200)
        """
        mean = sum(score.mean for score in scores) / len(scores)
        ci95 = math.hypot(*(score.ci95 for score in scores)) / len(scores)
        return cls(mean, ci95, sum(score.tasks for score in scores))


@dataclass(frozen=True)
class AccuracyRecord(Record):
    """The accuracies of one trained network by kind of task or by alphabet."""

    scores: dict[str, Accuracy]

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> AccuracyRecord:
        """Return the record with these fields, as read from JSON."""
        return cls(**{**stored, "scores": {kind: Accuracy(**score) for kind, score in stored["scores"].items()}})


@dataclass(frozen=True, eq=False)
class PlannedTraining:
    """A training run that an experiment needs.

    Args:
        part: Name of the run for --only.
        training: How to train.
        tasks: Training tasks.
        test_tasks: Test tasks by kind.
        description: The settings of the tasks, for the record.
    """

    part: str
    training: NetTraining
    tasks: Environment
    test_tasks: Mapping[str, Environment]
    description: Mapping[str, object]

    @property
    def label(self) -> str:
        """The name in progress messages."""
        return f"{self.part}, seed {self.training.seed}"

    def record(self, options: ExperimentOptions, experiment: str, images: LabeledImages) -> AccuracyRecord:
        """Return the record before training: its name, and everything that the run depends on."""
        name = f"{experiment}-{self.part}-{options.scale}-{self.training.seed}"
        plan = as_json({"images": image_description(images), **self.description, **self.training.stored()})
        return AccuracyRecord(name, plan, Machine.current(options.device), 0.0, {})

    def trainer(self, options: ExperimentOptions, record: AccuracyRecord, images: LabeledImages) -> Trainer:
        """Return the trainer of a new network, or of the network in the folder of the record's run."""
        training, (channels, size) = self.training, images.images.shape[1:3]
        config = TrainingConfig(
            iterations=training.iterations, batch_size=training.batch_size, lr=training.lr, seed=training.seed
        )
        return Trainer(
            conv4(channels, size, self.tasks.outputs, filters=training.filters, seed=training.seed),
            method(training.method, steps=training.steps, lr=training.inner_lr),
            self.tasks,
            config,
            device=options.device,
            out=run_folder(options, record.name, record.plan),
        )

    def test(self, run: Run) -> dict[str, Accuracy]:
        """Return the accuracy on each kind of task."""
        scores = {
            kind: evaluate(run, tasks, tasks=self.training.test_tasks, seed=self.training.seed)
            for kind, tasks in self.test_tasks.items()
        }
        return {kind: Accuracy(score.mean, score.ci95, score.tasks) for kind, score in scores.items()}


def train_all(
    options: ExperimentOptions, experiment: str, images: LabeledImages, planned: Sequence[PlannedTraining]
) -> list[AccuracyRecord | None]:
    """Return the record of each training run.

    If a run has no record and `only` selects it, train and test now. The record is None if the run is not selected or
    is not finished within the time limit, which applies to all runs together.
    """
    untrained = {training.label: training.record(options, experiment, images) for training in planned}
    records = {label: AccuracyRecord.load(options, record.name, record.plan) for label, record in untrained.items()}
    missing = {
        training.label: training
        for training in planned
        if records[training.label] is None and options.includes(training.part)
    }
    start = {label: partial(training.trainer, options, untrained[label], images) for label, training in missing.items()}
    at_once = concurrent_runs(options.device)
    for label, run in train_interleaved(start, at_once=at_once, minutes=options.minutes, progress=options.progress):
        if run.finished:
            record = replace(untrained[label], minutes=run.seconds / 60, scores=missing[label].test(run))
            record.save(options)
            records[label] = record
    return list(records.values())


def records_of(records: Mapping[str, AccuracyRecord], part: str, options: ExperimentOptions) -> list[AccuracyRecord]:
    """Return the records of all seeds of a training run."""
    return [record for name, record in records.items() if name.rpartition("-")[0].endswith(f"-{part}-{options.scale}")]


def accuracy_rows(
    name: str, records: Sequence[AccuracyRecord], published: Sequence[tuple[float, float]], data: str
) -> Iterator[Row]:
    """Yield a row with the mean over seeds for each kind of task, or no rows if there are no records.

    Our accuracy agrees if the two intervals overlap. It is only compared on `data`, the data set of the paper.
    """
    for kind, (value, margin) in zip(TASK_KINDS, published) if records else ():
        score = Accuracy.pool([record.scores[kind] for record in records])
        ours, ci95, images = 100 * score.mean, 100 * score.ci95, str(records[0].plan["images"])
        comparable = images.startswith(data)
        seeds = [f"{100 * record.scores[kind].mean:.1f} with seed {record.plan['seed']}" for record in records]
        yield Row(
            f"{name}, {kind}",
            "accuracy %",
            published=value,
            ours=ours,
            ci95=ci95,
            agrees=abs(ours - value) <= ci95 + margin if comparable else None,
            note=f"{images}{'' if comparable else f', not {data}'}; {', '.join(seeds)}; "
            f"interval over {score.tasks} tasks",
        )
