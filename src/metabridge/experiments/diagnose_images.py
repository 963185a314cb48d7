"""Does a diagnosis rank real tasks as C §5 does, and methods as trained nets do?

On characters, hard tasks of alphabets that are alike ("small r_H") must promise more of adaptation than hard tasks of
many ("large r_H"): that is C's table 1. Each seed has a new untrained net, which also says which alphabets are hard.
On glyphs small nets are trained in both settings, to see what MAML gains over NAL. Where the numbers of the experiments
glyphs and kernel-fewshot lie in the folder, the predicted order of methods is set beside their accuracies.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from metabridge.datasets import load
from metabridge.diagnosis import Diagnosis, diagnose, untrained
from metabridge.diagnosis.feature_space import Space
from metabridge.diagnosis.moments import Features, rates
from metabridge.environments import LabelledImages
from metabridge.environments.image_tasks import ImageTasks
from metabridge.environments.mixture import Mixture
from metabridge.episodes import Episodes
from metabridge.experiments.landscape_table1 import ALIKE, TARGETS, WAYS, alphabets
from metabridge.experiments.landscape_trainings import Asked, Record, Training, trained
from metabridge.experiments.method_orders import Order, draw_orders, predicted_orders
from metabridge.experiments.result import Result, Row, UnportedExperiment, Work, environment

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ID = "diagnose-images"
SETTINGS = ("small", "large")  # r_H
HARD = 10  # alphabets with the lowest rates, as many as C has
LEARNERS = ("nal", "maml")
LABELS = {"small": "hard tasks of 2 alphabets", "large": f"hard tasks of {HARD} alphabets"}
CLAIM = "C §5: adaptation gains more where hard tasks are alike"


Place = tuple[str, int, str]  # a data set, a seed, a setting
Ends = tuple[float, ...]  # a value, and the lower and the upper end of its interval


@dataclass(frozen=True)
class Scale:
    """How many tasks a diagnosis has, how many rank an alphabet, over how many seeds, and how nets are trained."""

    tasks: int
    ranking: int
    seeds: int
    training: Training


SCALES = {
    "quick": Scale(128, 6, 1, Training("maml", 1e-3, iterations=40, tasks=4, judged=100, filters=16)),
    "paper": Scale(256, 12, 3, Training("maml", 1e-3, iterations=300, tasks=4, judged=400, filters=32)),
}


@dataclass(frozen=True)
class Case:
    """One seed of one data set: the hard alphabets and the diagnosis of each setting."""

    data: str
    seed: int
    hard: Mapping[str, Sequence[str]]
    easy: Sequence[str]
    found: Mapping[str, Diagnosis]


@dataclass(frozen=True)
class Outcome:
    """The result, the diagnoses, what training gained in the cases that were trained, and the orders of methods."""

    result: Result
    cases: tuple[Case, ...]
    gains: Mapping[Place, Ends]
    orders: tuple[Order, ...]


def run(work: Work) -> Outcome:
    """Diagnose both settings of every data set, train nets in those of glyphs, and compare orders of methods."""
    work.check_only([f"{setting}-{learner}" for setting in SETTINGS for learner in LEARNERS])
    scale, started = SCALES[work.scale], time.perf_counter()
    characters = _characters(work)
    seeds = range(work.seed, work.seed + scale.seeds)
    cases = tuple(_case(name, images, scale, seed) for name, images in characters.items() for seed in seeds)
    orders = tuple(predicted_orders(work.out, characters, tasks=scale.tasks // 2, seed=work.seed))
    seconds = time.perf_counter() - started
    gains: dict[Place, Ends] = {}
    for case in cases:
        if case.data == "glyphs":
            records = _records(work, scale, case, characters["glyphs"])
            seconds += 60 * sum(record.minutes for record in records.values())
            gains |= _gains(case, records)
    rows = [row for name in characters for row in _data_rows(name, cases, gains)]
    rows += [order.row() for order in orders]
    if orders:
        sides = [side for order in orders for side in order.sides]
        share, note = 100 * sum(sides) / len(sides), f"{sum(sides)} of {len(sides)} pairs in {len(orders)} orders"
        rows.append(Row("order of methods, all", "pairs right %", ours=share, note=note))
    hard = {f"{case.data}, seed {case.seed}": dict(case.hard) for case in cases}
    about = {**asdict(scale), "hard alphabets": hard}
    result = Result(ID, work.scale, work.seed, about, environment(work.device), seconds, tuple(rows))
    return Outcome(result, cases, gains, orders)


def _case(name: str, images: LabelledImages, scale: Scale, seed: int) -> Case:
    """Find the hard alphabets with a new net, and diagnose tasks with hard ones of ten, and of two that are alike."""
    own = {alphabet: members for alphabet, members in alphabets(images).items() if len(members) >= WAYS}
    features, slow = _ranked(images, own, scale.ranking, seed)
    hardest = sorted(own, key=slow.__getitem__)[:HARD]
    hard = {"small": list(ALIKE) if set(ALIKE) <= set(own) else hardest[:2], "large": hardest}
    easy = [alphabet for alphabet in own if alphabet not in (*hard["small"], *hardest)]
    found = {
        setting: diagnose(
            Mixture(_parts(images, hard[setting], easy), (0.5, 0.5)),
            features=features,
            groups="parts",
            tasks=scale.tasks,
            seed=seed,
        )
        for setting in SETTINGS
    }
    return Case(name, seed, hard, easy, found)


def _ranked(
    images: LabelledImages, own: Mapping[str, torch.Tensor], tasks: int, seed: int
) -> tuple[Features, dict[str, float]]:
    """Return a new net's features along the principal directions of all alphabets, and the mean rate in each."""
    apart = replace(images, splits=dict(own))

    def sample(name: str) -> Episodes:
        drawn = apart.tasks(name, ways=WAYS, queries=TARGETS)
        return drawn.sample(tasks, torch.Generator().manual_seed(seed))

    space = Space.of([sample(name) for name in own], untrained(images, seed=seed), None)
    slow = {name: float(rates(space.moments(sample(name))).log().mean().exp()) for name in own}
    return lambda x: space.directions(space.features(x).double().cpu()), slow


