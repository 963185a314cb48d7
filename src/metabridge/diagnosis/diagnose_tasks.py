"""Predict from sampled tasks, before training, which method is worth its cost."""

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
from metabridge.html_table import html_table
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
    "hardness": "clustered by convergence rate and covariance; the group with the lower rates is hard",
    "superclasses": "the classes of a hard task share a superclass, those of an easy task have different superclasses",
    "parts": "the first part of the mixture is hard, the second part is easy",
}
TASKS_PER_BATCH = 16
FEW_TASKS = 50  # with fewer tasks, the bootstrap underestimates the uncertainty
MAX_DIVERGING_SHARE = 0.05  # if the adaptation step diverges on a larger share of the tasks, no method is recommended
STATISTICS_IMAGES = 512  # images for the batch norm statistics of an untrained network
# Keys in diagnosis.json that differ from the field names of `Diagnosis`.
_JSON_KEYS = {
    "projected_solutions": "solution_map",
    "relative_gain": "saved",
    "residual_fraction": "remaining",
}


@dataclass(frozen=True)
class Group:
    """Estimates for the hard or the easy tasks.

    Args:
        name: "hard" or "easy".
        tasks: Number of tasks.
        rate: Geometric mean of the convergence rates of the tasks.
        dispersion: Variance r of the tasks' solutions.
        kurtosis: Fourth moments of the features, divided by those of Gaussian features.

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
    """Estimates from sampled tasks, predicted risks, and the recommendation. Print it to see a summary.

    Args:
        space: Name of the feature space in which the solutions of tasks are compared.
        dimension: Dimension of this space.
        alpha: Step size of the adaptation step.
        m: Number of samples of the adaptation step: support examples, or pairs of them in classification.
        seed: Seed of the sampled tasks.
        grouping: How hard and easy tasks were separated.
        rates: Convergence rate of gradient descent on each task.
        curvatures: Largest eigenvalue λ_max of each task's feature covariance.
        diverging_share: Share of tasks on which the adaptation step diverges, because α·λ_max is 2 or more.
        is_hard: Whether each task is hard.
        projected_solutions: Solution of each task, projected to two dimensions.
        groups: Estimates for the hard and the easy tasks.
        distance: Distance R between the centers of the two groups.
        ratio_limit: 1 + R²/r_H with the dispersion r_H of the hard tasks: the limit of the risk ratio as the
            convergence rate of the hard tasks goes to 0 (Collins et al. 2022, corollary 2); None if r_H is 0.
        nal: Excess risk of non-adaptive learning (NAL) after the adaptation step: the expected loss minus its part due
            to label noise.
        maml: Excess risk of MAML after the adaptation step.
        ratio: The risk ratio: the excess risk of NAL divided by that of MAML.
        relative_gain: Relative reduction of the expected loss, including label noise, by MAML compared with NAL.
        residual_fraction: Excess risk of MAML after the adaptation step, divided by that of NAL before the step.
        kernel_predictions: Predicted scores of methods at infinite width; empty if no kernel was passed.
        costs: Costs of the compared methods.
        advice: The recommendation.

    >>> import metabridge as mb
    >>> hard_easy = mb.environments.HardEasy(rho_hard=0.1, rho_easy=1.0, R=5.0, r_hard=0.5, r_easy=0.5)
    >>> tasks = mb.environments.LinearTasks(hard_easy.landscape, shots=200, queries=50)
    >>> diagnosis = mb.diagnose(tasks, alpha=1.0, tasks=100)
    >>> diagnosis
    Diagnosis('Train with MAML. 100 % of bootstrap samples give the same recommendation.')
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
    projected_solutions: tuple[tuple[float, float], ...]
    groups: tuple[Group, Group]
    distance: float
    ratio_limit: float | None
    nal: float
    maml: float
    ratio: Interval
    relative_gain: Interval
    residual_fraction: float
    kernel_predictions: tuple[KernelPrediction, ...]
    costs: tuple[MethodCost, ...]
    advice: Advice

    def gains_more_than(self, other: Diagnosis) -> bool:
        """Return whether adaptation gains more on these tasks than on the tasks of another diagnosis.

        The comparison uses `ratio_limit`, because for small step sizes `ratio` is close to 1 and dominated by noise.

        Args:
            other: The other diagnosis.

        Returns:
            True if `ratio_limit` is larger than `other.ratio_limit`.
        """
        limit, other_limit = (
            math.inf if diagnosis.ratio_limit is None else diagnosis.ratio_limit for diagnosis in (self, other)
        )
        return limit > other_limit

    def __repr__(self) -> str:
        return f"Diagnosis({self.advice.headline!r})"

    def _repr_html_(self) -> str:
        """Return a table of the recommendation and the main estimates, for notebooks."""
        rows = [
            ("recommendation", self.advice.headline),
            ("risk ratio of NAL to MAML", str(self.ratio)),
            *((f"convergence rate, {group.name} tasks", f"{group.rate:.3g}") for group in self.groups),
            ("feature space", f"{self.space}, {self.dimension} dimensions"),
        ]
        return html_table("Diagnosis", ("quantity", "value"), rows)

    def __str__(self) -> str:
        limit = "" if self.ratio_limit is None else f"; 1 + R²/r_H is {self.ratio_limit:.3g}"
        lines = [
            self.advice.headline,
            *(f"- {reason}" for reason in self.advice.reasons),
            "",
            f"Feature space: {self.space}, {self.dimension} dimensions.",
            f"Groups: {self.grouping}.",
            *(
                f"{group.name}: {group.tasks} tasks, convergence rate {group.rate:.3g}, variance r of the solutions "
                f"{group.dispersion:.3g}, fourth moments {group.kurtosis:.2g} times those of Gaussian inputs"
                for group in self.groups
            ),
            f"Distance R between the mean solutions of the groups: {self.distance:.3g}{limit}",
            f"Risk ratio of NAL to MAML, after a step of size {self.alpha:.3g} on {self.m} samples: {self.ratio}",
            f"Stability: {self.stability()}",
            *(
                f"Infinite width, {score.method}: {score.metric} {score.mean:.3g} ± {score.ci95:.2g}"
                for score in self.kernel_predictions
            ),
            f"All estimates are for the current {self.space}; training may change the features.",
        ]
        return "\n".join(lines)

    def stability(self) -> str:
        """Return a sentence about the share of tasks on which the adaptation step diverges, and about α·λ_max."""
        products = sorted(self.alpha * curvature for curvature in self.curvatures)
        return (
            f"the step diverges on {100 * self.diverging_share:.1f} % of the tasks (α·λ_max ≥ {DIVERGENCE_LIMIT}); "
            f"the median of α·λ_max is {statistics.median(products):.2g}, the maximum {products[-1]:.2g}"
        )

    def to_json(self) -> str:
        """Return all fields as JSON."""
        fields = {_JSON_KEYS.get(name, name): value for name, value in asdict(self).items()}
        return json.dumps(fields, indent=1, allow_nan=False, ensure_ascii=False)


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
    """Predict from sampled tasks whether training with adaptation is worth its cost (Collins et al. 2022).

    Each task is treated as linear regression on features. Classification tasks are treated as regression on pairs of
    examples, because the order of their classes is arbitrary.

    Args:
        environment: Source of the tasks.
        net: Network or trained model that computes the features.
        features: Function from inputs (n, ...) to features (n, d), as an alternative to `net`. If both are None, the
            inputs must be vectors and are used as features.
        kernel: Kernel of an infinitely wide network. If it is passed, the scores of multi-task learning (MTL), ANIL and
            MAML at infinite width are also predicted.
        groups: How to separate hard and easy tasks: by estimated "hardness", by "superclasses" of images, or by the two
            "parts" of a `Mixture`, of which the first is hard.
        tasks: Number of tasks to sample, at least 10. Half of them are hard if `groups` is not "hardness".
        alpha: Step size of the adaptation step (default: 1/λ for the largest eigenvalue λ of the groups' feature
            covariances, but at most 1.9 divided by the largest eigenvalue of the covariance of any task).
        seed: Seed of the sampled tasks.
        progress: Whether to show a progress bar.

    Returns:
        The estimates, the predicted risks and the recommendation.

    Raises:
        InputError: If the arguments are invalid for this environment or contradict each other, or the feature
            covariance is singular.

    >>> import metabridge as mb
    >>> hard_easy = mb.environments.HardEasy(rho_hard=0.1, rho_easy=1.0, R=5.0, r_hard=0.5, r_easy=0.5)
    >>> tasks = mb.environments.LinearTasks(hard_easy.landscape, shots=200, queries=50)
    >>> diagnosis = mb.diagnose(tasks, alpha=1.0)
    >>> diagnosis.advice.method, diagnosis.ratio.low > 1.25
    ('maml', True)
    """
    if alpha is not None:
        check_positive("alpha", alpha)
    parts = _hard_and_easy_parts(environment, groups)
    tasks_per_part = tasks // len(parts)
    if tasks_per_part < MIN_TASKS_PER_GROUP:
        raise InputError(
            f"tasks is {tasks}, but two groups need at least {2 * MIN_TASKS_PER_GROUP}. Sample more tasks."
        )
    if tasks < FEW_TASKS:
        log.warning("tasks is %d, but intervals from fewer than %d tasks are too narrow.", tasks, FEW_TASKS)
    example_count = min(TASKS_PER_BATCH, tasks_per_part)
    example_tasks = [part.sample(example_count, torch.Generator().manual_seed(seed)) for part in parts]
    space = FeatureSpace.for_tasks(example_tasks, net, features)
    moments = _sample_moments(space, parts, tasks_per_part, seed, progress)
    rates, m = convergence_rates(moments), space.sample_count(example_tasks[0])
    groups_are_known = len(parts) == 2
    is_hard = torch.arange(len(moments)) < tasks_per_part if groups_are_known else find_hard_tasks(moments)
    estimate = LandscapeEstimate(moments, is_hard, m, _hard_probability(environment) if groups_are_known else None)
    default_step_size = estimate.default_step_size()
    step_size = default_step_size if alpha is None else alpha
    if not estimate.adapted_covariances(step_size).isfinite().all():
        raise InputError(f"alpha is {alpha}, for which the risk overflows. Use alpha={default_step_size:.3g} or less.")
    prediction = estimate.predict(step_size, torch.Generator().manual_seed(seed))
    curvatures = largest_curvatures(moments)
    diverging_share = float((step_size * curvatures >= DIVERGENCE_LIMIT).double().mean())
    landscape = estimate.landscape(step_size)
    hard_group, easy_group = (
        Group(
            name, len(indices), float(rates[indices].log().mean().exp()), float(torch.as_tensor(group.spread)), kurtosis
        )
        for name, indices, group, kurtosis in zip(
            ("hard", "easy"), estimate.group_indices, landscape.groups, estimate.kurtosis.tolist()
        )
    )
    distance = estimate.distance(landscape, step_size)
    network = net.net if isinstance(net, Model) else net
    pretraining_method = "rfs" if space.is_classification else "nal"
    multitask_methods = ("mtl",) if space.is_classification else ()
    methods = (pretraining_method, *(() if network is None else (*multitask_methods, "anil")), "maml")
    kernel_predictions: tuple[KernelPrediction, ...] = ()
    if kernel is not None:
        try:
            kernel_predictions = predict_with_kernels(kernel, environment, seed, progress=progress)
        except InputError as error:  # kernel predictions can fail on valid tasks, for example with duplicate images
            log.warning("Continuing without kernel predictions: %s", error)
    return Diagnosis(
        space=space.name,
        dimension=moments.dimension,
        alpha=step_size,
        m=m,
        seed=seed,
        grouping=GROUPINGS[groups],
        rates=tuple(rates.tolist()),
        curvatures=tuple(curvatures.tolist()),
        diverging_share=diverging_share,
        is_hard=tuple(is_hard.tolist()),
        projected_solutions=tuple((x, y) for x, y in estimate.project_solutions().tolist()),
        groups=(hard_group, easy_group),
        distance=distance,
        ratio_limit=1 + distance**2 / hard_group.dispersion if hard_group.dispersion else None,
        nal=prediction.risks.nal,
        maml=prediction.risks.maml,
        ratio=prediction.ratio,
        relative_gain=prediction.relative_gain,
        residual_fraction=prediction.residual_fraction,
        kernel_predictions=kernel_predictions,
        costs=method_costs(methods, network, moments.dimension),
        advice=advise(
            prediction,
            pretraining_method,
            "maml" if network is None else "anil",
            (hard_group.rate, easy_group.rate),
            kernel_predictions,
            _find_problems(estimate, step_size, diverging_share, default_step_size),
        ),
    )


