"""MetaNTK-NAS: the search of an architecture by the conditioning of its MetaNTK and its linear regions (B §5, §6)."""

from __future__ import annotations

import copy
import functools
import math
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from metabridge.environments.image_tasks import LabelledImages
from metabridge.episodes import Episodes
from metabridge.errors import InputError, check_count
from metabridge.files import FolderLock
from metabridge.models import ARCHITECTURE
from metabridge.models.architecture import OPERATORS, ActiveOperators, Architecture, random_architecture
from metabridge.models.cells import mask, supernet
from metabridge.models.network import Network, with_group_norm
from metabridge.models.size_limit import SizeLimit
from metabridge.nas.linear_regions import PATCH, ThinRegions
from metabridge.nas.proxies import Conditioning, KernelName, Score, mean, points, regions
from metabridge.nas.pruning import Journal, Removal, Scores, evaluations, prune
from metabridge.nas.supernet_ntk import Candidates
from metabridge.progress import progress_bar
from metabridge.threads import stream_over_threads
from metabridge.training.config import Plan

SEEDS = 10**12  # so many are different after rounds and repeats have theirs
FINGERPRINTED = 4096  # images
Way = Literal["fast", "reference"]
Guide = Literal["maml", "anil", "ntk", "none", "random"]


class TimeUpError(Exception):
    """A search was given no more minutes."""


class Found(NamedTuple):
    """What a search ends with."""

    architecture: Architecture
    seconds: float  # of all runs of it
    measured: int  # networks, in all
    troubled: int  # of which some proxy could not be told


@dataclass(frozen=True)
class Search:
    """A search as data.

    - kernel="maml", "anil": MetaNTK-NAS by the condition number of that kernel, and linear regions
    - kernel="ntk": TE-NAS, by that of the NTK, and linear regions
    - kernel="none": linear regions alone
    - kernel="random": cells drawn at random, which measures nothing

    The kernel is that of a supernet as large as the network will be, at initialisation, for `tasks` tasks of so many
    ways, shots and queries. Regions are counted on `inputs` random 3×3 patches of training images in a thin
    network of one channel. All of it is averaged over `repeats` initialisations and batches, drawn anew in every
    round and the same for all networks of a round. At first every edge has all `operators`.

    >>> from metabridge.datasets import load
    >>> print(Search("random").run(load("glyphs"), progress=False).architecture)  # doctest: +ELLIPSIS
    normal     0: ...
    """

    kernel: Guide = "maml"
    cells: int = 5
    channels: int = 48
    tasks: int = 3
    ways: int = 5
    shots: int = 1
    queries: int = 1
    repeats: int = 3
    time: float = math.inf
    ridge: float = 1e-3
    inputs: int = 3000
    operators: tuple[str, ...] = OPERATORS
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kernel not in get_args(Guide):
            raise InputError(f"kernel is {self.kernel!r}, but must be one of {', '.join(get_args(Guide))}.")
        for name in ("cells", "channels", "tasks", "ways", "shots", "queries", "repeats", "inputs"):
            check_count(name, getattr(self, name))
        if self.cells < 3:
            raise InputError(f"cells is {self.cells}, but two of them reduce, so a network has 3 or more.")
        if self.inputs < 2:
            raise InputError("inputs is 1, but the thin network normalises over its inputs. Use inputs=2 or more.")
        if not isinstance(self.seed, int) or not 0 <= self.seed < SEEDS:
            raise InputError(f"seed is {self.seed!r}, but must be a whole number from 0 to {SEEDS - 1}.")
        self.conditioning  # noqa: B018  (checks time and ridge)
        if not self.operators:
            raise InputError(f"operators is empty, but a search needs some. Use some of {', '.join(OPERATORS)}.")
        ActiveOperators.full(self.operators)

    @property
    def conditioning(self) -> Conditioning | None:
        """The proxy of the kernel, if one is asked for."""
        kernels: dict[Guide, KernelName] = {"maml": "maml", "anil": "anil", "ntk": "ntk"}
        return Conditioning(kernels[self.kernel], self.time, self.ridge) if self.kernel in kernels else None

    def run(
        self,
        images: LabelledImages,
        *,
        device: str = "cpu",
        out: str | Path | None = None,
        way: Way = "fast",
        minutes: float | None = None,
        progress: bool = True,
    ) -> Found:
        """Search on the images' training classes.

        The folder `out` gets search.jsonl, from which the same search goes on if it was stopped, and
        architecture.json. It is locked until the search ends. After so many `minutes` a `TimeUpError` stops it. `way`
        is how kernels are computed; both give the same.
        """
        start = time.perf_counter()
        until = math.inf if minutes is None else start + 60 * minutes
        proxies = Proxies(self, images.to(device), device, way)
        if out is None:
            return self._found(proxies, Journal(), until, progress)
        with FolderLock(out) as lock:
            seen = {"data": images.load_arguments, "images": _fingerprint(images, proxies.environment.image_indices)}
            journal = Journal(lock.folder / "search.jsonl", {**self.plain(), **seen}, lock)
            found = self._found(proxies, journal, until, progress)
            found.architecture.save(lock.folder / "architecture.json")
        return found

    def _found(self, proxies: Proxies, journal: Journal, until: float, progress: bool) -> Found:
        try:
            architecture = self._architecture(proxies, journal, until, progress)
        finally:
            journal.note_time()
        troubled = sum(
            any(score is not None and score.trouble for score in scores) for scores in journal.known.values()
        )
        return Found(architecture, journal.seconds, len(journal.known), troubled)

    def _architecture(self, proxies: Proxies, journal: Journal, until: float, progress: bool) -> Architecture:
        if self.kernel == "random":
            return random_architecture(torch.Generator().manual_seed(self.seed), self.operators)

        def measure(*asked: Any) -> Iterator[tuple[Removal, Scores]]:
            for measured in proxies(*asked):
                yield measured
                if time.perf_counter() > until:
                    raise TimeUpError("The time is up. The same search goes on where it stopped.")

        full = ActiveOperators.full(self.operators)
        with progress_bar(progress) as bar:
            task = bar.add_task("search", total=evaluations(full, self.repeats), status="")
            journal.on_score = lambda number, count: bar.update(task, completed=count, status=f"round {number + 1}")
            return prune(full, measure, repeats=self.repeats, journal=journal)

    def plain(self) -> dict[str, object]:
        """Return the search as plain data; JSON has no infinity."""
        return {**asdict(self), "time": str(self.time)}


