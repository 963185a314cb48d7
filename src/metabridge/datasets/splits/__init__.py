"""Class splits as published with the data sets: a line each with split, class and, where known, superclass."""

from __future__ import annotations

from importlib import resources


def table(name: str) -> list[tuple[str, ...]]:
    """Return the lines of a split's file.

    >>> table("fc100")[0], len(table("tiered_imagenet"))
    (('train', 'apple'), 608)
    """
    text = resources.files(__package__).joinpath(f"{name}.txt").read_text(encoding="utf-8")
    return [tuple(line.split()) for line in text.splitlines()]
