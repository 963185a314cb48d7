"""Collins et al. 2022, table 1: if hard tasks are similar, MAML is better on them than training without adaptation.

Training without adaptation is called non-adaptive learning (NAL). An easy task has characters from different alphabets
of Omniglot, a hard task characters from one hard alphabet. Hard alphabets are those on which MAML, trained on all
alphabets, has the lowest accuracy. r_H is the dispersion of the solutions of the hard tasks. It is larger with ten hard
alphabets (variant "large r_H") than with two (variant "small r_H").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from metabridge.datasets import load
from metabridge.environments.image_splits import classes_by_superclass
from metabridge.environments.image_tasks import LabeledImages
from metabridge.environments.mixture import Mixture
from metabridge.errors import InputError
from metabridge.experiments.experiment import ExperimentOptions, TrainingExperiment
from metabridge.experiments.landscape_training_runs import (
    TASK_KINDS,
    Accuracy,
    AccuracyRecord,
    Conv4Training,
    PlannedRun,
    accuracy_rows,
    records_of_run,
    train_all,
)
from metabridge.report.results import Row

# Accuracy in percent and the half-width of its 95 % interval (table 4), for easy training tasks, hard training tasks,
# easy test tasks and hard test tasks (`TASK_KINDS`). The keys contain the variant (large or small r_H), the method and,
# for NAL, the number of shots in training.
PUBLISHED: dict[str, tuple[tuple[float, float], ...]] = {
    "large-maml": ((99.2, 0.2), (96.0, 0.6), (98.0, 0.2), (81.2, 0.3)),
    "large-nal-1": ((69.4, 0.4), (41.5, 0.3), (57.8, 0.4), (45.2, 0.8)),
    "large-nal-10": ((70.0, 0.8), (45.3, 0.9), (67.2, 0.3), (47.9, 0.7)),
    "small-maml": ((99.2, 0.5), (99.1, 0.2), (98.1, 0.3), (95.4, 0.3)),
    "small-nal-1": ((69.2, 0.5), (46.0, 0.6), (55.8, 0.5), (45.8, 1.0)),
    "small-nal-10": ((70.2, 0.6), (44.0, 0.8), (67.8, 0.8), (48.9, 0.8)),
}
SIMILAR_ALPHABETS = ("Sanskrit", "Bengali")  # the hard alphabets of "small r_H": one for training, one for testing
WAYS, QUERIES = 5, 10
NAL_LR = 1e-6


@dataclass(frozen=True)
class Settings:
    """How MAML is trained, the number of seeds, and the number of test tasks per alphabet for the ranking."""

    training: Conv4Training
    seeds: int
    ranking_tasks: int


SETTINGS = {
    "quick": Settings(
        Conv4Training("maml", 1e-3, iterations=100, batch_size=4, test_tasks=60, filters=32), seeds=1, ranking_tasks=12
    ),
    "paper": Settings(
        Conv4Training("maml", 1e-3, iterations=20_000, batch_size=8, test_tasks=500), seeds=2, ranking_tasks=200
    ),
}


def measure(options: ExperimentOptions) -> dict[str, AccuracyRecord]:
    """Rank the alphabets by the accuracy of MAML, then train each method in both variants."""
    options.check_selected_names(("ranking", *PUBLISHED))
    settings, images = SETTINGS[options.scale], load_images(options)
    ranking = rank_alphabets(options, settings, images)
    if ranking is None:
        if not options.includes("ranking"):
            raise InputError("the ranking, which selects the hard alphabets, is not finished. Add ranking to --only.")
        return {}  # the time limit ended the ranking
    seeded_trainings = [replace(settings.training, seed=options.seed + i) for i in range(settings.seeds)]
    planned = [
        plan_training(run_name, training, images, ranking) for run_name in PUBLISHED for training in seeded_trainings
    ]
    records = train_all(options, EXPERIMENT.id, images, planned)
    return {record.name: record for record in (ranking, *records) if record is not None}


def rank_alphabets(options: ExperimentOptions, settings: Settings, images: LabeledImages) -> AccuracyRecord | None:
    """Train MAML on tasks whose characters are from one alphabet, and return its accuracy on each alphabet."""
    classes_by_alphabet = classes_by_superclass(images)
    alphabets_to_rank = {name: classes for name, classes in classes_by_alphabet.items() if len(classes) >= WAYS}
    all_classes = replace(images, splits={"all": torch.cat(list(classes_by_alphabet.values()))})
    images_by_alphabet = replace(images, splits=alphabets_to_rank)
    training = replace(settings.training, seed=options.seed, test_tasks=settings.ranking_tasks)
    tasks = all_classes.tasks("all", ways=WAYS, queries=QUERIES, superclass="same")
    test_tasks = {name: images_by_alphabet.tasks(name, ways=WAYS, queries=QUERIES) for name in alphabets_to_rank}
    description = {"ways": WAYS, "shots": 1, "queries": QUERIES}
    planned = PlannedRun("ranking", training, tasks, test_tasks, description)
    return train_all(options, EXPERIMENT.id, images, [planned])[0]


def hardest_alphabets(ranking: AccuracyRecord) -> list[str]:
    """Return the alphabets with the lowest accuracies, lowest first: a fifth of all, rounded down to an even number."""
    return sorted(ranking.scores, key=lambda name: ranking.scores[name].mean)[: 2 * (len(ranking.scores) // 10)]


def split_alphabets(names: list[str], ranking: AccuracyRecord, variant: str, seed: int) -> dict[str, list[str]]:
    """Return the alphabets of each kind of task. `names` are all alphabets of the data set.

    Half of the hard alphabets and five eighths of the easy ones are for training, the others for testing. In the
    variant "small", there are only two hard alphabets: those of the paper, or the two hardest if those are missing; the
    other hardest ones are left out. An alphabet with too few characters for the ranking counts as easy.
    """
    hard = hardest_alphabets(ranking)
    similar = list(SIMILAR_ALPHABETS) if set(SIMILAR_ALPHABETS) <= set(names) else hard[:2]
    generator = torch.Generator().manual_seed(seed)
    shuffled = [names[index] for index in torch.randperm(len(names), generator=generator).tolist()]
    easy = [name for name in shuffled if name not in hard]
    hard = [name for name in shuffled if name in hard] if variant == "large" else similar
    easy_train, easy_test = easy[: len(easy) * 5 // 8], easy[len(easy) * 5 // 8 :]
    return {
        "easy train": [name for name in easy_train if name not in hard],
        "hard train": hard[: len(hard) // 2],
        "easy test": [name for name in easy_test if name not in hard],
        "hard test": hard[len(hard) // 2 :],
    }


def plan_training(run_name: str, training: Conv4Training, images: LabeledImages, ranking: AccuracyRecord) -> PlannedRun:
    """Return the training run with this name, such as "small-nal-10": NAL with 10 shots in the variant "small".

    Half of the training tasks are easy, half are hard.
    """
    variant, _, learner = run_name.partition("-")
    shots = 10 if learner == "nal-10" else 1
    if learner != "maml":
        training = replace(training, method="nal", lr=NAL_LR)
    classes_by_alphabet = classes_by_superclass(images)
    alphabets_by_kind = split_alphabets(list(classes_by_alphabet), ranking, variant, training.seed)
    classes_by_kind = {
        kind: torch.cat([classes_by_alphabet[name] for name in names]) for kind, names in alphabets_by_kind.items()
    }
    split_images = replace(images, splits=classes_by_kind)
    task_options: dict[str, Any] = {"ways": WAYS, "shots": shots, "queries": QUERIES}
    tasks = {
        kind: split_images.tasks(kind, **task_options, superclass="different" if kind.startswith("easy") else "same")
        for kind in TASK_KINDS
    }
    mixture = Mixture((tasks["easy train"], tasks["hard train"]), (0.5, 0.5))
    return PlannedRun(run_name, training, mixture, tasks, {**task_options, "alphabets": alphabets_by_kind})


def rows(records: Mapping[str, AccuracyRecord], options: ExperimentOptions) -> Iterator[Row]:
    """Yield the accuracies of the ranking, and compare the accuracies of each method with the published ones."""
    for record in records_of_run(records, "ranking", options):
        hard = hardest_alphabets(record)
        for hardness, names in (("hard", hard), ("easy", [name for name in record.scores if name not in hard])):
            score = Accuracy.pool([record.scores[alphabet] for alphabet in names])
            note = f"{record.plan['images']}; {', '.join(names)}"
            accuracy, ci95 = 100 * score.mean, 100 * score.ci95
            yield Row(f"ranking, {hardness} alphabets", "accuracy %", ours=accuracy, ci95=ci95, note=note)
    for run_name, published in PUBLISHED.items():
        variant, _, learner = run_name.partition("-")
        by_seed = records_of_run(records, run_name, options)
        yield from accuracy_rows(f"{variant} r_H, {learner.upper()}", by_seed, published, "omniglot")


def load_images(options: ExperimentOptions) -> LabeledImages:
    """Return Omniglot. If it is missing, return the glyphs at the quick scale and raise an error at the paper scale."""
    if options.data is not None and (options.data / "omniglot").exists():
        return load("omniglot", options.data / "omniglot").to(options.device)
    if options.scale == "paper":
        raise InputError(
            "the paper scale needs Omniglot in the subfolder omniglot of the --data folder, but --data is "
            f"{options.data}. Use --scale quick to try the experiment without it."
        )
    return load("glyphs").to(options.device)


EXPERIMENT = TrainingExperiment("landscape-table1", measure, rows)
