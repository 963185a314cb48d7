"""Wang et al. 2022, theorem 1: on the loss of MAML, gradient descent on wide networks converges linearly.

Let Φ be the MetaNTK (the neural tangent kernel of MAML) of an infinitely wide network, σ_max and σ_min its largest and
smallest eigenvalues, η₀ < 2/(σ_max + σ_min) the learning rate, and R a bound on the initial loss. Then the loss after t
steps satisfies L(θ_t) ≤ (1 − η₀σ_min/3)^{2t} R (eq. 32), and the path length of the parameters and the change of the
MetaNTK are bounded by constants times l^{-1/2} for networks of width l (eq. 29, 30). The paper has a proof but no
experiment for this theorem.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from metabridge.episodes import Episodes
from metabridge.experiments.experiment import Experiment, ExperimentOptions, Outcome
from metabridge.experiments.wide_nets import CONSTANTS, DEPTH, KERNEL, TASKS, initialization_seeds, sample_tasks
from metabridge.kernels import meta_ntk
from metabridge.kernels.finite_width import ConvergenceRate, empirical_meta_ntk, gradient_descent, squared_loss
from metabridge.learners.engine import Engine
from metabridge.learners.method import method
from metabridge.learners.parameters import parameters
from metabridge.models import wide
from metabridge.report.results import Row
from metabridge.theory.power_law import PowerLaw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KERNEL_CHECKS = 4  # how often the MetaNTK is computed during training, in addition to initialization
QUANTITIES = {
    "path": "path length of the parameters / √width (eq. 29)",
    "kernel_change": "movement of the MetaNTK (eq. 30)",
    "kernel_error": "distance of the initial MetaNTK from its limit",
}


@dataclass(frozen=True)
class Settings:
    """The widths, the number of networks of each width, and how they are trained."""

    widths: tuple[int, ...]
    nets: int  # number of networks of each width
    steps: int = 80
    tasks: int = 4
    inner_time: float = 0.05  # λτ, inner learning rate times number of inner steps
    inner_steps: int = 5


SETTINGS = {
    "quick": Settings(widths=(32, 64, 128, 256), nets=3),
    "paper": Settings(widths=(64, 128, 256, 512, 1024), nets=6),
}


@dataclass(frozen=True)
class TrainingRun:
    """Measurements of one training run. Φ̂_t is the MetaNTK of the network after t steps, Φ that of infinite width."""

    losses: tuple[float, ...]  # before each step
    path: float  # Σ‖θ_t − θ_{t−1}‖/√l, the length of the path in the paper's parameterization
    kernel_change: float  # the largest ‖Φ̂_t − Φ̂_0‖/‖Φ‖
    kernel_error: float  # ‖Φ̂_0 − Φ‖/‖Φ‖


@dataclass(frozen=True)
class Measurements:
    """The training runs by width, and factors by which a step reduces the loss."""

    by_width: Mapping[int, list[TrainingRun]]
    bound: float  # the largest factor according to the theorem
    limit: float  # the factor for an infinitely wide network

    def quantity(self, name: str) -> dict[int, list[float]]:
        """Return the values of a quantity in all training runs, by width."""
        return {width: [getattr(run, name) for run in runs] for width, runs in self.by_width.items()}


def measure(options: ExperimentOptions) -> Measurements:
    """Train networks of each width from several initializations, all on the same tasks."""
    settings = SETTINGS[options.scale]
    episodes = sample_tasks(settings.tasks, options.seed).to(options.device)
    in_float64 = episodes.to(dtype=torch.float64)
    limit_kernel = meta_ntk(KERNEL, in_float64.query_x, in_float64.support_x, adapts="all", time=settings.inner_time)
    convergence = ConvergenceRate.from_kernel(limit_kernel)
    by_width = {
        width: [train(settings, width, seed, episodes, limit_kernel, convergence.lr) for seed in seeds]
        for width, seeds in initialization_seeds(settings.widths, settings.nets, options.seed).items()
    }
    return Measurements(by_width, convergence.bound_contraction, convergence.loss_contraction)


def train(
    settings: Settings, width: int, seed: int, episodes: Episodes, limit_kernel: Tensor, lr: float
) -> TrainingRun:
    """Train one network and return the measurements."""
    net = wide(TASKS.dimension, width=width, depth=DEPTH, seed=seed).to(episodes.device)
    inner_lr = settings.inner_time / settings.inner_steps
    maml = method("maml", steps=settings.inner_steps, lr=inner_lr, loss=squared_loss)
    params, engine = parameters(maml, net), Engine(maml, net)
    steps, kernels = [], [empirical_meta_ntk(maml, net, params, episodes).double()]
    for _ in range(KERNEL_CHECKS):
        steps += gradient_descent(engine, params, episodes, lr, settings.steps // KERNEL_CHECKS)
        kernels.append(empirical_meta_ntk(maml, net, params, episodes).double())
    changes = [float((kernel - kernels[0]).norm() / limit_kernel.norm()) for kernel in kernels]
    return TrainingRun(
        losses=tuple(step.loss for step in steps),
        path=sum(step.length for step in steps) / math.sqrt(width),
        kernel_change=max(changes),
        kernel_error=float((kernels[0] - limit_kernel).norm() / limit_kernel.norm()),
    )


def rows(data: Measurements, _: ExperimentOptions) -> list[Row]:
    """Return rows of the factors by which the loss decreases, and of the quantities that decrease with the width."""
    return [*loss_rows(data), *power_law_rows(data)]


def loss_rows(data: Measurements) -> Iterator[Row]:
    """Yield rows that compare the factor by which a step reduces the loss with its bound.

    The factor is a mean over the second half of training. A row agrees if all losses, from the first step on, satisfy
    the bound on the loss.
    """
    for width, runs in data.by_width.items():
        half = len(runs[0].losses) // 2
        last_losses = [run.losses[half:] for run in runs]
        factors = [(losses[-1] / losses[0]) ** (1 / (len(losses) - 1)) for losses in last_losses]
        satisfied = [loss <= data.bound**t * run.losses[0] for run in runs for t, loss in enumerate(run.losses)]
        note = (
            f"the bound is (1 − η₀σ_min/3)²; an infinitely wide network has (1 − η₀σ_min)² = {data.limit:.4f}; "
            f"{sum(satisfied)} of {len(satisfied)} losses of {len(runs)} training runs satisfy the bound on the loss"
        )
        name, published = f"loss, width {width}", data.bound
        yield Row.mean(name, "factor per step", factors, published=published, agrees=all(satisfied), note=note)


def power_law_rows(data: Measurements) -> Iterator[Row]:
    """Yield rows of the exponent of the width in a power law of each quantity, and of its mean at each width."""
    for name, label in QUANTITIES.items():
        law = PowerLaw.fit(data.quantity(name))
        note = "interval over initializations"
        row = Row(label, "exponent of the width", ours=law.exponent, ci95=law.ci95, note=note)
        if name != "kernel_error":  # the theorem bounds the other quantities from above
            row = replace(row, published=-0.5, agrees=law.exponent - law.ci95 <= -0.5)
        yield row
        for width, values in data.quantity(name).items():
            yield Row.mean(f"{label}, width {width}", "length" if name == "path" else "relative to ‖Φ‖", values)


def figure(outcome: Outcome[Measurements]) -> Figure:
    """Draw the losses with their geometric means and the bound, and the quantities that decrease with the width."""
    from matplotlib.figure import Figure

    from metabridge.report import figures, result_figures

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (width, runs), color in zip(outcome.data.by_width.items(), figures.COLORS):
        curves = np.array([run.losses for run in runs])
        curves /= curves[:, :1]
        left.plot(curves.T, color=color, linewidth=0.6, alpha=0.4)
        left.plot(np.exp(np.log(curves).mean(0)), color=color, linewidth=1.8, label=f"width {width}")
    steps = np.arange(curves.shape[1])
    left.plot(steps, outcome.data.bound**steps, "k--", label="bound $(1-η_0σ_{min}/3)^{2t}$")
    left.set(yscale="log", xlabel="step t of gradient descent", ylabel="MAML loss / initial MAML loss")
    left.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    result_figures.draw_power_laws(right, {label: outcome.data.quantity(name) for name, label in QUANTITIES.items()})
    right.set(ylabel="path length; distances of MetaNTKs / ‖Φ‖")
    return figure


EXPERIMENT = Experiment("metantk-thm1", measure, rows, figure, SETTINGS, CONSTANTS)
