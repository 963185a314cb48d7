"""How `kernel_fewshot` trains and tests kernels and networks on small sets of images."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from metabridge.environments import Environment
from metabridge.environments.image_splits import random_subset
from metabridge.environments.image_tasks import ImageTasks, LabeledImages
from metabridge.environments.indexed_tasks import IndexedTasks
from metabridge.experiments.experiment import ExperimentOptions
from metabridge.kernels import Kernel, KernelLearner
from metabridge.kernels.kernel_predictors import KernelMethod
from metabridge.kernels.kernel_table import KernelTable
from metabridge.report.results import Row
from metabridge.training import Score, evaluate
from metabridge.training.config import ImageTrainingConfig
from metabridge.training.evaluation import Predictor, select_model
from metabridge.training.image_training import train_on_images

METHODS: tuple[KernelMethod, ...] = ("mtl", "anil", "maml")
# The methods that predict by regression on the support set alone if they are not trained (outer time 0): ANIL by
# regression with the NNGP kernel, MAML by regression with the NTK.
BASELINES: dict[str, KernelMethod] = {"NNGP": "anil-split", "NTK": "maml"}
INNER_TIMES, RIDGES = (10.0, math.inf), (0.01, 1.0, 100.0)  # for kernels scaled so that the mean NTK(x, x) is 1
ANIL_TIME = 1.0  # inner time of ANIL in training
# What a learner is trained on, in the names of rows: baselines on nothing, networks on new tasks in every step. For
# trained kernels, the names contain the number of training tasks instead.
SUPPORT_ALONE, NEW_TASKS = "support alone", "fresh tasks"
QUERIES = {1: 2, 5: 1}  # query images per class in the training tasks of kernels, by number of shots


@dataclass(frozen=True)
class PoolSize:
    """The number of classes of a split that are used, and the number of images per class."""

    classes: int
    images: int


@dataclass(frozen=True)
class Settings:
    """What to compare, on which images and tasks. The kernels are named by their architecture, such as "conv4"."""

    datasets: tuple[str, ...]
    shots: tuple[int, ...]
    training_tasks: tuple[int, ...]  # numbers of training tasks, ascending; kernels are trained with each of them
    train: dict[str, PoolSize]  # which images the training tasks of a kernel are sampled from, by name of the kernel
    validation: PoolSize
    test: PoolSize
    validation_tasks: int  # number of tasks
    test_tasks: int  # number of tasks
    plans: tuple[ImageTrainingConfig, ...]  # configurations for training the networks

    def pool(self, images: LabeledImages, kernel: str, seed: int) -> LabeledImages:
        """Return the images that are used with a kernel. Validation and test images are the same for all kernels."""
        sizes = {"train": self.train[kernel], "validation": self.validation, "test": self.test}
        return random_subset(images, {split: (size.classes, size.images) for split, size in sizes.items()}, seed=seed)

    def evaluation_tasks(self, pool: LabeledImages, split: str, shots: int) -> ImageTasks:
        """Return the validation or test tasks.

        All have the same number of query images per class: those that are left if the support set has the most shots.
        """
        images_per_class = min(self.validation.images, self.test.images)
        return pool.tasks(split, shots=shots, queries=images_per_class - max(self.shots))


@dataclass(frozen=True, eq=False)
class Trial:
    """The test accuracy of one learner on the tasks of one data set with one number of shots."""

    dataset: str
    shots: int
    learner: str  # in the names of rows, such as "conv4 MAML" for a kernel or "conv4 net MAML" for a network
    trained_on: str  # in the names of rows: "100 tasks", `SUPPORT_ALONE` or `NEW_TASKS`
    score: Score
    note: str
    baseline: Score | None = None  # for a trained kernel: accuracy of regression on the support set alone

    def rows(self) -> Iterator[Row]:
        """Yield the accuracy, and its gain over the baseline if there is one."""
        name = f"{self.dataset}, {self.shots}-shot, {self.learner}, {self.trained_on}"
        yield _score_row(name, "accuracy %", self.score, self.note)
        if self.baseline is not None:
            gain = self.score.minus(self.baseline)
            yield _score_row(f"{name}, gain", f"accuracy % minus that of {SUPPORT_ALONE}", gain, "the same for both")


def _score_row(name: str, metric: str, score: Score, note: str) -> Row:
    return Row(name, metric, ours=100 * score.mean, ci95=100 * score.ci95, note=f"{score.tasks} tasks; {note}")


@dataclass(frozen=True, eq=False)
class KernelCase:
    """A kernel, and the images from which its tasks are sampled.

    Args:
        settings: The settings of the experiment.
        dataset: Name of the data set.
        label: Name of the kernel in the names of rows.
        table: The NTK and the NNGP kernel between all images of the pool.
        pool: The images.
        seed: Seed of all tasks.
        sort_keys: One number per image. In each task, the classes are labeled in ascending order of its mean over their
            support images. None to label them in random order.
    """

    settings: Settings
    dataset: str
    label: str
    table: KernelTable
    pool: LabeledImages
    seed: int
    sort_keys: Tensor | None = None


def kernel_trials(case: KernelCase, shots: int, task_counts: tuple[int, ...]) -> Iterator[Trial]:
    """Yield the trials of regression on the support set, and of each method with each number of training tasks.

    Args:
        case: The kernel and its images.
        shots: Number of support images per class.
        task_counts: Numbers of training tasks, ascending.
    """
    settings, pool, table, seed = case.settings, case.pool, case.table, case.seed
    train, validation, test = (
        IndexedTasks(environment, case.sort_keys)
        for environment in (
            pool.tasks("train", shots=shots, queries=QUERIES[shots]),
            settings.evaluation_tasks(pool, "validation", shots),
            settings.evaluation_tasks(pool, "test", shots),
        )
    )
    training_tasks = train.sample(task_counts[-1], torch.Generator().manual_seed(seed))

    def select_and_test(
        name: str, learners: list[KernelLearner], count: int, trained_on: str, baseline: Score | None = None
    ) -> Trial:
        """Fit all learners to the first `count` tasks, and test the one with the best validation accuracy."""
        tasks = training_tasks[:count]
        fitted = (learner.fit(tasks) for learner in learners)
        learner = select_model(fitted, validation, tasks=settings.validation_tasks, seed=seed).learner
        start = time.perf_counter()
        model = learner.fit(tasks)
        score, durations = timed_test(settings, model, test, seed, time.perf_counter() - start)
        is_trained = baseline is not None  # otherwise, the learner is a baseline itself, and its ridge has no effect
        note = f"inner time {learner.test_time or learner.inner_time:g}" + (
            f", ridge {learner.ridge:g}" if is_trained else ""
        )
        return Trial(case.dataset, shots, f"{case.label} {name}", trained_on, score, f"{note}; {durations}", baseline)

    baselines = {}
    for name, method in BASELINES.items():
        learners = [KernelLearner(table, method, inner_time, outer_time=0.0) for inner_time in INNER_TIMES]
        trial = select_and_test(name, learners, 1, SUPPORT_ALONE)  # `fit` needs a task, but learns nothing from it
        baselines[name] = trial.score
        yield trial
    for method in METHODS:
        name, baseline = method.upper(), baselines["NTK" if method == "maml" else "NNGP"]
        learners = candidate_learners(table, method)
        for count in task_counts:
            yield select_and_test(name, learners, count, f"{count} tasks", baseline)
        small_ridge = [learner for learner in learners if learner.ridge == RIDGES[0]]
        max_count = task_counts[-1]
        yield select_and_test(name, small_ridge, max_count, f"{max_count} tasks, ridge {RIDGES[0]:g}", baseline)


def candidate_learners(kernel: Kernel, method: KernelMethod) -> list[KernelLearner]:
    """Return a learner of this method for every combination of a ridge and an inner time for adaptation to test tasks.

    MAML has the same inner time in training, and MTL has no inner loop in training. ANIL is trained on tasks without a
    query set and with a short inner time: if the inner loop fitted a task exactly, the features would learn nothing
    from it.
    """
    return [
        KernelLearner(kernel, method, test_time if method == "maml" else ANIL_TIME, test_time=test_time, ridge=ridge)
        for test_time in INNER_TIMES
        for ridge in RIDGES
    ]


def network_trials(
    options: ExperimentOptions, settings: Settings, dataset: str, images: LabeledImages, pool: LabeledImages
) -> Iterator[Trial]:
    """Train every network on tasks from all training classes, and test it on the same tasks as the kernels."""
    for config in settings.plans:
        config = replace(config, seed=options.seed)
        run = train_on_images(config, images, device=options.device, progress=options.progress)
        for shots in settings.shots:
            tasks = settings.evaluation_tasks(pool, "test", shots)
            score, durations = timed_test(settings, run, tasks, options.seed, run.seconds)
            note = f"{config.iterations} steps of {config.batch_size} 1-shot tasks; {durations}"
            yield Trial(dataset, shots, f"{config.model} net {config.method.upper()}", NEW_TASKS, score, note)


def timed_test(
    settings: Settings, model: Predictor, environment: Environment, seed: int, training_seconds: float
) -> tuple[Score, str]:
    """Return the accuracy on test tasks, and a text with the durations of training and of prediction."""
    start = time.perf_counter()
    score = evaluate(model, environment, tasks=settings.test_tasks, seed=seed)
    milliseconds = 1000 * (time.perf_counter() - start) / score.tasks
    return score, f"{training_seconds:.2g} s to train, {milliseconds:.2g} ms per task to predict"
