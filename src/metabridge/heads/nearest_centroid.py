"""The nearest class mean as a test-time head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor
from torch.nn.functional import one_hot, pad

from metabridge.heads.feature_gram import check_finite
from metabridge.heads.fit_checks import prepare_tasks, weight_and_bias
from metabridge.heads.fitted_heads import LinearHead
from metabridge.heads.head import Head


@dataclass(frozen=True)
class NearestCentroid(Head):
    """Nearest class mean: the score of class k decreases with the distance between the features and the class mean.

    The scores are ½‖x − m‖² − ½‖x − c_k‖², which are linear in x. c_k is the mean of the features of class k, and m is
    the mean of all features.

    Args:
        normalize: Whether to L2-normalize the features. Class means are not normalized again.

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
        return cls(normalize=True)  # this head has no penalty

    def fit(self, features: Tensor, labels: Tensor, outputs: int) -> LinearHead:
        """Fit the head of every task; see `Head.fit`."""
        x, y = prepare_tasks(self, features, labels, outputs)
        targets = one_hot(y, outputs).to(x.dtype)
        mean_weights = targets / targets.sum(-2, keepdim=True)
        # One matrix product computes the centered centroids, and the mean as the last row.
        centroids_and_mean = pad(mean_weights - 1 / x.shape[-2], (0, 1), value=1 / x.shape[-2]).mT @ x
        check_finite("features", centroids_and_mean)
        centered_centroids, mean = centroids_and_mean[:, :-1], centroids_and_mean[:, -1:]
        scores_at_mean = -0.5 * centered_centroids.square().sum(-1)
        return LinearHead(*weight_and_bias(features, centered_centroids, scores_at_mean, mean), self.normalize)
