"""Diagnose sampled tasks: predict before training which method is worth its cost on them."""

from __future__ import annotations

import json
import logging
import math
import statistics
from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch

from metabridge.diagnosis.advice import (
    Advice,
    KernelPrediction,
    MethodCost,
    advise,
    method_costs,
    predict_with_kernels,
)
from metabridge.diagnosis.estimates import (
    DIVERGENCE_LIMIT,
    MIN_TASKS_PER_GROUP,
    Interval,
    LandscapeEstimate,
    find_hard_tasks,
)
from metabridge.diagnosis.feature_space import FeatureSpace
from metabridge.diagnosis.moments import FeatureMap, SplitMoments, convergence_rates, largest_curvatures
from metabridge.environments.environment import Environment
from metabridge.environments.image_tasks import ImageTasks, LabeledImages
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
    "hardness": "two groups with one covariance each; the hard group is the one with the lower rates",
    "superclasses": "hard tasks have classes of a single superclass, easy tasks classes of different superclasses",
    "parts": "the two parts of the mixture, the hard one first",
}
TASKS_PER_BATCH = 16
FEW_TASKS = 50  # with fewer tasks, resampling underestimates the uncertainty
MAX_DIVERGING_SHARE = 0.05  # of the tasks; if the step diverges on more, no method is recommended
STATISTICS_IMAGES = 512  # images for the batch norm statistics of an untrained network


