"""Is a diagnosis right where the truth is known?

Linear worlds are drawn at random. What the diagnosis predicts from sampled tasks of each is set beside the ratio of
the exact risks of NAL and MAML, both trained on other tasks of it, and its interval beside the ratio that endless
training has. Of two worlds that differ in r_H alone, adaptation gains more in the one with the smaller r_H, and the
diagnosis must say so even where steps are short and gains small.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from metabridge.diagnosis import Diagnosis, diagnose
from metabridge.diagnosis.advice import WORTH
from metabridge.environments import HardEasy, Landscape, LinearTasks, TaskGroup
from metabridge.experiments.result import Result, Row, UnportedExperiment, Work, environment
from metabridge.theory.landscape import (
    Risks,
    empirical_maml,
    empirical_nal,
    maml_solution,
    nal_solution,
    risk_above_floor,
)

ID = "diagnose-worlds"
CLEAR = (1.1, 1.5)  # below the first plain pre-training is right, above the second adaptation is
OUTER = 25  # queries of a task
STEEPEST = 1.5  # the largest step, times the largest curvature; from 2 on descent diverges
WIDER, SHORTER = 4, 0.1  # times r_H in the second world of a pair, and times the step in both
TRAINED = 500  # tasks that NAL and MAML are trained on


@dataclass(frozen=True)
class Scale:
    """How many worlds and pairs of worlds, and how many tasks of each are diagnosed."""

    worlds: int
    pairs: int
    tasks: int


SCALES = {"quick": Scale(worlds=16, pairs=8, tasks=100), "paper": Scale(worlds=120, pairs=40, tasks=200)}


@dataclass(frozen=True, eq=False)
class World:
    """A landscape with the step of adaptation and the samples it is taken on."""

    landscape: Landscape
    alpha: float
    m: int

    @classmethod
    def drawn(cls, seed: int) -> World:
        """Draw hard and easy tasks: with an even seed of C's form, otherwise with random covariances and centre."""
        generator = torch.Generator().manual_seed(seed)

        def between(low: float, high: float) -> float:
            """A number whose logarithm is uniform."""
            share = float(torch.rand((), generator=generator, dtype=torch.float64))
            return float(low * (high / low) ** share)

        d = int(between(5, 21))
        easy = between(0.5, 2)
        hard, R = easy * between(0.03, 1), between(0.5, 8)
        r_hard, r_easy, noise = between(0.02, 2), between(0.02, 2), between(0.01, 1)
        alpha, m = between(0.8, 1.1) / easy, int(between(30, 500))
        if seed % 2 == 0:
            return cls(HardEasy(hard, easy, R, r_hard, r_easy, d, noise).landscape, alpha, m)
        centre = torch.nn.functional.normalize(torch.randn(d, generator=generator).double(), dim=0) * R * math.sqrt(d)
        groups = (
            TaskGroup(hard * _covariance(d, generator), centre, r_hard, noise, 0.5),
            TaskGroup(easy * _covariance(d, generator), 0.0, r_easy, noise, 0.5),
        )
        landscape = Landscape(groups, d)
        steepest = float(torch.linalg.eigvalsh(landscape.distribution.covariance).max())
        return cls(landscape, min(alpha, STEEPEST / steepest), m)

    def diagnosed(self, tasks: int, seed: int) -> Diagnosis:
        """Diagnose sampled tasks of this world."""
        return diagnose(LinearTasks(self.landscape, self.m, OUTER), tasks=tasks, alpha=self.alpha, seed=seed)

    def realised(self, seed: int) -> Risks:
        """Train NAL and MAML on tasks, and return the exact 𝓔_m of both."""
        episodes = LinearTasks(self.landscape, self.m, OUTER).sample(TRAINED, torch.Generator().manual_seed(seed))
        return self._risks(empirical_nal(episodes), empirical_maml(episodes, self.alpha))

    def exact(self) -> Risks:
        """Return 𝓔_m of both with endless training."""
        return self._risks(nal_solution(self.landscape), maml_solution(self.landscape, self.alpha, self.m))

    def _risks(self, nal: Tensor, maml: Tensor) -> Risks:
        both = risk_above_floor(self.landscape, torch.stack([nal, maml]), self.alpha, self.m)
        return Risks(*both.tolist())


