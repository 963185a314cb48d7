"""The feature space in which the solutions of tasks are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from metabridge.diagnosis.moments import (
    MIN_EXAMPLES_PER_DIMENSION,
    FeatureMap,
    SplitMoments,
    convergence_rates,
    pair_moments,
    principal_projection,
    regression_moments,
)
from metabridge.environments.environment import Environment
from metabridge.episodes import Episodes
from metabridge.errors import InputError, describe
from metabridge.learners.method import method
from metabridge.learners.parameters import parameters
from metabridge.models.network import Network
from metabridge.training.evaluation import Model

# Maximum feature dimension d of classification tasks, because pairs of examples have d(d + 1)/2 products of features.
MAX_PAIR_DIMENSION = 10


@dataclass(frozen=True, eq=False)
class FeatureSpace:
    """Features of inputs, projected to a dimension at which each task has enough examples to determine its solution.

    Regression tasks without a network or feature function are not projected.

    Args:
        name: Name of this space in reports.
        features: Function from inputs (n, ...) to features (n, d).
        project: Projection of features (..., d).
        is_classification: Whether tasks have class labels and are treated as regression on pairs of examples.
    """

    name: str
    features: FeatureMap
    project: FeatureMap
    is_classification: bool

    @classmethod
    def for_tasks(
        cls, sampled_tasks: Sequence[Episodes], net: Network | Model | None, features: FeatureMap | None
    ) -> FeatureSpace:
        """Return the feature space for `sampled_tasks`: that of a network, of a feature function, or of the inputs."""
        first_batch = sampled_tasks[0]
        if net is not None and features is not None:
            raise InputError("net and features are both set, but only one of them can be used. Omit one of them.")
        if net is None and features is None:
            if first_batch.support_x.ndim != 3:
                raise InputError(
                    f"inputs are {describe(first_batch.support_x)}, but without a network they must be vectors. "
                    "Pass net or features."
                )
            if not first_batch.is_classification:
                return cls("inputs", _identity, _identity, False)
        feature_map = features or (_identity if net is None else _network_features(net))
        examples_per_half = (
            first_batch.support_x.shape[1] + (first_batch.query_x.shape[1] if first_batch.is_split else 0)
        ) // 2
        feature_sample = torch.cat(
            [_compute_features(episodes, feature_map).flatten(0, 1) for episodes in sampled_tasks]
        )
        if feature_sample.ndim != 2:
            raise InputError(f"features returns {describe(feature_sample)}, but must return one vector for each input.")
        dimension = max(1, examples_per_half // MIN_EXAMPLES_PER_DIMENSION)
        if first_batch.is_classification:
            project = principal_projection(feature_sample, min(dimension, MAX_PAIR_DIMENSION))
            return cls(f"pairs of {'inputs' if feature_map is _identity else 'features'}", feature_map, project, True)
        project = principal_projection(feature_sample, max(1, dimension - 1))  # one dimension less for the constant
        return cls("features and a constant", feature_map, lambda φ: _append_constant(project(φ)), False)

    def coordinates(self, x: Tensor) -> Tensor:
        """Return the projected features of inputs (n, ...), in float64 on the CPU."""
        return self.project(self.features(x).double().cpu())

    def moments(self, episodes: Episodes) -> SplitMoments:
        """Return the moments of tasks in this space."""
        φ = self.project(_compute_features(episodes, self.features))
        y = episodes.without_split().support_y.cpu()
        return pair_moments(φ, y) if self.is_classification else regression_moments(φ, y)

    def sample_count(self, episodes: Episodes) -> int:
        """Return the number m of samples for adaptation: support examples, or pairs of them in classification."""
        support_size = episodes.support_x.shape[1]
        m = support_size * (support_size - 1) // 2 if self.is_classification else support_size
        if m < 1:
            raise InputError(f"support sets have {support_size} example, but a pair needs 2. Use more shots or ways.")
        return m


def mean_rates(
    environments: Mapping[str, Environment], net: Network | Model, *, tasks: int, seed: int = 0
) -> tuple[FeatureSpace, dict[str, float]]:
    """Return the mean convergence rates of tasks from several environments, in a common feature space of a network.

    Args:
        environments: Sources of tasks, by name.
        net: Network or trained model that computes the features.
        tasks: Number of tasks to sample from each environment.
        seed: Seed of the tasks.

    Returns:
        The feature space, and for each environment the geometric mean of the convergence rates of its tasks.

    >>> from metabridge.datasets import load
    >>> from metabridge.diagnosis import untrained_network
    >>> images = load("glyphs")
    >>> environments = {superclass: images.tasks("test", superclass=superclass) for superclass in ("same", "different")}
    >>> space, rates = mean_rates(environments, untrained_network(images), tasks=5)
    >>> list(rates)
    ['same', 'different']
    """
    sampled_tasks = {
        name: environment.sample(tasks, torch.Generator().manual_seed(seed))
        for name, environment in environments.items()
    }
    space = FeatureSpace.for_tasks(list(sampled_tasks.values()), net, None)
    rates = {
        name: float(convergence_rates(space.moments(episodes)).log().mean().exp())
        for name, episodes in sampled_tasks.items()
    }
    return space, rates


def _network_features(net: Network | Model) -> FeatureMap:
    nal = method("nal")  # non-adaptive learning; any method would do, since only features are computed
    model = net if isinstance(net, Model) else Model(nal, net, parameters(nal, net))
    return lambda x: model.features(x.to(model.device))


def _compute_features(episodes: Episodes, features: FeatureMap) -> Tensor:
    """Compute the features of all inputs (tasks, inputs, d), one task at a time."""
    with torch.no_grad():
        result = torch.stack([features(task).double().cpu() for task in episodes.without_split().support_x])
    if not result.isfinite().all():
        raise InputError("some features are NaN or infinite. Check the inputs and the network or feature function.")
    return result


def _append_constant(φ: Tensor) -> Tensor:
    return torch.cat([φ, torch.ones_like(φ[..., :1])], -1)


def _identity(x: Tensor) -> Tensor:
    return x
