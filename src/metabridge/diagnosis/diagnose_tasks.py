"""Which method pays on these tasks, found out before any training."""

from __future__ import annotations

import json
import logging
import math
import statistics
from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch

from metabridge.diagnosis.advice import Advice, Cost, Twin, advise, costs, kernel_twins
from metabridge.diagnosis.estimates import DIVERGES, FEWEST, Geography, Interval, hard_tasks
from metabridge.diagnosis.feature_space import Space
from metabridge.diagnosis.moments import Features, Moments, curvatures, rates
from metabridge.environments.environment import Environment
from metabridge.environments.image_tasks import ImageTasks, LabelledImages
from metabridge.environments.mixture import Mixture
from metabridge.errors import InputError, check_positive
from metabridge.kernels.kernel import Kernel
from metabridge.models.batch_norm import estimate_statistics
from metabridge.models.network import Network
from metabridge.progress import track_progress
from metabridge.training.config import ImageTrainingConfig
from metabridge.training.evaluation import Model
from metabridge.training.image_training import network_of

log = logging.getLogger("metabridge")

Grouping = Literal["hardness", "superclasses", "parts"]
GROUPINGS: dict[str, str] = {
    "hardness": "two kinds of tasks with a covariance each, of which the hard ones have the lower rates",
    "superclasses": "hard tasks tell classes of one superclass apart, easy ones those of different superclasses",
    "parts": "the two parts of the mixture, the hard one first",
}
BLOCK = 16  # tasks drawn at a time
FEW = 50  # tasks, of which resampling does not tell all of the spread
UNSTABLE = 0.05  # of the tasks, on which a step may diverge
STATISTICS_FROM = 512  # images


@dataclass(frozen=True)
class Group:
    """Tasks of one kind.

    How many there are, the geometric mean of their rates, the dispersion r of their solutions, and the fourth moments
    of their inputs in multiples of those of normal inputs.
    """

    name: str
    tasks: int
    rate: float
    dispersion: float
    kurtosis: float


@dataclass(frozen=True)
class Diagnosis:
    """What was estimated of the tasks, what that predicts, and what is therefore recommended.

    - `space`: what solutions are compared in; it has `dimension` dimensions.
    - `alpha`, `m`: the step of adaptation and the samples it is taken on.
    - `rates`, `curvatures`, `hard`, `places`: of each task, its rate, λ_max of its covariance, whether it is hard, and
      its place on the map of solutions.
    - `unstable`: the share of tasks on which the step diverges, those with α·λ_max of 2 or more.
    - `groups`, `distance`: the hard and the easy tasks, and R between their centres.
    - `limit`: 1 + R²/r_H, the most that the ratio tends to as hard tasks get slower (C corollary 2); None if r_H is 0.
    - `nal`, `maml`: risks above the floor 𝓔_m; `ratio` is the one by the other, `saved` the share of the whole loss
      that MAML saves, and `left` what it leaves of NAL's loss above the noise before adaptation.
    """

    space: str
    dimension: int
    alpha: float
    m: int
    seed: int
    grouping: str
    rates: tuple[float, ...]
    curvatures: tuple[float, ...]
    unstable: float
    hard: tuple[bool, ...]
    places: tuple[tuple[float, float], ...]
    groups: tuple[Group, Group]
    distance: float
    limit: float | None
    nal: float
    maml: float
    ratio: Interval
    saved: Interval
    left: float
    twins: tuple[Twin, ...]
    costs: tuple[Cost, ...]
    advice: Advice

    def promises_more(self, other: Diagnosis) -> bool:
        """Whether adaptation gains more here than on other tasks, by 1 + R²/r_H.

        Where a step is short the ratio is close to 1 on any tasks, and noise decides which one is larger.
        """
        here, there = (math.inf if one.limit is None else one.limit for one in (self, other))
        return here > there

    def told(self) -> str:
        """Say it in a few lines."""
        lines = [self.advice.headline, *(f"- {reason}" for reason in self.advice.reasons), ""]
        lines.append(f"Solutions are compared in the space of {self.space}, of {self.dimension} dimensions.")
        lines.append(f"Groups: {self.grouping}.")
        lines += [
            f"{group.name}: {group.tasks} tasks, rate {group.rate:.3g}, dispersion r {group.dispersion:.3g}, "
            f"fourth moments {group.kurtosis:.2g} times those of normal inputs"
            for group in self.groups
        ]
        limit = "" if self.limit is None else f"; 1 + R²/r_H is {self.limit:.3g}"
        lines.append(f"Distance R between their centres {self.distance:.3g}{limit}")
        lines.append(f"After a step of {self.alpha:.3g} on {self.m} samples: ratio of risks {self.ratio.told()}")
        lines.append(f"Stability: {self.stability()}")
        lines += [f"Kernel of {twin.method}: {twin.metric} {twin.mean:.3g} ± {twin.ci95:.2g}" for twin in self.twins]
        lines.append(f"All this is of {self.space} as they are: what training makes of features it cannot know.")
        return "\n".join(lines)

    def stability(self) -> str:
        """Say on how many tasks the step diverges, and how steep they are."""
        steps = sorted(self.alpha * curvature for curvature in self.curvatures)
        return (
            f"the step diverges on {100 * self.unstable:.1f} % of the tasks, where α·λ_max is {DIVERGES} or more; it "
            f"is {statistics.median(steps):.2g} in the median and {steps[-1]:.2g} in the steepest"
        )

    def to_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps(asdict(self), indent=1, allow_nan=False, ensure_ascii=False)


