"""Check whether a diagnosis ranks tasks as in Collins et al. (2022, section 5), and methods as their accuracies do.

r_H is the dispersion of the solutions of the hard tasks. If all hard tasks are from two similar alphabets ("small
r_H"), the diagnosis must predict a larger gain of adaptation than if they are from ten alphabets ("large r_H"), as in
table 1 of the paper. Each seed has a new untrained network, whose features also determine which alphabets are hard. On
glyphs, small networks are trained in both settings to measure how much more accurate MAML is than NAL. If the output
folder contains the results of the experiments glyphs and kernel-fewshot, the predicted order of methods is compared
with the order of these accuracies.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from metabridge.datasets import load
from metabridge.diagnosis import Diagnosis, Interval, diagnose, untrained_network
from metabridge.diagnosis.feature_space import FeatureSpace
from metabridge.diagnosis.moments import FeatureMap, convergence_rates
from metabridge.environments import LabelledImages
from metabridge.environments.image_tasks import ImageTasks
from metabridge.environments.mixture import Mixture
from metabridge.episodes import Episodes
from metabridge.experiments.experiment import Experiment, ExperimentOptions, Outcome
from metabridge.experiments.landscape_table1 import QUERIES, SIMILAR_ALPHABETS, WAYS, alphabets
from metabridge.experiments.landscape_trainings import AccuracyRecord, NetTraining, PlannedTraining, train_all
from metabridge.experiments.method_orders import MethodOrder, draw_orders, predicted_orders
from metabridge.report.results import Result, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CLAIM = "Collins et al. 2022, §5: adaptation gains more where hard tasks are alike"
HARD_ALPHABETS = 10  # number of alphabets with the lowest convergence rates that are hard, as in the paper
R_H = {"small": "hard tasks of 2 alphabets", "large": f"hard tasks of {HARD_ALPHABETS} alphabets"}
LEARNERS = ("nal", "maml")


@dataclass(frozen=True)
class Settings:
    """Numbers of tasks and seeds, and how networks are trained."""

    tasks: int  # tasks per diagnosis
    ranking: int  # tasks per alphabet to rank the alphabets
    seeds: int
    training: NetTraining


SETTINGS = {
    "quick": Settings(128, 6, 1, NetTraining("maml", 1e-3, iterations=40, batch_size=4, test_tasks=100, filters=16)),
    "paper": Settings(256, 12, 3, NetTraining("maml", 1e-3, iterations=300, batch_size=4, test_tasks=400, filters=32)),
}


@dataclass(frozen=True)
class Case:
    """One seed of one data set: the hard alphabets and the diagnoses by setting of r_H, and the easy alphabets."""

    data: str
    seed: int
    hard: Mapping[str, Sequence[str]]
    easy: Sequence[str]
    diagnoses: Mapping[str, Diagnosis]


Gains = Mapping[tuple[str, int, str], Interval]  # by data set, seed and setting of r_H


@dataclass(frozen=True)
class Measurements:
    """The diagnoses and their duration, the records of training runs, and the orders of methods."""

    cases: tuple[Case, ...]
    orders: tuple[MethodOrder, ...]
    seconds: float
    records: Mapping[tuple[int, str, str], AccuracyRecord]  # by seed, setting of r_H and learner

    @property
    def gains(self) -> Gains:
        """The accuracy of MAML minus NAL on hard test tasks, in percentage points, where both are trained."""
        gains = {}
        for seed, setting in dict.fromkeys((seed, setting) for seed, setting, _ in self.records):
            records = [self.records.get((seed, setting, learner)) for learner in LEARNERS]
            nal, maml = (record and record.scores["hard test"] for record in records)
            if nal and maml:
                gain, margin = 100 * (maml.mean - nal.mean), 100 * math.hypot(maml.ci95, nal.ci95)
                gains["glyphs", seed, setting] = Interval(gain, gain - margin, gain + margin)
        return gains


def measure(options: ExperimentOptions) -> Measurements:
    """Diagnose both settings of r_H on each data set, predict orders of methods, and train networks on glyphs."""
    options.check_only([f"{setting}-{learner}" for setting in R_H for learner in LEARNERS])
    settings, started = SETTINGS[options.scale], time.perf_counter()
    datasets = {"glyphs": load("glyphs")}
    if options.scale == "paper" and options.data is not None and (options.data / "omniglot").exists():
        datasets["omniglot"] = load("omniglot", options.data / "omniglot")
    datasets = {name: images.to(options.device) for name, images in datasets.items()}
    seeds = range(options.seed, options.seed + settings.seeds)
    cases = tuple(diagnose_case(name, images, settings, seed) for name, images in datasets.items() for seed in seeds)
    orders = tuple(predicted_orders(options.out, datasets, tasks=settings.tasks // 2, seed=options.seed))
    seconds = time.perf_counter() - started
    records: dict[tuple[int, str, str], AccuracyRecord] = {}
    for case in cases:
        if case.data == "glyphs":
            records |= train_case(options, settings, case, datasets["glyphs"])
    return Measurements(cases, orders, seconds, records)


def diagnose_case(data: str, images: LabelledImages, settings: Settings, seed: int) -> Case:
    """Rank the alphabets with a new network, and diagnose tasks with two and with ten hard alphabets."""
    classes_by_alphabet = {name: classes for name, classes in alphabets(images).items() if len(classes) >= WAYS}
    features, rates = alphabet_rates(images, classes_by_alphabet, settings.ranking, seed)
    hardest = sorted(rates, key=rates.__getitem__)[:HARD_ALPHABETS]
    similar = list(SIMILAR_ALPHABETS) if set(SIMILAR_ALPHABETS) <= set(rates) else hardest[:2]
    hard = {"small": similar, "large": hardest}
    easy = [name for name in rates if name not in (*similar, *hardest)]
    diagnoses = {
        setting: diagnose(
            Mixture(hard_and_easy_tasks(images, hard[setting], easy), (0.5, 0.5)),
            features=features,
            groups="parts",
            tasks=settings.tasks,
            seed=seed,
        )
        for setting in R_H
    }
    return Case(data, seed, hard, easy, diagnoses)


def alphabet_rates(
    images: LabelledImages, classes_by_alphabet: Mapping[str, torch.Tensor], tasks: int, seed: int
) -> tuple[FeatureMap, dict[str, float]]:
    """Return a new network's features in principal coordinates, and the mean convergence rate of each alphabet."""
    split_images = replace(images, splits=dict(classes_by_alphabet))

    def sample(name: str) -> Episodes:
        environment = split_images.tasks(name, ways=WAYS, queries=QUERIES)
        return environment.sample(tasks, torch.Generator().manual_seed(seed))

    samples = {name: sample(name) for name in classes_by_alphabet}
    space = FeatureSpace.for_tasks(list(samples.values()), untrained_network(images, seed=seed), None)
    mean_rates = {
        name: float(convergence_rates(space.moments(episodes)).log().mean().exp()) for name, episodes in samples.items()
    }
    return lambda x: space.project(space.features(x).double().cpu()), mean_rates


