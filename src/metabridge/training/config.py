"""The training options. Each option is one dataclass field with its type, default, check and help text.

The command line options of `metabridge train`, the keyword arguments of `fit` and the settings stored with a run are
derived from these fields, so adding an option means adding a field here. The module does not import PyTorch, so that
`metabridge train --help` starts fast.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, MISSING, Field, asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat, TypeVar, get_args

from metabridge.choices import alternatives, model_names
from metabridge.errors import MAX_COUNT, InputError, check_not_negative, check_positive
from metabridge.schedules import SCHEDULES, Constant, Cosine, Plateau, Schedule, Step

if TYPE_CHECKING:
    from metabridge.models.batch_norm import Statistics
    from metabridge.training.augment import Augment

Check = Callable[[str, Any], None]
Config = TypeVar("Config")
OptimizerName = Literal["adam", "adamw", "radam", "sgd", "muon"]
Precision = Literal["float32", "bfloat16"]

# Current names of the options that version 0.1.0 named differently. In version 0.1.0, the batch size is "tasks" in
# settings.json and "batch" in records of experiments. "turned" is an option of test-time augmentations in such records.
FORMER_NAMES = {
    "tasks": "batch_size",
    "batch": "batch_size",
    "average": "ema_decay",
    "turns": "rotated_classes",
    "turned": "rotated",
}


def _field(config: type, name: str) -> Field[Any]:
    return next(candidate for candidate in fields(config) if candidate.name == name)


def _default_text(default: object) -> str:
    if default is None or default is MISSING or default is False:
        return ""
    return type(default).__name__.lower() if isinstance(default, Schedule) else str(default)


def option(
    default: Any = MISSING,
    *,
    help: str,
    check: Check | None = None,
    flags: tuple[str, ...] = (),
    default_factory: Any = MISSING,
) -> Any:
    """Return a dataclass field that describes one option.

    Args:
        default: Default value.
        help: Text for `--help` and for the docstring of `fit`, without the default.
        check: Function of the option's name and value that raises an `InputError` for an invalid value.
        flags: Names on the command line. By default `--` and the field's name with hyphens.
        default_factory: Function that creates a mutable default value.

    Returns:
        The field.
    """
    metadata = {"help": help, "check": check, "flags": flags}
    if default_factory is not MISSING:
        return field(default_factory=default_factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def inherited_option(base: type, name: str, default: Any = MISSING, **changes: Any) -> Any:
    """Return the option `name` of `base` with a changed default, help text or check."""
    original = _field(base, name)
    metadata = {key: value for key, value in original.metadata.items() if key in ("help", "check", "flags")}
    return option(original.default if default is MISSING else default, **metadata | changes)


def options_of(config: type) -> dict[str, Field[Any]]:
    """Return the options of a configuration class by name."""
    return {option_field.name: option_field for option_field in fields(config) if "help" in option_field.metadata}


def replace_former_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return stored options with the names of version 0.1.0 replaced by the current names.

    >>> replace_former_names({"lr": 0.1, "batch": 2})
    {'lr': 0.1, 'batch_size': 2}
    """
    return {FORMER_NAMES.get(name, name): value for name, value in options.items()}


def document_options(config: type[Config]) -> type[Config]:
    """Replace `{options}` in a class's docstring by the `Args:` entries of its options."""
    if config.__doc__ is not None:
        config.__doc__ = config.__doc__.replace("    {options}", arguments_text(config))
    return config


def arguments_text(config: type) -> str:
    """Return the options as the entries of a docstring's `Args:` section."""
    return "\n".join(f"        {name}: {help_text(option_field)}" for name, option_field in options_of(config).items())


def help_text(option_field: Field[Any]) -> str:
    """Return an option's help text with its default."""
    default = _default_text(option_field.default)
    return f"{option_field.metadata['help']}{f' Default: {default}.' if default else ''}"


