"""Resumable training of linear networks on tasks with a shared representation (Yüksel et al. 2023, §5).

All runs of one method train side by side.
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

from metabridge.environments.shared_representation import VARIANCES, SharedRepresentation
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

STEPS_PER_CHECK = 100  # steps between checks of the clock
CURVE_POINTS = 60  # approximate number of points of a curve


@dataclass(frozen=True)
class LinearAnilConfig:
    """How the networks are trained.

    The defaults are those of Yüksel et al. (2023, §5), with the step sizes and the initialization that their table 1
    implies.

    Args:
        runs: Number of independent runs.
        tasks: Number of training tasks per run.
        steps: Number of outer steps.
        iterations: Number of L-BFGS iterations of Burer–Monteiro factorization.
        designs: Number of sets of test inputs; as many others choose the penalty of ridge regression.
        dimension: Dimension of the inputs.
        width: Width of the network.
        variances: Variances of the tasks along the shared directions.
        mean: Mean of the tasks along the shared directions; zero if None.
        noise: Variance of the label noise.
        m_in: Number of support points per task.
        m_out: Number of query points per task.
        m_test: Numbers of support points of test tasks.
        alpha: Size of the inner step.
        beta: Size of the outer step.
    """

    runs: int = 10
    tasks: int = 5000
    steps: int = 30_000
    iterations: int = 300
    designs: int = 1000
    dimension: int = 50
    width: int = 50
    variances: tuple[float, ...] = VARIANCES
    mean: tuple[float, ...] | None = None
    noise: float = 4.0
    m_in: int = 20
    m_out: int = 10
    m_test: tuple[int, ...] = (20, 30)
    alpha: float = 0.025
    beta: float = 0.025

    @property
    def rates(self) -> AnilSettings:
        """The step sizes, with `m_in` support points."""
        return AnilSettings(self.alpha, self.beta, self.m_in)

    @property
    def infinite_sample_rates(self) -> AnilSettings:
        """The step sizes, with infinitely many support points."""
        return AnilSettings(self.alpha, self.beta, math.inf)

    def environments(self, seed: int) -> list[SharedRepresentation]:
        """Return the environment of each run."""
        return [
            SharedRepresentation(
                self.dimension, self.variances, self.mean, self.noise, self.m_in, self.m_out, self.tasks, run_seed
            )
            for run_seed in range(seed * self.runs, (seed + 1) * self.runs)
        ]

    def covariance(self) -> Tensor:
        """Return Σ*, the covariance of the tasks along the shared directions."""
        return torch.diag(torch.tensor(self.variances, dtype=torch.float64))

    def limit(self, rates: AnilSettings) -> tuple[float, float]:
        """Return the smallest and the largest eigenvalue of Λ* (Yüksel et al. 2023, eq. 8)."""
        values = torch.linalg.eigvalsh(limiting_gram(self.covariance(), self.noise, rates))
        return float(values[0]), float(values[-1])


@dataclass
class RepresentationCurves:
    """Measurements during training.

    Args:
        steps: The steps at which the networks were measured.
        values: For each quantity the values of every run at `steps`. The quantities are those of
            `theory.anil.Spectrum`, and for networks with a shared initial head `start`, ‖Bw − E[θ]‖².
    """

    steps: list[int] = field(default_factory=list)
    values: dict[str, list[list[float]]] = field(default_factory=dict)

    def measure(self, step: int, environments: list[SharedRepresentation], B: Tensor, w: Tensor | None = None) -> None:
        """Append the measurements of the networks of all runs."""
        B = B.double().cpu()
        bases = torch.stack([environment.representation for environment in environments])
        measured: dict[str, Tensor] = spectrum(B, bases)._asdict()
        if w is not None:
            mean = torch.stack([TaskMoments.from_environment(environment).mean for environment in environments])
            measured["start"] = ((B @ w.double().cpu()[..., None])[..., 0] - mean).square().sum(-1)
        self.steps.append(step)
        for quantity, values in measured.items():
            for curve, value in zip(self.values.setdefault(quantity, [[] for _ in environments]), values.tolist()):
                curve.append(float(f"{value:.6g}"))

    def join(self, other: RepresentationCurves) -> RepresentationCurves:
        """Return the curves of these runs followed by those of others, measured at the same steps."""
        values = {quantity: self.values.get(quantity, []) + curves for quantity, curves in other.values.items()}
        return RepresentationCurves(other.steps, values)


class TrainedLinearNets(NamedTuple):
    """The trained networks of all runs.

    Args:
        B: First layers, (runs, d, k'), in float64.
        w: Initial heads, (runs, k'); None for Burer–Monteiro, which has one head per task.
        curves: The measurements during training.
        seconds: Training time.
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
    """Train a first-order method by gradient descent, resuming from the state in `folder`.

    Args:
        method: "fo-anil", "fo-maml", "infinite-tasks" or "infinite-samples".
        config: How to train.
        environments: The environment of each run.
        device: Where to compute.
        folder: Folder of the saved state.
        deadline: Value of `time.perf_counter()` after which training stops.

    Returns:
        The trained networks, or None if the deadline passed first.
    """
    starts = [
        initial_parameters(
            config.dimension, config.width, config.alpha, torch.Generator().manual_seed(environment.seed)
        )
        for environment in environments
    ]
    state: NetParams = (torch.stack([B for B, _ in starts]), torch.stack([w for _, w in starts]))
    done, seconds, curves = 0, 0.0, RepresentationCurves()
    saved = folder.read("state")
    if saved is not None:
        tensors, metadata = saved
        state = (tensors["B"], tensors["w"])
        done, seconds = metadata["done"], metadata["seconds"]
        curves = RepresentationCurves(**metadata["curves"])
    else:
        curves.measure(0, environments, *state)
    step, dtype = _outer_step(method, config, environments, device)
    iteration = RepeatedStep(step, (state[0].to(device, dtype), state[1].to(device, dtype)))
    steps_to_measure = measured_steps(config.steps)
    while done < config.steps and time.perf_counter() < deadline:
        began = time.perf_counter()
        next_measured = next(step for step in steps_to_measure if step > done)
        count = min(STEPS_PER_CHECK, next_measured - done)
        iteration.advance(count)
        done += count
        seconds += time.perf_counter() - began
        if done == next_measured:
            curves.measure(done, environments, *iteration.params)
    B, w = iteration.params
    folder.write("state", {"B": B, "w": w}, {"done": done, "seconds": seconds, "curves": asdict(curves)})
    return None if done < config.steps else TrainedLinearNets(B.double().cpu(), w.double().cpu(), curves, seconds)


def train_burer_monteiro(
    config: LinearAnilConfig,
    environments: list[SharedRepresentation],
    device: str,
    folder: RunFolder,
    deadline: float,
) -> TrainedLinearNets | None:
    """Factorize the tasks of one run after another (Yüksel et al. 2023, eq. 12), resuming after the finished runs.

    Args:
        config: How to train.
        environments: The environment of each run.
        device: Where to compute.
        folder: Folder of the saved state.
        deadline: Value of `time.perf_counter()` after which no further run starts.

    Returns:
        The trained networks, or None if the deadline passed first.
    """
    finished: Params = {}
    seconds, curves = 0.0, RepresentationCurves()
    saved = folder.read("state")
    if saved is not None:
        finished, metadata = saved
        seconds, curves = metadata["seconds"], RepresentationCurves(**metadata["curves"])
    while len(finished) < len(environments) and time.perf_counter() < deadline:
        began, run = time.perf_counter(), len(finished)
        finished[str(run)], run_curves = _burer_monteiro(config, environments[run], device)
        curves = curves.join(run_curves)
        seconds += time.perf_counter() - began
        folder.write("state", finished, {"seconds": seconds, "curves": asdict(curves)})
    if len(finished) < len(environments):
        return None
    B = torch.stack([finished[str(run)] for run in range(len(environments))])
    return TrainedLinearNets(B, None, curves, seconds)


def measured_steps(steps: int) -> list[int]:
    """Return the steps after which to measure: evenly spaced, and denser at the beginning.

    >>> measured_steps(3), measured_steps(1000)[:4], measured_steps(1000)[-3:]
    ([1, 2, 3], [1, 2, 3, 4], [950, 975, 1000])
    """
    positions = [*np.geomspace(1, steps, CURVE_POINTS // 2), *np.linspace(0, steps, CURVE_POINTS // 2 + 11)[1:]]
    return sorted({max(1, round(float(position))) for position in positions})


def _outer_step(
    method: str, config: LinearAnilConfig, environments: list[SharedRepresentation], device: str
) -> tuple[Callable[[Tensor, Tensor], NetParams], torch.dtype]:
    """Return the outer step of a method for all runs at once, and its dtype."""
    if method == "infinite-tasks":
        moments = [TaskMoments.from_environment(environment) for environment in environments]
        population = stack_moments(moments).to(device)
        return partial(population_step, tasks=population, settings=config.rates), torch.float64
    if method == "infinite-samples":
        moments = [TaskMoments.from_tasks(run.task_parameters, run.noise) for run in environments]
        population = stack_moments(moments).to(device)
        return partial(population_step, tasks=population, settings=config.infinite_sample_rates), torch.float64
    points = TaskPoints.from_episodes([environment.tasks for environment in environments]).to(device, torch.float32)
    adapts: Literal["head", "all"] = "all" if method == "fo-maml" else "head"
    return partial(first_order_step, points=points, settings=config.rates, adapts=adapts), torch.float32


def _burer_monteiro(
    config: LinearAnilConfig, environment: SharedRepresentation, device: str
) -> tuple[Tensor, RepresentationCurves]:
    """Minimize by L-BFGS from B₀ᵀB₀ = I/100 and heads of squared norm k'/100; return B and its curves."""
    generator = torch.Generator().manual_seed(environment.seed)
    B, _ = initial_parameters(environment.dimension, config.width, 25.0, generator)  # I/4α with α = 25
    heads = torch.randn(config.tasks, config.width, generator=generator, dtype=torch.float64)
    heads *= math.sqrt(0.01 * config.width) / heads.norm(dim=1, keepdim=True)
    tasks = environment.tasks.without_split().to(device, torch.float64)

    def split(flat: NDArray[np.float64]) -> tuple[Tensor, Tensor]:
        tensor = torch.tensor(flat)
        return tensor[: B.numel()].view_as(B), tensor[B.numel() :].view_as(heads)

    def objective(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        leaves = tuple(part.to(device).requires_grad_() for part in split(flat))
        loss = factorization_loss(leaves[0], leaves[1], tasks.support_x, tasks.support_y[..., 0])
        grads = torch.autograd.grad(loss, leaves)
        return loss.item(), torch.cat([grad.flatten() for grad in grads]).cpu().numpy()

    def measure(flat: NDArray[np.float64]) -> None:
        iteration = next(count)
        if iteration in iterations_to_measure:
            curves.measure(iteration, [environment], split(flat)[0][None])

    curves, count = RepresentationCurves(), itertools.count(1)
    iterations_to_measure = measured_steps(config.iterations)
    curves.measure(0, [environment], B[None])
    solution = optimize.minimize(
        objective,
        torch.cat([B.flatten(), heads.flatten()]).numpy(),
        jac=True,
        method="L-BFGS-B",
        callback=measure,
        options={"maxiter": config.iterations, "ftol": 0, "gtol": 0, "maxfun": 20 * config.iterations},
    )
    return split(solution.x)[0], curves
