"""D's appendix A and I: tasks whose mean is not zero, μ* = (1, …, 1), beyond what theorem 1 assumes.

The initial function Bw must then find the mean task B*μ* instead of zero. Both first-order learners are said to
succeed. With infinitely many tasks the limit is the same as without a mean: at Bw = B*μ* the recursion sees the tasks'
deviations from their mean alone, so B*ᵀBBᵀB* goes to Λ* of their covariance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from metabridge.experiments.anil_trainings import METHODS, SETTINGS, Outcome, Record, draw, pictured, row, trained
from metabridge.experiments.linear_anil import Setting
from metabridge.experiments.result import Result, Row, UnportedExperiment, Work

ID = "anil-mean"
LEARNERS = ("fo-anil", "fo-maml", "infinite-tasks")
SHRINKS = "ridge regression shrinks towards zero, not towards the mean task"
QUANTITIES = {
    "start": "squared distance from the mean task, $\\|Bw - B_*\\mu_*\\|^2$",
    "smallest": "least squared singular value of $B_*^T B$",
    "orthogonal_mean": "mean squared singular value of $B_{*\\perp}^T B$",
}


def run(work: Work) -> Outcome:
    """Train both learners and the limit of infinitely many tasks, or read their records."""
    plain = SETTINGS[work.scale]
    setting = replace(plain, mean=(1.0,) * len(plain.variances))
    records = trained(work, setting, LEARNERS)
    return Outcome(Result.of(work, ID, tuple(rows(records, setting, work.scale)), records), records, setting)


def rows(records: Mapping[str, Record], setting: Setting, scale: str) -> list[Row]:
    """Give the distance from the mean, the least singular value beside the limit, and the risks."""
    made = []
    wanted = setting.limit(setting.rates)[0]
    for name, record in records.items():
        near, label = 0.01 if name == "infinite-tasks" else 0.15, METHODS[name]
        first = [values[0] for values in record.curves.values["start"]]
        left = [last / start for last, start in zip(record.final("start"), first)]
        least = record.final("smallest")
        made += [
            row(
                f"{label}, distance from the mean task",
                "‖Bw − B*μ*‖² over that at the start",
                left,
                agrees=max(left) < 0.05 if scale == "paper" else None,
                note="agrees below 5% in every run",
            ),
            row(
                f"{label}, least",
                "squared singular value of B*ᵀB",
                least,
                published=wanted,
                agrees=abs(sum(least) / len(least) - wanted) <= near * wanted if scale == "paper" else None,
                note=f"beside the limit; agrees within {near:.0%}",
            ),
            *(
                row(f"{label}, {key}", "excess risk", values, note=SHRINKS if key.startswith("ridge") else "")
                for key, values in record.risks.items()
            ),
        ]
    return made


def figure(outcome: Outcome, file: Path) -> None:
    """Draw what is learned and what is unlearned over training."""
    from metabridge.report import figures

    setting = outcome.setting
    with figures.LIGHT.context():
        picture, panels = pictured(outcome, f"{setting.tasks} tasks whose mean is not zero", 3)
        for axes, (quantity, told) in zip(panels, QUANTITIES.items()):
            draw(axes, outcome.records, quantity)
            axes.set(ylabel=told)
        panels[0].set(yscale="log")
        panels[1].axhline(
            setting.limit(setting.rates)[0], color="grey", linestyle=":", label="the limit Λ*, infinite tasks"
        )
        picture.legend(*panels[1].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figures.save(picture, file)


EXPERIMENT = UnportedExperiment("anil-mean", run, figure, resumable=True)
