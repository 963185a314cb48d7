"""Architecture searches on mini-ImageNet (Wang et al. 2022, figure 2 and tables 1 and 2).

Every search writes a record. `--only search-LABEL` selects a search by its label.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from metabridge.datasets import load
from metabridge.environments.image_tasks import LabeledImages
from metabridge.experiments.experiment import ExperimentOptions
from metabridge.experiments.mini_imagenet_training_runs import VIEWS, configs
from metabridge.experiments.records import Record, as_json, run_folder
from metabridge.models.architecture import Architecture
from metabridge.models.cells import cell_network
from metabridge.nas.architecture_search import SearchConfig, SearchKernel, TimeLimitError, run_search
from metabridge.report.results import Machine
from metabridge.training import TestTimeAugmentation
from metabridge.training.config import ImageTrainingConfig

IMAGE_SIZE = 32  # width and height of the images of mini-ImageNet in searches
GLYPH_CLASSES = 25  # number of classes of the glyphs that each split has at the quick scale


@dataclass(frozen=True)
class SearchVariant:
    """The fields of `SearchConfig` in which the searches differ (Wang et al. 2022, appendix E)."""

    kernel: SearchKernel
    cells: int = 5
    adaptation_time: float = math.inf
    ridge: float = 1e-3

    def seeds(self, options: ExperimentOptions) -> dict[str, int]:
        """Return the seed of each search by its label."""
        criterion = "regions" if self.kernel == "none" else self.kernel
        seeds = range(options.seed, options.seed + SETTINGS[options.scale].seeds)
        return {f"{criterion}-{self.cells}-{seed}": seed for seed in seeds}

    def searches(self, records: Mapping[str, Record], options: ExperimentOptions) -> list[SearchRecord]:
        """Return the records of the finished searches of this variant."""
        records_or_none = (records.get(f"search-{label}") for label in self.seeds(options))
        return [record for record in records_or_none if isinstance(record, SearchRecord)]


METANTK = SearchVariant("maml")
DEEP = SearchVariant("anil", cells=8, adaptation_time=1.0, ridge=1e-5)
NTK = SearchVariant("ntk")
REGIONS = SearchVariant("none")  # guided only by the number of linear regions
RANDOM = SearchVariant("random")  # draws a random architecture


@dataclass(frozen=True)
class Settings:
    """How to search and train.

    Args:
        seeds: Number of searches of each variant, each with its own seed.
        search: Configuration of the searches, except for the seed and the fields of `SearchVariant`.
        config: Training configuration of ResNet-12, and of networks of cells except for `lr` and `drop_rate`.
        recipes: Other training configurations of networks of cells: for each name, the fields that differ.
        lr: Learning rate for networks of cells.
        drop_rate: Drop rate for networks of cells.
        tasks: Number of validation tasks, and of test tasks, on which a trained network is evaluated.
        views: Test-time augmentations to choose from in validation.
        data: Name of the data set.
        image_channels: Number of channels of the images in the data set.
    """

    seeds: int
    search: SearchConfig
    config: ImageTrainingConfig
    recipes: Mapping[str, Mapping[str, Any]]
    lr: float
    drop_rate: float
    tasks: int
    views: tuple[TestTimeAugmentation, ...]
    data: str
    image_channels: int


SETTINGS = {
    "quick": Settings(
        seeds=2,
        search=SearchConfig(channels=4, tasks=2, ways=3, repeats=1, region_inputs=100, operators=("skip", "conv_3x3")),
        config=replace(configs("quick")["rfs"], iterations=8, validate_every=8),
        recipes={"longer": {"iterations": 20, "validate_every": 2}, "muon": {"optimizer": "muon", "lr": 0.2}},
        lr=0.1,
        drop_rate=0.2,
        tasks=40,
        views=VIEWS[1:2],
        data="glyphs",
        image_channels=1,
    ),
    "paper": Settings(
        seeds=3,
        search=SearchConfig(),
        config=replace(configs("paper")["rfs"], iterations=5000, validate_every=2500),
        recipes={
            "longer": {"iterations": 30_000, "validate_every": 3000},
            "muon": {"optimizer": "muon", "lr": 0.2, "iterations": 8000, "validate_every": 2000},
        },
        lr=0.4,  # `lr` and `drop_rate` were selected by validation accuracy after 1000 training steps
        drop_rate=0.0,
        tasks=2000,
        views=VIEWS[1:3],  # without crops, which are expensive and did not improve RFS with ResNet-12
        data="mini-imagenet",
        image_channels=3,
    ),
}


@dataclass(frozen=True)
class SearchRecord(Record):
    """The result of one search.

    Args:
        architecture: The selected cells.
        parameters: Number of parameters of the network of these cells, without its head.
        evaluated: Number of networks whose proxies were computed.
        failed: Number of networks for which a proxy failed.
    """

    architecture: Architecture
    parameters: int
    evaluated: int
    failed: int

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> SearchRecord:
        """Return the record with these fields, as read from JSON."""
        # In the file, `evaluated` and `failed` have the keys of version 0.1.0.
        fields = {**stored, "architecture": Architecture.from_dict(stored["architecture"])}
        return cls(evaluated=fields.pop("measured"), failed=fields.pop("troubled"), **fields)

    def to_json(self) -> dict[str, Any]:
        """Return the fields in the form that `from_json` reads."""
        keys = {"evaluated": "measured", "failed": "troubled"}
        return {keys.get(name, name): value for name, value in super().to_json().items()}


def search_all(options: ExperimentOptions, variants: Iterable[SearchVariant]) -> dict[str, SearchRecord]:
    """Return the records of all finished searches, after running those that `options.only` selects.

    A search that reaches the time limit is not finished.
    """
    records = {
        f"search-{label}": search_or_load(options, variant, label, seed)
        for variant in variants
        for label, seed in variant.seeds(options).items()
    }
    return {name: record for name, record in records.items() if record is not None}


def search_or_load(options: ExperimentOptions, variant: SearchVariant, label: str, seed: int) -> SearchRecord | None:
    """Return the record of a search, after running the search if there is no record yet.

    Return None if `options.only` excludes the search or the time limit ends it.
    """
    settings, search_name = SETTINGS[options.scale], f"search-{label}"
    search = replace(settings.search, **asdict(variant), seed=seed)
    plan, name = as_json({"data": settings.data, **search.to_dict()}), f"nas-{search_name}-{options.scale}"
    record = SearchRecord.load(options, name, plan)
    if record is not None or not options.includes(search_name):
        return record
    try:
        result = run_search(
            load_images(options, IMAGE_SIZE),
            search,
            device=options.device,
            out=run_folder(options, name, plan),
            minutes=options.minutes,
            progress=options.progress,
        )
    except TimeLimitError:
        return None
    net = cell_network(
        result.architecture, cells=search.cells, channels=search.channels, image_channels=settings.image_channels
    )
    record = SearchRecord(
        name=name,
        plan=plan,
        environment=Machine.current(options.device),
        minutes=result.seconds / 60,
        architecture=result.architecture,
        parameters=sum(value.numel() for value in net.features.parameters()),
        evaluated=result.evaluated,
        failed=result.failed,
    )
    record.save(options)
    return record


def load_images(options: ExperimentOptions, size: int) -> LabeledImages:
    """Return mini-ImageNet with images of this size, or some classes of the glyphs at the quick scale."""
    if SETTINGS[options.scale].data != "glyphs":
        return options.load_images("mini-imagenet", size=size)
    glyphs = load("glyphs")
    return replace(glyphs, splits={split: classes[:GLYPH_CLASSES] for split, classes in glyphs.splits.items()})
