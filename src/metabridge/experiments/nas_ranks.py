"""Do the proxies of a search rank architectures as training does? A check that B does not print.

Random architectures are scored untrained and then trained briefly, all in the same way. What to look for: the rank
correlation of each proxy with the accuracy on new tasks, its interval over architectures, and whether a condition
number says more than the number of parameters does. A proxy's sign is such that a positive correlation is a good one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from metabridge.datasets import load
from metabridge.diagnosis import Interval
from metabridge.environments.image_tasks import LabelledImages
from metabridge.errors import InputError
from metabridge.experiments.record_files import keep, plain, run_folder, stored
from metabridge.experiments.result import Environment, Result, Row, UnportedExperiment, Work, environment
from metabridge.intervals import percentile_tail
from metabridge.models.architecture import Architecture, random_architecture
from metabridge.nas.architecture_search import ProxyEvaluator, SearchConfig, SearchKernel
from metabridge.nas.proxies import ProxyScore, mean_score
from metabridge.schedules import Cosine
from metabridge.training import Run, evaluate, train_interleaved
from metabridge.training.config import ImageTrainingConfig, former_names_replaced
from metabridge.training.image_training import image_trainer
from metabridge.training.interleaved import concurrent_trainings

ID = "nas-ranks"
CONDITIONS: dict[str, SearchKernel] = {"MAML kernel": "maml", "ANIL kernel": "anil", "NTK": "ntk"}
PROXIES = (*CONDITIONS, "linear regions", "parameters")
STATISTICS: dict[str, Callable[..., Any]] = {"Spearman": stats.spearmanr, "Kendall": stats.kendalltau}
FEWEST = 3  # architectures that a correlation is computed of

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Scale:
    """How many architectures, how they are scored and trained, and how many tasks judge each."""

    architectures: int
    search: SearchConfig
    plan: ImageTrainingConfig
    test_tasks: int
    resamples: int


_PLAN = ImageTrainingConfig(
    "rfs",
    model="network",
    statistics="running",
    batch_size=128,
    iterations=1000,
    optimizer="sgd",
    lr=0.1,
    weight_decay=5e-4,
    schedule=Cosine(warmup=0.05),
    validate_every=1000,
)
SCALES = {
    "quick": Scale(
        4,
        SearchConfig(cells=3, channels=4, tasks=2, ways=3, repeats=1, region_inputs=200),
        replace(_PLAN, batch_size=32, iterations=10, validate_every=10, validate_tasks=10),
        test_tasks=20,
        resamples=100,
    ),
    "paper": Scale(40, SearchConfig(cells=3, channels=16), _PLAN, test_tasks=2000, resamples=2000),
}


@dataclass(frozen=True)
class Judged:
    """One architecture: what its proxies promised, and what training it gave. A proxy that cannot be told is None."""

    architecture: Architecture
    proxies: dict[str, float | None]
    accuracy: float
    ci95: float
    minutes: float

    def promise(self, proxy: str) -> float:
        """Return the proxy, the higher the better; what cannot be told is worse than all that can."""
        value = self.proxies[proxy]
        if value is None:
            return -math.inf
        return -value if proxy in CONDITIONS else value


@dataclass(frozen=True)
class Record:
    """All architectures that were judged so far; `plan` is what they depend on."""

    name: str
    plan: dict[str, Any]
    environment: Environment
    judged: tuple[Judged, ...]

    @property
    def minutes(self) -> float:
        """How long they were trained."""
        return sum(one.minutes for one in self.judged)


@dataclass(frozen=True)
class Outcome:
    """The result, the architectures that it is made of, and by proxy Spearman's correlation with accuracy."""

    result: Result
    judged: tuple[Judged, ...]
    spearman: dict[str, Interval]


