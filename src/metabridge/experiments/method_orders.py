"""Compare the order of methods that a diagnosis predicts with the accuracies of networks from other experiments."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from scipy import stats

from metabridge.diagnosis import Diagnosis, diagnose, untrained_network
from metabridge.environments import LabeledImages
from metabridge.experiments.kernel_fewshot import SIZE
from metabridge.kernels import fully_connected_kernel
from metabridge.report.results import Result, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Methods that do not adapt in training. The formulas predict one score for all of them and one for all other methods.
METHODS_WITHOUT_ADAPTATION = ("rfs", "mtl")
METHODS = (*METHODS_WITHOUT_ADAPTATION, "anil", "maml")
KERNEL = fully_connected_kernel(depth=3, bias_variance=0.1)
QUERIES = 10


@dataclass(frozen=True)
class MethodOrder:
    """Predicted scores of methods (higher is better), and the accuracies of networks trained with these methods."""

    nets: str  # label of the trained networks
    source: str  # what predicts the scores: "formulas" or "kernels"
    predicted_scores: Mapping[str, float]
    accuracies: Mapping[str, float]

    @property
    def tau(self) -> float:
        """Kendall's τ-b between the predicted scores and the accuracies."""
        accuracies = [self.accuracies[name] for name in self.predicted_scores]
        return float(stats.kendalltau(list(self.predicted_scores.values()), accuracies).statistic)

    @property
    def pairs_right(self) -> list[bool]:
        """Whether the prediction ranks a pair of methods correctly, for each pair with different predicted scores."""
        scores, accuracies = self.predicted_scores, self.accuracies
        return [
            (scores[a] > scores[b]) == (accuracies[a] > accuracies[b])
            for a, b in combinations(scores, 2)
            if scores[a] != scores[b]
        ]

    def row(self) -> Row:
        """Return a row with Kendall's τ. Its note contains both orders."""
        right, wrong = self.pairs_right.count(True), self.pairs_right.count(False)
        accuracies = ", ".join(f"{name} {self.accuracies[name]:.1f}" for name in _best_first(self.accuracies))
        note = f"{right} pairs right, {wrong} wrong; predicted {self}; trained {accuracies}"
        return Row(f"order of methods by {self.source}, {self.nets}", "Kendall's τ", ours=self.tau, note=note)

    def __str__(self) -> str:
        """Return the predicted order, best first."""
        names = _best_first(self.predicted_scores)
        scores = [self.predicted_scores[name] for name in names]
        signs = [" = " if a == b else " > " for a, b in pairwise(scores)]
        return "".join(name + sign for name, sign in zip(names, [*signs, ""]))


def predicted_orders(
    folder: Path, images: Mapping[str, LabeledImages], *, tasks: int, seed: int
) -> Iterator[MethodOrder]:
    """Yield the orders that formulas and kernels predict, for all networks with results in `folder`."""
    diagnoses: dict[tuple[str, int], Diagnosis] = {}
    for nets, data, shots, accuracies in _trained_methods(folder):
        if data not in images:
            continue
        if (data, shots) not in diagnoses:
            environment = images[data].tasks("train", shots=shots, queries=QUERIES)
            net = untrained_network(images[data], seed=seed)
            diagnoses[data, shots] = diagnose(environment, net, kernel=KERNEL, tasks=tasks, seed=seed)
        diagnosis = diagnoses[data, shots]
        formula_scores = {  # 1 if recommended, otherwise 0; all are 1 if the diagnosis is undecided
            method: float((method in METHODS_WITHOUT_ADAPTATION) != diagnosis.advice.adapts) for method in accuracies
        }
        yield MethodOrder(nets, "formulas", formula_scores, accuracies)
        kernel_gains = {
            prediction.method: prediction.gain
            for prediction in diagnosis.kernel_predictions
            if prediction.method in accuracies
        }
        yield MethodOrder(nets, "kernels", kernel_gains, accuracies)


def _trained_methods(folder: Path) -> Iterator[tuple[str, str, int, dict[str, float]]]:
    """Yield the label, data set, number of shots and accuracies by method of each network in other experiments."""
    if (folder / "glyphs.json").exists():
        rows = {row.name: row.ours for row in Result.read(folder / "glyphs.json").rows}
        accuracies = {method: rows[f"{method}, test tasks"] for method in METHODS if f"{method}, test tasks" in rows}
        yield "glyphs, 1-shot, conv4 net", "glyphs", 1, accuracies
    if (folder / "kernel-fewshot.json").exists():
        accuracies_of_nets: dict[tuple[str, str, int], dict[str, float]] = {}
        for row in Result.read(folder / "kernel-fewshot.json").rows:
            match = re.fullmatch(r"((\w+), (\d)-shot, \w+ net) (\w+), fresh tasks", row.name)
            if match:
                net = (match[1], match[2], int(match[3]))
                accuracies_of_nets.setdefault(net, {})[match[4].lower()] = row.ours
        for (label, data, shots), accuracies in accuracies_of_nets.items():
            yield f"{label} at {SIZE} px", data, shots, accuracies


def _best_first(scores: Mapping[str, float]) -> list[str]:
    return sorted(scores, key=lambda name: -scores[name])


def order_rows(orders: Sequence[MethodOrder]) -> Iterator[Row]:
    """Yield a row for each order, and a row with the percentage of all pairs of methods that are ranked correctly."""
    yield from (order.row() for order in orders)
    if orders:
        pairs_right = [is_right for order in orders for is_right in order.pairs_right]
        note = f"{sum(pairs_right)} of {len(pairs_right)} pairs in {len(orders)} orders"
        yield Row.share("order of methods, all", "pairs right %", pairs_right, note=note)


def draw_orders(axes: Axes, orders: Sequence[MethodOrder]) -> None:
    """Draw Kendall's τ of predicted scores and trained accuracies, and the number of pairs ranked correctly."""
    from metabridge.report.result_figures import draw_rank_agreement

    agreement: dict[str, dict[str, tuple[float, str]]] = {"predicted by formulas": {}, "predicted by kernels": {}}
    for order in orders:
        text = f"{sum(order.pairs_right)}/{len(order.pairs_right)}"
        agreement[f"predicted by {order.source}"][order.nets] = (order.tau, text)
    draw_rank_agreement(axes, agreement)
    axes.set(title="order of methods: predicted and trained")
    axes.set_xlabel("Kendall's τ (at the margin: correctly ordered pairs)")
