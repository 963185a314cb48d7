"""Kernels as few-shot classifiers: what MTL, ANIL and MAML gain at infinite width, and what trained networks gain.

There are no published numbers. Kernels learn one-hot labels, which have no meaning beyond a task: relabelling a task
moves its classes to other outputs. At infinite width an output learns only from the same output of other tasks, so over
all relabellings of the training tasks nothing is left to learn. Networks of finite width share features between outputs
and can learn those. The experiment shows the gain of kernels over regression on the support alone, with few and with
many training tasks, the gain of networks, and a control in which outputs have the same meaning in all tasks: labels by
the share of ink in the upper half of the images.
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
# Regression on the support alone: the methods with no time for training, which leaves the inner loop.
BASELINES: dict[str, KernelMethod] = {"NNGP": "anil-split", "NTK": "maml"}
INNER_TIMES, RIDGES = (10.0, math.inf), (0.01, 1.0, 100.0)  # for kernels whose Θ has a mean of 1 on its diagonal
ANIL_TIME = 1.0  # inner time in training
SUPPORT_ALONE, NEW_TASKS = "support alone", "fresh tasks"  # what a learner was trained on
QUERIES = {1: 2, 5: 1}  # query images per class in the training tasks of kernels, by shots


@dataclass(frozen=True)
class Settings:
    """What to compare, on which images and tasks.

    Args:
        datasets: Names of the datasets.
        shots: Support images per class.
        training_tasks: Numbers of training tasks of the kernels.
        train: Training images for each kernel.
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
        """Return the images for a kernel; the validation and test images are the same for all kernels."""
        sizes = {"train": self.train[kernel], "validation": self.validation, "test": self.test}
        return sample_pool(images, sizes, seed)

    def evaluation_tasks(self, pool: LabelledImages, split: str, shots: int) -> ImageTasks:
        """Return tasks with as many queries as the images allow for the most shots."""
        images = min(self.validation.images, self.test.images)
        return pool.tasks(split, shots=shots, queries=images - max(self.shots))


def network_plans(iterations: int, models: Iterable[str]) -> tuple[ImageTrainingConfig, ...]:
    """Return MAML, ANIL and MTL for each network, trained on 1-shot tasks."""
    options: dict[str, dict[str, object]] = {"conv4": {"filters": 32}, "mlp": {"width": 256}}
    plans = []
    for model in models:
        maml = ImageTrainingConfig(
            "maml",
            method_options={"steps": 3, "lr": 0.2},
            model=model,
            model_options=options[model],
            queries=5,
            iterations=iterations,
            lr=3e-3,
        )
        anil = replace(maml, method="anil", method_options={"steps": 5, "lr": 0.1}, iterations=2 * iterations)
        mtl = replace(maml, method="mtl", method_options={}, batch_size=16, queries=4, lr=1e-2)
        plans += [replace(plan, validate_tasks=60) for plan in (maml, anil, mtl)]
    return tuple(plans)


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
        plans=network_plans(60, ("conv4",)),
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
        plans=network_plans(200, ("conv4", "mlp")),
    ),
}


