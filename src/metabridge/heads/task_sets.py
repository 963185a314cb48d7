"""Checks and conversions that all heads share, before and after they are fitted."""

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
MAX_EXCESS = 1e-5  # a head warns if its objective exceeds the minimum by this fraction or more


def prepare_tasks(head: Head, features: Tensor, labels: Tensor, outputs: int) -> tuple[Tensor, Tensor]:
    """Raise an InputError if the arguments of `head.fit` are invalid; only features may be NaN or infinite.

    Returns:
        The features and the labels, each with one task axis. The features are at least float32, and have unit length if
        `head.normalize`.
    """
    if not features.is_floating_point() or features.ndim < 3:
        raise InputError(
            f"features is {describe(features)}, but must be floating point of shape (tasks, examples, features). "
            "For a single task use features[None]."
        )
    is_regression = head.fits_values and labels.is_floating_point()
    shape = features.shape[:-1] + ((outputs,) if is_regression else ())
    if labels.shape != shape or not (is_regression or labels.dtype == torch.int64):
        raise InputError(
            f"labels is {describe(labels)}, but for features of shape {tuple(features.shape)} and {outputs} outputs "
            f"must be int64 of shape {tuple(features.shape[:-1])}. Only {_regression_heads()} fits real values."
        )
    check_finite("labels", labels)
    x, y = at_least_float32(features.flatten(0, -3)), labels.flatten(0, features.ndim - 3)
    if not y.is_floating_point():
        _check_classes(y, outputs)
    return normalize(x, dim=-1) if head.normalize else x, y


def shape_solution(features: Tensor, weight: Tensor, level: Tensor, origin: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the weight and the bias with the task axes of the features, in their dtype, but at least float32.

    The bias is computed from the rounded weight, so that the scores at `origin` are `level`. Otherwise rounding
    errors of the weight would be magnified if the origin is far from 0. Raise an InputError if a value overflows.

    Args:
        features: The features as they were passed to `Head.fit`.
        weight: The weights, (tasks, outputs, d).
        level: The scores at the origin, (tasks, outputs).
        origin: A vector for each task, (tasks, 1, d), or None for 0.
    """
    task_shape, dtype = features.shape[:-2], at_least_float32(features[:0]).dtype
    weight = weight.to(dtype)
    bias = level if origin is None else level - (weight.to(origin.dtype) @ origin.mT)[..., 0]
    bias = bias.to(dtype)
    if not (weight.isfinite().all() and bias.isfinite().all()):
        raise InputError(
            f"features is {describe(features)}, but the weights of the fitted head overflow {dtype}. Use float64, or "
            "smaller features."
        )
    return weight.reshape(*task_shape, *weight.shape[1:]), bias.reshape(*task_shape, *bias.shape[1:])


def warn_if_unsolved(head: Head, excess: Tensor, remedy: str) -> None:
    """Log a warning if an objective exceeds its minimum by the fraction `MAX_EXCESS` or more.

    Args:
        head: The head that was fitted.
        excess: The relative excess of each objective over its minimum, (tasks, problems).
        remedy: The setting that would make the problem easier.
    """
    largest = float(excess.max())
    if not largest < MAX_EXCESS:
        log.warning(
            "%r stopped at objectives with a relative excess of up to %.1e over their minimum, in %d of %d tasks. "
            "Use %s, or normalize=True.",
            head,
            largest,
            int((~(excess < MAX_EXCESS)).any(-1).sum()),
            len(excess),
            remedy,
        )


def _check_classes(labels: Tensor, outputs: int) -> None:
    if outputs < 2:
        raise InputError(f"outputs is {outputs}, but a classifier needs at least 2 classes.")
    smallest, largest = (int(bound) for bound in labels.aminmax())
    if smallest < 0 or largest >= outputs:
        raise InputError(
            f"labels are between {smallest} and {largest}, but with {outputs} outputs must be in 0..{outputs - 1}."
        )
    is_empty = one_hot(labels, outputs).sum(-2) == 0
    if is_empty.any():
        task, output = is_empty.nonzero()[0].tolist()
        raise InputError(f"class {output} of task {task} has no support example. Give every class at least one.")


def _regression_heads() -> str:
    return " or ".join(cls.__name__ for cls in Head.registry.values() if cls.fits_values)
