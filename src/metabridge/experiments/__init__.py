"""The experiments by their IDs, each a module with `run` and `figure`. A new one is a line in the table."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from metabridge.errors import InputError
from metabridge.experiments.result import Outcome, Result, Row, Work

__all__ = ["EXPERIMENTS", "IN_PARTS", "Experiment", "Outcome", "Result", "Row", "Work", "experiment"]

EXPERIMENTS = {
    "glyphs": "metabridge.experiments.glyph_methods",
    "bridge-fig1": "metabridge.experiments.bridge_fig1",
    "bridge-depth": "metabridge.experiments.bridge_depth",
    "bridge-table3": "metabridge.experiments.bridge_table3",
    "bridge-table4": "metabridge.experiments.bridge_table4",
    "bridge-table5": "metabridge.experiments.bridge_table5",
    "bridge-fig2": "metabridge.experiments.bridge_fig2",
    "landscape-fig1": "metabridge.experiments.landscape_fig1",
    "landscape-fig2": "metabridge.experiments.landscape_fig2",
    "landscape-fig3": "metabridge.experiments.landscape_fig3",
    "landscape-fig7": "metabridge.experiments.landscape_fig7",
    "landscape-fig4": "metabridge.experiments.landscape_fig4",
    "landscape-fig6": "metabridge.experiments.landscape_fig6",
    "landscape-table1": "metabridge.experiments.landscape_table1",
    "landscape-table2": "metabridge.experiments.landscape_table2",
    "diagnose-worlds": "metabridge.experiments.diagnose_worlds",
    "diagnose-images": "metabridge.experiments.diagnose_images",
    "landscape-table3": "metabridge.experiments.landscape_table3",
    "landscape-rates": "metabridge.experiments.landscape_rates",
    "metantk-thm1": "metabridge.experiments.metantk_thm1",
    "metantk-thm2": "metabridge.experiments.metantk_thm2",
    "kernel-fewshot": "metabridge.experiments.kernel_fewshot",
    "anil-fig2": "metabridge.experiments.anil_fig2",
    "anil-fig3": "metabridge.experiments.anil_fig3",
    "anil-table1": "metabridge.experiments.anil_table1",
    "anil-mean": "metabridge.experiments.anil_mean",
    "anil-relu": "metabridge.experiments.anil_relu",
    "nas-table1": "metabridge.experiments.nas_table1",
    "nas-table2": "metabridge.experiments.nas_table2",
    "nas-fig2": "metabridge.experiments.nas_fig2",
    "nas-ranks": "metabridge.experiments.nas_ranks",
    "recipe": "metabridge.experiments.recipe",
}
# Made of trainings or searches that can be asked for one by one, and stopped.
IN_PARTS = frozenset(
    name
    for name in EXPERIMENTS
    if name.startswith(("bridge-table", "anil-", "nas-"))
    or name in ("bridge-fig2", "landscape-table1", "landscape-table2", "diagnose-images", "recipe")
)


class Experiment(Protocol):
    """What the module of an experiment offers."""

    def run(self, work: Work) -> Outcome:
        """Compute the experiment."""
        ...

    def figure(self, outcome: Any, file: Path) -> None:
        """Draw the outcome of `run` into a PNG file."""
        ...


def experiment(name: str) -> Experiment:
    """Return an experiment by its ID.

    >>> experiment("figure-1")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    metabridge.errors.InputError: there is no experiment 'figure-1'. The experiments are glyphs, bridge-fig1, ...
    """
    if name not in EXPERIMENTS:
        raise InputError(f"there is no experiment '{name}'. The experiments are {', '.join(EXPERIMENTS)}.")
    return cast(Experiment, import_module(EXPERIMENTS[name]))
