"""Training of the built-in models "photos" and "characters", whose weights are in the package.

"photos" is trained on the training classes of mini-ImageNet, "characters" on those of the glyphs and of Omniglot. No
paper has published these numbers. The numbers of steps of the models in the package were reduced while they were
trained (docs/models.md), so training again gives similar but not the same weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from metabridge.environments.image_tasks import LabeledImages
from metabridge.experiments.experiment import ExperimentOptions, TrainingExperiment
from metabridge.experiments.training_records import Evaluation, TrainingRecord, train_or_load
from metabridge.report.results import Row
from metabridge.schedules import Cosine
from metabridge.training.augment import Augment
from metabridge.training.config import ImageTrainingConfig
from metabridge.training.evaluation import TestTimeAugmentation
from metabridge.training.head_selection import best_in_validation

SHOTS = (1, 5)
# ResNet-12 with half the widths, or less, because it is fast on a CPU.
_RFS = ImageTrainingConfig(
    "rfs",
    model="resnet12",
    statistics="running",
    precision="bfloat16",
    batch_size=128,
    optimizer="muon",
    weight_decay=5e-4,
    schedule=Cosine(warmup=0.03),
    rotated_classes=True,
    validate_tasks=300,
)
CONFIGS = {
    "photos": replace(
        _RFS,
        model_options={"widths": [32, 64, 128, 256], "drop_rate": 0.0},
        augment=Augment(scale=(0.3, 1.0), growth=(48, 0.8)),  # images of 48 px in the first 80 % of the training steps
        validate_shots=5,
        iterations=4000,
        lr=0.2 * 0.5**0.5,
        validate_every=1750,
    ),
    "characters": replace(
        _RFS,
        model_options={"widths": [20, 40, 80, 160], "drop_rate": 0.1},
        augment=Augment(scale=(0.6, 1.0), jitter=0.0, flip=False),
        validate_shots=1,
        iterations=3000,
        lr=0.14,
        validate_every=1000,
    ),
}
TRAINING_SIZE = 64  # of the images of "photos"; the packaged model takes larger ones, as chosen on validation classes


def load_images(options: ExperimentOptions, name: str) -> LabeledImages:
    """Return the images that a built-in model is trained on, or the glyphs if data sets are missing (quick scale)."""
    if name == "photos":
        return options.load_images("mini-imagenet", size=TRAINING_SIZE)
    glyphs = options.load_images("glyphs")
    if options.scale == "quick" and not options.has_data("omniglot"):
        return glyphs
    return glyphs.merge(options.load_images("omniglot"), prefix="omniglot/")


def config_for(options: ExperimentOptions, name: str) -> ImageTrainingConfig:
    """Return the training configuration of a built-in model."""
    config = replace(CONFIGS[name], seed=options.seed)
    if options.scale == "paper":
        return config
    quick_options = {**config.model_options, "widths": [8, 8, 16, 16]}
    return replace(
        config,
        model_options=quick_options,
        augment=None,
        rotated_classes=False,
        precision="float32",
        iterations=20,
        validate_every=10,
        validate_tasks=20,
    )


def measure(options: ExperimentOptions) -> dict[str, TrainingRecord]:
    """Return the records of the finished training runs, after training those that `options.only` selects."""
    options.check_selected_names(CONFIGS)
    tasks = 2000 if options.scale == "paper" else 40
    records = {}
    for name in CONFIGS:
        views = (TestTimeAugmentation(mirrored=True),) if name == "photos" else ()
        record_name = f"builtin-{name}-{options.scale}-{options.seed}"
        images = partial(load_images, options, name)
        evaluation = Evaluation(SHOTS, tasks, views)
        record = train_or_load(options, name, record_name, config_for(options, name), images, evaluation)
        if record is not None:
            records[name] = record
    return records


def rows(records: Mapping[str, TrainingRecord], _: ExperimentOptions) -> list[Row]:
    """Return the accuracies of both models on new classes."""
    rows = []
    for name, record in records.items():
        for shots in SHOTS:
            test, validation = record.selected_accuracy(shots), best_in_validation(record.scores, shots)
            note = f"{record.images}; validation {100 * validation.mean:.2f} %; {record.minutes:.0f} minutes; {test}"
            rows.append(
                Row(f"{name}, {shots}-shot", "accuracy %", ours=100 * test.mean, ci95=100 * test.ci95, note=note)
            )
    return rows


EXPERIMENT = TrainingExperiment("builtin-training", measure, rows)
