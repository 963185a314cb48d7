"""Which methods a diagnosis puts above which, beside the accuracies of nets that other experiments have trained."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from scipy import stats

from metabridge.diagnosis import Diagnosis, diagnose, untrained
from metabridge.environments import LabelledImages
from metabridge.experiments.kernel_fewshot import SIZE
from metabridge.experiments.landscape_table1 import TARGETS
from metabridge.experiments.result import Result, Row
from metabridge.kernels import fully_connected_kernel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLAIN = ("rfs", "mtl")  # methods that do not adapt in training; of two of a kind the formulas say nothing
METHODS = (*PLAIN, "anil", "maml")
KERNEL = fully_connected_kernel(depth=3, bias_variance=0.1)


@dataclass(frozen=True)
class Order:
    """What a source predicts of methods, a larger number for a better one, beside the accuracies of trained nets."""

    nets: str
    source: str
    predicted: Mapping[str, float]
    accuracy: Mapping[str, float]

    @property
    def tau(self) -> float:
        """Kendall's τ-b of the two orders."""
        names = list(self.predicted)
        return float(stats.kendalltau([self.predicted[n] for n in names], [self.accuracy[n] for n in names]).statistic)

    @property
    def sides(self) -> list[bool]:
        """Of every two methods that the prediction tells apart, whether the better one is the more accurate."""
        return [
            (self.predicted[one] > self.predicted[other]) == (self.accuracy[one] > self.accuracy[other])
            for one, other in combinations(self.predicted, 2)
            if self.predicted[one] != self.predicted[other]
        ]

    def row(self) -> Row:
        """Return τ, with both orders."""
        hits = sum(self.sides)
        told = ", ".join(f"{name} {self.accuracy[name]:.1f}" for name in _best_first(self.accuracy))
        note = f"{hits} pairs right, {len(self.sides) - hits} wrong; predicted {self.told()}; trained {told}"
        return Row(f"order of methods by {self.source}, {self.nets}", "Kendall's τ", ours=self.tau, note=note)

    def told(self) -> str:
        """Say the predicted order, the best first."""
        names = _best_first(self.predicted)
        signs = [" = " if self.predicted[a] == self.predicted[b] else " > " for a, b in pairwise(names)]
        return "".join(part for pair in zip(names, [*signs, ""]) for part in pair)


def predicted_orders(folder: Path, data: Mapping[str, LabelledImages], *, tasks: int, seed: int) -> Iterator[Order]:
    """Yield what the formulas and the kernels predict of methods beside every set of trained nets at hand."""
    found: dict[tuple[str, int], Diagnosis] = {}
    for name, source, shots, accuracy in _trained_methods(folder):
        if source not in data:
            continue
        images = data[source]
        if (source, shots) not in found:
            environment, net = images.tasks("train", shots=shots, queries=TARGETS), untrained(images, seed=seed)
            found[source, shots] = diagnose(environment, net, kernel=KERNEL, tasks=tasks, seed=seed)
        diagnosis = found[source, shots]
        formulas = {method: float((method in PLAIN) != diagnosis.advice.adapts) for method in accuracy}
        yield Order(name, "formulas", formulas, accuracy)
        yield Order(name, "kernels", {t.method: t.gain for t in diagnosis.twins if t.method in accuracy}, accuracy)


def _trained_methods(folder: Path) -> Iterator[tuple[str, str, int, dict[str, float]]]:
    """Yield the name, data, shots and accuracies of each set of nets that other experiments have trained."""
    if (folder / "glyphs.json").exists():
        rows = {row.name: row.ours for row in Result.read(folder / "glyphs.json").rows}
        own = {method: rows[f"{method}, test tasks"] for method in METHODS if f"{method}, test tasks" in rows}
        yield "glyphs, 1-shot, conv4 net", "glyphs", 1, own
    if (folder / "kernel-fewshot.json").exists():
        nets: dict[tuple[str, str, int], dict[str, float]] = {}
        for row in Result.read(folder / "kernel-fewshot.json").rows:
            match = re.fullmatch(r"((\w+), (\d)-shot, \w+ net) (\w+), fresh tasks", row.name)
            if match:
                nets.setdefault((match[1], match[2], int(match[3])), {})[match[4].lower()] = row.ours
        for (name, data, shots), own in nets.items():
            yield f"{name} at {SIZE} px", data, shots, own


def _best_first(values: Mapping[str, float]) -> list[str]:
    return sorted(values, key=lambda name: -values[name])


def draw_orders(axes: Axes, orders: Sequence[Order]) -> None:
    """Draw Kendall's τ of every predicted order with the trained one, and how many pairs are right."""
    from metabridge.report.figures import COLOURS

    nets = list(dict.fromkeys(order.nets for order in orders))
    for source, colour, marker, shift in zip(("formulas", "kernels"), COLOURS[2:], "sv", (-0.16, 0.16)):
        own = [order for order in orders if order.source == source]
        ys = [nets.index(order.nets) + shift for order in own]
        axes.plot([order.tau for order in own], ys, marker, color=colour, label=f"predicted by {source}")
        for order, y in zip(own, ys):
            axes.annotate(f"{sum(order.sides)}/{len(order.sides)}", (1.12, y), fontsize=8, color=colour, va="center")
    axes.set(xlim=(-1.1, 1.4), title="order of methods: predicted and trained")
    axes.set_xticks([-1, -0.5, 0, 0.5, 1])
    axes.set_xlabel("Kendall's τ (right: pairs of methods in the right order)")
    axes.set_yticks(range(len(nets)), nets, fontsize=8)
    axes.axvline(0, linewidth=0.8, color="grey")
    axes.invert_yaxis()
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
