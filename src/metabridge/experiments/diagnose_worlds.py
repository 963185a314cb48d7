"""Is a diagnosis right where the truth is known, and does it rank real data as C's table 1 does?

Linear worlds are drawn at random. What the diagnosis predicts from sampled tasks of each is set beside the ratio of
the exact risks of NAL and MAML, both trained on other tasks of it. On characters, hard tasks of alike alphabets
("small r_H") must rank above hard tasks of many. Where the numbers of the experiment glyphs lie in the folder, the
predicted order of methods is set beside their accuracies.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor

from metabridge.diagnose import Diagnosis, diagnose, untrained
from metabridge.diagnose.advice import WORTH
from metabridge.diagnose.moments import Features, rates
from metabridge.diagnose.space import Space
from metabridge.environments import HardEasy, LabelledImages, Landscape, LinearTasks, TaskGroup
from metabridge.environments.datasets import load
from metabridge.environments.mixture import Mixture
from metabridge.episodes import Episodes
from metabridge.experiments.landscape_table1 import ALIKE, TARGETS, WAYS, alphabets
from metabridge.experiments.result import Result, Row, Work, environment
from metabridge.kernels import fully_connected
from metabridge.models import Network
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
TRAINED = 500  # tasks that NAL and MAML are trained on
HARD = 10  # alphabets with the lowest rates, as many as C has
METHODS = ("rfs", "mtl", "anil", "maml")  # whose order is predicted


@dataclass(frozen=True)
class Scale:
    """How many worlds, tasks of each, and tasks of each setting of characters, over how many seeds."""

    worlds: int
    tasks: int
    characters: int
    ranking: int  # tasks that rank an alphabet
    seeds: int


SCALES = {
    "quick": Scale(worlds=16, tasks=100, characters=128, ranking=6, seeds=1),
    "paper": Scale(worlds=80, tasks=200, characters=256, ranking=12, seeds=3),
}


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
        return cls(Landscape(groups, d), alpha, m)

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
        """Whether the recommendation is right; None where the realised ratio is not clear."""
        if CLEAR[0] <= self.realised <= CLEAR[1]:
            return None
        return self.diagnosis.advice.adapts == (self.realised > CLEAR[1])


@dataclass(frozen=True)
class Outcome:
    """The result, the worlds, and the diagnoses of each setting of characters, one a seed."""

    result: Result
    trials: tuple[Trial, ...]
    settings: dict[str, tuple[Diagnosis, ...]]


def run(work: Work) -> Outcome:
    """Diagnose random worlds and characters."""
    scale, started = SCALES[work.scale], time.perf_counter()
    trials = tuple(_trial(10_000 * (work.seed + 1) + number, scale.tasks) for number in range(scale.worlds))
    rows = world_rows(trials)
    settings: dict[str, tuple[Diagnosis, ...]] = {}
    hard: dict[str, dict[str, list[str]]] = {}
    for name, images in _characters(work).items():
        net = untrained(images, seed=work.seed)
        own, hard[name] = _settings(images, net, scale, work.seed)
        settings |= {f"{name}, {setting} r_H": found for setting, found in own.items()}
        rows += ranking_rows(name, own)
    rows += _order_rows(work, scale)
    seconds = time.perf_counter() - started
    about = {**asdict(scale), "trained on": TRAINED, "clear": CLEAR, "worth": WORTH, "hard alphabets": hard}
    result = Result(ID, work.scale, work.seed, about, environment(work.device), seconds, tuple(rows))
    return Outcome(result, trials, settings)


def _trial(seed: int, tasks: int) -> Trial:
    world = World.drawn(seed)
    return Trial(world.diagnosed(tasks, seed), world.realised(seed + 1_000_000).ratio, world.exact().ratio)


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
    inside = [trial.diagnosis.ratio.low <= trial.exact <= trial.diagnosis.ratio.high for trial in trials]
    share = 100 * sum(inside) / len(inside)
    note = "of endless training; 95 would be right if groups and covariances were known and not found"
    return [*rows, Row("linear worlds, exact ratio in the 95 % interval", "worlds %", ours=share, note=note)]


def _settings(
    images: LabelledImages, net: Network, scale: Scale, seed: int
) -> tuple[dict[str, tuple[Diagnosis, ...]], dict[str, list[str]]]:
    """Diagnose tasks with hard ones of many alphabets, and of two that are alike, in one space; name the alphabets."""
    own = {name: members for name, members in alphabets(images).items() if len(members) >= WAYS}
    features, slow = _ranked(replace(images, splits=own), net, scale.ranking, seed)
    hardest = sorted(own, key=slow.__getitem__)[:HARD]
    alike = list(ALIKE) if set(ALIKE) <= set(own) else hardest[:2]
    easy = [name for name in own if name not in (*hardest, *alike)]
    found, chosen = {}, {"large": hardest, "small": alike}
    for setting, hard in chosen.items():
        parted = replace(
            images,
            splits={kind: torch.cat([own[name] for name in names]) for kind, names in (("hard", hard), ("easy", easy))},
        )
        tasks = Mixture(
            (
                parted.tasks("hard", ways=WAYS, queries=TARGETS, superclass="same"),
                parted.tasks("easy", ways=WAYS, queries=TARGETS, superclass="different"),
            ),
            (0.5, 0.5),
        )
        found[setting] = tuple(
            diagnose(tasks, features=features, groups="parts", tasks=scale.characters, seed=seed + turn)
            for turn in range(scale.seeds)
        )
    return found, chosen


def ranking_rows(name: str, settings: dict[str, tuple[Diagnosis, ...]]) -> list[Row]:
    """Return R, r_H and the predicted ratio in both settings, and whether they rank as C's table 1 says."""
    rows = []
    for setting, found in settings.items():
        R, r = (
            sum(values) / len(found) for values in zip(*((one.distance, one.groups[0].dispersion) for one in found))
        )
        note = f"R {R:.3g}, r_H {r:.3g}; {len(found)} seeds"
        mean = sum(one.ratio.value for one in found) / len(found)
        rows.append(Row(f"{name}, {setting} r_H", "predicted ratio", ours=mean, note=note))
        if r > 0:
            rows.append(Row(f"{name}, {setting} r_H", "1 + R²/r_H", ours=1 + R**2 / r, note=note))
    pairs = list(zip(settings["small"], settings["large"]))
    ranked = {
        "predicted ratio, small r_H above large": [one.ratio.value > other.ratio.value for one, other in pairs],
        "1 + R²/r_H, small r_H above large": [_promise(one) > _promise(other) for one, other in pairs],
    }
    for metric, right in ranked.items():
        share, note = 100 * sum(right) / len(right), "C §5: adaptation gains more where hard tasks are alike"
        rows.append(Row(f"{name}, {metric}", "seeds %", ours=share, agrees=all(right), note=note))
    return rows


