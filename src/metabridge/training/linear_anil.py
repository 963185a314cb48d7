"""Resumable training of linear networks on tasks with a shared representation (Yüksel et al. 2023, §5).

ANIL (almost no inner loop) is MAML that adapts only the head; "FO" means first-order. A network is x ↦ ⟨Bw, x⟩ with
first layer B and head w. The regression vector of a task is θ = B*w*, where the columns of B* are the directions that
all tasks share.

All runs of a first-order method are trained in parallel, as one batch. Burer–Monteiro factorization, which learns a
separate head for each task, is trained in one run after another.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import optimize
from torch import Tensor

from metabridge.environments.shared_representation import DEFAULT_VARIANCES, SharedRepresentation
from metabridge.models.network import Params
from metabridge.theory.anil import (
    AnilSettings,
    TaskMoments,
    initial_parameters,
    limiting_gram,
    population_step,
    spectrum,
    stack_moments,
)
from metabridge.theory.finite_tasks import NetParams, RepeatedStep, TaskPoints, factorization_loss, first_order_step
from metabridge.training.checkpoint import RunFolder

STEPS_PER_CHECK = 100  # number of steps between checks of the deadline
CURVE_POINTS = 60  # approximate number of points of a curve


@dataclass(frozen=True)
class LinearAnilConfig:
    """The tasks, the networks and the training options of an experiment.

    The defaults follow Yüksel et al. (2023, §5), with the step sizes and the initialization that their table 1
    implies.

    Args:
        runs: Number of independent runs.
        tasks: Number of training tasks per run.
        steps: Number of outer steps.
        iterations: Number of L-BFGS iterations of Burer–Monteiro factorization.
        designs: Number of design matrices (sets of inputs) of the test tasks. As many others are used to select the
            penalty of ridge regression.
        dimension: Dimension of the inputs.
        width: Width of the network.
        variances: Variances of the coordinates w* of a task along the shared directions.
        mean: Means of these coordinates. None: zero.
        noise: Variance of the noise on the targets.
        m_in: Number of support examples per task.
        m_out: Number of query examples per task.
        m_test: Numbers of support examples per test task; each of them is evaluated.
        alpha: Step size of the inner loop.
        beta: Step size of the outer loop.
    """

    runs: int = 10
    tasks: int = 5000
    steps: int = 30_000
    iterations: int = 300
    designs: int = 1000
    dimension: int = 50
    width: int = 50
    variances: tuple[float, ...] = DEFAULT_VARIANCES
    mean: tuple[float, ...] | None = None
    noise: float = 4.0
    m_in: int = 20
    m_out: int = 10
    m_test: tuple[int, ...] = (20, 30)
    alpha: float = 0.025
    beta: float = 0.025

    @property
    def anil_settings(self) -> AnilSettings:
        """The step sizes and the number of support examples."""
        return AnilSettings(self.alpha, self.beta, self.m_in)

    @property
    def infinite_sample_settings(self) -> AnilSettings:
        """The step sizes, and an infinite number of support examples."""
        return AnilSettings(self.alpha, self.beta, math.inf)

    def environments(self, seed: int) -> list[SharedRepresentation]:
        """Return the environment of each run. Different values of `seed` give different environments."""
        return [
            SharedRepresentation(
                self.dimension, self.variances, self.mean, self.noise, self.m_in, self.m_out, self.tasks, run_seed
            )
            for run_seed in range(seed * self.runs, (seed + 1) * self.runs)
        ]

    def covariance(self) -> Tensor:
        """Return Σ*, the covariance of the coordinates w* of the tasks along the shared directions."""
        return torch.diag(torch.tensor(self.variances, dtype=torch.float64))

    def limiting_eigenvalues(self, settings: AnilSettings) -> tuple[float, float]:
        """Return the smallest and the largest eigenvalue of Λ*, the limit of B*ᵀBBᵀB* (Yüksel et al. 2023, eq. 8)."""
        eigenvalues = torch.linalg.eigvalsh(limiting_gram(self.covariance(), self.noise, settings))
        return float(eigenvalues[0]), float(eigenvalues[-1])


@dataclass
class RepresentationCurves:
    """Quantities of the networks x ↦ ⟨Bw, x⟩ of all runs, with first layers B and heads w, measured during training.

    Args:
        steps: The steps at which the networks were measured.
        values: For each quantity, one list per run with its values at `steps`. The quantities are the fields of
            `theory.anil.Spectrum` and, for networks with a shared initial head w, "start", which is ‖Bw − E[θ]‖²
            for the regression vectors θ of the tasks.
    """

    steps: list[int] = field(default_factory=list)
    values: dict[str, list[list[float]]] = field(default_factory=dict)

    def measure(self, step: int, environments: list[SharedRepresentation], B: Tensor, w: Tensor | None = None) -> None:
        """Measure the networks of all runs, with first layers `B` and initial heads `w`, and append the values."""
        B = B.double().cpu()
        bases = torch.stack([environment.representation for environment in environments])
        measured: dict[str, Tensor] = spectrum(B, bases)._asdict()
        if w is not None:
            mean = torch.stack([TaskMoments.from_environment(environment).mean for environment in environments])
            measured["start"] = ((B @ w.double().cpu()[..., None])[..., 0] - mean).square().sum(-1)
        self.steps.append(step)
        for quantity, values in measured.items():
            for curve, value in zip(self.values.setdefault(quantity, [[] for _ in environments]), values.tolist()):
                curve.append(float(f"{value:.6g}"))  # six digits keep the stored curves short

    def join(self, other: RepresentationCurves) -> RepresentationCurves:
        """Return the curves of the runs of `self`, then those of `other`, which must be measured at the same steps."""
        values = {quantity: self.values.get(quantity, []) + curves for quantity, curves in other.values.items()}
        return RepresentationCurves(other.steps, values)


class TrainedLinearNets(NamedTuple):
    """The trained networks of all runs.

    Args:
        B: First layers, (runs, inputs d, width k'), in float64.
        w: Initial heads, (runs, k'); None for Burer–Monteiro, which has one head per task.
        curves: The measurements during training.
        seconds: Training time in seconds.
    """

    B: Tensor
    w: Tensor | None
    curves: RepresentationCurves
    seconds: float


def train_first_order(
    method: str,
    config: LinearAnilConfig,
    environments: list[SharedRepresentation],
    device: str,
    folder: RunFolder,
    deadline: float,
) -> TrainedLinearNets | None:
    """Train a first-order method by gradient descent. If there is a saved state in `folder`, resume from it.

    Args:
        method: "fo-anil", "fo-maml", "infinite-tasks" (the expected step of "fo-anil" over all tasks) or
            "infinite-samples" ("fo-anil" on the training tasks with infinitely many examples).
        config: Training options.
        environments: The environment of each run.
        device: Device, such as "cpu".
        folder: Folder of the saved state.
        deadline: Value of `time.perf_counter()` after which training stops.

    Returns:
        The trained networks, or None if the deadline passed first.
    """
    initial_params = [
        initial_parameters(
            config.dimension, config.width, config.alpha, torch.Generator().manual_seed(environment.seed)
        )
        for environment in environments
    ]
    params: NetParams = (torch.stack([B for B, _ in initial_params]), torch.stack([w for _, w in initial_params]))
    steps_done, seconds, curves = 0, 0.0, RepresentationCurves()
    saved = folder.read("state")
    if saved is not None:
        tensors, metadata = saved
        params = (tensors["B"], tensors["w"])
        steps_done, seconds = metadata["done"], metadata["seconds"]
        curves = RepresentationCurves(**metadata["curves"])
    else:
        curves.measure(0, environments, *params)
    outer_step, dtype = _outer_step(method, config, environments, device)
    repeated_step = RepeatedStep(outer_step, (params[0].to(device, dtype), params[1].to(device, dtype)))
    measured_steps = steps_to_measure(config.steps)
    while steps_done < config.steps and time.perf_counter() < deadline:
        start_time = time.perf_counter()
        next_measured_step = next(step for step in measured_steps if step > steps_done)
        count = min(STEPS_PER_CHECK, next_measured_step - steps_done)
        repeated_step.advance(count)
        steps_done += count
        seconds += time.perf_counter() - start_time
        if steps_done == next_measured_step:
            curves.measure(steps_done, environments, *repeated_step.params)
    B, w = repeated_step.params
    folder.write("state", {"B": B, "w": w}, {"done": steps_done, "seconds": seconds, "curves": asdict(curves)})
    return None if steps_done < config.steps else TrainedLinearNets(B.double().cpu(), w.double().cpu(), curves, seconds)


def train_burer_monteiro(
    config: LinearAnilConfig,
    environments: list[SharedRepresentation],
    device: str,
    folder: RunFolder,
    deadline: float,
) -> TrainedLinearNets | None:
    """Train by Burer–Monteiro factorization, one run after another (Yüksel et al. 2023, eq. 12).

    Finished runs are saved in `folder`, and are not repeated.

    Args:
        config: Training options.
        environments: The environment of each run.
        device: Device, such as "cpu".
        folder: Folder of the saved state.
        deadline: Value of `time.perf_counter()` after which no new run is started.

    Returns:
        The trained networks, or None if the deadline passed first.
    """
    finished_layers: Params = {}  # first layers B of the finished runs, by run number
    seconds, curves = 0.0, RepresentationCurves()
    saved = folder.read("state")
    if saved is not None:
        finished_layers, metadata = saved
        seconds, curves = metadata["seconds"], RepresentationCurves(**metadata["curves"])
    while len(finished_layers) < len(environments) and time.perf_counter() < deadline:
        start_time, run = time.perf_counter(), len(finished_layers)
        finished_layers[str(run)], run_curves = _burer_monteiro(config, environments[run], device)
        curves = curves.join(run_curves)
        seconds += time.perf_counter() - start_time
        folder.write("state", finished_layers, {"seconds": seconds, "curves": asdict(curves)})
    if len(finished_layers) < len(environments):
        return None
    B = torch.stack([finished_layers[str(run)] for run in range(len(environments))])
    return TrainedLinearNets(B, None, curves, seconds)


def steps_to_measure(steps: int) -> list[int]:
    """Return the steps after which to measure: evenly spaced, and denser at the beginning.

    >>> steps_to_measure(3), steps_to_measure(1000)[:4], steps_to_measure(1000)[-3:]
    ([1, 2, 3], [1, 2, 3, 4], [950, 975, 1000])
    """
    # a few more than CURVE_POINTS points, since some of them coincide after rounding
    log_spaced = np.geomspace(1, steps, CURVE_POINTS // 2)
    evenly_spaced = np.linspace(0, steps, CURVE_POINTS // 2 + 11)[1:]
    return sorted({max(1, round(float(position))) for position in [*log_spaced, *evenly_spaced]})


def _outer_step(
    method: str, config: LinearAnilConfig, environments: list[SharedRepresentation], device: str
) -> tuple[Callable[[Tensor, Tensor], NetParams], torch.dtype]:
    """Return the outer step of a method for all runs at once, and the dtype of its arguments."""
    if method == "infinite-tasks":
        moments = stack_moments([TaskMoments.from_environment(environment) for environment in environments]).to(device)
        return partial(population_step, tasks=moments, settings=config.anil_settings), torch.float64
    if method == "infinite-samples":
        moments = stack_moments(
            [TaskMoments.from_tasks(environment.task_parameters, environment.noise) for environment in environments]
        )
        settings = config.infinite_sample_settings
        return partial(population_step, tasks=moments.to(device), settings=settings), torch.float64
    points = TaskPoints.from_episodes([environment.tasks for environment in environments]).to(device, torch.float32)
    adapts: Literal["head", "all"] = "all" if method == "fo-maml" else "head"
    return partial(first_order_step, points=points, settings=config.anil_settings, adapts=adapts), torch.float32


def _burer_monteiro(
    config: LinearAnilConfig, environment: SharedRepresentation, device: str
) -> tuple[Tensor, RepresentationCurves]:
    """Minimize `factorization_loss` by L-BFGS, and return B and its curves.

    Training starts from a first layer B₀ of width k' with B₀ᵀB₀ = I/100, and from heads of squared norm k'/100.
    """
    generator = torch.Generator().manual_seed(environment.seed)
    alpha = 25.0  # so that B₀ᵀB₀ = I/(4α) = I/100
    B, _ = initial_parameters(environment.dimension, config.width, alpha, generator)
    heads = torch.randn(config.tasks, config.width, generator=generator, dtype=torch.float64)
    heads *= math.sqrt(0.01 * config.width) / heads.norm(dim=1, keepdim=True)
    tasks = environment.tasks.without_split().to(device, torch.float64)

    def unflatten(flat: NDArray[np.float64]) -> tuple[Tensor, Tensor]:
        """Return B and the heads from a vector of all parameters."""
        tensor = torch.tensor(flat)
        return tensor[: B.numel()].view_as(B), tensor[B.numel() :].view_as(heads)

    def objective(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        leaves = tuple(tensor.to(device).requires_grad_() for tensor in unflatten(flat))
        loss = factorization_loss(leaves[0], leaves[1], tasks.support_x, tasks.support_y[..., 0])
        grads = torch.autograd.grad(loss, leaves)
        return loss.item(), torch.cat([grad.flatten() for grad in grads]).cpu().numpy()

    def measure(flat: NDArray[np.float64]) -> None:
        iteration = next(iteration_numbers)
        if iteration in measured_iterations:
            curves.measure(iteration, [environment], unflatten(flat)[0][None])

    curves, iteration_numbers = RepresentationCurves(), itertools.count(1)
    measured_iterations = steps_to_measure(config.iterations)
    curves.measure(0, [environment], B[None])
    solution = optimize.minimize(
        objective,
        torch.cat([B.flatten(), heads.flatten()]).numpy(),
        jac=True,
        method="L-BFGS-B",
        callback=measure,
        options={"maxiter": config.iterations, "ftol": 0, "gtol": 0, "maxfun": 20 * config.iterations},
    )
    return unflatten(solution.x)[0], curves
