"""Linear support vector machines as a test-time head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from metabridge.errors import InputError, check_positive
from metabridge.heads import newton, svm_duals
from metabridge.heads.feature_gram import (
    gram_matrix,
    map_task_blocks,
    principal_coordinates_with_bias,
    weighted_sum,
    weighted_sum_plus_mean,
)
from metabridge.heads.fit_checks import prepare_tasks, warn_if_not_converged, weight_and_bias
from metabridge.heads.fitted_heads import FittedHead, LinearHead, PairwiseHead
from metabridge.heads.head import Head

MAX_PRIMAL_SUBOPTIMALITY = 1e-7  # a problem with a larger relative suboptimality is also solved in its dual
# Check float64 weights for rounding errors if C times the largest squared norm of a centered feature exceeds this.
ROUNDING_CHECK_THRESHOLD = 1e8


@dataclass(frozen=True)
class SVM(Head):
    """Linear support vector machine, one-vs-rest with the squared hinge loss or one-vs-one with the hinge loss.

    "squared-hinge" minimizes ½‖w_k‖² + ½b_k² + C Σ_n max(0, 1 − s_nk(w_kᵀφ_n + b_k))² for each class k, where s_nk is 1
    if the features φ_n belong to class k and −1 otherwise, like scikit-learn's `LinearSVC(C=C)`. "hinge" minimizes
    ½‖w‖² + C Σ_n max(0, 1 − s_n(wᵀφ_n + b)) for each pair of classes, where s_n is 1 for the first class and −1 for the
    second, like scikit-learn's `SVC(C=C, kernel="linear")`.

    Args:
        C: The weight of the losses.
        loss: "squared-hinge" or "hinge".
        normalize: Whether to L2-normalize the features.

    Raises:
        InputError: If `C` is not positive or `loss` is unknown.

    >>> import torch
    >>> features, labels = torch.tensor([[[2.0], [4.0]]]), torch.tensor([[0, 1]])
    >>> head = SVM(loss="hinge", normalize=False).fit(features, labels, outputs=2)
    >>> head.weight, head.bias
    (tensor([[[-1.]]]), tensor([[3.]]))
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
        coefficients, origin_scores, gap = map_task_blocks(
            lambda K, y: svm_duals.one_vs_one(K, y, outputs, self.C), gram, y
        )
        warn_if_not_converged(self, gap, "a smaller C")
        weight = weighted_sum(coefficients, x, origin)
        return PairwiseHead(*weight_and_bias(features, weight, origin_scores, origin), self.normalize)

    def _fit_squared_hinge(self, features: Tensor, x: Tensor, y: Tensor, outputs: int) -> LinearHead:
        coordinates, from_coordinates, mean_component, mean = map_task_blocks(principal_coordinates_with_bias, x)
        # (x, 1) = (x − mean, 0) + (mean, 1). The last unknown is the score at the mean.
        mean_norm = (mean.square().sum(-1) + 1).sqrt()  # ‖(mean, 1)‖
        design = torch.cat([coordinates, 1 + (mean_component / mean_norm)[..., None]], -1)
        penalty = torch.cat([torch.ones_like(coordinates[:, 0]), mean_norm.square().reciprocal()], -1) / self.C
        solution, suboptimality = newton.minimize(newton.SQUARED_HINGE, y, design, penalty, outputs)
        self._refine_in_dual(solution, suboptimality, coordinates, design, mean_norm, y)
        weight, scores_at_mean = (from_coordinates @ solution[:, :-1]).mT, solution[:, -1]
        if x.shape[-2] <= x.shape[-1]:  # `weight` contains dual coefficients
            mean_coefficient = (scores_at_mean / mean_norm - (weight @ mean_component[..., None])[..., 0]) / mean_norm
            weight, mean = weighted_sum_plus_mean(weight, x, coordinates, mean, mean_coefficient)
        else:
            # Remove the component of the weight along (mean, 1): a rounding error that a large ‖(x, 1)‖ would amplify.
            component = (weight @ pad(mean, (0, 1), value=1.0).mT)[..., 0]
            weight = weight[..., :-1] + ((scores_at_mean - component) / mean_norm.square())[..., None] * mean
        if x.dtype == torch.float64 and self.C * coordinates.square().sum(-1).max() > ROUNDING_CHECK_THRESHOLD:
            bias = scores_at_mean - (weight @ mean.mT)[..., 0]
            scores = (x - mean) @ weight.mT + scores_at_mean[:, None]
            objective = (weight.square().sum(-1) + bias.square()) / 2 + self.C * _squared_hinge_loss(scores, y)
            # `penalty` contains the factor 1/C, so this is the minimum of the objective divided by C.
            scaled_minimum = (penalty[..., None] * solution.square()).sum(-2) / 2
            scaled_minimum = scaled_minimum + _squared_hinge_loss(design @ solution, y)
            suboptimality = torch.maximum(suboptimality, objective / (self.C * scaled_minimum) - 1)
        warn_if_not_converged(self, suboptimality, "a smaller C")
        return LinearHead(*weight_and_bias(features, weight, scores_at_mean, mean), self.normalize)

    def _refine_in_dual(
        self,
        solution: Tensor,
        suboptimality: Tensor,
        coordinates: Tensor,
        design: Tensor,
        mean_norm: Tensor,
        y: Tensor,
    ) -> None:
        """Solve the duals of problems that did not converge.

        Where the dual solution is better, `solution` and `suboptimality` are updated in place. If C is so large that
        margins are almost hard, solving the dual is more accurate. Tasks with more than `svm_duals.MAX_EXAMPLES`
        examples are skipped.
        """
        if design.shape[-2] > svm_duals.MAX_EXAMPLES:
            return
        unsolved = (suboptimality > MAX_PRIMAL_SUBOPTIMALITY).nonzero()
        chunk_size = svm_duals.MAX_EXAMPLES**2 // design.shape[-2] ** 2 or 1
        for chunk in unsolved.split(chunk_size) if len(unsolved) else ():
            task, output = chunk.unbind(-1)
            gram = coordinates[task] @ coordinates[task].mT
            sign = torch.where(y[task] == output[:, None], 1.0, -1.0).to(gram.dtype)
            intercept_penalty = mean_norm[task, 0].square().reciprocal()
            coefficients, intercept, gap = svm_duals.solve_squared_hinge(
                gram, sign, design[task, :, -1], intercept_penalty, self.C
            )
            weight = (coefficients[:, None] @ coordinates[task])[:, 0]
            is_better = gap < suboptimality[task, output]
            task, output = task[is_better], output[is_better]
            solution[task, :, output] = torch.cat([weight, intercept[:, None]], -1)[is_better]
            suboptimality[task, output] = gap[is_better]


def _squared_hinge_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Return Σ_n max(0, 1 − s_nk f_nk)², (tasks, outputs), for scores f, (tasks, n, outputs)."""
    sign = 2 * one_hot(labels, scores.shape[-1]) - 1
    return (1 - sign * scores).clamp_min(0).square().sum(-2)