def as_python_number(value: Any) -> Any:
    """Convert a NumPy or PyTorch number to a Python number, which JSON can store. Return other values unchanged."""
    if value is None or isinstance(value, int | float | str):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return float(value) if isinstance(value, SupportsFloat) and getattr(value, "ndim", 0) == 0 else value


def check_options(config: object) -> None:
    """Convert the numbers of a configuration to Python numbers, and raise an `InputError` if an option is invalid."""
    for name, option_field in options_of(type(config)).items():
        object.__setattr__(config, name, as_python_number(getattr(config, name)))
        if option_field.metadata["check"] is not None:
            option_field.metadata["check"](name, getattr(config, name))


@dataclass(frozen=True)
class IntegerRange:
    """Check that an option is an integer between two bounds, or None if `optional`."""

    minimum: int
    maximum: int = MAX_COUNT
    optional: bool = False

    def __call__(self, name: str, value: Any) -> None:
        """Raise an `InputError` if the value is not an integer in this range."""
        if value is None and self.optional:
            return
        if not isinstance(value, int) or isinstance(value, bool) or value < self.minimum:
            raise InputError(
                f"{name} is {value!r}, but must be an integer of at least {self.minimum}. "
                f"Use {name}={self.minimum} or more."
            )
        if value > self.maximum:
            raise InputError(f"{name} is {value}, which is too large. Use {name}={self.maximum} or less.")


@dataclass(frozen=True)
class Choice:
    """Check that an option is one of several names."""

    names: tuple[str, ...]

    def __call__(self, name: str, value: Any) -> None:
        """Raise an `InputError` if the value is not one of the names."""
        if value not in self.names:
            raise InputError(f"{name} is {value!r}, but must be one of {', '.join(self.names)}.")


