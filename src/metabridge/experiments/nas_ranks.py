"""Rank correlations between the proxies of an architecture search and the accuracies after training.

Wang et al. 2022, whose search uses these proxies, do not report the correlations. The proxies of random architectures
are computed before training, and all architectures are trained briefly in the same way. The rank correlation of each
proxy with the accuracy on new tasks has a bootstrap interval over architectures. The number of parameters serves as a
baseline for the proxies. The signs are chosen such that a useful proxy has a positive correlation.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, get_args

from metabridge.diagnosis import Interval
from metabridge.errors import InputError
from metabridge.experiments.experiment import ExperimentOptions, Outcome, TrainingExperiment
from metabridge.experiments.nas_ranks_training_runs import (
    KERNELS,
    PROXIES,
    SETTINGS,
    RankRecord,
    ScoredArchitecture,
    train_and_score,
)
from metabridge.intervals import Coefficient, rank_correlation
from metabridge.report.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIN_ARCHITECTURES = 3  # smallest number of architectures for a rank correlation


def measure(options: ExperimentOptions) -> dict[str, RankRecord]:
    """Return the record of all trained architectures."""
    options.check_selected_names(())
    record = train_and_score(options)
    if len(record.architectures) < MIN_ARCHITECTURES:
        raise InputError(
            f"nas-ranks has trained {len(record.architectures)} architectures, but needs at least {MIN_ARCHITECTURES}. "
            "Increase --minutes, or run the same command again to continue."
        )
    return {record.name: record}


def rows(records: Mapping[str, RankRecord], options: ExperimentOptions) -> list[Row]:
    """Return rows of the correlations, and of the mean and the standard deviation of the accuracies."""
    (record,), resamples = records.values(), SETTINGS[options.scale].resamples
    rows = []
    for coefficient in get_args(Coefficient):
        intervals = correlations(record.architectures, coefficient, resamples=resamples, seed=options.seed)
        for proxy, interval in intervals.items():
            failures = sum(architecture.proxies[proxy] is None for architecture in record.architectures)
            bounds = f"{interval.low:.2f} to {interval.high:.2f}".replace("-", "−")
            note = f"95 % interval {bounds}; {len(record.architectures)} architectures"
            note += f", for {failures} of which the proxy failed" if failures else ""
            ci95 = (interval.high - interval.low) / 2
            rows.append(Row(f"{proxy}, {coefficient}", "rank correlation", ours=interval.value, ci95=ci95, note=note))
    accuracies = [100 * architecture.accuracy for architecture in record.architectures]
    mean_margin = 100 * sum(architecture.ci95 for architecture in record.architectures) / len(accuracies)
    note = f"{min(accuracies):.1f} to {max(accuracies):.1f}; mean 95 % interval over tasks ± {mean_margin:.2f}"
    rows.append(Row("all architectures", "mean accuracy %", ours=statistics.mean(accuracies), note=note))
    rows.append(Row("all architectures", "standard deviation of accuracy %", ours=statistics.stdev(accuracies)))
    return rows


def correlations(
    architectures: Sequence[ScoredArchitecture], coefficient: Coefficient, *, resamples: int, seed: int
) -> dict[str, Interval]:
    """Return the rank correlation of each proxy with the accuracy, with its bootstrap interval."""
    accuracies = [architecture.accuracy for architecture in architectures]
    qualities = {proxy: [architecture.predicted_quality(proxy) for architecture in architectures] for proxy in PROXIES}
    return {
        proxy: Interval(*rank_correlation(coefficient, values, accuracies, resamples=resamples, seed=seed))
        for proxy, values in qualities.items()
    }


def figure(outcome: Outcome[Mapping[str, RankRecord]]) -> Figure:
    """Draw the accuracies as functions of each proxy, and Spearman's rank correlations."""
    from matplotlib.figure import Figure

    from metabridge.report import figures

    (record,), result = outcome.data.values(), outcome.result
    figure = Figure(figsize=(10.5, 6.4), layout="constrained")
    *panels, summary = figure.subplots(2, 3).flat
    for axes, proxy, color in zip(panels, PROXIES, figures.COLORS):
        points = [
            (value, 100 * architecture.accuracy, 100 * architecture.ci95)
            for architecture in record.architectures
            if (value := architecture.proxies[proxy]) is not None
        ]
        values, accuracies, margins = zip(*points) if points else ((), (), ())
        axes.errorbar(values, accuracies, yerr=margins, fmt="o", color=color, markersize=4)
        axes.set(xlabel=f"{proxy}\n(larger is better)", ylabel="accuracy after training, %")
        if proxy in KERNELS:
            axes.set(xlabel=f"condition number of the {proxy}\n(smaller is better)", xscale="log")
            figures.plain_numbers(axes.xaxis)
    resamples = SETTINGS[result.scale].resamples
    spearman = correlations(record.architectures, "Spearman", resamples=resamples, seed=result.seed)
    for position, (interval, color) in enumerate(zip(spearman.values(), figures.COLORS)):
        summary.plot([interval.low, interval.high], [position, position], color=color)
        summary.plot(interval.value, position, "o", color=color)
    summary.axvline(0, color=figures.LIGHT.text, linewidth=0.8)
    summary.set(xlim=(-1.05, 1.05), xlabel="Spearman's rank correlation\nwith accuracy, 95 % intervals")
    summary.set_yticks(range(len(PROXIES)), PROXIES)
    summary.invert_yaxis()
    return figure


EXPERIMENT = TrainingExperiment("nas-ranks", measure, rows, figure)
