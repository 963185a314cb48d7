"""`Trainer` trains a network step by step, and can save and resume the training run; `Run` is the result."""

from __future__ import annotations

import logging
import math
import operator
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer, RAdam

from metabridge.device import as_device
from metabridge.environments.environment import Environment, check_environment
from metabridge.environments.image_tasks import ImageBatches
from metabridge.errors import PARSING_ERRORS, InputError, type_with_article
from metabridge.files import FolderLock
from metabridge.learners.engine import Engine, Mode
from metabridge.learners.method import Method, method_name
from metabridge.learners.parameters import NOTHING_TO_TRAIN, network_name, parameters, solver_params
from metabridge.models.batch_norm import estimate_statistics, running_batch_norms
from metabridge.models.drop_path import Drop
from metabridge.models.freezing import fix_frozen_modules, freeze_parameters, frozen_modules
from metabridge.models.network import Network, Params, frozen_names
from metabridge.training import checkpoint
from metabridge.training.checkpoint import RunFolder, check_match, copy_into, damage_error, merge_groups, select_group
from metabridge.training.config import TrainingConfig
from metabridge.training.evaluation import Model, Score, evaluate
from metabridge.training.initial_weights import InitialWeights, copy_weights
from metabridge.training.learning_curve import Point, best_score, point_from_json, point_to_json
from metabridge.training.muon import Muon
from metabridge.training.random_state import GlobalRandomState
from metabridge.training.soft_targets import LabelSoftener, soft_cross_entropy

log = logging.getLogger("metabridge")

OPTIMIZERS: dict[str, Any] = {
    "adam": Adam,
    "adamw": AdamW,
    "radam": RAdam,
    "sgd": partial(SGD, momentum=0.9, nesterov=True),
    "muon": Muon,
}
SAVE_SECONDS = 60.0  # largest number of seconds between saves
DROP_RATE_STEPS = 50  # steps between updates of the drop rates


@dataclass(frozen=True, repr=False)
class Run(Model):
    """A trained model with its learning curve and settings.

    Args:
        method: The method that it was trained with.
        net: The network, with the best weights.
        params: All trained parameters: the network's and the method's, such as learned step sizes.
        dtype: Data type in which features are computed. None for the dtype of the parameters.
        curve: Points of the learning curve.
        seconds: Training time, without validation.
        settings: Model, method, tasks and training options, as stored in settings.json. Empty if nothing was saved.
        finished: Whether training reached its end. If not, call `fit` again with the same `out` to continue.

    >>> import metabridge as mb
    >>> sinusoids = mb.environments.Sinusoid()
    >>> mb.fit(mb.models.mlp(1, 1), mb.method("maml"), sinusoids, iterations=3, progress=False)
    Run(maml, mlp, 3 iterations, finished)
    """

    curve: tuple[Point, ...] = ()
    seconds: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    finished: bool = True

    @property
    def best(self) -> Score | None:
        """Best validation score, which the weights in `params` had. None without validation."""
        return best_score(self.curve)

    @property
    def _iterations(self) -> int:
        """Number of training steps until the last point of the learning curve."""
        return self.curve[-1].iteration if self.curve else 0

    @property
    def _status(self) -> str:
        return "finished" if self.finished else "unfinished"

    def __repr__(self) -> str:
        score = "" if self.best is None else f", best validation {self.best}"
        names = f"{method_name(self.method)}, {self.model_name}"
        return f"Run({names}, {self._iterations} iterations{score}, {self._status})"

    def _repr_html_(self) -> str:
        """Return a table of the run for notebooks."""
        best = "none" if self.best is None else str(self.best)
        values = {
            "method": repr(self.method),
            "model": self.model_name,
            "steps": f"{self._iterations:,} ({self._status})",
            "best validation score": best,
            "training time": f"{self.seconds:.3g} s",
        }
        rows = "".join(f"<tr><th>{name}</th><td>{escape(value)}</td></tr>" for name, value in values.items())
        return f"<table><caption>Run</caption>{rows}</table>"


