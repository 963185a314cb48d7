"""Few-shot classification with kernels: the gains of MTL, ANIL and MAML at infinite width and of trained networks.

There are no published numbers. The order of the classes in a task is arbitrary, so an output of the network means
another class in every task. At infinite width, an output learns only from the same output in other tasks, so averaged
over all orders of the classes there is nothing to learn. Networks of finite width share features between outputs and
can learn these.

The experiment measures the gain over regression on the support set alone: for kernels with different numbers of
training tasks, for trained networks, and for a control in which outputs have the same meaning in all tasks, because
classes are sorted by the amount of ink in the upper half of their images.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from metabridge.datasets import load
from metabridge.environments.image_tasks import ImageTasks, LabelledImages
from metabridge.episodes import Episodes
from metabridge.errors import InputError
from metabridge.experiments.experiment import Experiment, ExperimentOptions, Outcome
from metabridge.experiments.kernel_fewshot_data import (
    SIZE,
    IndexedTasks,
    KernelTable,
    PoolSize,
    downscaled,
    ink_in_upper_half,
    sample_pool,
)
from metabridge.kernels import AnalyticKernel, Kernel, KernelLearner, conv4_kernel, fully_connected_kernel
from metabridge.kernels.kernel_predictors import FittedKernelLearner, KernelMethod
from metabridge.report.results import Row
from metabridge.training import Score, evaluate
from metabridge.training.config import ImageTrainingConfig
from metabridge.training.image_training import train_on_images

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KERNELS: dict[str, AnalyticKernel] = {"fully connected": fully_connected_kernel(depth=3), "conv4": conv4_kernel()}
METHODS: tuple[KernelMethod, ...] = ("mtl", "anil", "maml")
# Regression on the support set alone: methods with an outer time of 0, so that only the inner loop is left.
BASELINES: dict[str, KernelMethod] = {"NNGP": "anil-split", "NTK": "maml"}
INNER_TIMES, RIDGES = (10.0, math.inf), (0.01, 1.0, 100.0)  # for kernels scaled so that Θ has a mean diagonal of 1
ANIL_TIME = 1.0  # inner time of ANIL in training
SUPPORT_ALONE, NEW_TASKS = "support alone", "fresh tasks"  # labels of the training data
QUERIES = {1: 2, 5: 1}  # query images per class in the training tasks of kernels, by number of shots


@dataclass(frozen=True)
class Settings:
    """What to compare, on which images and tasks.

    Args:
        datasets: Names of the data sets.
        shots: Numbers of support images per class.
        training_tasks: Numbers of training tasks of the kernels.
        train: Training images by kernel.
        validation: Validation images.
        test: Test images.
        validation_tasks: Number of validation tasks.
        test_tasks: Number of test tasks.
        plans: How to train the networks.
    """

    datasets: tuple[str, ...]
    shots: tuple[int, ...]
    training_tasks: tuple[int, ...]
    train: dict[str, PoolSize]
    validation: PoolSize
    test: PoolSize
    validation_tasks: int
    test_tasks: int
    plans: tuple[ImageTrainingConfig, ...]

    def pool(self, images: LabelledImages, kernel: str, seed: int) -> LabelledImages:
        """Return the images for a kernel. Validation and test images are the same for all kernels."""
        sizes = {"train": self.train[kernel], "validation": self.validation, "test": self.test}
        return sample_pool(images, sizes, seed)

    def evaluation_tasks(self, pool: LabelledImages, split: str, shots: int) -> ImageTasks:
        """Return the tasks of a split, with the largest number of queries that all shots and splits allow."""
        images_per_class = min(self.validation.images, self.test.images)
        return pool.tasks(split, shots=shots, queries=images_per_class - max(self.shots))


def network_configs(iterations: int, models: Iterable[str]) -> tuple[ImageTrainingConfig, ...]:
    """Return how to train each network on 1-shot tasks by MAML, ANIL and MTL."""
    model_options: dict[str, dict[str, object]] = {"conv4": {"filters": 32}, "mlp": {"width": 256}}
    configs = []
    for model in models:
        maml = ImageTrainingConfig(
            "maml",
            method_options={"steps": 3, "lr": 0.2},
            model=model,
            model_options=model_options[model],
            queries=5,
            iterations=iterations,
            lr=3e-3,
        )
        anil = replace(maml, method="anil", method_options={"steps": 5, "lr": 0.1}, iterations=2 * iterations)
        mtl = replace(maml, method="mtl", method_options={}, batch_size=16, queries=4, lr=1e-2)
        configs += [replace(config, validate_tasks=60) for config in (maml, anil, mtl)]
    return tuple(configs)


SETTINGS = {
    "quick": Settings(
        datasets=("glyphs",),
        shots=(1,),
        training_tasks=(10, 30),
        train={"fully connected": PoolSize(50, 5), "conv4": PoolSize(6, 3)},
        validation=PoolSize(6, 4),
        test=PoolSize(8, 6),
        validation_tasks=50,
        test_tasks=200,
        plans=network_configs(60, ("conv4",)),
    ),
    "paper": Settings(
        datasets=("glyphs", "omniglot"),
        shots=(1, 5),
        training_tasks=(10, 30, 100),
        train={"fully connected": PoolSize(200, 10), "conv4": PoolSize(10, 7)},
        validation=PoolSize(6, 8),
        test=PoolSize(12, 8),
        validation_tasks=100,
        test_tasks=500,
        plans=network_configs(200, ("conv4", "mlp")),
    ),
}


@dataclass(frozen=True, eq=False)
class Trial:
    """The test of one learner on one kind of task.

    Args:
        dataset: Name of the data set.
        shots: Number of support images per class.
        learner: Name of the learner.
        trained_on: Label of the training data.
        score: Test accuracy.
        training_seconds: Time to train.
        prediction_seconds: Time to predict all test tasks.
        note: The options of the learner.
        baseline: Test accuracy of the same kernel after regression on the support set alone.
    """

    dataset: str
    shots: int
    learner: str
    trained_on: str
    score: Score
    training_seconds: float
    prediction_seconds: float
    note: str
    baseline: Score | None = None

    def rows(self) -> Iterator[Row]:
        """Yield the accuracy, and its gain over the baseline."""
        name = f"{self.dataset}, {self.shots}-shot, {self.learner}, {self.trained_on}"
        per_task = 1000 * self.prediction_seconds / self.score.tasks
        cost = f"{self.training_seconds:.2g} s to train, {per_task:.2g} ms per task to predict"
        yield _score_row(name, "accuracy %", self.score, f"{self.note}; {cost}")
        if self.baseline is not None:
            gain = self.score.minus(self.baseline)
            yield _score_row(f"{name}, gain", "accuracy % above the support alone", gain, "the same tasks")


class Comparison(NamedTuple):
    """The rows with the times to compute the kernel tables, and all trials."""

    table_rows: list[Row]
    trials: list[Trial]


def measure(options: ExperimentOptions) -> Comparison:
    """Compare kernels and networks on every data set."""
    settings, comparison = SETTINGS[options.scale], Comparison([], [])
    for dataset in settings.datasets:
        images = downscaled(load_dataset(dataset, options))
        for name, kernel in KERNELS.items():
            pool = settings.pool(images, name, options.seed)
            table = KernelTable.compute(kernel, pool, options.device)
            note = f"{len(pool.images)} images at {SIZE} px"
            comparison.table_rows.append(Row(f"{dataset}, {name} kernel", "seconds", ours=table.seconds, note=note))
            for shots in settings.shots:
                case = KernelCase(settings, dataset, name, shots, table, pool, options.seed)
                comparison.trials.extend(case.trials(settings.training_tasks))
            label, ink = f"{name}, labels by ink,", ink_in_upper_half(pool)
            case = KernelCase(settings, dataset, label, settings.shots[0], table, pool, options.seed, ink)
            comparison.trials.extend(case.trials(settings.training_tasks[-1:]))
        comparison.trials.extend(network_trials(options, settings, dataset, images, pool))
    return comparison


def load_dataset(name: str, options: ExperimentOptions) -> LabelledImages:
    """Load a data set.

    Raises:
        InputError: If it is read from a folder and `options.data` is None.
    """
    if name == "glyphs":
        return load("glyphs")
    if options.data is None:
        raise InputError(f"data is None, but {name} is read from a folder. Use --data FOLDER or --scale quick.")
    return load(name, options.data / name)


@dataclass(frozen=True, eq=False)
class KernelCase:
    """One kernel on one kind of task. If `order` is not None, labels are ranks, as in `IndexedTasks`."""

    settings: Settings
    dataset: str
    kernel: str
    shots: int
    table: KernelTable
    pool: LabelledImages
    seed: int
    order: Tensor | None = None

    def trials(self, task_counts: tuple[int, ...]) -> list[Trial]:
        """Return the trials of regression on the support set alone, and of each method with each number of tasks."""
        training_tasks = self._training_tasks(task_counts[-1])
        baselines = {}
        for name, method in BASELINES.items():
            learners = [KernelLearner(self.table, method, time, outer_time=0.0) for time in INNER_TIMES]
            baselines[name] = self._trial(name, learners, training_tasks[:1], SUPPORT_ALONE, None)
        trials = list(baselines.values())
        for method in METHODS:
            baseline, name = baselines["NTK" if method == "maml" else "NNGP"].score, method.upper()
            learners = candidate_learners(self.table, method)
            for count in task_counts:
                trials.append(self._trial(name, learners, training_tasks[:count], f"{count} tasks", baseline))
            small_ridge = [learner for learner in learners if learner.ridge == RIDGES[0]]
            label = f"{task_counts[-1]} tasks, ridge {RIDGES[0]:g}"
            trials.append(self._trial(name, small_ridge, training_tasks, label, baseline))
        return trials

    def _trial(
        self,
        name: str,
        learners: list[KernelLearner],
        training_tasks: Episodes,
        trained_on: str,
        baseline: Score | None,
    ) -> Trial:
        """Select the best learner on validation tasks, and test it."""
        learner = max(learners, key=lambda learner: self._score(learner.fit(training_tasks), "validation").mean)
        start = time.perf_counter()
        fitted = learner.fit(training_tasks)
        training_end = time.perf_counter()
        score = self._score(fitted, "test")
        seconds = training_end - start, time.perf_counter() - training_end
        inner_time = learner.inner_time if learner.test_time is None else learner.test_time
        note = f"inner time {inner_time:g}" + (f", ridge {learner.ridge:g}" if baseline else "")
        return Trial(self.dataset, self.shots, f"{self.kernel} {name}", trained_on, score, *seconds, note, baseline)

    def _training_tasks(self, count: int) -> Episodes:
        tasks = IndexedTasks(self.pool.tasks("train", shots=self.shots, queries=QUERIES[self.shots]), self.order)
        return tasks.sample(count, torch.Generator().manual_seed(self.seed))

    def _score(self, fitted: FittedKernelLearner, split: str) -> Score:
        count = self.settings.test_tasks if split == "test" else self.settings.validation_tasks
        tasks = IndexedTasks(self.settings.evaluation_tasks(self.pool, split, self.shots), self.order)
        return evaluate(fitted, tasks, tasks=count, seed=self.seed)


def candidate_learners(kernel: Kernel, method: KernelMethod) -> list[KernelLearner]:
    """Return learners with this method, one for every inner time at test time and every ridge.

    In training, MAML has the same inner time, and MTL has no inner loop. ANIL has a short inner time in training: it
    trains without a split into support and query, so its inner loop must not fit the tasks exactly.
    """
    grid = [(time, ridge) for time in INNER_TIMES for ridge in RIDGES]
    if method == "maml":
        return [KernelLearner(kernel, method, time, ridge=ridge) for time, ridge in grid]
    return [KernelLearner(kernel, method, ANIL_TIME, test_time=time, ridge=ridge) for time, ridge in grid]


def network_trials(
    options: ExperimentOptions, settings: Settings, dataset: str, images: LabelledImages, pool: LabelledImages
) -> Iterator[Trial]:
    """Train every network on tasks from all training classes, and test it on the same tasks as the kernels."""
    for config in settings.plans:
        config = replace(config, seed=options.seed)
        run = train_on_images(config, images, device=options.device, progress=options.progress)
        for shots in settings.shots:
            start = time.perf_counter()
            tasks = settings.evaluation_tasks(pool, "test", shots)
            score = evaluate(run, tasks, tasks=settings.test_tasks, seed=options.seed)
            seconds = run.seconds, time.perf_counter() - start
            note = f"{config.iterations} steps of {config.batch_size} 1-shot tasks"
            learner = f"{config.model} net {config.method.upper()}"
            yield Trial(dataset, shots, learner, NEW_TASKS, score, *seconds, note)


def rows(comparison: Comparison, _: ExperimentOptions) -> list[Row]:
    """Return the rows of the kernel tables and of all trials."""
    return comparison.table_rows + [row for trial in comparison.trials for row in trial.rows()]


def _score_row(name: str, metric: str, score: Score, note: str) -> Row:
    return Row(name, metric, ours=100 * score.mean, ci95=100 * score.ci95, note=f"{score.tasks} tasks; {note}")


def figure(outcome: Outcome[Comparison]) -> Figure:
    """Draw the accuracies, with a panel for each kind of task, a row for each learner and a marker for its training."""
    from matplotlib.figure import Figure

    from metabridge.report import figures

    trials = outcome.data.trials
    measurements = [(trial, SUPPORT_ALONE, trial.baseline) for trial in trials if trial.baseline]
    measurements += [
        (trial, trial.trained_on, trial.score) for trial in trials if trial.baseline or trial.trained_on == NEW_TASKS
    ]
    panels = list(dict.fromkeys((trial.dataset, trial.shots) for trial, _, _ in measurements))
    learners = list(dict.fromkeys(trial.learner for trial, _, _ in measurements))
    series = [label for label in dict.fromkeys(label for _, label, _ in measurements) if "ridge" not in label]
    page = Figure(figsize=(3.4 + 2.5 * len(panels), 1.6 + 0.36 * len(learners)), layout="constrained")
    for axes, panel in zip(page.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels):
        for index, label in enumerate(series):
            selected = [
                (trial.learner, score)
                for trial, trained_on, score in measurements
                if (trial.dataset, trial.shots) == panel and trained_on == label
            ]
            axes.errorbar(
                [100 * score.mean for _, score in selected],
                [learners.index(learner) + 0.15 * (index - (len(series) - 1) / 2) for learner, _ in selected],
                xerr=[100 * score.ci95 for _, score in selected],
                fmt=figures.MARKERS[index],
                color=figures.COLORS[index],
                label="net, new tasks in every step" if label == NEW_TASKS else f"kernel, {label}",
                markersize=4,
            )
        axes.set(title=f"{panel[0]}, 5-way {panel[1]}-shot", xlabel="accuracy on test tasks, %")
    axes.set_yticks(range(len(learners)), learners)
    axes.invert_yaxis()
    page.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2 * len(panels))
    return page


CONSTANTS = {"inner_times": [str(time) for time in INNER_TIMES], "ridges": RIDGES, "size": SIZE}
EXPERIMENT = Experiment("kernel-fewshot", measure, rows, figure, SETTINGS, CONSTANTS)
