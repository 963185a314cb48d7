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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from metabridge.datasets import load
from metabridge.diagnosis import Diagnosis, Interval, diagnose, untrained_network
from metabridge.diagnosis.feature_space import mean_rates
from metabridge.environments import LabeledImages
from metabridge.environments.image_splits import classes_by_superclass
from metabridge.environments.mixture import Mixture
from metabridge.experiments.experiment import Experiment, ExperimentOptions, Outcome
from metabridge.experiments.landscape_table1 import QUERIES, SIMILAR_ALPHABETS, WAYS
from metabridge.experiments.landscape_training_runs import AccuracyRecord, NetTraining, PlannedTraining, train_all
from metabridge.experiments.method_orders import MethodOrder, draw_orders, predicted_orders
from metabridge.report.results import Result, Row

if TYPE_CHECKING:
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
    """One seed of one data set: its alphabets, and the diagnoses and training runs by setting of r_H."""

    data: str
    seed: int
    hard: Mapping[str, Sequence[str]]
    easy: Sequence[str]
    diagnoses: Mapping[str, Diagnosis]
    records: Mapping[tuple[str, str], AccuracyRecord] = field(default_factory=dict)  # by setting of r_H and learner

    def gain(self, setting: str) -> Interval | None:
        """Return the accuracy of MAML minus NAL on hard test tasks, in percentage points, if both are trained."""
        if not all((setting, learner) in self.records for learner in LEARNERS):
            return None
        nal, maml = (self.records[setting, learner].scores["hard test"] for learner in LEARNERS)
        return Interval.symmetric(100 * (maml.mean - nal.mean), 100 * math.hypot(maml.ci95, nal.ci95))


@dataclass(frozen=True)
class Measurements:
    """The cases, the orders of methods, and the time to compute both without training."""

    cases: tuple[Case, ...]
    orders: tuple[MethodOrder, ...]
    seconds: float


