"""Outputs for support images that were left out when the head was fitted, to choose settings without other images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from metabridge.episodes import Episodes
from metabridge.learners.adapt import predict_from_features
from metabridge.learners.method import Method
from metabridge.models.network import Params

MAX_FOLDS = 10  # maximum number of times that the head is fitted again
# Maximum number of values in the features of all folds, unless two folds have more. It bounds memory and time: with
# more folds, choosing the penalty for a thousand images would take ten seconds.
MAX_FOLD_VALUES = 2**21


@dataclass(frozen=True, eq=False)
class LeftOut:
    """Outputs for examples that were not used to fit the head.

    Args:
        rows: Indices of the examples, (m,). An example that is the only one of its class cannot be left out.
        outputs: The outputs for these examples, (m, classes), in float64.
        labels: The labels of these examples, (m,).
    """

    rows: Tensor
    outputs: Tensor
    labels: Tensor


def assign_folds(labels: Tensor, features: int) -> Tensor:
    """Assign every example to the fold in which it is left out.

    Each fold leaves out one example of every class (more, if a class has more examples than there are folds), so that
    the classes stay balanced and each keeps at least one example. There are as many folds as the largest class has
    examples, but at most 10, and fewer, down to two, if the support set is large.

    Args:
        labels: The labels of the examples, (n,).
        features: The number of features, on which the memory of a fold depends.

    Returns:
        The fold of each example, (n,); −1 for the only example of a class.

    >>> assign_folds(torch.tensor([0, 0, 0, 1, 1, 2]), features=4)
    tensor([ 0,  1,  2,  0,  1, -1])
    """
    counts = labels.bincount()
    folds = min(int(counts.max()), MAX_FOLDS, max(2, MAX_FOLD_VALUES // (len(labels) * features)))
    rank = torch.empty_like(labels)  # position of each example in its class
    for label, count in enumerate(counts.tolist()):
        rank[labels == label] = torch.arange(count, device=labels.device)
    return torch.where(counts[labels] > 1, rank % folds, -1)


def predict_left_out(method: Method, params: Params, features: Tensor, labels: Tensor) -> LeftOut:
    """Fit the head several times, each time without some of the examples, and return the outputs for these.

    All fits on equally many examples are computed as one batch.

    Args:
        method: A method for which `metabridge.learners.adapt.can_predict_from_features` is true.
        params: The parameters of the method.
        features: The features of the support set, (n, d).
        labels: The labels, int64 (n,), from 0 to classes − 1.

    Returns:
        The outputs for all examples that can be left out.

    >>> from metabridge.learners import method
    >>> features, labels = torch.eye(4)[[0, 0, 0, 1, 1, 1]], torch.tensor([0, 0, 0, 1, 1, 1])
    >>> predict_left_out(method("frozen"), {}, features, labels).outputs.argmax(1)
    tensor([0, 0, 0, 1, 1, 1])
    """
    folds = assign_folds(labels, features.shape[1])
    left_out = [(folds == fold).nonzero()[:, 0] for fold in range(int(folds.max()) + 1)]
    all_rows, all_outputs = [labels.new_empty(0)], []
    for size in sorted({len(rows) for rows in left_out}):
        query = torch.stack([rows for rows in left_out if len(rows) == size])
        is_support = torch.ones(len(query), len(labels), dtype=torch.bool, device=labels.device)
        is_support.scatter_(1, query, False)
        support = is_support.nonzero()[:, 1].view(len(query), -1)
        episodes = Episodes(features[support], labels[support], features[query], labels[query])
        all_rows.append(query.flatten())
        all_outputs.append(predict_from_features(method, params, episodes).flatten(0, 1).double())
    rows = torch.cat(all_rows)
    outputs = torch.cat(all_outputs) if all_outputs else features.new_empty(0, int(labels.max()) + 1).double()
    order = rows.argsort()
    return LeftOut(rows[order], outputs[order], labels[rows[order]])
