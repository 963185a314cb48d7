"""Test-time heads: classical classifiers on fixed features, solved for all tasks at once.

Each head is data; `fit(features, labels, outputs)` takes features (..., n, d) and int64 labels (..., n), with any task
axes in front, and returns a fitted head whose `scores` rank the outputs of every query. The head has the features'
dtype, or float32 if that is float16 or bfloat16. Heads agree with scikit-learn's estimators on features of any scale,
near 0 or far from it. Systems are solved in float64, and a head whose objective stays above its minimum logs a warning.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from math import isqrt
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot, pad

from metabridge.errors import InputError, check_positive, describe
from metabridge.learners import newton, svm_qp
from metabridge.learners.feature_gram import (
    ROUNDING,
    centre,
    check_finite,
    combine,
    dual_axes,
    gram_matrix,
    in_blocks,
    principal_axes,
)
from metabridge.learners.ridge_regression import ridge_dual

log = logging.getLogger("metabridge")
UNSOLVED = 1e-7  # Share of an objective by which Newton's method may leave it above its minimum.
STEEP = 1e8  # C times the squared size of points from which on what the weight lost in rounding is looked for.
VISIBLE = 1e-5  # Share of an objective by which it may be above its minimum without a warning.


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
        features = _at_least_float32(features)
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
        coordinates, lift, mean = in_blocks(_axes, x)
        points = pad(coordinates, (0, 1), value=1.0)
        penalty = pad(torch.full_like(coordinates[:, 0], self.penalty), (0, 1))
        solution, missing = newton.minimise(newton.CROSS_ENTROPY, y, points, penalty, outputs)
        _check_optimal(self, missing, "a larger penalty")
        solution = solution - solution.mean(-1, keepdim=True)  # what softmax does not see
        weight = (lift @ solution[:, :-1]).mT
        if x.shape[-2] < x.shape[-1]:
            weight, mean = _combine(weight, x, coordinates, mean)
        return LinearHead(*_about(features, weight, solution[:, -1], mean), self.normalise)


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
        return self._hinge(features, x, y, outputs) if self.loss == "hinge" else self._squared(features, x, y, outputs)

    def _hinge(self, features: Tensor, x: Tensor, y: Tensor, outputs: int) -> PairwiseHead:
        gram, origin = gram_matrix(x, sensitivity=self.C)
        coefficient, level, gap = in_blocks(lambda K, y: svm_qp.one_against_one(K, y, outputs, self.C), gram, y)
        _check_optimal(self, gap, "a smaller C")
        weight = combine(coefficient, x, origin)
        return PairwiseHead(*_about(features, weight, level, origin), self.normalise)

    def _squared(self, features: Tensor, x: Tensor, y: Tensor, outputs: int) -> LinearHead:
        coordinates, lift, along, mean = in_blocks(_axes_with_bias, x)
        # The point (x, 1) is (x − mean, 0) + (mean, 1): scores are `level` at the mean and vary with the rest.
        length = (mean.square().sum(-1) + 1).sqrt()
        points = torch.cat([coordinates, 1 + (along / length)[..., None]], -1)
        penalty = torch.cat([torch.ones_like(coordinates[:, 0]), length.square().reciprocal()], -1) / self.C
        solution, missing = newton.minimise(newton.SQUARED_HINGE, y, points, penalty, outputs)
        # Where C is so large that margins are all but hard, the dual problem knows them better.
        programs = (missing > UNSOLVED).nonzero() if x.shape[-2] <= svm_qp.MOST else y.new_empty(0, 2)
        for some in programs.split(svm_qp.MOST**2 // x.shape[-2] ** 2 or 1) if len(programs) else ():
            task, output = some.unbind(-1)
            kernel = coordinates[task] @ coordinates[task].mT
            sign = torch.where(y[task] == output[:, None], 1.0, -1.0).to(kernel.dtype)
            corner = length[task, 0].square().reciprocal()
            coefficient, level, gap = svm_qp.squared_hinge(kernel, sign, points[task, :, -1], corner, self.C)
            weight = (coefficient[:, None] @ coordinates[task])[:, 0]
            better = gap < missing[task, output]
            task, output = task[better], output[better]
            solution[task, :, output] = torch.cat([weight, level[:, None]], -1)[better]
            missing[task, output] = gap[better]
        weight, level = (lift @ solution[:, :-1]).mT, solution[:, -1]
        if x.shape[-2] <= x.shape[-1]:
            bias = (level / length - (weight @ along[..., None])[..., 0]) / length
            weight, mean = _combine(weight, x, coordinates, mean, bias)
        else:
            # Only rounding gives the rest a part along (mean, 1), but points are long in that direction.
            along = (weight @ pad(mean, (0, 1), value=1.0).mT)[..., 0]
            weight = weight[..., :-1] + ((level - along) / length.square())[..., None] * mean
        if x.dtype == torch.float64 and self.C * coordinates.square().sum(-1).max() > STEEP:
            bias, scores = level - (weight @ mean.mT)[..., 0], (x - mean) @ weight.mT + level[:, None]
            value = (weight.square().sum(-1) + bias.square()) / 2 + self.C * _squared_hinges(scores, y)
            aimed = (penalty[..., None] * solution.square()).sum(-2) / 2 + _squared_hinges(points @ solution, y)
            missing = torch.maximum(missing, value / (self.C * aimed) - 1)
        _check_optimal(self, missing, "a smaller C")
        return LinearHead(*_about(features, weight, level, mean), self.normalise)


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
            gram, origin = gram_matrix(x, sensitivity=1 / self.penalty)
            if _well_conditioned(gram.diagonal(dim1=-2, dim2=-1).sum(-1), self.penalty):
                coefficient, level = in_blocks(lambda K, y: ridge_dual(K, y.double(), penalty), gram, y)
                weight = combine(coefficient, x, origin)
                return LinearHead(*_about(features, weight, level, origin), self.normalise)

        def solve(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            coordinates, lift, mean = _axes(x)
            y = y.double()
            middle = y.mean(-2, keepdim=True)
            weight = (lift @ (coordinates.mT @ (y - middle) / (coordinates.square().sum(-2)[..., None] + penalty))).mT
            return combine(weight, x, mean) if x.shape[-2] < x.shape[-1] else weight, middle[:, 0], mean

        return LinearHead(*_about(features, *in_blocks(solve, x, y)), self.normalise)


@dataclass(frozen=True)
class NearestCentroid:
    """The class c_k with the nearest mean: scores ½‖x − m‖² − ½‖x − c_k‖², linear in x, where m is the mean of all.

    On features normalised to unit length if `normalise`; the means themselves are not.

    >>> import torch
    >>> head = NearestCentroid().fit(torch.tensor([[[1.0], [3.0], [8.0]]]), torch.tensor([[0, 0, 1]]), outputs=2)
    >>> head.weight.round(decimals=4), head.bias.round(decimals=4)
    (tensor([[[-2.],
             [ 4.]]]), tensor([[  6., -24.]]))
    """

    normalise: bool = False

    def fit(self, features: Tensor, labels: Tensor, outputs: int) -> LinearHead:
        """Solve every task."""
        x, y = _tasks(features, labels, outputs, self.normalise)
        members = one_hot(y, outputs).to(x.dtype)
        share = members / members.sum(-2, keepdim=True)
        means = pad(share - 1 / x.shape[-2], (0, 1), value=1 / x.shape[-2]).mT @ x
        check_finite("features", means)
        centroid, mean = means[:, :-1], means[:, -1:]
        return LinearHead(*_about(features, centroid, -0.5 * centroid.square().sum(-1), mean), self.normalise)


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
    x, y = _at_least_float32(features.flatten(0, -3)), labels.flatten(0, features.ndim - 3)
    if not y.is_floating_point():
        _check_classes(y, outputs)
    return normalize(x, dim=-1) if normalise else x, y


def _at_least_float32(features: Tensor) -> Tensor:
    """Return features in float32 instead of float16 or bfloat16, in which norms overflow and biases are rounded away.

    >>> _at_least_float32(torch.ones(1, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return features.float() if features.dtype in (torch.float16, torch.bfloat16) else features


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


def _axes(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return coordinates of the centred points, what lifts weights from them, and the mean."""
    points, mean = centre(x)
    if x.shape[-2] < x.shape[-1]:
        return *dual_axes(points @ points.mT, points.__getitem__), mean
    return *principal_axes(points), mean


def _axes_with_bias(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return coordinates of (x − mean, 0) orthogonal to (mean, 1), their lift, the part along that, and the mean."""
    points, mean = centre(x)
    direction = normalize(pad(mean, (0, 1), value=1.0), dim=-1)
    along = points @ direction[..., :-1].mT

    def orthogonal(tasks: Tensor | slice) -> Tensor:
        return pad(points[tasks], (0, 1)) - along[tasks] * direction[tasks]

    if x.shape[-2] <= x.shape[-1]:
        axes = dual_axes(points @ points.mT - along @ along.mT, orthogonal)
    else:
        axes = principal_axes(orthogonal(slice(None)))
    return *axes, along[..., 0], mean


def _combine(
    coefficient: Tensor, x: Tensor, coordinates: Tensor, mean: Tensor, of_mean: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Combine points with coefficients that sum to 0, and their mean with one `of_mean`; return that and the mean.

    All in the points' dtype where its rounding errors are small, in float64 elsewhere.
    """
    coefficient = coefficient - coefficient.mean(-1, keepdim=True)  # 0 but for rounding
    length = coordinates.square().sum(-1).amax(-1) + mean[:, 0].square().sum(-1)
    error = torch.finfo(x.dtype).eps * (length * coefficient.abs().sum(-1).amax(-1)).max()
    if error < ROUNDING:
        with_mean = coefficient if of_mean is None else coefficient + of_mean[..., None] / x.shape[-2]
        return combine(with_mean, x, None), mean.to(x.dtype)
    weight = combine(coefficient, x, mean)
    return weight if of_mean is None else weight + of_mean[..., None] * mean, mean


def _squared_hinges(scores: Tensor, labels: Tensor) -> Tensor:
    """Return Σ_n max(0, 1 − s_nk f_nk)² (tasks, outputs) of scores (tasks, n, outputs)."""
    sign = 2 * one_hot(labels, scores.shape[-1]) - 1
    return (1 - sign * scores).clamp_min(0).square().sum(-2)


def _well_conditioned(size: Tensor, penalty: float) -> bool:
    """Whether float64 resolves the penalty beside Gram matrices of these traces."""
    return bool(size.max() * torch.finfo(torch.float64).eps < 1e-8 * penalty)


def _check_optimal(head: LogisticRegression | SVM, missing: Tensor, remedy: str) -> None:
    """Warn if an objective is still above its minimum by a visible share."""
    worst = float(missing.max())
    if not worst < VISIBLE:
        log.warning(
            "%r stopped %.1e above the minimum, relative to it, in %d of %d tasks. Use %s, or normalise=True.",
            head,
            worst,
            int((~(missing < VISIBLE)).any(-1).sum()),
            len(missing),
            remedy,
        )


def _about(features: Tensor, weight: Tensor, level: Tensor, origin: Tensor | None) -> tuple[Tensor, Tensor]:
    """Give a solution the task axes and dtype of the features, and a bias with which scores are `level` at `origin`.

    The bias makes up for the rounding of the weight, which would else matter where the origin is far from 0.
    """
    lead, dtype = features.shape[:-2], _at_least_float32(features[:0]).dtype
    weight = weight.to(dtype)
    bias = level if origin is None else level - (weight.to(origin.dtype) @ origin.mT)[..., 0]
    bias = bias.to(dtype)
    if not (weight.isfinite().all() and bias.isfinite().all()):
        raise InputError(
            f"features is {describe(features)}, but the solved head overflows {dtype}. Use float64, or smaller "
            "features."
        )
    return weight.reshape(*lead, *weight.shape[1:]), bias.reshape(*lead, *bias.shape[1:])
