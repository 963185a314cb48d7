"""The space in which the solutions of tasks are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from metabridge.diagnosis.moments import (
    MIN_POINTS_PER_DIMENSION,
    FeatureMap,
    SplitMoments,
    pair_moments,
    principal_projection,
    regression_moments,
)
from metabridge.episodes import Episodes
from metabridge.errors import InputError, describe
from metabridge.learners.method import method
from metabridge.learners.parameters import parameters
from metabridge.models.network import Network
from metabridge.training.evaluation import Model

MAX_DIMENSION = 10  # of the features of pairs, whose products have about half the square of it


@dataclass(frozen=True, eq=False)
class FeatureSpace:
    """Features of points, projected on as many directions as the points of a single task suffice for.

    Args:
        name: Name in reports.
        features: Map from points (n, ...) to features (n, d).
        project: Projection of features (..., d).
        is_classification: Whether tasks have class labels and are compared by pairs of points.
    """

    name: str
    features: FeatureMap
    project: FeatureMap
    is_classification: bool

    @classmethod
    def for_tasks(
        cls, examples: Sequence[Episodes], net: Network | Model | None, features: FeatureMap | None
    ) -> FeatureSpace:
        """Choose the space for tasks like the examples."""
        first = examples[0]
        if net is not None and features is not None:
            raise InputError("net and features are both given, but only one of them can define the space. Omit one.")
        if net is None and features is None:
            if first.support_x.ndim != 3:
                raise InputError(
                    f"points are {describe(first.support_x)}, but only vectors can be used as features directly. "
                    "Give net or features."
                )
            if not first.is_classification:
                return cls("inputs", _identity, _identity, False)
        feature_map = features or (_identity if net is None else _network_features(net))
        half = (first.support_x.shape[1] + (first.query_x.shape[1] if first.is_split else 0)) // 2
        sample = torch.cat([_compute_features(example, feature_map).flatten(0, 1) for example in examples])
        if sample.ndim != 2:
            raise InputError(f"features returns {describe(sample)}, but must return one vector for each point.")
        dimension = max(1, half // MIN_POINTS_PER_DIMENSION)
        if first.is_classification:
            project = principal_projection(sample, min(dimension, MAX_DIMENSION))
            return cls(f"pairs of {'inputs' if feature_map is _identity else 'features'}", feature_map, project, True)
        project = principal_projection(sample, dimension - 1 or 1)
        return cls("features and a constant", feature_map, lambda φ: _append_constant(project(φ)), False)

    def moments(self, episodes: Episodes) -> SplitMoments:
        """Return the moments of tasks in this space."""
        φ = self.project(_compute_features(episodes, self.features))
        y = episodes.without_split().support_y.cpu()
        return pair_moments(φ, y) if self.is_classification else regression_moments(φ, y)

    def sample_count(self, episodes: Episodes) -> int:
        """Return m, the number of samples that adaptation uses: the points of a support, or the pairs of them."""
        points = episodes.support_x.shape[1]
        m = points * (points - 1) // 2 if self.is_classification else points
        if m < 1:
            raise InputError(f"supports have {points} point, but pairs need at least 2. Use more shots or ways.")
        return m


def _network_features(net: Network | Model) -> FeatureMap:
    nal = method("nal")
    model = net if isinstance(net, Model) else Model(nal, net, parameters(nal, net))
    return lambda x: model.features(x.to(model.device))


def _compute_features(episodes: Episodes, features: FeatureMap) -> Tensor:
    """Return the features of all points (tasks, points, d); a network gets the points of one task at a time."""
    with torch.no_grad():
        result = torch.stack([features(task).double().cpu() for task in episodes.without_split().support_x])
    if not result.isfinite().all():
        raise InputError("some features are NaN or infinite. Check the points and the network or feature function.")
    return result


def _append_constant(φ: Tensor) -> Tensor:
    return torch.cat([φ, torch.ones_like(φ[..., :1])], -1)


def _identity(x: Tensor) -> Tensor:
    return x
