"""Compare the ranking of methods that a diagnosis predicts with the accuracies of networks from other experiments."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from scipy import stats

from metabridge.diagnosis import Diagnosis, diagnose, untrained_network
from metabridge.environments import LabeledImages
from metabridge.experiments.kernel_fewshot import SIZE
from metabridge.experiments.kernel_fewshot_trials import NEW_TASKS
from metabridge.kernels import fully_connected_kernel
from metabridge.report.results import Result, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Methods that do not adapt in training: "rfs" (Tian et al. 2020) and multi-task learning. The formulas predict one
# score for all of them and one for all other methods.
METHODS_WITHOUT_ADAPTATION = ("rfs", "mtl")
METHODS = (*METHODS_WITHOUT_ADAPTATION, "anil", "maml")
KERNEL = fully_connected_kernel(depth=3, bias_variance=0.1)
QUERIES = 10  # query images per class


class TrainedNets(NamedTuple):
    """Networks that another experiment trained on the same tasks, one with each method."""

    label: str
    dataset: str
    shots: int
    accuracies: dict[str, float]  # in percent, by method


@dataclass(frozen=True)
class MethodRanking:
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
    def pair_correctness(self) -> list[bool]:
        """For each pair of methods with different predicted scores: whether their accuracies are in the same order."""
        scores, accuracies = self.predicted_scores, self.accuracies
        return [
            (scores[a] > scores[b]) == (accuracies[a] > accuracies[b])
            for a, b in combinations(scores, 2)
            if scores[a] != scores[b]
        ]

    def row(self) -> Row:
        """Return a row with Kendall's τ. Its note contains the predicted ranking and the accuracies, best first."""
        right, wrong = self.pair_correctness.count(True), self.pair_correctness.count(False)
        accuracies = ", ".join(f"{name} {self.accuracies[name]:.1f}" for name in _best_first(self.accuracies))
        note = f"{right} pairs right, {wrong} wrong; predicted {self}; trained {accuracies}"
        return Row(f"ranking of methods by {self.source}, {self.nets}", "Kendall's τ", ours=self.tau, note=note)

    def __str__(self) -> str:
        """Return the predicted ranking, best first, such as "mtl > anil = maml"."""
        names = _best_first(self.predicted_scores)
        scores = [self.predicted_scores[name] for name in names]
        signs = [" = " if a == b else " > " for a, b in pairwise(scores)]
        return "".join(name + sign for name, sign in zip(names, [*signs, ""]))


def predicted_rankings(
    folder: Path, images: Mapping[str, LabeledImages], *, tasks: int, seed: int
) -> Iterator[MethodRanking]:
    """Yield the rankings that formulas and kernels predict for all networks whose accuracies are stored in `folder`.

    Args:
        folder: Folder with the results of other experiments.
        images: The images, by data set. Networks for other data sets are skipped.
        tasks: Number of tasks for each diagnosis.
        seed: Seed of the diagnoses.
    """
    diagnoses: dict[tuple[str, int], Diagnosis] = {}
    for label, dataset, shots, accuracies in _trained_nets(folder):
        if dataset not in images:
            continue
        if (dataset, shots) not in diagnoses:
            environment = images[dataset].tasks("train", shots=shots, queries=QUERIES)
            net = untrained_network(images[dataset], seed=seed)
            diagnoses[dataset, shots] = diagnose(environment, net, kernel=KERNEL, tasks=tasks, seed=seed)
        diagnosis = diagnoses[dataset, shots]
        formula_scores = {  # 1 if recommended, otherwise 0; all are 1 if the diagnosis is undecided
            method: float((method in METHODS_WITHOUT_ADAPTATION) != diagnosis.advice.adapts) for method in accuracies
        }
        yield MethodRanking(label, "formulas", formula_scores, accuracies)
        kernel_gains = {
            prediction.method: prediction.gain
            for prediction in diagnosis.kernel_predictions
            if prediction.method in accuracies
        }
        yield MethodRanking(label, "kernels", kernel_gains, accuracies)


def _trained_nets(folder: Path) -> Iterator[TrainedNets]:
    """Yield the networks whose accuracies are in `glyphs.json` or `kernel-fewshot.json`, if these files exist."""
    if (folder / "glyphs.json").exists():
        rows = {row.name: row.ours for row in Result.read(folder / "glyphs.json").rows}
        accuracies = {method: rows[f"{method}, test tasks"] for method in METHODS if f"{method}, test tasks" in rows}
        yield TrainedNets("glyphs, 1-shot, conv4 net", "glyphs", 1, accuracies)
    if (folder / "kernel-fewshot.json").exists():
        nets_by_label: dict[str, TrainedNets] = {}
        for row in Result.read(folder / "kernel-fewshot.json").rows:
            match = re.fullmatch(rf"((\w+), (\d)-shot, \w+ net) (\w+), {NEW_TASKS}", row.name)
            if match:
                nets = TrainedNets(f"{match[1]} at {SIZE} px", match[2], int(match[3]), {})
                nets_by_label.setdefault(nets.label, nets).accuracies[match[4].lower()] = row.ours
        yield from nets_by_label.values()


def _best_first(scores: Mapping[str, float]) -> list[str]:
    return sorted(scores, key=lambda name: -scores[name])


def ranking_rows(rankings: Sequence[MethodRanking]) -> Iterator[Row]:
    """Yield a row for each ranking, and one with the percentage of pairs of methods that are ranked correctly."""
    yield from (ranking.row() for ranking in rankings)
    if rankings:
        pair_correctness = [is_correct for ranking in rankings for is_correct in ranking.pair_correctness]
        note = f"{sum(pair_correctness)} of {len(pair_correctness)} pairs in {len(rankings)} rankings"
        yield Row.share("ranking of methods, all", "pairs right %", pair_correctness, note=note)


def draw_rankings(axes: Axes, rankings: Sequence[MethodRanking]) -> None:
    """Draw Kendall's τ of each ranking. Next to it, write its number of correctly ranked pairs, such as 2/3."""
    from metabridge.report.result_figures import draw_rank_agreement

    agreement: dict[str, dict[str, tuple[float, str]]] = {"predicted by formulas": {}, "predicted by kernels": {}}
    for ranking in rankings:
        text = f"{sum(ranking.pair_correctness)}/{len(ranking.pair_correctness)}"
        agreement[f"predicted by {ranking.source}"][ranking.nets] = (ranking.tau, text)
    draw_rank_agreement(axes, agreement)
    axes.set(title="rankings of methods: predicted, and by accuracy of trained nets")
    axes.set_xlabel("Kendall's τ (numbers on the right: correctly ranked pairs / all pairs)")
