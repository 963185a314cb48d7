"""D's figure 2: how the shared representation is learned, by the squared singular values of B*ᵀB over training.

Theorem 1 says where they go with infinitely many tasks: to the eigenvalues of Λ*. With infinitely many points in
every task they go to 1/α. The paper draws its figure and prints no numbers; these limits stand in their place.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from metabridge.experiments.anil_trainings import METHODS, SETTINGS, Outcome, Record, draw, pictured, row, trained
from metabridge.experiments.linear_anil import Setting
from metabridge.experiments.result import Result, Row, UnportedExperiment, Work

ID = "anil-fig2"
KINDS = {"smallest": "least", "largest": "largest"}  # of the squared singular values

# How near to the limit counts as agreeing. Theorem 1 holds for infinitely many tasks; for 5000 the paper says that
# both learners come close to it.
NEAR = {"infinite-tasks": 0.01, "infinite-samples": 0.01, "fo-anil": 0.1, "fo-maml": 0.1}


def run(work: Work) -> Outcome:
    """Train every method, or read its record."""
    setting = SETTINGS[work.scale]
    records = trained(work, setting)
    return Outcome(Result.of(work, ID, tuple(rows(records, setting, work.scale)), records), records, setting)


def rows(records: Mapping[str, Record], setting: Setting, scale: str) -> list[Row]:
    """Give the extreme squared singular values at the end of training, beside those of the limit."""
    made = []
    for name, record in records.items():
        limits = setting.limit(setting.unlimited if name == "infinite-samples" else setting.rates)
        for (quantity, told), wanted in zip(KINDS.items(), limits):
            values = record.final(quantity)
            near, ours = NEAR.get(name), sum(values) / len(values)
            made.append(
                row(
                    f"{METHODS[name]}, {told}",
                    "squared singular value of B*ᵀB",
                    values,
                    published=None if near is None else wanted,
                    agrees=abs(ours - wanted) <= near * wanted if near is not None and scale == "paper" else None,
                    note="no limit is known" if near is None else f"beside the limit; agrees within {near:.0%}",
                )
            )
    return made


def figure(outcome: Outcome, file: Path) -> None:
    """Draw the least and the largest squared singular value over training."""
    from metabridge.report import figures

    setting = outcome.setting
    with figures.LIGHT.context():
        picture, panels = pictured(outcome, f"Learning the shared representation B* of {setting.tasks} tasks", 2)
        for axes, (quantity, told), wanted in zip(panels, KINDS.items(), setting.limit(setting.rates)):
            draw(axes, outcome.records, quantity)
            axes.axhline(wanted, color="grey", linestyle=":", label="theorem 1's limit Λ*, infinite tasks")
            axes.set(ylabel=f"{told} squared singular value of $B_*^T B$", ylim=(0, None))
        picture.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figures.save(picture, file)


EXPERIMENT = UnportedExperiment("anil-fig2", run, figure, resumable=True)
