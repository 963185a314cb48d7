"""MetaNTK-NAS: architecture search by kernel conditioning and linear regions (Wang et al. 2022, sec. 5 and 6)."""

from __future__ import annotations

import copy
import math
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from metabridge.environments.image_tasks import LabeledImages
from metabridge.episodes import Episodes
from metabridge.errors import InputError, check_count
from metabridge.files import FolderLock
from metabridge.html_table import html_table
from metabridge.models import ARCHITECTURE_SUFFIX
from metabridge.models.architecture import OPERATORS, ActiveOperators, Architecture, random_architecture
from metabridge.models.cells import set_active_operators, supernet
from metabridge.models.network import Network, with_group_norm
from metabridge.models.size_limit import SizeLimit
from metabridge.nas.linear_regions import PATCH_SIZE, LinearRegionCounter
from metabridge.nas.proxies import ConditionNumber, KernelName, ProxyScore, all_images, count_linear_regions, mean_score
from metabridge.nas.pruning import CandidateScores, Removal, SearchLog, count_evaluations, prune
from metabridge.nas.supernet_ntk import CandidateKernels
from metabridge.progress import progress_bar
from metabridge.threads import stream_over_threads
from metabridge.training.config import ImageTrainingConfig
from metabridge.training.image_training import network_of

MAX_SEED = 10**12 - 1  # `ProxyEvaluator.__call__` appends three digits each for the round and the repeat
MAX_FINGERPRINTED_IMAGES = 4096  # number of images in the checksum of `_fingerprint`
Implementation = Literal["fast", "reference"]
SearchKernel: TypeAlias = Literal[KernelName, "none", "random"]
# Fields of `SearchConfig` that logs and records store under the names that version 0.1.0 used.
STORED_KEYS = {"adaptation_time": "time", "region_inputs": "inputs"}


class TimeLimitError(Exception):
    """A search reached its time limit. Run the same search with the same `out` again to continue it."""


class SearchResult(NamedTuple):
    """The result of a search.

    Args:
        architecture: The best architecture.
        seconds: Computing time in seconds, including earlier runs if the search was continued.
        evaluated: Number of networks whose proxies were computed, counting every repeat.
        failed: Number of these networks for which a proxy failed. The search log contains the reasons.

    >>> architecture = random_architecture(torch.Generator().manual_seed(0))
    >>> SearchResult(architecture, seconds=12.5, evaluated=1533, failed=0).evaluated
    1533
    """

    architecture: Architecture
    seconds: float
    evaluated: int
    failed: int

    def __repr__(self) -> str:
        return f"SearchResult({self.evaluated:,} networks evaluated, {self.failed:,} failed, {self.seconds:.3g} s)"

    def _repr_html_(self) -> str:
        """Return a table of the result, for notebooks."""
        rows = [
            ("networks evaluated", f"{self.evaluated:,}"),
            ("failed", f"{self.failed:,}"),
            ("computing time", f"{self.seconds:.3g} s"),
            ("architecture", str(self.architecture)),
        ]
        return html_table("SearchResult", ("quantity", "value"), rows)


