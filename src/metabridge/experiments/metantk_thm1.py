"""B's theorem 1: gradient descent on MAML's loss converges linearly if the net is wide, and hardly moves it.

With η₀ < 2/(σ_max + σ_min) of the MetaNTK Φ, L(θ_t) ≤ (1 − η₀σ_min/3)^{2t} R (eq. 32), while the path of the
parameters and the movement of the MetaNTK are bounded in proportion to l^{-1/2} at width l (eq. 29, 30).
The paper proves it and shows no experiment; this is one.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from metabridge.episodes import Episodes
from metabridge.experiments.meta_ntk_descent import (
    DEPTH,
    KERNEL,
    TASKS,
    descend,
    initialisations,
    meta_ntk,
    sample,
    squared,
)
from metabridge.experiments.power_law import PowerLaw, draw_laws, mean
from metabridge.experiments.result import Result, Row, UnportedExperiment, Work, environment
from metabridge.kernels import split_kernel
from metabridge.learners.engine import Engine
from metabridge.learners.method import method
from metabridge.learners.parameters import parameters
from metabridge.models import wide

ID = "metantk-thm1"
CHECKS = 4  # how often the MetaNTK is looked at in a training


@dataclass(frozen=True)
class Scale:
    """How wide the nets are, how many of each width, and how they are trained."""

    widths: tuple[int, ...]
    nets: int
    steps: int = 80
    tasks: int = 4
    inner_time: float = 0.05  # λτ
    inner_steps: int = 5


SCALES = {
    "quick": Scale(widths=(32, 64, 128, 256), nets=3),
    "paper": Scale(widths=(64, 128, 256, 512, 1024), nets=6),
}


@dataclass(frozen=True)
class Training:
    """What one training showed."""

    losses: tuple[float, ...]  # before each step
    path: float  # Σ‖θ_t − θ_{t−1}‖/√l, which is its length in the paper's parameters
    moved: float  # the largest ‖Φ̂_t − Φ̂_0‖/‖Φ‖
    apart: float  # ‖Φ̂_0 − Φ‖/‖Φ‖


Trainings = dict[int, list[Training]]  # by width
LAWS = {
    "path": "path of the parameters over √width (eq. 29)",
    "moved": "movement of the MetaNTK (eq. 30)",
    "apart": "initial MetaNTK against its limit",
}


@dataclass(frozen=True)
class Outcome:
    """The result, the factor by which the theorem lets the loss fall in a step, and the trainings."""

    result: Result
    bound: float
    trainings: Trainings


def run(work: Work) -> Outcome:
    """Train nets of every width from several initialisations, all on the same tasks."""
    scale, started = SCALES[work.scale], time.perf_counter()
    episodes = sample(scale.tasks, work.seed).to(work.device)
    exact = episodes.to(dtype=torch.float64)
    limit = split_kernel(KERNEL, exact.query_x, exact.support_x, adapts="all", time=scale.inner_time)
    modes = torch.linalg.eigvalsh(limit)
    least, most = float(modes[0]), float(modes[-1])
    rate = 1 / (most + least)  # half of what the theorem allows
    bound, predicted = ((1 - rate * least * share) ** 2 for share in (1 / 3, 1))
    trainings = {
        width: [_train(scale, width, seed, episodes, limit, rate) for seed in seeds]
        for width, seeds in initialisations(scale.widths, scale.nets, work.seed).items()
    }
    about = {"depth": DEPTH, "environment": asdict(TASKS), "outer_rate": rate, "sigma_min": least, "sigma_max": most}
    result = Result(
        id=ID,
        scale=work.scale,
        seed=work.seed,
        settings=asdict(scale) | about,
        environment=environment(work.device),
        seconds=time.perf_counter() - started,
        rows=(*loss_rows(trainings, bound, predicted), *law_rows(trainings)),
    )
    return Outcome(result, bound, trainings)


def _train(scale: Scale, width: int, seed: int, episodes: Episodes, limit: Tensor, rate: float) -> Training:
    net = wide(TASKS.dimension, width=width, depth=DEPTH, seed=seed).to(episodes.device)
    maml = method("maml", steps=scale.inner_steps, lr=scale.inner_time / scale.inner_steps, loss=squared)
    params = parameters(maml, net)

    def kernel() -> Tensor:
        return meta_ntk(maml, net, params, episodes).double()

    def gap(one: Tensor, other: Tensor) -> float:
        return float((one - other).norm() / limit.norm())

    start, losses, path, moved = kernel(), [], 0.0, 0.0
    for count, step in enumerate(descend(Engine(maml, net), params, episodes, rate, scale.steps), 1):
        losses.append(step.loss)
        path += step.length / math.sqrt(width)
        if count % (scale.steps // CHECKS) == 0:
            moved = max(moved, gap(kernel(), start))
    return Training(tuple(losses), path, moved, gap(start, limit))


def loss_rows(trainings: Trainings, bound: float, predicted: float) -> list[Row]:
    """Give the factor by which a step lowers the loss in the second half of training, beside the bound."""
    rows = []
    for width, own in trainings.items():
        half = len(own[0].losses) // 2
        falls = [each.losses[half:] for each in own]
        factor, margin = mean([(fall[-1] / fall[0]) ** (1 / (len(fall) - 1)) for fall in falls])
        below = [loss <= bound**t * each.losses[0] for each in own for t, loss in enumerate(each.losses)]
        rows.append(
            Row(
                f"loss, width {width}",
                "factor a step",
                published=bound,
                ours=factor,
                ci95=margin,
                agrees=all(below),
                note=f"the bound is (1 − η₀σ_min/3)²; the kernel's own is (1 − η₀σ_min)² = {predicted:.4f}; "
                f"{sum(below)} of {len(below)} losses of {len(own)} trainings are within the bound from the first on",
            )
        )
    return rows


def law_rows(trainings: Trainings) -> list[Row]:
    """Give what falls with the width, at every width, and the exponent of the law through it."""
    rows = []
    for name, label in LAWS.items():
        points = _measured(trainings, name)
        law = PowerLaw.fit(points)
        exponent = Row(label, "exponent of the width", ours=law.exponent, ci95=law.ci95, note="over initialisations")
        if name != "apart":  # the theorem bounds the others from above
            exponent = replace(exponent, published=-0.5, agrees=law.exponent - law.ci95 <= -0.5)
        rows.append(exponent)
        for width, values in points.items():
            size, margin = mean(values)
            metric = "length" if name == "path" else "of ‖Φ‖"
            rows.append(Row(f"{label}, width {width}", metric, ours=size, ci95=margin))
    return rows


def _measured(trainings: Trainings, name: str) -> dict[int, list[float]]:
    return {width: [getattr(training, name) for training in own] for width, own in trainings.items()}


def figure(outcome: Outcome, file: Path) -> None:
    """Draw the losses of all nets and their geometric means under the bound, and what falls with the width."""
    from matplotlib.figure import Figure

    from metabridge.report import figures

    with figures.LIGHT.context():
        picture = Figure(figsize=(11, 4.6), layout="constrained")
        left, right = picture.subplots(1, 2)
        for (width, own), colour in zip(outcome.trainings.items(), figures.COLOURS):
            curves = np.array([each.losses for each in own])
            curves /= curves[:, :1]
            left.plot(curves.T, color=colour, linewidth=0.6, alpha=0.4)
            left.plot(np.exp(np.log(curves).mean(0)), color=colour, linewidth=1.8, label=f"width {width}")
        steps = np.arange(curves.shape[1])
        left.plot(steps, outcome.bound**steps, "k--", label="bound $(1-η_0σ_{min}/3)^{2t}$")
        left.set(yscale="log", xlabel="step t of gradient descent", ylabel="MAML loss, of that at the start")
        left.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
        draw_laws(right, {label: _measured(outcome.trainings, name) for name, label in LAWS.items()})
        right.set(ylabel="length; MetaNTKs as shares of ‖Φ‖")
    figures.save(picture, file)


EXPERIMENT = UnportedExperiment("metantk-thm1", run, figure)
