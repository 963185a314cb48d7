"""Rows of the experiments on architecture search: accuracies, differences in accuracy, and costs.

The published numbers are those of Wang et al. 2022 (MetaNTK-NAS).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from metabridge.experiments.mini_imagenet_training_runs import SHOTS
from metabridge.experiments.nas_searches import SearchRecord
from metabridge.experiments.training_records import TrainingRecord
from metabridge.report.results import Row

# Mean accuracy in percent and its standard deviation over searches, by number of shots.
Accuracies = Mapping[int, tuple[float, float]]


def accuracy_rows(
    name: str, records: Sequence[TrainingRecord], published: Accuracies, *, comparable: bool
) -> list[Row]:
    """Return the mean and the standard deviation of the accuracy over searches, for 1 and 5 shots.

    The interval of the mean covers the variation between tasks only. It is the mean of the intervals of all networks,
    which are tested on the same tasks. Our mean agrees if the upper end of its interval is at least the published mean
    minus the published standard deviation; a higher mean always agrees.

    Args:
        name: Start of the names of the rows.
        records: The training runs of the architectures that the searches selected, one per search.
        published: The published accuracies.
        comparable: Whether our settings are those of the paper, so that the rows state whether the numbers agree.
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
                note=f"{records[0].images}, {records[0].iterations} steps; accuracies of the networks: {mean_list}; "
                f"{scores[0]}",
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
    """Return the mean accuracy of the first group of records minus that of the second, for 1 and 5 shots.

    Wang et al. 2022 claim that this difference is positive. If its interval contains 0, it is not compared with the
    claim.

    Args:
        name: Start of the names of the rows.
        records: Two groups of training runs, such as those of MetaNTK-NAS and those of ResNet-12.
        published: The published accuracies of both groups.
        comparable: Whether our settings are those of the paper, so that the rows state whether the numbers agree.
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
                note="agrees if above 0; undecided if the 95 % interval contains 0; the interval is wider than "
                "necessary, because it ignores that both networks are tested on the same tasks",
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
    """Return rows of the means over searches: millions of parameters, hours of search and minutes of training.

    Args:
        name: Start of the names of the rows.
        searches: The searches.
        training_runs: The training runs of the architectures that the searches selected.
        published_parameters: Published number of parameters in millions.
        published_hours: Published duration of a search in hours.
    """
    rows = []
    if searches or training_runs:
        sizes = [record.parameters / 1e6 for record in searches or training_runs]
        note = f"sizes of the networks: {', '.join(f'{size:.2f}' for size in sizes)}"
        mean = statistics.mean(sizes)
        rows.append(Row(f"{name}, parameters", "million", published=published_parameters, ours=mean, note=note))
    # `evaluated` and `failed` are numbers of networks. A search that draws a random architecture evaluates none.
    if any(record.evaluated for record in searches):
        hours = statistics.mean(record.minutes / 60 for record in searches)
        minutes_list = ", ".join(f"{record.minutes:.2f}" for record in searches)
        failures = sum(record.failed for record in searches)
        # `environment` is the machine.
        note = f"on {searches[0].environment.device}; the searches took {minutes_list} minutes"
        note += f"; {searches[0].evaluated} networks per search; a proxy failed for {failures} networks in total"
        rows.append(Row(f"{name}, search", "hours", published=published_hours, ours=hours, note=note))
    if training_runs:
        minutes = statistics.mean(record.minutes for record in training_runs)
        rows.append(Row(f"{name}, training", "minutes", ours=minutes, note=f"on {training_runs[0].environment.device}"))
    return rows
