"""Which classes are predicted for the images of which classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class ConfusedPair(NamedTuple):
    """Number of images of one class that were predicted as another."""

    true: str
    predicted: str
    images: int


@dataclass(frozen=True, eq=False)
class Confusion:
    """A confusion matrix: how many images of each class were predicted as each class.

    Args:
        matrix: Numbers of images, int64 (classes, classes): rows are true classes, columns are predicted classes.
        class_names: Names of the classes.

    >>> confusion = Confusion.of([0, 0, 1, 1], [0, 1, 1, 1], ["cat", "dog"])
    >>> print(confusion)
    true class  1  2
    1 cat       1  1
    2 dog       0  2
    >>> confusion.accuracy, confusion.most_confused(1)
    (0.75, [ConfusedPair(true='cat', predicted='dog', images=1)])
    """

    matrix: NDArray[np.int64]
    class_names: tuple[str, ...]

    @classmethod
    def of(
        cls, true: Sequence[int] | NDArray[np.int64], predicted: Sequence[int] | NDArray[np.int64], names: Sequence[str]
    ) -> Confusion:
        """Count predictions.

        Args:
            true: The index of the class of each image.
            predicted: The index of the predicted class of each image.
            names: Names of the classes.

        Returns:
            The confusion matrix.
        """
        matrix = np.zeros((len(names), len(names)), dtype=np.int64)
        np.add.at(matrix, (np.asarray(true, dtype=np.int64), np.asarray(predicted, dtype=np.int64)), 1)
        return cls(matrix, tuple(names))

    @property
    def accuracy(self) -> float:
        """Fraction of the images whose predicted class is correct; NaN if there are no images."""
        total = self.matrix.sum()
        return float(self.matrix.trace() / total) if total else float("nan")

    def most_confused(self, k: int = 5) -> list[ConfusedPair]:
        """Return the pairs of classes with the most wrong predictions.

        Args:
            k: Maximum number of pairs.

        Returns:
            The pairs, largest number first. Pairs that were never confused are omitted.
        """
        wrong = self.matrix - np.diag(self.matrix.diagonal())
        order = np.argsort(-wrong, axis=None, kind="stable")[:k]
        rows, columns = np.unravel_index(order, wrong.shape)
        return [
            ConfusedPair(self.class_names[row], self.class_names[column], int(wrong[row, column]))
            for row, column in zip(rows, columns)
            if wrong[row, column]
        ]

    def __str__(self) -> str:
        """Return the matrix as a table with one row per true class and one numbered column per predicted class."""
        numbers = [str(number + 1) for number in range(len(self.class_names))]
        number_width = len(numbers[-1])
        labels = [f"{number:>{number_width}} {name}" for number, name in zip(numbers, self.class_names)]
        label_width = max(len("true class"), *map(len, labels))
        width = max(number_width, len(str(self.matrix.max()))) + 2
        lines = ["true class".ljust(label_width) + "".join(number.rjust(width) for number in numbers)]
        lines += [
            label.ljust(label_width) + "".join(str(count).rjust(width) for count in row)
            for label, row in zip(labels, self.matrix)
        ]
        return "\n".join(lines)
