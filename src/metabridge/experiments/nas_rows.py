"""Rows of the experiments on architecture search: accuracies, differences in accuracy, and costs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from metabridge.experiments.mini_imagenet_training_runs import SHOTS
from metabridge.experiments.nas_searches import SearchRecord
from metabridge.experiments.training_records import TrainingRecord
from metabridge.report.results import Row

Accuracies = Mapping[int, tuple[float, float]]  # mean in percent and standard deviation over searches, by shots


def accuracy_rows(
    name: str, records: Sequence[TrainingRecord], published: Accuracies, *, comparable: bool
) -> list[Row]:
    """Return the mean and the standard deviation of the accuracy over searches, for 1 and 5 shots.

    The interval of the mean is over tasks, which are the same for all searches. Our mean agrees if the upper end of its
    interval is at least the published mean minus the published standard deviation.
    """
    rows = []
    for shots in SHOTS if records else ():
        scores = [record.selected_accuracy(shots) for record in records]
        means = [100 * score.mean for score in scores]
        ours, ci95 = statistics.mean(means), statistics.mean(100 * score.ci95 for score in scores)
        published_mean, published_deviation = published[shots]
        mean_list = ", ".join(f"{mean:.2f}" for mean in means)
        rows.append(
            Row(
                f"{name}, {shots}-shot",
                "accuracy %",
                published=published_mean,
                ours=ours,
                ci95=ci95,
                agrees=ours + ci95 >= published_mean - published_deviation if comparable else None,
                note=f"{records[0].images}, {records[0].iterations} steps; of each network: {mean_list}; {scores[0]}",
            )
        )
        if len(means) > 1:
            metric, deviation = "standard deviation of accuracy %", statistics.stdev(means)
            rows.append(Row(f"{name}, {shots}-shot, spread", metric, published=published_deviation, ours=deviation))
    return rows


def gain_rows(
    name: str,
    records: tuple[Sequence[TrainingRecord], Sequence[TrainingRecord]],
    published: tuple[Accuracies, Accuracies],
    *,
    comparable: bool,
) -> list[Row]:
    """Return the mean accuracy of the first records minus the mean accuracy of the second.

    The paper claims that this difference is positive. It is not compared with the claim if its interval contains 0.
    """
    rows = []
    for shots in SHOTS if all(records) else ():
        first, second = ([record.selected_accuracy(shots) for record in group] for group in records)
        mean, reference_mean = (statistics.mean(100 * score.mean for score in scores) for scores in (first, second))
        margin = math.hypot(*(statistics.mean(100 * score.ci95 for score in scores) for scores in (first, second)))
        published_mean, published_reference_mean = (accuracies[shots][0] for accuracies in published)
        rows.append(
            Row(
                f"{name}, {shots}-shot",
                "difference in accuracy %",
                published=published_mean - published_reference_mean,
                ours=mean - reference_mean,
                ci95=margin,
                agrees=mean > reference_mean if comparable and abs(mean - reference_mean) > margin else None,
                note="agrees if above 0; undecided if the 95 % interval contains 0, which is wider than necessary "
                "because it ignores that both networks are tested on the same tasks",
            )
        )
    return rows


def cost_rows(
    name: str,
    searches: Sequence[SearchRecord],
    training_runs: Sequence[TrainingRecord],
    *,
    published_parameters: float | None = None,
    published_hours: float | None = None,
) -> list[Row]:
    """Return rows of the means over searches: millions of parameters, hours of search and minutes of training."""
    rows = []
    if searches or training_runs:
        sizes = [record.parameters / 1e6 for record in searches or training_runs]
        note = f"of each network: {', '.join(f'{size:.2f}' for size in sizes)}"
        mean = statistics.mean(sizes)
        rows.append(Row(f"{name}, parameters", "million", published=published_parameters, ours=mean, note=note))
    if any(record.evaluated for record in searches):
        hours = statistics.mean(record.minutes / 60 for record in searches)
        minutes_list = ", ".join(f"{record.minutes:.2f}" for record in searches)
        failures = sum(record.failed for record in searches)
        note = f"on {searches[0].environment.device}; the searches took {minutes_list} minutes"
        note += f"; {searches[0].evaluated} networks per search; a proxy failed for {failures} networks in total"
        rows.append(Row(f"{name}, search", "hours", published=published_hours, ours=hours, note=note))
    if training_runs:
        minutes = statistics.mean(record.minutes for record in training_runs)
        rows.append(Row(f"{name}, training", "minutes", ours=minutes, note=f"on {training_runs[0].environment.device}"))
    return rows