@dataclass(frozen=True)
class Group:
    """Estimates for the hard or the easy tasks.

    Args:
        name: "hard" or "easy".
        tasks: Number of tasks.
        rate: Geometric mean of the convergence rates of the tasks.
        dispersion: Variance r of the solutions of the tasks.
        kurtosis: Fourth moments of the features, divided by those of normal features.

    >>> hard = Group("hard", tasks=100, rate=0.1, dispersion=0.5, kurtosis=1.0)
    >>> easy = Group("easy", tasks=100, rate=1.0, dispersion=0.5, kurtosis=1.0)
    >>> easy.rate / hard.rate
    10.0
    """

    name: str
    tasks: int
    rate: float
    dispersion: float
    kurtosis: float


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """Estimates from sampled tasks, predicted risks, and the recommendation. `print` shows a summary.

    Args:
        space: Name of the space in which solutions are compared.
        dimension: Dimension of this space.
        alpha: Step size of adaptation.
        m: Number of samples of an adaptation step.
        seed: Seed of the sampled tasks.
        grouping: How hard and easy tasks were separated.
        rates: Convergence rate of gradient descent on each task.
        curvatures: Largest eigenvalue λ_max of each task's covariance.
        diverging_share: Share of tasks on which the step diverges, because α·λ_max is 2 or more.
        is_hard: Whether each task is hard.
        solution_map: Coordinates of each task's solution in two dimensions.
        groups: Estimates for the hard and the easy tasks.
        distance: Distance R between the centers of the two groups.
        ratio_limit: 1 + R²/r_H, the limit of the ratio of risks as hard tasks get slower (Collins et al. 2022,
            corollary 2); None if r_H is 0.
        nal: Risk of non-adaptive learning (NAL) above the noise floor, after the step.
        maml: Risk of MAML above the noise floor, after the step.
        ratio: Risk of NAL divided by the risk of MAML.
        saved: Share of NAL's whole loss, noise included, that MAML saves.
        remaining: Risk of MAML after the step, divided by the risk of NAL before the step.
        kernel_predictions: Scores of methods at infinite width; empty if no kernel was given.
        costs: Costs of the methods that were compared.
        advice: The recommendation.

    >>> from metabridge.environments import HardEasy, LinearTasks
    >>> world = HardEasy(rho_hard=0.1, rho_easy=1.0, R=5.0, r_hard=0.5, r_easy=0.5)
    >>> diagnosis = diagnose(LinearTasks(world.landscape, shots=200, queries=50), alpha=1.0, tasks=100)
    >>> diagnosis
    Diagnosis('Train with MAML. Resampled tasks agree in 100 % of cases.')
    >>> [group.name for group in diagnosis.groups]
    ['hard', 'easy']
    """

    space: str
    dimension: int
    alpha: float
    m: int
    seed: int
    grouping: str
    rates: tuple[float, ...]
    curvatures: tuple[float, ...]
    diverging_share: float
    is_hard: tuple[bool, ...]
    solution_map: tuple[tuple[float, float], ...]
    groups: tuple[Group, Group]
    distance: float
    ratio_limit: float | None
    nal: float
    maml: float
    ratio: Interval
    saved: Interval
    remaining: float
    kernel_predictions: tuple[KernelPrediction, ...]
    costs: tuple[MethodCost, ...]
    advice: Advice

    def gains_more_than(self, other: Diagnosis) -> bool:
        """Return whether adaptation gains more on these tasks than on others, by comparing `ratio_limit`.

        `ratio` is not compared: if the step is short, it is close to 1 and determined by noise.

        Args:
            other: Diagnosis of the other tasks.

        Returns:
            True if `ratio_limit` is larger than that of `other`.
        """
        limit, other_limit = (
            math.inf if diagnosis.ratio_limit is None else diagnosis.ratio_limit for diagnosis in (self, other)
        )
        return limit > other_limit

    def __repr__(self) -> str:
        return f"Diagnosis({self.advice.headline!r})"

    def __str__(self) -> str:
        limit = "" if self.ratio_limit is None else f"; 1 + R²/r_H is {self.ratio_limit:.3g}"
        lines = [
            self.advice.headline,
            *(f"- {reason}" for reason in self.advice.reasons),
            "",
            f"Solutions are compared in the space of {self.space}, with {self.dimension} dimensions.",
            f"Groups: {self.grouping}.",
            *(
                f"{group.name}: {group.tasks} tasks, rate {group.rate:.3g}, dispersion r {group.dispersion:.3g}, "
                f"fourth moments {group.kurtosis:.2g} times those of normal inputs"
                for group in self.groups
            ),
            f"Distance R between the centers of the groups: {self.distance:.3g}{limit}",
            f"Ratio of risks after a step of {self.alpha:.3g} on {self.m} samples: {self.ratio}",
            f"Stability: {self.stability()}",
            *(
                f"Kernel of {prediction.method}: {prediction.metric} {prediction.mean:.3g} ± {prediction.ci95:.2g}"
                for prediction in self.kernel_predictions
            ),
            f"These estimates are for {self.space} as they are now; training may change the features.",
        ]
        return "\n".join(lines)

    def stability(self) -> str:
        """Return a sentence on how many tasks the step diverges on, and on the distribution of α·λ_max."""
        steps = sorted(self.alpha * curvature for curvature in self.curvatures)
        return (
            f"the step diverges on {100 * self.diverging_share:.1f} % of the tasks, where α·λ_max is "
            f"{DIVERGENCE_LIMIT} or more; its median is {statistics.median(steps):.2g} and its maximum {steps[-1]:.2g}"
        )

    def to_json(self) -> str:
        """Return all fields as JSON."""
        return json.dumps(asdict(self), indent=1, allow_nan=False, ensure_ascii=False)


