"""C's table 1: MAML gains over no adaptation in training (NAL) by being accurate on hard tasks, if they are alike.

Easy tasks of Omniglot tell characters of different alphabets apart, hard ones those of one alphabet.
The hard alphabets are those on which MAML, trained on all of them, is least accurate. Where there are
ten ("large r_H") their tasks' solutions lie further apart than where there are two ("small r_H").
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from metabridge.datasets import load
from metabridge.environments.image_tasks import LabelledImages
from metabridge.environments.mixture import Mixture
from metabridge.errors import InputError
from metabridge.experiments import beside
from metabridge.experiments.landscape_trainings import (
    KINDS,
    Accuracy,
    Asked,
    Outcome,
    Record,
    Training,
    rows,
    trained,
)
from metabridge.experiments.result import Result, Row, UnportedExperiment, Work

ID = "landscape-table1"
WAYS, TARGETS = 5, 10

# accuracy in percent and the half-width of its 95 % interval, on each of `KINDS` (C table 4)
PUBLISHED: dict[str, tuple[tuple[float, float], ...]] = {
    "large-maml": ((99.2, 0.2), (96.0, 0.6), (98.0, 0.2), (81.2, 0.3)),
    "large-nal-1": ((69.4, 0.4), (41.5, 0.3), (57.8, 0.4), (45.2, 0.8)),
    "large-nal-10": ((70.0, 0.8), (45.3, 0.9), (67.2, 0.3), (47.9, 0.7)),
    "small-maml": ((99.2, 0.5), (99.1, 0.2), (98.1, 0.3), (95.4, 0.3)),
    "small-nal-1": ((69.2, 0.5), (46.0, 0.6), (55.8, 0.5), (45.8, 1.0)),
    "small-nal-10": ((70.2, 0.6), (44.0, 0.8), (67.8, 0.8), (48.9, 0.8)),
}
ALIKE = ("Sanskrit", "Bengali")  # the hard alphabets of "small r_H", to train and to test


@dataclass(frozen=True)
class Scale:
    """How much to train, over how many seeds, and how many tasks rank an alphabet."""

    training: Training
    seeds: int
    ranking_tasks: int


SCALES = {
    "quick": Scale(Training("maml", 1e-3, iterations=100, tasks=4, judged=60, filters=32), seeds=1, ranking_tasks=12),
    "paper": Scale(Training("maml", 1e-3, iterations=20_000, tasks=8, judged=500), seeds=2, ranking_tasks=200),
}
NAL_LR = 1e-6


def run(work: Work) -> Outcome:
    """Rank the alphabets, then train every method in both settings, or read what the trainings measured."""
    work.check_only(("ranking", *PUBLISHED))
    scale, images = SCALES[work.scale], _images(work)
    ranking = _rank(work, scale, images)
    if ranking is None:
        if work.only and "ranking" not in work.only:
            raise InputError("the hard alphabets come from the ranking, which is not finished. Add it to --only.")
        return Outcome(Result.of(work, ID, (), {}), {})
    made, records = _ranking_rows(ranking), {ranking.name: ranking}
    seeds = [replace(scale.training, seed=work.seed + turn) for turn in range(scale.seeds)]
    asked = [_asked(name, how, images, ranking) for name in PUBLISHED for how in seeds]
    measured = trained(work, ID, images, asked)
    for name, published in PUBLISHED.items():
        found = [record for each, record in zip(asked, measured) if each.part == name and record is not None]
        records |= {record.name: record for record in found}
        setting, _, learner = name.partition("-")
        made += rows(f"{setting} r_H, {learner.upper()}", found, published, "omniglot")
    return Outcome(Result.of(work, ID, tuple(made), records), records)


def _rank(work: Work, scale: Scale, images: LabelledImages) -> Record | None:
    """Train MAML on tasks within single alphabets, out of all of them, and measure its accuracy on each."""
    own = alphabets(images)
    ranked = {name: members for name, members in own.items() if len(members) >= WAYS}
    everything = replace(images, splits={"all": torch.cat(list(own.values()))})
    apart = replace(images, splits=ranked)
    how = replace(scale.training, seed=work.seed, judged=scale.ranking_tasks)
    tasks = everything.tasks("all", ways=WAYS, queries=TARGETS, superclass="same")
    kinds = {name: apart.tasks(name, ways=WAYS, queries=TARGETS) for name in ranked}
    about = {"ways": WAYS, "shots": 1, "queries": TARGETS}
    return trained(work, ID, images, [Asked("ranking", how, tasks, kinds, about)])[0]


def alphabets(images: LabelledImages) -> dict[str, torch.Tensor]:
    """Return the classes of every alphabet, of all splits together."""
    members = torch.cat(list(images.splits.values())).sort().values
    own = images.superclasses[members]
    return {
        name: members[own == index] for index, name in enumerate(images.superclass_names) if bool((own == index).any())
    }


def hardest(ranking: Record) -> list[str]:
    """Return the fifth of the alphabets, an even number, with the lowest accuracies, the lowest first."""
    return sorted(ranking.scores, key=lambda name: ranking.scores[name].mean)[: 2 * (len(ranking.scores) // 10)]


def divided(names: list[str], ranking: Record, setting: str, seed: int) -> dict[str, list[str]]:
    """Return the alphabets of each split: half of the hard ones train, and five eighths of the easy ones.

    With small r_H there is one hard alphabet to train and one to test, the two hardest where the
    paper's two are not there. An alphabet too small to be ranked is easy.
    """
    hard = hardest(ranking)
    alike = list(ALIKE) if set(ALIKE) <= set(names) else hard[:2]
    generator = torch.Generator().manual_seed(seed)
    shuffled = [names[index] for index in torch.randperm(len(names), generator=generator).tolist()]
    easy = [name for name in shuffled if name not in hard]
    hard = [name for name in shuffled if name in hard] if setting == "large" else alike
    parts = (easy[: len(easy) * 5 // 8], hard[: len(hard) // 2], easy[len(easy) * 5 // 8 :], hard[len(hard) // 2 :])
    own = dict(zip(KINDS, parts))
    return own | {kind: [name for name in own[kind] if name not in hard] for kind in ("easy train", "easy test")}


def _asked(name: str, how: Training, images: LabelledImages, ranking: Record) -> Asked:
    """Return the training of a setting and a method, on easy and hard tasks alike."""
    setting, _, learner = name.partition("-")
    shots = 10 if learner == "nal-10" else 1
    if learner != "maml":
        how = replace(how, method="nal", lr=NAL_LR)
    own = alphabets(images)
    parts = divided(list(own), ranking, setting, how.seed)
    parted = replace(images, splits={kind: torch.cat([own[each] for each in names]) for kind, names in parts.items()})
    form: Any = {"ways": WAYS, "shots": shots, "queries": TARGETS}
    kinds = {
        kind: parted.tasks(kind, **form, superclass="different" if kind.startswith("easy") else "same")
        for kind in KINDS
    }
    tasks = Mixture((kinds["easy train"], kinds["hard train"]), (0.5, 0.5))
    return Asked(name, how, tasks, kinds, {**form, "alphabets": parts})


def _ranking_rows(ranking: Record) -> list[Row]:
    """Return MAML's accuracy on the hard and on the easy alphabets when it ranked them."""
    hard = hardest(ranking)
    kinds = {"hard": hard, "easy": [name for name in ranking.scores if name not in hard]}
    made = []
    for kind, names in kinds.items():
        score = Accuracy.over([ranking.scores[name] for name in names])
        note = f"{ranking.plan['images']}; {', '.join(names)}"
        made.append(
            Row(f"ranking, {kind} alphabets", "accuracy %", ours=100 * score.mean, ci95=100 * score.ci95, note=note)
        )
    return made


def _images(work: Work) -> LabelledImages:
    """Return Omniglot, or at the quick scale glyphs where it is not at hand."""
    if work.data is not None and (work.data / "omniglot").exists():
        return load("omniglot", work.data / "omniglot").to(work.device)
    if work.scale == "paper":
        raise InputError(
            "the paper scale needs Omniglot, in the folder omniglot of the one that --data names "
            f"(now {work.data}). Use --scale quick to try the experiment without it."
        )
    return load("glyphs").to(work.device)


figure = beside.figure


EXPERIMENT = UnportedExperiment("landscape-table1", run, figure, resumable=True)
