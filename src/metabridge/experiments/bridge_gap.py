"""The gap between the predictions of ANIL and of MTL, from kernels, that bridge-fig1 and bridge-depth measure."""

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
    """Return the training tasks and the test tasks of every run, by its seed; no two seeds share a run."""
    seeds = range(seed * runs, (seed + 1) * runs)
    return {seed: regression_tasks(seed, training_tasks, test_tasks, device) for seed in seeds}


def regression_tasks(seed: int, training: int, test: int, device: str) -> tuple[Episodes, Episodes]:
    """Return training tasks of 10 points and test tasks of 5 + 10 points (Wang et al. 2021, §5.1).

    All labels are divided by the standard deviation of the training labels.
    """
    generator = torch.Generator().manual_seed(seed)
    train, tested = Quadratic(shots=5, queries=5).sample(training, generator), Quadratic().sample(test, generator)
    scale = train.without_split().support_y.std()

    def scaled(tasks: Episodes) -> Episodes:
        tasks = replace(tasks, support_y=tasks.support_y / scale, query_y=tasks.query_y / scale)
        return tasks.to(device, torch.float64)

    return scaled(train), scaled(tested)


def fit_anil_and_mtl(
    kernel: Kernel, train: Episodes, *, inner_time: float = 0.0, ridge: float = 0.0, outer_time: float = math.inf
) -> tuple[FittedKernelLearner, FittedKernelLearner]:
    """Return ANIL and MTL after training; at test time their heads adapt until convergence (lemma 1)."""
    anil = KernelLearner(kernel, "anil", inner_time, test_time=math.inf, outer_time=outer_time, ridge=ridge)
    return anil.fit(train), replace(anil, method="mtl").fit(train)


def prediction_gap(anil: FittedKernelLearner, mtl: FittedKernelLearner, test: Episodes) -> float:
    """Return ‖F_ANIL − F_MTL‖ over the queries of a task, averaged over the test tasks."""
    return float((anil.predict(test) - mtl.predict(test)).flatten(1).norm(dim=1).mean())
