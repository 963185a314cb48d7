"""Soft targets for heads that cover all training classes: label smoothing, mixup and distillation."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from metabridge.cuda_graph import CapturedGraph
from metabridge.episodes import Episodes
from metabridge.errors import InputError
from metabridge.learners.method import ROW_HEADS, Method
from metabridge.learners.parameters import initial_heads
from metabridge.models.network import apply_features, apply_head
from metabridge.training.evaluation import Model


@dataclass(frozen=True)
class SoftTargets:
    """How class labels become target probabilities, for methods whose head covers all training classes (mtl, rfs).

    Args:
        smoothing: Label smoothing: fraction of the target that is spread evenly over all classes (Szegedy et al. 2016).
        mixup: Mixup: images are mixed in pairs, with weights drawn from Beta(`mixup`, `mixup`) (Zhang et al. 2018). 0
            for no mixup.
        distillation: Fraction of the target that is the teacher's prediction for the same image (Furlanello et al.
            2018).
        temperature: Temperature of the softmax of the teacher's predictions.

    Raises:
        InputError: If an argument is out of range.

    >>> soft = SoftTargets(smoothing=0.2)
    >>> soft.probabilities(torch.tensor([1]), ways=4)
    tensor([[0.0500, 0.8500, 0.0500, 0.0500]])
    """

    smoothing: float = 0.0
    mixup: float = 0.0
    distillation: float = 0.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        for name in ("smoothing", "distillation"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(
                    f"{name} is {getattr(self, name)}, but must be a fraction from 0 to 1. Use {name}=0.1."
                )
        if self.mixup < 0 or self.temperature <= 0:
            raise InputError(
                f"mixup is {self.mixup} and temperature {self.temperature}, but mixup must be 0 or more and "
                "temperature positive."
            )

    def probabilities(self, labels: Tensor, ways: int) -> Tensor:
        """Return smoothed one-hot targets.

        Args:
            labels: Class labels (...).
            ways: Number of classes.

        Returns:
            Probabilities (..., ways).
        """
        return F.one_hot(labels, ways) * (1 - self.smoothing) + self.smoothing / ways

    def mixed(self, x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Mix each input with a random input of the same task, and their targets with the same weights.

        Args:
            x: Inputs (tasks, examples, ...).
            y: Targets (tasks, examples, classes).
            generator: Random generator on the device of the inputs.

        Returns:
            Mixed inputs and targets.
        """
        shape = (2, *x.shape[:2])
        gamma = torch._standard_gamma(torch.full(shape, self.mixup, device=x.device), generator=generator)
        weight = (gamma[0] + 1e-9) / (gamma.sum(0) + 2e-9)  # Beta(mixup, mixup); 1e-9 in case both values are 0
        partner = torch.rand(x.shape[:2], generator=generator, device=x.device).argsort(1)
        task = torch.arange(len(x), device=x.device)[:, None]
        x_weight, y_weight = weight.view(*shape[1:], *[1] * (x.ndim - 2)), weight[..., None]
        return torch.lerp(x[task, partner], x, x_weight), torch.lerp(y[task, partner], y, y_weight)


class Softener:
    """Replace the labels of tasks by soft targets.

    Args:
        soft: Which soft targets to use.
        method: The method that is trained.
        teacher: Trained model whose predictions are part of the targets; needed if and only if
            `soft.distillation` is positive.

    Raises:
        InputError: If the method or the teacher does not match the soft targets.
    """

    def __init__(self, soft: SoftTargets, method: Method, teacher: Model | None) -> None:
        if method.training_head not in ROW_HEADS:
            raise InputError(
                f"soft targets need a method whose head covers all training classes, such as mtl or rfs, but this "
                f"method's training_head is {method.training_head!r}. Remove smoothing, mixup and the teacher."
            )
        if (soft.distillation > 0) != (teacher is not None):
            raise InputError(
                f"distillation is {soft.distillation}, but there is {'no' if teacher is None else 'a'} teacher. "
                "Use both or none."
            )
        if teacher is not None and teacher.method.training_head != method.training_head:
            raise InputError(
                f"the teacher's training_head is {teacher.method.training_head!r}, but this method's is "
                f"{method.training_head!r}. Use a teacher that was trained with the same method."
            )
        # copy the teacher's network, since training may change it: it may be the network that is trained
        self.teacher = None if teacher is None else replace(teacher, net=copy.deepcopy(teacher.net).eval())
        self.soft, self.method = soft, method
        self._captures: dict[torch.Size, _Capture] = {}

    @torch.no_grad()
    def __call__(self, episodes: Episodes, generator: torch.Generator) -> Episodes:
        """Return the tasks with support and query set joined, and probabilities as targets."""
        episodes = episodes.without_split()
        assert episodes.classes is not None
        x, ways = episodes.support_x, episodes.classes.shape[1]
        y = self.soft.probabilities(episodes.support_y, ways)
        if self.soft.mixup:
            x, y = self.soft.mixed(x, y, generator)
        if self.teacher is not None:
            predicted = (self._logits(x, episodes) / self.soft.temperature).softmax(-1)
            y = torch.lerp(y, predicted, self.soft.distillation)
        return replace(episodes, support_x=x, support_y=y, query_x=x, query_y=y)

    def _logits(self, x: Tensor, episodes: Episodes) -> Tensor:
        """Return the teacher's logits for inputs (tasks, examples, ...)."""
        assert self.teacher is not None
        inputs = x.flatten(0, 1)
        if inputs.device.type == "cuda":
            if inputs.shape not in self._captures:
                self._captures[inputs.shape] = _Capture(self.teacher, inputs)
            features = self._captures[inputs.shape].replay(inputs)
        else:
            features = apply_features(self.teacher.net, self.teacher.params, inputs, self.teacher.dtype)
        heads = initial_heads(self.teacher.method, self.teacher.params, episodes)
        features = features.unflatten(0, x.shape[:2])
        return torch.stack(
            [
                apply_head({name: value[task] for name, value in heads.items()}, task_features)
                for task, task_features in enumerate(features)
            ]
        )


class _Capture:
    """The computation of the teacher's features as a CUDA graph, which reads inputs from a fixed tensor."""

    def __init__(self, teacher: Model, inputs: Tensor) -> None:
        self.inputs = inputs.clone()
        self._graph = CapturedGraph(lambda: apply_features(teacher.net, teacher.params, self.inputs, teacher.dtype))

    def replay(self, inputs: Tensor) -> Tensor:
        """Copy the inputs into the fixed tensor, and return the features."""
        self.inputs.copy_(inputs, non_blocking=True)
        return self._graph.replay()


def soft_cross_entropy(prediction: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy against target probabilities (examples, classes)."""
    return F.cross_entropy(prediction, target)
