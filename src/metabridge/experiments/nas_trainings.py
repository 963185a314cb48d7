"""Searches on mini-ImageNet and trainings of what they find, of which B's tables 1 and 2 and its figure 2 are made.

Every search and every training is a part by itself, and leaves a record of what it measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from metabridge.datasets import load
from metabridge.environments.image_tasks import LabelledImages
from metabridge.errors import InputError
from metabridge.experiments.mini_imagenet_trainings import SHOTS, load_mini_imagenet, plans
from metabridge.experiments.mini_imagenet_trainings import VIEWS as LOOKS
from metabridge.experiments.record_files import keep, plain, run_folder, stored
from metabridge.experiments.result import Environment, Result, Row, Work, environment
from metabridge.experiments.training_records import Evaluation, train_or_load
from metabridge.experiments.training_records import TrainingRecord as Record
from metabridge.models.architecture import Architecture
from metabridge.models.cells import cell_network
from metabridge.nas.architecture_search import SearchConfig, SearchKernel, TimeLimitError, run_search
from metabridge.training import TestTimeAugmentation
from metabridge.training.config import ImageTrainingConfig

T = TypeVar("T")
Accuracies = Mapping[int, tuple[float, float]]  # by shots, in percent, with the standard deviation over searches

SEARCH_SIZE, SIZE = 32, 84  # pixels of mini-ImageNet


@dataclass(frozen=True)
class Case:
    """What a search goes by, for a network of so many cells (B app. E)."""

    guide: SearchKernel
    cells: int = 5
    time: float = math.inf
    ridge: float = 1e-3

    def labels(self, work: Work) -> dict[str, int]:
        """Return the names of its searches, and their seeds."""
        kind = "regions" if self.guide == "none" else self.guide
        return {f"{kind}-{self.cells}-{seed}": seed for seed in range(work.seed, work.seed + SCALES[work.scale].seeds)}

    def own(self, work: Work, held: Mapping[str, T]) -> list[T]:
        """Return what is held under the names of its searches."""
        return [held[label] for label in self.labels(work) if label in held]


METANTK = Case("maml")
DEEP = Case("anil", cells=8, time=1.0, ridge=1e-5)
NTK = Case("ntk")
REGIONS = Case("none")
RANDOM = Case("random")


@dataclass(frozen=True)
class Scale:
    """How much to search and to train. Each case has its own kernel, cells and seed, and each training its model."""

    seeds: int
    search: SearchConfig
    plan: ImageTrainingConfig
    longer: int  # steps, of one training
    lr: float  # for stacks of cells
    drop_rate: float
    tasks: int  # that judge, in validation and in the test
    looks: tuple[TestTimeAugmentation, ...]
    data: str
    image_channels: int


_RFS = {scale: plans(scale)["rfs"] for scale in ("quick", "paper")}
SCALES = {
    "quick": Scale(
        seeds=2,
        search=SearchConfig(channels=4, tasks=2, ways=3, repeats=1, region_inputs=100, operators=("skip", "conv_3x3")),
        plan=replace(_RFS["quick"], iterations=8, validate_every=8),
        longer=20,
        lr=0.1,
        drop_rate=0.2,
        tasks=40,
        looks=LOOKS[1:2],
        data="glyphs",
        image_channels=1,
    ),
    "paper": Scale(
        seeds=3,
        search=SearchConfig(),
        plan=replace(_RFS["paper"], iterations=5000, validate_every=2500),
        longer=30_000,
        lr=0.4,  # this and the next chosen in validation, after 1000 steps
        drop_rate=0.0,
        tasks=2000,
        looks=LOOKS[1:3],  # crops cost the most, and were no better for RFS with ResNet-12
        data="mini-imagenet",
        image_channels=3,
    ),
}


@dataclass(frozen=True)
class Finding:
    """What one search found; `plan` is all that it depends on."""

    name: str
    plan: dict[str, Any]
    environment: Environment
    minutes: float
    architecture: Architecture
    parameters: int  # of the features
    measured: int  # networks
    troubled: int  # of which some proxy could not be told


@dataclass(frozen=True)
class Outcome:
    """The result, what was found, and what its trainings measured, by the names of the searches."""

    result: Result
    findings: dict[str, Finding]
    trainings: dict[str, Record]

    @classmethod
    def of(
        cls, work: Work, name: str, rows: Iterable[Row], findings: dict[str, Finding], trainings: dict[str, Record]
    ) -> Outcome:
        """Return the rows as a result that holds every plan."""
        searched = {f"search-{label}": finding for label, finding in findings.items()}
        trained = {f"train-{label}": record for label, record in trainings.items()}
        return cls(Result.of(work, name, tuple(rows), {**searched, **trained}), findings, trainings)


def findings(work: Work, cases: Iterable[Case]) -> dict[str, Finding]:
    """Search with every seed, or read what was found, as far as it is asked for and there is time."""
    found = {label: _found(work, case, label, seed) for case in cases for label, seed in case.labels(work).items()}
    return {label: finding for label, finding in found.items() if finding is not None}


def _found(work: Work, case: Case, label: str, seed: int) -> Finding | None:
    scale, part = SCALES[work.scale], f"search-{label}"
    search = replace(scale.search, kernel=case.guide, cells=case.cells, ridge=case.ridge, seed=seed)
    search = replace(search, adaptation_time=case.time)
    plan, name = plain({"data": scale.data, **search.to_dict()}), f"nas-{part}-{work.scale}"
    finding = stored(work, name, plan, _made)
    if finding is not None or (work.only and part not in work.only):
        return finding
    here, folder = images(work, SEARCH_SIZE), run_folder(work, name, plan)
    try:
        found = run_search(here, search, device=work.device, out=folder, minutes=work.minutes, progress=work.progress)
    except TimeLimitError:
        return None
    net = cell_network(
        found.architecture, cells=search.cells, channels=search.channels, image_channels=scale.image_channels
    )
    parameters = sum(value.numel() for value in net.features.parameters())
    machine = environment(work.device)
    finding = Finding(
        name, plan, machine, found.seconds / 60, found.architecture, parameters, found.evaluated, found.failed
    )
    keep(work, name, finding)
    return finding


def studied(
    work: Work, cases: Iterable[Case], *, further: Iterable[str] = ()
) -> tuple[dict[str, Finding], dict[str, Record]]:
    """Search, and train what was found by one schedule, and what is asked for `further`."""
    cases = tuple(cases)
    labels = [label for case in cases for label in case.labels(work)]
    trained = [*labels, *further]
    work.check_only([f"search-{label}" for label in labels] + [f"train-{label}" for label in trained])
    found = findings(work, cases)
    for label in labels:
        asked = {f"train-{label}", f"train-{longer(label)}"} & set(work.only)
        if label not in found and asked:
            raise InputError(f"{min(asked)} needs a search that is finished. Add search-{label} to --only.")
    scale = SCALES[work.scale]
    plans = {label: cell_plan(work, finding) for label, finding in found.items()}
    plans[resnet12(work)] = replace(scale.plan, seed=work.seed)
    for label in found:
        plans[longer(label)] = replace(plans[label], iterations=scale.longer, validate_every=scale.longer // 10)
    return found, trainings(work, {label: plan for label, plan in plans.items() if label in trained})


def resnet12(work: Work) -> str:
    """Return the name of ResNet-12's training by the same schedule, beside those of what was found."""
    return f"resnet12-{work.seed}"


