from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import confusion_matrix

from metabridge.inference.confusion import Confusion

GENERATOR = np.random.default_rng(0)
TRUE, PREDICTED = GENERATOR.integers(0, 12, (2, 300))
NAMES = [f"class {index}" for index in range(12)]


def test_the_matrix_equals_that_of_scikit_learn():
    confusion = Confusion.of(TRUE, PREDICTED, NAMES)
    np.testing.assert_array_equal(confusion.matrix, confusion_matrix(TRUE, PREDICTED))
    assert confusion.accuracy == pytest.approx((TRUE == PREDICTED).mean())


def test_the_most_confused_pairs_are_the_largest_entries_off_the_diagonal():
    pairs = Confusion.of(TRUE, PREDICTED, NAMES).most_confused(1000)
    counts = {(pair.true, pair.predicted): pair.images for pair in pairs}
    assert [pair.images for pair in pairs] == sorted(counts.values(), reverse=True)
    for true, predicted in zip(TRUE, PREDICTED):
        if true != predicted:
            counts[NAMES[true], NAMES[predicted]] -= 1
    assert set(counts.values()) == {0}
    assert Confusion.of(TRUE, PREDICTED, NAMES).most_confused(3) == pairs[:3]


def test_pairs_that_were_never_confused_are_omitted():
    assert Confusion.of([0, 1, 1], [0, 1, 0], ["a", "b"]).most_confused() == [("b", "a", 1)]
    assert Confusion.of([0, 1], [0, 1], ["a", "b"]).most_confused() == []


def test_the_table_has_aligned_columns():
    lines = str(Confusion.of(TRUE, PREDICTED, NAMES)).split("\n")
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split() == ["true", "class", *map(str, range(1, 13))]
    assert lines[12].split()[:3] == ["12", "class", "11"]
    assert [int(count) for count in lines[12].split()[3:]] == Confusion.of(TRUE, PREDICTED, NAMES).matrix[11].tolist()


def test_the_accuracy_of_no_images_is_nan():
    assert np.isnan(Confusion.of([], [], ["a", "b"]).accuracy)
