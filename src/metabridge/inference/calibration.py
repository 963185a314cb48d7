"""Choose the penalty of a head and the temperature of its outputs, from the images of a support set alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metabridge.errors import InputError, check_positive
from metabridge.heads import SVM, Head
from metabridge.inference.left_out import LeftOut, predict_left_out
from metabridge.learners.method import Method
from metabridge.models.network import Params

PENALTY_FACTORS = (0.1, 10.0)  # the default penalty and these multiples of it are compared
TEMPERATURE_RANGE = (0.01, 100.0)
# Standard deviation of the logarithm of the temperature before any image is seen. The scores of heads without
# probabilities can have any scale, so their temperature can be farther from 1.
PRIOR_SCALE = {True: 1.0, False: 2.0}  # by `Head.calibrated`


def head_penalty(head: Head) -> float | None:
    """Return the strength of the L2 penalty of a head, as `create_head` takes it; None if it has none.

    >>> head_penalty(SVM(C=4.0))
    0.25
    """
    return 1 / head.C if isinstance(head, SVM) else getattr(head, "penalty", None)


def with_penalty(head: Head, penalty: float) -> Head:
    """Return a head that differs from another only in its penalty.

    Raises:
        InputError: If the head has no penalty, or `penalty` is not positive.

    >>> with_penalty(SVM(loss="hinge"), 0.5)
    SVM(C=2.0, loss='hinge', normalize=True)
    """
    check_positive("penalty", penalty)
    if head_penalty(head) is None:
        raise InputError(f"penalty is {penalty}, but the head {head.name!r} has no penalty. Omit it.")
    fields: Any = {"C": 1 / penalty} if isinstance(head, SVM) else {"penalty": penalty}
    return replace(cast(Any, head), **fields)  # type: ignore[no-any-return]


def choose_penalty(method: Method, params: Params, features: Tensor, labels: Tensor) -> Method:
    """Return the method with the penalty that predicts left-out support images best.

    The penalties are a tenth, one and ten times the current one. Another penalty is chosen only if it is better beyond
    chance: if the log loss of the left-out images, after temperature scaling, is lower by more than one standard error
    of the difference. If every class has one image, the penalty does not change.

    The penalties of heads without probabilities do not change either: with five images per class, choosing the penalty
    of an SVM or of ridge regression in this way lowers the accuracy.

    Args:
        method: A method with a test-time head.
        params: The parameters of the method.
        features: The features of the support set, (n, d).
        labels: The labels, int64 (n,).

    Returns:
        The method, with the chosen penalty.
    """
    head = method.test_solver
    default = head_penalty(head) if isinstance(head, Head) and head.calibrated else None
    if not isinstance(head, Head) or default is None or int(labels.bincount().max()) == 1:
        return method
    candidates = [method]
    candidates += [replace(method, test_solver=with_penalty(head, factor * default)) for factor in PENALTY_FACTORS]
    return candidates[_best([predict_left_out(candidate, params, features, labels) for candidate in candidates])]


def _best(results: Sequence[LeftOut]) -> int:
    """Return the index of the result with the lowest loss; 0 unless another is better by a standard error."""
    losses = [log_losses(result, fit_temperature(result, calibrated=True)) for result in results]
    best = 0
    for index in range(1, len(results)):
        gain = losses[0] - losses[index]
        standard_error = gain.std(ddof=1) / math.sqrt(len(gain))
        if gain.mean() > standard_error and losses[index].mean() < losses[best].mean():  # false for NaN
            best = index
    return best


def fit_temperature(left_out: LeftOut, *, calibrated: bool) -> float:
    """Return the temperature T for which softmax(outputs / T) fits the labels of left-out images best.

    T minimizes the sum of the log losses plus (log T)² / (2 s²), where s is 1 for heads with probabilities and 2 for
    others. The second term keeps T near 1 if there are few images.

    Args:
        left_out: The outputs for left-out images and their labels.
        calibrated: Whether the outputs are those of a head with probabilities (`Head.calibrated`).

    Returns:
        The temperature, from 0.01 to 100; 1 if no image could be left out.

    >>> outputs = torch.tensor([[4.0, 0.0], [4.0, 0.0], [4.0, 0.0], [0.0, 4.0]]).double()
    >>> left_out = LeftOut(torch.arange(4), outputs, torch.tensor([0, 0, 1, 1]))
    >>> round(fit_temperature(left_out, calibrated=True), 2)
    2.21
    """
    from scipy.optimize import minimize_scalar

    if not len(left_out.rows) or not left_out.outputs.isfinite().all():
        return 1.0
    scale = PRIOR_SCALE[calibrated]

    def objective(log_temperature: float) -> float:
        loss = log_losses(left_out, math.exp(log_temperature)).sum()
        return float(loss + log_temperature**2 / (2 * scale**2))

    low, high = map(math.log, TEMPERATURE_RANGE)
    # The objective may have a second, local minimum at 1, so it is evaluated on a grid first.
    grid = np.linspace(low, high, 41)
    start = grid[np.argmin([objective(value) for value in grid])]
    step = grid[1] - grid[0]
    bounds = (max(low, start - step), min(high, start + step))
    return math.exp(minimize_scalar(objective, bounds=bounds, method="bounded", options={"xatol": 1e-9}).x)


def log_losses(left_out: LeftOut, temperature: float) -> NDArray[np.float64]:
    """Return the log loss of each left-out image, −log softmax(outputs / T)[label].

    >>> left_out = LeftOut(torch.arange(1), torch.zeros(1, 4).double(), torch.tensor([3]))
    >>> log_losses(left_out, 0.5).round(3)
    array([1.386])
    """
    losses = torch.nn.functional.cross_entropy(left_out.outputs / temperature, left_out.labels, reduction="none")
    return losses.cpu().numpy()