def hard_and_easy_tasks(
    images: LabelledImages, hard: Sequence[str], easy: Sequence[str]
) -> tuple[ImageTasks, ImageTasks]:
    """Return tasks within single hard alphabets, and tasks across the easy alphabets."""
    classes = alphabets(images)
    splits = {
        "hard": torch.cat([classes[name] for name in hard]),
        "easy": torch.cat([classes[name] for name in easy]),
    }
    split_images = replace(images, splits=splits)
    return (
        split_images.tasks("hard", ways=WAYS, queries=QUERIES, superclass="same"),
        split_images.tasks("easy", ways=WAYS, queries=QUERIES, superclass="different"),
    )


def train_case(
    options: ExperimentOptions, settings: Settings, case: Case, images: LabelledImages
) -> dict[tuple[int, str, str], AccuracyRecord]:
    """Train on every second alphabet of each setting and test on the others. Return the finished records."""
    planned = {}
    for setting in R_H:
        train, test = (hard_and_easy_tasks(images, case.hard[setting][i::2], case.easy[i::2]) for i in (0, 1))
        test_tasks = {"hard test": test[0], "easy test": test[1]}
        description = {"hard": case.hard[setting], "easy": case.easy, "ways": WAYS, "shots": 1, "queries": QUERIES}
        for learner in LEARNERS:
            training = replace(settings.training, method=learner, seed=case.seed)
            planned[case.seed, setting, learner] = PlannedTraining(
                f"{setting}-{learner}", training, Mixture(train, (0.5, 0.5)), test_tasks, description
            )
    records = train_all(options, EXPERIMENT.id, images, list(planned.values()))
    return {key: record for key, record in zip(planned, records) if record is not None}


