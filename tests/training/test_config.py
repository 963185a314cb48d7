from __future__ import annotations

import inspect
import json
import re
from dataclasses import FrozenInstanceError, dataclass

import pytest

from metabridge import InputError, fit, method
from metabridge.cli.config_options import flag_name, with_config_options
from metabridge.environments import Sinusoid
from metabridge.learners import PRESETS
from metabridge.models import mlp
from metabridge.schedules import Cosine
from metabridge.training import TrainingConfig
from metabridge.training.config import (
    METHOD_DEFAULTS,
    ImageTrainingConfig,
    IntegerRange,
    SoftTargets,
    default_config,
    help_text,
    option,
    options_of,
    replace_former_names,
    training_options,
)
from metabridge.training.fitting import FitArguments
from metabridge.training.trainer import OPTIMIZERS

CONFIGS = (TrainingConfig, ImageTrainingConfig)


def test_every_option_is_an_option_of_train_with_its_help_text(metabridge):
    status, stdout, _ = metabridge("train", "--help")
    assert status == 0
    text = " ".join(stdout.replace("│", " ").split())  # without the frame around the options
    fields = options_of(ImageTrainingConfig)
    flags = {name: flag_name(field) for name, field in fields.items()}
    del fields["soft_targets"]
    for field in [*fields.values(), *options_of(SoftTargets).values()]:
        for flag in field.metadata["flags"] or [flag_name(field)]:
            assert f" {flag} " in text
        # on the command line, help texts refer to other options by their flags
        expected_help = re.sub(r"`(\w+)`", lambda match: flags.get(match[1], match[0]), field.metadata["help"])
        assert expected_help.replace("`", "") in text


def test_an_option_whose_type_the_command_line_cannot_read_raises_an_error(monkeypatch):
    @dataclass(frozen=True, kw_only=True)
    class Extended(ImageTrainingConfig):
        crop_size: tuple[int, int] = option((1, 2), help="Height and width.")

    monkeypatch.setattr("metabridge.cli.config_options.ImageTrainingConfig", Extended)
    with pytest.raises(TypeError, match=r"crop_size has the type tuple\[int, int\], which is not in OPTION_TYPES"):
        with_config_options(lambda data="glyphs", **config: None)


def test_every_option_is_an_argument_of_fit_with_its_help_text():
    parameters = inspect.signature(fit).parameters
    for name, field in options_of(FitArguments).items():
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default == field.default
        assert f"\n        {name}: {help_text(field)}\n" in fit.__doc__


@pytest.mark.parametrize("config", CONFIGS)
def test_every_option_is_described_in_the_docstring_of_its_class(config):
    for name, field in options_of(config).items():
        assert f"\n        {name}: {help_text(field)}\n" in config.__doc__


def test_every_option_is_stored_with_a_run(tmp_path):
    fit(mlp(1, 1), method("maml"), Sinusoid(), iterations=1, out=tmp_path, progress=False)
    stored = json.loads((tmp_path / "settings.json").read_text())["training"]
    # the validation interval that follows from `iterations` is stored as `validate_every`
    assert stored == json.loads(json.dumps(TrainingConfig(iterations=1, validate_every=1).as_dict()))
    assert stored.keys() == options_of(TrainingConfig).keys()


def test_an_option_added_to_a_configuration_is_checked_documented_and_stored():
    @dataclass(frozen=True, kw_only=True)
    class Extended(TrainingConfig):
        warmup_steps: int = option(0, help="Number of steps.", check=IntegerRange(0))

    assert Extended(warmup_steps=3).as_dict()["warmup_steps"] == 3
    assert help_text(options_of(Extended)["warmup_steps"]) == "Number of steps. Default: 0."
    with pytest.raises(InputError, match=r"warmup_steps is -1, but must be .*\. Use warmup_steps=0 or more\."):
        Extended(warmup_steps=-1)


def test_a_command_receives_only_the_options_on_the_command_line():
    received = {}

    def command(data: str = "glyphs", **config: object) -> None:
        received.update(data=data, **config)

    wrapped_command = with_config_options(command)
    names = list(inspect.signature(wrapped_command).parameters)
    assert names[:3] == ["data", "method", "method_options"]
    passed = {"data": "folder", "lr": 0.1, "schedule": "cosine", "method_options": ["steps=3"], "mixup": 0.2}
    wrapped_command(**dict.fromkeys(names) | passed)  # None for options that are not on the command line
    assert received == {
        "data": "folder",
        "lr": 0.1,
        "schedule": Cosine(),
        "method_options": {"steps": 3},
        "soft_targets": {"mixup": 0.2},
    }


def test_options_of_fit_take_precedence_over_its_configuration(tmp_path):
    config = TrainingConfig(iterations=2, lr=0.5, seed=3)
    run = fit(mlp(1, 1), method("maml"), Sinusoid(), config=config, lr=0.1, out=tmp_path, progress=False)
    assert [run.settings["training"][name] for name in ("iterations", "lr", "seed")] == [2, 0.1, 3]


def test_an_unknown_argument_of_fit_raises_an_error_with_its_name():
    with pytest.raises(TypeError, match=r"fit\(\) got an unexpected keyword argument 'tasks'"):
        fit(mlp(1, 1), method("maml"), Sinusoid(), tasks=3)


def test_a_configuration_cannot_be_changed_after_it_was_checked():
    with pytest.raises(FrozenInstanceError):
        TrainingConfig().lr = -1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ways": 1}, "ways is 1, but must be an integer of at least 2. Use ways=2 or more."),
        ({"statistics": "none"}, "statistics is 'none', but must be one of batch, running."),
        ({"augment": "yes"}, r"augment is 'yes', but must be an Augment\(\) or None."),
        ({"ema_decay": 1.0}, "ema_decay is 1.0, but must be a decay between 0 and 1, such as 0.999."),
        ({"soft_targets": 0.1}, r"soft_targets is 0.1, but must be a SoftTargets\(\) or None."),
        ({"schedule": "step"}, r"schedule is 'step', but must be a schedule such as metabridge.schedules.Cosine\(\)."),
    ],
)
def test_an_invalid_option_raises_an_error_with_its_name_its_value_and_a_valid_value(options, message):
    with pytest.raises(InputError, match=message):
        ImageTrainingConfig(**options)


def test_every_optimizer_name_has_an_optimizer():
    assert options_of(TrainingConfig)["optimizer"].metadata["check"].names == tuple(OPTIMIZERS)


def test_method_defaults_are_for_existing_methods():
    assert METHOD_DEFAULTS.keys() <= PRESETS.keys()
    assert all(config.method == name for name, config in METHOD_DEFAULTS.items())
    assert default_config("maml") == ImageTrainingConfig("maml", schedule=Cosine())


def test_former_names_are_replaced_and_current_names_are_kept():
    former = {"batch": 2, "average": None, "turns": True, "lr": 0.1}
    assert replace_former_names(former) == {"batch_size": 2, "ema_decay": None, "rotated_classes": True, "lr": 0.1}
    current = ImageTrainingConfig("mtl").as_dict()
    assert replace_former_names(current) == current


def test_training_options_can_be_extracted_from_an_image_training_config():
    config = ImageTrainingConfig("mtl", lr=0.5)
    # iterations and validate_tasks are defaults of ImageTrainingConfig
    assert training_options(config, batch_size=1) == TrainingConfig(
        lr=0.5, batch_size=1, iterations=10_000, validate_tasks=200
    )
