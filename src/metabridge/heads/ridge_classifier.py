"""Ridge regression, on one-hot labels or real-valued targets, as a test-time head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from metabridge.errors import check_positive
from metabridge.heads.feature_gram import gram_matrix, map_task_blocks, principal_coordinates, weighted_sum
from metabridge.heads.fit_checks import prepare_tasks, weight_and_bias
from metabridge.heads.fitted_heads import LinearHead
from metabridge.heads.head import Head
from metabridge.ridge_regression import ridge_dual


@dataclass(frozen=True)
class RidgeClassifier(Head):
    """Ridge regression: minimize Σ_n ‖Wφ_n + b − y_n‖² + penalty ‖W‖², like scikit-learn's `Ridge(alpha=penalty)`.

    φ_n are the features, and the bias b is not penalized. The targets y_n are one-hot encoded class labels or
    real-valued targets, (..., n, outputs).

    Args:
        penalty: The weight of ‖W‖².
        normalize: Whether to L2-normalize the features.

    Raises:
        InputError: If `penalty` is not positive.

    >>> import torch
    >>> targets = torch.tensor([[[0.0], [4.0]]])
    >>> head = RidgeClassifier(penalty=2.0).fit(torch.tensor([[[-1.0], [1.0]]]), targets, outputs=1)
    >>> head.weight, head.bias
    (tensor([[[1.]]]), tensor([[2.]]))
    """

    name: ClassVar[str] = "ridge"
    label: ClassVar[str] = "ridge"
    stored_name: ClassVar[str] = "Ridge"  # class name of version 0.1.0, which saved runs contain
    calibrated: ClassVar[bool] = False
    default_penalty: ClassVar[float | None] = 1.0
    supports_regression: ClassVar[bool] = True

    penalty: float = 1.0
    normalize: bool = False

    def __post_init__(self) -> None:
        check_positive("penalty", self.penalty)

    @classmethod
    def _from_penalty(cls, penalty: float) -> Self:
        return cls(penalty, normalize=True)

    def fit(self, features: Tensor, labels: Tensor, outputs: int) -> LinearHead:
        """Fit the head of every task; see `Head.fit`."""
        x, y = prepare_tasks(self, features, labels, outputs)
        if not y.is_floating_point():
            y = one_hot(y, outputs)
        penalty = torch.tensor(self.penalty, dtype=torch.float64, device=x.device)

        if x.shape[-2] < x.shape[-1]:
            gram, origin = gram_matrix(x, sensitivity=1 / self.penalty)
            if _is_well_conditioned(gram.diagonal(dim1=-2, dim2=-1).sum(-1), self.penalty):
                coefficients, origin_scores = map_task_blocks(lambda K, y: ridge_dual(K, y.double(), penalty), gram, y)
                weight = weighted_sum(coefficients, x, origin)
                return LinearHead(*weight_and_bias(features, weight, origin_scores, origin), self.normalize)

        def solve(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """Return the weight, the scores at the mean of the features, and this mean."""
            coordinates, from_coordinates, mean = principal_coordinates(x)
            y = y.double()
            target_mean = y.mean(-2, keepdim=True)
            eigenvalues = coordinates.square().sum(-2)[..., None]
            weight = (from_coordinates @ (coordinates.mT @ (y - target_mean) / (eigenvalues + penalty))).mT
            return weighted_sum(weight, x, mean) if x.shape[-2] < x.shape[-1] else weight, target_mean[:, 0], mean

        return LinearHead(*weight_and_bias(features, *map_task_blocks(solve, x, y)), self.normalize)


def _is_well_conditioned(trace: Tensor, penalty: float) -> bool:
    """Return whether the penalty is far above the float64 rounding errors of Gram matrices with these traces."""
    return bool(trace.max() * torch.finfo(torch.float64).eps < 1e-8 * penalty)
