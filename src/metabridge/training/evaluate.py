"""Evaluation: how well a trained model adapts to new tasks, with an interval."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from metabridge.environments.environment import Environment
from metabridge.environments.image_tasks import ImageTasks, TaskIndices, copy_to_device
from metabridge.episodes import Episodes
from metabridge.errors import InputError
from metabridge.intervals import half_width
from metabridge.learners.adapt import adapts_head_only, predict, predict_from_features
from metabridge.learners.method import Method
from metabridge.learners.parameters import check_test_time
from metabridge.models.batch_norm import normalises_each_set, running_batch_norms
from metabridge.models.functional_call import shallow_copy
from metabridge.models.network import Network, Params, apply_features
from metabridge.progress import track_progress
from metabridge.training.augment import Augment

Metric = Literal["accuracy", "squared error"]
# Tasks are drawn so many at a time for every model on every device: what a seed draws depends on it.
BLOCK = 16


@dataclass(frozen=True)
class Model:
    """A network with its method and parameters: all that is needed to adapt and predict.

    `dtype` is what the features are computed in where only a head is solved on them.
    """

    method: Method
    net: Network
    params: Params
    dtype: torch.dtype | None = None

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.params["head.weight"].device

    def predict(self, episodes: Episodes) -> Tensor:
        """Return the outputs for the queries of every task, (tasks, queries, outputs), in evaluation mode."""
        return predict(self.method, self._evaluating(), self.params, episodes, dtype=self.dtype)

    def features(self, images: Tensor) -> Tensor:
        """Return the features of images (n, channels, height, width) in evaluation mode."""
        with torch.no_grad():
            return apply_features(self._evaluating(), self.params, images, self.dtype)

    def _evaluating(self) -> Network:
        """Return the network in evaluation mode: a copy that shares its tensors, since other threads may use it."""
        return shallow_copy(self.net).eval() if any(layer.training for layer in self.net.modules()) else self.net


@dataclass(frozen=True, eq=False)
class Score:
    """The mean over tasks and the half-width of its 95 % interval; accuracy, or squared error for values.

    Adaptation diverged on `diverged` of the tasks. If it did on all of them, the mean is NaN.
    """

    mean: float
    ci95: float
    tasks: int
    values: Tensor  # one a task
    metric: Metric = "accuracy"
    diverged: int = 0

    @classmethod
    def of(cls, values: Tensor, metric: Metric = "accuracy", *, diverged: int = 0) -> Score:
        """Summarise one value a task. The interval is Student's.

        >>> Score.of(torch.tensor([0.0, 1.0, 1.0, 1.0]))
        Score(mean=0.750, ci95=0.796, tasks=4)
        """
        values = values.double().cpu()
        if diverged == len(values):
            values = torch.full_like(values, math.nan)
        return cls(float(values.mean()), half_width(values), len(values), values, metric, diverged)

    def beats(self, other: Score) -> bool:
        """Whether this score is the better one; any number is better than NaN."""
        if math.isnan(self.mean) or math.isnan(other.mean):
            return not math.isnan(self.mean)
        return self.mean > other.mean if self.metric == "accuracy" else self.mean < other.mean

    def minus(self, other: Score) -> Score:
        """Return the difference task by task: its interval is narrower, since the tasks are the same.

        >>> Score.of(torch.tensor([0.6, 0.8])).minus(Score.of(torch.tensor([0.5, 0.7])))
        Score(mean=0.100, ci95=0.000, tasks=2)
        """
        if self.tasks != other.tasks:
            raise InputError(f"the scores are of {self.tasks} and {other.tasks} tasks, but must be of the same ones.")
        return Score.of(self.values - other.values, self.metric)

    def told(self) -> str:
        """Say it in a few words.

        >>> Score.of(torch.tensor([0.0, 1.0, 1.0, 1.0])).told()
        '75.0 ± 79.6 %'
        >>> Score.of(torch.tensor([0.0, 1.0, 1.0, 1.0]), diverged=1).told()
        '75.0 ± 79.6 % (adaptation diverged on 1 of 4 tasks)'
        """
        note = f" (adaptation diverged on {self.diverged} of {self.tasks} tasks)" if self.diverged else ""
        if self.metric == "accuracy":
            return f"{100 * self.mean:.1f} ± {100 * self.ci95:.1f} %{note}"
        return f"{self.mean:.3g} ± {self.ci95:.2g}{note}"

    def __repr__(self) -> str:
        return f"Score(mean={self.mean:.3f}, ci95={self.ci95:.3f}, tasks={self.tasks})"


class Predictor(Protocol):
    """What can be evaluated: a trained `Model`, or a closed-form twin of one."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    def predict(self, episodes: Episodes) -> Tensor:
        """Adapt to the supports and return the outputs for the queries, (tasks, queries, outputs)."""
        ...


