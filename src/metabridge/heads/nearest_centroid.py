"""The nearest class mean as a test-time head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor
from torch.nn.functional import one_hot, pad

from metabridge.heads.feature_gram import check_finite
from metabridge.heads.fitted_heads import LinearHead
from metabridge.heads.head import Head
from metabridge.heads.task_sets import prepare_tasks, shape_solution


@dataclass(frozen=True)
class NearestCentroid(Head):
    """Nearest class mean, with the scores ½‖x − m‖² − ½‖x − c_k‖², which are linear in x.

    c_k is the mean of the features of class k, and m the mean of all features.

    Args:
        normalize: Whether features are scaled to unit length; their means are not.

    >>> import torch
    >>> head = NearestCentroid().fit(torch.tensor([[[1.0], [3.0], [8.0]]]), torch.tensor([[0, 0, 1]]), outputs=2)
    >>> head.weight.round(decimals=4), head.bias.round(decimals=4)
    (tensor([[[-2.],
             [ 4.]]]), tensor([[  6., -24.]]))
    """

    name: ClassVar[str] = "centroid"
    label: ClassVar[str] = "nearest centroid"
    calibrated: ClassVar[bool] = False
    default_penalty: ClassVar[float | None] = None

    normalize: bool = False

    @classmethod
    def _from_penalty(cls, penalty: float) -> Self:
        return cls(normalize=True)  # `penalty` is 0.0, since the head has no penalty

    def fit(self, features: Tensor, labels: Tensor, outputs: int) -> LinearHead:
        """Fit the head of every task; see `Head.fit`."""
        x, y = prepare_tasks(self, features, labels, outputs)
        targets = one_hot(y, outputs).to(x.dtype)
        averaging = targets / targets.sum(-2, keepdim=True)
        # One product for the centroids minus the mean, and for the mean in the last row.
        centroids_and_mean = pad(averaging - 1 / x.shape[-2], (0, 1), value=1 / x.shape[-2]).mT @ x
        check_finite("features", centroids_and_mean)
        centroid, mean = centroids_and_mean[:, :-1], centroids_and_mean[:, -1:]
        score_at_mean = -0.5 * centroid.square().sum(-1)
        return LinearHead(*shape_solution(features, centroid, score_at_mean, mean), self.normalize)