def diagnose(
    environment: Environment,
    net: Network | Model | None = None,
    *,
    features: FeatureMap | None = None,
    kernel: Kernel | None = None,
    groups: Grouping = "hardness",
    tasks: int = 200,
    alpha: float | None = None,
    seed: int = 0,
    progress: bool = False,
) -> Diagnosis:
    """Predict from sampled tasks whether training that adapts is worth its cost, by Collins et al. (2022).

    Tasks are compared as linear models of features. Classification tasks are compared by pairs of examples, since the
    order of their classes is arbitrary.

    Args:
        environment: Source of the tasks.
        net: Network or trained model that computes the features.
        features: Function from inputs (n, ...) to features (n, d), instead of `net`. If both are None, the inputs must
            be vectors and are used as features.
        kernel: Kernel of an infinitely wide network, to also predict the scores of MTL, ANIL and MAML.
        groups: How hard and easy tasks are separated: by "hardness", by "superclasses" of images, or as the two "parts"
            of a `Mixture`, with the hard part first.
        tasks: Number of tasks to sample, at least 10. Half of them are hard if `groups` is not "hardness".
        alpha: Step size of adaptation. The default is the inverse of the largest curvature of the groups, but at most
            1.9 divided by the largest curvature of a single task.
        seed: Seed of the sampled tasks.
        progress: Whether to show a progress bar.

    Returns:
        The estimates, the predicted risks and the recommendation.

    Raises:
        InputError: If the arguments do not suit the environment or contradict each other, or the features are
            degenerate.

    >>> from metabridge.environments import HardEasy, LinearTasks
    >>> world = HardEasy(rho_hard=0.1, rho_easy=1.0, R=5.0, r_hard=0.5, r_easy=0.5)
    >>> diagnosis = diagnose(LinearTasks(world.landscape, shots=200, queries=50), alpha=1.0)
    >>> diagnosis.advice.method, diagnosis.ratio.low > 1.25
    ('maml', True)
    """
    if alpha is not None:
        check_positive("alpha", alpha)
    parts = _hard_and_easy_parts(environment, groups)
    tasks_per_part = tasks // len(parts)
    if tasks_per_part < MIN_TASKS_PER_GROUP:
        raise InputError(f"tasks is {tasks}, but two groups need at least {2 * MIN_TASKS_PER_GROUP}. Sample more.")
    if tasks < FEW_TASKS:
        log.warning("tasks is %d: intervals from fewer than %d tasks are too narrow.", tasks, FEW_TASKS)
    example_count = min(TASKS_PER_BATCH, tasks_per_part)
    example_tasks = [part.sample(example_count, torch.Generator().manual_seed(seed)) for part in parts]
    space = FeatureSpace.for_tasks(example_tasks, net, features)
    moments = _sample_moments(space, parts, tasks_per_part, seed, progress)
    rates, m = convergence_rates(moments), space.sample_count(example_tasks[0])
    groups_are_known = len(parts) == 2
    is_hard = torch.arange(len(moments)) < tasks_per_part if groups_are_known else find_hard_tasks(moments)
    estimate = LandscapeEstimate(moments, is_hard, m, _hard_share(environment) if groups_are_known else None)
    stable_step = estimate.stable_step()
    step = stable_step if alpha is None else alpha
    if not estimate.adapted_covariances(step).isfinite().all():
        raise InputError(f"alpha is {alpha}, so large that the risk overflows. Use alpha={stable_step:.3g} or less.")
    prediction = estimate.predict(step, torch.Generator().manual_seed(seed))
    curvatures = largest_curvatures(moments)
    diverging_share = float((step * curvatures >= DIVERGENCE_LIMIT).double().mean())
    landscape = estimate.landscape(step)
    hard_group, easy_group = (
        Group(
            name, len(indices), float(rates[indices].log().mean().exp()), float(torch.as_tensor(group.spread)), kurtosis
        )
        for name, indices, group, kurtosis in zip(
            ("hard", "easy"), estimate.group_indices, landscape.groups, estimate.kurtosis.tolist()
        )
    )
    distance = estimate.distance(landscape, step)
    network = net.net if isinstance(net, Model) else net
    plain = "rfs" if space.is_classification else "nal"
    multitask = ("mtl",) if space.is_classification else ()
    methods = (plain, "maml") if network is None else (plain, *multitask, "anil", "maml")
    kernel_predictions: tuple[KernelPrediction, ...] = ()
    if kernel is not None:
        try:
            kernel_predictions = predict_with_kernels(kernel, environment, seed, progress=progress)
        except InputError as error:  # for example duplicate images, for which only the kernel predictions fail
            log.warning("Continuing without kernel predictions: %s", error)
    return Diagnosis(
        space=space.name,
        dimension=moments.dimension,
        alpha=step,
        m=m,
        seed=seed,
        grouping=GROUPINGS[groups],
        rates=tuple(rates.tolist()),
        curvatures=tuple(curvatures.tolist()),
        diverging_share=diverging_share,
        is_hard=tuple(is_hard.tolist()),
        solution_map=tuple((x, y) for x, y in estimate.solution_map().tolist()),
        groups=(hard_group, easy_group),
        distance=distance,
        ratio_limit=1 + distance**2 / hard_group.dispersion if hard_group.dispersion else None,
        nal=prediction.risks.nal,
        maml=prediction.risks.maml,
        ratio=prediction.ratio,
        saved=prediction.saved,
        remaining=prediction.remaining,
        kernel_predictions=kernel_predictions,
        costs=method_costs(methods, network, moments.dimension),
        advice=advise(
            prediction,
            plain,
            "maml" if network is None else "anil",
            (hard_group.rate, easy_group.rate),
            kernel_predictions,
            _find_problems(estimate, step, diverging_share, stable_step),
        ),
    )


