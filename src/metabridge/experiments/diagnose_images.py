"""Whether a diagnosis ranks real tasks like Collins et al. (2022, §5), and methods like trained networks.

On characters, hard tasks from alphabets that are alike ("small r_H") must predict a larger gain of adaptation than hard
tasks from many alphabets ("large r_H"), as in table 1 of the paper. Each seed has a new untrained network, which also
determines which alphabets are hard. On glyphs, small networks are trained in both settings to measure the gain of MAML
over NAL. If the results of the experiments glyphs and kernel-fewshot are in the folder, the predicted order of methods
is compared with their accuracies.
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
from metabridge.experiments.landscape_table1 import ALIKE, QUERIES, WAYS, alphabets
from metabridge.experiments.landscape_trainings import AccuracyRecord, NetTraining, PlannedTraining, train_all
from metabridge.experiments.method_orders import MethodOrder, draw_orders, predicted_orders
from metabridge.report.results import Result, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CLAIM = "Collins et al. 2022, §5: adaptation gains more where hard tasks are alike"
HARD_ALPHABETS = 10  # with the lowest rates, as many as in the paper
R_H = {"small": "hard tasks of 2 alphabets", "large": f"hard tasks of {HARD_ALPHABETS} alphabets"}
LEARNERS = ("nal", "maml")


@dataclass(frozen=True)
class Settings:
    """Numbers of tasks and seeds, and how networks are trained."""

    tasks: int  # in a diagnosis
    ranking: int  # tasks that rank an alphabet
    seeds: int
    training: NetTraining


SETTINGS = {
    "quick": Settings(128, 6, 1, NetTraining("maml", 1e-3, iterations=40, batch_size=4, test_tasks=100, filters=16)),
    "paper": Settings(256, 12, 3, NetTraining("maml", 1e-3, iterations=300, batch_size=4, test_tasks=400, filters=32)),
}


@dataclass(frozen=True)
class Case:
    """One seed of one data set: the hard and easy alphabets, and the diagnoses for small and large r_H."""

    data: str
    seed: int
    hard: Mapping[str, Sequence[str]]
    easy: Sequence[str]
    diagnoses: Mapping[str, Diagnosis]


Gains = Mapping[tuple[str, int, str], Interval]  # by data set, seed and r_H


@dataclass(frozen=True)
class Measurements:
    """The diagnoses and how long they took, the records of trainings, and the orders of methods."""

    cases: tuple[Case, ...]
    orders: tuple[MethodOrder, ...]
    seconds: float
    records: Mapping[tuple[int, str, str], AccuracyRecord]  # by seed, r_H and learner

    @property
    def gains(self) -> Gains:
        """How far MAML is above NAL on hard test tasks, in percent, where both are trained."""
        gains = {}
        for seed, setting in dict.fromkeys((seed, setting) for seed, setting, _ in self.records):
            records = [self.records.get((seed, setting, learner)) for learner in LEARNERS]
            nal, maml = (record and record.scores["hard test"] for record in records)
            if nal and maml:
                gain, margin = 100 * (maml.mean - nal.mean), 100 * math.hypot(maml.ci95, nal.ci95)
                gains["glyphs", seed, setting] = Interval(gain, gain - margin, gain + margin)
        return gains


def measure(options: ExperimentOptions) -> Measurements:
    """Diagnose both settings of each data set, compare orders of methods, and train networks on glyphs."""
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
    """Rank the alphabets with a new network, and diagnose tasks with two hard alphabets and with ten."""
    members = {name: classes for name, classes in alphabets(images).items() if len(classes) >= WAYS}
    features, learning_rates = rank_alphabets(images, members, settings.ranking, seed)
    hardest = sorted(members, key=learning_rates.__getitem__)[:HARD_ALPHABETS]
    hard = {"small": list(ALIKE) if set(ALIKE) <= set(members) else hardest[:2], "large": hardest}
    easy = [name for name in members if name not in (*hard["small"], *hardest)]
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


def rank_alphabets(
    images: LabelledImages, members: Mapping[str, torch.Tensor], tasks: int, seed: int
) -> tuple[FeatureMap, dict[str, float]]:
    """Return a new network's features along their principal directions, and the mean rate of each alphabet."""
    by_alphabet = replace(images, splits=dict(members))

    def sample(name: str) -> Episodes:
        environment = by_alphabet.tasks(name, ways=WAYS, queries=QUERIES)
        return environment.sample(tasks, torch.Generator().manual_seed(seed))

    space = FeatureSpace.for_tasks([sample(name) for name in members], untrained_network(images, seed=seed), None)
    mean_rates = {name: float(convergence_rates(space.moments(sample(name))).log().mean().exp()) for name in members}
    return lambda x: space.project(space.features(x).double().cpu()), mean_rates


