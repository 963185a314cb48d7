from __future__ import annotations

import numpy as np

from metabridge.inference.confusion import Confusion
from metabridge.report.confusion_figure import MAX_LABELED_CLASSES, confusion_figure
from metabridge.report.figures import png


def test_every_count_is_written_into_its_cell():
    confusion = Confusion(np.array([[3, 1], [0, 2]]), ("cat", "dog"))
    axes = confusion_figure(confusion).axes[0]
    texts = {text.get_position(): text.get_text() for text in axes.texts}
    assert texts == {(0, 0): "3", (1, 0): "1", (1, 1): "2"}  # (column, row)
    np.testing.assert_allclose(axes.images[0].get_array(), [[0.75, 0.25], [0, 1]])


def test_class_names_are_shortened_and_never_interpreted():
    names = ("$\\frac{1}{$", "a very long name of a class that nobody can read", "a\x1b[31m")
    figure = confusion_figure(Confusion(np.eye(3, dtype=int), names))
    assert png(figure).startswith(b"\x89PNG")
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        "$\\frac{1}{$",
        "a very long name of a c…",
        "a?[31m",
    ]


def test_many_classes_have_no_labels():
    count = MAX_LABELED_CLASSES + 1
    axes = confusion_figure(Confusion(np.eye(count, dtype=int), tuple(map(str, range(count))))).axes[0]
    assert not axes.texts
