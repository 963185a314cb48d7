"""A figure of a confusion matrix."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from metabridge.figure_theme import LIGHT, Theme
from metabridge.inference.confusion import Confusion

MAX_LABELED_CLASSES = 40  # with more classes, neither names nor counts are readable
MAX_NAME_LENGTH = 24  # characters


def confusion_figure(confusion: Confusion, theme: Theme = LIGHT) -> Figure:
    """Draw a confusion matrix, with a darker cell for a larger fraction of the images of the true class.

    Args:
        confusion: The confusion matrix.
        theme: Colors of the figure.

    >>> figure = confusion_figure(Confusion.of([0, 0, 1], [0, 1, 1], ["cat", "dog"]))
    >>> [label.get_text() for label in figure.axes[0].get_xticklabels()]
    ['cat', 'dog']
    """
    matrix, names = confusion.matrix, [_shorten(name) for name in confusion.class_names]
    fractions = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    side = min(12.0, 2.5 + 0.4 * len(names))
    with theme.context():
        figure = Figure(figsize=(side, side), layout="constrained")
        axes = figure.subplots()
        axes.imshow(fractions, cmap="Blues", vmin=0, vmax=1)
        axes.grid(visible=False)
        axes.set(xlabel="predicted class", ylabel="true class")
        if len(names) <= MAX_LABELED_CLASSES:
            # parse_math: a class name may contain a dollar sign
            axes.set_xticks(range(len(names)), names, rotation=90, parse_math=False)
            axes.set_yticks(range(len(names)), names, parse_math=False)
            for row, column in zip(*matrix.nonzero()):
                color = "white" if fractions[row, column] > 0.5 else "black"
                axes.text(column, row, str(matrix[row, column]), ha="center", va="center", color=color, fontsize=8)
    return figure


def _shorten(name: str) -> str:
    printable = "".join(character if character.isprintable() else "?" for character in name)
    return printable if len(printable) <= MAX_NAME_LENGTH else f"{printable[: MAX_NAME_LENGTH - 1]}…"