@dataclass(frozen=True)
class Views:
    """How images are looked at, where their features are computed once and adaptation leaves them alone.

    With `copies`, so many changed copies of every support image are adapted to as well, made by `augment`. If
    `mirrored`, an image's features are the mean of its own and its mirror image's; if `cropped`, also of its corners
    and its centre, of three quarters of its sides and stretched; if `turned`, they are those of its four quarter turns
    side by side.
    """

    copies: int = 0
    mirrored: bool = False
    turned: bool = False
    cropped: bool = False
    augment: Augment | None = None

    def __post_init__(self) -> None:
        if self.copies < 0:
            raise InputError(f"copies is {self.copies}, but must be 0 or more.")

    def told(self) -> str:
        """Say it in a few words.

        >>> Views(mirrored=True, turned=True).told()
        'mirror images, quarter turns'
        """
        said = {
            f"{self.copies} copies": self.copies > 0,
            "mirror images": self.mirrored,
            "crops": self.cropped,
            "quarter turns": self.turned,
        }
        return ", ".join(words for words, is_so in said.items() if is_so) or "plain images"

    def features(self, model: Model, images: Tensor) -> Tensor:
        """Return the features of images (n, channels, height, width) as they are looked at."""
        parts = [images, *_crops(images)] if self.cropped else [images]
        if self.mirrored:
            parts += [part.flip(-1) for part in parts]
        turns = range(4 if self.turned else 1)
        found = [[model.features(part.rot90(turn, (-2, -1))) for part in parts] for turn in turns]
        return torch.cat([torch.stack(own).mean(0) for own in found], -1)


PLAIN = Views()