@dataclass(frozen=True)
class SearchConfig:
    """The settings of an architecture search.

    The condition number of the kernel is computed for a supernet with as many cells and channels as the final network,
    and linear regions are counted in a supernet of three cells whose first cell has one channel, both at
    initialization. Both scores are averaged over `repeats` initializations and batches of tasks, which differ between
    the rounds of the search but are the same for all candidates of a round.

    Args:
        kernel: Kernel whose condition number guides the search together with linear regions: "maml" or "anil"
            (MetaNTK-NAS), or "ntk" (TE-NAS). "none" uses linear regions alone, and "random" draws cells at random
            without evaluating anything.
        cells: Number of cells of the network, at least 3.
        channels: Number of channels of the first cells. Every reduction cell doubles it.
        tasks: Number of tasks for which the kernel is computed.
        ways: Number of classes per task.
        shots: Number of support images per class.
        queries: Number of query images per class.
        repeats: Number of initializations and batches of tasks to average over.
        adaptation_time: Adaptation time λτ of the kernel (learning rate times number of steps), or inf for convergence.
        ridge: Number added to the diagonal of the kernel matrices that adaptation inverts.
        region_inputs: Number of random 3×3 image patches used to count linear regions.
        operators: Operators to choose from.
        seed: Seed of all random numbers.

    Raises:
        InputError: If a setting is out of range.

    >>> SearchConfig("anil", cells=8).channels
    48
    """

    kernel: SearchKernel = "maml"
    cells: int = 5
    channels: int = 48
    tasks: int = 3
    ways: int = 5
    shots: int = 1
    queries: int = 1
    repeats: int = 3
    adaptation_time: float = math.inf
    ridge: float = 1e-3
    region_inputs: int = 3000
    operators: tuple[str, ...] = OPERATORS
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kernel not in get_args(SearchKernel):
            raise InputError(f"kernel is {self.kernel!r}, but must be one of {', '.join(get_args(SearchKernel))}.")
        for name in ("cells", "channels", "tasks", "ways", "shots", "queries", "repeats", "region_inputs"):
            check_count(name, getattr(self, name))
        if self.cells < 3:
            raise InputError(f"cells is {self.cells}, but must be at least 3, as two of the cells are reduction cells.")
        if self.region_inputs < 2:
            raise InputError("region_inputs is 1, but batch norm needs at least 2. Use region_inputs=2 or more.")
        if not isinstance(self.seed, int) or not 0 <= self.seed <= MAX_SEED:
            raise InputError(f"seed is {self.seed!r}, but must be an integer from 0 to {MAX_SEED}.")
        if not self.adaptation_time > 0:
            raise InputError(
                f"adaptation_time is {self.adaptation_time}, but must be positive. Use inf for convergence."
            )
        self.condition_number  # noqa: B018  (checks ridge)
        if not self.operators:
            raise InputError(f"operators is empty. Choose at least one of {', '.join(OPERATORS)}.")
        ActiveOperators.full(self.operators)

    @property
    def condition_number(self) -> ConditionNumber | None:
        """The proxy that uses the kernel; None for "none" and "random"."""
        if self.kernel == "none" or self.kernel == "random":
            return None
        return ConditionNumber(self.kernel, self.adaptation_time, self.ridge)

    def to_dict(self) -> dict[str, object]:
        """Return the settings as JSON data, with the keys that logs and records use."""
        stored = {STORED_KEYS.get(name, name): value for name, value in asdict(self).items()}
        return {**stored, "time": str(self.adaptation_time)}  # JSON has no infinity


def search(
    images: LabeledImages,
    *,
    kernel: SearchKernel = "maml",
    cells: int = 5,
    channels: int = 48,
    tasks: int = 3,
    ways: int = 5,
    shots: int = 1,
    queries: int = 1,
    repeats: int = 3,
    adaptation_time: float = math.inf,
    ridge: float = 1e-3,
    region_inputs: int = 3000,
    operators: Sequence[str] = OPERATORS,
    seed: int = 0,
    device: str = "cpu",
    out: str | Path | None = None,
    minutes: float | None = None,
    progress: bool = True,
) -> SearchResult:
    """Search for a few-shot learning architecture on the training classes of a data set, without any training.

    Args:
        images: Data set with a "train" split.
        kernel: Kernel whose condition number guides the search together with linear regions: "maml" or "anil"
            (MetaNTK-NAS), or "ntk" (TE-NAS). "none" uses linear regions alone, and "random" draws cells at random
            without evaluating anything.
        cells: Number of cells of the network, at least 3.
        channels: Number of channels of the first cells. Every reduction cell doubles it.
        tasks: Number of tasks for which the kernel is computed.
        ways: Number of classes per task.
        shots: Number of support images per class.
        queries: Number of query images per class.
        repeats: Number of initializations and batches of tasks to average over.
        adaptation_time: Adaptation time λτ of the kernel (learning rate times number of steps), or inf for convergence.
        ridge: Number added to the diagonal of the kernel matrices that adaptation inverts.
        region_inputs: Number of random 3×3 image patches used to count linear regions.
        operators: Operators to choose from.
        seed: Seed of all random numbers.
        device: Device to compute on, such as "cpu" or "cuda".
        out: Folder for `search.jsonl`, the log of all scores, and `architecture.json`. If it contains the log of a
            search with the same settings and images, that search is continued. It is locked during the search.
        minutes: Time limit in minutes.
        progress: Whether to show a progress bar.

    Returns:
        The architecture, the computing time, and the numbers of networks that were evaluated and that failed.

    Raises:
        InputError: If a setting is out of range, the images are too small, or the folder cannot be used.
        TimeLimitError: If the time limit is reached. Repeat the call with the same `out` to continue the search.

    >>> import metabridge as mb
    >>> glyphs = mb.datasets.load("glyphs")
    >>> print(mb.search(glyphs, kernel="random", progress=False).architecture)  # doctest: +ELLIPSIS
    normal     0: ...
    """
    config = SearchConfig(
        kernel=kernel,
        cells=cells,
        channels=channels,
        tasks=tasks,
        ways=ways,
        shots=shots,
        queries=queries,
        repeats=repeats,
        adaptation_time=adaptation_time,
        ridge=ridge,
        region_inputs=region_inputs,
        operators=tuple(operators),
        seed=seed,
    )
    return run_search(images, config, device=device, out=out, minutes=minutes, progress=progress)