def _promise(found: Diagnosis) -> float:
    return math.inf if found.limit is None else found.limit


def _order_rows(work: Work, scale: Scale) -> list[Row]:
    """Return the predicted order of every two methods on glyphs beside that of their trained accuracies."""
    file = work.out / "glyphs.json"
    if not file.exists():
        return []
    trained = {row.name.partition(",")[0]: row for row in Result.read(file).rows if row.name.endswith(", test tasks")}
    if not set(METHODS) <= set(trained):
        return []
    images = load("glyphs")
    kernel = fully_connected(depth=3, bias_variance=0.1)
    found = diagnose(
        images.tasks("train"), untrained(images, seed=work.seed), kernel=kernel, tasks=scale.characters, seed=work.seed
    )
    twins = {twin.method: twin for twin in found.twins}
    rows = []
    for first, second in combinations(METHODS, 2):
        gap = trained[first].ours - trained[second].ours
        sides = {"formulas": _formula_side(found, first, second)}
        if first in twins and second in twins:
            sides["kernels"] = 1 if twins[first].gain > twins[second].gain else -1
        for source, side in sides.items():
            if side is None:
                continue
            rows.append(
                Row(
                    f"glyphs, {source}: {first} {'>' if side > 0 else '<'} {second}",
                    "trained accuracy, difference %",
                    ours=gap,
                    agrees=gap * side > 0,
                    note=f"trained: {first} {trained[first].ours:.1f}, {second} {trained[second].ours:.1f}",
                )
            )
    return rows