def _parts(images: LabelledImages, hard: Sequence[str], easy: Sequence[str]) -> tuple[ImageTasks, ImageTasks]:
    """Return tasks within single alphabets of the hard ones, and tasks across the easy ones."""
    own = alphabets(images)
    kinds = {"hard": hard, "easy": easy}
    parted = replace(images, splits={kind: torch.cat([own[name] for name in names]) for kind, names in kinds.items()})
    return (
        parted.tasks("hard", ways=WAYS, queries=TARGETS, superclass="same"),
        parted.tasks("easy", ways=WAYS, queries=TARGETS, superclass="different"),
    )


def _records(work: Work, scale: Scale, case: Case, images: LabelledImages) -> dict[tuple[str, str], Record]:
    """Train on every second alphabet of each setting, judge on the others, and return what is finished."""
    asked = {}
    for setting in SETTINGS:
        train, test = (_parts(images, case.hard[setting][turn::2], case.easy[turn::2]) for turn in (0, 1))
        about = {"hard": case.hard[setting], "easy": case.easy, "ways": WAYS, "shots": 1, "queries": TARGETS}
        for learner in LEARNERS:
            how = replace(scale.training, method=learner, seed=case.seed)
            kinds = {"hard test": test[0], "easy test": test[1]}
            tasks = Mixture(train, (0.5, 0.5))
            asked[setting, learner] = Asked(f"{setting}-{learner}", how, tasks, kinds, about)
    found = trained(work, ID, images, list(asked.values()))
    return {key: record for key, record in zip(asked, found) if record is not None}


def _gains(case: Case, records: Mapping[tuple[str, str], Record]) -> dict[Place, Ends]:
    """Return how far MAML is above NAL on hard test tasks, in percent, in the settings where both are trained."""
    found: dict[Place, Ends] = {}
    for setting in SETTINGS:
        scores = [records[setting, name].scores["hard test"] for name in LEARNERS if (setting, name) in records]
        if len(scores) == len(LEARNERS):
            nal, maml = scores
            value, margin = 100 * (maml.mean - nal.mean), 100 * math.hypot(maml.ci95, nal.ci95)
            found[case.data, case.seed, setting] = value, value - margin, value + margin
    return found


def _data_rows(name: str, cases: Sequence[Case], gains: Mapping[Place, Ends]) -> list[Row]:
    """Return what was found in both settings of a data set, and whether they rank as C says, and as nets do."""
    own = [case for case in cases if case.data == name]
    rows = [_found_row(case, setting) for case in own for setting in SETTINGS]
    pairs = [(case.found["small"], case.found["large"]) for case in own]
    overlap = sum(small.ratio.meets(large.ratio) for small, large in pairs)
    by_ratio = [small.ratio.value > large.ratio.value for small, large in pairs]
    rows.append(_rank_row(name, "predicted ratio", by_ratio, f"; intervals overlap in {overlap}"))
    rows.append(_rank_row(name, "1 + R²/r_H", [small.promises_more(large) for small, large in pairs], ""))
    for setting in SETTINGS:
        gained = [gains[name, case.seed, setting] for case in own if (name, case.seed, setting) in gains]
        if gained:
            value = sum(gain[0] for gain in gained) / len(gained)
            ci95 = math.hypot(*(gain[2] - gain[0] for gain in gained)) / len(gained)
            note = f"by seed {', '.join(f'{gain[0]:.1f}' for gain in gained)}; interval over tasks"
            what = f"{name}, {setting} r_H, trained MAML above NAL on hard tasks"
            rows.append(Row(what, "accuracy %", ours=value, ci95=ci95, note=note))
    both = [[gains.get((name, case.seed, setting)) for setting in SETTINGS] for case in own]
    right = [small[0] > large[0] for small, large in both if small and large]
    if right:
        rows.append(_rank_row(name, "what trained MAML gains", right, ""))
    return rows


def _rank_row(name: str, quantity: str, right: Sequence[bool], more: str) -> Row:
    share, note = 100 * sum(right) / len(right), f"{sum(right)} of {len(right)} seeds{more}; {CLAIM}"
    return Row(f"{name}, small r_H above large by {quantity}", "seeds %", ours=share, agrees=all(right), note=note)