def longer(label: str) -> str:
    """Return the name of a longer training of what was found."""
    return f"{label}-longer"


def cell_plan(work: Work, finding: Finding) -> ImageTrainingConfig:
    """Return how a network that was found is trained, by the seed that found it."""
    scale, how = SCALES[work.scale], finding.plan
    options = {"architecture": asdict(finding.architecture), "cells": how["cells"], "channels": how["channels"]}
    options |= {"image_channels": scale.image_channels, "drop_rate": scale.drop_rate}
    return replace(scale.plan, model="network", model_options=options, lr=scale.lr, seed=how["seed"])


def trainings(work: Work, plans: Mapping[str, ImageTrainingConfig]) -> dict[str, Record]:
    """Train, or read what was measured, as far as it is asked for and there is time."""
    scale, found = SCALES[work.scale], {}
    evaluation = Evaluation(SHOTS, scale.tasks, scale.looks)
    for label, plan in plans.items():
        part = f"train-{label}"
        name = f"nas-{part}-{work.scale}"
        record = train_or_load(work, part, name, plan, lambda: images(work, SIZE), evaluation)
        if record is not None:
            found[label] = record
    return found


def images(work: Work, size: int) -> LabelledImages:
    """Return mini-ImageNet at so many pixels, or at the quick scale some of the glyphs as they are."""
    if SCALES[work.scale].data == "glyphs":
        glyphs = load("glyphs")
        return replace(glyphs, splits={split: members[:25] for split, members in glyphs.splits.items()})
    return load_mini_imagenet(work, size)


