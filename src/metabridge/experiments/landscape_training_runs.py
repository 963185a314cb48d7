"""Training runs on easy and hard tasks, for tables 1 and 2 of Collins et al. 2022 and for `diagnose-images`.

NAL is non-adaptive learning: training without adaptation. MAML and NAL are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from metabridge.environments.environment import Environment
from metabridge.environments.image_tasks import LabeledImages
from metabridge.experiments.experiment import ExperimentOptions
from metabridge.experiments.records import Record, as_json, image_description, rename_keys, run_folder
from metabridge.learners.method import method
from metabridge.models import conv4
from metabridge.report.results import Machine, Row
from metabridge.training import Run, Trainer, TrainingConfig, evaluate, train_interleaved
from metabridge.training.interleaved import concurrent_runs

TASK_KINDS = ("easy train", "hard train", "easy test", "hard test")  # in the order of the published tables


@dataclass(frozen=True)
class Conv4Training:
    """The method, the options and the network of a training run, a conv4 (Collins et al. 2022, app. C.4 and C.5)."""

    method: str
    lr: float
    iterations: int
    batch_size: int
    test_tasks: int  # number of test tasks of each kind
    filters: int = 64
    steps: int = 1  # adaptation steps; NAL adapts only at test time
    inner_lr: float = 0.1
    seed: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields with the keys that they have in records."""
        # These keys of version 0.1.0 are kept, so that existing records still match their settings.
        return rename_keys(asdict(self), {"batch_size": "tasks", "test_tasks": "judged"})


@dataclass(frozen=True)
class Accuracy:
    """The mean accuracy over tasks, the half-width of its 95 % interval, and the number of tasks."""

    mean: float
    ci95: float
    tasks: int

    @classmethod
    def pool(cls, scores: Sequence[Accuracy]) -> Accuracy:
        """Return the mean of several accuracies. Its interval covers only the variation between tasks.

        >>> Accuracy.pool([Accuracy(0.5, 0.03, 100), Accuracy(0.7, 0.04, 100)])
        Accuracy(mean=0.6, ci95=0.025, tasks=200)
        """
        mean = sum(score.mean for score in scores) / len(scores)
        ci95 = math.hypot(*(score.ci95 for score in scores)) / len(scores)
        return cls(mean, ci95, sum(score.tasks for score in scores))


@dataclass(frozen=True)
class AccuracyRecord(Record):
    """The accuracies of one trained network."""

    scores: dict[str, Accuracy]  # by kind of task; in the ranking of alphabets, by alphabet

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> AccuracyRecord:
        """Return the record with these fields, as read from JSON."""
        return cls(**{**stored, "scores": {kind: Accuracy(**score) for kind, score in stored["scores"].items()}})


@dataclass(frozen=True, eq=False)
class PlannedRun:
    """A training run that an experiment needs.

    Args:
        name: Name by which `--only` selects the run. It is the same for all seeds.
        training: The method, its options, the network and the seed.
        train_environment: Environment of the training tasks.
        test_environments: Environment of the test tasks of each kind.
        description: The settings of the environments, which are stored in the record.
    """

    name: str
    training: Conv4Training
    train_environment: Environment
    test_environments: Mapping[str, Environment]
    description: Mapping[str, object]

    @property
    def label(self) -> str:
        """The name in progress messages."""
        return f"{self.name}, seed {self.training.seed}"

    def empty_record(self, options: ExperimentOptions, experiment: str, images: LabeledImages) -> AccuracyRecord:
        """Return a record without scores, which has the name and all settings of the run.

        The name of the record starts with `experiment`, the id of the experiment.
        """
        name = f"{experiment}-{self.name}-{options.scale}-{self.training.seed}"
        plan = as_json({"images": image_description(images), **self.description, **self.training.to_dict()})
        return AccuracyRecord(name, plan, Machine.current(options.device), 0.0, {})

    def trainer(self, options: ExperimentOptions, record: AccuracyRecord, images: LabeledImages) -> Trainer:
        """Return a trainer of the network. It resumes the run if the run's folder exists."""
        training, (channels, size) = self.training, images.images.shape[1:3]
        config = TrainingConfig(
            iterations=training.iterations, batch_size=training.batch_size, lr=training.lr, seed=training.seed
        )
        return Trainer(
            conv4(channels, size, self.train_environment.outputs, filters=training.filters, seed=training.seed),
            method(training.method, steps=training.steps, lr=training.inner_lr),
            self.train_environment,
            config,
            device=options.device,
            out=run_folder(options, record.name, record.plan),
        )

    def test(self, run: Run) -> dict[str, Accuracy]:
        """Return the accuracy on each kind of task."""
        scores = {
            kind: evaluate(run, environment, tasks=self.training.test_tasks, seed=self.training.seed)
            for kind, environment in self.test_environments.items()
        }
        return {kind: Accuracy(score.mean, score.ci95, score.tasks) for kind, score in scores.items()}


def train_all(
    options: ExperimentOptions, experiment: str, images: LabeledImages, planned: Sequence[PlannedRun]
) -> list[AccuracyRecord | None]:
    """Return the record of each planned run.

    If a run has no record yet and `options.only` selects it, train and test the network. The record is None if the run
    is not selected or does not finish within the time limit, which applies to all runs together. `experiment` is the id
    of the experiment.
    """
    empty_records = {run.label: run.empty_record(options, experiment, images) for run in planned}
    records = {label: AccuracyRecord.load(options, record.name, record.plan) for label, record in empty_records.items()}
    missing = {run.label: run for run in planned if records[run.label] is None and options.includes(run.name)}
    trainer_factories = {
        label: partial(run.trainer, options, empty_records[label], images) for label, run in missing.items()
    }
    at_once = concurrent_runs(options.device)
    for label, trained_run in train_interleaved(
        trainer_factories, at_once=at_once, minutes=options.minutes, progress=options.progress
    ):
        if trained_run.finished:
            minutes, scores = trained_run.seconds / 60, missing[label].test(trained_run)
            record = replace(empty_records[label], minutes=minutes, scores=scores)
            record.save(options)
            records[label] = record
    return list(records.values())


def records_of_run(
    records: Mapping[str, AccuracyRecord], run_name: str, options: ExperimentOptions
) -> list[AccuracyRecord]:
    """Return the records of the runs with this name, one for each seed."""
    suffix = f"-{run_name}-{options.scale}"  # of a record's name without its seed
    return [record for name, record in records.items() if name.rpartition("-")[0].endswith(suffix)]


def accuracy_rows(
    name: str, records: Sequence[AccuracyRecord], published: Sequence[tuple[float, float]], data: str
) -> Iterator[Row]:
    """Yield a row with the mean over seeds for each kind of task, or no rows if there are no records.

    Our accuracy agrees with the published one if their 95 % intervals overlap. They are compared only if our images are
    from the data set of the paper.

    Args:
        name: Start of the names of the rows.
        records: The records of the run, one for each seed.
        published: Accuracy in percent and the half-width of its 95 % interval, for each of `TASK_KINDS`.
        data: Name of the paper's data set.
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
