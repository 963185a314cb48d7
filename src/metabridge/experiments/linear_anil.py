"""How all runs of one method are trained on tasks with a shared representation, to be stopped at any time (D §5)."""

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
from metabridge.theory.finite_tasks import NetParams, RepeatedStep, TaskPoints, factorisation_loss, first_order_step
from metabridge.training.checkpoint import RunFolder

CHUNK = 100  # steps between looks at the clock
MARKS = 60  # points of a curve, about


@dataclass(frozen=True)
class Setting:
    """How the nets are trained; the defaults are D's (§5), with the step sizes and the start that its table implies."""

    runs: int = 10
    tasks: int = 5000
    steps: int = 30_000
    iterations: int = 300  # of Burer–Monteiro's L-BFGS
    designs: int = 1000  # sets of points that judge a net, and as many that choose the penalty of ridge regression
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
        """The step sizes."""
        return AnilSettings(self.alpha, self.beta, self.m_in)

    @property
    def unlimited(self) -> AnilSettings:
        """The step sizes, with infinitely many points in every task."""
        return AnilSettings(self.alpha, self.beta, math.inf)

    def worlds(self, seed: int) -> list[SharedRepresentation]:
        """Return the environment of every run."""
        return [
            SharedRepresentation(
                self.dimension, self.variances, self.mean, self.noise, self.m_in, self.m_out, self.tasks, own
            )
            for own in range(seed * self.runs, (seed + 1) * self.runs)
        ]

    def covariance(self) -> Tensor:
        """Return Σ*."""
        return torch.diag(torch.tensor(self.variances, dtype=torch.float64))

    def limit(self, rates: AnilSettings) -> tuple[float, float]:
        """Return the least and the largest eigenvalue of Λ* (D eq. 8)."""
        values = torch.linalg.eigvalsh(limiting_gram(self.covariance(), self.noise, rates))
        return float(values[0]), float(values[-1])


@dataclass
class Curves:
    """What is measured while runs are trained: for each quantity, the values of every run at `steps`.

    The quantities are those of `theory.anil.Spectrum`, and for nets with an initial head `start`, ‖Bw − E[θ]‖².
    """

    steps: list[int] = field(default_factory=list)
    values: dict[str, list[list[float]]] = field(default_factory=dict)

    def add(self, step: int, worlds: list[SharedRepresentation], B: Tensor, w: Tensor | None = None) -> None:
        """Measure the nets of all runs."""
        B = B.double().cpu()
        measured: dict[str, Tensor] = spectrum(B, torch.stack([world.representation for world in worlds]))._asdict()
        if w is not None:
            centre = torch.stack([TaskMoments.from_environment(world).mean for world in worlds])
            measured["start"] = ((B @ w.double().cpu()[..., None])[..., 0] - centre).square().sum(-1)
        self.steps.append(step)
        for quantity, values in measured.items():
            for curve, value in zip(self.values.setdefault(quantity, [[] for _ in worlds]), values.tolist()):
                curve.append(float(f"{value:.6g}"))

    def join(self, other: Curves) -> Curves:
        """Return the curves of these runs and of others, measured at the same steps."""
        values = {quantity: self.values.get(quantity, []) + curves for quantity, curves in other.values.items()}
        return Curves(other.steps, values)


class Trained(NamedTuple):
    """The nets of all runs, in float64; `w` is None where heads belong to tasks."""

    B: Tensor
    w: Tensor | None
    curves: Curves
    seconds: float


def descend(
    name: str, setting: Setting, worlds: list[SharedRepresentation], device: str, folder: RunFolder, until: float
) -> Trained | None:
    """Train a method by gradient descent from where it stopped; None if the clock passed `until` before the end."""
    starts = [
        initial_parameters(setting.dimension, setting.width, setting.alpha, torch.Generator().manual_seed(world.seed))
        for world in worlds
    ]
    state: NetParams = (torch.stack([B for B, _ in starts]), torch.stack([w for _, w in starts]))
    done, seconds, curves = 0, 0.0, Curves()
    stored = folder.read("state")
    if stored is not None:
        tensors, notes = stored
        state = (tensors["B"], tensors["w"])
        done, seconds, curves = notes["done"], notes["seconds"], Curves(**notes["curves"])
    else:
        curves.add(0, worlds, *state)
    step, dtype = step_of(name, setting, worlds, device)
    iteration = RepeatedStep(step, (state[0].to(device, dtype), state[1].to(device, dtype)))
    marks = marked(setting.steps)
    while done < setting.steps and time.perf_counter() < until:
        began = time.perf_counter()
        due = next(mark for mark in marks if mark > done)
        taken = min(CHUNK, due - done)
        iteration.advance(taken)
        done += taken
        seconds += time.perf_counter() - began
        if done == due:
            curves.add(done, worlds, *iteration.state)
    B, w = iteration.state
    folder.write("state", {"B": B, "w": w}, {"done": done, "seconds": seconds, "curves": asdict(curves)})
    return None if done < setting.steps else Trained(B.double().cpu(), w.double().cpu(), curves, seconds)


