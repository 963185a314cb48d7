"""Random architectures, their proxies before training and their accuracies after training, for `nas_ranks`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from metabridge.datasets import load
from metabridge.environments.image_tasks import LabeledImages
from metabridge.experiments.experiment import ExperimentOptions
from metabridge.experiments.records import Record, as_json, run_folder
from metabridge.models.architecture import Architecture, random_architecture
from metabridge.nas.architecture_search import SearchConfig, SearchKernel, score_architecture
from metabridge.nas.proxies import ProxyScore, mean_score
from metabridge.report.results import Machine
from metabridge.schedules import Cosine
from metabridge.training import Run, evaluate, train_interleaved
from metabridge.training.config import ImageTrainingConfig, replace_former_names
from metabridge.training.image_training import image_trainer
from metabridge.training.interleaved import concurrent_runs

# The proxies that are condition numbers, each with its kernel.
KERNELS: dict[str, SearchKernel] = {"MAML kernel": "maml", "ANIL kernel": "anil", "NTK": "ntk"}
PROXIES = (*KERNELS, "linear regions", "parameters")


@dataclass(frozen=True)
class Settings:
    """The number of architectures, how they are scored, trained and tested, and the number of bootstrap resamples."""

    architectures: int  # number of random architectures
    search: SearchConfig  # how they are scored
    config: ImageTrainingConfig  # how they are trained
    test_tasks: int  # number of test tasks on which the accuracy of each architecture is measured
    resamples: int  # how often the architectures are resampled for the bootstrap intervals


_CONFIG = ImageTrainingConfig(
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
SETTINGS = {
    "quick": Settings(
        4,
        SearchConfig(cells=3, channels=4, tasks=2, ways=3, repeats=1, region_inputs=200),
        replace(_CONFIG, batch_size=32, iterations=10, validate_every=10, validate_tasks=10),
        test_tasks=20,
        resamples=100,
    ),
    "paper": Settings(40, SearchConfig(cells=3, channels=16), _CONFIG, test_tasks=2000, resamples=2000),
}


@dataclass(frozen=True)
class ScoredArchitecture:
    """The proxies of an architecture (None if a proxy failed) and its accuracy after training."""

    architecture: Architecture
    proxies: dict[str, float | None]
    accuracy: float  # mean over test tasks
    ci95: float  # half-width of the 95 % interval of the accuracy
    minutes: float  # duration of the training

    def predicted_quality(self, proxy: str) -> float:
        """Return the proxy with the sign for which larger values are better, or −∞ if the proxy failed."""
        value = self.proxies[proxy]
        if value is None:
            return -math.inf
        return -value if proxy in KERNELS else value


@dataclass(frozen=True)
class RankRecord(Record):
    """The trained architectures, in the order in which their training runs finished."""

    architectures: tuple[ScoredArchitecture, ...]

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> RankRecord:
        """Return the record with these fields, as read from JSON."""
        # In the file, the architectures have the key "judged", as in version 0.1.0. "environment" is the machine.
        training = replace_former_names(stored["plan"]["training"])
        defaults = as_json(asdict(ImageTrainingConfig(training["method"])))  # for options that are not in older records
        plan = {**stored["plan"], "training": defaults | training}
        architectures = tuple(
            ScoredArchitecture(**{**entry, "architecture": Architecture.from_dict(entry["architecture"])})
            for entry in stored["judged"]
        )
        empty_record = cls(stored["name"], plan, stored["environment"], 0.0, ())
        return empty_record.with_architectures(architectures)  # which also sets `minutes`

    def to_json(self) -> dict[str, Any]:
        """Return the fields in the form that `from_json` reads."""
        fields = asdict(self)
        return {**{key: fields[key] for key in ("name", "plan", "environment")}, "judged": fields["architectures"]}

    def with_architectures(self, architectures: Sequence[ScoredArchitecture]) -> RankRecord:
        """Return a copy of the record with these architectures, and with the total duration of their training runs."""
        minutes = sum(architecture.minutes for architecture in architectures)
        return replace(self, minutes=minutes, architectures=tuple(architectures))


def train_and_score(options: ExperimentOptions) -> RankRecord:
    """Train and score the architectures missing from the record, within the time limit, and return the record."""
    settings = seeded_settings(options)
    plan = as_json(
        {
            "data": "glyphs",
            "search": settings.search.to_dict(),
            "training": asdict(settings.config),
            "test_tasks": settings.test_tasks,
        }
    )
    name = f"nas-ranks-{options.scale}-{options.seed}"
    new_record = RankRecord(name, plan, Machine.current(options.device), 0.0, ())
    record = RankRecord.load(options, name, plan) or new_record
    images = load("glyphs").to(options.device)
    for architecture, run in train_missing(options, settings, record, images):
        scored_architecture = score(options, settings, architecture, run, images)
        record = record.with_architectures([*record.architectures, scored_architecture])
        record.save(options)
    return record.with_architectures(record.architectures[: settings.architectures])


def seeded_settings(options: ExperimentOptions) -> Settings:
    """Return the settings of the scale, with the seed of the experiment."""
    settings = SETTINGS[options.scale]
    return replace(
        settings,
        search=replace(settings.search, seed=options.seed),
        config=replace(settings.config, seed=options.seed),
    )


def train_missing(
    options: ExperimentOptions, settings: Settings, record: RankRecord, images: LabeledImages
) -> Iterator[tuple[Architecture, Run]]:
    """Train the architectures that are not in the record, and yield each with its finished training run."""
    generator = torch.Generator().manual_seed(options.seed)
    trained_architectures = {entry.architecture for entry in record.architectures}
    architectures = {f"network {i}": random_architecture(generator) for i in range(settings.architectures)}
    trainers = {
        label: partial(
            image_trainer,
            architecture_config(settings, architecture, images),
            images,
            device=options.device,
            out=run_folder(options, f"{record.name}-{label.replace(' ', '-')}", record.plan),
        )
        for label, architecture in architectures.items()
        if architecture not in trained_architectures
    }
    at_once = concurrent_runs(options.device)
    for label, run in train_interleaved(trainers, at_once=at_once, minutes=options.minutes, progress=options.progress):
        if run.finished:
            yield architectures[label], run


def architecture_config(settings: Settings, architecture: Architecture, images: LabeledImages) -> ImageTrainingConfig:
    """Return the training configuration for a network of this architecture."""
    model_options = {
        "architecture": asdict(architecture),
        "cells": settings.search.cells,
        "channels": settings.search.channels,
        "image_channels": images.images.shape[1],
        "drop_rate": 0.0,
    }
    return replace(settings.config, model_options=model_options)


def score(
    options: ExperimentOptions, settings: Settings, architecture: Architecture, run: Run, images: LabeledImages
) -> ScoredArchitecture:
    """Return the proxies of an architecture at initialization, and its accuracy after training."""
    proxies: dict[str, ProxyScore] = {}
    for proxy, kernel in KERNELS.items():
        search = replace(settings.search, kernel=kernel)
        scores = score_architecture(architecture, images, search, device=options.device)
        proxies[proxy] = mean_score([score.condition for score in scores if score.condition is not None])
        # These scores are the same for every kernel, so it does not matter which of them is kept.
        proxies["linear regions"] = mean_score([score.regions for score in scores if score.regions is not None])
    proxies["parameters"] = ProxyScore(float(sum(value.numel() for value in run.net.features.parameters())))
    values = {proxy: None if result.failure else result.value for proxy, result in proxies.items()}
    accuracy = evaluate(run, images.tasks("test"), tasks=settings.test_tasks, seed=options.seed)
    return ScoredArchitecture(architecture, values, accuracy.mean, accuracy.ci95, run.seconds / 60)
