"""Short training runs on sinusoids and on color images, and arguments of `train` and `evaluate`."""

from __future__ import annotations

from pathlib import Path

import torch

from metabridge import fit, method
from metabridge.environments import LabeledImages, Sinusoid
from metabridge.models import mlp, resnet12
from metabridge.training import Augment, Run

TRAIN = ("train", "--device", "cpu", "--iterations", 4, "--validate-every", 2, "--validate-tasks", 4, "--queries", 2)
TRAIN += ("--batch-size", 2, "--model-option", "filters=6")
EVALUATE = ("--tasks", 10, "--queries", 4, "--device", "cpu")


class CountingEnvironment:
    """An environment that calls `on_sample` with the number of `sample` calls so far."""

    def __init__(self, environment, on_sample=lambda count: None) -> None:
        self.environment, self.on_sample, self.count = environment, on_sample, 0

    def __getattr__(self, name):
        return getattr(self.environment, name)

    def sample(self, tasks, generator):
        self.count += 1
        self.on_sample(self.count)
        return self.environment.sample(tasks, generator)


def colors() -> LabeledImages:
    """Eight classes of 18-pixel color images, four to train on and four to validate on."""
    labels = torch.arange(8).repeat_interleave(12)
    generator = torch.Generator().manual_seed(0)
    shades = torch.randint(40, 215, (8, 3, 18, 18), generator=generator)
    noise = torch.randint(-40, 41, (96, 3, 18, 18), generator=generator)
    return LabeledImages(
        images=(shades[labels] + noise).to(torch.uint8),
        labels=labels,
        class_names=tuple("abcdefgh"),
        superclasses=torch.zeros(8, dtype=torch.int64),
        superclass_names=("all",),
        splits={"train": torch.arange(4), "validation": torch.arange(4, 8)},
    )


# options of `fit` for training on sinusoids and on color images
SINUSOIDS = {
    "iterations": 13,
    "validate_every": 4,
    "validate_tasks": 6,
    "batch_size": 2,
    "mode": "loop",
    "progress": False,
}
COLOR_IMAGES = {"iterations": 9, "validate_every": 4, "validate_tasks": 4, "progress": False}
COLOR_IMAGES["augment"] = Augment(padding=2, growth=(16, 0.4))


def on_sinusoids(out: Path | None, on_sample=lambda count: None, **options) -> Run:
    """Train a small MLP with MAML on sinusoids."""
    net, learner = mlp(1, 1, width=8), method("maml", steps=1, lr=0.02)
    return fit(
        net, learner, CountingEnvironment(Sinusoid(), on_sample), validate=Sinusoid(), out=out, **SINUSOIDS | options
    )


def on_colors(name: str, out: Path | None, on_sample=lambda count: None, **options) -> Run:
    """Train a ResNet-12 with DropBlock and running statistics on augmented color images."""
    data, learner = colors(), method(name)
    net = resnet12(3, 18, 3, widths=(8, 8, 16, 16), drop_rate=0.3, dropout=0.2)
    train = data.batches("train", size=24) if name == "rfs" else data.tasks("train", ways=3, shots=2, queries=2)
    validate = data.tasks("validation", ways=3, shots=1, queries=5)
    return fit(
        net,
        learner,
        CountingEnvironment(train, on_sample),
        validate=validate,
        out=out,
        batch_size=1 if name == "rfs" else 2,
        **COLOR_IMAGES | options,
    )
