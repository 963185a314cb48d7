"""Learning rate schedules: how the outer learning rate changes during training.

A schedule has no state. Given the completed fraction of training and the validations so far, it computes the factor by
which the learning rate is multiplied. A resumed run therefore continues with the right learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from metabridge.errors import InputError, check_positive

__all__ = ["Constant", "Cosine", "Plateau", "Schedule", "Step", "schedule"]


@dataclass(frozen=True)
class Constant:
    """Keep the learning rate constant.

    >>> Constant().factor(0.5, [])
    1.0
    """

    def factor(self, progress: float, improved: Sequence[bool]) -> float:
        """Return 1.

        Args:
            progress: Completed fraction of training, from 0 to 1.
            improved: For each validation so far, whether its score was a new best.

        Returns:
            The factor by which the learning rate is multiplied.
        """
        return 1.0


@dataclass(frozen=True)
class Step:
    """Multiply the learning rate by `drop` at given fractions of training.

    Args:
        at: Fractions of training, each between 0 and 1.
        drop: Factor applied at each of them.

    Raises:
        InputError: If a fraction is not between 0 and 1, or `drop` is not positive.

    >>> Step(at=(0.6, 0.8)).factor(0.7, [])
    0.1
    """

    at: tuple[float, ...] = (0.6, 0.8)
    drop: float = 0.1

    def __post_init__(self) -> None:
        check_positive("drop", self.drop)
        if not isinstance(self.at, tuple | list) or not all(0 < fraction < 1 for fraction in self.at):
            raise InputError(
                f"at is {self.at!r}, but must be a tuple of fractions of training between 0 and 1, such as (0.6, 0.8)."
            )

    def factor(self, progress: float, improved: Sequence[bool]) -> float:
        """Return `drop` to the power of the number of fractions passed.

        Args:
            progress: Completed fraction of training, from 0 to 1.
            improved: For each validation so far, whether its score was a new best.

        Returns:
            The factor by which the learning rate is multiplied.
        """
        return float(self.drop ** sum(progress >= fraction for fraction in self.at))


@dataclass(frozen=True)
class Cosine:
    """Decrease the learning rate to 0 along half a cosine, after a linear warm-up.

    Args:
        warmup: Fraction of training over which the learning rate rises linearly from 0.

    Raises:
        InputError: If `warmup` is not in [0, 1).

    >>> round(Cosine().factor(0.5, []), 3)
    0.5
    """

    warmup: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < 1:
            raise InputError(f"warmup is {self.warmup}, but must be a fraction of training, 0 or more and below 1.")

    def factor(self, progress: float, improved: Sequence[bool]) -> float:
        """Return the value of the warm-up or of the cosine.

        Args:
            progress: Completed fraction of training, from 0 to 1.
            improved: For each validation so far, whether its score was a new best.

        Returns:
            The factor by which the learning rate is multiplied.
        """
        if progress < self.warmup:
            return progress / self.warmup
        return (1 + math.cos(math.pi * (progress - self.warmup) / (1 - self.warmup))) / 2


@dataclass(frozen=True)
class Plateau:
    """Multiply the learning rate by `drop` when the validation score stops improving.

    Args:
        drop: Factor applied each time.
        patience: Number of consecutive validations without a new best score that do not yet reduce the learning rate.

    Raises:
        InputError: If `drop` is not positive, or `patience` is negative.

    >>> Plateau(patience=1).factor(0.5, [True, False, False, True])
    0.1
    """

    drop: float = 0.1
    patience: int = 4

    def __post_init__(self) -> None:
        check_positive("drop", self.drop)
        if self.patience < 0:
            raise InputError(f"patience is {self.patience}, but must be 0 validations or more.")

    def factor(self, progress: float, improved: Sequence[bool]) -> float:
        """Return `drop` to the power of the number of plateaus so far.

        Args:
            progress: Completed fraction of training, from 0 to 1.
            improved: For each validation so far, whether its score was a new best.

        Returns:
            The factor by which the learning rate is multiplied.
        """
        factor, without_improvement = 1.0, 0
        for is_best in improved:
            without_improvement = 0 if is_best else without_improvement + 1
            if without_improvement > self.patience:
                factor, without_improvement = factor * self.drop, 0
        return factor


Schedule = Constant | Step | Cosine | Plateau
SCHEDULES: dict[str, type[Schedule]] = {"constant": Constant, "step": Step, "cosine": Cosine, "plateau": Plateau}


def schedule(name: str) -> Schedule:
    """Return the schedule of this name, with default parameters.

    Args:
        name: "constant", "step", "cosine" or "plateau".

    Returns:
        The schedule.

    Raises:
        InputError: If there is no schedule of this name.

    >>> schedule("step")
    Step(at=(0.6, 0.8), drop=0.1)
    """
    if name not in SCHEDULES:
        raise InputError(f"schedule is {name!r}, but must be one of {', '.join(SCHEDULES)}.")
    return SCHEDULES[name]()