def rows(data: Measurements, _: ExperimentOptions) -> Iterator[Row]:
    """Yield the rows of the diagnoses, of their agreement with the paper, and of the orders of methods."""
    for name in dict.fromkeys(case.data for case in data.cases):
        yield from dataset_rows(name, [case for case in data.cases if case.data == name], data.gains)
    yield from (order.row() for order in data.orders)
    if data.orders:
        pairs_right = [is_right for order in data.orders for is_right in order.pairs_right]
        note = f"{sum(pairs_right)} of {len(pairs_right)} pairs in {len(data.orders)} orders"
        percent = 100 * sum(pairs_right) / len(pairs_right)
        yield Row("order of methods, all", "pairs right %", ours=percent, note=note)


def dataset_rows(name: str, cases: Sequence[Case], gains: Gains) -> Iterator[Row]:
    """Yield the diagnoses of one data set, the gains of trained MAML, and whether both rank small above large r_H."""

    def ranking_row(quantity: str, is_ranked: Sequence[bool], note: str = "") -> Row:
        """Return the percentage of seeds that rank small above large r_H."""
        percent, note = 100 * sum(is_ranked) / len(is_ranked), f"{sum(is_ranked)} of {len(is_ranked)} seeds{note}"
        label = f"{name}, small r_H above large by {quantity}"
        return Row(label, "seeds %", ours=percent, agrees=all(is_ranked), note=f"{note}; {CLAIM}")

    for case in cases:
        for setting in R_H:
            diagnosis = case.diagnoses[setting]
            excess = excess_percent(diagnosis.ratio)
            note = f"95 % interval {excess.low:.3f} to {excess.high:.3f}; R {diagnosis.distance:.3g}"
            note += f", r_H {diagnosis.groups[0].dispersion:.3g}"
            if diagnosis.ratio_limit is not None:
                note += f", 1 + R²/r_H {diagnosis.ratio_limit:.3g}"
            yield Row(
                f"{name}, {setting} r_H, seed {case.seed}", "predicted ratio − 1, %", ours=excess.value, note=note
            )
    pairs = [(case.diagnoses["small"], case.diagnoses["large"]) for case in cases]
    overlaps = sum(small.ratio.overlaps(large.ratio) for small, large in pairs)
    is_ranked = [small.ratio.value > large.ratio.value for small, large in pairs]
    yield ranking_row("predicted ratio", is_ranked, f"; intervals overlap in {overlaps}")
    yield ranking_row("1 + R²/r_H", [small.gains_more_than(large) for small, large in pairs])
    for setting in R_H:
        seed_gains = [gains[name, case.seed, setting] for case in cases if (name, case.seed, setting) in gains]
        if seed_gains:
            mean = sum(gain.value for gain in seed_gains) / len(seed_gains)
            ci95 = math.hypot(*(gain.high - gain.value for gain in seed_gains)) / len(seed_gains)
            note = f"by seed {', '.join(f'{gain.value:.1f}' for gain in seed_gains)}; interval over tasks"
            label = f"{name}, {setting} r_H, trained MAML above NAL on hard tasks"
            yield Row(label, "accuracy %", ours=mean, ci95=ci95, note=note)
    gain_pairs = [(gains.get((name, case.seed, "small")), gains.get((name, case.seed, "large"))) for case in cases]
    is_ranked = [small.value > large.value for small, large in gain_pairs if small and large]
    if is_ranked:
        yield ranking_row("what trained MAML gains", is_ranked)


def excess_percent(ratio: Interval) -> Interval:
    """Return by how many percent a ratio exceeds 1."""
    return Interval(*(100 * (value - 1) for value in (ratio.value, ratio.low, ratio.high)))


