"""C's table 2: the more of the tasks are hard, the more MAML gains over no adaptation in training (NAL).

Easy tasks of FS-CIFAR100 have two ways and many shots, hard ones twenty ways and few. The net has
twenty outputs, of which easy tasks use the first two: adaptation finds out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from metabridge.datasets import cifar, load
from metabridge.environments.image_tasks import ImageTasks, LabelledImages
from metabridge.environments.mixture import Mixture
from metabridge.errors import InputError
from metabridge.experiments import beside
from metabridge.experiments.landscape_trainings import Asked, Outcome, Record, Training, rows, trained
from metabridge.experiments.result import Result, Row, UnportedExperiment, Work

ID = "landscape-table2"

# accuracy in percent and the half-width of its 95 % interval, on each of `KINDS` (C table 5); p is that of hard tasks
PUBLISHED: dict[str, tuple[tuple[float, float], ...]] = {
    "p0.99-nal": ((78.2, 0.4), (9.9, 1.0), (74.8, 0.4), (9.5, 0.6)),
    "p0.99-maml": ((92.9, 0.3), (50.1, 1.0), (84.6, 0.4), (21.7, 0.3)),
    "p0.5-nal": ((81.9, 0.3), (9.5, 1.0), (76.5, 0.4), (8.6, 0.3)),
    "p0.5-maml": ((93.6, 0.5), (41.1, 0.3), (84.3, 0.6), (17.9, 0.4)),
    "p0.01-nal": ((82.4, 1.4), (7.6, 0.2), (76.9, 0.9), (8.2, 0.4)),
    "p0.01-maml": ((94.0, 1.2), (15.7, 0.3), (85.0, 0.2), (11.8, 0.3)),
}


@dataclass(frozen=True)
class Scale:
    """How much to train, over how many seeds, and what tasks are like."""

    training: Training
    seeds: int
    easy: tuple[int, int]  # ways and shots
    hard: tuple[int, int]
    targets: int = 10
    nal_shots: int = 5  # with the targets, the images of a class that NAL trains on

    @property
    def needed(self) -> int:
        """How many images of a class the tasks need."""
        return max(self.easy[1], self.hard[1], self.nal_shots) + self.targets


SCALES = {
    "quick": Scale(
        Training("maml", 1e-3, iterations=40, tasks=2, judged=24, filters=32),
        seeds=1,
        easy=(2, 5),
        hard=(20, 1),
        targets=5,
        nal_shots=3,
    ),
    "paper": Scale(Training("maml", 1e-3, iterations=10_000, tasks=2, judged=500), seeds=2, easy=(2, 50), hard=(20, 5)),
}
NAL_LR, NAL_STEPS = 1e-6, 5


def run(work: Work) -> Outcome:
    """Train both methods with every share of hard tasks, or read what the trainings measured."""
    work.check_only(PUBLISHED)
    scale = SCALES[work.scale]
    images = _images(work, scale)
    made: list[Row] = []
    records: dict[str, Record] = {}
    seeds = range(work.seed, work.seed + scale.seeds)
    asked = [_asked(scale, name, seed, images) for name in PUBLISHED for seed in seeds]
    measured = trained(work, ID, images, asked)
    for name, published in PUBLISHED.items():
        found = [record for each, record in zip(asked, measured) if each.part == name and record is not None]
        records |= {record.name: record for record in found}
        share, _, learner = name.removeprefix("p").partition("-")
        made += rows(f"p = {share}, {learner.upper()}", found, published, "fs-cifar100")
    return Outcome(Result.of(work, ID, tuple(made), records), records)


def _asked(scale: Scale, name: str, seed: int, images: LabelledImages) -> Asked:
    """Return the training of a method with a share of hard tasks."""
    share, _, learner = name.removeprefix("p").partition("-")
    how, forms = replace(scale.training, seed=seed), {"easy": scale.easy, "hard": scale.hard}
    shots = {kind: own for kind, (_, own) in forms.items()}
    if learner == "nal":
        how = replace(how, method="nal", lr=NAL_LR, steps=NAL_STEPS)
        shots = dict.fromkeys(forms, scale.nal_shots)

    def drawn(split: str, kind: str, shots: int) -> ImageTasks:
        return images.tasks(split, ways=forms[kind][0], shots=shots, queries=scale.targets)

    tasks = Mixture(tuple(drawn("train", kind, shots[kind]) for kind in forms), (1 - float(share), float(share)))
    kinds = {
        f"{kind} {seen}": drawn(split, kind, own)
        for seen, split in {"train": "validation", "test": "test"}.items()
        for kind, (_, own) in forms.items()
    }
    about = {"hard_share": float(share), **forms, "training_shots": shots, "queries": scale.targets}
    return Asked(name, how, tasks, kinds, about)


def _images(work: Work, scale: Scale) -> LabelledImages:
    """Return FS-CIFAR100, or what stands in for it: mini-ImageNet at the same size, or at the quick scale glyphs."""
    if work.data is not None and cifar.holds(work.data):
        return load("fs-cifar100", work.data).to(work.device)
    if work.data is not None and (work.data / "mini-imagenet").exists():
        images = load("mini-imagenet", work.data / "mini-imagenet", size=32)
    elif work.scale == "quick":
        images = load("glyphs")
    else:
        raise InputError(
            "the paper scale needs CIFAR-100, in the folder cifar-100-python of the one that --data names, or "
            f"mini-ImageNet in mini-imagenet (now {work.data}). Use --scale quick to try the experiment without it."
        )
    return held_out(images, scale.needed).to(work.device)


def held_out(images: LabelledImages, least: int) -> LabelledImages:
    """Part the images of the training and validation classes as FS-CIFAR100's are.

    All these classes train. The last quarter of each one's images, or `least` if that is more, become
    a class of their own in the validation split: there accuracy on classes seen is measured.
    """
    seen = torch.cat([images.splits["train"], images.splits["validation"]])
    labels = images.labels.clone()
    for place, member in enumerate(seen.tolist()):
        own = (images.labels == member).nonzero().squeeze(1)
        labels[own[-max(len(own) // 4, least) :]] = len(images.class_names) + place
    return replace(
        images,
        labels=labels,
        class_names=(*images.class_names, *(f"{images.class_names[each]} (held out)" for each in seen.tolist())),
        superclasses=torch.cat([images.superclasses, images.superclasses[seen]]),
        splits={
            "train": seen,
            "validation": len(images.class_names) + torch.arange(len(seen)),
            "test": images.splits["test"],
        },
    )


figure = beside.figure


EXPERIMENT = UnportedExperiment("landscape-table2", run, figure, resumable=True)
