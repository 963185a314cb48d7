"""Few-shot classification with kernels: MTL, ANIL and MAML at infinite width, compared with trained networks.

MTL is multi-task learning. No published numbers exist for this comparison. The order of the classes in a task is
random, so an output of the network stands for different classes in different tasks. At infinite width, an output learns
only from the same output in other tasks. Since the order is random, there is nothing that it can learn from them. In
networks of finite width, all outputs share features, which can be learned.

The experiment measures how much kernels gain from different numbers of training tasks, compared with regression on the
support set alone. As a control, it also measures the gain if outputs have the same meaning in all tasks, because
classes are sorted by the amount of ink in the upper half of their images. For networks, it measures the accuracy.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from torch.nn.functional import layer_norm

from metabridge.datasets import load
from metabridge.environments.image_tasks import LabeledImages
from metabridge.errors import InputError
from metabridge.experiments.experiment import Experiment, ExperimentOptions, Outcome
from metabridge.experiments.kernel_fewshot_trials import (
    INNER_TIMES,
    NEW_TASKS,
    RIDGES,
    SUPPORT_ALONE,
    KernelCase,
    PoolSize,
    Settings,
    Trial,
    kernel_trials,
    network_trials,
)
from metabridge.kernels import AnalyticKernel, conv4_kernel, fully_connected_kernel
from metabridge.kernels.kernel_table import KernelTable
from metabridge.report.results import Row
from metabridge.training.config import ImageTrainingConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from metabridge.diagnosis import Interval

# Height and width of the images in pixels: the smallest size that conv4 allows, because the cost of its kernel grows
# with the fourth power of the size.
SIZE = 16
# The infinitely wide networks, each with its NTK and its NNGP kernel.
KERNELS: dict[str, AnalyticKernel] = {"fully connected": fully_connected_kernel(depth=3), "conv4": conv4_kernel()}
MODEL_OPTIONS: dict[str, dict[str, object]] = {"conv4": {"filters": 32}, "mlp": {"width": 256}}  # of the trained nets


def network_configs(iterations: int, models: Iterable[str]) -> tuple[ImageTrainingConfig, ...]:
    """Return the configurations for training each network on 1-shot tasks by MAML, ANIL and MTL."""
    common = ImageTrainingConfig("maml", queries=5, iterations=iterations, lr=3e-3, validate_tasks=60)
    configs = []
    for model in models:
        maml = replace(common, model=model, model_options=MODEL_OPTIONS[model])
        configs += [
            replace(maml, method_options={"steps": 3, "lr": 0.2}),
            replace(maml, method="anil", method_options={"steps": 5, "lr": 0.1}, iterations=2 * iterations),
            replace(maml, method="mtl", batch_size=16, queries=4, lr=1e-2),
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


class Comparison(NamedTuple):
    """All trials, and the rows with the times to compute each kernel between all images of a data set."""

    duration_rows: list[Row]
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
            comparison.duration_rows.append(Row(f"{dataset}, {name} kernel", "seconds", ours=seconds, note=note))
            case = KernelCase(settings, dataset, name, table, pool, options.seed)
            for shots in settings.shots:
                comparison.trials.extend(kernel_trials(case, shots, settings.training_tasks))
            ink = pixels[:, 0, : SIZE // 2].mean((1, 2))  # in the upper half of each image
            control = replace(case, label=f"{name}, labels by ink,", sort_keys=ink)
            comparison.trials.extend(kernel_trials(control, settings.shots[0], settings.training_tasks[-1:]))
        # The networks are tested on images of the last pool. Every pool has the same test images.
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


def rows(comparison: Comparison, _: ExperimentOptions) -> list[Row]:
    """Return the rows with the time to compute the kernels, and those of all trials."""
    return comparison.duration_rows + [row for trial in comparison.trials for row in trial.rows()]


def figure(outcome: Outcome[Comparison]) -> Figure:
    """Draw the accuracies: a panel per data set and number of shots, a row per learner, a color per training data."""
    from metabridge.report import figures, result_figures

    trials = [trial for trial in outcome.data.trials if trial.trained_on != SUPPORT_ALONE]
    learners = list(dict.fromkeys(trial.learner for trial in trials))
    # by data set and number of shots: the accuracies of learners, by label in the legend
    panels: dict[tuple[str, int], dict[str, dict[str, Interval]]] = {}
    for trial in trials:
        series = panels.setdefault((trial.dataset, trial.shots), {})
        if trial.baseline is not None:
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


CONSTANTS = {"inner_times": [str(inner_time) for inner_time in INNER_TIMES], "ridges": RIDGES, "size": SIZE}
EXPERIMENT = Experiment("kernel-fewshot", measure, rows, figure, SETTINGS, CONSTANTS)