def figure(outcome: Outcome[Measurements]) -> Figure:
    """Draw the predicted and the trained gains in both settings, and the agreement of the orders of methods."""
    from matplotlib.figure import Figure

    data = outcome.data
    panels: list[Callable[[Axes], None]] = [
        lambda axes: draw_ratios(axes, data.cases),
        lambda axes: draw_distances(axes, data.cases),
    ]
    if data.gains:
        panels.append(lambda axes: draw_gains(axes, data.gains))
    if data.orders:
        panels.append(lambda axes: draw_orders(axes, data.orders))
    panel_rows = (len(panels) + 1) // 2
    figure = Figure(figsize=(10.8, 4.2 * panel_rows), layout="constrained")
    for number, draw in enumerate(panels, start=1):
        draw(figure.add_subplot(panel_rows, 2, number))
    return figure


def draw_ratios(axes: Axes, cases: Sequence[Case]) -> None:
    """Draw by how many percent the predicted risk of plain pre-training exceeds that of MAML."""
    values = {
        (case.data, case.seed, setting): excess_percent(diagnosis.ratio)
        for case in cases
        for setting, diagnosis in case.diagnoses.items()
    }
    _draw_intervals(axes, values)
    axes.set(title="predicted for one inner step, features of an untrained net", ylim=(0, None))
    axes.set_ylabel("risk of plain pre-training / risk of MAML − 1, %")


def draw_gains(axes: Axes, gains: Gains) -> None:
    """Draw the accuracy of trained MAML minus that of trained NAL."""
    _draw_intervals(axes, gains)
    axes.axhline(0, color="gray", linewidth=0.8)
    axes.set(title="small trained nets, test tasks within a hard alphabet")
    axes.set_ylabel("accuracy of MAML minus NAL, percentage points")


def _draw_intervals(axes: Axes, values: Gains) -> None:
    """Draw a value with its interval for each data set, seed and setting. Settings of a seed are side by side."""
    from metabridge.report.figures import COLORS

    columns = list(dict.fromkeys((data, seed) for data, seed, _ in values))
    for setting, color, marker, shift in zip(R_H, COLORS, "ox", (-0.1, 0.1)):
        intervals = {
            columns.index((data, seed)) + shift: value
            for (data, seed, value_setting), value in values.items()
            if value_setting == setting
        }
        if intervals:
            means = [interval.value for interval in intervals.values()]
            below = [interval.value - interval.low for interval in intervals.values()]
            above = [interval.high - interval.value for interval in intervals.values()]
            axes.errorbar(
                list(intervals), means, [below, above], fmt=marker, color=color, capsize=3, label=R_H[setting]
            )
    axes.set_xticks(range(len(columns)), [f"{data}\nseed {seed}" for data, seed in columns], fontsize=8)
    axes.set_xlim(-0.6, len(columns) - 0.4)
    axes.legend(fontsize=8)


def draw_distances(axes: Axes, cases: Sequence[Case]) -> None:
    """Draw R², the squared distance between the centers of hard and easy tasks, against r_H."""
    from metabridge.report.figures import COLORS

    for i, data in enumerate(dict.fromkeys(case.data for case in cases)):
        for setting, color, marker in zip(R_H, COLORS[2 * i :], "ox"):
            diagnoses = [case.diagnoses[setting] for case in cases if case.data == data]
            dispersions = [1000 * diagnosis.groups[0].dispersion for diagnosis in diagnoses]
            distances = [1000 * diagnosis.distance**2 for diagnosis in diagnoses]
            axes.plot(dispersions, distances, marker, color=color, label=f"{data}, {R_H[setting]}")
    axes.margins(0.15)
    axes.set(xlim=(0, None), ylim=(0, None), title="solutions of hard and easy tasks, one mark per seed")
    axes.set_xlabel("dispersion $r_H$ of the hard tasks' solutions × 1000")
    axes.set_ylabel("squared distance $R^2$ of the groups' centers × 1000")
    axes.legend(fontsize=8)


class DiagnosisExperiment(Experiment[Measurements]):
    """An experiment whose duration includes that of its training runs, which may have been trained earlier."""

    resumable: ClassVar[bool] = True

    def result(self, data: Measurements, options: ExperimentOptions, seconds: float) -> Result:
        """Return the result, with the hard alphabets of each seed in its settings."""
        seconds = data.seconds + 60 * sum(record.minutes for record in data.records.values())
        result = super().result(data, options, seconds)
        hard = {f"{case.data}, seed {case.seed}": dict(case.hard) for case in data.cases}
        return replace(result, settings={**result.settings, "hard alphabets": hard})


EXPERIMENT = DiagnosisExperiment("diagnose-images", measure, rows, figure, SETTINGS)
