"""Linear support vector machines as a test-time head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from metabridge.errors import InputError, check_positive
from metabridge.heads import newton, svm_duals
from metabridge.heads.feature_gram import centered_axes_with_bias, combine, combine_with_mean, gram_matrix, in_blocks
from metabridge.heads.fitted_heads import FittedHead, LinearHead, PairwiseHead
from metabridge.heads.head import Head
from metabridge.heads.task_sets import prepare_tasks, shape_solution, warn_if_unsolved

MAX_PRIMAL_EXCESS = 1e-7  # problems with a larger relative excess over the minimum are also solved in their duals
# If C times the largest squared norm of a float64 feature exceeds this, rounding errors of the weight are checked.
ROUNDING_CHECK_THRESHOLD = 1e8


@dataclass(frozen=True)
class SVM(Head):
    """Linear support vector machine, one-vs-rest with the squared hinge loss or one-vs-one with the hinge loss.

    "squared-hinge" minimizes ½‖w_k‖² + ½b_k² + C Σ_n max(0, 1 − s_nk(w_kᵀφ_n + b_k))² for each class k, with s_nk = 1
    for the features φ_n of this class and −1 for all others, like scikit-learn's `LinearSVC(C=C)`. "hinge" minimizes
    ½‖w‖² + C Σ_n max(0, 1 − s_n(wᵀφ_n + b)) for each pair of classes, with s_n = 1 for the first class and −1 for the
    second, like scikit-learn's `SVC(C=C, kernel="linear")`.

    Args:
        C: The weight of the losses.
        loss: "squared-hinge" or "hinge".
        normalize: Whether features are scaled to unit length.

    Raises:
        InputError: If `C` is not positive or `loss` is unknown.

    >>> import torch
    >>> features, labels = torch.tensor([[[2.0], [4.0]]]), torch.tensor([[0, 1]])
    >>> SVM(loss="hinge", normalize=False).fit(features, labels, outputs=2)
    PairwiseHead(weight=tensor([[[-1.]]]), bias=tensor([[3.]]), normalize=False)
    """

    name: ClassVar[str] = "svm"
    label: ClassVar[str] = "SVM"
    calibrated: ClassVar[bool] = False
    default_penalty: ClassVar[float | None] = 1.0

    C: float = 1.0
    loss: Literal["squared-hinge", "hinge"] = "squared-hinge"
    normalize: bool = True

    def __post_init__(self) -> None:
        check_positive("C", self.C)
        if self.loss not in ("squared-hinge", "hinge"):
            raise InputError(f'loss is {self.loss!r}, but must be "squared-hinge" or "hinge".')

    @classmethod
    def _from_penalty(cls, penalty: float) -> Self:
        return cls(C=1 / penalty)

    def fit(self, features: Tensor, labels: Tensor, outputs: int) -> FittedHead:
        """Fit the head of every task; see `Head.fit`."""
        x, y = prepare_tasks(self, features, labels, outputs)
        fit = self._fit_hinge if self.loss == "hinge" else self._fit_squared_hinge
        return fit(features, x, y, outputs)

    def _fit_hinge(self, features: Tensor, x: Tensor, y: Tensor, outputs: int) -> PairwiseHead:
        gram, origin = gram_matrix(x, sensitivity=self.C)
        coefficient, level, gap = in_blocks(lambda K, y: svm_duals.one_against_one(K, y, outputs, self.C), gram, y)
        warn_if_unsolved(self, gap, "a smaller C")
        weight = combine(coefficient, x, origin)
        return PairwiseHead(*shape_solution(features, weight, level, origin), self.normalize)

    def _fit_squared_hinge(self, features: Tensor, x: Tensor, y: Tensor, outputs: int) -> LinearHead:
        coordinates, lift, along, mean = in_blocks(centered_axes_with_bias, x)
        # (x, 1) = (x − mean, 0) + (mean, 1), and `level` is the score at the mean.
        length = (mean.square().sum(-1) + 1).sqrt()  # of (mean, 1)
        design = torch.cat([coordinates, 1 + (along / length)[..., None]], -1)
        penalty = torch.cat([torch.ones_like(coordinates[:, 0]), length.square().reciprocal()], -1) / self.C
        solution, excess = newton.minimize(newton.SQUARED_HINGE, y, design, penalty, outputs)
        self._refine_in_dual(solution, excess, coordinates, design, length, y)
        weight, level = (lift @ solution[:, :-1]).mT, solution[:, -1]
        if x.shape[-2] <= x.shape[-1]:
            bias = (level / length - (weight @ along[..., None])[..., 0]) / length
            weight, mean = combine_with_mean(weight, x, coordinates, mean, bias)
        else:
            # Remove the rounding errors of the weight along (mean, 1), which the length of (x, 1) would magnify.
            component = (weight @ pad(mean, (0, 1), value=1.0).mT)[..., 0]
            weight = weight[..., :-1] + ((level - component) / length.square())[..., None] * mean
        if x.dtype == torch.float64 and self.C * coordinates.square().sum(-1).max() > ROUNDING_CHECK_THRESHOLD:
            bias, scores = level - (weight @ mean.mT)[..., 0], (x - mean) @ weight.mT + level[:, None]
            objective = (weight.square().sum(-1) + bias.square()) / 2 + self.C * _squared_hinges(scores, y)
            minimum_over_C = (penalty[..., None] * solution.square()).sum(-2) / 2
            minimum_over_C = minimum_over_C + _squared_hinges(design @ solution, y)
            excess = torch.maximum(excess, objective / (self.C * minimum_over_C) - 1)
        warn_if_unsolved(self, excess, "a smaller C")
        return LinearHead(*shape_solution(features, weight, level, mean), self.normalize)

    def _refine_in_dual(
        self, solution: Tensor, excess: Tensor, coordinates: Tensor, design: Tensor, length: Tensor, y: Tensor
    ) -> None:
        """Solve unsolved problems again in their duals, and replace entries of `solution` and `excess` that improve.

        If C is so large that margins are almost hard, the solution of the dual problem is more precise. Tasks with more
        than `svm_duals.MAX_EXAMPLES` examples are not solved again.
        """
        if design.shape[-2] > svm_duals.MAX_EXAMPLES:
            return
        unsolved = (excess > MAX_PRIMAL_EXCESS).nonzero()
        chunk_size = svm_duals.MAX_EXAMPLES**2 // design.shape[-2] ** 2 or 1
        for chunk in unsolved.split(chunk_size) if len(unsolved) else ():
            task, output = chunk.unbind(-1)
            gram = coordinates[task] @ coordinates[task].mT
            sign = torch.where(y[task] == output[:, None], 1.0, -1.0).to(gram.dtype)
            bias_penalty = length[task, 0].square().reciprocal()
            coefficient, level, gap = svm_duals.squared_hinge(gram, sign, design[task, :, -1], bias_penalty, self.C)
            weight = (coefficient[:, None] @ coordinates[task])[:, 0]
            improved = gap < excess[task, output]
            task, output = task[improved], output[improved]
            solution[task, :, output] = torch.cat([weight, level[:, None]], -1)[improved]
            excess[task, output] = gap[improved]


def _squared_hinges(scores: Tensor, labels: Tensor) -> Tensor:
    """Return Σ_n max(0, 1 − s_nk f_nk)² (tasks, outputs) for scores f (tasks, n, outputs)."""
    sign = 2 * one_hot(labels, scores.shape[-1]) - 1
    return (1 - sign * scores).clamp_min(0).square().sum(-2)