def _fingerprint(images: LabelledImages, rows: Tensor) -> str:
    """Tell the images in some rows from others by their labels and by some of them, or by all where they are few."""
    chosen = rows[:: math.ceil(len(rows) / FINGERPRINTED)]
    parts = (part[chosen.to(part.device)].cpu().numpy().tobytes() for part in (images.images, images.labels))
    return f"{len(rows)} images, checksum {functools.reduce(lambda sum, part: zlib.crc32(part, sum), parts, 0):08x}"


class Proxies:
    """Measures networks of a search on its images: what `prune` asks."""

    def __init__(self, search: Search, images: LabelledImages, device: str = "cpu", way: Way = "fast") -> None:
        if way not in get_args(Way):
            raise InputError(f"way is {way!r}, but must be 'fast' or 'reference'.")
        height, width = images.images.shape[2:]
        if min(height, width) < PATCH:
            raise InputError(
                f"images has {height}×{width} pixels, but regions are counted on patches of {PATCH}×{PATCH}."
            )
        self.search, self.images, self.device, self.way = search, images, device, way
        self.environment = images.tasks("train", ways=search.ways, shots=search.shots, queries=search.queries)
        with SizeLimit(tensors=2**15), torch.device("meta"):
            self._supernet(ActiveOperators.full(search.operators), 0)

    def __call__(
        self, number: int, repeat: int, active: ActiveOperators, removals: Sequence[Removal]
    ) -> Iterator[tuple[Removal, Scores]]:
        """Score the networks without each of some operators, with weights and images of this repeat's own."""
        seed = (self.search.seed * 1000 + number) * 1000 + repeat
        generator = torch.Generator().manual_seed(seed)
        tasks = self.environment.sample(self.search.tasks, generator).to(self.device)
        with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
            thin = ThinRegions(active, self._patches(generator), seed)
            conditions = self._conditions(active, self._supernet(active, seed).to(self.device), tasks)

            def part(removals: Sequence[Removal]) -> Iterator[tuple[Removal, Scores]]:
                for (removal, condition), (_, regions) in zip(conditions(removals), thin.scores(removals)):
                    yield removal, Scores(condition, regions)

            yield from part(removals) if self.device != "cpu" else stream_over_threads(part, removals)

    def _supernet(self, active: ActiveOperators, seed: int) -> Network:
        channels, size = self.images.images.shape[1], self.images.images.shape[-1]
        return supernet(
            active,
            cells=self.search.cells,
            channels=self.search.channels,
            image_channels=channels,
            size=size,
            outputs=self.search.ways,
            seed=seed,
        )

    def _conditions(
        self, active: ActiveOperators, net: Network, tasks: Episodes
    ) -> Callable[[Sequence[Removal]], Iterator[tuple[Removal, Score | None]]]:
        """Return what yields condition numbers; on a CPU several threads may call it."""
        proxy = self.search.conditioning
        if proxy is None:
            return lambda removals: ((removal, None) for removal in removals)
        if self.way == "fast":
            candidates, form = Candidates(net, active, points(tasks)), (len(tasks), tasks.query_x.shape[1])
            return lambda removals: (
                (removal, proxy.of_grams(grams, *form)) for removal, grams in candidates.grams(removals)
            )

        def reference(removals: Sequence[Removal]) -> Iterator[tuple[Removal, Score]]:
            own = copy.deepcopy(net)
            for removal in removals:
                mask(own, active.without(removal))
                yield removal, proxy(own, tasks)

        return reference

    def _patches(self, generator: torch.Generator) -> Tensor:
        """Random patches of random training images, of one channel each, (inputs, 1, 3, 3)."""
        images, count = self.images.images, self.search.inputs
        rows = self.environment.image_indices
        sizes = (len(rows), images.shape[1], *(side - PATCH + 1 for side in images.shape[2:]))
        image, channel, top, left = (torch.randint(size, (count, 1, 1), generator=generator) for size in sizes)
        steps = torch.arange(PATCH)
        places = (rows[image], channel, top + steps[:, None], left + steps)
        return (images[tuple(place.to(images.device) for place in places)].float() / 255).unsqueeze(1).to(self.device)


