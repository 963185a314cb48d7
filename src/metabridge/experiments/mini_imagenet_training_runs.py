"""Training runs on mini-ImageNet for tables 3 to 5 and figure 2 of Wang et al. (2021).

"mtl" is multi-task learning, and "rfs" is the method of Tian et al. (2020), which trains a classifier of all classes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from metabridge.environments.image_tasks import LabeledImages
from metabridge.experiments.experiment import ExperimentOptions
from metabridge.experiments.training_records import Evaluation, TrainingRecord, train_or_load
from metabridge.schedules import Cosine
from metabridge.training import TestTimeAugmentation
from metabridge.training.augment import Augment
from metabridge.training.config import ImageTrainingConfig

SHOTS = (1, 5)
VIEWS = (
    TestTimeAugmentation(copies=5),  # Wang et al. (2022, section 6)
    TestTimeAugmentation(mirrored=True),
    TestTimeAugmentation(mirrored=True, rotated=True),
    TestTimeAugmentation(mirrored=True, cropped=True),
    TestTimeAugmentation(mirrored=True, rotated=True, cropped=True),
)
# On 40 or 2000 validation tasks, and as many test tasks.
EVALUATIONS = {"quick": Evaluation(SHOTS, 40, VIEWS[:2]), "paper": Evaluation(SHOTS, 2000, VIEWS)}

_RESNET = ImageTrainingConfig(
    "mtl",
    model="resnet12",
    model_options={"dropout": 0.1},
    statistics="running",
    augment=Augment(scale=(0.3, 1.0), growth=(60, 0.6)),  # images of 60 px in the first 60 % of the training steps
    precision="bfloat16",
    validate_tasks=500,
    validate_shots=5,
)
# The batch size is 16 because, on a GPU, such a step takes little longer than a step of a few tasks.
_CONV = ImageTrainingConfig(
    "maml",
    batch_size=16,
    queries=10,
    lr=5e-3,
    schedule=Cosine(),
    augment=False,
    precision="bfloat16",
    validate_tasks=300,
)

# The options were selected on validation tasks. Unlike Wang et al. (2021), who lower the learning rate at plateaus, we
# use a cosine schedule. The number of iterations was chosen to fit the available time.
_RFS = replace(
    _RESNET,
    method="rfs",
    batch_size=256,
    iterations=40_000,
    optimizer="sgd",
    lr=0.2,
    weight_decay=5e-4,
    schedule=Cosine(warmup=0.03),
    rotated_classes=True,
    validate_every=4000,
)
# For r2d2 and metaoptnet, whose inner solvers compute the head of each task.
_SOLVER = replace(_RESNET, shots=5, queries=10, batch_size=4, iterations=5000, schedule=Cosine(), validate_every=500)
_ANIL = replace(_CONV, method="anil", method_options={"steps": 5, "lr": 0.1}, iterations=12_000)
PAPER: dict[str, ImageTrainingConfig] = {
    "rfs": _RFS,
    # 256 images per step, as for rfs, but from 64 of the 256 classes (64 original and 192 rotated ones)
    "mtl": replace(_RFS, method="mtl", training_ways=64, shots=2, queries=2, batch_size=1, iterations=22_000),
    "r2d2": replace(_SOLVER, method="r2d2"),
    "metaoptnet": replace(_SOLVER, method="metaoptnet"),
    "maml-1": replace(_CONV, method_options={"steps": 5, "lr": 0.03}, iterations=10_000, lr=4e-3),
    "maml-5": replace(  # fewer inner steps, because each takes five times as long with five shots
        _CONV,
        method_options={"steps": 3, "lr": {"features": 0.02, "head": 0.15}},
        iterations=11_000,
        queries=8,
        shots=5,
        validate_shots=5,
    ),
    "anil-1": _ANIL,
    "anil-5": replace(_ANIL, shots=5, validate_shots=5),
}


def configs(scale: str) -> dict[str, ImageTrainingConfig]:
    """Return the training configurations by run name.

    A run whose name ends in -1 or -5 is tested with this number of shots, all others with 1 and with 5 shots.
    """
    return PAPER if scale == "paper" else {name: quick_config(config) for name, config in PAPER.items()}


def quick_config(config: ImageTrainingConfig) -> ImageTrainingConfig:
    """Return a copy of the configuration with few steps, small batches and a small network."""
    quick = replace(
        config,
        iterations=30,
        batch_size=min(config.batch_size, 32),
        validate_tasks=20,
        validate_every=10,
        augment=None,
        rotated_classes=False,
        precision="float32",
    )
    if config.model == "resnet12":
        return replace(quick, model_options={**config.model_options, "widths": [8, 16, 32, 64]})
    return replace(quick, batch_size=2, queries=5)


def train_or_load_all(options: ExperimentOptions, names: tuple[str, ...]) -> dict[str, TrainingRecord]:
    """Train those of the named runs that `options.only` selects. Return the records of all named runs that finished."""
    selected_configs = {name: config for name, config in configs(options.scale).items() if name in names}
    options.check_selected_names(selected_configs)
    images = cache(lambda: load_images(options))
    records = {}
    for name, config in selected_configs.items():
        shots, evaluation = name.partition("-")[2], EVALUATIONS[options.scale]
        evaluation = replace(evaluation, shots=(int(shots),)) if shots else evaluation
        record_name = f"{options.data_name('mini-imagenet')}-{name}-{options.scale}-{options.seed}"
        record = train_or_load(options, name, record_name, replace(config, seed=options.seed), images, evaluation)
        if record is not None:
            records[name] = record
    return records


def load_images(options: ExperimentOptions) -> LabeledImages:
    """Return the images to train on: mini-ImageNet or, if it is not available at the quick scale, the glyphs."""
    return options.load_images("mini-imagenet", size=84 if options.scale == "paper" else 32)
