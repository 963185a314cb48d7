"""B's theorem 2: as the width grows, trained MAML predicts what kernel regression with the MetaNTK does.

F_t = G + Φ' T_Φ^{ηt}(Y − G_train), at a finite time of training and at its end. Beside it the same for MTL and ANIL,
whose predictions are those of A's lemma 1. The formulas are for nets whose outputs start at 0, so what is learnt
here is added to the initial outputs. They are for gradient flow, so steps are small, the outer ones up to the finite
time; the end does not depend on them, and is reached by larger ones.
The papers prove it and show no experiment; this is one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from metabridge.episodes import Episodes
from metabridge.experiments.meta_ntk_descent import DEPTH, KERNEL, TASKS, descend, initialisations, sample, squared
from metabridge.experiments.power_law import PowerLaw, draw_laws, mean
from metabridge.experiments.result import Result, Row, UnportedExperiment, Work, environment
from metabridge.kernels.kernel_predictors import KernelLearner, KernelMethod
from metabridge.learners.adapt import predict
from metabridge.learners.engine import Engine
from metabridge.learners.method import Method, method
from metabridge.learners.parameters import parameters
from metabridge.models import wide
from metabridge.models.network import Network

ID = "metantk-thm2"
METHODS: tuple[KernelMethod, ...] = ("mtl", "anil", "maml")


@dataclass(frozen=True)
class Scale:
    """How wide the nets are, how many of each width, and how they are trained."""

    widths: tuple[int, ...]
    nets: int
    tasks: int = 3
    tests: int = 10
    inner_time: float = 0.05  # λτ, in training and at test
    inner_steps: int = 10
    outer_time: float = 3.0  # ηt·σ_max(Φ), the finite time of training
    outer_steps: int = 30
    left: float = 0.003  # what the kernel says is left of the slowest mode at the end


SCALES = {
    "quick": Scale(widths=(16, 64, 256), nets=3, inner_steps=5, outer_steps=15, left=0.03),
    "paper": Scale(widths=(64, 128, 256, 512, 1024), nets=4),
}


@dataclass(frozen=True)
class Stage:
    """A stretch of training by gradient descent, and what the kernel predicts at its end."""

    name: str
    rate: float
    steps: int
    predicted: Tensor


Errors = dict[str, dict[KernelMethod, dict[int, list[float]]]]  # at the end of a stage, of a method, by width


@dataclass(frozen=True)
class Outcome:
    """The result, and the relative errors of every training."""

    result: Result
    errors: Errors


def run(work: Work) -> Outcome:
    """Train nets of every width from several initialisations, all on the same tasks."""
    scale, started = SCALES[work.scale], time.perf_counter()
    drawn = sample(scale.tasks + scale.tests, work.seed).to(work.device)
    train, test = drawn[: scale.tasks], drawn[scale.tasks :]
    stages = {name: _stages(scale, name, train, test) for name in METHODS}
    errors: Errors = {}
    for width, seeds in initialisations(scale.widths, scale.nets, work.seed).items():
        for name, own in stages.items():
            for seed in seeds:
                net = wide(TASKS.dimension, width=width, depth=DEPTH, seed=seed).to(work.device)
                for stage, found in zip(own, trained(scale, name, net, train, test, own)):
                    error = float((found - stage.predicted).norm() / stage.predicted.norm())
                    errors.setdefault(stage.name, {}).setdefault(name, {}).setdefault(width, []).append(error)
    rates = {name: {stage.name: (stage.rate, stage.steps) for stage in own} for name, own in stages.items()}
    result = Result(
        id=ID,
        scale=work.scale,
        seed=work.seed,
        settings=asdict(scale) | {"depth": DEPTH, "environment": asdict(TASKS), "rates_and_steps": rates},
        environment=environment(work.device),
        seconds=time.perf_counter() - started,
        rows=tuple(rows(errors)),
    )
    return Outcome(result, errors)


def _stages(scale: Scale, name: KernelMethod, train: Episodes, test: Episodes) -> tuple[Stage, Stage]:
    """Small steps up to the finite time, then larger ones to the end."""
    twin = KernelLearner(
        KERNEL, name, inner_time=0.0 if name == "mtl" else scale.inner_time, test_time=scale.inner_time
    )
    end = twin.fit(train)
    modes = torch.linalg.eigvalsh(end.matrix)
    least, most = float(modes[0]), float(modes[-1])
    spent = scale.outer_time / most
    early = replace(twin, outer_time=spent).fit(train)
    rate = 1 / (most + least)
    steps = math.ceil(math.log(scale.left) / math.log1p(-rate * least))
    return (
        Stage("stopped early", spent / scale.outer_steps, scale.outer_steps, early.predict(test)),
        Stage("trained to the end", rate, steps, end.predict(test)),
    )


def trained(
    scale: Scale, name: KernelMethod, net: Network, train: Episodes, test: Episodes, stages: tuple[Stage, ...]
) -> Iterator[Tensor]:
    """Train a net, and yield what it has learnt to predict for the test tasks at the end of each stage."""
    chosen, at_test = _methods(scale, name)
    train, shifted = (_from_initial_outputs(net, episodes) for episodes in (train, test))
    train = replace(train, classes=torch.arange(len(train), device=train.device)[:, None])
    params = parameters(chosen, net, classes=len(train))
    if name == "mtl":  # all heads start from the same value
        params["heads.weight"].data.copy_(params["head.weight"].expand(len(train), -1))
    engine = Engine(chosen, net)
    for stage in stages:
        for _ in descend(engine, params, train, stage.rate, stage.steps):
            pass
        weights = params if name == "maml" else params | {"head.weight": net.head.weight}  # else a new head (A §3.4)
        yield predict(at_test, net, weights, shifted) - (shifted.query_y - test.query_y)


def _methods(scale: Scale, name: KernelMethod) -> tuple[Method, Method]:
    """The method that trains, and the one that adapts at test."""
    inner = {"steps": scale.inner_steps, "lr": scale.inner_time / scale.inner_steps, "loss": squared}
    if name == "maml":
        return (method("maml", **inner),) * 2
    anil = method("anil", **inner, split=False)
    return (method("mtl", loss=squared) if name == "mtl" else anil), anil


def _from_initial_outputs(net: Network, episodes: Episodes) -> Episodes:
    """The same tasks, their targets added to the outputs that the net starts from."""
    with torch.no_grad():
        support, query = (
            net(x.flatten(0, 1)).unflatten(0, x.shape[:2]) for x in (episodes.support_x, episodes.query_x)
        )
    return replace(episodes, support_y=episodes.support_y + support, query_y=episodes.query_y + query)


def rows(errors: Errors) -> Iterator[Row]:
    """Give the error of every method after every stage, at every width, and the exponent of the law through it."""
    for stage, methods in errors.items():
        for name, points in methods.items():
            label, law = f"{name.upper()} {stage}", PowerLaw.fit(points)
            yield Row(
                label,
                "exponent of the width",
                ours=law.exponent,
                ci95=law.ci95,
                agrees=law.exponent + law.ci95 < 0,
                note="agrees if the error falls as the width grows: the interval, over initialisations, is below 0",
            )
            for width, values in points.items():
                size, margin = mean(values)
                yield Row(f"{label}, width {width}", "error, of ‖F‖", ours=size, ci95=margin)


def figure(outcome: Outcome, file: Path) -> None:
    """Draw the errors against the width, the two times of training side by side."""
    from matplotlib.figure import Figure

    from metabridge.report import figures

    with figures.LIGHT.context():
        picture = Figure(figsize=(9.6, 4.4), layout="constrained")
        panels = picture.subplots(1, 2, sharey=True)
        for axes, (stage, methods) in zip(panels, outcome.errors.items()):
            draw_laws(axes, {f"{name.upper()} {stage}": points for name, points in methods.items()})
        panels[0].set(ylabel="‖trained − kernel prediction‖ / ‖kernel prediction‖\non the queries of test tasks")
    figures.save(picture, file)


EXPERIMENT = UnportedExperiment("metantk-thm2", run, figure)
