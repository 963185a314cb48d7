"""Checks and conversions of the inputs and results of `Head.fit`, shared by all heads."""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from metabridge.errors import InputError, describe
from metabridge.heads.feature_gram import check_finite
from metabridge.heads.fitted_heads import at_least_float32
from metabridge.heads.head import Head

log = logging.getLogger("metabridge")
MAX_SUBOPTIMALITY = 1e-5  # heads warn if the objective exceeds its minimum by a larger fraction


def prepare_tasks(head: Head, features: Tensor, labels: Tensor, outputs: int) -> tuple[Tensor, Tensor]:
    """Check the arguments of `head.fit` and convert them. NaN and infinite features are not detected here.

    Returns:
        The features (tasks, n, d) and the labels (tasks, n, ...), with all task dimensions flattened into one. The
        features are at least float32, and L2-normalized if `head.normalize` is true.

    Raises:
        InputError: If a shape, a dtype or a label is invalid, or a class has no example.
    """
    if not features.is_floating_point() or features.ndim < 3:
        raise InputError(
            f"features is {describe(features)}, but must be floating point of shape (tasks, examples, features). "
            "For a single task use features[None]."
        )
    is_regression = head.supports_regression and labels.is_floating_point()
    shape = features.shape[:-1] + ((outputs,) if is_regression else ())
    if labels.shape != shape or not (is_regression or labels.dtype == torch.int64):
        raise InputError(
            f"labels is {describe(labels)}, but for features of shape {tuple(features.shape)} and {outputs} outputs "
            f"it must be int64 of shape {tuple(features.shape[:-1])}. For real-valued targets, use "
            f"{_names_of_regression_heads()}."
        )
    check_finite("labels", labels)
    x, y = at_least_float32(features.flatten(0, -3)), labels.flatten(0, features.ndim - 3)
    if not y.is_floating_point():
        _check_classes(y, outputs)
    return normalize(x, dim=-1) if head.normalize else x, y


def weight_and_bias(
    features: Tensor, weight: Tensor, origin_scores: Tensor, origin: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the weight and the bias with the task dimensions of `features`, in its dtype, but at least float32.

    The bias is computed from the rounded weight, so that the scores at `origin` are `origin_scores`. Otherwise an
    origin far from 0 would amplify the rounding errors of the weight.

    Args:
        features: The features as they were passed to `Head.fit`.
        weight: The weights, (tasks, outputs, d).
        origin_scores: The scores at `origin`, (tasks, outputs).
        origin: The point at which the scores are `origin_scores`, (tasks, 1, d); None for 0.

    Raises:
        InputError: If the weight or the bias overflows.
    """
    task_shape, dtype = features.shape[:-2], at_least_float32(features[:0]).dtype
    weight = weight.to(dtype)
    bias = origin_scores if origin is None else origin_scores - (weight.to(origin.dtype) @ origin.mT)[..., 0]
    bias = bias.to(dtype)
    if not (weight.isfinite().all() and bias.isfinite().all()):
        raise InputError(
            f"features is {describe(features)}, but the weights of the fitted head overflow {dtype}. Use float64, or "
            "smaller features."
        )
    return weight.reshape(*task_shape, *weight.shape[1:]), bias.reshape(*task_shape, *bias.shape[1:])


def warn_if_not_converged(head: Head, suboptimality: Tensor, suggestion: str) -> None:
    """Log a warning if the solution of a task is not within `MAX_SUBOPTIMALITY` of the minimum.

    Args:
        head: The head that was fitted.
        suboptimality: The relative suboptimality of every subproblem, (tasks, subproblems). A subproblem belongs to an
            output, to a pair of outputs, or to the whole task.
        suggestion: A change of the settings with which the solver converges, such as "a smaller C".
    """
    max_suboptimality = float(suboptimality.max())
    if not max_suboptimality < MAX_SUBOPTIMALITY:
        log.warning(
            "%r did not converge in %d of %d tasks: the relative suboptimality is up to %.1e. Use %s, or "
            "normalize=True.",
            head,
            int((~(suboptimality < MAX_SUBOPTIMALITY)).any(-1).sum()),
            len(suboptimality),
            max_suboptimality,
            suggestion,
        )


def _check_classes(labels: Tensor, outputs: int) -> None:
    if outputs < 2:
        raise InputError(f"outputs is {outputs}, but a classifier needs at least 2 classes.")
    min_label, max_label = (int(extremum) for extremum in labels.aminmax())
    if min_label < 0 or max_label >= outputs:
        raise InputError(
            f"labels has values from {min_label} to {max_label}, but with {outputs} outputs they must be in "
            f"0..{outputs - 1}."
        )
    is_empty = one_hot(labels, outputs).sum(-2) == 0
    if is_empty.any():
        task, class_index = is_empty.nonzero()[0].tolist()
        raise InputError(f"class {class_index} of task {task} has no support example. Give every class at least one.")


def _names_of_regression_heads() -> str:
    return " or ".join(cls.__name__ for cls in Head.registry.values() if cls.supports_regression)