def _formula_side(found: Diagnosis, first: str, second: str) -> int | None:
    """1 if the formulas say that the first is the better choice, −1 if the second; of two of a kind, nothing."""
    plain = [name in ("rfs", "mtl") for name in (first, second)]
    if plain[0] == plain[1]:
        return None
    return 1 if plain[0] != found.advice.adapts else -1


def _ranked(images: LabelledImages, net: Network, tasks: int, seed: int) -> tuple[Features, dict[str, float]]:
    """Return features along the principal directions of all alphabets, and the mean rate of tasks within each."""

    def sample(name: str) -> Episodes:
        drawn = images.tasks(name, ways=WAYS, queries=TARGETS)
        return drawn.sample(tasks, torch.Generator().manual_seed(seed))

    space = Space.of([sample(name) for name in images.splits], net, None)
    slow = {name: float(rates(space.moments(sample(name))).log().mean().exp()) for name in images.splits}
    return lambda x: space.directions(space.features(x).double().cpu()), slow


def _correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


def _covariance(d: int, generator: torch.Generator) -> Tensor:
    """A matrix of random directions, with eigenvalues that differ by some 30 % and have the mean 1."""
    directions = torch.linalg.qr(torch.randn(d, d, generator=generator).double()).Q
    values = (0.3 * torch.randn(d, generator=generator).double()).exp()
    return (directions * (values / values.mean())) @ directions.T  # type: ignore[no-any-return]


def _characters(work: Work) -> dict[str, LabelledImages]:
    """Return glyphs, and Omniglot where it is at hand."""
    found = {"glyphs": load("glyphs")}
    if work.data is not None and (work.data / "omniglot").exists():
        found["omniglot"] = load("omniglot", work.data / "omniglot")
    return {name: images.to(work.device) for name, images in found.items()}


def figure(outcome: Outcome, file: Path) -> None:
    """Draw predicted against realised ratios, and R² against r_H of the characters."""
    from matplotlib.figure import Figure

    from metabridge.files import write_whole
    from metabridge.report import figures

    with figures.LIGHT.context():
        page = Figure(figsize=(10.4, 4.6), layout="constrained")
        worlds, characters = page.subplots(1, 2)
        for right, label, colour, marker in (
            (True, "recommendation right", figures.COLOURS[0], "o"),
            (None, f"true ratio from {CLEAR[0]:g} to {CLEAR[1]:g}: not clear", figures.COLOURS[6], "s"),
            (False, "recommendation wrong", figures.COLOURS[1], "X"),
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
        for (name, found), colour in zip(outcome.settings.items(), (*figures.COLOURS[1:3], *figures.COLOURS[3:5])):
            characters.plot(
                [one.groups[0].dispersion for one in found],
                [one.distance**2 for one in found],
                "o" if "small" in name else "x",
                color=colour,
                label=name.replace("r_H", "$r_H$"),
            )
        characters.set(title="hard and easy tasks of characters, one mark a seed", xlim=(0, None), ylim=(0, None))
        characters.set(
            xlabel="dispersion $r_H$ of the hard tasks' solutions", ylabel="$R^2$ between the groups' centres"
        )
        characters.margins(0.15)
        characters.legend(fontsize=8)
    write_whole(file, figures.png(page))
