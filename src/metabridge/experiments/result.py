"""Old names, for modules that do not use `experiment` and `records` yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metabridge.experiments.experiment import ExperimentOptions as Work
from metabridge.experiments.experiment import Outcome
from metabridge.report.results import Machine as Environment
from metabridge.report.results import Result, Row

__all__ = ["Environment", "Outcome", "Result", "Row", "UnportedExperiment", "Work", "environment"]
environment = Environment.current


@dataclass(frozen=True)
class UnportedExperiment:
    """What `Experiment` offers, from a module's functions `run` and `figure`."""

    id: str
    run: Callable[[Work], Any]
    draw: Callable[[Any, Path], None]
    resumable: bool = False