def step_of(
    name: str, setting: Setting, worlds: list[SharedRepresentation], device: str
) -> tuple[Callable[[Tensor, Tensor], NetParams], torch.dtype]:
    """Return the step of a method for all runs at once, and what it is computed in."""
    if name == "infinite-tasks":
        tasks = stack_moments([TaskMoments.from_environment(world) for world in worlds]).to(device)
        return partial(population_step, tasks=tasks, rates=setting.rates), torch.float64
    if name == "infinite-samples":
        tasks = stack_moments([TaskMoments.from_tasks(world.task_parameters, world.noise) for world in worlds]).to(
            device
        )
        return partial(population_step, tasks=tasks, rates=setting.unlimited), torch.float64
    points = TaskPoints.from_episodes([world.tasks for world in worlds]).to(device, torch.float32)
    adapts: Literal["head", "all"] = "all" if name == "fo-maml" else "head"
    return partial(first_order_step, points=points, rates=setting.rates, adapts=adapts), torch.float32


def factorise(
    setting: Setting, worlds: list[SharedRepresentation], device: str, folder: RunFolder, until: float
) -> Trained | None:
    """Factorise the tasks of one run after the other (D eq. 12); a run that is stopped begins again."""
    found: Params = {}
    seconds, curves = 0.0, Curves()
    stored = folder.read("state")
    if stored is not None:
        found, notes = stored
        seconds, curves = notes["seconds"], Curves(**notes["curves"])
    while len(found) < len(worlds) and time.perf_counter() < until:
        began, run = time.perf_counter(), len(found)
        found[str(run)], own = burer_monteiro(setting, worlds[run], device)
        curves = curves.join(own)
        seconds += time.perf_counter() - began
        folder.write("state", found, {"seconds": seconds, "curves": asdict(curves)})
    if len(found) < len(worlds):
        return None
    B = torch.stack([found[str(run)] for run in range(len(worlds))])
    return Trained(B, None, curves, seconds)


def burer_monteiro(setting: Setting, world: SharedRepresentation, device: str) -> tuple[Tensor, Curves]:
    """Return the B that L-BFGS finds from B₀ᵀB₀ = I/100 and heads of squared norm k'/100, and its curves."""
    generator = torch.Generator().manual_seed(world.seed)
    B, _ = initial_parameters(world.dimension, setting.width, 25.0, generator)  # I/4α with α = 25
    heads = torch.randn(setting.tasks, setting.width, generator=generator, dtype=torch.float64)
    heads *= math.sqrt(0.01 * setting.width) / heads.norm(dim=1, keepdim=True)
    tasks = world.tasks.without_split().to(device, torch.float64)

    def parts(flat: NDArray[np.float64]) -> tuple[Tensor, Tensor]:
        both = torch.tensor(flat)
        return both[: B.numel()].view_as(B), both[B.numel() :].view_as(heads)

    def objective(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        leaves = tuple(part.to(device).requires_grad_() for part in parts(flat))
        loss = factorisation_loss(leaves[0], leaves[1], tasks.support_x, tasks.support_y[..., 0])
        slopes = torch.autograd.grad(loss, leaves)
        return loss.item(), torch.cat([slope.flatten() for slope in slopes]).cpu().numpy()

    def measure(flat: NDArray[np.float64]) -> None:
        iteration = next(count)
        if iteration in marks:
            curves.add(iteration, [world], parts(flat)[0][None])

    curves, count, marks = Curves(), itertools.count(1), marked(setting.iterations)
    curves.add(0, [world], B[None])
    found = optimize.minimize(
        objective,
        torch.cat([B.flatten(), heads.flatten()]).numpy(),
        jac=True,
        method="L-BFGS-B",
        callback=measure,
        options={"maxiter": setting.iterations, "ftol": 0, "gtol": 0, "maxfun": 20 * setting.iterations},
    )
    return parts(found.x)[0], curves


def marked(steps: int) -> list[int]:
    """Return the steps after which to measure: evenly spaced, and closer together in the beginning.

    >>> marked(3), marked(1000)[:4], marked(1000)[-3:]
    ([1, 2, 3], [1, 2, 3, 4], [950, 975, 1000])
    """
    places = [*np.geomspace(1, steps, MARKS // 2), *np.linspace(0, steps, MARKS // 2 + 11)[1:]]
    return sorted({max(1, round(float(place))) for place in places})
