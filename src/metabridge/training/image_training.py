"""Train on an image data set: create the network, the tasks and the trainer that an `ImageTrainingConfig` describes."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

from metabridge.environments.environment import Environment
from metabridge.environments.image_tasks import ImageTasks, LabeledImages
from metabridge.errors import InputError
from metabridge.learners.method import CLASS_ROW_HEADS, Method
from metabridge.learners.method import method as create_method
from metabridge.models import Network, build, builder
from metabridge.training.augment import Augment
from metabridge.training.config import ImageTrainingConfig, training_options
from metabridge.training.evaluation import Model
from metabridge.training.fitting import run_to_end
from metabridge.training.initial_weights import network_like
from metabridge.training.trackers import Tracker, TrackerName
from metabridge.training.trainer import Run, Trainer


def train_on_images(
    config: ImageTrainingConfig,
    images: LabeledImages,
    *,
    device: str = "cpu",
    out: str | Path | None = None,
    minutes: float | None = None,
    progress: bool = True,
    teacher: Model | None = None,
    init: Model | None = None,
    log: TrackerName | Tracker | None = None,
) -> Run:
    """Train on the training classes, and validate on the validation classes if there are at least two.

    Args:
        config: Method, model, tasks and training options.
        images: Labeled images with their splits.
        device: Device to compute on.
        out: Folder to save the run in. None to save nothing.
        minutes: Stop after this number of minutes. Call again with the same arguments to continue.
        progress: Whether to show a progress bar.
        teacher: Trained model whose predictions are part of the targets; see `SoftTargets.distillation`.
        init: Trained model to start from: its network with a new head replaces `model` and `model_options` of the
            configuration, and its weights are copied where they fit. The images must have the size and channels of that
            network, so load them with `decode_options=init.net.decode_options` if these are not None.
        log: Experiment tracker to which the learning curve is also sent: "tensorboard", "wandb", "trackio" or a
            `metabridge.training.trackers.Tracker`.

    Returns:
        The run.

    Raises:
        InputError: If the images have too few classes or images for the tasks, or an option cannot be used.

    >>> from metabridge.datasets import load
    >>> config = ImageTrainingConfig("mtl", batch_size=2, iterations=2, validate_every=2)
    >>> train_on_images(config, load("glyphs"), progress=False).net.head.out_features
    5
    """
    trainer = image_trainer(config, images, device=device, out=out, teacher=teacher, init=init)
    return run_to_end(trainer, config.method, minutes=minutes, progress=progress, log=log)


def image_trainer(
    config: ImageTrainingConfig,
    images: LabeledImages,
    *,
    device: str = "cpu",
    out: str | Path | None = None,
    teacher: Model | None = None,
    init: Model | None = None,
    check_init: bool = True,
    method: Method | None = None,
    net: Network | None = None,
) -> Trainer:
    """Return the trainer that `train_on_images` runs.

    Args:
        config: Method, model, tasks and training options.
        images: Labeled images with their splits.
        device: Device to compute on.
        out: Folder to save the run in. None to save nothing.
        teacher: Trained model whose predictions are part of the targets; see `SoftTargets.distillation`.
        init: Trained model to start from, as in `train_on_images`.
        check_init: Whether a run in `out` must have started from the weights of `init`.
        method: The result of `method_of(config)`, if it was already called.
        net: The network. Default: the network of `init`, or else `network_of(config, images)`.

    Returns:
        The trainer.
    """
    method = method_of(config) if method is None else method
    training_ways = config.training_ways or config.ways
    if training_ways > config.ways and method.training_head not in CLASS_ROW_HEADS:
        raise InputError(
            f"training_ways is {training_ways}, but the head of {config.method} has only {config.ways} outputs. Use "
            f"training_ways={config.ways} or fewer, more ways, or a method whose head has a row for each training "
            "class, such as mtl."
        )
    images = images.to(device)
    if config.rotated_classes:
        images = images.with_rotations(("train",))
    tasks = training_tasks(config, images, method)
    _check_memory(config, images, method)
    has_validation = len(images.splits.get("validation", ())) > 1
    validation = validation_tasks(config, images) if has_validation else None
    options = training_options(
        config,
        batch_size=1 if method.training_head == "all-rows" else config.batch_size,  # a batch of images is one task
        augment=augmentation_of(config, images),
    )
    if net is None:
        net = network_of(config, images) if init is None else network_like(init, outputs=config.ways, seed=config.seed)
    _check_decode_options(net, images)
    return Trainer(
        net,
        method,
        tasks,
        options,
        validate=validation,
        device=device,
        out=out,
        teacher=teacher,
        init=init,
        check_init=check_init,
    )


def method_of(config: ImageTrainingConfig) -> Method:
    """Return the method of a configuration."""
    return create_method(config.method, **config.method_options)


def network_of(config: ImageTrainingConfig, images: LabeledImages) -> Network:
    """Return the untrained network of a configuration, for the size and the number of channels of the images."""
    channels, size = images.images.shape[1], images.images.shape[-1]
    options: dict[str, object] = {
        "image_channels": channels,
        "channels": channels,
        "size": size,
        "inputs": channels * size**2,
        "statistics": config.statistics,
        "outputs": config.ways,
        "seed": config.seed,
    }
    options = {name: options[name] for name in options_set_by_training(config.model)}
    return build(config.model, **{**options, **config.model_options})


def options_set_by_training(model: str) -> list[str]:
    """Return the options of a model that training sets from the images or from its own options.

    >>> options_set_by_training("mlp")
    ['inputs', 'outputs', 'seed']
    """
    accepted = inspect.signature(builder(model).func).parameters
    names = ["image_channels", "channels", "size", "inputs", "statistics", "outputs", "seed"]
    if "image_channels" in accepted:
        names.remove("channels")  # in this builder, `channels` is the number of channels of the feature maps
    return [name for name in names if name in accepted]


def training_tasks(config: ImageTrainingConfig, images: LabeledImages, method: Method) -> Environment:
    """Return the training tasks, or batches of images if the method trains one classifier for all classes."""
    if method.training_head == "all-rows":
        return images.batches("train", size=config.batch_size)
    ways = config.training_ways or config.ways
    return images.tasks("train", ways=ways, shots=config.shots, queries=config.queries)


def validation_tasks(config: ImageTrainingConfig, images: LabeledImages) -> ImageTasks:
    """Return validation tasks with `config.ways` classes and 15 queries per class, or fewer if there are too few."""
    classes = images.splits["validation"]
    fewest_images = int(images.labels.bincount(minlength=len(images.class_names))[classes].min())
    ways, queries = min(config.ways, len(classes)), max(1, min(15, fewest_images - config.validate_shots))
    return images.tasks("validation", ways=ways, shots=config.validate_shots, queries=queries)


def augmentation_of(config: ImageTrainingConfig, images: LabeledImages) -> Augment | None:
    """Return the augmentation of training images, or None. By default, only color images are augmented."""
    if isinstance(config.augment, Augment):
        return config.augment
    enabled = images.images.shape[1] == 3 if config.augment is None else config.augment
    return Augment.for_size(images.images.shape[-1]) if enabled else None


def _check_decode_options(net: Network, images: LabeledImages) -> None:
    """Raise an `InputError` if a pretrained network needs images of another shape."""
    options, shape = net.decode_options, tuple(images.images.shape[1:])
    if options is not None and shape != (options.channels, options.size, options.size):
        raise InputError(
            f"images have shape {shape}, but the network needs {(options.channels, options.size, options.size)}. Load "
            "them with datasets.load(..., decode_options=net.decode_options)."
        )


def _check_memory(config: ImageTrainingConfig, images: LabeledImages, method: Method) -> None:
    """Raise an `InputError` if the images of one step need more memory than the machine has."""
    if not hasattr(os, "sysconf"):
        return
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # a batch consists of images for methods with the training head "all-rows", and of tasks for all others
    images_per_item = 1 if method.training_head == "all-rows" else config.ways * (config.shots + config.queries)
    bytes_per_item = 4 * images.images[0].numel() * images_per_item  # in float32
    if config.batch_size * bytes_per_item > memory:
        # the suggested batch takes an eighth of the memory, since training needs more than the images
        raise InputError(
            f"batch_size is {config.batch_size}, but the images of such a step take "
            f"{config.batch_size * bytes_per_item / 2**30:.0f} GiB, and this machine has {memory / 2**30:.0f} GiB of "
            f"memory. Use batch_size={max(1, memory // (8 * bytes_per_item))} or less."
        )
