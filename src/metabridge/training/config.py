"""A whole training as data: what the command line fills in, and what experiments are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from metabridge.environments.environment import Environment
from metabridge.environments.image_tasks import ImageTasks, LabelledImages
from metabridge.learners.method import PRESETS, Method, method
from metabridge.models import ARCHITECTURE, Network, build
from metabridge.models.batch_norm import Statistics
from metabridge.training.augment import Augment
from metabridge.training.evaluate import Model
from metabridge.training.fitting import Fitting, Run, alone
from metabridge.training.loop import Precision, Settings
from metabridge.training.schedules import Constant, Cosine, Plateau, Schedule, Step
from metabridge.training.soft_targets import SoftTargets


@dataclass(frozen=True)
class Plan:
    """What to train, on tasks of which form, and how.

    `batch` is tasks in a step, or images for a method that trains one classifier over all classes.
    `statistics` are those of batch norm. Images in colour are augmented unless `augment` says otherwise.
    With `turns`, quarter turns of each training class are training classes of their own. Training tasks may have
    more classes than those at test, `training_ways` of them, where the method's head allows it.

    >>> from metabridge.datasets import load
    >>> run = Plan("mtl", batch=2, iterations=2, validate_every=2).train(load("glyphs"), progress=False)
    >>> run.net.head.out_features
    5
    """

    method: str
    method_options: Mapping[str, object] = field(default_factory=dict)
    model: str = "conv4"
    model_options: Mapping[str, object] = field(default_factory=dict)
    statistics: Statistics = "batch"
    ways: int = 5
    shots: int = 1
    queries: int = 15
    batch: int = 4
    iterations: int = 10_000
    optimizer: str = "adam"
    lr: float = 1e-3
    weight_decay: float = 0.0
    schedule: Schedule = field(default_factory=Constant)
    augment: Augment | bool | None = None
    turns: bool = False
    training_ways: int | None = None
    validate_every: int | None = None
    validate_tasks: int = 200
    validate_shots: int = 1
    patience: int | None = None
    precision: Precision = "float32"
    soft_targets: SoftTargets | None = None
    average: float | None = None
    seed: int = 0

    def train(
        self,
        images: LabelledImages,
        *,
        device: str = "cpu",
        out: str | Path | None = None,
        minutes: float | None = None,
        progress: bool = True,
        teacher: Model | None = None,
    ) -> Run:
        """Train on the images' classes for training, and validate on those for validation if there are two or more."""
        return alone(
            self.begin(images, device=device, out=out, teacher=teacher), self.method, minutes=minutes, progress=progress
        )

    def begin(
        self,
        images: LabelledImages,
        *,
        device: str = "cpu",
        out: str | Path | None = None,
        teacher: Model | None = None,
    ) -> Fitting:
        """Begin to train, or go on with what is in the folder, without taking a step yet."""
        chosen = self.chosen()
        images = images.to(device)
        if self.turns:
            images = images.with_rotations(("train",))
        validate = self.validation_tasks(images) if len(images.splits.get("validation", ())) > 1 else None
        net, tasks = self.network(images), self.training_tasks(images)
        settings = self.settings(self.changes(images))
        return Fitting(net, chosen, tasks, settings, validate=validate, device=device, out=out, teacher=teacher)

    def settings(self, augment: Augment | None = None) -> Settings:
        """Return how it is trained, refusing what no training takes."""
        return Settings(
            iterations=self.iterations,
            tasks=1 if self.chosen().training_head == "all-rows" else self.batch,
            optimizer=self.optimizer,
            lr=self.lr,
            weight_decay=self.weight_decay,
            schedule=self.schedule,
            augment=augment,
            patience=self.patience,
            validate_every=self.validate_every,
            validate_tasks=self.validate_tasks,
            precision=self.precision,
            soft_targets=self.soft_targets,
            average=self.average,
            seed=self.seed,
        )

    def chosen(self) -> Method:
        """Return the method."""
        return method(self.method, **self.method_options)

    def changes(self, images: LabelledImages) -> Augment | None:
        """Return the random changes to training images, if there are to be any."""
        if isinstance(self.augment, Augment):
            return self.augment
        wanted = images.images.shape[1] == 3 if self.augment is None else self.augment
        return Augment.for_size(images.images.shape[-1]) if wanted else None

    def network(self, images: LabelledImages) -> Network:
        """Return the untrained network for such images."""
        channels, size = images.images.shape[1], images.images.shape[-1]
        shape: dict[str, object] = {"inputs": channels * size**2}
        if self.model != "mlp":
            colours = "image_channels" if self.model.endswith(ARCHITECTURE) else "channels"
            shape = {colours: channels, "size": size, "statistics": self.statistics}
        return build(self.model, **{**shape, "outputs": self.ways, "seed": self.seed, **self.model_options})

    def training_tasks(self, images: LabelledImages) -> Environment:
        """Return the tasks, or the batches over all classes, to train on."""
        if self.chosen().training_head == "all-rows":
            return images.batches("train", size=self.batch)
        return images.tasks("train", ways=self.training_ways or self.ways, shots=self.shots, queries=self.queries)

    def validation_tasks(self, images: LabelledImages) -> ImageTasks:
        """Return validation tasks, of fewer ways and queries where there are fewer classes or images."""
        members = images.splits["validation"]
        fewest = int(images.labels.bincount(minlength=len(images.class_names))[members].min())
        ways, queries = min(self.ways, len(members)), max(1, min(15, fewest - self.validate_shots))
        return images.tasks("validation", ways=ways, shots=self.validate_shots, queries=queries)


# How each method is usually trained: where the command line starts from when told nothing else. Methods
# that solve a head on features predict each query by itself, so their batch norms keep fixed statistics.
PLANS: dict[str, Plan] = {
    **{name: Plan(name, schedule=Cosine()) for name in PRESETS},
    "r2d2": Plan("r2d2", statistics="running", queries=10, schedule=Cosine()),
    "metaoptnet": Plan("metaoptnet", statistics="running", queries=10, schedule=Cosine()),
    # A §5.2
    "mtl": Plan("mtl", statistics="running", shots=5, queries=5, batch=2, optimizer="radam", schedule=Plateau()),
    # B §6
    "rfs": Plan("rfs", statistics="running", batch=64, optimizer="sgd", lr=0.05, weight_decay=5e-4, schedule=Step()),
}
