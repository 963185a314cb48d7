"""How the outer learning rate changes over a training. Schedules are data and hold no state.

Each returns the factor on the rate from two things that a resumed run knows as well: the fraction
of the iterations done, and how many validations ago each best one was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from metabridge.errors import InputError, check_positive


@dataclass(frozen=True)
class Constant:
    """The rate as given."""

    def factor(self, done: float, improved: Sequence[bool]) -> float:
        """Return 1."""
        return 1.0


@dataclass(frozen=True)
class Step:
    """Times `drop` at each of the fractions `at` of the training.

    >>> Step(at=(0.6, 0.8)).factor(0.7, [])
    0.1
    """

    at: tuple[float, ...] = (0.6, 0.8)
    drop: float = 0.1

    def __post_init__(self) -> None:
        check_positive("drop", self.drop)
        if not isinstance(self.at, tuple | list) or not all(0 < place < 1 for place in self.at):
            raise InputError(f"at is {self.at!r}, but must be fractions of the training, such as (0.6, 0.8).")

    def factor(self, done: float, improved: Sequence[bool]) -> float:
        """Return `drop` to the power of the fractions passed."""
        return float(self.drop ** sum(done >= place for place in self.at))


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from 1 down to 0, after a linear rise over the fraction `warmup`.

    >>> round(Cosine().factor(0.5, []), 3)
    0.5
    """

    warmup: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < 1:
            raise InputError(f"warmup is {self.warmup}, but must be a fraction of the training, from 0 to below 1.")

    def factor(self, done: float, improved: Sequence[bool]) -> float:
        """Return the height of the curve."""
        if done < self.warmup:
            return done / self.warmup
        return (1 + math.cos(math.pi * (done - self.warmup) / (1 - self.warmup))) / 2


@dataclass(frozen=True)
class Plateau:
    """Times `drop` whenever more than `patience` validations in a row have brought no new best.

    >>> Plateau(patience=1).factor(0.5, [True, False, False, True])
    0.1
    """

    drop: float = 0.1
    patience: int = 4

    def __post_init__(self) -> None:
        check_positive("drop", self.drop)
        if self.patience < 0:
            raise InputError(f"patience is {self.patience}, but must be 0 validations or more.")

    def factor(self, done: float, improved: Sequence[bool]) -> float:
        """Return `drop` to the power of the waits that were in vain."""
        factor, waited = 1.0, 0
        for better in improved:
            waited = 0 if better else waited + 1
            if waited > self.patience:
                factor, waited = factor * self.drop, 0
        return factor


Schedule = Constant | Step | Cosine | Plateau
SCHEDULES: dict[str, type[Schedule]] = {"constant": Constant, "step": Step, "cosine": Cosine, "plateau": Plateau}


def schedule(name: str) -> Schedule:
    """Return a schedule by name, with its usual settings."""
    if name not in SCHEDULES:
        raise InputError(f"schedule is {name!r}, but must be one of {', '.join(SCHEDULES)}.")
    return SCHEDULES[name]()