def diagnose(
    environment: Environment,
    net: Network | Model | None = None,
    *,
    features: Features | None = None,
    kernel: Kernel | None = None,
    groups: Grouping = "hardness",
    tasks: int = 200,
    alpha: float | None = None,
    seed: int = 0,
    progress: bool = False,
) -> Diagnosis:
    """Estimate from sampled tasks whether training that adapts pays, by C's formulas.

    The space is that of the features: of `net`, of the function `features` from points (n, ...) to (n, d), or, for
    points that are vectors, of the points themselves. Tasks with class labels are compared in the space of pairs.
    `groups` says how hard and easy tasks are found: by "hardness", by "superclasses" of images, or as the "parts" of a
    `Mixture`, of which the first is the hard one. The step `alpha` is the inverse of the groups' largest curvature if
    not given, or less, so that it diverges on no task. It is taken on as many samples as the tasks' supports have. With
    a `kernel`, its twins predict too.

    >>> from metabridge.environments import HardEasy, LinearTasks
    >>> world = HardEasy(rho_hard=0.1, rho_easy=1.0, R=5.0, r_hard=0.5, r_easy=0.5)
    >>> found = diagnose(LinearTasks(world.landscape, shots=200, queries=50), alpha=1.0)
    >>> found.advice.method, found.ratio.low > 1.25
    ('maml', True)
    """
    if alpha is not None:
        check_positive("alpha", alpha)
    parts = _parts(environment, groups)
    each = tasks // len(parts)
    if each < FEWEST:
        raise InputError(f"tasks is {tasks}, but two groups need at least {2 * FEWEST}. Sample more.")
    if tasks < FEW:
        log.warning("tasks is %d: intervals from fewer than %d are too narrow.", tasks, FEW)
    examples = [part.sample(min(BLOCK, each), torch.Generator().manual_seed(seed)) for part in parts]
    space = Space.of(examples, net, features)
    moments = _measured(space, parts, each, seed, progress)
    speeds, m = rates(moments), space.samples(examples[0])
    known = len(parts) == 2
    hard = torch.arange(len(moments)) < each if known else hard_tasks(moments)
    geography = Geography(moments, hard, m, _share(environment) if known else None)
    safe = geography.stable_step()
    step = safe if alpha is None else alpha
    if not geography.adapted(step).isfinite().all():
        raise InputError(f"alpha is {alpha}, which is too large to compute with. Use alpha={safe:.3g} or less.")
    prediction = geography.predict(step, torch.Generator().manual_seed(seed))
    steep = curvatures(moments)
    unstable = float((step * steep >= DIVERGES).double().mean())
    landscape = geography.landscape(step)
    hard_group, easy_group = (
        Group(name, len(own), float(speeds[own].log().mean().exp()), float(torch.as_tensor(group.spread)), kurtosis)
        for name, own, group, kurtosis in zip(
            ("hard", "easy"), geography.members, landscape.groups, geography.kurtosis.tolist()
        )
    )
    distance = geography.distance(landscape, step)
    network = net.net if isinstance(net, Model) else net
    plain = "rfs" if space.classification else "nal"
    joint = ("mtl",) if space.classification else ()
    weighed = (plain, "maml") if network is None else (plain, *joint, "anil", "maml")
    twins: tuple[Twin, ...] = ()
    if kernel is not None:
        try:
            twins = kernel_twins(kernel, environment, seed, progress=progress)
        except InputError as error:  # such as images that are the same, which the rest can live with
            log.warning("what kernels predict is left out: %s", error)
    return Diagnosis(
        space=space.name,
        dimension=moments.dimension,
        alpha=step,
        m=m,
        seed=seed,
        grouping=GROUPINGS[groups],
        rates=tuple(speeds.tolist()),
        curvatures=tuple(steep.tolist()),
        unstable=unstable,
        hard=tuple(hard.tolist()),
        places=tuple((x, y) for x, y in geography.map().tolist()),
        groups=(hard_group, easy_group),
        distance=distance,
        limit=1 + distance**2 / hard_group.dispersion if hard_group.dispersion else None,
        nal=prediction.risks.nal,
        maml=prediction.risks.maml,
        ratio=prediction.ratio,
        saved=prediction.saved,
        left=prediction.left,
        twins=twins,
        costs=costs(weighed, network, moments.dimension),
        advice=advise(
            prediction,
            plain,
            "maml" if network is None else "anil",
            (hard_group.rate, easy_group.rate),
            twins,
            _doubts(geography, step, unstable, safe),
        ),
    )