def run_search(
    images: LabeledImages,
    config: SearchConfig,
    *,
    device: str = "cpu",
    out: str | Path | None = None,
    implementation: Implementation = "fast",
    minutes: float | None = None,
    progress: bool = True,
) -> SearchResult:
    """Run `search` with the settings of a `SearchConfig`.

    Args:
        images: Data set with a "train" split.
        config: Settings of the search.
        device: Device to compute on.
        out: Folder of the search; see `search`.
        implementation: "fast" shares computations between candidates; "reference" runs each candidate separately.
        minutes: Time limit in minutes.
        progress: Whether to show a progress bar.

    Returns:
        The result of the search.

    Raises:
        InputError: See `search`.
        TimeLimitError: If the time limit is reached.

    >>> from metabridge.datasets import load
    >>> run_search(load("glyphs"), SearchConfig("random"), progress=False).evaluated
    0
    """
    deadline = math.inf if minutes is None else time.perf_counter() + 60 * minutes
    evaluator = ProxyEvaluator(config, images.to(device), device, implementation)
    if out is None:
        return _run_with_log(evaluator, SearchLog(), deadline, progress)
    with FolderLock(out) as lock:
        data = {"data": images.load_arguments, "images": _fingerprint(images, evaluator.environment.image_indices)}
        search_log = SearchLog(lock.folder / "search.jsonl", {**config.to_dict(), **data}, lock)
        result = _run_with_log(evaluator, search_log, deadline, progress)
        result.architecture.save(lock.folder / "architecture.json")
    return result


def _run_with_log(evaluator: ProxyEvaluator, search_log: SearchLog, deadline: float, progress: bool) -> SearchResult:
    try:
        architecture = _find_architecture(evaluator, search_log, deadline, progress)
    finally:
        search_log.add_time()
    all_scores = search_log.scores.values()
    failed = sum(any(score is not None and score.failure for score in scores) for scores in all_scores)
    return SearchResult(architecture, search_log.seconds, len(all_scores), failed)


def _find_architecture(
    evaluator: ProxyEvaluator, search_log: SearchLog, deadline: float, progress: bool
) -> Architecture:
    config = evaluator.config
    if config.kernel == "random":
        return random_architecture(torch.Generator().manual_seed(config.seed), config.operators)

    def score_until_deadline(*args: Any) -> Iterator[tuple[Removal, CandidateScores]]:
        for removal_and_scores in evaluator(*args):
            yield removal_and_scores
            if time.perf_counter() > deadline:
                raise TimeLimitError(
                    "The time limit is reached. Run the same search with the same `out` again to continue it."
                )

    all_operators = ActiveOperators.full(config.operators)
    with progress_bar(progress) as bar:
        bar_id = bar.add_task("search", total=count_evaluations(all_operators, config.repeats), status="")
        search_log.on_score = lambda round_index, count: bar.update(
            bar_id, completed=count, status=f"round {round_index + 1}"
        )
        return prune(all_operators, score_until_deadline, repeats=config.repeats, search_log=search_log)


def _fingerprint(images: LabeledImages, indices: Tensor) -> str:
    """Return the number of indices, and a checksum of the images and labels at these indices.

    If there are more than `MAX_FINGERPRINTED_IMAGES` indices, the checksum covers evenly spaced ones. Search logs
    store this text, so it must not change.
    """
    subset = indices[:: math.ceil(len(indices) / MAX_FINGERPRINTED_IMAGES)]
    checksum = 0
    for values in (images.images, images.labels):
        checksum = zlib.crc32(values[subset.to(values.device)].cpu().numpy().tobytes(), checksum)
    return f"{len(indices)} images, checksum {checksum:08x}"