def _check_seed(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**63:
        raise InputError(f"{name} is {value!r}, but must be a signed 64-bit integer. Use seed=0.")


def _check_decay(name: str, value: Any) -> None:
    if value is not None and not (isinstance(value, float) and 0 < value < 1):
        raise InputError(f"{name} is {value!r}, but must be a decay between 0 and 1, such as 0.999.")


def _check_schedule(name: str, value: Any) -> None:
    if not isinstance(value, Schedule):
        raise InputError(f"{name} is {value!r}, but must be a schedule such as metabridge.schedules.Cosine().")


def _check_augment(name: str, value: Any) -> None:
    if value is None:
        return
    from metabridge.training.augment import Augment

    if not isinstance(value, Augment):
        raise InputError(f"{name} is {value!r}, but must be an Augment() or None.")


def _check_image_augment(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        _check_augment(name, value)


def _check_fraction(name: str, value: Any) -> None:
    if not (isinstance(value, int | float) and 0 <= value <= 1):
        raise InputError(f"{name} is {value!r}, but must be a fraction from 0 to 1. Use {name}=0.1.")


def _check_freeze(name: str, value: Any) -> None:
    if value is not None and not (isinstance(value, tuple | list) and all(isinstance(part, str) for part in value)):
        raise InputError(f"{name} is {value!r}, but must be a tuple of names, such as ('features.0',), or None.")


def _check_soft_targets(name: str, value: Any) -> None:
    if not isinstance(value, SoftTargets | None):
        raise InputError(f"{name} is {value!r}, but must be a SoftTargets() or None.")


@document_options
@dataclass(frozen=True)
class SoftTargets:
    """Target probabilities instead of class labels, for methods whose head covers all training classes (mtl, rfs).

    Args:
    {options}

    Raises:
        InputError: If an option is out of range.

    >>> SoftTargets(smoothing=0.1).mixup
    0.0
    """

    smoothing: float = option(
        0.0,
        help="Label smoothing factor, as in `CrossEntropyLoss` (Szegedy et al. 2016; only mtl and rfs).",
        check=_check_fraction,
    )
    mixup: float = option(
        0.0,
        help="Mixup: parameter α of the Beta(α, α) distribution from which the mixing weights are drawn (Zhang et al. "
        "2018; only mtl and rfs). 0: no mixup.",
        check=check_not_negative,
    )
    distillation: float = option(
        0.0,
        help="Distillation: weight of the teacher's predicted probabilities in the targets (Furlanello et al. 2018; "
        "only mtl and rfs).",
        check=_check_fraction,
    )
    temperature: float = option(1.0, help="Distillation: temperature of the teacher's softmax.", check=check_positive)

    def __post_init__(self) -> None:
        check_options(self)


@document_options
@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Training options that apply to every network, method and environment.

    Args:
    {options}

    Raises:
        InputError: If the value of an option is invalid.

    >>> import metabridge as mb
    >>> mb.TrainingConfig(iterations=2000, lr=0.01).validation_interval
    200
    """

    iterations: int = option(1000, help="Number of training steps.", check=IntegerRange(1))
    batch_size: int = option(4, help="Number of tasks per step.", check=IntegerRange(1))
    optimizer: OptimizerName = option(
        "adam", help=f"Optimizer: {alternatives(get_args(OptimizerName))}.", check=Choice(get_args(OptimizerName))
    )
    lr: float = option(1e-3, help="Learning rate of the optimizer (the outer learning rate).", check=check_positive)
    weight_decay: float = option(0.0, help="Weight decay of the optimizer.", check=check_not_negative)
    schedule: Schedule = option(
        Constant(), help=f"Learning rate schedule: {alternatives(SCHEDULES)}.", check=_check_schedule
    )
    augment: Augment | None = option(
        None, help="Random changes to the training images (an `Augment`). None: no changes.", check=_check_augment
    )
    patience: int | None = option(
        None,
        help="Early stopping: stop after more than this many consecutive validations without a new best score. "
        "Default: no early stopping.",
        check=IntegerRange(0, optional=True),
    )
    validate_every: int | None = option(
        None,
        help="Number of steps between validations. Default: `iterations` / 10.",
        check=IntegerRange(1, optional=True),
    )
    validate_tasks: int = option(
        100, help="Number of tasks per validation; all validations use the same tasks.", check=IntegerRange(2)
    )
    precision: Precision = option(
        "float32",
        help=f"dtype in which features are computed: {alternatives(get_args(Precision))}. Weights are always float32.",
        check=Choice(get_args(Precision)),
    )
    soft_targets: SoftTargets | None = option(
        None,
        help="Label smoothing, mixup and distillation (a `SoftTargets`), for methods whose head covers all training "
        "classes (mtl, rfs).",
        check=_check_soft_targets,
    )
    ema_decay: float | None = option(
        None,
        help="Decay of the exponential moving average (EMA) of the weights, such as 0.999. The averaged weights are "
        "evaluated and saved. Default: no averaging.",
        check=_check_decay,
    )
    freeze: tuple[str, ...] | None = option(
        None,
        help="Parts of the network that are neither trained nor adapted, such as features.0: first components of "
        "parameter names. Default: none.",
        check=_check_freeze,
    )
    seed: int = option(
        0, help="Random seed. Results are deterministic for a given seed and machine.", check=_check_seed
    )

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def validation_interval(self) -> int:
        """Number of steps between two validations."""
        return max(1, self.iterations // 10) if self.validate_every is None else self.validate_every

    def as_dict(self) -> dict[str, Any]:
        """Return the options as nested dictionaries that JSON can store."""
        schedule = {"name": type(self.schedule).__name__.lower()} | asdict(self.schedule)
        return asdict(self) | {"schedule": schedule}


@document_options
@dataclass(frozen=True)
class ImageTrainingConfig(TrainingConfig):
    """Settings of a training run on an image data set: method, model, tasks and training options.

    `metabridge.training.image_training` builds the network and the tasks from it.

    Args:
    {options}

    Raises:
        InputError: If the value of an option is invalid.

    >>> ImageTrainingConfig("anil", ways=3, iterations=200).validate_tasks
    200
    """

    method: str = option("mtl", help="Name of the method; `metabridge methods` lists all.")
    _: KW_ONLY
    method_options: Mapping[str, object] = option(
        default_factory=dict, help="Options of the method, such as steps=5.", flags=("--option", "-o")
    )
    model: str = option(
        "conv4", help=f"Network: {alternatives(model_names())}. wide is an MLP in the NTK parameterization."
    )
    model_options: Mapping[str, object] = option(
        default_factory=dict, help="Options of the network, such as filters=64.", flags=("--model-option",)
    )
    statistics: Statistics = option(
        "batch",
        help="Batch norm statistics: batch (of each support or query set) or running (fixed at test time).",
        check=Choice(("batch", "running")),
    )
    ways: int = option(5, help="Number of classes per task.", check=IntegerRange(2))
    training_ways: int | None = option(
        None,
        help="Number of classes per training task; rfs ignores it. A number above `ways` needs a method whose head "
        "has one output for each class of the training split, such as mtl. Default: `ways`.",
        check=IntegerRange(2, optional=True),
    )
    shots: int = option(1, help="Number of support images per class in training tasks.", check=IntegerRange(1))
    queries: int = option(15, help="Number of query images per class in training tasks.", check=IntegerRange(1))
    batch_size: int = inherited_option(
        TrainingConfig, "batch_size", help="Number of tasks per step; for rfs, number of images per step."
    )
    iterations: int = inherited_option(TrainingConfig, "iterations", 10_000)
    augment: Augment | bool | None = inherited_option(  # type: ignore[assignment]  # wider than in the base
        TrainingConfig,
        "augment",
        help="Random crops, color jitter and flips of the training images. Default: on for color images.",
        check=_check_image_augment,
    )
    rotated_classes: bool = option(
        False, help="Add the training classes rotated by 90, 180 and 270 degrees as new classes. Default: off."
    )
    validate_tasks: int = inherited_option(TrainingConfig, "validate_tasks", 200)
    validate_shots: int = option(
        1, help="Number of support images per class in validation tasks.", check=IntegerRange(1)
    )


def training_options(config: TrainingConfig, **changes: Any) -> TrainingConfig:
    """Return the `TrainingConfig` options of a configuration, with some changes."""
    return TrainingConfig(**{name: getattr(config, name) for name in options_of(TrainingConfig)} | changes)


# The usual configurations of some methods; the others use the defaults of ImageTrainingConfig with a cosine schedule.
# Batch norm has running statistics in these methods, so that each query is predicted independently of the others.
METHOD_DEFAULTS: dict[str, ImageTrainingConfig] = {
    "r2d2": ImageTrainingConfig("r2d2", statistics="running", queries=10, schedule=Cosine()),
    "metaoptnet": ImageTrainingConfig("metaoptnet", statistics="running", queries=10, schedule=Cosine()),
    # Wang et al. 2021, section 5.2
    "mtl": ImageTrainingConfig(
        "mtl", statistics="running", shots=5, queries=5, batch_size=2, optimizer="radam", schedule=Plateau()
    ),
    # Wang et al. 2022, section 6
    "rfs": ImageTrainingConfig(
        "rfs",
        statistics="running",
        batch_size=64,
        optimizer="sgd",
        lr=0.05,
        weight_decay=5e-4,
        schedule=Step(),
    ),
}


def default_config(method: str) -> ImageTrainingConfig:
    """Return the configuration with which a method is usually trained on images.

    Args:
        method: Name of the method.

    Returns:
        The entry in `METHOD_DEFAULTS`; for other methods, the defaults of `ImageTrainingConfig` with a cosine schedule.

    >>> default_config("rfs").lr, default_config("maml").schedule
    (0.05, Cosine(warmup=0.0))
    """
    return METHOD_DEFAULTS.get(method) or ImageTrainingConfig(method, schedule=Cosine())