def run(work: Work) -> Outcome:
    """Go on judging architectures until there are enough or the time is up, and correlate."""
    work.check_only(())
    scale = SCALES[work.scale]
    search, training = replace(scale.search, seed=work.seed), replace(scale.plan, seed=work.seed)
    about = {"data": "glyphs", "search": search.to_dict(), "training": asdict(training)}
    plan, name = plain({**about, "test_tasks": scale.test_tasks}), f"{ID}-{work.scale}-{work.seed}"
    record = stored(work, name, plan, _made) or Record(name, plan, environment(work.device), ())
    generator = torch.Generator().manual_seed(work.seed)
    drawn = [random_architecture(generator) for _ in range(scale.architectures)]
    images = load("glyphs").to(work.device)
    done = [one.architecture for one in record.judged]  # in the order in which their trainings ended
    missing = {f"network {place}": one for place, one in enumerate(drawn) if one not in done}
    begin = {
        label: partial(
            image_trainer,
            _plan(training, search, one, images),
            images,
            device=work.device,
            out=run_folder(work, f"{name}-{label.replace(' ', '-')}", plan),
        )
        for label, one in missing.items()
    }
    at_once = concurrent_trainings(work.device)
    for label, trained in train_interleaved(begin, at_once=at_once, minutes=work.minutes, progress=work.progress):
        if trained.finished:
            one = judge(work, missing[label], search, images, trained, scale.test_tasks)
            record = replace(record, judged=(*record.judged, one))
            keep(work, name, record)
    judged = record.judged[: scale.architectures]
    if len(judged) < FEWEST:
        raise InputError(
            f"{ID} has judged {len(judged)} architectures, but correlates no fewer than {FEWEST}. "
            "Give it more --minutes, or call it again to go on."
        )
    found = {kind: correlations(judged, kind, scale.resamples, work.seed) for kind in STATISTICS}
    return Outcome(Result.of(work, ID, tuple(_rows(judged, found)), {name: record}), judged, found["Spearman"])


def _plan(
    training: ImageTrainingConfig, search: SearchConfig, architecture: Architecture, images: LabelledImages
) -> ImageTrainingConfig:
    options = {"architecture": asdict(architecture), "cells": search.cells, "channels": search.channels}
    options |= {"image_channels": images.images.shape[1], "drop_rate": 0.0}
    return replace(training, model_options=options)


def judge(
    work: Work, architecture: Architecture, search: SearchConfig, images: LabelledImages, run: Run, tasks: int
) -> Judged:
    """Score one architecture untrained, and test it trained."""
    promised: dict[str, ProxyScore] = {}
    for proxy, kernel in CONDITIONS.items():
        measure = ProxyEvaluator(replace(search, kernel=kernel), images, work.device)
        repeats = (measure(0, repeat, architecture.active_operators, [None]) for repeat in range(search.repeats))
        each = [scores for measured in repeats for _, scores in measured]
        promised[proxy] = mean_score([scores.condition for scores in each if scores.condition is not None])
        promised["linear regions"] = mean_score([scores.regions for scores in each if scores.regions is not None])
    score = evaluate(run, images.tasks("test"), tasks=tasks, seed=work.seed)
    promised["parameters"] = ProxyScore(float(sum(value.numel() for value in run.net.features.parameters())))
    told = {proxy: None if found.failure else found.value for proxy, found in promised.items()}
    return Judged(architecture, told, score.mean, score.ci95, run.seconds / 60)


def correlation(kind: str, x: Sequence[float], y: Sequence[float], *, resamples: int, seed: int) -> Interval:
    """Correlate the ranks of x and y; the interval is that of pairs drawn again, with replacement.

    >>> correlation("Kendall", [1.0, 2.0, 4.0, 5.0], [1.0, 3.0, 9.0, 8.0], resamples=100, seed=0).value
    0.66...
    """

    def statistic(x: Values, y: Values) -> float:
        constant = min(np.ptp(x), np.ptp(y)) == 0  # and so ranks nothing
        return 0.0 if constant else float(STATISTICS[kind](x, y).statistic)

    ranks = stats.rankdata(x), stats.rankdata(y)
    generator = np.random.default_rng(seed)
    drawn = stats.bootstrap(
        ranks,
        statistic,
        paired=True,
        vectorized=False,
        n_resamples=resamples,
        method="percentile",
        confidence_level=1 - 2 * percentile_tail(len(x)),
        rng=generator,
    )
    low, high = drawn.confidence_interval
    return Interval(statistic(*ranks), float(low), float(high))


