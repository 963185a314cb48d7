"""The names that users can choose from. They are read from source files, so that `--help` does not import PyTorch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

BUILTIN_MODELS = ("photos", "characters")  # trained models in the package
DEFAULT_MODEL = "photos"
BUILTIN_MODELS_FOLDER = Path(__file__).parent / "models" / "pretrained"
_BUILDER = re.compile(r"^@stores_build_arguments\ndef (\w+)\(", re.MULTILINE)
_REGISTERED_NAME = re.compile(r'^    name: ClassVar\[str\] = "([\w-]+)"$', re.MULTILINE)


@cache
def builder_modules() -> dict[str, str]:
    """Return a dictionary from the name of each function that builds a network to the name of its module.

    >>> builder_modules()["conv4"]
    'metabridge.models.conv4'
    """
    return _names_in_source("models", _BUILDER)


def model_names() -> list[str]:
    """Return the values that `--model` accepts. The path of an architecture file selects the builder `cell_network`.

    >>> model_names()[:4]
    ['conv4', 'hf:NAME', 'mlp', 'resnet12']
    """
    names = [f"{name}:NAME" if name in ("hf", "timm") else name for name in builder_modules() if name != "cell_network"]
    return [*names, "package.module:function", "the path of an architecture.json from metabridge search"]


def head_names() -> list[str]:
    """Return the names of the test-time heads.

    >>> "logistic" in head_names()
    True
    """
    return list(_names_in_source("heads", _REGISTERED_NAME))


def alternatives(words: Iterable[str]) -> str:
    """Join words with commas and "or".

    >>> alternatives(["adam", "sgd", "muon"])
    'adam, sgd or muon'
    """
    *others, last = words
    return f"{', '.join(others)} or {last}"


def _names_in_source(package: str, pattern: re.Pattern[str]) -> dict[str, str]:
    """Return a sorted dictionary from the names that `pattern` finds in a subpackage to the names of their modules."""
    modules = {
        name: f"metabridge.{package}.{file.stem}"
        for file in (Path(__file__).parent / package).glob("*.py")
        for name in pattern.findall(file.read_text(encoding="utf-8"))
    }
    return dict(sorted(modules.items()))