def hard_and_easy_tasks(
    images: LabelledImages, hard: Sequence[str], easy: Sequence[str]
) -> tuple[ImageTasks, ImageTasks]:
    """Return tasks within single hard alphabets, and tasks across the easy ones."""
    members = alphabets(images)
    splits = {kind: torch.cat([members[name] for name in names]) for kind, names in (("hard", hard), ("easy", easy))}
    split_images = replace(images, splits=splits)
    return (
        split_images.tasks("hard", ways=WAYS, queries=QUERIES, superclass="same"),
        split_images.tasks("easy", ways=WAYS, queries=QUERIES, superclass="different"),
    )


def train_case(
    options: ExperimentOptions, settings: Settings, case: Case, images: LabelledImages
) -> dict[tuple[int, str, str], AccuracyRecord]:
    """Train on every second alphabet of each setting and test on the others; return the finished records."""
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
    """Give the diagnoses, whether they rank small and large r_H like the paper, and the orders of methods."""
    for name in dict.fromkeys(case.data for case in data.cases):
        yield from dataset_rows(name, [case for case in data.cases if case.data == name], data.gains)
    yield from (order.row() for order in data.orders)
    if data.orders:
        right = [pair for order in data.orders for pair in order.pairs_right]
        note = f"{sum(right)} of {len(right)} pairs in {len(data.orders)} orders"
        yield Row("order of methods, all", "pairs right %", ours=100 * sum(right) / len(right), note=note)


def dataset_rows(name: str, cases: Sequence[Case], gains: Gains) -> Iterator[Row]:
    """Give the diagnoses of one data set, the gains of trained MAML, and whether both rank small above large r_H."""

    def ranking(quantity: str, right: Sequence[bool], note: str = "") -> Row:
        share, note = 100 * sum(right) / len(right), f"{sum(right)} of {len(right)} seeds{note}; {CLAIM}"
        return Row(f"{name}, small r_H above large by {quantity}", "seeds %", ours=share, agrees=all(right), note=note)

    for case in cases:
        for setting in R_H:
            diagnosis = case.diagnoses[setting]
            percent = [100 * (end - 1) for end in (diagnosis.ratio.value, diagnosis.ratio.low, diagnosis.ratio.high)]
            note = f"95 % interval {percent[1]:.3f} to {percent[2]:.3f}; R {diagnosis.distance:.3g}"
            note += f", r_H {diagnosis.groups[0].dispersion:.3g}"
            if diagnosis.ratio_limit is not None:
                note += f", 1 + R²/r_H {diagnosis.ratio_limit:.3g}"
            yield Row(f"{name}, {setting} r_H, seed {case.seed}", "predicted ratio − 1, %", ours=percent[0], note=note)
    pairs = [(case.diagnoses["small"], case.diagnoses["large"]) for case in cases]
    overlaps = sum(small.ratio.overlaps(large.ratio) for small, large in pairs)
    by_ratio = [small.ratio.value > large.ratio.value for small, large in pairs]
    yield ranking("predicted ratio", by_ratio, f"; intervals overlap in {overlaps}")
    yield ranking("1 + R²/r_H", [small.gains_more_than(large) for small, large in pairs])
    for setting in R_H:
        of_setting = [gains[name, case.seed, setting] for case in cases if (name, case.seed, setting) in gains]
        if of_setting:
            mean = sum(gain.value for gain in of_setting) / len(of_setting)
            ci95 = math.hypot(*(gain.high - gain.value for gain in of_setting)) / len(of_setting)
            note = f"by seed {', '.join(f'{gain.value:.1f}' for gain in of_setting)}; interval over tasks"
            label = f"{name}, {setting} r_H, trained MAML above NAL on hard tasks"
            yield Row(label, "accuracy %", ours=mean, ci95=ci95, note=note)
    both = [(gains.get((name, case.seed, "small")), gains.get((name, case.seed, "large"))) for case in cases]
    right = [small.value > large.value for small, large in both if small and large]
    if right:
        yield ranking("what trained MAML gains", right)


