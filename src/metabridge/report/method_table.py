"""Rows of the table of methods in the docs and in the output of `metabridge methods`."""

from __future__ import annotations

from metabridge.learners.method import Method


def taxonomy_row(method: Method) -> dict[str, str]:
    """Return the cells of a method in the table of methods, by column heading.

    >>> from metabridge.learners.method import PRESETS
    >>> taxonomy_row(PRESETS["anil"])["inner solve"]
    'gradient descent: steps 5, lr 0.1'
    >>> taxonomy_row(PRESETS["mtl"])["inner solve"]
    'none; at test time, logistic regression: penalty 0.33'
    """
    inner = "none" if method.inner is None else method.inner.summary()
    return {
        "adapts": method.adapts,
        "inner solve": inner
        if method.test_solver is None
        else f"{inner}; at test time, {method.test_solver.summary()}",
        "outer gradient": method.outer,
        "training head": method.training_head,
        "split": "yes" if method.split else "no",
    }
