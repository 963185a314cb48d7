"""The experiments that `metabridge reproduce ID` runs. Each module with a line `EXPERIMENT = ...` defines one."""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import Any

from metabridge.errors import InputError
from metabridge.experiments.experiment import Experiment, ExperimentOptions, Outcome, TrainingExperiment
from metabridge.report.results import Result, Row

__all__ = [
    "Experiment",
    "ExperimentOptions",
    "Outcome",
    "Result",
    "Row",
    "TrainingExperiment",
    "experiment_modules",
    "load_experiment",
]

_DEFINITION = re.compile(r'^EXPERIMENT\b.*?"([\w-]+)"', re.MULTILINE | re.DOTALL)


@cache
def experiment_modules() -> dict[str, str]:
    """Return the names of the modules that define experiments, by experiment ID.

    The IDs are read from the source files, because importing the modules would import PyTorch, which takes seconds.

    >>> experiment_modules()["bridge-fig1"]
    'metabridge.experiments.bridge_fig1'
    """
    modules = {}
    for file in sorted(files(__name__).iterdir(), key=lambda file: file.name):
        if file.name.endswith(".py") and (match := _DEFINITION.search(file.read_text(encoding="utf-8"))):
            modules[match[1]] = f"{__name__}.{file.name.removesuffix('.py')}"
    return modules


def load_experiment(id: str) -> Experiment[Any]:
    """Import an experiment's module and return the experiment.

    Raises:
        InputError: If there is no experiment with this ID.

    >>> load_experiment("figure-1")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    metabridge.errors.InputError: there is no experiment 'figure-1'. The experiments are anil-fig2, ...
    """
    modules = experiment_modules()
    if id not in modules:
        raise InputError(f"there is no experiment '{id}'. The experiments are {', '.join(modules)}.")
    return import_module(modules[id]).EXPERIMENT  # type: ignore[no-any-return]
