"""The space in which the solutions of tasks are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from metabridge.diagnosis.moments import ENOUGH, Features, Moments, pair_moments, principal, regression_moments
from metabridge.episodes import Episodes
from metabridge.errors import InputError, describe
from metabridge.learners.method import method
from metabridge.learners.parameters import parameters
from metabridge.models.network import Network
from metabridge.training.evaluation import Model

DIRECTIONS = 10  # of features, at most, of which pairs are made: there are half the square of it


@dataclass(frozen=True, eq=False)
class Space:
    """Features of points, along those directions that the points of a task are enough to tell of."""

    name: str
    features: Features  # of points (n, ...), (n, d)
    directions: Features  # of features (..., d)
    classification: bool

    @classmethod
    def of(cls, examples: Sequence[Episodes], net: Network | Model | None, features: Features | None) -> Space:
        """Choose the space for such tasks."""
        first = examples[0]
        if net is not None and features is not None:
            raise InputError("net and features are both given, but there is one space. Give one of them.")
        if net is None and features is None:
            if first.support_x.ndim != 3:
                raise InputError(
                    f"points are {describe(first.support_x)}, but only vectors are features by themselves. "
                    "Give net or features."
                )
            if not first.is_classification:
                return cls("inputs", _same, _same, False)
        chosen = features or (_same if net is None else _of_network(net))
        half = (first.support_x.shape[1] + (first.query_x.shape[1] if first.is_split else 0)) // 2
        found = torch.cat([_featured(example, chosen).flatten(0, 1) for example in examples])
        if found.ndim != 2:
            raise InputError(f"features gives {describe(found)} for points, but must give one vector for each.")
        most = max(1, half // ENOUGH)
        along = principal(found, min(most, DIRECTIONS) if first.is_classification else most - 1 or 1)
        if first.is_classification:
            return cls(f"pairs of {'inputs' if chosen is _same else 'features'}", chosen, along, True)
        return cls("features and a constant", chosen, lambda φ: _with_constant(along(φ)), False)

    def moments(self, episodes: Episodes) -> Moments:
        """Measure tasks."""
        φ = self.directions(_featured(episodes, self.features))
        y = episodes.without_split().support_y.cpu()
        return pair_moments(φ, y) if self.classification else regression_moments(φ, y)

    def samples(self, episodes: Episodes) -> int:
        """Return m, the samples that adaptation to a support has: its points, or the pairs of them."""
        points = episodes.support_x.shape[1]
        m = points * (points - 1) // 2 if self.classification else points
        if m < 1:
            raise InputError(f"supports have {points} point, of which no pairs can be made. Give more shots or ways.")
        return m


def _of_network(net: Network | Model) -> Features:
    plain = method("nal")
    model = net if isinstance(net, Model) else Model(plain, net, parameters(plain, net))
    return lambda x: model.features(x.to(model.device))


def _featured(episodes: Episodes, features: Features) -> Tensor:
    """Return the features of all points (tasks, points, d), in which a network sees each task as a set of its own."""
    with torch.no_grad():
        found = torch.stack([features(task).double().cpu() for task in episodes.without_split().support_x])
    if not found.isfinite().all():
        raise InputError("some features are NaN or infinite, so nothing can be told of the tasks. Look at the points.")
    return found


def _with_constant(φ: Tensor) -> Tensor:
    return torch.cat([φ, torch.ones_like(φ[..., :1])], -1)


def _same(x: Tensor) -> Tensor:
    return x
