"""Evaluation: how well a trained model adapts to new tasks, with an interval."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from metabridge.environments.environment import Environment
from metabridge.episodes import Episodes
from metabridge.errors import InputError
from metabridge.learners.adapt import predict
from metabridge.learners.method import Method
from metabridge.models.network import Network, Params
from metabridge.models.norm import running_layers


@dataclass(frozen=True)
class Model:
    """A network with its method and parameters: all that is needed to adapt and predict."""

    method: Method
    net: Network
    params: Params

    def predict(self, episodes: Episodes) -> Tensor:
        """Return the outputs for the queries of every task, (tasks, queries, outputs), in evaluation mode."""
        training = self.net.training
        self.net.eval()
        try:
            return predict(self.method, self.net, self.params, episodes)
        finally:
            self.net.train(training)


@dataclass(frozen=True, eq=False)
class Score:
    """The mean over tasks and the half-width of its 95 % interval; accuracy, or squared error for values."""

    mean: float
    ci95: float
    tasks: int
    values: Tensor  # one a task
    metric: Literal["accuracy", "squared error"] = "accuracy"

    @classmethod
    def of(cls, values: Tensor, metric: Literal["accuracy", "squared error"] = "accuracy") -> Score:
        """Summarise one value a task.

        >>> Score.of(torch.tensor([0.0, 1.0, 1.0, 1.0]))
        Score(mean=0.750, ci95=0.490, tasks=4)
        """
        values = values.double().cpu()
        spread = float(values.std()) if len(values) > 1 else math.nan
        return cls(float(values.mean()), 1.96 * spread / math.sqrt(len(values)), len(values), values, metric)

    def beats(self, other: Score) -> bool:
        """Whether this score is the better one."""
        return self.mean > other.mean if self.metric == "accuracy" else self.mean < other.mean

    def told(self) -> str:
        """Say it in a few words.

        >>> Score.of(torch.tensor([0.0, 1.0, 1.0, 1.0])).told()
        '75.0 ± 49.0 %'
        """
        if self.metric == "accuracy":
            return f"{100 * self.mean:.1f} ± {100 * self.ci95:.1f} %"
        return f"{self.mean:.3g} ± {self.ci95:.2g}"

    def __repr__(self) -> str:
        return f"Score(mean={self.mean:.3f}, ci95={self.ci95:.3f}, tasks={self.tasks})"


def evaluate(model: Model, environment: Environment, *, tasks: int = 600, seed: int = 0) -> Score:
    """Adapt to `tasks` tasks of the environment and score their queries.

    The same seed draws the same tasks for every model, so that scores can be compared in pairs.

    >>> from metabridge.environments import Sinusoid
    >>> from metabridge.learners import method, parameters
    >>> from metabridge.models import mlp
    >>> maml, net = method("maml"), mlp(1, 1)
    >>> evaluate(Model(maml, net, parameters(maml, net)), Sinusoid(), tasks=20).tasks
    20
    """
    if tasks < 2:
        raise InputError(f"tasks is {tasks}, but an interval needs at least 2.")
    unset = [layer for layer in running_layers(model.net) if not layer.mean.any() and (layer.variance == 1).all()]
    if unset:
        raise InputError(
            "The network's running statistics were never estimated, so evaluation would not normalise. "
            "Call estimate_statistics(net, batches) with training images first, or use statistics='batch'."
        )
    generator = torch.Generator().manual_seed(seed)
    device = model.params["head.weight"].device
    batch = 16 if device.type == "cpu" else 100  # enough to fill the machine
    values = []
    for first in range(0, tasks, batch):
        episodes = environment.sample(min(batch, tasks - first), generator).to(device)
        values.append(score_tasks(model.predict(episodes), episodes))
    return Score.of(torch.cat(values), "accuracy" if episodes.classification else "squared error")


def score_tasks(outputs: Tensor, episodes: Episodes) -> Tensor:
    """Return each task's accuracy on its queries, or its mean squared error where targets are values."""
    if episodes.classification:
        return (outputs.argmax(-1) == episodes.query_y).double().mean(-1)
    return (outputs - episodes.query_y).square().sum(-1).mean(-1)