def accuracy_rows(name: str, records: Sequence[Record], published: Accuracies, *, judged: bool) -> list[Row]:
    """Return the mean accuracy over searches for 1 and 5 shots, and its spread, beside the published.

    The interval is over tasks, which are the same for all. Ours agrees where it reaches the published mean less its
    standard deviation.
    """
    made = []
    for shots in SHOTS if records else ():
        scores = [record.selected(shots) for record in records]
        means = [100 * score.mean for score in scores]
        ours, ci95 = statistics.mean(means), statistics.mean(100 * score.ci95 for score in scores)
        value, spread = published[shots]
        each = ", ".join(f"{mean:.2f}" for mean in means)
        note = f"{records[0].images}, {records[0].iterations} steps; of each: {each}; {scores[0]}"
        agrees = ours + ci95 >= value - spread if judged else None
        row = Row(
            f"{name}, {shots}-shot", "accuracy %", published=value, ours=ours, ci95=ci95, agrees=agrees, note=note
        )
        made.append(row)
        if len(means) > 1:
            metric = "standard deviation of accuracy %"
            made.append(Row(f"{name}, {shots}-shot, spread", metric, published=spread, ours=statistics.stdev(means)))
    return made


def cost_rows(
    name: str,
    findings: Sequence[Finding],
    records: Sequence[Record],
    *,
    parameters: float | None = None,
    hours: float | None = None,
) -> list[Row]:
    """Return means over searches: millions of parameters, hours of searching and minutes of training."""
    made = []
    if findings or records:
        sizes = [one.parameters / 1e6 for one in findings or records]
        each = ", ".join(f"{size:.2f}" for size in sizes)
        ours = statistics.mean(sizes)
        made.append(Row(f"{name}, parameters", "million", published=parameters, ours=ours, note=f"of each: {each}"))
    if any(finding.measured for finding in findings):
        ours = statistics.mean(finding.minutes / 60 for finding in findings)
        counts = f"{findings[0].measured} networks, {sum(finding.troubled for finding in findings)} in trouble in all"
        each = ", ".join(f"{finding.minutes:.2f}" for finding in findings)
        note = f"on {findings[0].environment.device}; of each: {each} minutes; {counts}"
        made.append(Row(f"{name}, search", "hours", published=hours, ours=ours, note=note))
    if records:
        ours = statistics.mean(record.minutes for record in records)
        made.append(Row(f"{name}, training", "minutes", ours=ours, note=f"on {records[0].environment.device}"))
    return made


def gain_rows(
    name: str,
    records: tuple[Sequence[Record], Sequence[Record]],
    published: tuple[Accuracies, Accuracies],
    *,
    judged: bool,
) -> list[Row]:
    """Return how far the first mean accuracy is above the second; B's claim is that it is above.

    One within its interval neither agrees nor disagrees.
    """
    made = []
    for shots in SHOTS if all(records) else ():
        ends = [[record.selected(shots) for record in side] for side in records]
        ours, other = (statistics.mean(100 * score.mean for score in scores) for scores in ends)
        margin = math.hypot(*(statistics.mean(100 * score.ci95 for score in scores) for scores in ends))
        first, second = (side[shots][0] for side in published)
        made.append(
            Row(
                f"{name}, {shots}-shot",
                "difference in accuracy %",
                published=first - second,
                ours=ours - other,
                ci95=margin,
                agrees=ours > other if judged and abs(ours - other) > margin else None,
                note="agrees above 0, undecided within its interval, which is wide, since both have the same tasks",
            )
        )
    return made


def _made(held: dict[str, Any]) -> Finding:
    return Finding(**{**held, "architecture": Architecture.from_dict(held["architecture"])})
