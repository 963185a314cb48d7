"""Collins et al. 2022, table 1: MAML gains over training without adaptation (NAL) on hard tasks, if they are alike.

Easy tasks of Omniglot distinguish characters of different alphabets, hard ones characters of one alphabet. The hard
alphabets are those on which MAML, trained on all of them, has the lowest accuracy. With ten hard alphabets
("large r_H") the solutions of their tasks lie further apart than with two ("small r_H").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from metabridge.datasets import load
from metabridge.environments.image_tasks import LabelledImages
from metabridge.environments.mixture import Mixture
from metabridge.errors import InputError
from metabridge.experiments.experiment import ExperimentOptions, TrainingExperiment
from metabridge.experiments.landscape_trainings import (
    KINDS,
    Accuracy,
    AccuracyRecord,
    NetTraining,
    PlannedTraining,
    accuracy_rows,
    train_all,
)
from metabridge.report.results import Row

# accuracy in percent and the half-width of its 95 % interval, on each of `KINDS` (table 4)
PUBLISHED: dict[str, tuple[tuple[float, float], ...]] = {
    "large-maml": ((99.2, 0.2), (96.0, 0.6), (98.0, 0.2), (81.2, 0.3)),
    "large-nal-1": ((69.4, 0.4), (41.5, 0.3), (57.8, 0.4), (45.2, 0.8)),
    "large-nal-10": ((70.0, 0.8), (45.3, 0.9), (67.2, 0.3), (47.9, 0.7)),
    "small-maml": ((99.2, 0.5), (99.1, 0.2), (98.1, 0.3), (95.4, 0.3)),
    "small-nal-1": ((69.2, 0.5), (46.0, 0.6), (55.8, 0.5), (45.8, 1.0)),
    "small-nal-10": ((70.2, 0.6), (44.0, 0.8), (67.8, 0.8), (48.9, 0.8)),
}
ALIKE = ("Sanskrit", "Bengali")  # the hard alphabets of "small r_H", for training and test
WAYS, QUERIES = 5, 10
NAL_LR = 1e-6


@dataclass(frozen=True)
class Settings:
    """How MAML is trained, for how many seeds, and how many tasks rank an alphabet."""

    training: NetTraining
    seeds: int
    ranking_tasks: int


SETTINGS = {
    "quick": Settings(
        NetTraining("maml", 1e-3, iterations=100, batch_size=4, test_tasks=60, filters=32), seeds=1, ranking_tasks=12
    ),
    "paper": Settings(
        NetTraining("maml", 1e-3, iterations=20_000, batch_size=8, test_tasks=500), seeds=2, ranking_tasks=200
    ),
}


def measure(options: ExperimentOptions) -> dict[str, AccuracyRecord]:
    """Rank the alphabets, then train each method in both settings."""
    options.check_only(("ranking", *PUBLISHED))
    settings, images = SETTINGS[options.scale], load_images(options)
    ranking = rank_alphabets(options, settings, images)
    if ranking is None:
        if not options.includes("ranking"):
            raise InputError("the ranking, which selects the hard alphabets, is not finished. Add ranking to --only.")
        return {}
    trainings = [replace(settings.training, seed=options.seed + i) for i in range(settings.seeds)]
    planned = [plan_training(part, training, images, ranking) for part in PUBLISHED for training in trainings]
    records = train_all(options, EXPERIMENT.id, images, planned)
    return {record.name: record for record in (ranking, *records) if record is not None}


def rank_alphabets(options: ExperimentOptions, settings: Settings, images: LabelledImages) -> AccuracyRecord | None:
    """Train MAML on tasks within single alphabets, and measure its accuracy on each alphabet."""
    classes = alphabets(images)
    ranked = {name: members for name, members in classes.items() if len(members) >= WAYS}
    all_classes = replace(images, splits={"all": torch.cat(list(classes.values()))})
    by_alphabet = replace(images, splits=ranked)
    training = replace(settings.training, seed=options.seed, test_tasks=settings.ranking_tasks)
    tasks = all_classes.tasks("all", ways=WAYS, queries=QUERIES, superclass="same")
    test_tasks = {name: by_alphabet.tasks(name, ways=WAYS, queries=QUERIES) for name in ranked}
    description = {"ways": WAYS, "shots": 1, "queries": QUERIES}
    planned = PlannedTraining("ranking", training, tasks, test_tasks, description)
    return train_all(options, EXPERIMENT.id, images, [planned])[0]


def alphabets(images: LabelledImages) -> dict[str, torch.Tensor]:
    """Return the classes of each alphabet, from all splits together."""
    classes = torch.cat(list(images.splits.values())).sort().values
    alphabet = images.superclasses[classes]
    members = {name: classes[alphabet == index] for index, name in enumerate(images.superclass_names)}
    return {name: classes for name, classes in members.items() if len(classes)}


def hardest(ranking: AccuracyRecord) -> list[str]:
    """Return the fifth of the alphabets, an even number, with the lowest accuracies, lowest first."""
    return sorted(ranking.scores, key=lambda name: ranking.scores[name].mean)[: 2 * (len(ranking.scores) // 10)]


def split_alphabets(names: list[str], ranking: AccuracyRecord, setting: str, seed: int) -> dict[str, list[str]]:
    """Return the alphabets of each kind of task: half of the hard ones train, and five eighths of the easy ones.

    With small r_H one hard alphabet trains and one tests: the paper's two, or the two hardest if those are missing.
    An alphabet with too few characters for the ranking counts as easy.
    """
    hard = hardest(ranking)
    alike = list(ALIKE) if set(ALIKE) <= set(names) else hard[:2]
    generator = torch.Generator().manual_seed(seed)
    shuffled = [names[index] for index in torch.randperm(len(names), generator=generator).tolist()]
    easy = [name for name in shuffled if name not in hard]
    hard = [name for name in shuffled if name in hard] if setting == "large" else alike
    easy_train, easy_test = easy[: len(easy) * 5 // 8], easy[len(easy) * 5 // 8 :]
    return {
        "easy train": [name for name in easy_train if name not in hard],
        "hard train": hard[: len(hard) // 2],
        "easy test": [name for name in easy_test if name not in hard],
        "hard test": hard[len(hard) // 2 :],
    }


def plan_training(part: str, training: NetTraining, images: LabelledImages, ranking: AccuracyRecord) -> PlannedTraining:
    """Return the training of a method in a setting, on as many easy as hard tasks."""
    setting, _, learner = part.partition("-")
    shots = 10 if learner == "nal-10" else 1
    if learner != "maml":
        training = replace(training, method="nal", lr=NAL_LR)
    classes = alphabets(images)
    splits = split_alphabets(list(classes), ranking, setting, training.seed)
    split_images = replace(
        images, splits={kind: torch.cat([classes[name] for name in names]) for kind, names in splits.items()}
    )
    form: dict[str, Any] = {"ways": WAYS, "shots": shots, "queries": QUERIES}
    tasks = {
        kind: split_images.tasks(kind, **form, superclass="different" if kind.startswith("easy") else "same")
        for kind in KINDS
    }
    mixture = Mixture((tasks["easy train"], tasks["hard train"]), (0.5, 0.5))
    return PlannedTraining(part, training, mixture, tasks, {**form, "alphabets": splits})


def rows(records: Mapping[str, AccuracyRecord], options: ExperimentOptions) -> Iterator[Row]:
    """Give the accuracies that rank the alphabets, and compare those of each method with the published ones."""
    for name, record in records.items():
        if not name.startswith(f"{EXPERIMENT.id}-ranking-"):
            continue
        hard = hardest(record)
        for kind, names in (("hard", hard), ("easy", [name for name in record.scores if name not in hard])):
            score = Accuracy.pool([record.scores[alphabet] for alphabet in names])
            note = f"{record.plan['images']}; {', '.join(names)}"
            accuracy, ci95 = 100 * score.mean, 100 * score.ci95
            yield Row(f"ranking, {kind} alphabets", "accuracy %", ours=accuracy, ci95=ci95, note=note)
    for part, published in PUBLISHED.items():
        setting, _, learner = part.partition("-")
        by_seed = [
            record for name, record in records.items() if name.startswith(f"{EXPERIMENT.id}-{part}-{options.scale}-")
        ]
        yield from accuracy_rows(f"{setting} r_H, {learner.upper()}", by_seed, published, "omniglot")


def load_images(options: ExperimentOptions) -> LabelledImages:
    """Load Omniglot, or at the quick scale glyphs if Omniglot is missing."""
    if options.data is not None and (options.data / "omniglot").exists():
        return load("omniglot", options.data / "omniglot").to(options.device)
    if options.scale == "paper":
        raise InputError(
            "the paper scale needs Omniglot, in the subfolder omniglot of the folder given by --data "
            f"(now {options.data}). Use --scale quick to try the experiment without it."
        )
    return load("glyphs").to(options.device)


EXPERIMENT = TrainingExperiment("landscape-table1", measure, rows)
