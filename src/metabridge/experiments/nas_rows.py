"""Rows of the experiments of architecture search: accuracies, gains and costs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from metabridge.experiments.mini_imagenet_trainings import SHOTS
from metabridge.experiments.nas_searches import SearchRecord
from metabridge.experiments.training_records import TrainingRecord
from metabridge.report.results import Row

Accuracies = Mapping[int, tuple[float, float]]  # by shots, in percent, with the standard deviation over searches


def accuracy_rows(
    name: str, records: Sequence[TrainingRecord], published: Accuracies, *, comparable: bool
) -> list[Row]:
    """Return the mean accuracy over searches for 1 and 5 shots and its standard deviation.

    The interval is over tasks, which are the same for all searches. Ours agrees if its interval is not below the
    published mean minus its standard deviation.
    """
    rows = []
    for shots in SHOTS if records else ():
        scores = [record.selected(shots) for record in records]
        means = [100 * score.mean for score in scores]
        ours, ci95 = statistics.mean(means), statistics.mean(100 * score.ci95 for score in scores)
        value, deviation = published[shots]
        each = ", ".join(f"{mean:.2f}" for mean in means)
        rows.append(
            Row(
                f"{name}, {shots}-shot",
                "accuracy %",
                published=value,
                ours=ours,
                ci95=ci95,
                agrees=ours + ci95 >= value - deviation if comparable else None,
                note=f"{records[0].images}, {records[0].iterations} steps; each: {each}; {scores[0]}",
            )
        )
        if len(means) > 1:
            metric, spread = "standard deviation of accuracy %", statistics.stdev(means)
            rows.append(Row(f"{name}, {shots}-shot, spread", metric, published=deviation, ours=spread))
    return rows


def gain_rows(
    name: str,
    records: tuple[Sequence[TrainingRecord], Sequence[TrainingRecord]],
    published: tuple[Accuracies, Accuracies],
    *,
    comparable: bool,
) -> list[Row]:
    """Return the mean accuracy of the first records minus that of the second.

    The paper claims that it is positive. A difference within its interval neither agrees nor disagrees.
    """
    rows = []
    for shots in SHOTS if all(records) else ():
        first, second = ([record.selected(shots) for record in side] for side in records)
        ours, reference = (statistics.mean(100 * score.mean for score in scores) for scores in (first, second))
        margin = math.hypot(*(statistics.mean(100 * score.ci95 for score in scores) for scores in (first, second)))
        value, reference_value = (side[shots][0] for side in published)
        rows.append(
            Row(
                f"{name}, {shots}-shot",
                "difference in accuracy %",
                published=value - reference_value,
                ours=ours - reference,
                ci95=margin,
                agrees=ours > reference if comparable and abs(ours - reference) > margin else None,
                note="agrees if above 0; undecided within its interval, which is wide, since both have the same tasks",
            )
        )
    return rows


def cost_rows(
    name: str,
    searches: Sequence[SearchRecord],
    trainings: Sequence[TrainingRecord],
    *,
    published_parameters: float | None = None,
    published_hours: float | None = None,
) -> list[Row]:
    """Return means over searches: millions of parameters, hours of search and minutes of training."""
    rows = []
    if searches or trainings:
        sizes = [record.parameters / 1e6 for record in searches or trainings]
        note = f"each: {', '.join(f'{size:.2f}' for size in sizes)}"
        mean = statistics.mean(sizes)
        rows.append(Row(f"{name}, parameters", "million", published=published_parameters, ours=mean, note=note))
    if any(record.evaluated for record in searches):
        hours = statistics.mean(record.minutes / 60 for record in searches)
        each = ", ".join(f"{record.minutes:.2f}" for record in searches)
        failures = sum(record.failed for record in searches)
        note = f"on {searches[0].environment.device}; each: {each} minutes"
        note += f"; {searches[0].evaluated} networks per search, a proxy failed for {failures} in total"
        rows.append(Row(f"{name}, search", "hours", published=published_hours, ours=hours, note=note))
    if trainings:
        minutes = statistics.mean(record.minutes for record in trainings)
        rows.append(Row(f"{name}, training", "minutes", ours=minutes, note=f"on {trainings[0].environment.device}"))
    return rows
