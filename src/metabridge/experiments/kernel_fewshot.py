"""Few-shot classification with kernels: the gains of MTL, ANIL and MAML at infinite width and of trained networks.

There are no published numbers. The order of the classes in a task is arbitrary, so an output of the network stands for
different classes in different tasks. At infinite width, an output learns only from the same output in other tasks.
Averaged over all orders of the classes, there is nothing that it can learn. In networks of finite width, all outputs
share features, which can be learned.

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
from torch.nn.functional import layer_norm

from metabridge.datasets import load
from metabridge.environments import Environment
from metabridge.environments.image_splits import random_subset
from metabridge.environments.image_tasks import ImageTasks, LabeledImages
from metabridge.environments.indexed_tasks import IndexedTasks
from metabridge.errors import InputError
from metabridge.experiments.experiment import Experiment, ExperimentOptions, Outcome
from metabridge.kernels import AnalyticKernel, Kernel, KernelLearner, conv4_kernel, fully_connected_kernel
from metabridge.kernels.kernel_predictors import KernelMethod
from metabridge.kernels.kernel_table import KernelTable
from metabridge.report.results import Row
from metabridge.training import Score, evaluate
from metabridge.training.config import ImageTrainingConfig
from metabridge.training.evaluation import Predictor, select_model
from metabridge.training.image_training import train_on_images

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from metabridge.diagnosis import Interval

# Height and width of the images in pixels: the smallest size that conv4 allows, because the cost of its kernel grows
# with the fourth power of the size.
SIZE = 16
KERNELS: dict[str, AnalyticKernel] = {"fully connected": fully_connected_kernel(depth=3), "conv4": conv4_kernel()}
METHODS: tuple[KernelMethod, ...] = ("mtl", "anil", "maml")
# Regression on the support set alone, by kernel: methods without outer training (outer time 0), which only adapt.
BASELINES: dict[str, KernelMethod] = {"NNGP": "anil-split", "NTK": "maml"}
INNER_TIMES, RIDGES = (10.0, math.inf), (0.01, 1.0, 100.0)  # for kernels scaled so that Θ has a mean diagonal of 1
ANIL_TIME = 1.0  # inner time of ANIL in training
SUPPORT_ALONE, NEW_TASKS = "support alone", "fresh tasks"  # labels of the training data in the names of rows
MODEL_OPTIONS: dict[str, dict[str, object]] = {"conv4": {"filters": 32}, "mlp": {"width": 256}}
QUERIES = {1: 2, 5: 1}  # query images per class in the training tasks of kernels, by number of shots


@dataclass(frozen=True)
class PoolSize:
    """The number of classes of a split that are used, and the number of images per class."""

    classes: int
    images: int


@dataclass(frozen=True)
class Settings:
    """What to compare, on which images and tasks."""

    datasets: tuple[str, ...]
    shots: tuple[int, ...]
    training_tasks: tuple[int, ...]  # numbers of training tasks of the kernels
    train: dict[str, PoolSize]  # training images by kernel
    validation: PoolSize
    test: PoolSize
    validation_tasks: int
    test_tasks: int
    plans: tuple[ImageTrainingConfig, ...]  # how to train the networks

    def pool(self, images: LabeledImages, kernel: str, seed: int) -> LabeledImages:
        """Return the images that are used with a kernel. Validation and test images are the same for all kernels."""
        sizes = {"train": self.train[kernel], "validation": self.validation, "test": self.test}
        return random_subset(images, {split: (size.classes, size.images) for split, size in sizes.items()}, seed=seed)

    def evaluation_tasks(self, pool: LabeledImages, split: str, shots: int) -> ImageTasks:
        """Return the tasks of a split, with the largest number of queries that is possible for all shots and splits."""
        images_per_class = min(self.validation.images, self.test.images)
        return pool.tasks(split, shots=shots, queries=images_per_class - max(self.shots))


def network_configs(iterations: int, models: Iterable[str]) -> tuple[ImageTrainingConfig, ...]:
    """Return the configurations for training each network on 1-shot tasks by MAML, ANIL and MTL."""
    base = ImageTrainingConfig("maml", queries=5, iterations=iterations, lr=3e-3, validate_tasks=60)
    configs = []
    for model in models:
        net = replace(base, model=model, model_options=MODEL_OPTIONS[model])
        configs += [
            replace(net, method_options={"steps": 3, "lr": 0.2}),
            replace(net, method="anil", method_options={"steps": 5, "lr": 0.1}, iterations=2 * iterations),
            replace(net, method="mtl", batch_size=16, queries=4, lr=1e-2),
        ]
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
    """The test accuracy of one learner on the tasks of one data set with one number of shots."""

    dataset: str
    shots: int
    learner: str
    trained_on: str  # label of the training data
    score: Score
    note: str
    baseline: Score | None = None  # accuracy of regression on the support set alone, with the same kernel

    def rows(self) -> Iterator[Row]:
        """Yield the accuracy, and its gain over the baseline."""
        name = f"{self.dataset}, {self.shots}-shot, {self.learner}, {self.trained_on}"
        yield _score_row(name, "accuracy %", self.score, self.note)
        if self.baseline is not None:
            gain = self.score.minus(self.baseline)
            yield _score_row(f"{name}, gain", "accuracy % above the support alone", gain, "the same tasks")


def _score_row(name: str, metric: str, score: Score, note: str) -> Row:
    return Row(name, metric, ours=100 * score.mean, ci95=100 * score.ci95, note=f"{score.tasks} tasks; {note}")


class Comparison(NamedTuple):
    """All trials, and the rows with the durations of computing the kernel tables."""

    table_rows: list[Row]
    trials: list[Trial]


def measure(options: ExperimentOptions) -> Comparison:
    """Compare kernels and networks on every data set."""
    settings, comparison = SETTINGS[options.scale], Comparison([], [])
    for dataset in settings.datasets:
        images = load_dataset(dataset, options).downscaled(SIZE)
        for name, kernel in KERNELS.items():
            pool = settings.pool(images, name, options.seed)
            pixels = layer_norm(pool.images.double(), pool.images.shape[1:])  # mean 0 and variance 1 in each image
            x = (pixels if kernel.pixel_dims else pixels.flatten(1)).to(options.device)
            start = time.perf_counter()
            table = KernelTable.compute(kernel, x)
            seconds = time.perf_counter() - start
            note = f"{len(x)} images at {SIZE} px"
            comparison.table_rows.append(Row(f"{dataset}, {name} kernel", "seconds", ours=seconds, note=note))
            case = KernelCase(settings, dataset, name, table, pool, options.seed)
            for shots in settings.shots:
                comparison.trials.extend(kernel_trials(case, shots, settings.training_tasks))
            ink = pixels[:, 0, : SIZE // 2].mean((1, 2))  # in the upper half of each image
            case = replace(case, kernel=f"{name}, labels by ink,", sort_keys=ink)
            comparison.trials.extend(kernel_trials(case, settings.shots[0], settings.training_tasks[-1:]))
        comparison.trials.extend(network_trials(options, settings, dataset, images, pool))
    return comparison


def load_dataset(name: str, options: ExperimentOptions) -> LabeledImages:
    """Load a data set.

    Raises:
        InputError: If the data set must be read from a folder, but `options.data` is None.
    """
    if name == "glyphs":
        return load("glyphs")
    if options.data is None:
        raise InputError(f"data is None, but {name} is read from a folder. Use --data FOLDER or --scale quick.")
    return load(name, options.data / name)


@dataclass(frozen=True, eq=False)
class KernelCase:
    """A kernel and the images on which it is evaluated. `sort_keys` determine the labels, as in `IndexedTasks`."""

    settings: Settings
    dataset: str
    kernel: str
    table: KernelTable
    pool: LabeledImages
    seed: int
    sort_keys: Tensor | None = None


def kernel_trials(case: KernelCase, shots: int, task_counts: tuple[int, ...]) -> Iterator[Trial]:
    """Yield the trials of regression on the support set, and of each method with each number of training tasks."""
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
        tasks = training_tasks[:count]
        fitted = (learner.fit(tasks) for learner in learners)
        learner = select_model(fitted, validation, tasks=settings.validation_tasks, seed=seed).learner
        start = time.perf_counter()
        model = learner.fit(tasks)
        score, timing = timed_test(settings, model, test, seed, time.perf_counter() - start)
        note = f"inner time {learner.test_time or learner.inner_time:g}" + (
            f", ridge {learner.ridge:g}" if baseline else ""
        )
        return Trial(case.dataset, shots, f"{case.kernel} {name}", trained_on, score, f"{note}; {timing}", baseline)

    baselines = {}
    for name, method in BASELINES.items():
        learners = [KernelLearner(table, method, inner_time, outer_time=0.0) for inner_time in INNER_TIMES]
        trial = select_and_test(name, learners, 1, SUPPORT_ALONE)
        baselines[name] = trial.score
        yield trial
    for method in METHODS:
        name, baseline = method.upper(), baselines["NTK" if method == "maml" else "NNGP"]
        learners = candidate_learners(table, method)
        for count in task_counts:
            yield select_and_test(name, learners, count, f"{count} tasks", baseline)
        small_ridge = [learner for learner in learners if learner.ridge == RIDGES[0]]
        most = task_counts[-1]
        yield select_and_test(name, small_ridge, most, f"{most} tasks, ridge {RIDGES[0]:g}", baseline)


def candidate_learners(kernel: Kernel, method: KernelMethod) -> list[KernelLearner]:
    """Return a learner of this method for every ridge and every inner time at test time.

    In training, MAML has the same inner time, and MTL has no inner loop. ANIL is trained on tasks without a query set
    and with a short inner time: if the inner loop fitted a task exactly, the features would learn nothing from it.
    """
    return [
        KernelLearner(kernel, method, time if method == "maml" else ANIL_TIME, test_time=time, ridge=ridge)
        for time in INNER_TIMES
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
            score, timing = timed_test(settings, run, tasks, options.seed, run.seconds)
            note = f"{config.iterations} steps of {config.batch_size} 1-shot tasks; {timing}"
            yield Trial(dataset, shots, f"{config.model} net {config.method.upper()}", NEW_TASKS, score, note)


def timed_test(
    settings: Settings, model: Predictor, environment: Environment, seed: int, training_seconds: float
) -> tuple[Score, str]:
    """Return the accuracy on test tasks, and a text with the times to train and to predict."""
    start = time.perf_counter()
    score = evaluate(model, environment, tasks=settings.test_tasks, seed=seed)
    milliseconds = 1000 * (time.perf_counter() - start) / score.tasks
    return score, f"{training_seconds:.2g} s to train, {milliseconds:.2g} ms per task to predict"


def rows(comparison: Comparison, _: ExperimentOptions) -> list[Row]:
    """Return the rows of the kernel tables and of all trials."""
    return comparison.table_rows + [row for trial in comparison.trials for row in trial.rows()]


def figure(outcome: Outcome[Comparison]) -> Figure:
    """Draw the accuracies: a panel per kind of task, a row per learner, and a color per kind of training data."""
    from metabridge.report import figures, result_figures

    trials = [trial for trial in outcome.data.trials if trial.baseline or trial.trained_on == NEW_TASKS]
    learners = list(dict.fromkeys(trial.learner for trial in trials))
    panels: dict[tuple[str, int], dict[str, dict[str, Interval]]] = {}
    for trial in trials:
        series = panels.setdefault((trial.dataset, trial.shots), {})
        if trial.baseline:
            series.setdefault(f"kernel, {SUPPORT_ALONE}", {})[trial.learner] = figures.percent_interval(trial.baseline)
        if "ridge" not in trial.trained_on:
            is_net = trial.trained_on == NEW_TASKS
            label = "net, new tasks in every step" if is_net else f"kernel, {trial.trained_on}"
            series.setdefault(label, {})[trial.learner] = figures.percent_interval(trial.score)
    size = (3.4 + 2.5 * len(panels), 1.6 + 0.36 * len(learners))
    page, axes_of_panels = result_figures.subplots("", 1, len(panels), size, sharey=True, squeeze=False)
    for axes, ((dataset, shots), series) in zip(axes_of_panels[0], panels.items()):
        figures.draw_intervals(axes, series, learners)
        axes.set(title=f"{dataset}, 5-way {shots}-shot", xlabel="accuracy on test tasks, %")
    page.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2 * len(panels))
    return page


CONSTANTS = {"inner_times": [str(time) for time in INNER_TIMES], "ridges": RIDGES, "size": SIZE}
EXPERIMENT = Experiment("kernel-fewshot", measure, rows, figure, SETTINGS, CONSTANTS)
