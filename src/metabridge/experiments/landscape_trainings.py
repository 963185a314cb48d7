"""Trainings on easy and hard tasks, of which C's tables 1 and 2 are made. Each leaves a record of what it measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from metabridge.environments.environment import Environment as Tasks
from metabridge.environments.image_tasks import LabelledImages
from metabridge.experiments.record_files import keep, plain, run_folder, stored
from metabridge.experiments.result import Environment, Result, Row, Work, environment
from metabridge.learners.method import method
from metabridge.models import conv4
from metabridge.training import Fitting, Run, Settings, evaluate, in_turns
from metabridge.training.fitting import several

KINDS = ("easy train", "hard train", "easy test", "hard test")  # of tasks, in the order of the published tables


@dataclass(frozen=True)
class Training:
    """How the four-block net is trained, and how many tasks of each kind judge it (C app. C.4, C.5)."""

    method: str
    lr: float
    iterations: int
    tasks: int  # in an iteration
    judged: int
    filters: int = 64
    steps: int = 1  # of adaptation, which NAL does at test time alone
    inner_lr: float = 0.1
    seed: int = 0


@dataclass(frozen=True)
class Accuracy:
    """The mean over tasks and the half-width of its 95 % interval."""

    mean: float
    ci95: float
    tasks: int

    @classmethod
    def over(cls, scores: Sequence[Accuracy]) -> Accuracy:
        """Return the mean of several; its interval is over their tasks alone, not over what else tells them apart.

        >>> Accuracy.over([Accuracy(0.5, 0.03, 100), Accuracy(0.7, 0.04, 100)])
        Accuracy(mean=0.6, ci95=0.025, tasks=200)
        """
        mean = sum(score.mean for score in scores) / len(scores)
        ci95 = math.hypot(*(score.ci95 for score in scores)) / len(scores)
        return cls(mean, ci95, sum(score.tasks for score in scores))


@dataclass(frozen=True)
class Record:
    """What one training measured, by kind of task; `plan` is all that it depends on."""

    name: str
    plan: dict[str, Any]
    environment: Environment
    minutes: float
    scores: dict[str, Accuracy]


@dataclass(frozen=True)
class Outcome:
    """The result and the records it was made of."""

    result: Result
    records: dict[str, Record]


@dataclass(frozen=True, eq=False)
class Asked:
    """A training that a table needs: on which tasks, and on which of each kind it is judged.

    `part` is what the command line calls it, and `about` says what the tasks are.
    """

    part: str
    how: Training
    tasks: Tasks
    kinds: Mapping[str, Tasks]
    about: Mapping[str, object]

    @property
    def label(self) -> str:
        """What a person reads."""
        return f"{self.part}, seed {self.how.seed}"

    def name(self, work: Work, table: str) -> str:
        """What its files are called."""
        return f"{table}-{self.part}-{work.scale}-{self.how.seed}"

    def plan(self, images: LabelledImages) -> dict[str, Any]:
        """Return all that it depends on."""
        source = (
            f"{images.load_arguments['name'] if images.load_arguments else 'images'} at {images.images.shape[-1]} px"
        )
        return plain({"images": source, **self.about, **asdict(self.how)})


def trained(work: Work, table: str, images: LabelledImages, asked: Sequence[Asked]) -> list[Record | None]:
    """Return the record of each training.

    Without a record of the same plan it is trained now, if its part is to be done; None if it is not, or if the time,
    which is that of all together, ran out before the end.
    """
    found = {each.label: stored(work, each.name(work, table), each.plan(images), _made) for each in asked}
    missing = {
        each.label: each for each in asked if found[each.label] is None and (not work.only or each.part in work.only)
    }
    begin = {label: partial(_begin, work, table, images, each) for label, each in missing.items()}
    for label, run in in_turns(begin, at_once=several(work.device), minutes=work.minutes, progress=work.progress):
        if run.finished:
            found[label] = _judged(work, table, images, missing[label], run)
    return list(found.values())


def _begin(work: Work, table: str, images: LabelledImages, asked: Asked) -> Fitting:
    how, (channels, size) = asked.how, images.images.shape[1:3]
    return Fitting(
        conv4(channels, size, asked.tasks.outputs, filters=how.filters, seed=how.seed),
        method(how.method, steps=how.steps, lr=how.inner_lr),
        asked.tasks,
        Settings(iterations=how.iterations, tasks=how.tasks, lr=how.lr, seed=how.seed),
        device=work.device,
        out=run_folder(work, asked.name(work, table), asked.plan(images)),
    )


def _judged(work: Work, table: str, images: LabelledImages, asked: Asked, run: Run) -> Record:
    """Measure a training's accuracy on each kind of tasks, and keep the record."""
    how, name = asked.how, asked.name(work, table)
    scores = {kind: evaluate(run, own, tasks=how.judged, seed=how.seed) for kind, own in asked.kinds.items()}
    found = {kind: Accuracy(score.mean, score.ci95, score.tasks) for kind, score in scores.items()}
    record = Record(name, asked.plan(images), environment(work.device), run.seconds / 60, found)
    keep(work, name, record)
    return record


def rows(name: str, records: Sequence[Record], published: Sequence[tuple[float, float]], data: str) -> list[Row]:
    """Return a row for every kind of task, the mean over the seeds; none without a record.

    Ours agrees where the two intervals meet: a question only on the `data` that the paper has.
    """
    made = []
    for kind, (value, margin) in zip(KINDS, published) if records else ():
        score = Accuracy.over([record.scores[kind] for record in records])
        ours, ci95, images = 100 * score.mean, 100 * score.ci95, str(records[0].plan["images"])
        comparable = images.startswith(data)
        seeds = [f"{100 * record.scores[kind].mean:.1f} with seed {record.plan['seed']}" for record in records]
        made.append(
            Row(
                f"{name}, {kind}",
                "accuracy %",
                published=value,
                ours=ours,
                ci95=ci95,
                agrees=abs(ours - value) <= ci95 + margin if comparable else None,
                note=f"{images}{'' if comparable else f', not {data}'}; {', '.join(seeds)}; "
                f"interval over {score.tasks} tasks",
            )
        )
    return made


def _made(held: dict[str, Any]) -> Record:
    return Record(**{**held, "scores": {kind: Accuracy(**score) for kind, score in held["scores"].items()}})