def _found_row(case: Case, setting: str) -> Row:
    found = case.found[setting]
    ratio, r = found.ratio, found.groups[0].dispersion
    low, high = 100 * (ratio.low - 1), 100 * (ratio.high - 1)
    note = f"95 % interval {low:.3f} to {high:.3f}; R {found.distance:.3g}, r_H {r:.3g}"
    if found.limit is not None:
        note += f", 1 + R²/r_H {found.limit:.3g}"
    name = f"{case.data}, {setting} r_H, seed {case.seed}"
    return Row(name, "predicted ratio less 1, %", ours=100 * (ratio.value - 1), note=note)


def _characters(work: Work) -> dict[str, LabelledImages]:
    """Return glyphs, and at the paper scale Omniglot where it is at hand."""
    found = {"glyphs": load("glyphs")}
    if work.scale == "paper" and work.data is not None and (work.data / "omniglot").exists():
        found["omniglot"] = load("omniglot", work.data / "omniglot")
    return {name: images.to(work.device) for name, images in found.items()}


def figure(outcome: Outcome, file: Path) -> None:
    """Draw the settings as predicted and as trained, and how well the orders of methods agree."""
    from matplotlib.figure import Figure

    from metabridge.report import figures

    ratios = {
        (case.data, case.seed, setting): (found.ratio.value, found.ratio.low, found.ratio.high)
        for case in outcome.cases
        for setting, found in case.found.items()
    }
    panels: list[Callable[[Axes], None]] = [
        lambda axes: _draw_ratios(axes, ratios),
        lambda axes: _draw_geography(axes, outcome.cases),
    ]
    if outcome.gains:
        panels.append(lambda axes: _draw_gains(axes, outcome.gains))
    if outcome.orders:
        panels.append(lambda axes: draw_orders(axes, outcome.orders))
    with figures.LIGHT.context():
        tall = (len(panels) + 1) // 2
        page = Figure(figsize=(10.8, 4.2 * tall), layout="constrained")
        for number, draw in enumerate(panels, start=1):
            draw(page.add_subplot(tall, 2, number))
    figures.save(page, file)


def _draw_ratios(axes: Axes, ratios: Mapping[Place, Ends]) -> None:
    """Draw how far the predicted ratios are above 1."""
    _draw_settings(axes, {place: tuple(100 * (end - 1) for end in ends) for place, ends in ratios.items()})
    axes.set(title="predicted: a step of an untrained net's features", ylim=(0, None))
    axes.set_ylabel("risk of plain pre-training above MAML's, %")


def _draw_gains(axes: Axes, gains: Mapping[Place, Ends]) -> None:
    """Draw what trained MAML gains over trained NAL."""
    _draw_settings(axes, gains)
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set(title="trained: small nets, test tasks within a hard alphabet")
    axes.set_ylabel("accuracy of MAML above NAL's, %")


def _draw_settings(axes: Axes, values: Mapping[Place, Ends]) -> None:
    """Draw a value with its interval for each data set, seed and setting, both settings of a seed side by side."""
    from metabridge.report.figures import COLOURS

    places = list(dict.fromkeys((data, seed) for data, seed, _ in values))
    for setting, colour, marker, shift in zip(SETTINGS, COLOURS, "ox", (-0.1, 0.1)):
        own = [(places.index((data, seed)), *ends) for (data, seed, kind), ends in values.items() if kind == setting]
        if not own:
            continue
        xs, ys, low, high = torch.tensor(own, dtype=torch.float64).T
        margins = torch.stack([ys - low, high - ys])
        axes.errorbar(xs + shift, ys, margins, fmt=marker, color=colour, capsize=3, label=LABELS[setting])
    axes.set_xticks(range(len(places)), [f"{data}\nseed {seed}" for data, seed in places], fontsize=8)
    axes.set_xlim(-0.6, len(places) - 0.4)
    axes.legend(fontsize=8)


def _draw_geography(axes: Axes, cases: Sequence[Case]) -> None:
    """Draw the squared distance between hard and easy tasks against the dispersion of the hard ones."""
    from metabridge.report.figures import COLOURS

    for data, (first, second) in zip(dict.fromkeys(case.data for case in cases), (COLOURS[:2], COLOURS[2:4])):
        for setting, colour, marker in zip(SETTINGS, (first, second), "ox"):
            own = [case.found[setting] for case in cases if case.data == data]
            xs, ys = [1000 * one.groups[0].dispersion for one in own], [1000 * one.distance**2 for one in own]
            axes.plot(xs, ys, marker, color=colour, label=f"{data}, {LABELS[setting]}")
    axes.margins(0.15)
    axes.set(xlim=(0, None), ylim=(0, None), title="predicted: where solutions lie, one mark a seed")
    axes.set_xlabel("dispersion $r_H$ of the hard tasks' solutions, thousandths")
    axes.set_ylabel("$R^2$ between the groups' centres, thousandths")
    axes.legend(fontsize=8)


EXPERIMENT = UnportedExperiment("diagnose-images", run, figure, resumable=True)
