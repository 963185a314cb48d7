"""Labelled images by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from metabridge.environments.datasets.glyphs import load_glyphs
from metabridge.environments.images import LabelledImages
from metabridge.errors import InputError

__all__ = ["load", "load_glyphs"]

_LOADERS: dict[str, Callable[[str | Path | None], LabelledImages]] = {
    "glyphs": lambda root: load_glyphs(cache=root),
}


def load(name: str, root: str | Path | None = None) -> LabelledImages:
    """Return a data set by its name; `root` is the folder that holds it (for glyphs, the cache).

    >>> len(load("glyphs").superclass_names) >= 12
    True
    """
    if name not in _LOADERS:
        known = ", ".join(f"'{known}'" for known in _LOADERS)
        raise InputError(f"name is '{name}', but the known data sets are {known}. Use one of these.")
    return _LOADERS[name](root)
