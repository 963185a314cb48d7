"""Outlier detection: how unlike all classes of a task an image is, and from which score on it belongs to none of them.

The outlier score of features x is their distance to the nearest class mean μ_k in a metric that shrinks the directions
in which the support examples of a class differ:

    score(x) = min_k √( (x − μ_k)ᵀ (I + ½ m S / tr S)⁻¹ (x − μ_k) / (1 + 1/n_k) ).

S is the scatter matrix of the support examples around their class means, summed over all classes, n_k is the number of
examples of class k, and m = Σ_k (n_k − 1). With a few examples, this is a Mahalanobis distance whose covariance matrix
is shrunk to a multiple of the identity; with one example per class, S = 0, and the metric is the Euclidean one. The
last factor makes up for the error of the mean of few examples.

The threshold is calibrated with left-out scores: the score of each support example under the detector that is fitted
without it. They are computed for all examples at once, by a rank-one change of S.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import normalize as l2_normalize
from torch.nn.functional import one_hot

from metabridge.errors import InputError, describe
from metabridge.heads.feature_gram import check_finite
from metabridge.heads.fit_checks import prepare_tasks
from metabridge.heads.fitted_heads import at_least_float32
from metabridge.heads.nearest_centroid import NearestCentroid

_STRENGTH = 0.5  # the factor ½ of the metric, chosen on validation classes; from ¼ to 1, results differ little
_TINY = 1e-12  # relative size below which eigenvalues and traces count as 0


@dataclass(frozen=True, eq=False, repr=False)
class OutlierDetector:
    """A fitted outlier detector, for any number of tasks; see `fit_outlier_detector`.

    Args:
        centroids: The class means μ, (..., classes, d), with any leading task dimensions.
        axes: Directions in which examples of a class differ, as rows, (..., axes, d). The squared length of a vector v
            in the metric is ‖v‖² − Σ_a (aᵀv)², a sum over the rows a.
        distance_factors: For each class, the factor 1/√(1 + 1/n) of the distances, (..., classes).
        left_out_mean: Mean of the left-out scores of the support examples, (...).
        left_out_spread: Standard deviation of the left-out scores, from those above the mean, (...).
        left_out_count: Number of independent left-out scores, Σ_k (n_k − 1), int64 (...).
        normalize: Whether features are L2-normalized.

    >>> import torch
    >>> labels = torch.tensor([[0, 0, 0, 1, 1, 1]])
    >>> features = torch.randn(1, 6, 16) + 4 * labels[..., None]
    >>> detector = fit_outlier_detector(features, labels, classes=2)
    >>> detector
    OutlierDetector(2 classes, 16 features)
    >>> detector.scores(features) < detector.scores(-9 * torch.ones(1, 1, 16))
    tensor([[True, True, True, True, True, True]])
    """

    centroids: Tensor
    axes: Tensor
    distance_factors: Tensor
    left_out_mean: Tensor
    left_out_spread: Tensor
    left_out_count: Tensor
    normalize: bool

    def scores(self, features: Tensor) -> Tensor:
        """Return the outlier scores of queries. Higher scores are more unlike all classes.

        Args:
            features: The features, (..., queries, d), with the same task dimensions as the detector.

        Returns:
            The scores, (..., queries).

        Raises:
            InputError: If the task dimensions or the last dimension d differ from those of the detector.

        >>> import torch
        >>> labels = torch.tensor([[0, 1]])
        >>> detector = fit_outlier_detector(torch.eye(2)[None], labels, classes=2)
        >>> detector.scores(torch.tensor([[[0.0, 2.0], [-1.0, 0.0]]])).round(decimals=2)
        tensor([[0., 1.]])
        """
        task_shape, size = self.centroids.shape[:-2], self.centroids.shape[-1]
        if features.shape[:-2] != task_shape or features.shape[-1] != size:
            raise InputError(
                f"features is {describe(features)}, but the detector was fitted to task dimensions "
                f"{tuple(task_shape)} and {size} features. Pass features of the same tasks."
            )
        x = at_least_float32(features)
        x = l2_normalize(x, dim=-1) if self.normalize else x
        origin = self.centroids.mean(-2, keepdim=True)  # subtracted to lose fewer digits
        x, centroids = x - origin, self.centroids - origin
        squared = squared_distances(x, centroids) - squared_distances(x @ self.axes.mT, centroids @ self.axes.mT)
        return (squared.clamp_min(0).sqrt() * self.distance_factors[..., None, :]).amin(-1)

    def threshold(self, rate: float = 0.05) -> Tensor:
        """Return the score above which a query counts as belonging to none of the classes.

        The threshold is the upper end of a prediction interval of Student's t distribution for a new score, given the
        left-out scores of the support examples.

        Args:
            rate: The fraction of queries of known classes that may be rejected, on average over tasks.

        Returns:
            The threshold of each task, (...).

        Raises:
            InputError: If `rate` is not between 0 and 1, or a task has too few support examples.

        >>> import torch
        >>> labels = torch.arange(5).repeat(5)[None]
        >>> detector = fit_outlier_detector(torch.randn(1, 25, 16), labels, classes=5)
        >>> detector.threshold(0.05) > detector.threshold(0.1)
        tensor([True])
        """
        from scipy.special import stdtrit  # slow to import

        if not 0 < rate < 1:
            raise InputError(f"rate is {rate}, but must be between 0 and 1, such as 0.05.")
        if (self.left_out_count < 2).any():
            raise InputError(
                "the threshold cannot be calibrated, because it needs two classes with at least two support examples, "
                "or one class with at least three. Add support examples, or use the scores without a threshold."
            )
        count = self.left_out_count.double()
        quantile = torch.from_numpy(stdtrit((count - 1).cpu().numpy(), 1 - rate)).to(count)
        margin = quantile * (1 + 1 / count).sqrt() * self.left_out_spread
        return (self.left_out_mean + margin).to(self.centroids.dtype)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors from which `from_tensors` restores the detector.

        Returns:
            The tensors by name.
        """
        return {field.name: torch.as_tensor(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Restore a detector.

        Args:
            tensors: The tensors that `tensors` returned. Other tensors in the mapping are ignored.

        Returns:
            The detector.

        Raises:
            InputError: If a tensor is missing or has the wrong shape.
        """
        names = [field.name for field in fields(cls)]
        missing = [name for name in names if name not in tensors]
        if missing:
            raise InputError(f"tensors has no {missing[0]!r}, but an outlier detector needs {', '.join(names)}.")
        values = {name: tensors[name] for name in names}
        centroids, axes = values["centroids"], values["axes"]
        task_shape = centroids.shape[:-2]
        shapes = {
            "axes": (*task_shape, *axes.shape[-2:-1], *centroids.shape[-1:]),
            "distance_factors": centroids.shape[:-1],
            "normalize": (),
            **{name: task_shape for name in names if name.startswith("left_out")},
        }
        for name, shape in shapes.items():
            if centroids.ndim < 2 or values[name].shape != shape:
                raise InputError(
                    f"{name} is {describe(values[name])}, which does not fit centroids, {describe(centroids)}. Pass "
                    "the tensors that OutlierDetector.tensors returned."
                )
        normalize = bool(values.pop("normalize"))
        return cls(**values, normalize=normalize)

    def __repr__(self) -> str:
        classes, size = self.centroids.shape[-2:]
        return f"OutlierDetector({classes} classes, {size} features)"


def fit_outlier_detector(features: Tensor, labels: Tensor, classes: int, *, normalize: bool = True) -> OutlierDetector:
    """Fit an outlier detector to the support set of every task.

    Args:
        features: The features, (..., n, d), with at least one leading task dimension.
        labels: Class labels, int64 (..., n).
        classes: The number of classes.
        normalize: Whether to L2-normalize the features.

    Returns:
        The detector, with the task dimensions of the features.

    Raises:
        InputError: If a shape or dtype is wrong, features are not finite, there are fewer than two classes, a label is
            not in 0..classes − 1, or a class has no example.

    >>> import torch
    >>> labels = torch.arange(5).repeat(5).expand(8, -1)
    >>> detector = fit_outlier_detector(torch.randn(8, 25, 64), labels, classes=5)
    >>> scores, threshold = detector.scores(torch.randn(8, 3, 64)), detector.threshold(rate=0.05)
    >>> scores.shape, threshold.shape
    (torch.Size([8, 3]), torch.Size([8]))
    """
    x, y = prepare_tasks(NearestCentroid(normalize=normalize), features, labels, classes)
    dtype, task_shape = x.dtype, features.shape[:-2]
    x = x.double()
    check_finite("features", x)
    membership = one_hot(y, classes).double()
    counts = membership.sum(-2)
    centroids = (membership / counts[..., None, :]).mT @ x
    residuals = x - membership @ centroids
    eigenvalues, directions = _principal_axes(residuals)
    degrees = (counts - 1).sum(-1)
    prior = _prior_variance(eigenvalues.sum(-1), degrees, eigenvalues.sum(-1))
    axes = directions * (eigenvalues / (eigenvalues + prior[..., None])).sqrt()[..., None]
    scores = left_out_scores(x, membership, centroids, eigenvalues, directions)
    mean, spread = _mean_and_spread(scores, degrees)
    return OutlierDetector(
        centroids.to(dtype).reshape(*task_shape, *centroids.shape[1:]),
        axes.to(dtype).reshape(*task_shape, *axes.shape[1:]),
        (1 + 1 / counts).rsqrt().to(dtype).reshape(*task_shape, classes),
        mean.reshape(task_shape),
        spread.reshape(task_shape),
        degrees.long().reshape(task_shape),
        normalize,
    )


def left_out_scores(
    x: Tensor, membership: Tensor, centroids: Tensor, eigenvalues: Tensor, directions: Tensor
) -> Tensor:
    """Return the score of each example under the detector that is fitted without it; NaN if its class has no other.

    m is kept, so that these scores do not differ systematically from those of queries.

    Without example i, with residual r_i, of a class with n_k examples, the scatter matrix is S − κ r_i r_iᵀ with
    κ = n_k/(n_k − 1), and the example differs from the mean of the others by κ r_i. The inverse of the changed matrix
    follows from the Sherman–Morrison formula.

    Args:
        x: The features, float64 (tasks, n, d).
        membership: The one-hot labels, float64 (tasks, n, classes).
        centroids: The class means, (tasks, classes, d).
        eigenvalues: The nonzero eigenvalues of the scatter matrix S, padded with 0, (tasks, r).
        directions: Its eigenvectors as rows, (tasks, r, d); rows of eigenvalues 0 are 0.

    Returns:
        The scores, (tasks, n).
    """
    counts = membership.sum(-2)
    own_count = (membership * counts[..., None, :]).sum(-1)
    has_others = own_count > 1
    kappa = own_count / (own_count - 1).clamp_min(1)
    origin = centroids.mean(-2, keepdim=True)
    x, centroids = x - origin, centroids - origin
    # Coordinates along the eigenvectors, of the examples z, the class means c and the residuals r.
    z, c = x @ directions.mT, centroids @ directions.mT
    r = z - membership @ c
    total = eigenvalues.sum(-1, keepdim=True)
    prior = _prior_variance(
        total - kappa * r.square().sum(-1), (counts - 1).sum(-1, keepdim=True), total
    )  # for each example, (tasks, n)
    inverse = 1 / (prior[..., None] + eigenvalues[..., None, :])  # of prior · I + S, (tasks, n, r)
    r_inverse_r = (r.square() * inverse).sum(-1)
    remaining = (1 - kappa * r_inverse_r).clamp_min(_TINY)
    # Squared distances to all class means: outside the span of the eigenvectors, and inside, with the change of S.
    outside = (squared_distances(x, centroids) - squared_distances(z, c)).clamp_min(0)
    inside = (z.square() * inverse).sum(-1, keepdim=True) - 2 * (z * inverse) @ c.mT + inverse @ c.square().mT
    r_inverse_difference = (r * z * inverse).sum(-1, keepdim=True) - (r * inverse) @ c.mT
    inside = inside + (kappa / remaining)[..., None] * r_inverse_difference.square()
    squared = (outside + prior[..., None] * inside) / (1 + 1 / counts)[..., None, :]
    squared_own = prior * kappa * r_inverse_r / remaining  # = κ² … / (1 + 1/(n_k − 1))
    squared = torch.where(membership.bool(), squared_own[..., None], squared)
    return squared.clamp_min(0).sqrt().amin(-1).masked_fill(~has_others, torch.nan)


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """Return the squared distances of all rows of x and y, (..., n, m), with small rounding errors below 0.

    >>> squared_distances(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2))
    tensor([[25.]])
    """
    lengths = x.square().sum(-1)[..., :, None] + y.square().sum(-1)[..., None, :]
    return lengths - 2 * x @ y.mT


def _principal_axes(residuals: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues (tasks, r) and eigenvectors (tasks, r, d) of Σ_i r_i r_iᵀ, for r = min(n, d).

    Eigenvectors of eigenvalues that are 0 up to rounding errors are replaced by 0, and so are the eigenvalues.
    """
    n, size = residuals.shape[-2:]
    if n < size:
        eigenvalues, vectors = torch.linalg.eigh(residuals @ residuals.mT)
        is_nonzero = eigenvalues > _TINY * eigenvalues[..., -1:]
        directions = vectors.mT @ residuals * eigenvalues.rsqrt().where(is_nonzero, 0)[..., None]
    else:
        eigenvalues, vectors = torch.linalg.eigh(residuals.mT @ residuals)
        is_nonzero = eigenvalues > _TINY * eigenvalues[..., -1:]
        directions = vectors.mT * is_nonzero[..., None]
    return eigenvalues.where(is_nonzero, 0), directions


def _prior_variance(trace: Tensor, degrees: Tensor, total: Tensor) -> Tensor:
    """Return 2 tr S / m, or a positive number that has no effect if S is 0 up to rounding errors."""
    placeholder = torch.where(total > 0, total, 1)
    return torch.where(trace > _TINY * placeholder, trace / (_STRENGTH * degrees.clamp_min(1)), placeholder)


def _mean_and_spread(scores: Tensor, degrees: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the spread of the left-out scores that are not NaN, both (tasks,).

    The spread is the standard deviation of a symmetric distribution with the same deviations above the mean, since
    scores are skewed, and the threshold depends on large scores only. The scores of a class with n_k examples depend on
    n_k − 1 independent residuals, so m = Σ_k (n_k − 1) counts as the number of scores.
    """
    mean = scores.nanmean(-1, keepdim=True)
    variance = 2 * (scores - mean).clamp_min(0).square().nanmean(-1)
    spread = (variance * degrees / (degrees - 1).clamp_min(1)).sqrt()
    return mean[..., 0].nan_to_num(), spread.nan_to_num()