def _crops(images: Tensor) -> list[Tensor]:
    """The four corners and the centre of images, of three quarters of their sides and stretched to the same size."""
    height, width = images.shape[-2:]
    tall, wide = -(-3 * height // 4), -(-3 * width // 4)
    below, right = height - tall, width - wide
    corners = [(0, 0), (0, right), (below, 0), (below, right), (below // 2, right // 2)]
    parts = [images[..., down : down + tall, along : along + wide] for down, along in corners]
    return [F.interpolate(part, (height, width), mode="bilinear", align_corners=False) for part in parts]


def evaluate(
    model: Predictor,
    environment: Environment,
    *,
    tasks: int = 600,
    seed: int = 0,
    views: Views = PLAIN,
    progress: bool = False,
) -> Score:
    """Adapt to `tasks` tasks of the environment and score their queries.

    The same seed draws the same tasks for every model, so that scores can be compared in pairs. Outputs that are not
    finite are wrong answers, and the score counts the tasks that have any.

    >>> from metabridge.environments import Sinusoid
    >>> from metabridge.learners import method, parameters
    >>> from metabridge.models import mlp
    >>> maml, net = method("maml"), mlp(1, 1)
    >>> evaluate(Model(maml, net, parameters(maml, net)), Sinusoid(), tasks=20).tasks
    20
    """
    values, lost = [], []
    for outputs, episodes in outcomes(model, environment, tasks=tasks, seed=seed, views=views, progress=progress):
        values.append(score_tasks(outputs, episodes))
        lost.append(diverged(outputs))
    metric: Metric = "accuracy" if episodes.is_classification else "squared error"
    return Score.of(torch.cat(values), metric, diverged=int(torch.cat(lost).sum()))


def outcomes(
    model: Predictor,
    environment: Environment,
    *,
    tasks: int,
    seed: int = 0,
    views: Views = PLAIN,
    progress: bool = False,
) -> Iterator[tuple[Tensor, Episodes]]:
    """Adapt to tasks, some at a time, and give the outputs for their queries with them.

    Where the features depend on neither the task nor the other images, each image's are computed once.
    """
    if tasks < 2:
        raise InputError(f"tasks is {tasks}, but an interval needs at least 2.")
    generator = torch.Generator().manual_seed(seed)
    if isinstance(model, Model):
        check_finite(model.params, dict(model.net.named_buffers()))
        _check_statistics(model)
        fixed = adapts_head_only(model.method) and not normalises_each_set(model.net)
        if fixed and isinstance(environment, ImageTasks):
            table = FeatureTable.of(model, environment, views, seed=seed, progress=progress)
            yield from table.outcomes(model, environment, tasks, generator)
            return
    if views != PLAIN:
        raise InputError(
            f"views asks for {views.told()}, but this model's features change with the task. "
            "Use a method that solves a head, on a network with running statistics."
        )
    for size in _batches(tasks, BLOCK if model.device.type == "cpu" else 6 * BLOCK):  # enough to fill the machine
        episodes = _sampled(environment, size, generator, model.device)
        yield model.predict(episodes), episodes


def check_finite(params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Refuse weights that are NaN or infinite, and buffers that are NaN: a mask may be infinite.

    >>> check_finite({"head.bias": torch.tensor([1.0, torch.nan])}, {})
    Traceback (most recent call last):
    metabridge.errors.InputError: the weight 'head.bias' holds NaN or infinite values: training diverged. Train again \
with a lower learning rate, or use an earlier checkpoint.
    """
    for name, value in (*params.items(), *buffers.items()):
        if value.isnan().any() or (name in params and value.isinf().any()):
            raise InputError(
                f"the weight {name!r} holds NaN or infinite values: training diverged. "
                "Train again with a lower learning rate, or use an earlier checkpoint."
            )


def _check_statistics(model: Model) -> None:
    layers = running_batch_norms(model.net)
    if any(not layer.mean.any() and (layer.variance == 1).all() for layer in layers):
        raise InputError(
            "The network's running statistics were never estimated, so evaluation would not normalise. "
            "Call estimate_statistics(net, batches) with training images first, or use statistics='batch'."
        )


@dataclass(frozen=True, eq=False)
class FeatureTable:
    """The features of every image of a split, computed once, and of changed copies of them."""

    features: Tensor  # (1 + copies, images, dimension)
    places: Tensor  # where each image of the data set is in it

    @classmethod
    def of(
        cls,
        model: Model,
        environment: ImageTasks,
        views: Views = PLAIN,
        *,
        seed: int = 0,
        progress: bool = False,
    ) -> FeatureTable:
        """Compute the features of the environment's split."""
        rows, device = environment.image_indices, model.device
        places = torch.full((len(environment.data.images),), -1)
        places[rows] = torch.arange(len(rows))
        generator = torch.Generator(device).manual_seed(seed)
        augment = views.augment or Augment.for_size(environment.data.images.shape[-1])
        chunks = rows.split(64 if device.type == "cpu" else 1000)
        found: list[list[Tensor]] = [[] for _ in range(1 + views.copies)]
        for chunk in track_progress(chunks, "features", progress):
            images = environment.data.float_images(chunk).to(device)
            for copy, parts in enumerate(found):
                parts.append(views.features(model, images if copy == 0 else augment(images, generator)))
        return cls(torch.stack([torch.cat(parts) for parts in found]), places.to(device))

    def evaluate(self, models: Sequence[Model], environment: ImageTasks, *, tasks: int, seed: int = 0) -> list[Score]:
        """Score models whose features these are, with one head or another, on the tasks that `evaluate` draws."""
        generator = torch.Generator().manual_seed(seed)
        values: list[list[Tensor]] = [[] for _ in models]
        lost: list[list[Tensor]] = [[] for _ in models]
        for size in _batches(tasks, 32 * BLOCK):
            episodes = self.episodes(environment, size, generator)
            for index, model in enumerate(models):
                outputs = predict_from_features(model.method, model.params, episodes)
                values[index].append(score_tasks(outputs, episodes))
                lost[index].append(diverged(outputs))
        return [Score.of(torch.cat(own), diverged=int(torch.cat(bad).sum())) for own, bad in zip(values, lost)]

    def outcomes(
        self, model: Model, environment: ImageTasks, tasks: int, generator: torch.Generator
    ) -> Iterator[tuple[Tensor, Episodes]]:
        """Draw tasks, solve their heads some hundred at a time, and give the outputs with them."""
        for size in _batches(tasks, 12 * BLOCK):
            episodes = self.episodes(environment, size, generator)
            check_test_time(model.method, model.net, model.params, episodes)
            yield predict_from_features(model.method, model.params, episodes), episodes

    def episodes(self, environment: ImageTasks, tasks: int, generator: torch.Generator) -> Episodes:
        """Draw the tasks that the environment would, made of features; the copies enlarge the support."""
        blocks = [environment.sample_indices(size, generator) for size in _batches(tasks, BLOCK)]
        drawn = TaskIndices(*(torch.cat(parts) for parts in zip(*blocks)))
        episodes = drawn.to_episodes(lambda rows: self.features[0, self._at(rows)])
        copies = [features[self._at(drawn.support.flatten(1))] for features in self.features[1:]]
        return replace(
            episodes,
            support_x=torch.cat([episodes.support_x, *copies], dim=1),
            support_y=episodes.support_y.repeat(1, len(self.features)),
        )

    def _at(self, rows: Tensor) -> Tensor:
        return self.places[copy_to_device(rows, self.places.device)]


def _sampled(environment: Environment, tasks: int, generator: torch.Generator, device: torch.device) -> Episodes:
    blocks = [environment.sample(size, generator).to(device) for size in _batches(tasks, BLOCK)]
    return Episodes.concatenate(blocks)


def _batches(tasks: int, size: int) -> list[int]:
    return [min(size, tasks - first) for first in range(0, tasks, size)]


def score_tasks(outputs: Tensor, episodes: Episodes) -> Tensor:
    """Return each task's accuracy on its queries, or its mean squared error where targets are values.

    A query whose outputs are not finite is wrong, and the squared error of its task is NaN.
    """
    if episodes.is_classification:
        return answered_right(outputs, episodes).double().mean(-1)
    return (outputs - episodes.query_y).masked_fill(~outputs.isfinite(), math.nan).square().sum(-1).mean(-1)


def answered_right(outputs: Tensor, episodes: Episodes) -> Tensor:
    """Return whether each query's class is predicted right (tasks, queries); never where its outputs are not finite."""
    return outputs.isfinite().all(-1) & (outputs.argmax(-1) == episodes.query_y)


def diverged(outputs: Tensor) -> Tensor:
    """Return which tasks (tasks,) have outputs (tasks, queries, outputs) that are not finite."""
    return ~outputs.isfinite().flatten(1).all(1)
