"""Logistic regression as a test-time head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from metabridge.errors import check_positive
from metabridge.heads import newton
from metabridge.heads.feature_gram import map_task_blocks, principal_coordinates, weighted_sum_plus_mean
from metabridge.heads.fit_checks import prepare_tasks, warn_if_not_converged, weight_and_bias
from metabridge.heads.fitted_heads import LinearHead
from metabridge.heads.head import Head


@dataclass(frozen=True)
class LogisticRegression(Head):
    """Multinomial logistic regression: minimize ½ penalty ‖W‖² + Σ_n −log softmax(Wφ_n + b)[y_n].

    φ_n are the features and y_n the labels. The bias b is not penalized. With three or more outputs, this equals
    scikit-learn's `LogisticRegression(C=1/penalty)`. With two outputs, it equals `LogisticRegression(C=2/penalty)`,
    because scikit-learn then penalizes a single weight vector, the difference of the two rows of W.

    Args:
        penalty: The weight of ½‖W‖².
        normalize: Whether to L2-normalize the features.

    Raises:
        InputError: If `penalty` is not positive.

    >>> import torch
    >>> features, labels = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]), torch.tensor([[0, 1]])
    >>> LogisticRegression().fit(features, labels, outputs=2).weight
    tensor([[[ 0.3374, -0.3374],
             [-0.3374,  0.3374]]])
    """

    name: ClassVar[str] = "logistic"
    label: ClassVar[str] = "logistic regression"
    calibrated: ClassVar[bool] = True
    default_penalty: ClassVar[float | None] = 0.33  # as in the presets "mtl" and "rfs" of `learners.method`

    penalty: float = 1.0
    normalize: bool = True

    def __post_init__(self) -> None:
        check_positive("penalty", self.penalty)

    @classmethod
    def _from_penalty(cls, penalty: float) -> Self:
        return cls(penalty)

    def fit(self, features: Tensor, labels: Tensor, outputs: int) -> LinearHead:
        """Fit the head of every task; see `Head.fit`."""
        x, y = prepare_tasks(self, features, labels, outputs)
        coordinates, from_coordinates, mean = map_task_blocks(principal_coordinates, x)
        design = pad(coordinates, (0, 1), value=1.0)
        penalty = pad(torch.full_like(coordinates[:, 0], self.penalty), (0, 1))
        solution, suboptimality = newton.minimize(newton.CROSS_ENTROPY, y, design, penalty, outputs)
        warn_if_not_converged(self, suboptimality, "a larger penalty")
        solution = solution - solution.mean(-1, keepdim=True)  # softmax is invariant to the mean over outputs
        weight = (from_coordinates @ solution[:, :-1]).mT
        if x.shape[-2] < x.shape[-1]:  # `weight` contains dual coefficients
            weight, mean = weighted_sum_plus_mean(weight, x, coordinates, mean)
        return LinearHead(*weight_and_bias(features, weight, solution[:, -1], mean), self.normalize)
