"""The published class splits of the data sets, one line per class: split, class and, if known, superclass."""

from __future__ import annotations

from importlib import resources


def read_split_table(name: str) -> list[tuple[str, ...]]:
    """Return the lines of a split file as tuples of words.

    >>> read_split_table("fc100")[0], len(read_split_table("tiered_imagenet"))
    (('train', 'apple'), 608)
    """
    text = resources.files(__package__).joinpath(f"{name}.txt").read_text(encoding="utf-8")
    return [tuple(line.split()) for line in text.splitlines()]