@dataclass(frozen=True)
class Trial:
    """A world's diagnosis beside the ratio that training realised, and the one that endless training has."""

    diagnosis: Diagnosis
    realised: float
    exact: float

    @property
    def right(self) -> bool | None:
        """Whether the recommendation is right, not if there is none; None where the realised ratio is not clear."""
        if CLEAR[0] <= self.realised <= CLEAR[1]:
            return None
        return self.diagnosis.advice.adapts == (self.realised > CLEAR[1])

    @property
    def covered(self) -> bool:
        """Whether the exact ratio is in the interval."""
        return self.diagnosis.ratio.low <= self.exact <= self.diagnosis.ratio.high

    @property
    def miss(self) -> float:
        """How far the exact ratio is from the predicted one: beyond −1 and 1 it is outside the interval."""
        ratio = self.diagnosis.ratio
        side = ratio.high - ratio.value if self.exact > ratio.value else ratio.value - ratio.low
        return (self.exact - ratio.value) / max(side, 1e-12)


@dataclass(frozen=True)
class Pair:
    """The diagnoses of two worlds that differ in r_H alone. Adaptation gains more in the first."""

    narrow: Diagnosis
    wide: Diagnosis

    @property
    def apart(self) -> bool:
        """Whether the intervals of their ratios do not meet."""
        return not self.narrow.ratio.meets(self.wide.ratio)

    @property
    def ranked(self) -> bool:
        """Whether their ratios rank them right."""
        return self.narrow.ratio.value > self.wide.ratio.value


@dataclass(frozen=True)
class Outcome:
    """The result and the worlds."""

    result: Result
    trials: tuple[Trial, ...]


def run(work: Work) -> Outcome:
    """Diagnose random worlds."""
    scale, started = SCALES[work.scale], time.perf_counter()
    trials = tuple(_trial(10_000 * (work.seed + 1) + number, scale.tasks) for number in range(scale.worlds))
    pairs = [_pair(10_000 * (work.seed + 1) + 5_000 + number, scale.tasks) for number in range(scale.pairs)]
    seconds = time.perf_counter() - started
    about = {**asdict(scale), "trained on": TRAINED, "clear": CLEAR, "worth": WORTH}
    rows = (*world_rows(trials), *pair_rows(pairs))
    return Outcome(Result(ID, work.scale, work.seed, about, environment(work.device), seconds, rows), trials)


def _trial(seed: int, tasks: int) -> Trial:
    world = World.drawn(seed)
    return Trial(world.diagnosed(tasks, seed), world.realised(seed + 1_000_000).ratio, world.exact().ratio)


def _pair(seed: int, tasks: int) -> Pair:
    world = World.drawn(seed)
    narrow = replace(world, alpha=SHORTER * world.alpha)
    hard, easy = world.landscape.groups
    wider = replace(world.landscape, groups=(replace(hard, spread=WIDER * hard.spread), easy))
    wide = replace(narrow, landscape=wider)
    return Pair(narrow.diagnosed(tasks, seed), wide.diagnosed(tasks, seed + 1_000_000))


def pair_rows(pairs: Sequence[Pair]) -> list[Row]:
    """Return how often the world with the smaller r_H ranks above the other."""
    apart = [pair for pair in pairs if pair.apart]
    right = {
        "ratio": (
            [pair.ranked for pair in pairs],
            f"intervals apart in {len(apart)}, and then right in {sum(pair.ranked for pair in apart)}",
        ),
        "1 + R²/r_H": ([pair.narrow.promises_more(pair.wide) for pair in pairs], ""),
    }
    what = f"pairs of worlds, one with {WIDER} times the other's r_H, steps {SHORTER:g} times as long, ranked by"
    return [
        Row(
            f"{what} {name}",
            "pairs right %",
            ours=100 * sum(each) / len(each),
            note=f"{len(pairs)} pairs; {note}".rstrip("; "),
        )
        for name, (each, note) in right.items()
    ]


