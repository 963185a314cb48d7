"""C's figure 3: what MAML gains over NAL is decided by R²/r_H, the distance of hard tasks against their spread.

Hard and easy tasks with ρ_H = 0.1, ρ_E = 0.9, d = 10 and m = n₂ = 500, at growing distance R. In the first setting the
hard tasks lie far apart, R²/r_H = 0.5 and R²/r_E = 10; in the second the easy ones do. A third panel shows the
limit that corollary 2 gives the ratio.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from metabridge.environments.linear_tasks import HardEasy, LinearTasks
from metabridge.experiments.landscape_linear import (
    NAMES,
    Scale,
    compared,
    completed,
    descend,
    draw_runs,
    judge,
    learners,
)
from metabridge.experiments.result import Result, Row, UnportedExperiment, Work
from metabridge.theory.landscape import Solution, asymptotic_ratio, hard_easy_risks, noise_floor

ID = "landscape-fig3"
M, RHO_HARD, RHO_EASY, NOISE = 500, 0.1, 0.9, 0.01
ALPHA = 1 / RHO_EASY
SPREADS = {"hard tasks far apart": (0.5, 10.0), "hard tasks close together": (10.0, 0.5)}  # R²/r_H and R²/r_E
LIMIT_SIZES = tuple(10**power for power in range(2, 9))  # m of the third panel
LIMIT_HARDNESS = (0.1, 0.01, 0.001)  # ρ_H/ρ_E of the third panel


@dataclass(frozen=True)
class Settings:
    """How SGD goes, and at which distances."""

    sgd: Scale
    distances: tuple[float, ...]  # R


SCALES = {
    "quick": Settings(Scale(iterations=2500, judged=500, runs=5), (1.0, 3.0, 5.0)),
    "paper": Settings(Scale(), tuple(half / 2 for half in range(1, 11))),
}

Risks = dict[str, dict[float, dict[Solution, Tensor]]]  # by setting and R


@dataclass(frozen=True)
class Outcome:
    """The result, and 𝓔_m of the ends of SGD for each run."""

    result: Result
    risks: Risks


def world(setting: str, R: float, hardness: float = RHO_HARD / RHO_EASY) -> HardEasy:
    """Return the tasks at distance R."""
    hard, easy = SPREADS[setting]
    return HardEasy(hardness * RHO_EASY, RHO_EASY, R=R, r_hard=R**2 / hard, r_easy=R**2 / easy, noise=NOISE)


def run(work: Work) -> Outcome:
    """Let SGD go to its end at every distance, and judge the ends."""
    settings, started = SCALES[work.scale], time.perf_counter()
    generator = torch.Generator().manual_seed(work.seed)
    risks: Risks = {setting: {} for setting in SPREADS}
    for setting, own in risks.items():
        for R in settings.distances:
            tasks = LinearTasks(world(setting, R).landscape, M, settings.sgd.outer)
            floor = noise_floor(tasks.landscape, ALPHA, M)
            found = descend(tasks, learners(ALPHA, M), settings.sgd, generator)
            own[R] = {name: judge(tasks, w, ALPHA, settings.sgd, generator) - floor for name, w in found.items()}
    about = asdict(settings) | {"m": M, "alpha": ALPHA, "rho_hard": RHO_HARD, "rho_easy": RHO_EASY, "noise": NOISE}
    return Outcome(completed(work, ID, started, [*rows(risks), *limit_rows()], about), risks)


def rows(risks: Risks) -> list[Row]:
    """Give the risks and their ratios beside the closed forms."""
    found = []
    for setting, points in risks.items():
        for R, own in points.items():
            theory = hard_easy_risks(world(setting, R), ALPHA, M)
            for name, values in own.items():
                found.append(compared(f"{NAMES[name]}, {setting}, R = {R:g}", "𝓔_m", values, getattr(theory, name)))
            ratio = own["nal"] / own["maml"]
            found.append(compared(f"NAL over MAML, {setting}, R = {R:g}", "ratio", ratio, theory.ratio))
    return found


def limit_rows() -> list[Row]:
    """Give the ratio nearest to the limit of corollary 2, beside the limit."""
    found = []
    for setting in SPREADS:
        nearest = world(setting, 1.0, LIMIT_HARDNESS[-1])
        ratio, limit = hard_easy_risks(nearest, ALPHA, LIMIT_SIZES[-1]).ratio, asymptotic_ratio(nearest)
        note = f"closed form at ρ_H/ρ_E = {LIMIT_HARDNESS[-1]:g}, m = {LIMIT_SIZES[-1]}; beside 1 + R²/r_H"
        name = f"limit of NAL over MAML, {setting}"
        agrees = abs(ratio / limit - 1) < 0.02
        found.append(Row(name, "ratio", published=limit, ours=ratio, agrees=agrees, note=note))
    return found


def figure(outcome: Outcome, file: Path) -> None:
    """Draw risks against R for both settings, their ratios, and the limit of the ratio."""
    from matplotlib.figure import Figure

    from metabridge.report import figures

    orange, blue = figures.COLOURS[1], figures.COLOURS[0]
    with figures.LIGHT.context():
        picture = Figure(figsize=(15, 5), layout="constrained")
        picture.suptitle("Closed forms and the ends of SGD, with 95 % intervals over runs")
        *left, middle, right = picture.subplots(1, 4)
        places = [place / 20 for place in range(1, 101)]
        for axes, (setting, points) in zip(left, outcome.risks.items()):
            for (name, label), colour in zip(NAMES.items(), (orange, blue)):
                theory = [getattr(hard_easy_risks(world(setting, R), ALPHA, M), name) for R in places]
                axes.plot(places, theory, color=colour, label=f"{label}, closed form")
                draw_runs(axes, _along(points, name), colour, f"{label}, SGD")
            axes.set(xlabel="R, distance of hard from easy tasks", ylabel="risk above the floor, $\\mathcal{E}_m$")
            axes.set(title=f"{setting}\n{_shares(setting)}", ylim=(0, None))
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
        for setting, colour, marker in zip(SPREADS, (figures.COLOURS[3], figures.COLOURS[2]), "sD"):
            ratios = {R: own["nal"] / own["maml"] for R, own in outcome.risks[setting].items()}
            middle.axhline(hard_easy_risks(world(setting, 1.0), ALPHA, M).ratio, color=colour)
            draw_runs(middle, ratios, colour, f"{setting}, SGD", marker)
        middle.set(xlabel="R, distance of hard from easy tasks", ylim=(1, None))
        middle.set(
            title=f"risk of NAL over that of MAML\nm = {M}", ylabel="$\\mathcal{E}_m$(NAL) / $\\mathcal{E}_m$(MAML)"
        )
        middle.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14))
        setting = list(SPREADS)[-1]
        for hardness, line in zip(LIMIT_HARDNESS, figures.LINES[::-1]):
            ratios_at = [hard_easy_risks(world(setting, 1.0, hardness), ALPHA, m).ratio for m in LIMIT_SIZES]
            right.plot(LIMIT_SIZES, ratios_at, line, color=figures.COLOURS[2], label=f"$ρ_H/ρ_E$ = {hardness:g}")
        right.axhline(asymptotic_ratio(world(setting, 1.0)), color="black", linewidth=1, label="1 + $R^2/r_H$")
        right.set(
            xscale="log", xlabel="m, samples of the step", ylim=(1, None), title=f"{setting},\ncloser to the limit"
        )
        right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
    figures.save(picture, file)


def _along(points: Mapping[float, Mapping[Solution, Tensor]], name: Solution) -> dict[float, Tensor]:
    return {R: own[name] for R, own in points.items()}


def _shares(setting: str) -> str:
    hard, easy = SPREADS[setting]
    return f"$R^2/r_H$ = {hard:g}, $R^2/r_E$ = {easy:g}"


EXPERIMENT = UnportedExperiment("landscape-fig3", run, figure)
