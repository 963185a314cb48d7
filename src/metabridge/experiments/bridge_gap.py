"""The gap between the kernel predictions of ANIL and multi-task learning (MTL), for bridge-fig1 and bridge-depth."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from metabridge.environments.regression_functions import Quadratic
from metabridge.episodes import Episodes
from metabridge.kernels import FittedKernelLearner, Kernel, KernelLearner

GAP_LABEL = "gap $\\|F_{ANIL} - F_{MTL}\\|$ on a test task"


def draw_tasks(
    runs: int, training_tasks: int, test_tasks: int, seed: int, device: str
) -> dict[int, tuple[Episodes, Episodes]]:
    """Return the training and test tasks of every run, by the seed of the run.

    All run seeds are distinct, also across calls with different `seed` and the same `runs`.
    """
    run_seeds = range(seed * runs, (seed + 1) * runs)
    return {run_seed: regression_tasks(run_seed, training_tasks, test_tasks, device) for run_seed in run_seeds}


def regression_tasks(seed: int, training_tasks: int, test_tasks: int, device: str) -> tuple[Episodes, Episodes]:
    """Return training tasks of 10 points, and test tasks of 5 support and 10 query points (Wang et al. 2021, §5.1).

    All labels are divided by the standard deviation of the training labels.
    """
    generator = torch.Generator().manual_seed(seed)
    train = Quadratic(shots=5, queries=5).sample(training_tasks, generator)
    test = Quadratic().sample(test_tasks, generator)
    label_std = train.without_split().support_y.std()
    train, test = (tasks.map_targets(lambda y: y / label_std).to(device, torch.float64) for tasks in (train, test))
    return train, test


def fit_anil_and_mtl(
    kernel: Kernel, train: Episodes, *, inner_time: float = 0.0, ridge: float = 0.0, outer_time: float = math.inf
) -> tuple[FittedKernelLearner, FittedKernelLearner]:
    """Train ANIL and MTL. At test time, their heads adapt until convergence (Wang et al. 2021, lemma 1).

    Args:
        kernel: Kernel of the network.
        train: The training tasks.
        inner_time: Inner time λτ of ANIL in training. MTL has no inner loop in training.
        ridge: Number added to the diagonals of the kernel matrices of the training tasks.
        outer_time: Outer learning rate times number of steps. Infinite: training until convergence.

    Returns:
        ANIL and MTL after training.
    """
    anil = KernelLearner(kernel, "anil", inner_time, test_time=math.inf, outer_time=outer_time, ridge=ridge)
    return anil.fit(train), replace(anil, method="mtl").fit(train)


def prediction_gap(anil: FittedKernelLearner, mtl: FittedKernelLearner, test: Episodes) -> float:
    """Return the mean over test tasks of ‖F_ANIL − F_MTL‖, where F are the predictions for the queries of a task."""
    return float((anil.predict(test) - mtl.predict(test)).flatten(1).norm(dim=1).mean())
