"""Fitted heads: the linear classifiers that `Head.fit` returns."""

from __future__ import annotations

from math import isqrt
from typing import NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from metabridge.errors import InputError, describe


class LinearHead(NamedTuple):
    """A fitted head that computes a linear score for each output.

    Args:
        weight: The weights, (..., outputs, d), with any leading task dimensions.
        bias: The biases, (..., outputs).
        normalize: Whether to L2-normalize features before they are scored.

    >>> import torch
    >>> head = LinearHead(weight=torch.eye(2), bias=torch.zeros(2))
    >>> head
    LinearHead(weight: float32 of shape (2, 2), normalize=False)
    >>> head.scores(torch.tensor([[3.0, 4.0]])).argmax(-1)
    tensor([1])
    """

    weight: Tensor
    bias: Tensor
    normalize: bool = False

    def __repr__(self) -> str:
        return f"LinearHead(weight: {describe(self.weight)}, normalize={self.normalize})"

    @property
    def kind(self) -> str:
        """The type of the head in exported JSON files."""
        return "linear"

    @staticmethod
    def rows(outputs: int) -> int:
        """Return the number of rows of the weight matrix of one task.

        Args:
            outputs: The number of outputs.

        Returns:
            The number of rows.
        """
        return outputs

    def scores(self, features: Tensor) -> Tensor:
        """Return the scores wᵀx + b, or wᵀx/‖x‖ + b if `normalize` is true.

        Args:
            features: The features x, (..., queries, d), with the same task dimensions as the weight.

        Returns:
            The scores, (..., queries, outputs).

        Raises:
            InputError: If the task dimensions or the last dimension d differ from those of the weight.

        >>> import torch
        >>> LinearHead(torch.eye(2), torch.tensor([0.0, 1.0])).scores(torch.tensor([[3.0, 4.0]]))
        tensor([[3., 5.]])
        """
        _check_features(features, self.weight)
        features = at_least_float32(features)
        # On a CPU, the faster order of the factors depends on the number of outputs.
        few_outputs = self.weight.shape[-2] < 8
        product = features @ self.weight.mT if few_outputs else (self.weight @ features.mT).mT
        if self.normalize:
            product = product / features.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        return product + self.bias[..., None, :]


class PairwiseHead(NamedTuple):
    """A fitted one-vs-one head: each pair of outputs i < j has a linear decision function and one vote.

    The order of the pairs is (0, 1), (0, 2), ...

    Args:
        weight: The weights, (..., pairs, d), with any leading task dimensions.
        bias: The biases, (..., pairs). A decision value of at least 0 is a vote for i, a negative one for j.
        normalize: Whether to L2-normalize features before they are scored.

    >>> import torch
    >>> head = PairwiseHead(weight=torch.tensor([[1.0], [1.0], [1.0]]), bias=torch.tensor([-1.0, -2.0, -3.0]))
    >>> head.scores(torch.tensor([[0.0], [2.5], [5.0]])).argmax(-1)
    tensor([2, 0, 0])
    """

    weight: Tensor
    bias: Tensor
    normalize: bool = False

    def __repr__(self) -> str:
        return f"PairwiseHead(weight: {describe(self.weight)}, normalize={self.normalize})"

    @property
    def kind(self) -> str:
        """The type of the head in exported JSON files."""
        return "pairwise"

    @staticmethod
    def rows(outputs: int) -> int:
        """Return the number of rows of the weight matrix of one task.

        Args:
            outputs: The number of outputs.

        Returns:
            The number of rows.
        """
        return outputs * (outputs - 1) // 2

    def scores(self, features: Tensor) -> Tensor:
        """Return the number of votes for each output, plus c / (3|c| + 3) to break ties.

        c is the sum of the decision values of all pairs with this output, with reversed sign if the output is j. The
        second term is smaller than a third of a vote. With three or more outputs, the scores equal those of
        scikit-learn's `SVC(decision_function_shape="ovr")`.

        Args:
            features: The features, (..., queries, d), with the same task dimensions as the weight.

        Returns:
            The scores, (..., queries, outputs).

        Raises:
            InputError: If the task dimensions or the last dimension d differ from those of the weight.

        >>> import torch
        >>> PairwiseHead(torch.tensor([[1.0, 0.0]]), torch.tensor([0.0])).scores(torch.tensor([[2.0, 0.0]]))
        tensor([[ 1.2222, -0.2222]])
        """
        decisions = LinearHead(*self).scores(features)
        outputs = (1 + isqrt(1 + 8 * self.bias.shape[-1])) // 2  # there are outputs · (outputs − 1) / 2 pairs
        i, j = torch.triu_indices(outputs, outputs, 1, device=decisions.device)
        pair_signs = (one_hot(i, outputs) - one_hot(j, outputs)).to(decisions.dtype)
        # Each decision is worth +½ or −½ to an output, so (outputs − 1) / 2 more makes the sum the number of votes.
        votes = (0.5 - (decisions < 0).to(decisions.dtype)) @ pair_signs + (outputs - 1) / 2
        decision_sum = decisions @ pair_signs
        return votes + decision_sum / (3 * decision_sum.abs() + 3)


FittedHead: TypeAlias = LinearHead | PairwiseHead
# Files of adapted models contain these keys.
FITTED_HEADS: dict[str, type[FittedHead]] = {cls.__name__: cls for cls in get_args(FittedHead)}


def at_least_float32(features: Tensor) -> Tensor:
    """Convert float16 and bfloat16 features to float32, since in half precision norms overflow and biases lose digits.

    >>> at_least_float32(torch.ones(1, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return features.float() if features.dtype in (torch.float16, torch.bfloat16) else features


def _check_features(features: Tensor, weight: Tensor) -> None:
    if features.shape[:-2] != weight.shape[:-2] or features.shape[-1] != weight.shape[-1]:
        raise InputError(
            f"features is {describe(features)}, but the head was fitted to task dimensions "
            f"{tuple(weight.shape[:-2])} and {weight.shape[-1]} features. Pass features of the same tasks."
        )
