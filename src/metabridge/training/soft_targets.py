"""Soft targets for heads that cover all training classes: label smoothing, mixup and distillation."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from metabridge.cuda_graph import CapturedGraph
from metabridge.episodes import Episodes
from metabridge.errors import InputError
from metabridge.learners.method import CLASS_ROW_HEADS, Method
from metabridge.learners.parameters import initial_heads
from metabridge.models.network import apply_features, apply_head
from metabridge.training.config import SoftTargets
from metabridge.training.evaluation import Model


def smooth_labels(labels: Tensor, num_classes: int, smoothing: float) -> Tensor:
    """Return one-hot targets with label smoothing.

    Args:
        labels: Class labels (...).
        num_classes: Number of classes.
        smoothing: Probability that is spread evenly over all classes.

    Returns:
        Probabilities (..., num_classes).

    >>> smooth_labels(torch.tensor([1]), 4, smoothing=0.2)
    tensor([[0.0500, 0.8500, 0.0500, 0.0500]])
    """
    return F.one_hot(labels, num_classes) * (1 - smoothing) + smoothing / num_classes


def mix_up(x: Tensor, y: Tensor, alpha: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Average each input with a random input of the same task, and their targets with the same weights.

    Args:
        x: Inputs (tasks, examples, ...).
        y: Targets (tasks, examples, classes).
        alpha: Parameter α of the distribution Beta(α, α) of the weights.
        generator: Random generator on the device of the inputs.

    Returns:
        The mixed inputs and targets.
    """
    shape = (2, *x.shape[:2])
    gamma = torch._standard_gamma(torch.full(shape, alpha, device=x.device), generator=generator)
    weight = (gamma[0] + 1e-9) / (gamma.sum(0) + 2e-9)  # from Beta(α, α); 1e-9 in case both samples are 0
    partners = torch.rand(x.shape[:2], generator=generator, device=x.device).argsort(1)
    task_indices = torch.arange(len(x), device=x.device)[:, None]
    x_weight, y_weight = weight.view(*shape[1:], *[1] * (x.ndim - 2)), weight[..., None]
    return torch.lerp(x[task_indices, partners], x, x_weight), torch.lerp(y[task_indices, partners], y, y_weight)


class LabelSoftener:
    """Replaces the labels of tasks by soft targets.

    Args:
        options: Which soft targets to use.
        method: The method with which the network is trained.
        teacher: Trained model whose predictions are part of the targets; needed if and only if
            `options.distillation` is positive.

    Raises:
        InputError: If the method or the teacher does not match the soft targets.
    """

    def __init__(self, options: SoftTargets, method: Method, teacher: Model | None) -> None:
        if method.training_head not in CLASS_ROW_HEADS:
            used_options = [name for name in vars(options) if getattr(options, name) != getattr(SoftTargets, name)]
            if teacher is not None:
                used_options = ["teacher", *(name for name in used_options if name != "distillation")]
            value = "passed" if used_options[0] == "teacher" else getattr(options, used_options[0])
            raise InputError(
                f"{used_options[0]} is {value}, but only methods whose head covers all training classes, such as mtl "
                f"and rfs, support it. Remove {' and '.join(used_options)}."
            )
        if (options.distillation > 0) != (teacher is not None):
            problem = "no teacher was passed" if teacher is None else "must be positive with a teacher"
            raise InputError(f"distillation is {options.distillation}, but {problem}. Use both or neither.")
        if teacher is not None and teacher.method.training_head != method.training_head:
            raise InputError(
                f"the teacher's training_head is {teacher.method.training_head!r}, but this method's is "
                f"{method.training_head!r}. Use a teacher that was trained with the same method."
            )
        # copy the teacher's network, since it may be the network that is trained
        self.teacher = None if teacher is None else replace(teacher, net=copy.deepcopy(teacher.net).eval())
        self.options, self.method = options, method
        self._graphed_features: dict[torch.Size, _GraphedFeatures] = {}  # by shape of the inputs

    @torch.no_grad()
    def __call__(self, episodes: Episodes, generator: torch.Generator) -> Episodes:
        """Return the tasks with support and query set joined, and probabilities as targets."""
        episodes = episodes.without_split()
        assert episodes.classes is not None
        x = episodes.support_x
        y = smooth_labels(episodes.support_y, episodes.classes.shape[1], self.options.smoothing)
        if self.options.mixup:
            x, y = mix_up(x, y, self.options.mixup, generator)
        if self.teacher is not None:
            predicted = (self._logits(x, episodes) / self.options.temperature).softmax(-1)
            y = torch.lerp(y, predicted, self.options.distillation)
        return replace(episodes, support_x=x, support_y=y, query_x=x, query_y=y)

    def _logits(self, x: Tensor, episodes: Episodes) -> Tensor:
        """Return the teacher's logits for inputs (tasks, examples, ...)."""
        assert self.teacher is not None
        inputs = x.flatten(0, 1)
        if inputs.device.type == "cuda":
            if inputs.shape not in self._graphed_features:
                self._graphed_features[inputs.shape] = _GraphedFeatures(self.teacher, inputs)
            features = self._graphed_features[inputs.shape].replay(inputs)
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


class _GraphedFeatures:
    """The computation of the teacher's features as a CUDA graph, which reads inputs from a fixed tensor."""

    def __init__(self, teacher: Model, inputs: Tensor) -> None:
        self.inputs = inputs.clone()
        self._graph = CapturedGraph(lambda: apply_features(teacher.net, teacher.params, self.inputs, teacher.dtype))

    def replay(self, inputs: Tensor) -> Tensor:
        """Copy the inputs into the fixed tensor, and return the features."""
        self.inputs.copy_(inputs, non_blocking=True)
        return self._graph.replay()


def soft_cross_entropy(prediction: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits `prediction` and probabilities `target`, both (examples, classes)."""
    return F.cross_entropy(prediction, target)
