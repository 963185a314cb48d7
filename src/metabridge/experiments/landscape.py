"""Trainings on easy and hard tasks, of which C's tables 1 and 2 are made. Each leaves a record of what it measured."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from threading import Event
from typing import Any

import torch
from rich import get_console

from metabridge.environments.environment import Environment as Tasks
from metabridge.environments.images import LabelledImages
from metabridge.experiments.records import keep, plain, run_folder, stored
from metabridge.experiments.result import Environment, Result, Row, Work, environment
from metabridge.learners.method import method
from metabridge.models import Network, conv4
from metabridge.threads import own_stream, side_by_side
from metabridge.training import evaluate, fit

KINDS = ("easy train", "hard train", "easy test", "hard test")  # of tasks, in the order of the published tables
AT_ONCE = {"cuda": 8}  # trainings side by side: the small kernels of one leave a GPU nearly idle


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
        source = f"{images.source['name'] if images.source else 'images'} at {images.images.shape[-1]} px"
        return plain({"images": source, **self.about, **asdict(self.how)})

    def net(self, images: LabelledImages) -> Network:
        """Return the untrained net."""
        channels, size = images.images.shape[1], images.images.shape[-1]
        return conv4(channels, size, self.tasks.outputs, filters=self.how.filters, seed=self.how.seed)


def trained(work: Work, table: str, images: LabelledImages, asked: Sequence[Asked]) -> list[Record | None]:
    """Return the record of each training.

    Without a record of the same plan it is trained now, if its part is to be done; None if it is not, or if the time
    ran out before the end. On a GPU several train side by side, and the minutes are those of all together.
    """
    found = [stored(work, each.name(work, table), each.plan(images), _made) for each in asked]
    missing = [
        place for place, each in enumerate(asked) if found[place] is None and (not work.only or each.part in work.only)
    ]
    at_once = min(AT_ONCE.get(torch.device(work.device).type, 1), len(missing))
    if at_once > 1 and work.progress:
        get_console().print(f"{len(missing)} trainings, {at_once} of them side by side")
    train = partial(_train_beside, time.perf_counter()) if at_once > 1 else _train
    # the nets are made here, as their weights come from the one generator that is everybody's
    begun = [partial(train, work, table, images, asked[place], asked[place].net(images)) for place in missing]
    for place, record in zip(missing, side_by_side(begun, at_once)):
        found[place] = record
    return found


def _train_beside(
    started: float, work: Work, table: str, images: LabelledImages, asked: Asked, net: Network, stop: Event
) -> Record | None:
    """Train while others do, until the minutes since all of them `started` are over."""
    left = None if work.minutes is None else max(0.0, work.minutes - (time.perf_counter() - started) / 60)
    with own_stream(torch.device(work.device)):
        record = _train(replace(work, minutes=left, progress=False), table, images, asked, net, stop)
    if work.progress:
        told = f"finished, {record.minutes:.1f} minutes of training" if record else "stopped, to go on another time"
        get_console().print(f"{asked.label}: {told}")
    return record


def _train(work: Work, table: str, images: LabelledImages, asked: Asked, net: Network, stop: Event) -> Record | None:
    name, plan, how = asked.name(work, table), asked.plan(images), asked.how
    run = fit(
        net,
        method(how.method, steps=how.steps, lr=how.inner_lr),
        asked.tasks,
        iterations=how.iterations,
        tasks=how.tasks,
        lr=how.lr,
        device=work.device,
        seed=how.seed,
        out=run_folder(work, name, plan),
        minutes=work.minutes,
        stop=stop,
        progress=work.progress,
        name=asked.label,
    )
    if not run.finished:
        return None
    scores = {kind: evaluate(run, own, tasks=how.judged, seed=how.seed) for kind, own in asked.kinds.items()}
    found = {kind: Accuracy(score.mean, score.ci95, score.tasks) for kind, score in scores.items()}
    record = Record(name, plan, environment(work.device), run.seconds / 60, found)
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
