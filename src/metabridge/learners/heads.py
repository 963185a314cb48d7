"""Test-time heads: classical classifiers on fixed features, solved for all tasks at once.

Each head is data; `fit(features, labels, outputs)` takes features (..., n, d) and int64 labels (..., n), with any task
axes in front, and returns a fitted head of the features' dtype whose `scores` rank the outputs of every query. They
agree with scikit-learn's estimators. Systems are solved in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot, pad

from metabridge.errors import InputError, check_positive, describe
from metabridge.learners import newton, qp
from metabridge.learners.gram import check_finite, eigenbasis, gram_matrix, in_blocks
from metabridge.learners.ridge import ridge_dual, ridge_weight

SMALL = 0.1  # penalty, below which float32 would lose more than a hundred thousandth to cancelling coefficients


class LinearHead(NamedTuple):
    """A fitted head with a weight (..., outputs, d) and a bias (..., outputs)."""

    weight: Tensor
    bias: Tensor
    normalise: bool = False

    def scores(self, features: Tensor) -> Tensor:
        """Return wᵀx + b, (..., queries, outputs), of features (..., queries, d).

        >>> import torch
        >>> LinearHead(torch.eye(2), torch.tensor([0.0, 1.0])).scores(torch.tensor([[3.0, 4.0]]))
        tensor([[3., 5.]])
        """
        _check_queries(features, self.weight)
        # The order of factors matters to the speed on a CPU: many queries by few outputs, or enough of either.
        few = self.weight.shape[-2] < 8
        product = features @ self.weight.mT if few else (self.weight @ features.mT).mT
        if self.normalise:
            product = product / features.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        return product + self.bias[..., None, :]


class PairwiseHead(NamedTuple):
    """A fitted head that decides between every two outputs i < j, in the order (0, 1), (0, 2), ...

    The weight is (..., pairs, d), the bias (..., pairs); a positive decision is for i.
    """

    weight: Tensor
    bias: Tensor
    normalise: bool = False

    def scores(self, features: Tensor) -> Tensor:
        """Return, for each output, its votes plus c / (3|c| + 3), where c sums its decisions, to break ties.

        That is scikit-learn's `decision_function_shape="ovr"`: the fraction stays below a third of a vote.

        >>> import torch
        >>> PairwiseHead(torch.tensor([[1.0, 0.0]]), torch.tensor([0.0])).scores(torch.tensor([[2.0, 0.0]]))
        tensor([[ 1.2222, -0.2222]])
        """
        decisions = LinearHead(*self).scores(features)
        outputs = (1 + isqrt(1 + 8 * self.bias.shape[-1])) // 2
        first, second = torch.triu_indices(outputs, outputs, 1, device=decisions.device)
        sides = (one_hot(first, outputs) - one_hot(second, outputs)).to(decisions.dtype)
        votes = (0.5 - (decisions < 0).to(decisions.dtype)) @ sides + (outputs - 1) / 2
        confidence = decisions @ sides
        return votes + confidence / (3 * confidence.abs() + 3)


@dataclass(frozen=True)
class LogisticRegression:
    """Multinomial logistic regression: ½ penalty ‖W‖² + Σ_n −log softmax(Wφ_n + b)[y_n], b free.

    On features normalised to unit length if `normalise`. Equals scikit-learn's LogisticRegression(C=1/penalty); with
    two outputs, where scikit-learn penalises the one difference of the two weights, C=2/penalty.

    >>> import torch
    >>> features, labels = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]), torch.tensor([[0, 1]])
    >>> LogisticRegression().fit(features, labels, outputs=2).weight
    tensor([[[ 0.3374, -0.3374],
             [-0.3374,  0.3374]]])
    """

    penalty: float = 1.0
    normalise: bool = True

    def __post_init__(self) -> None:
        check_positive("penalty", self.penalty)

    def fit(self, features: Tensor, labels: Tensor, outputs: int) -> LinearHead:
        """Solve every task."""
        x, y = _tasks(features, labels, outputs, self.normalise)
        check_finite("features", x)
        coordinates, lift = in_blocks(lambda x: eigenbasis(x.double(), centre=True), x)
        points = pad(coordinates, (0, 1), value=1.0)
        penalty = pad(torch.full_like(points[0, 0, :-1], self.penalty), (0, 1))
        solution = newton.minimise(newton.cross_entropy(y, outputs), points, penalty, outputs)
        solution = solution - solution.mean(-1, keepdim=True)  # what softmax does not see
        weight = (lift @ solution[:, :-1]).mT
        if x.shape[-2] < x.shape[-1]:
            weight = (weight - weight.mean(-1, keepdim=True)).to(x.dtype) @ x
        bias = solution[:, -1] - (x.mean(-2, keepdim=True) @ weight.mT.to(x.dtype))[:, 0]
        return LinearHead(*_reshape(features, weight, bias), self.normalise)


@dataclass(frozen=True)
class SVM:
    """Linear support vector machine, with the squared hinge one against the rest, or the hinge between every pair.

    "squared-hinge": ½‖w_k‖² + ½b_k² + C Σ_n max(0, 1 − s_nk(w_kᵀφ_n + b_k))², s_nk = ±1: scikit-learn's LinearSVC(C).
    "hinge": ½‖w‖² + C Σ max(0, 1 − s(wᵀφ + b)) over the points of two classes: scikit-learn's SVC(C, kernel="linear").
    On features normalised to unit length if `normalise`.

    >>> import torch
    >>> features, labels = torch.tensor([[[2.0], [4.0]]]), torch.tensor([[0, 1]])
    >>> SVM(loss="hinge", normalise=False).fit(features, labels, outputs=2)
    PairwiseHead(weight=tensor([[[-1.]]]), bias=tensor([[3.]]), normalise=False)
    """

    C: float = 1.0
    loss: Literal["squared-hinge", "hinge"] = "squared-hinge"
    normalise: bool = True

    def __post_init__(self) -> None:
        check_positive("C", self.C)
        if self.loss not in ("squared-hinge", "hinge"):
            raise InputError(f'loss is {self.loss!r}, but must be "squared-hinge" or "hinge".')

    def fit(self, features: Tensor, labels: Tensor, outputs: int) -> LinearHead | PairwiseHead:
        """Solve every task."""
        x, y = _tasks(features, labels, outputs, self.normalise)
        if self.loss == "hinge":
            # Decisions move by the errors in the Gram matrix C times; libsvm has its own in float32 for any C.
            gram = gram_matrix(x, rounding=1e-5 / self.C)
            coefficient, bias = in_blocks(lambda K, y: qp.one_against_one(K, y, outputs, self.C), gram, y)
            return PairwiseHead(*_reshape(features, coefficient.to(x.dtype) @ x, bias), self.normalise)
        check_finite("features", x)
        points, lift = in_blocks(lambda x: eigenbasis(pad(x.double(), (0, 1), value=1.0)), x)
        penalty = torch.full_like(points[0, 0], 1 / self.C)
        solution = newton.minimise(newton.squared_hinge(y, outputs), points, penalty, outputs)
        weight = (lift @ solution).mT
        if x.shape[-2] <= x.shape[-1]:
            weight, bias = weight.to(x.dtype) @ x, weight.sum(-1)
        else:
            weight, bias = weight[..., :-1], weight[..., -1]
        return LinearHead(*_reshape(features, weight, bias), self.normalise)


@dataclass(frozen=True)
class Ridge:
    """Least squares Σ_n ‖Wφ_n + b − y_n‖² + penalty ‖W‖², b free: scikit-learn's Ridge(alpha=penalty).

    Labels become one-hot targets; real targets (..., n, outputs) are taken as they are. On features normalised to unit
    length if `normalise`.

    >>> import torch
    >>> Ridge(penalty=2.0).fit(torch.tensor([[[-1.0], [1.0]]]), torch.tensor([[[0.0], [4.0]]]), outputs=1)
    LinearHead(weight=tensor([[[1.]]]), bias=tensor([[2.]]), normalise=False)
    """

    penalty: float = 1.0
    normalise: bool = False

    def __post_init__(self) -> None:
        check_positive("penalty", self.penalty)

    def fit(self, features: Tensor, labels: Tensor, outputs: int) -> LinearHead:
        """Solve every task."""
        x, y = _tasks(features, labels, outputs, self.normalise, values=True)
        if not y.is_floating_point():
            y = one_hot(y, outputs)
        penalty = torch.tensor(self.penalty, dtype=torch.float64, device=x.device)

        if x.shape[-2] < x.shape[-1]:
            # Errors in the Gram matrix move predictions by as much over the penalty.
            gram = gram_matrix(x, rounding=1e-5 * self.penalty)

            def dual(K: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
                coefficient, bias = ridge_dual(K, y.double(), penalty)
                return coefficient.to(precise) @ x.to(precise), bias

            # Of points that are alike, coefficients are up to 1/penalty and cancel.
            precise = torch.float64 if self.penalty < SMALL else x.dtype
            return LinearHead(*_reshape(features, *in_blocks(dual, gram, x, y)), self.normalise)

        check_finite("features", x)

        def solve(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            x, y = x.double(), y.double()
            centre, middle = x.mean(-2, keepdim=True), y.mean(-2, keepdim=True)
            weight = ridge_weight(x - centre, y - middle, penalty)
            return weight, (middle - centre @ weight.mT)[:, 0]

        return LinearHead(*_reshape(features, *in_blocks(solve, x, y)), self.normalise)


@dataclass(frozen=True)
class NearestCentroid:
    """The class c_k with the nearest mean: scores c_kᵀx − ½‖c_k‖² = ½‖x‖² − ½‖x − c_k‖².

    On features normalised to unit length if `normalise`; the means themselves are not.

    >>> import torch
    >>> head = NearestCentroid().fit(torch.tensor([[[1.0], [3.0], [8.0]]]), torch.tensor([[0, 0, 1]]), outputs=2)
    >>> head.weight, head.bias
    (tensor([[[2.],
             [8.]]]), tensor([[ -2., -32.]]))
    """

    normalise: bool = False

    def fit(self, features: Tensor, labels: Tensor, outputs: int) -> LinearHead:
        """Solve every task."""
        x, y = _tasks(features, labels, outputs, self.normalise)
        check_finite("features", x)
        members = one_hot(y, outputs).to(x.dtype)
        centroid = (members / members.sum(-2, keepdim=True)).mT @ x
        return LinearHead(*_reshape(features, centroid, -0.5 * centroid.square().sum(-1)), self.normalise)


def _tasks(
    features: Tensor, labels: Tensor, outputs: int, normalise: bool, *, values: bool = False
) -> tuple[Tensor, Tensor]:
    """Check what a head is given but for finite features; return it with one task axis, normalised if asked.

    Labels may be real targets if the head fits `values`.
    """
    if not features.is_floating_point() or features.ndim < 3:
        raise InputError(
            f"features is {describe(features)}, but must be floating point of shape (tasks, points, features). "
            "For a single task use features[None]."
        )
    real = values and labels.is_floating_point()
    if labels.shape != features.shape[:-1] + ((outputs,) if real else ()) or not (real or labels.dtype == torch.int64):
        raise InputError(
            f"labels is {describe(labels)}, but for features of shape {tuple(features.shape)} and {outputs} outputs "
            f"must be int64 of shape {tuple(features.shape[:-1])}. Values are fitted by Ridge alone."
        )
    check_finite("labels", labels)
    x, y = features.flatten(0, -3), labels.flatten(0, features.ndim - 3)
    if not y.is_floating_point():
        _check_classes(y, outputs)
    return normalize(x, dim=-1) if normalise else x, y


def _check_classes(labels: Tensor, outputs: int) -> None:
    if outputs < 2:
        raise InputError(f"outputs is {outputs}, but classes can be told apart only from 2 on.")
    least, most = (int(bound) for bound in labels.aminmax())
    if least < 0 or most >= outputs:
        raise InputError(f"labels run from {least} to {most}, but with {outputs} outputs must be in 0..{outputs - 1}.")
    empty = one_hot(labels, outputs).sum(-2) == 0
    if empty.any():
        task, output = empty.nonzero()[0].tolist()
        raise InputError(f"class {output} of task {task} has no support point. Give every class at least one.")


def _check_queries(features: Tensor, weight: Tensor) -> None:
    if features.shape[:-2] != weight.shape[:-2] or features.shape[-1] != weight.shape[-1]:
        raise InputError(
            f"features is {describe(features)}, but the head was fitted to tasks of shape {tuple(weight.shape[:-2])} "
            f"and {weight.shape[-1]} features."
        )


def _reshape(features: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Give a solution the task axes and the dtype of the features."""
    lead, dtype = features.shape[:-2], features.dtype
    return weight.to(dtype).reshape(*lead, *weight.shape[1:]), bias.to(dtype).reshape(*lead, *bias.shape[1:])
