"""Check whether diagnoses predict larger gains for small r_H (Collins et al. 2022, §5) and rank methods correctly.

r_H is the dispersion of the solutions of the hard tasks. If all hard tasks are from two alphabets ("small r_H"), the
diagnosis must predict a larger gain of adaptation than if they are from ten alphabets ("large r_H"), as in table 1 of
Collins et al. Each seed initializes another untrained network, whose features also determine which alphabets are hard.
On glyphs, small networks are trained in both settings to measure how much more accurate MAML is than non-adaptive
learning (NAL). If the output folder contains the results of the experiments glyphs and kernel-fewshot, the predicted
ranking of methods is compared with their accuracies.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from metabridge.experiments.diagnose_cases import R_H, RUN_NAMES, Case, diagnose_case, train_case
from metabridge.experiments.experiment import Experiment, ExperimentOptions, Outcome
from metabridge.experiments.landscape_training_runs import Conv4Training
from metabridge.experiments.method_rankings import MethodRanking, draw_rankings, predicted_rankings, ranking_rows
from metabridge.report.results import Result, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLAIM = "Collins et al. 2022, §5: adaptation gains more where hard tasks are alike"


@dataclass(frozen=True)
class Settings:
    """Numbers of tasks and seeds, and how networks are trained."""

    tasks: int  # number of tasks per diagnosis
    # number of tasks per alphabet, to rank the alphabets by difficulty; stored as "ranking" in results/*.json
    ranking: int
    seeds: int  # number of seeds
    training: Conv4Training  # its method and seed are replaced by those of each training run


SETTINGS = {
    "quick": Settings(128, 6, 1, Conv4Training("maml", 1e-3, iterations=40, batch_size=4, test_tasks=100, filters=16)),
    "paper": Settings(
        256, 12, 3, Conv4Training("maml", 1e-3, iterations=300, batch_size=4, test_tasks=400, filters=32)
    ),
}


@dataclass(frozen=True)
class Measurements:
    """The cases, the predicted rankings of methods, and the seconds to compute both, not counting training runs."""

    cases: tuple[Case, ...]
    rankings: tuple[MethodRanking, ...]
    seconds: float


def measure(options: ExperimentOptions) -> Measurements:
    """Diagnose both settings of r_H on each data set, predict rankings of methods, and train networks on glyphs."""
    options.check_selected_names(RUN_NAMES)
    settings, started = SETTINGS[options.scale], time.perf_counter()
    names = ["glyphs", "omniglot"] if options.scale == "paper" and options.has_data("omniglot") else ["glyphs"]
    datasets = {name: options.load_images(name).to(options.device) for name in names}
    seeds = range(options.seed, options.seed + settings.seeds)
    cases = [
        diagnose_case(name, images, tasks=settings.tasks, ranking_tasks=settings.ranking, seed=seed)
        for name, images in datasets.items()
        for seed in seeds
    ]
    rankings = tuple(predicted_rankings(options.out, datasets, tasks=settings.tasks // 2, seed=options.seed))
    seconds = time.perf_counter() - started
    trained_cases = [
        train_case(options, EXPERIMENT.id, settings.training, case, datasets["glyphs"])
        for case in cases
        if case.data == "glyphs"
    ]
    untrained_cases = [case for case in cases if case.data != "glyphs"]
    return Measurements((*trained_cases, *untrained_cases), rankings, seconds)


def rows(data: Measurements, _: ExperimentOptions) -> Iterator[Row]:
    """Yield the rows of the diagnoses, of their agreement with the paper, and of the rankings of methods."""
    for name in dict.fromkeys(case.data for case in data.cases):
        yield from dataset_rows(name, [case for case in data.cases if case.data == name])
    yield from ranking_rows(data.rankings)


def dataset_rows(name: str, cases: Sequence[Case]) -> Iterator[Row]:
    """Yield the predicted and the measured gains on one data set, and whether they are larger for small r_H.

    The predicted gain is the risk of NAL divided by the risk of MAML, minus 1. For short inner steps, 1 + R²/r_H ranks
    the settings more reliably than this ratio, where R is the distance between the solutions of hard and easy tasks.
    """

    def ranking_row(quantity: str, is_correct: Sequence[bool], note: str = "") -> Row:
        """Return the percentage of seeds for which the quantity is larger for small r_H."""
        label = f"{name}, small r_H ranked above large by {quantity}"
        note = f"{sum(is_correct)} of {len(is_correct)} seeds{note}; {CLAIM}"
        return Row.share(label, "seeds %", is_correct, agrees=all(is_correct), note=note)

    for case in cases:
        for setting, diagnosis in case.diagnoses.items():
            excess = diagnosis.ratio.excess_percent()
            note = f"95 % interval {excess.low:.3f} to {excess.high:.3f}; R {diagnosis.distance:.3g}"
            note += f", r_H {diagnosis.groups[0].dispersion:.3g}"
            if diagnosis.ratio_limit is not None:
                note += f", 1 + R²/r_H {diagnosis.ratio_limit:.3g}"
            label = f"{name}, {setting} r_H, seed {case.seed}"
            yield Row(label, "predicted ratio − 1, %", ours=excess.value, note=note)
    pairs = [(case.diagnoses["small"], case.diagnoses["large"]) for case in cases]
    num_overlaps = sum(small.ratio.overlaps(large.ratio) for small, large in pairs)
    is_correct = [small.ratio.value > large.ratio.value for small, large in pairs]
    yield ranking_row("predicted ratio", is_correct, f"; intervals overlap in {num_overlaps}")
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
    is_correct = [small.value > large.value for small, large in gain_pairs if small and large]
    if is_correct:
        yield ranking_row("gain of trained MAML", is_correct)


def figure(outcome: Outcome[Measurements]) -> Figure:
    """Draw the predicted and the measured gains in both settings, and how well rankings of methods are predicted."""
    from metabridge.report import result_figures
    from metabridge.report.figures import COLORS, draw_intervals

    cases, rankings = outcome.data.cases, outcome.data.rankings
    ratios = {
        label: {case.label: case.diagnoses[setting].ratio.excess_percent() for case in cases}
        for setting, label in R_H.items()
    }
    gains = {
        label: {case.label: gain for case in cases if (gain := case.gain(setting))} for setting, label in R_H.items()
    }
    has_gains = any(gains.values())
    num_rows = (2 + has_gains + bool(rankings) + 1) // 2
    figure, grid = result_figures.subplots("", num_rows, 2, (10.8, 4.2 * num_rows), squeeze=False)
    ratio_axes, distance_axes, *other_axes = grid.flat
    draw_intervals(ratio_axes, ratios)
    ratio_axes.set(title="predicted for one inner step, features of an untrained net", xlim=(0, None))
    ratio_axes.set_xlabel("risk of pre-training without adaptation / risk of MAML − 1, %")
    for i, data in enumerate(dict.fromkeys(case.data for case in cases)):
        for (setting, label), color, marker in zip(R_H.items(), COLORS[2 * i :], "ox"):
            diagnoses = [case.diagnoses[setting] for case in cases if case.data == data]
            dispersions = [1000 * diagnosis.groups[0].dispersion for diagnosis in diagnoses]
            distances = [1000 * diagnosis.distance**2 for diagnosis in diagnoses]
            distance_axes.plot(dispersions, distances, marker, color=color, label=f"{data}, {label}")
    distance_axes.margins(0.15)
    distance_axes.set(xlim=(0, None), ylim=(0, None), title="solutions of hard and easy tasks, one mark per seed")
    distance_axes.set_xlabel("dispersion $r_H$ of the hard tasks' solutions × 1000")
    distance_axes.set_ylabel("squared distance $R^2$ of the groups' centers × 1000")
    if has_gains:
        gain_axes = other_axes.pop(0)
        draw_intervals(gain_axes, gains)
        gain_axes.axvline(0, color="gray", linewidth=0.8)
        gain_axes.set(title="small trained nets, test tasks within a hard alphabet")
        gain_axes.set_xlabel("accuracy of MAML minus NAL, percentage points")
    for axes in grid.flat[: 2 + has_gains]:
        axes.legend(fontsize=8)
    if rankings:
        draw_rankings(other_axes.pop(0), rankings)
    for axes in other_axes:
        axes.remove()
    return figure


class DiagnosisExperiment(Experiment[Measurements]):
    """An experiment with training runs. Its duration includes the time of runs that were trained by an earlier call."""

    resumable: ClassVar[bool] = True

    def result(self, data: Measurements, options: ExperimentOptions, seconds: float) -> Result:
        """Return the result, with the hard alphabets of each seed in its settings."""
        seconds = data.seconds + 60 * sum(record.minutes for case in data.cases for record in case.records.values())
        result = super().result(data, options, seconds)
        hard_alphabets = {case.label: dict(case.hard_alphabets) for case in data.cases}
        return replace(result, settings={**result.settings, "hard alphabets": hard_alphabets})


EXPERIMENT = DiagnosisExperiment("diagnose-images", measure, rows, figure, SETTINGS)