def world_rows(trials: tuple[Trial, ...]) -> list[Row]:
    """Return how predicted and realised ratios agree."""
    predicted, realised = (
        torch.tensor(values, dtype=torch.float64)
        for values in zip(*((trial.diagnosis.ratio.value, trial.realised) for trial in trials))
    )
    note = f"{len(trials)} worlds; realised: exact risks after training on {TRAINED} other tasks"
    rows = [
        Row(
            "linear worlds, predicted and realised ratio",
            "correlation",
            ours=_correlation(predicted, realised),
            note=note,
        ),
        Row(
            "linear worlds, their logarithms",
            "correlation",
            ours=_correlation(predicted.log(), realised.log()),
            note=f"median error {100 * float((predicted / realised - 1).abs().median()):.1f} %",
        ),
    ]
    kinds = {f"above {CLEAR[1]:g}": realised > CLEAR[1], f"below {CLEAR[0]:g}": realised < CLEAR[0]}
    for kind, chosen in kinds.items():
        right = [bool(trial.right) for trial, own in zip(trials, chosen.tolist()) if own]
        if right:
            share = 100 * sum(right) / len(right)
            rows.append(
                Row(
                    f"linear worlds, true ratio {kind}",
                    "recommendation right %",
                    ours=share,
                    note=f"{len(right)} worlds",
                )
            )
    intervals = [trial.diagnosis.ratio for trial in trials]
    widths = torch.tensor([(one.high - one.low) / one.value for one in intervals], dtype=torch.float64)
    share, width = 100 * sum(trial.covered for trial in trials) / len(trials), 100 * float(widths.median())
    note = "of endless training; 95 would be right if groups were known and not found, and tasks endless"
    return [
        *rows,
        Row("linear worlds, exact ratio in the 95 % interval", "worlds %", ours=share, note=note),
        Row("linear worlds, width of the 95 % interval", "median % of the ratio", ours=width),
    ]


def _correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


def _covariance(d: int, generator: torch.Generator) -> Tensor:
    """A matrix of random directions, with eigenvalues that differ by some 30 % and have the mean 1."""
    directions = torch.linalg.qr(torch.randn(d, d, generator=generator).double()).Q
    values = (0.3 * torch.randn(d, generator=generator).double()).exp()
    return (directions * (values / values.mean())) @ directions.T  # type: ignore[no-any-return]


def figure(outcome: Outcome, file: Path) -> None:
    """Draw predicted against realised ratios, and how far exact ones are from the middle of their intervals."""
    from matplotlib.figure import Figure

    from metabridge.report import figures

    with figures.LIGHT.context():
        page = Figure(figsize=(10.4, 4.6), layout="constrained")
        worlds, misses = page.subplots(1, 2)
        for right, label, colour, marker in (
            (True, "recommendation right", figures.COLOURS[0], "o"),
            (None, f"true ratio from {CLEAR[0]:g} to {CLEAR[1]:g}: not clear", figures.COLOURS[6], "s"),
            (False, "recommendation wrong or undecided", figures.COLOURS[1], "X"),
        ):
            own = [trial for trial in outcome.trials if trial.right is right]
            ratios = [trial.diagnosis.ratio for trial in own]
            margins = [[ratio.value - ratio.low for ratio in ratios], [ratio.high - ratio.value for ratio in ratios]]
            worlds.errorbar(
                [trial.realised for trial in own],
                [ratio.value for ratio in ratios],
                margins,
                fmt=marker,
                color=colour,
                markersize=4,
                linewidth=0.8,
                label=f"{label} ({len(own)})",
            )
        most = 1.1 * max(max(trial.realised, trial.diagnosis.ratio.high) for trial in outcome.trials)
        worlds.plot([0.95, most], [0.95, most], color=figures.LIGHT.ink, linewidth=0.8, zorder=0)
        label = f"adaptation is recommended from {WORTH:g} on"
        worlds.axhline(WORTH, color=figures.LIGHT.ink, linestyle=":", linewidth=0.8, zorder=0, label=label)
        worlds.set(xscale="log", yscale="log", title="random linear worlds")
        worlds.set(xlabel="realised risk of NAL / risk of MAML", ylabel="predicted, with 95 % interval")
        ticks = [tick for tick in (1, 1.5, 2, 3, 5, 10, 20, 50, 100) if tick < most]
        for axis in (worlds.xaxis, worlds.yaxis):
            axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.set_ticks([], minor=True)
        worlds.legend(fontsize=8)
        kinds = ((True, "in the 95 % interval", figures.COLOURS[0], "o"), (False, "outside", figures.COLOURS[1], "X"))
        for covered, label, colour, marker in kinds:
            own = [trial for trial in outcome.trials if trial.covered is covered]
            places = [trial.exact for trial in own], [trial.miss for trial in own]
            misses.plot(*places, marker, color=colour, markersize=4, label=f"{label} ({len(own)})")
        misses.axhspan(-1, 1, color=figures.LIGHT.line, alpha=0.5, zorder=0)
        misses.set(xscale="log", title="exact ratio and interval")
        misses.set(xlabel="exact risk of NAL / risk of MAML", ylabel="exact less predicted, in sides of the interval")
        misses.xaxis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
        misses.xaxis.set_ticks([], minor=True)
        misses.legend(fontsize=8)
    figures.save(page, file)


EXPERIMENT = UnportedExperiment("diagnose-worlds", run, figure)