def measure(options: ExperimentOptions) -> Measurements:
    """Diagnose both settings of r_H on each data set, predict orders of methods, and train networks on glyphs."""
    options.check_only([f"{setting}-{learner}" for setting in R_H for learner in LEARNERS])
    settings, started = SETTINGS[options.scale], time.perf_counter()
    datasets = {"glyphs": load("glyphs")}
    if options.scale == "paper" and options.data is not None and (options.data / "omniglot").exists():
        datasets["omniglot"] = load("omniglot", options.data / "omniglot")
    datasets = {name: images.to(options.device) for name, images in datasets.items()}
    seeds = range(options.seed, options.seed + settings.seeds)
    cases = [diagnose_case(name, images, settings, seed) for name, images in datasets.items() for seed in seeds]
    orders = tuple(predicted_orders(options.out, datasets, tasks=settings.tasks // 2, seed=options.seed))
    seconds = time.perf_counter() - started
    trained = [
        replace(case, records=train_case(options, settings, case, datasets["glyphs"]))
        if case.data == "glyphs"
        else case
        for case in cases
    ]
    return Measurements(tuple(trained), orders, seconds)


def diagnose_case(data: str, images: LabeledImages, settings: Settings, seed: int) -> Case:
    """Rank the alphabets by convergence rate on a new network, and diagnose tasks with two and with ten hard ones."""
    classes = {name: classes for name, classes in classes_by_superclass(images).items() if len(classes) >= WAYS}
    by_alphabet = replace(images, splits=classes)
    environments = {name: by_alphabet.tasks(name, ways=WAYS, queries=QUERIES) for name in classes}
    space, rates = mean_rates(environments, untrained_network(images, seed=seed), tasks=settings.ranking, seed=seed)
    hardest = sorted(rates, key=rates.__getitem__)[:HARD_ALPHABETS]
    similar = list(SIMILAR_ALPHABETS) if set(SIMILAR_ALPHABETS) <= set(rates) else hardest[:2]
    hard = {"small": similar, "large": hardest}
    easy = [name for name in rates if name not in (*similar, *hardest)]
    diagnoses = {
        setting: diagnose(
            hard_and_easy_tasks(images, hard[setting], easy),
            features=space.coordinates,
            groups="parts",
            tasks=settings.tasks,
            seed=seed,
        )
        for setting in R_H
    }
    return Case(data, seed, hard, easy, diagnoses)


def hard_and_easy_tasks(images: LabeledImages, hard: Sequence[str], easy: Sequence[str]) -> Mixture:
    """Return a mixture of tasks within single hard alphabets and tasks across the easy alphabets."""
    classes = classes_by_superclass(images)
    splits = {kind: torch.cat([classes[name] for name in names]) for kind, names in (("hard", hard), ("easy", easy))}
    split_images = replace(images, splits=splits)
    return Mixture(
        (
            split_images.tasks("hard", ways=WAYS, queries=QUERIES, superclass="same"),
            split_images.tasks("easy", ways=WAYS, queries=QUERIES, superclass="different"),
        ),
        (0.5, 0.5),
    )


def train_case(
    options: ExperimentOptions, settings: Settings, case: Case, images: LabeledImages
) -> dict[tuple[str, str], AccuracyRecord]:
    """Train on every second alphabet of each setting and test on the others. Return the finished records."""
    planned = {}
    for setting in R_H:
        train, test = (hard_and_easy_tasks(images, case.hard[setting][i::2], case.easy[i::2]) for i in (0, 1))
        test_tasks = dict(zip(("hard test", "easy test"), test.environments))
        description = {"hard": case.hard[setting], "easy": case.easy, "ways": WAYS, "shots": 1, "queries": QUERIES}
        for learner in LEARNERS:
            training = replace(settings.training, method=learner, seed=case.seed)
            planned[setting, learner] = PlannedTraining(
                f"{setting}-{learner}", training, train, test_tasks, description
            )
    records = train_all(options, EXPERIMENT.id, images, list(planned.values()))
    return {key: record for key, record in zip(planned, records) if record is not None}


def rows(data: Measurements, _: ExperimentOptions) -> Iterator[Row]:
    """Yield the rows of the diagnoses, of their agreement with the paper, and of the orders of methods."""
    for name in dict.fromkeys(case.data for case in data.cases):
        yield from dataset_rows(name, [case for case in data.cases if case.data == name])
    yield from (order.row() for order in data.orders)
    if data.orders:
        pairs_right = [is_right for order in data.orders for is_right in order.pairs_right]
        note = f"{sum(pairs_right)} of {len(pairs_right)} pairs in {len(data.orders)} orders"
        yield Row.share("order of methods, all", "pairs right %", pairs_right, note=note)


def dataset_rows(name: str, cases: Sequence[Case]) -> Iterator[Row]:
    """Yield the diagnoses of one data set, the gains of trained MAML, and whether both rank small above large r_H."""

    def ranking_row(quantity: str, is_ranked: Sequence[bool], note: str = "") -> Row:
        label = f"{name}, small r_H above large by {quantity}"
        note = f"{sum(is_ranked)} of {len(is_ranked)} seeds{note}; {CLAIM}"
        return Row.share(label, "seeds %", is_ranked, agrees=all(is_ranked), note=note)

    for case in cases:
        for setting, diagnosis in case.diagnoses.items():
            excess = excess_percent(diagnosis.ratio)
            note = f"95 % interval {excess.low:.3f} to {excess.high:.3f}; R {diagnosis.distance:.3g}"
            note += f", r_H {diagnosis.groups[0].dispersion:.3g}"
            if diagnosis.ratio_limit is not None:
                note += f", 1 + R²/r_H {diagnosis.ratio_limit:.3g}"
            label = f"{name}, {setting} r_H, seed {case.seed}"
            yield Row(label, "predicted ratio − 1, %", ours=excess.value, note=note)
    pairs = [(case.diagnoses["small"], case.diagnoses["large"]) for case in cases]
    overlaps = sum(small.ratio.overlaps(large.ratio) for small, large in pairs)
    is_ranked = [small.ratio.value > large.ratio.value for small, large in pairs]
    yield ranking_row("predicted ratio", is_ranked, f"; intervals overlap in {overlaps}")
    yield ranking_row("1 + R²/r_H", [small.gains_more_than(large) for small, large in pairs])
    for setting in R_H:
        gains = [gain for case in cases if (gain := case.gain(setting))]
        if gains:
            mean = sum(gain.value for gain in gains) / len(gains)
            ci95 = math.hypot(*(gain.high - gain.value for gain in gains)) / len(gains)
            note = f"by seed {', '.join(f'{gain.value:.1f}' for gain in gains)}; interval over tasks"
            label = f"{name}, {setting} r_H, trained MAML above NAL on hard tasks"
            yield Row(label, "accuracy %", ours=mean, ci95=ci95, note=note)
    gain_pairs = [(case.gain("small"), case.gain("large")) for case in cases]
    is_ranked = [small.value > large.value for small, large in gain_pairs if small and large]
    if is_ranked:
        yield ranking_row("what trained MAML gains", is_ranked)


def excess_percent(ratio: Interval) -> Interval:
    """Return by how many percent a ratio exceeds 1."""
    return Interval(*(100 * (value - 1) for value in (ratio.value, ratio.low, ratio.high)))


def figure(outcome: Outcome[Measurements]) -> Figure:
    """Draw the predicted and the trained gains in both settings, and the agreement of the orders of methods."""
    from matplotlib.figure import Figure

    from metabridge.report.figures import COLORS, draw_intervals

    cases, orders = {f"{case.data}, seed {case.seed}": case for case in outcome.data.cases}, outcome.data.orders
    ratios = {
        label: {name: excess_percent(case.diagnoses[setting].ratio) for name, case in cases.items()}
        for setting, label in R_H.items()
    }
    gains = {
        label: {name: gain for name, case in cases.items() if (gain := case.gain(setting))}
        for setting, label in R_H.items()
    }
    count = 2 + any(gains.values()) + bool(orders)
    page = Figure(figsize=(10.8, 4.2 * ((count + 1) // 2)), layout="constrained")
    ratio_axes, distance_axes, *other_axes = (page.add_subplot((count + 1) // 2, 2, 1 + i) for i in range(count))
    draw_intervals(ratio_axes, ratios)
    ratio_axes.set(title="predicted for one inner step, features of an untrained net", xlim=(0, None))
    ratio_axes.set_xlabel("risk of plain pre-training / risk of MAML − 1, %")
    for i, data in enumerate(dict.fromkeys(case.data for case in cases.values())):
        for (setting, label), color, marker in zip(R_H.items(), COLORS[2 * i :], "ox"):
            diagnoses = [case.diagnoses[setting] for case in cases.values() if case.data == data]
            dispersions = [1000 * diagnosis.groups[0].dispersion for diagnosis in diagnoses]
            distances = [1000 * diagnosis.distance**2 for diagnosis in diagnoses]
            distance_axes.plot(dispersions, distances, marker, color=color, label=f"{data}, {label}")
    distance_axes.margins(0.15)
    distance_axes.set(xlim=(0, None), ylim=(0, None), title="solutions of hard and easy tasks, one mark per seed")
    distance_axes.set_xlabel("dispersion $r_H$ of the hard tasks' solutions × 1000")
    distance_axes.set_ylabel("squared distance $R^2$ of the groups' centers × 1000")
    if any(gains.values()):
        gain_axes = other_axes.pop(0)
        draw_intervals(gain_axes, gains)
        gain_axes.axvline(0, color="gray", linewidth=0.8)
        gain_axes.set(title="small trained nets, test tasks within a hard alphabet")
        gain_axes.set_xlabel("accuracy of MAML minus NAL, percentage points")
    for axes in page.axes[: 2 + any(gains.values())]:
        axes.legend(fontsize=8)
    if orders:
        draw_orders(other_axes[0], orders)
    return page


class DiagnosisExperiment(Experiment[Measurements]):
    """An experiment whose duration includes that of its training runs, which may have been trained earlier."""

    resumable: ClassVar[bool] = True

    def result(self, data: Measurements, options: ExperimentOptions, seconds: float) -> Result:
        """Return the result, with the hard alphabets of each seed in its settings."""
        seconds = data.seconds + 60 * sum(record.minutes for case in data.cases for record in case.records.values())
        result = super().result(data, options, seconds)
        hard = {f"{case.data}, seed {case.seed}": dict(case.hard) for case in data.cases}
        return replace(result, settings={**result.settings, "hard alphabets": hard})


EXPERIMENT = DiagnosisExperiment("diagnose-images", measure, rows, figure, SETTINGS)