def _find_problems(
    estimate: LandscapeEstimate, step: float, diverging_share: float, stable_step: float
) -> tuple[str, ...]:
    """Return the reasons not to trust the prediction, each with a way to avoid it."""
    problems = []
    heavy_tailed = estimate.heavy_tails()
    if heavy_tailed:
        problems.append(
            f"few values dominate the variance of the {' and of the '.join(heavy_tailed)}, so it may be infinite: clip "
            "or transform them, or sample more tasks"
        )
    if diverging_share > MAX_DIVERGING_SHARE:
        problems.append(
            f"a step of {step:.3g} diverges on {100 * diverging_share:.1f} % of the tasks, which the formulas do not "
            f"take into account: use alpha={stable_step:.3g} or less"
        )
    return tuple(problems)


def untrained_network(images: LabeledImages, model: str = "conv4", *, seed: int = 0) -> Network:
    """Return an untrained network for a data set, with batch norm statistics of some of its images.

    Args:
        images: Data set.
        model: Model name that `metabridge.models.build` takes.
        seed: Seed of the weights and of the choice of images.

    Returns:
        The network, on the device of the images.

    Raises:
        InputError: If there is no such model, or it cannot process the images.

    >>> from metabridge.datasets import load
    >>> untrained_network(load("glyphs")).head.in_features
    32
    """
    net = network_of(ImageTrainingConfig("nal", model=model, statistics="running", seed=seed), images)
    generator = torch.Generator().manual_seed(seed)
    sample = torch.randperm(len(images.images), generator=generator)[:STATISTICS_IMAGES]
    net = net.to(images.images.device)
    estimate_statistics(net, [images.float_images(sample)])
    return net


def _hard_and_easy_parts(environment: Environment, groups: Grouping) -> tuple[Environment, ...]:
    """Return the environments of hard and of easy tasks, or the whole environment if `groups` is "hardness"."""
    if groups not in GROUPINGS:
        raise InputError(f"groups is {groups!r}, but must be one of {', '.join(GROUPINGS)}.")
    if groups == "hardness":
        return (environment,)
    if groups == "parts":
        if not isinstance(environment, Mixture) or len(environment.environments) != 2:
            raise InputError(
                "groups is 'parts', but the environment is not a Mixture of two environments. Use groups='hardness'."
            )
        return environment.environments
    if not isinstance(environment, ImageTasks):
        raise InputError("groups is 'superclasses', but only image tasks have superclasses. Use groups='hardness'.")
    superclasses = environment.data.superclasses[environment.data.splits[environment.split]]
    count = len(superclasses.unique())
    if count in (1, len(superclasses)):
        problem = "all classes have the same superclass" if count == 1 else "every class has its own superclass"
        raise InputError(
            f"groups is 'superclasses', but split '{environment.split}' has no superclasses to group by: {problem}. "
            "Use groups='hardness'."
        )
    return replace(environment, superclass="same"), replace(environment, superclass="different")


def _hard_share(environment: Environment) -> float:
    """Return the probability of hard tasks: the weight of a mixture's first part, or one half for superclasses."""
    if not isinstance(environment, Mixture):
        return 0.5
    return environment.weights[0] / sum(environment.weights)


def _sample_moments(
    space: FeatureSpace, parts: tuple[Environment, ...], tasks_per_part: int, seed: int, progress: bool
) -> SplitMoments:
    """Sample tasks of each part in batches and return their moments."""
    generator = torch.Generator().manual_seed(seed)
    batches = [
        (part, min(TASKS_PER_BATCH, tasks_per_part - start))
        for part in parts
        for start in range(0, tasks_per_part, TASKS_PER_BATCH)
    ]
    tracked_batches = track_progress(batches, "sampling tasks", progress)
    return SplitMoments.concatenate([space.moments(part.sample(count, generator)) for part, count in tracked_batches])
