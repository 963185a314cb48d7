"""A method of the taxonomy in words."""

from __future__ import annotations

from metabridge.learners.method import Method


def described(method: Method) -> dict[str, str]:
    """Return the columns of the taxonomy for one method.

    >>> from metabridge.learners.method import PRESETS
    >>> described(PRESETS["anil"])["inner solve"]
    'gradient descent: steps 5, lr 0.1'
    >>> described(PRESETS["mtl"])["inner solve"]
    'none; at test, logistic regression: penalty 0.33'
    """
    inner = "none" if method.inner is None else method.inner.summary()
    return {
        "adapts": method.adapts,
        "inner solve": inner if method.test is None else f"{inner}; at test, {method.test.summary()}",
        "outer gradient": method.outer,
        "head": method.training_head,
        "split": "yes" if method.split else "no",
    }
