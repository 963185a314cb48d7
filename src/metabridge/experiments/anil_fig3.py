"""D's figure 3: how what is not shared is unlearned, by the squared singular values of B*⊥ᵀB over training.

With infinitely many tasks of finitely many points they fall to zero, no slower than in proportion to 1/t (D app. H).
With infinitely many points nothing is unlearned, and Burer–Monteiro's even grow. The paper prints no numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from metabridge.experiments.anil_trainings import METHODS, SETTINGS, Outcome, Record, draw, pictured, row, trained
from metabridge.experiments.linear_anil import Setting
from metabridge.experiments.result import Result, Row, UnportedExperiment, Work
from metabridge.theory.anil import unlearning_bound

ID = "anil-fig3"
KINDS = {"orthogonal_mean": "mean", "orthogonal_largest": "largest"}  # of the squared singular values
METRIC = "squared singular value of B*⊥ᵀB"


def run(work: Work) -> Outcome:
    """Train every method, or read its record."""
    setting = SETTINGS[work.scale]
    records = trained(work, setting)
    return Outcome(Result.of(work, ID, tuple(rows(records, setting, work.scale)), records), records, setting)


def bound(setting: Setting, steps: list[int]) -> list[float]:
    """Return the bound on the largest squared singular value, from the start I/4α on."""
    total = sum(setting.variances) + setting.noise
    values: list[float] = unlearning_bound(0.25 / setting.alpha, torch.tensor(steps), total, setting.rates).tolist()
    return values


def rows(records: Mapping[str, Record], setting: Setting, scale: str) -> list[Row]:
    """Give the squared singular values at the end of training, and whether they do what the paper says."""
    made = []
    for name, record in records.items():
        for quantity, told in KINDS.items():
            holds, note = claim(name, record, quantity, setting)
            agrees = holds if scale == "paper" or name not in ("fo-anil", "fo-maml") else None
            made.append(row(f"{METHODS[name]}, {told}", METRIC, record.final(quantity), agrees=agrees, note=note))
    return made


def claim(name: str, record: Record, quantity: str, setting: Setting) -> tuple[bool, str]:
    """Return whether all runs do what the paper says of a method, and what that is."""
    curves = record.curves.values[quantity]
    if name == "infinite-tasks":
        limits = bound(setting, record.curves.steps)
        below = all(value <= 1.000001 * most for curve in curves for value, most in zip(curve, limits))
        return below, f"agrees if it never exceeds the bound of app. H, at the end {limits[-1]:.3g}"
    if name == "infinite-samples":
        return all(abs(curve[-1] / curve[0] - 1) <= 0.01 for curve in curves), "agrees if it stays constant within 1%"
    if name == "burer-monteiro":
        return all(max(curve) > curve[0] for curve in curves), "agrees if it grows beyond its start"
    return all(curve[-1] < curve[0] for curve in curves), "agrees if it falls below its start"


def figure(outcome: Outcome, file: Path) -> None:
    """Draw the mean and the largest squared singular value over training."""
    from metabridge.report import figures

    setting = outcome.setting
    with figures.LIGHT.context():
        picture, panels = pictured(outcome, f"Unlearning what {setting.tasks} tasks do not share", 2, sharey=True)
        share = list(range(101))
        limits = bound(setting, [setting.steps * percent // 100 for percent in share])
        for axes, (quantity, told) in zip(panels, KINDS.items()):
            draw(axes, outcome.records, quantity)
            axes.plot(share, limits, ":", color="grey", label="bound of app. H, infinite tasks")
            axes.set(ylabel=f"{told} squared singular value of $B_{{*\\perp}}^T B$")
        panels[0].set_ylim(bottom=0)
        picture.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figures.save(picture, file)


EXPERIMENT = UnportedExperiment("anil-fig3", run, figure, resumable=True)