def correlations(judged: Sequence[Judged], kind: str, resamples: int, seed: int) -> dict[str, Interval]:
    """Return the rank correlation of every proxy with the accuracy."""
    accuracies = [one.accuracy for one in judged]
    return {
        proxy: correlation(kind, [one.promise(proxy) for one in judged], accuracies, resamples=resamples, seed=seed)
        for proxy in PROXIES
    }


def _rows(judged: Sequence[Judged], found: Mapping[str, Mapping[str, Interval]]) -> list[Row]:
    rows = []
    for kind, own in found.items():
        for proxy, one in own.items():
            troubled = sum(each.proxies[proxy] is None for each in judged)
            ends = f"{one.low:.2f} to {one.high:.2f}".replace("-", "−")
            note = f"95 % interval {ends}; {len(judged)} architectures"
            note += f", {troubled} of which could not be told" if troubled else ""
            half = (one.high - one.low) / 2
            rows.append(Row(f"{proxy}, {kind}", "rank correlation", ours=one.value, ci95=half, note=note))
    accuracies = [100 * one.accuracy for one in judged]
    noise = 100 * sum(one.ci95 for one in judged) / len(judged)
    note = f"{min(accuracies):.1f} to {max(accuracies):.1f}; each ± {noise:.2f} over its tasks"
    rows.append(Row("all architectures", "mean accuracy %", ours=statistics.mean(accuracies), note=note))
    rows.append(Row("all architectures", "standard deviation of accuracy %", ours=statistics.stdev(accuracies)))
    return rows


def _made(held: dict[str, Any]) -> Record:
    plan = {**held["plan"], "training": former_names_replaced(held["plan"]["training"])}
    judged = (Judged(**{**one, "architecture": Architecture.from_dict(one["architecture"])}) for one in held["judged"])
    return Record(**{**held, "plan": plan, "judged": tuple(judged)})


def figure(outcome: Outcome, file: Path) -> None:
    """Draw every architecture's accuracy against each of its proxies, and the correlations side by side."""
    from matplotlib.figure import Figure

    from metabridge.report import figures

    with figures.LIGHT.context():
        page = Figure(figsize=(10.5, 6.4), layout="constrained")
        *panels, summary = page.subplots(2, 3).flat
        for axes, proxy, colour in zip(panels, PROXIES, figures.COLOURS):
            told = [(value, one) for one in outcome.judged if (value := one.proxies[proxy]) is not None]
            axes.errorbar(
                [value for value, _ in told],
                [100 * one.accuracy for _, one in told],
                yerr=[100 * one.ci95 for _, one in told],
                fmt="o",
                color=colour,
                markersize=4,
            )
            axes.set(xlabel=f"{proxy}:\nmore is better", ylabel="accuracy after training, %")
            if proxy in CONDITIONS:
                axes.set(xlabel=f"condition number of the {proxy}:\nless is better", xscale="log")
                figures.plain_numbers(axes.xaxis)
        for place, (proxy, colour) in enumerate(zip(PROXIES, figures.COLOURS)):
            found = outcome.spearman[proxy]
            summary.plot([found.low, found.high], [place, place], color=colour)
            summary.plot(found.value, place, "o", color=colour)
        summary.axvline(0, color=figures.LIGHT.ink, linewidth=0.8)
        summary.set(xlim=(-1.05, 1.05), xlabel="Spearman's rank correlation\nwith accuracy, 95 % intervals")
        summary.set_yticks(range(len(PROXIES)), PROXIES)
        summary.invert_yaxis()
    figures.save(page, file)


EXPERIMENT = UnportedExperiment("nas-ranks", run, figure, resumable=True)