def figure(outcome: Outcome[Measurements]) -> Figure:
    """Draw both settings as predicted and as trained, and how well the orders of methods agree."""
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
    height = (len(panels) + 1) // 2
    figure = Figure(figsize=(10.8, 4.2 * height), layout="constrained")
    for number, draw in enumerate(panels, start=1):
        draw(figure.add_subplot(height, 2, number))
    return figure


def draw_ratios(axes: Axes, cases: Sequence[Case]) -> None:
    """Draw the predicted ratios minus 1, in percent."""
    values = {}
    for case in cases:
        for setting, diagnosis in case.diagnoses.items():
            ends = (diagnosis.ratio.value, diagnosis.ratio.low, diagnosis.ratio.high)
            values[case.data, case.seed, setting] = Interval(*(100 * (end - 1) for end in ends))
    _draw_intervals(axes, values)
    axes.set(title="predicted: a step of an untrained net's features", ylim=(0, None))
    axes.set_ylabel("risk of plain pre-training above MAML's, %")


def draw_gains(axes: Axes, gains: Gains) -> None:
    """Draw the gains of trained MAML over trained NAL."""
    _draw_intervals(axes, gains)
    axes.axhline(0, color="gray", linewidth=0.8)
    axes.set(title="trained: small nets, test tasks within a hard alphabet")
    axes.set_ylabel("accuracy of MAML above NAL's, %")


def _draw_intervals(axes: Axes, values: Gains) -> None:
    """Draw a value with its interval for each data set, seed and setting, the settings of a seed side by side."""
    from metabridge.report.figures import COLORS

    columns = list(dict.fromkeys((data, seed) for data, seed, _ in values))
    for setting, color, marker, shift in zip(R_H, COLORS, "ox", (-0.1, 0.1)):
        intervals = {
            columns.index((data, seed)) + shift: value
            for (data, seed, kind), value in values.items()
            if kind == setting
        }
        if intervals:
            means = [interval.value for interval in intervals.values()]
            below = [interval.value - interval.low for interval in intervals.values()]
            above = [interval.high - interval.value for interval in intervals.values()]
            margins = [below, above]
            axes.errorbar(list(intervals), means, margins, fmt=marker, color=color, capsize=3, label=R_H[setting])
    axes.set_xticks(range(len(columns)), [f"{data}\nseed {seed}" for data, seed in columns], fontsize=8)
    axes.set_xlim(-0.6, len(columns) - 0.4)
    axes.legend(fontsize=8)


def draw_distances(axes: Axes, cases: Sequence[Case]) -> None:
    """Draw the squared distance between hard and easy tasks against the dispersion of the hard ones."""
    from metabridge.report.figures import COLORS

    for i, data in enumerate(dict.fromkeys(case.data for case in cases)):
        for setting, color, marker in zip(R_H, COLORS[2 * i :], "ox"):
            diagnoses = [case.diagnoses[setting] for case in cases if case.data == data]
            dispersions = [1000 * diagnosis.groups[0].dispersion for diagnosis in diagnoses]
            distances = [1000 * diagnosis.distance**2 for diagnosis in diagnoses]
            axes.plot(dispersions, distances, marker, color=color, label=f"{data}, {R_H[setting]}")
    axes.margins(0.15)
    axes.set(xlim=(0, None), ylim=(0, None), title="predicted: positions of solutions, one mark per seed")
    axes.set_xlabel("dispersion $r_H$ of the hard tasks' solutions, thousandths")
    axes.set_ylabel("$R^2$ between the centers of the groups, thousandths")
    axes.legend(fontsize=8)


class DiagnosisExperiment(Experiment[Measurements]):
    """An experiment whose time includes that of its trainings, which may have run earlier."""

    resumable: ClassVar[bool] = True

    def result(self, data: Measurements, options: ExperimentOptions, seconds: float) -> Result:
        """Return the result, with the hard alphabets of each seed in its settings."""
        seconds = data.seconds + 60 * sum(record.minutes for record in data.records.values())
        result = super().result(data, options, seconds)
        hard = {f"{case.data}, seed {case.seed}": dict(case.hard) for case in data.cases}
        return replace(result, settings={**result.settings, "hard alphabets": hard})


EXPERIMENT = DiagnosisExperiment("diagnose-images", measure, rows, figure, SETTINGS)