class ProxyEvaluator:
    """Computes the scores of the candidates of a search. It is passed to `prune` as `score_candidates`.

    Args:
        config: Settings of the search.
        images: Data set on `device`.
        device: Device to compute on.
        implementation: "fast" shares computations between candidates; "reference" runs each candidate separately.

    Raises:
        InputError: If the images are too small, there are too few classes, or the supernet is too large.
    """

    def __init__(
        self,
        config: SearchConfig,
        images: LabeledImages,
        device: str = "cpu",
        implementation: Implementation = "fast",
    ) -> None:
        if implementation not in get_args(Implementation):
            raise InputError(f"implementation is {implementation!r}, but must be 'fast' or 'reference'.")
        height, width = images.images.shape[2:]
        if min(height, width) < PATCH_SIZE:
            raise InputError(
                f"images have {height}×{width} pixels, but linear regions need at least {PATCH_SIZE}×{PATCH_SIZE}."
            )
        self.config, self.images, self.device, self.implementation = config, images, device, implementation
        self.environment = images.tasks("train", ways=config.ways, shots=config.shots, queries=config.queries)
        # Fail now if the supernet is too large. On the device "meta", building it takes no memory.
        with SizeLimit(tensors=2**15), torch.device("meta"):
            self._supernet(ActiveOperators.full(config.operators), 0)

    def __call__(
        self, round_index: int, repeat: int, active: ActiveOperators, removals: Sequence[Removal]
    ) -> Iterator[tuple[Removal, CandidateScores]]:
        """Yield each removal with the scores of the network without it, in any order.

        A removal is an operator in `active`, or None for the network with all of them. Weights, tasks and patches
        depend on the round and the repeat, but not on the removal.
        """
        seed = (self.config.seed * 1000 + round_index) * 1000 + repeat
        generator = torch.Generator().manual_seed(seed)
        tasks = self.environment.sample(self.config.tasks, generator).to(self.device)
        with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
            counter = LinearRegionCounter(active, self._patches(generator), seed)
            condition_numbers = self._condition_numbers(active, self._supernet(active, seed).to(self.device), tasks)

            def score(removals: Sequence[Removal]) -> Iterator[tuple[Removal, CandidateScores]]:
                for (removal, condition), (_, regions) in zip(condition_numbers(removals), counter.scores(removals)):
                    yield removal, CandidateScores(condition, regions)

            # On a CPU, each thread scores some of the removals.
            yield from score(removals) if self.device != "cpu" else stream_over_threads(score, removals)

    def _supernet(self, active: ActiveOperators, seed: int) -> Network:
        channels, size = self.images.images.shape[1], self.images.images.shape[-1]
        return supernet(
            active,
            cells=self.config.cells,
            channels=self.config.channels,
            image_channels=channels,
            size=size,
            outputs=self.config.ways,
            seed=seed,
        )

    def _condition_numbers(
        self, active: ActiveOperators, net: Network, tasks: Episodes
    ) -> Callable[[Sequence[Removal]], Iterator[tuple[Removal, ProxyScore | None]]]:
        """Return a function that yields condition numbers; on a CPU several threads may call it."""
        proxy = self.config.condition_number
        if proxy is None:
            return lambda removals: ((removal, None) for removal in removals)
        if self.implementation == "fast":
            kernels = CandidateKernels(net, active, all_images(tasks))
            queries = tasks.query_x.shape[1]
            return lambda removals: (
                (removal, proxy.from_matrices(matrices, len(tasks), queries))
                for removal, matrices in kernels.matrices(removals)
            )

        def reference(removals: Sequence[Removal]) -> Iterator[tuple[Removal, ProxyScore]]:
            masked_net = copy.deepcopy(net)
            for removal in removals:
                set_active_operators(masked_net, active.without(removal))
                yield removal, proxy(masked_net, tasks)

        return reference

    def _patches(self, generator: torch.Generator) -> Tensor:
        """Return random patches (region_inputs, 1, 3, 3), each from a random channel of a random training image."""
        images, count = self.images.images, self.config.region_inputs
        image_indices = self.environment.image_indices
        limits = (len(image_indices), images.shape[1], *(length - PATCH_SIZE + 1 for length in images.shape[2:]))
        image, channel, top, left = (torch.randint(limit, (count, 1, 1), generator=generator) for limit in limits)
        offsets = torch.arange(PATCH_SIZE)
        indices = (image_indices[image], channel, top + offsets[:, None], left + offsets)
        patches = images[tuple(index.to(images.device) for index in indices)]
        return (patches.float() / 255).unsqueeze(1).to(self.device)