class Repeated(NamedTuple):
    """A proxy of a model, averaged over initialisations."""

    mean: Score
    each: tuple[Score, ...]


def score_model(search: Search, model: str, images: LabelledImages, *, device: str = "cpu") -> Repeated:
    """Score a model by a search's proxy: the condition number of its kernel or, with kernel="none", its regions.

    `model` is the path of an architecture, or what `metabridge.models.build` takes. An architecture is scored as
    in a search. The regions of other models are counted on whole images, and most models give each image one of its
    own, which tells nothing of them and is reported.

    >>> from metabridge.datasets import load
    >>> score_model(Search("none", repeats=1, inputs=50), "conv4", load("glyphs")).mean.trouble
    'each of 50 images has a region of its own'
    """
    proxies = Proxies(search, images.to(device), device)
    each = []
    for repeat in range(search.repeats):
        if model.endswith(ARCHITECTURE):
            active = Architecture.load(model).active_operators
            ((_, both),) = proxies(0, repeat, active, [None])
            each.append(both.regions if search.conditioning is None else both.condition)
            continue
        seed = search.seed * 1000 + repeat
        generator = torch.Generator().manual_seed(seed)
        tasks = proxies.environment.sample(search.tasks, generator).to(device)
        net = with_group_norm(Plan("mtl", model=model, ways=search.ways, seed=seed).network(images)).to(device).eval()
        if search.conditioning is not None:
            each.append(search.conditioning(net, tasks))
        else:
            rows = proxies.environment.image_indices
            drawn = rows[torch.randperm(len(rows), generator=generator)[: search.inputs]]
            found = regions(net, images.float_images(drawn).to(device))
            full = found.value == len(drawn)
            each.append(Score(found.value, f"each of {len(drawn)} images has a region of its own") if full else found)
    scores = tuple(score for score in each if score is not None)
    return Repeated(mean(scores), scores)