@dataclass(frozen=True, eq=False)
class Trial:
    """One learner on one kind of task.

    Args:
        dataset: Name of the dataset.
        shots: Support images per class.
        learner: Name of the learner.
        trained_on: What it was trained on.
        score: Test accuracy.
        training_seconds: Time to train.
        prediction_seconds: Time to predict all test tasks.
        note: The selected options.
        baseline: Accuracy of the same kernel on the support alone.
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
        """Yield the accuracy, and how much of it is due to training."""
        name = f"{self.dataset}, {self.shots}-shot, {self.learner}, {self.trained_on}"
        per_task = 1000 * self.prediction_seconds / self.score.tasks
        cost = f"{self.training_seconds:.2g} s to train, {per_task:.2g} ms per task to predict"
        yield _score_row(name, "accuracy %", self.score, f"{self.note}; {cost}")
        if self.baseline is not None:
            gain = self.score.minus(self.baseline)
            yield _score_row(f"{name}, gain", "accuracy % above the support alone", gain, "the same tasks")


class Comparison(NamedTuple):
    """Rows about the kernel tables, and all trials."""

    table_rows: list[Row]
    trials: list[Trial]


def measure(options: ExperimentOptions) -> Comparison:
    """Compare kernels and networks on every dataset."""
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
            control, order = f"{name}, labels by ink,", ink_in_upper_half(pool)
            case = KernelCase(settings, dataset, control, settings.shots[0], table, pool, options.seed, order)
            comparison.trials.extend(case.trials(settings.training_tasks[-1:]))
        comparison.trials.extend(network_trials(options, settings, dataset, images, pool))
    return comparison


def load_dataset(name: str, options: ExperimentOptions) -> LabelledImages:
    """Return a dataset.

    Raises:
        InputError: If it needs a folder and `options.data` is None.
    """
    if name == "glyphs":
        return load("glyphs")
    if options.data is None:
        raise InputError(f"data is None, but {name} is read from a folder. Use --data FOLDER or --scale quick.")
    return load(name, options.data / name)


@dataclass(frozen=True, eq=False)
class KernelCase:
    """One kernel on one kind of task. With `order`, the labels are ranks, as in `IndexedTasks`."""

    settings: Settings
    dataset: str
    kernel: str
    shots: int
    table: KernelTable
    pool: LabelledImages
    seed: int
    order: Tensor | None = None

    def trials(self, task_counts: tuple[int, ...]) -> list[Trial]:
        """Return the trials of regression on the support alone, and of every method by number of training tasks."""
        training = self._training_tasks(task_counts[-1])
        baselines = {}
        for name, method in BASELINES.items():
            grid = [KernelLearner(self.table, method, time, outer_time=0.0) for time in INNER_TIMES]
            baselines[name] = self._trial(name, grid, training[:1], SUPPORT_ALONE, None)
        trials = list(baselines.values())
        for method in METHODS:
            baseline, name = baselines["NTK" if method == "maml" else "NNGP"].score, method.upper()
            grid = option_grid(self.table, method)
            for count in task_counts:
                trials.append(self._trial(name, grid, training[:count], f"{count} tasks", baseline))
            small_ridge = [learner for learner in grid if learner.ridge == RIDGES[0]]
            label = f"{task_counts[-1]} tasks, ridge {RIDGES[0]:g}"
            trials.append(self._trial(name, small_ridge, training, label, baseline))
        return trials

    def _trial(
        self, name: str, grid: list[KernelLearner], training: Episodes, trained_on: str, baseline: Score | None
    ) -> Trial:
        """Select a learner on validation tasks and test it."""
        validation = [self._score(learner.fit(training), "validation").mean for learner in grid]
        learner = grid[max(range(len(grid)), key=lambda index: validation[index])]
        start = time.perf_counter()
        fitted = learner.fit(training)
        trained = time.perf_counter()
        score = self._score(fitted, "test")
        seconds = trained - start, time.perf_counter() - trained
        inner_time = learner.inner_time if learner.test_time is None else learner.test_time
        note = f"inner time {inner_time:g}" + (f", ridge {learner.ridge:g}" if baseline else "")
        return Trial(self.dataset, self.shots, f"{self.kernel} {name}", trained_on, score, *seconds, note, baseline)

    def _training_tasks(self, tasks: int) -> Episodes:
        training = IndexedTasks(self.pool.tasks("train", shots=self.shots, queries=QUERIES[self.shots]), self.order)
        return training.sample(tasks, torch.Generator().manual_seed(self.seed))

    def _score(self, fitted: FittedKernelLearner, split: str) -> Score:
        count = self.settings.test_tasks if split == "test" else self.settings.validation_tasks
        tasks = IndexedTasks(self.settings.evaluation_tasks(self.pool, split, self.shots), self.order)
        return evaluate(fitted, tasks, tasks=count, seed=self.seed)


def option_grid(kernel: Kernel, method: KernelMethod) -> list[KernelLearner]:
    """Return the method with every inner time at test and every ridge.

    MTL has no inner loop in training. ANIL trains without a split, so its inner loop must not fit a task exactly.
    """
    grid = [(time, ridge) for time in INNER_TIMES for ridge in RIDGES]
    if method == "maml":
        return [KernelLearner(kernel, method, time, ridge=ridge) for time, ridge in grid]
    return [KernelLearner(kernel, method, ANIL_TIME, test_time=time, ridge=ridge) for time, ridge in grid]


def network_trials(
    options: ExperimentOptions, settings: Settings, dataset: str, images: LabelledImages, pool: LabelledImages
) -> Iterator[Trial]:
    """Train every network on new tasks of all training classes, and test it on the tasks of the kernels."""
    for plan in settings.plans:
        config = replace(plan, seed=options.seed)
        run = train_on_images(config, images, device=options.device, progress=options.progress)
        for shots in settings.shots:
            start = time.perf_counter()
            tasks = settings.evaluation_tasks(pool, "test", shots)
            score = evaluate(run, tasks, tasks=settings.test_tasks, seed=options.seed)
            seconds = run.seconds, time.perf_counter() - start
            note, name = f"{plan.iterations} steps of {plan.batch_size} 1-shot tasks", f"{plan.model} net"
            yield Trial(dataset, shots, f"{name} {plan.method.upper()}", NEW_TASKS, score, *seconds, note)


def rows(comparison: Comparison, _: ExperimentOptions) -> list[Row]:
    """Return the rows of the kernel tables and of all trials."""
    return comparison.table_rows + [row for trial in comparison.trials for row in trial.rows()]


def _score_row(name: str, metric: str, score: Score, note: str) -> Row:
    return Row(name, metric, ours=100 * score.mean, ci95=100 * score.ci95, note=f"{score.tasks} tasks; {note}")


def figure(outcome: Outcome[Comparison]) -> Figure:
    """Draw the accuracies: a panel for every kind of task, a line for every learner, a marker for its training."""
    from matplotlib.figure import Figure

    from metabridge.report import figures

    trials = outcome.data.trials
    points = [(trial, SUPPORT_ALONE, trial.baseline) for trial in trials if trial.baseline]
    points += [
        (trial, trial.trained_on, trial.score) for trial in trials if trial.baseline or trial.trained_on == NEW_TASKS
    ]
    panels = list(dict.fromkeys((trial.dataset, trial.shots) for trial, _, _ in points))
    lines = list(dict.fromkeys(trial.learner for trial, _, _ in points))
    kinds = [kind for kind in dict.fromkeys(kind for _, kind, _ in points) if "ridge" not in kind]
    page = Figure(figsize=(3.4 + 2.5 * len(panels), 1.6 + 0.36 * len(lines)), layout="constrained")
    for axes, panel in zip(page.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels):
        for index, kind in enumerate(kinds):
            selected = [
                (trial.learner, score)
                for trial, trained_on, score in points
                if (trial.dataset, trial.shots) == panel and trained_on == kind
            ]
            axes.errorbar(
                [100 * score.mean for _, score in selected],
                [lines.index(learner) + 0.15 * (index - (len(kinds) - 1) / 2) for learner, _ in selected],
                xerr=[100 * score.ci95 for _, score in selected],
                fmt=figures.MARKERS[index],
                color=figures.COLORS[index],
                label="net, fresh tasks" if kind == NEW_TASKS else f"kernel, {kind}",
                markersize=4,
            )
        axes.set(title=f"{panel[0]}, 5-way {panel[1]}-shot", xlabel="accuracy on test tasks, %")
    axes.set_yticks(range(len(lines)), lines)
    axes.invert_yaxis()
    page.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2 * len(panels))
    return page


CONSTANTS = {"inner_times": [str(time) for time in INNER_TIMES], "ridges": RIDGES, "size": SIZE}
EXPERIMENT = Experiment("kernel-fewshot", measure, rows, figure, SETTINGS, CONSTANTS)
