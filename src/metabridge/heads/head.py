"""The base class of test-time heads, and the function `create_head`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Self

from torch import Tensor

from metabridge.errors import InputError, check_positive
from metabridge.heads.fitted_heads import FittedHead
from metabridge.registry import Registered


class Head(Registered, ABC, abstract=True):
    """Base class of test-time heads: classifiers that are fitted to fixed features, for all tasks at once.

    A head is a frozen dataclass in a module of this package. All its fields need defaults. Heads solve optimization
    problems in float64, and log a warning if an iterative solver does not converge.

    Attributes:
        calibrated: Whether the softmax of the scores estimates probabilities; if not, scores only rank the outputs.
        supports_regression: Whether targets may be real-valued (regression) instead of class labels.
        normalize: A field of every head: whether to L2-normalize the features.
        default_penalty: The penalty that `create_head` uses by default, or None if the head has no penalty.

    >>> import torch
    >>> head, labels = create_head("ridge"), torch.arange(5).expand(8, -1)
    >>> isinstance(head, Head), head.fit(torch.randn(8, 5, 16), labels, outputs=5).scores(torch.randn(8, 3, 16)).shape
    (True, torch.Size([8, 3, 5]))
    """

    registry: ClassVar[dict[str, type[Head]]] = {}
    required: ClassVar[tuple[str, ...]] = ("name", "label", "calibrated", "default_penalty")
    calibrated: ClassVar[bool]
    default_penalty: ClassVar[float | None]
    supports_regression: ClassVar[bool] = False
    normalize: bool

    @classmethod
    def with_penalty(cls, penalty: float | None = None) -> Self:
        """Return a head of this class that L2-normalizes features and has this penalty.

        Args:
            penalty: The strength of the L2 penalty on the weights; 1/C for the SVM (default: `default_penalty`).

        Returns:
            The head, not yet fitted.

        Raises:
            InputError: If `penalty` is passed to a head without penalty, or is not positive.
        """
        if cls.default_penalty is None:
            if penalty is not None:
                raise InputError(f"penalty is {penalty}, but the head {cls.name!r} has no penalty. Omit it.")
            return cls._from_penalty(0.0)
        penalty = cls.default_penalty if penalty is None else penalty
        check_positive("penalty", penalty)
        return cls._from_penalty(penalty)

    @classmethod
    @abstractmethod
    def _from_penalty(cls, penalty: float) -> Self:
        """Return a head that L2-normalizes features and has this penalty.

        A head without penalty ignores the argument.
        """

    @abstractmethod
    def fit(self, features: Tensor, labels: Tensor, outputs: int) -> FittedHead:
        """Fit the head of every task.

        Args:
            features: The features, (..., n, d), with at least one leading task dimension.
            labels: Class labels, int64 (..., n), or real-valued targets, (..., n, outputs), if `supports_regression`.
            outputs: The number of outputs: classes, or dimensions of real-valued targets.

        Returns:
            The fitted head with the task dimensions of the features, in their dtype, but at least float32.

        Raises:
            InputError: If a shape or dtype is wrong, features or labels are not finite, there are fewer than two
                classes, a label is not in 0..outputs − 1, a class has no example, or the fitted weights overflow.
        """


def create_head(name: str, penalty: float | None = None) -> Head:
    """Return the test-time head with this name, which L2-normalizes features.

    Args:
        name: A name in `Head.registry`: "centroid", "logistic", "ridge", "svm" or the name of a custom head.
        penalty: The strength of the L2 penalty on the weights; 1/C for the SVM (default: the head's
            `default_penalty`).

    Returns:
        The head, not yet fitted.

    Raises:
        InputError: If there is no such head, or `penalty` is passed to a head without penalty or is not positive.

    >>> create_head("svm", penalty=0.5)
    SVM(C=2.0, loss='squared-hinge', normalize=True)
    """
    if name not in Head.registry:
        raise InputError(f"head is {name!r}, but must be one of {', '.join(sorted(Head.registry))}.")
    return Head.registry[name].with_penalty(penalty)