class Trainer:
    """Train a network step by step. `fit` runs a `Trainer` from start to end.

    With `out`, the run is saved in that folder at each validation and at least every minute. A new `Trainer` with the
    same settings continues the saved run. The folder is locked until `close`, so no other process can write to it.

    Args:
        net: Network to train, in place.
        method: Method to train it with.
        environment: Source of the training tasks.
        config: Training options.
        validate: Source of the validation tasks, if any.
        device: Device to compute on.
        mode: How the engine computes meta-gradients; see `metabridge.Engine`.
        out: Folder of the run. None to save nothing.
        teacher: Trained model whose predictions are part of the targets; see `SoftTargets.distillation`.
        init: Trained model whose weights are the initial weights; see `initial_weights.copy_weights`.
        check_init: Whether a run in `out` must have started from the weights of `init`. If false, it is continued
            anyway.

    Raises:
        InputError: If the method does not fit the network or the tasks, or `out` contains a run with other settings.

    >>> from metabridge.environments import Sinusoid
    >>> from metabridge.learners import method
    >>> from metabridge.models import mlp
    >>> trainer = Trainer(mlp(1, 1), method("maml"), Sinusoid(), TrainingConfig(iterations=2))
    >>> trainer.step(), trainer.step(), trainer.finished
    (True, True, True)
    """

    def __init__(
        self,
        net: Network,
        method: Method,
        environment: Environment,
        config: TrainingConfig,
        *,
        validate: Environment | None = None,
        device: torch.device | str = "cpu",
        mode: Mode = "auto",
        out: str | Path | None = None,
        teacher: Model | None = None,
        init: Model | None = None,
        check_init: bool = True,
    ) -> None:
        if not isinstance(net, Network):
            raise InputError(
                f"net is {type_with_article(net)}, but must be a Network. Use a function of metabridge.models, or "
                "Network.around(features, example, outputs) for other modules."
            )
        if not isinstance(method, Method):
            raise InputError(f"method is {method!r}, but must be a Method. Use metabridge.method({method!r}).")
        check_environment("environment", environment)
        if validate is not None:
            check_environment("validate", validate)
        self.device = as_device(device)
        self._folder = None if out is None else RunFolder(Path(out))
        self.method, self.environment, self.validate, self.config = method, environment, validate, config
        self.dtype = torch.bfloat16 if config.precision == "bfloat16" else None
        # In low precision, convolutions are faster in channels-last layout; converting in every step would cost time.
        if self.dtype is not None:
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        freeze_parameters(net, config.freeze or ())
        self.net = net.to(self.device).train()
        self.params = parameters(method, net, classes=getattr(environment, "classes", None), seed=config.seed)
        self.initial_weights: InitialWeights | None = None
        if init is not None:
            class_names = getattr(environment, "class_names", ())
            self.initial_weights = copy_weights(init, method, net, self.params, class_names)
        self.optimizer = self._make_optimizer()
        fix_frozen_modules(net, self._batches())
        self._drop_layers = [layer for layer in net.modules() if isinstance(layer, Drop)]
        soft_targets = config.soft_targets
        self._softener = None if soft_targets is None else LabelSoftener(soft_targets, method, teacher)
        engine_method = method if soft_targets is None else replace(method, loss=soft_cross_entropy)
        self._engine = Engine(engine_method, net, mode=mode, dtype=self.dtype)
        self._ema_params = None if config.ema_decay is None else _copy(self.params)
        self.generators = {
            "tasks": torch.Generator().manual_seed(config.seed),
            "augment": torch.Generator(self.device).manual_seed(config.seed),
        }
        self._global_random = GlobalRandomState(self.device, config.seed)
        if self.device.type == "cuda":
            torch.backends.cudnn.benchmark = True  # shapes do not change, so finding the fastest algorithms pays off
        self.best_weights: tuple[Params, Params] | None = None  # parameters and buffers
        self.curve: list[Point] = []
        self.loss_sum = torch.zeros((), device=self.device)  # over the steps since the last point of the curve
        self.iteration, self.seconds = 0, 0.0
        self._in_step = False
        self._best_weights_unsaved = False
        self._last_saved = time.perf_counter()
        self._stored_init = None if self.initial_weights is None else self.initial_weights.to_json()
        self._settings = {} if self._folder is None else self._describe()
        self._lock = None if self._folder is None else FolderLock(self._folder.path)
        if self._folder is not None:
            try:
                self._restore_or_create_run(self._folder, check_init)
            except BaseException:
                self.close()
                raise

    def _make_optimizer(self) -> Optimizer:
        """Return the optimizer of all parameters that require gradients."""
        # Parameters of the solver, such as learned step sizes, have no weight decay, which would shrink them.
        solver_names = solver_params(self.params).keys()
        trained_params = {name: value for name, value in self.params.items() if value.requires_grad}
        if not self.method.trains:
            raise InputError(NOTHING_TO_TRAIN)
        if not trained_params:
            raise InputError(
                "there is nothing to train: every parameter that this method trains has requires_grad=False. Unfreeze "
                "some of them."
            )
        groups: list[dict[str, Any]] = [
            {"params": [value for name, value in trained_params.items() if name not in solver_names]},
            {"params": [value for name, value in trained_params.items() if name in solver_names], "weight_decay": 0.0},
        ]
        optimizer: Optimizer = OPTIMIZERS[self.config.optimizer](
            [group for group in groups if group["params"]], lr=self.config.lr, weight_decay=self.config.weight_decay
        )
        return optimizer

    def _restore_or_create_run(self, folder: RunFolder, check_init: bool) -> None:
        """Restore the run in the folder, whose iterations and patience may differ from `config`, or create a run."""
        stored = folder.resumable_settings()
        if stored is not None:
            if check_init:
                folder.check_same_init(stored, self._settings)
            else:
                self._stored_init = stored.get("init")
                self._settings = self._describe()
            if self.config.validate_every is None:
                # a continued run keeps its validation interval, even if `iterations` has changed
                self.config = replace(self.config, validate_every=stored["training"].get("validate_every"))
                self._settings = self._describe()
            folder.check_same_settings(stored, self._settings)
        settings_differ = stored is not None and stored != checkpoint.json_round_trip(self._settings)
        self._restore(folder)
        if settings_differ:
            self._add_last_point()
            self.save()  # `finished` may have changed
        if settings_differ or stored is None:
            folder.write_settings(self._settings)

    def __repr__(self) -> str:
        names = f"{method_name(self.method)}, {network_name(self.net)}"
        return f"Trainer({names}, {self.iteration} of {self.config.iterations} iterations)"

    @property
    def folder(self) -> Path | None:
        """Folder in which the run is saved. None if it is not saved."""
        return None if self._folder is None else self._folder.path

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the run as in settings.json; only the training options if it is not saved."""
        return self._settings or {"training": self.config.as_dict()}

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or training stopped early."""
        return self.iteration >= self.config.iterations or self._out_of_patience()

    @property
    def stopped_early(self) -> bool:
        """Whether training stopped before the last iteration because validation no longer improved."""
        return self.iteration < self.config.iterations and self._out_of_patience()

    @property
    def validations_since_best(self) -> int:
        """Number of validations after the one with the best score."""
        return next((count for count, point in enumerate(reversed(self.curve)) if point.best), 0)

    def _out_of_patience(self) -> bool:
        """Return whether more than `patience` consecutive validations brought no new best score."""
        return self.config.patience is not None and self.validations_since_best > self.config.patience

    @property
    def draws_global_random_numbers(self) -> bool:
        """Whether the network draws from the global random generators in training, as dropout does."""
        episodes = self.environment.sample(self.config.batch_size, torch.Generator().manual_seed(self.config.seed))
        return self._engine.behavior(self.params, episodes.to(self.device)).is_random

    def step(self) -> bool:
        """Take one training step, and save the run if a save is due.

        Returns:
            Whether the step added a point to the learning curve.

        Raises:
            InputError: If the loss is not finite (on a GPU, this is checked only before validations), or the folder
                cannot be written.
        """
        self._in_step = True
        with self._global_random.active():
            point_added = self._step()
        self._in_step = False
        if point_added or time.perf_counter() > self._last_saved + SAVE_SECONDS:
            self.save()
        return point_added

    def _step(self) -> bool:
        """Take one training step without saving the run, and return whether it added a point to the curve."""
        config, start_time = self.config, time.perf_counter()
        self._set_rates()
        episodes = self.environment.sample(config.batch_size, self.generators["tasks"]).to(self.device)
        progress = self.iteration / config.iterations
        if config.augment is not None:
            # the teacher needs images of full size, so images are resized after the computation of the soft targets
            size_progress = progress if self._softener is None else 1.0
            episodes = config.augment.episodes(episodes, self.generators["augment"], size_progress)
        if self._softener is not None:
            episodes = self._softener(episodes, self.generators["augment"])
            if config.augment is not None:
                episodes = config.augment.shrunk(episodes, progress)
        meta_gradient = self._engine(self.params, episodes)
        meta_gradient.assign(self.params)
        self.optimizer.step()
        if self._ema_params is not None and config.ema_decay is not None:
            # the decay is smaller at first, so that the initial weights lose their influence quickly
            decay = min(config.ema_decay, (1 + self.iteration) / (10 + self.iteration))
            current_params = [self.params[name].detach() for name in self._ema_params]
            torch._foreach_lerp_(list(self._ema_params.values()), current_params, 1 - decay)
        self.loss_sum += meta_gradient.loss
        self.iteration += 1
        validation_due = self.iteration % config.validation_interval == 0 or self.iteration == config.iterations
        if validation_due or self.device.type == "cpu":  # on a GPU, reading the loss waits for the step
            self._check_finite(float(meta_gradient.loss))
        self.seconds += time.perf_counter() - start_time
        if validation_due:
            self._add_point()
        return validation_due

    def _set_rates(self) -> None:
        """Set the learning rate and, every `DROP_RATE_STEPS` steps, the drop rates."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(self.iteration)
        if self.iteration % DROP_RATE_STEPS == 0:
            self._set_drop_rates()

    def learning_rate(self, iteration: int) -> float:
        """Return the learning rate of a step, which may be one that was already taken.

        Args:
            iteration: Number of steps before it.

        Returns:
            The learning rate.
        """
        validations = [point for point in self.curve if point.score is not None and point.iteration <= iteration]
        best_flags = [point.best for point in validations]
        return self.config.lr * self.config.schedule.factor(iteration / self.config.iterations, best_flags)

    def _set_drop_rates(self) -> None:
        """Set the drop rates, which rise linearly from 0 to their full values (Wang et al. 2021, section 5.2)."""
        progress = self.iteration // DROP_RATE_STEPS * DROP_RATE_STEPS / self.config.iterations
        for layer in self._drop_layers:
            layer.rate.fill_(layer.full_rate * progress)

    def _check_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise InputError(
                f"The loss became {loss} at iteration {self.iteration}. Lower lr (now {self.config.lr}) or the inner "
                f"learning rate (now {self.method.inner or self.method.test_solver}), or check that all inputs are "
                "finite."
            )

    def _add_last_point(self) -> None:
        """Add the last point to the curve of a run whose `iterations` was reduced to the number of steps taken."""
        last_iteration = self.curve[-1].iteration if self.curve else 0
        if last_iteration < self.iteration == self.config.iterations:
            with self._global_random.active():
                self._add_point()

    def _add_point(self) -> None:
        """Validate, add a point to the learning curve, and store the weights if they are the best so far.

        Without validation, the last weights are stored.
        """
        last_iteration = self.curve[-1].iteration if self.curve else 0
        loss = float(self.loss_sum) / (self.iteration - last_iteration)
        self.loss_sum.zero_()
        self._update_network()
        score = None
        if self.validate is not None:
            model = Model(self.method, self.net, self._ema_params or self.params, self.dtype)
            score = evaluate(model, self.validate, tasks=self.config.validate_tasks, seed=self.config.seed)
            if not math.isfinite(score.mean):
                log.warning(
                    "the validation score at iteration %d is %s: adaptation diverged.", self.iteration, score.mean
                )
        best = best_score(self.curve)
        improved = score is not None and (best is None or score.beats(best))
        if improved or score is None:
            self.best_weights = self._current_weights()
            self._best_weights_unsaved = True
        self.curve.append(Point(self.iteration, self.seconds, loss, score, improved))

    def _update_network(self) -> None:
        """Copy the weights (with `ema_decay`, their average) into the network, and estimate its running statistics."""
        copy_into(self.net, self._ema_params or self.params, dict(self.net.named_buffers()))
        if running_batch_norms(self.net):
            estimate_statistics(self.net.features, self._batches(), fixed=frozen_modules(self.net))

    def _batches(self) -> Iterator[torch.Tensor]:
        """Yield batches of training inputs to estimate running statistics from."""
        generator = torch.Generator().manual_seed(0)
        # the more batches, the more precise the estimate; on a CPU, many batches would take too long
        for _ in range(8 if self.device.type == "cpu" else 40):
            batch = self.environment.sample(self.config.batch_size, generator).without_split()
            yield batch.support_x.to(self.device).flatten(0, 1)

    def _current_weights(self) -> tuple[Params, Params]:
        """Return copies of the parameters (with `ema_decay`, of their moving average) and of the buffers."""
        return _copy(self._ema_params or self.params), _copy(dict(self.net.named_buffers()))

    def speed(self) -> str:
        """Return the speed of training in tasks or images per second."""
        tasks = self.iteration * self.config.batch_size / max(self.seconds, 1e-9)
        if isinstance(self.environment, ImageBatches):
            return f"{tasks * self.environment.size:.3g} images/s"
        return f"{tasks:.3g} tasks/s"

    def run(self) -> Run:
        """Copy the best weights so far into the network and return the run.

        Returns:
            The run, with the current weights if the learning curve has no point yet.
        """
        params, buffers = self.best_weights or self._current_weights()
        copy_into(self.net, params, buffers)
        net, curve = self.net.eval(), tuple(self.curve)
        return Run(self.method, net, params, self.dtype, curve, self.seconds, self._settings, self.finished)

    def save(self) -> None:
        """Write the run to its folder. Do nothing if there is no folder, or if a step was interrupted.

        Raises:
            InputError: If `close` was called before, or the folder cannot be written.
        """
        if self._folder is not None and not self._in_step:
            if self._lock is None:
                raise InputError(
                    f"the trainer of {self._folder.path} was closed. Create a new Trainer with the same settings "
                    "to continue it."
                )
            self._lock.check()
            self._write(self._folder)
        self._last_saved = time.perf_counter()

    def close(self) -> None:
        """Unlock the folder, so that another process can write to it."""
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    def _describe(self) -> dict[str, Any]:
        """Return the settings of the run in a form that JSON can store."""
        frozen = sorted(frozen_names(self.net))
        teacher = None if self._softener is None else self._softener.teacher
        options = self.config.as_dict() | {"validate_every": self.config.validation_interval}
        return {
            **self._describe_model_and_method(),
            "tasks": checkpoint.describe_environment(self.environment),
            "validation": None if self.validate is None else checkpoint.describe_environment(self.validate),
            "training": options,
            **({"frozen": frozen} if frozen else {}),
            **({} if self._stored_init is None else {"init": self._stored_init}),
            **({} if teacher is None else {"teacher": checkpoint.describe_value(teacher.params["heads.weight"])}),
        }

    def _describe_model_and_method(self) -> dict[str, Any]:
        return {"model": self.net.recipe, "method": checkpoint.write_method(self.method)}

    def _write(self, folder: RunFolder) -> None:
        """Write the best weights and the training state."""
        curve = [point_to_json(point) for point in self.curve]
        metadata = {
            "iteration": self.iteration,
            "seconds": self.seconds,
            "finished": self.finished,
            "curve": curve,
            "settings": checkpoint.fingerprint(self._describe_model_and_method()),
        }
        if self.best_weights is not None and self._best_weights_unsaved:
            params, buffers = self.best_weights
            folder.write("weights", merge_groups(params=params, buffers=buffers), metadata)
        optimizer_state = {
            f"{position}.{key}": torch.as_tensor(value)
            for position, state in self.optimizer.state_dict()["state"].items()
            for key, value in state.items()
            if value is not None
        }
        # these names are stored; "average" is the moving average of the parameters
        tensors = merge_groups(
            params=self.params,
            average=self._ema_params or {},
            buffers=_copy(dict(self.net.named_buffers())),
            moments=optimizer_state,
            random=self._random_states(),
            loss={"total": self.loss_sum},
        )
        folder.write("state", tensors, metadata)
        self._best_weights_unsaved = False
        folder.write_metrics(curve)

    def _random_states(self) -> Params:
        return {name: generator.get_state() for name, generator in self.generators.items()} | self._global_random.states

    def _restore(self, folder: RunFolder) -> None:
        """Restore the saved run, if there is one."""
        state, weights = folder.read("state"), folder.read("weights")
        if state is None:
            return
        try:
            self._restore_state(folder, *state)
        except InputError:
            raise
        except PARSING_ERRORS as error:
            raise damage_error(folder.path / "state.safetensors", f"its state cannot be read ({error!r})") from error
        if weights is None and self.curve:
            raise InputError(
                f"the run in {folder.path} has lost its best weights: weights.safetensors is missing. "
                "Restore the file from a copy, or use another folder."
            )
        if weights is not None:
            params, buffers = select_group(weights[0], "params"), select_group(weights[0], "buffers")
            check_match(self.params, params, folder.path)
            check_match(dict(self.net.named_buffers()), buffers, folder.path)
            self.best_weights = (
                {key: value.to(self.device) for key, value in params.items()},
                {key: value.to(self.device) for key, value in buffers.items()},
            )

    def _restore_state(self, folder: RunFolder, tensors: Params, metadata: dict[str, Any]) -> None:
        states = select_group(tensors, "random")
        if states.keys() != self._random_states().keys():
            device_type = "a GPU" if "cuda" in states else "the CPU"
            raise InputError(
                f"the run in {folder.path} was started on {device_type}. Continue it there, or use another folder."
            )
        self.iteration, self.seconds = operator.index(metadata["iteration"]), float(metadata["seconds"])
        if self.iteration > self.config.iterations:
            raise InputError(
                f"the run in {folder.path} has done {self.iteration} iterations, but iterations is "
                f"{self.config.iterations}. Use iterations={self.iteration} or more, or use another folder."
            )
        current, stored = dict(self.params), select_group(tensors, "params")
        if buffers := select_group(tensors, "buffers"):  # early files of version 0.1.0 have none
            current, stored = current | dict(self.net.named_buffers()), stored | buffers
        check_match(current, stored, folder.path)
        ema_params, stored_ema_params = self._ema_params or {}, select_group(tensors, "average")
        check_match(ema_params, stored_ema_params, folder.path)
        with torch.no_grad():
            for name, value in current.items():
                value.copy_(stored[name])
            for name, value in ema_params.items():
                value.copy_(stored_ema_params[name])
        self._restore_optimizer(select_group(tensors, "moments"))
        for name, generator in self.generators.items():
            generator.set_state(states[name])
        self._global_random.states = {name: states[name] for name in self._global_random.states}
        with self._global_random.active():
            pass  # entering raises an error if a state is invalid
        self.loss_sum = tensors["loss.total"].to(self.device).reshape(())
        self.curve = [point_from_json(point) for point in metadata["curve"]]
        self._set_drop_rates()

    def _restore_optimizer(self, stored: Params) -> None:
        """Restore the state of the optimizer from tensors with names such as "0.momentum_buffer".

        The number is the position of the parameter in the optimizer, and the key is one of the optimizer's state.
        """
        optimizer_state: dict[int, dict[str, torch.Tensor]] = {}
        for name, value in stored.items():
            position_text, _, key = name.partition(".")
            optimizer_state.setdefault(int(position_text), {})[key] = value
        trained_params = [value for group in self.optimizer.param_groups for value in group["params"]]
        first_keys = next(iter(optimizer_state.values()), {}).keys()
        for position, values in optimizer_state.items():
            if values.keys() != first_keys:
                raise ValueError(
                    f"the optimizer's state of parameter {position} has other keys than that of the first parameter"
                )
            if any(value.ndim and value.shape != trained_params[position].shape for value in values.values()):
                raise ValueError(f"the optimizer's state of parameter {position} has another shape")
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": optimizer_state, "param_groups": groups})


def _copy(tensors: Params) -> Params:
    return {name: value.detach().clone() for name, value in tensors.items()}