def _doubts(geography: Geography, step: float, unstable: float, safe: float) -> tuple[str, ...]:
    """Return why the prediction cannot be trusted, if there is a reason."""
    doubts = []
    heavy = geography.heavy_tails()
    if heavy:
        doubts.append(
            f"few values dominate the variance of the {' and of the '.join(heavy)}, so it may not exist: clip or "
            "transform them, or sample more tasks"
        )
    if unstable > UNSTABLE:
        doubts.append(
            f"a step of {step:.3g} diverges on {100 * unstable:.1f} % of the tasks, which the formulas do not know: "
            f"use alpha={safe:.3g} or less"
        )
    return tuple(doubts)


def untrained(images: LabelledImages, model: str = "conv4", *, seed: int = 0) -> Network:
    """Return a new network for the images, whose batch norms have the statistics of some of them.

    >>> from metabridge.datasets import load
    >>> untrained(load("glyphs")).head.in_features
    32
    """
    config = ImageTrainingConfig("nal", model=model, statistics="running", seed=seed)
    net = network_of(config, images)
    some = torch.randperm(len(images.images), generator=torch.Generator().manual_seed(seed))[:STATISTICS_FROM]
    net = net.to(images.images.device)
    estimate_statistics(net, [images.float_images(some)])
    return net


def _parts(environment: Environment, groups: Grouping) -> tuple[Environment, ...]:
    """Return the environments of hard and of easy tasks where they are known, or the one of all."""
    if groups not in GROUPINGS:
        raise InputError(f"groups is {groups!r}, but must be one of {', '.join(GROUPINGS)}.")
    if groups == "hardness":
        return (environment,)
    if groups == "parts":
        if not isinstance(environment, Mixture) or len(environment.environments) != 2:
            raise InputError("groups is 'parts', but the environment is no Mixture of two. Use groups='hardness'.")
        return environment.environments
    if not isinstance(environment, ImageTasks):
        raise InputError("groups is 'superclasses', but only tasks of images have them. Use groups='hardness'.")
    own = environment.data.superclasses[environment.data.splits[environment.split]]
    kinds = len(own.unique())
    if kinds in (1, len(own)):
        found = "all classes are of one" if kinds == 1 else "every class is one of its own"
        raise InputError(
            f"groups is 'superclasses', but split '{environment.split}' has no superclasses to group by: {found}. "
            "Use groups='hardness'."
        )
    return replace(environment, superclass="same"), replace(environment, superclass="different")


def _share(environment: Environment) -> float:
    """The share of hard tasks: the weight of the mixture's first part, or half."""
    if not isinstance(environment, Mixture):
        return 0.5
    return environment.weights[0] / sum(environment.weights)


def _measured(space: Space, parts: tuple[Environment, ...], each: int, seed: int, progress: bool) -> Moments:
    """Draw so many tasks of each part, some at a time, and measure them."""
    generator = torch.Generator().manual_seed(seed)
    portions = [(part, min(BLOCK, each - first)) for part in parts for first in range(0, each, BLOCK)]
    shown = track_progress(portions, "measuring tasks", progress)
    return Moments.joined([space.moments(part.sample(size, generator)) for part, size in shown])