class RepeatedScore(NamedTuple):
    """The score of a model by one proxy, for several initializations.

    Args:
        mean: The mean over the initializations.
        repeats: The score for each initialization.

    >>> RepeatedScore(ProxyScore(3.0), (ProxyScore(2.0), ProxyScore(4.0))).mean.value
    3.0
    """

    mean: ProxyScore
    repeats: tuple[ProxyScore, ...]


def score_architecture(
    architecture: Architecture, images: LabeledImages, config: SearchConfig, *, device: str = "cpu"
) -> tuple[CandidateScores, ...]:
    """Compute the proxies of an architecture at initialization, as in a search.

    Args:
        architecture: The architecture to score.
        images: Data set with a "train" split.
        config: Settings; `kernel` selects the kernel, with "none" for linear regions alone.
        device: Device to compute on.

    Returns:
        The scores for each of `config.repeats` initializations.

    Raises:
        InputError: If the settings do not suit the images.

    >>> from metabridge.datasets import load
    >>> architecture = random_architecture(torch.Generator().manual_seed(0))
    >>> config = SearchConfig("none", cells=3, channels=2, repeats=1, region_inputs=20)
    >>> len(score_architecture(architecture, load("glyphs"), config))
    1
    """
    evaluator, active = ProxyEvaluator(config, images.to(device), device), architecture.active_operators
    # The removal None stands for the network from which nothing is removed.
    return tuple(scores for repeat in range(config.repeats) for _, scores in evaluator(0, repeat, active, [None]))


def score_model(
    model: str, images: LabeledImages, config: SearchConfig | None = None, *, device: str = "cpu"
) -> RepeatedScore:
    """Compute the proxy of an untrained model: the condition number of a kernel, or its number of linear regions.

    An architecture is scored as in a search. Other models are scored with group norms instead of batch norms, and their
    linear regions are counted with whole images as inputs instead of patches. In most of these models, every image is
    in a different region; the count then says nothing about the model, and is reported as a failure.

    Args:
        model: Path of an `architecture.json`, or a model name that `metabridge.models.build` accepts.
        images: Data set with a "train" split.
        config: Settings: `kernel` selects the proxy, with "none" for linear regions.
        device: Device to compute on.

    Returns:
        The proxy for each of `config.repeats` initializations, and the mean.

    Raises:
        InputError: If there is no such model, or the settings do not suit the images.

    >>> from metabridge.datasets import load
    >>> score_model("conv4", load("glyphs"), SearchConfig("none", repeats=1, region_inputs=50)).mean.failure
    'each of 50 images has its own region'
    """
    config = config or SearchConfig()
    scores: list[ProxyScore | None] = []
    if model.endswith(ARCHITECTURE_SUFFIX):
        for proxies in score_architecture(Architecture.load(model), images, config, device=device):
            scores.append(proxies.regions if config.condition_number is None else proxies.condition)
    else:
        environment = ProxyEvaluator(config, images.to(device), device).environment
        for repeat in range(config.repeats):
            seed = config.seed * 1000 + repeat
            generator = torch.Generator().manual_seed(seed)
            tasks = environment.sample(config.tasks, generator).to(device)
            # The method "mtl" has no influence on the network.
            training_config = ImageTrainingConfig("mtl", model=model, ways=config.ways, seed=seed)
            net = with_group_norm(network_of(training_config, images)).to(device).eval()
            if config.condition_number is not None:
                scores.append(config.condition_number(net, tasks))
                continue
            indices = environment.image_indices
            indices = indices[torch.randperm(len(indices), generator=generator)[: config.region_inputs]]
            score = count_linear_regions(net, images.float_images(indices).to(device))
            if score.value == len(indices):
                score = ProxyScore(score.value, f"each of {len(indices)} images has its own region")
            scores.append(score)
    repeats = tuple(score for score in scores if score is not None)
    return RepeatedScore(mean_score(repeats), repeats)