def _find_problems(
    estimate: LandscapeEstimate, step_size: float, diverging_share: float, default_step_size: float
) -> tuple[str, ...]:
    """Return the reasons not to trust the prediction, each with a remedy."""
    problems = []
    heavy_tailed = estimate.heavy_tailed_variables()
    if heavy_tailed:
        problems.append(
            f"a few values dominate the variance of the {' and of the '.join(heavy_tailed)}, so the variance may be "
            "infinite: clip or transform these values, or sample more tasks"
        )
    if diverging_share > MAX_DIVERGING_SHARE:
        problems.append(
            f"an adaptation step of size {step_size:.3g} diverges on {100 * diverging_share:.1f} % of the tasks, "
            f"which the formulas do not take into account: use alpha={default_step_size:.3g} or less"
        )
    return tuple(problems)


def untrained_network(images: LabeledImages, model: str = "conv4", *, seed: int = 0) -> Network:
    """Return an untrained network whose batch norm statistics are estimated on images of a data set.

    Args:
        images: Data set, of which a sample of images is used.
        model: Model name accepted by `metabridge.models.build`.
        seed: Seed of the weights and of the sample of images.

    Returns:
        The network, on the device of the images.

    Raises:
        InputError: If the model does not exist, or cannot process the images.

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
    """Return the environments of the hard and of the easy tasks, or only `environment` if `groups` is "hardness"."""
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
    superclass_count = len(superclasses.unique())
    if superclass_count in (1, len(superclasses)):
        same_superclass = superclass_count == 1
        problem = "all classes have the same superclass" if same_superclass else "no two classes share a superclass"
        raise InputError(
            f"groups is 'superclasses', but split '{environment.split}' cannot be grouped by superclass: {problem}. "
            "Use groups='hardness'."
        )
    return replace(environment, superclass="same"), replace(environment, superclass="different")


def _hard_probability(environment: Environment) -> float:
    """Return the probability of hard tasks: the weight of the first part of a mixture, 0.5 for superclasses."""
    if not isinstance(environment, Mixture):
        return 0.5
    return environment.weights[0] / sum(environment.weights)


def _sample_moments(
    space: FeatureSpace, parts: tuple[Environment, ...], tasks_per_part: int, seed: int, progress: bool
) -> SplitMoments:
    """Sample tasks from each part in batches, and return their moments."""
    generator = torch.Generator().manual_seed(seed)
    batches = [
        (part, min(TASKS_PER_BATCH, tasks_per_part - start))
        for part in parts
        for start in range(0, tasks_per_part, TASKS_PER_BATCH)
    ]
    tracked_batches = track_progress(batches, "sampling tasks", progress)
    return SplitMoments.concatenate([space.moments(part.sample(count, generator)) for part, count in tracked_batches])
