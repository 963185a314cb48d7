"""The training loop: draw tasks, take the meta-gradient, step an ordinary optimizer."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.optim import Optimizer

from metabridge.environments.environment import Environment
from metabridge.errors import InputError
from metabridge.learners.engine import Engine, Mode
from metabridge.learners.method import Method
from metabridge.learners.parameters import parameters
from metabridge.models.network import Network, Params
from metabridge.models.norm import estimate_statistics, running_layers
from metabridge.training.evaluate import Model, Score, evaluate


@dataclass(frozen=True)
class Point:
    """One point of a learning curve. `loss` is the mean outer loss since the point before."""

    iteration: int
    seconds: float
    loss: float
    score: Score | None

    def told(self) -> str:
        """Say it in a few words."""
        judged = "" if self.score is None else f", validation {self.score.told()}"
        return f"loss {self.loss:.3f}{judged}"


@dataclass(frozen=True)
class Run(Model):
    """A trained model and how it got there."""

    curve: tuple[Point, ...]
    seconds: float


def fit(
    net: Network,
    method: Method,
    environment: Environment,
    *,
    validate: Environment | None = None,
    iterations: int = 1000,
    tasks: int = 4,
    lr: float = 1e-3,
    optimizer: type[Optimizer] = torch.optim.Adam,
    validate_every: int | None = None,
    validate_tasks: int = 100,
    device: torch.device | str = "cpu",
    mode: Mode = "auto",
    dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: bool = True,
    name: str = "training",
) -> Run:
    """Train `net` with `method` on tasks of `environment` and return the run.

    `optimizer` is called with the trained tensors and `lr`. With `validate`, the parameters of the
    best validation score are kept, judged on the same tasks each time (every tenth of the
    iterations unless `validate_every` says otherwise). The network given ends with the weights.

    >>> from metabridge.environments import Sinusoid
    >>> from metabridge.learners import method
    >>> from metabridge.models import mlp
    >>> run = fit(mlp(1, 1), method("maml"), Sinusoid(), iterations=3, progress=False)
    >>> [point.iteration for point in run.curve]
    [1, 2, 3]
    """
    if iterations < 1 or tasks < 1:
        raise InputError(f"iterations is {iterations} and tasks is {tasks}, but both must be at least 1.")
    device = torch.device(device)
    net = net.to(device).train()
    params = parameters(method, net, classes=getattr(environment, "classes", None), seed=seed)
    steps = optimizer([value for value in params.values() if value.requires_grad], lr=lr)  # type: ignore[call-arg]
    engine = Engine(method, net, mode=mode, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)  # dropped features draw from PyTorch's own generator
    every = validate_every or max(1, iterations // 10)
    best: Score | None = None
    kept = params
    curve: list[Point] = []
    total, seconds = torch.zeros((), device=device), 0.0
    with _bar(progress) as bar:
        task = bar.add_task(name, total=iterations, told="")
        started = time.perf_counter()
        for iteration in range(1, iterations + 1):
            result = engine(params, environment.sample(tasks, generator).to(device))
            result.assign(params)
            steps.step()
            total += result.loss
            due = iteration % every == 0 or iteration == iterations
            if due or device.type == "cpu":  # reading the loss makes a GPU wait
                _check_finite(float(result.loss), iteration, lr, method)
            if due:
                seconds += time.perf_counter() - started  # training alone, without validation
                loss = float(total) / (iteration - (curve[-1].iteration if curve else 0))
                total.zero_()
                score = None
                if validate is not None:
                    _settle(net, params, environment, tasks, device)
                    score = evaluate(Model(method, net, params), validate, tasks=validate_tasks, seed=seed)
                    if best is None or score.beats(best):
                        best, kept = score, {key: value.detach().clone() for key, value in params.items()}
                curve.append(Point(iteration, seconds, loss, score))
                bar.update(task, told=curve[-1].told())
                started = time.perf_counter()
            bar.advance(task)
    _settle(net, kept, environment, tasks, device)
    return Run(method, net.eval(), {key: value.detach() for key, value in kept.items()}, tuple(curve), seconds)


def _settle(net: Network, params: Params, environment: Environment, tasks: int, device: torch.device) -> None:
    """Write the weights into the network, and measure its running statistics with them where it has any."""
    with torch.no_grad():
        for name, value in net.named_parameters():
            value.copy_(params[name])
    if running_layers(net):
        generator = torch.Generator().manual_seed(0)
        batches = (environment.sample(tasks, generator).without_split().support_x.to(device) for _ in range(8))
        estimate_statistics(net.features, (batch.flatten(0, 1) for batch in batches))


def _check_finite(loss: float, iteration: int, lr: float, method: Method) -> None:
    if not math.isfinite(loss):
        raise InputError(
            f"The loss became {loss} at iteration {iteration}. Lower lr (now {lr}) or the inner rate "
            f"(now {method.inner or method.test}), or look for values in the inputs that are not finite."
        )


def _bar(progress: bool) -> Progress:
    return Progress(
        TextColumn("{task.description:>16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[told]}"),
        disable=not progress,
    )
