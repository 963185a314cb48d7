"""Collins et al. 2022, table 2: MAML gains more over training without adaptation (NAL) if more tasks are hard.

Easy tasks of FS-CIFAR100 have two classes and many shots, hard tasks twenty classes and few shots. The network has
twenty outputs, of which easy tasks use the first two. It has to learn by adaptation whether a task is easy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from metabridge.datasets import cifar, load
from metabridge.environments.image_splits import hold_out_images
from metabridge.environments.image_tasks import ImageTasks, LabeledImages
from metabridge.environments.mixture import Mixture
from metabridge.errors import InputError
from metabridge.experiments.experiment import ExperimentOptions, TrainingExperiment
from metabridge.experiments.landscape_training_runs import (
    AccuracyRecord,
    Conv4Training,
    PlannedRun,
    accuracy_rows,
    records_of_run,
    train_all,
)
from metabridge.report.results import Row

# Accuracy in percent and the half-width of its 95 % interval (table 5), for easy and hard tasks of the training classes
# and easy and hard tasks of the test classes (`TASK_KINDS`). The keys contain the share p of hard tasks and the method.
PUBLISHED: dict[str, tuple[tuple[float, float], ...]] = {
    "p0.99-nal": ((78.2, 0.4), (9.9, 1.0), (74.8, 0.4), (9.5, 0.6)),
    "p0.99-maml": ((92.9, 0.3), (50.1, 1.0), (84.6, 0.4), (21.7, 0.3)),
    "p0.5-nal": ((81.9, 0.3), (9.5, 1.0), (76.5, 0.4), (8.6, 0.3)),
    "p0.5-maml": ((93.6, 0.5), (41.1, 0.3), (84.3, 0.6), (17.9, 0.4)),
    "p0.01-nal": ((82.4, 1.4), (7.6, 0.2), (76.9, 0.9), (8.2, 0.4)),
    "p0.01-maml": ((94.0, 1.2), (15.7, 0.3), (85.0, 0.2), (11.8, 0.3)),
}
NAL_LR, NAL_STEPS = 1e-6, 5


@dataclass(frozen=True)
class Settings:
    """How MAML is trained, the number of seeds, and the numbers of classes and images of the tasks."""

    training: Conv4Training
    seeds: int
    easy: tuple[int, int]  # ways and shots
    hard: tuple[int, int]  # ways and shots
    queries: int = 10
    nal_shots: int = 5  # shots of the training tasks of NAL, which trains on support and query examples

    @property
    def images_per_class(self) -> int:
        """The largest number of images of one class in a task."""
        return max(self.easy[1], self.hard[1], self.nal_shots) + self.queries


SETTINGS = {
    "quick": Settings(
        Conv4Training("maml", 1e-3, iterations=40, batch_size=2, test_tasks=24, filters=32),
        seeds=1,
        easy=(2, 5),
        hard=(20, 1),
        queries=5,
        nal_shots=3,
    ),
    "paper": Settings(
        Conv4Training("maml", 1e-3, iterations=10_000, batch_size=2, test_tasks=500),
        seeds=2,
        easy=(2, 50),
        hard=(20, 5),
    ),
}


def measure(options: ExperimentOptions) -> dict[str, AccuracyRecord]:
    """Train NAL and MAML with each share of hard tasks."""
    options.check_selected_names(PUBLISHED)
    settings = SETTINGS[options.scale]
    images = load_images(options, settings)
    seeds = range(options.seed, options.seed + settings.seeds)
    planned = [plan_training(settings, run_name, seed, images) for run_name in PUBLISHED for seed in seeds]
    return {record.name: record for record in train_all(options, EXPERIMENT.id, images, planned) if record is not None}


def plan_training(settings: Settings, run_name: str, seed: int, images: LabeledImages) -> PlannedRun:
    """Return the training run with this name, such as "p0.5-maml": MAML with half of the tasks hard."""
    hard_share, _, learner = run_name.removeprefix("p").partition("-")
    training = replace(settings.training, seed=seed)
    ways_and_shots = {"easy": settings.easy, "hard": settings.hard}
    training_shots = {hardness: shots for hardness, (_, shots) in ways_and_shots.items()}
    if learner == "nal":
        training = replace(training, method="nal", lr=NAL_LR, steps=NAL_STEPS)
        training_shots = dict.fromkeys(ways_and_shots, settings.nal_shots)

    def tasks(split: str, hardness: str, shots: int) -> ImageTasks:
        return images.tasks(split, ways=ways_and_shots[hardness][0], shots=shots, queries=settings.queries)

    training_tasks = tuple(tasks("train", hardness, shots) for hardness, shots in training_shots.items())
    mixture = Mixture(training_tasks, (1 - float(hard_share), float(hard_share)))
    # The test tasks called "easy train" and "hard train" have new images of the training classes. These images are in
    # the split "validation".
    test_tasks = {
        f"{hardness} {kind_of_classes}": tasks(split, hardness, shots)
        for kind_of_classes, split in {"train": "validation", "test": "test"}.items()
        for hardness, (_, shots) in ways_and_shots.items()
    }
    description = {
        "hard_share": float(hard_share),
        **ways_and_shots,
        "training_shots": training_shots,
        "queries": settings.queries,
    }
    return PlannedRun(run_name, training, mixture, test_tasks, description)


def rows(records: Mapping[str, AccuracyRecord], options: ExperimentOptions) -> Iterator[Row]:
    """Compare the accuracies of each method with the published ones."""
    for run_name, published in PUBLISHED.items():
        hard_share, _, learner = run_name.removeprefix("p").partition("-")
        by_seed = records_of_run(records, run_name, options)
        yield from accuracy_rows(f"p = {hard_share}, {learner.upper()}", by_seed, published, "fs-cifar100")


def load_images(options: ExperimentOptions, settings: Settings) -> LabeledImages:
    """Return FS-CIFAR100; if it is missing, mini-ImageNet at the same image size, or the glyphs at the quick scale."""
    if options.data is not None and cifar.matches(options.data):
        return load("fs-cifar100", options.data).to(options.device)
    if options.data is not None and (options.data / "mini-imagenet").exists():
        images = load("mini-imagenet", options.data / "mini-imagenet", size=32)
    elif options.scale == "quick":
        images = load("glyphs")
    else:
        raise InputError(
            "the paper scale needs CIFAR-100 in the subfolder cifar-100-python of the --data folder, or mini-ImageNet "
            f"in mini-imagenet, but --data is {options.data}. Use --scale quick to try the experiment without them."
        )
    return hold_out_images(images, settings.images_per_class).to(options.device)


EXPERIMENT = TrainingExperiment("landscape-table2", measure, rows)
