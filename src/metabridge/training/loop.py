"""A training under way: everything that changes from step to step, to be saved and restored as one."""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from threading import RLock
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer, RAdam

from metabridge.environments.environment import Environment
from metabridge.environments.image_tasks import ImageBatches
from metabridge.errors import PARSING_ERRORS, InputError, check_count, check_not_negative, check_positive
from metabridge.learners.engine import Engine, Mode
from metabridge.learners.method import Method
from metabridge.learners.parameters import parameters, solver_params
from metabridge.models.batch_norm import estimate_statistics, running_batch_norms
from metabridge.models.drop_path import Drop
from metabridge.models.network import Network, Params, frozen_names
from metabridge.training import checkpoint
from metabridge.training.augment import Augment
from metabridge.training.checkpoint import RunFolder, check_match, damaged, fill, merge, part, plain_number
from metabridge.training.evaluate import Model, Score, evaluate
from metabridge.training.muon import Muon
from metabridge.training.schedules import Constant, Schedule
from metabridge.training.soft_targets import Softener, SoftTargets, soft_cross_entropy

log = logging.getLogger("metabridge")

OPTIMIZERS: dict[str, Any] = {
    "adam": Adam,
    "adamw": AdamW,
    "radam": RAdam,
    "sgd": partial(SGD, momentum=0.9, nesterov=True),
    "muon": Muon,
}
Precision = Literal["float32", "bfloat16"]
METRICS: tuple[Literal["accuracy", "squared error"], ...] = ("accuracy", "squared error")
PACE = 50  # iterations between changes of the rates at which layers drop


@dataclass(frozen=True)
class Point:
    """One point of a learning curve. `loss` is the mean outer loss since the point before."""

    iteration: int
    seconds: float  # of training, without validation
    loss: float
    score: Score | None
    best: bool = False  # whether it was the best score until then

    def told(self) -> str:
        """Say it in a few words."""
        judged = "" if self.score is None else f", validation {self.score.told()}"
        return f"loss {self.loss:.3g}{judged}"


def best_score(curve: Sequence[Point]) -> Score | None:
    """Return the score of the parameters that were kept, if there was validation."""
    return next((point.score for point in reversed(curve) if point.best), None)


@dataclass(frozen=True)
class Settings:
    """How to train, as plain data."""

    iterations: int = 1000
    tasks: int = 4
    optimizer: str = "adam"
    lr: float = 1e-3
    weight_decay: float = 0.0
    schedule: Schedule = Constant()  # noqa: RUF009  (frozen data)
    augment: Augment | None = None
    patience: int | None = None
    validate_every: int | None = None  # a tenth of the iterations unless given
    validate_tasks: int = 100
    precision: Precision = "float32"
    soft_targets: SoftTargets | None = None
    average: float | None = None  # decay of the moving average of the parameters that is validated and kept
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, plain_number(getattr(self, field.name)))
        check_count("iterations", self.iterations)
        check_count("tasks", self.tasks)
        check_positive("lr", self.lr)
        check_not_negative("weight_decay", self.weight_decay)
        if not isinstance(self.schedule, Schedule):
            raise InputError(f"schedule is {self.schedule!r}, but must be one such as metabridge.training.Cosine().")
        if not isinstance(self.augment, Augment | None):
            raise InputError(f"augment is {self.augment!r}, but must be an Augment() or None.")
        if not isinstance(self.interval, int) or self.interval < 1:
            raise InputError(f"validate_every is {self.validate_every!r}, but must be at least 1 iteration.")
        if not isinstance(self.validate_tasks, int) or self.validate_tasks < 2:
            raise InputError(f"validate_tasks is {self.validate_tasks!r}, but an interval needs at least 2.")
        if self.patience is not None and not (isinstance(self.patience, int) and self.patience >= 0):
            raise InputError(f"patience is {self.patience!r}, but must be 0 validations or more.")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not -(2**63) <= self.seed < 2**63:
            raise InputError(f"seed is {self.seed!r}, but must be a whole number of 64 bits. Use seed=0.")
        if self.optimizer not in OPTIMIZERS:
            raise InputError(f"optimizer is {self.optimizer!r}, but must be one of {', '.join(OPTIMIZERS)}.")
        if self.average is not None and not 0 < self.average < 1:
            raise InputError(f"average is {self.average}, but must be a decay between 0 and 1, such as 0.999.")
        if self.precision not in ("float32", "bfloat16"):
            raise InputError(f"precision is {self.precision!r}, but must be 'float32' or 'bfloat16'.")

    @property
    def dtype(self) -> torch.dtype | None:
        """What features are computed in, where that is not the parameters' own."""
        return torch.bfloat16 if self.precision == "bfloat16" else None

    @property
    def interval(self) -> int:
        """How many iterations lie between two points of the learning curve."""
        return max(1, self.iterations // 10) if self.validate_every is None else self.validate_every

    def plain(self) -> dict[str, object]:
        """Return the settings as JSON can hold them."""
        schedule = {"name": type(self.schedule).__name__.lower()} | asdict(self.schedule)
        return asdict(self) | {"schedule": schedule, "validate_every": self.interval}


class GlobalRandom:
    """The states that the global generators have for one training; outside of `active` they are the caller's.

    Trainings in several threads are active one after the other, since all of them draw from the same generators.
    """

    _LOCK = RLock()

    def __init__(self, device: torch.device, seed: int) -> None:
        self._generators = {"torch": torch.default_generator}  # dropped features draw from it
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators["cuda"] = torch.cuda.default_generators[index]
        self.states = {
            name: torch.Generator(generator.device).manual_seed(seed).get_state()
            for name, generator in self._generators.items()
        }

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Let what is inside draw from the states of the training, and give the caller's back."""
        with self._LOCK:
            callers = self._swap(self.states)
            try:
                yield
            finally:
                self.states = self._swap(callers)

    def _swap(self, states: dict[str, Tensor]) -> dict[str, Tensor]:
        before = {name: generator.get_state() for name, generator in self._generators.items()}
        for name, generator in self._generators.items():
            generator.set_state(states[name])
        return before


class Loop:
    """The parameters, the optimizer, the random generators, the best so far and the learning curve."""

    def __init__(
        self,
        net: Network,
        method: Method,
        environment: Environment,
        validate: Environment | None,
        settings: Settings,
        device: torch.device,
        mode: Mode,
        teacher: Model | None = None,
    ) -> None:
        self.method, self.environment, self.validate, self.settings = method, environment, validate, settings
        # in low precision convolutions are faster with the channels last, and copies between layouts cost time
        if settings.dtype is not None:
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.device, self.net = device, net.to(device).train()
        classes = getattr(environment, "classes", None)
        self.params = parameters(method, net, classes=classes, seed=settings.seed)
        solver = solver_params(
            self.params
        )  # decay would pull learned rates to zero; they come last, so the order is the same
        trained = {name: value for name, value in self.params.items() if value.requires_grad}
        if not trained:
            raise InputError(
                "there is nothing to train: all that this method trains has requires_grad=False. Unfreeze some of it."
            )
        groups: list[dict[str, Any]] = [
            {"params": [value for name, value in trained.items() if name not in solver]},
            {"params": [value for name, value in trained.items() if name in solver], "weight_decay": 0.0},
        ]
        make = OPTIMIZERS[settings.optimizer]
        self.optimizer: Optimizer = make(
            [group for group in groups if group["params"]], lr=settings.lr, weight_decay=settings.weight_decay
        )
        self.drops = [block for block in net.modules() if isinstance(block, Drop)]
        soft = settings.soft_targets
        self.soften = None if soft is None else Softener(soft, method, teacher)
        trains = method if soft is None else replace(method, loss=soft_cross_entropy)
        self.engine = Engine(trains, net, mode=mode, dtype=settings.dtype)
        self.averaged = None if settings.average is None else _copy(self.params)
        self.generators = {
            "tasks": torch.Generator().manual_seed(settings.seed),
            "augment": torch.Generator(device).manual_seed(settings.seed),
        }
        self.random = GlobalRandom(device, settings.seed)
        if device.type == "cuda":
            torch.backends.cudnn.benchmark = True  # shapes do not change: the fastest convolution is worth a search
        self.kept: tuple[Params, Params] | None = None
        self.curve: list[Point] = []
        self.total = torch.zeros((), device=device)
        self.iteration, self.seconds = 0, 0.0
        self.intact = True  # between steps; not while one is under way
        self.unsaved = False  # whether what is kept is newer than on disk

    @property
    def draws(self) -> bool:
        """Whether the network draws random numbers in training, from the one generator that a process has."""
        episodes = self.environment.sample(self.settings.tasks, torch.Generator().manual_seed(self.settings.seed))
        return self.engine.behaviour(self.params, episodes.to(self.device)).random

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        return self.iteration >= self.settings.iterations or self._tired()

    def _tired(self) -> bool:
        """Whether the last validations, more than `patience` of them, have brought no new best."""
        patience = self.settings.patience
        if patience is None or not any(point.best for point in self.curve):
            return False
        waited = next(wait for wait, point in enumerate(reversed(self.curve)) if point.best)
        return waited > patience

    def step(self) -> bool:
        """Take one step, and return whether it brought a point of the learning curve."""
        self.intact = False
        with self.random.active():
            due = self._step()
        self.intact = True
        return due

    def _step(self) -> bool:
        settings, started = self.settings, time.perf_counter()
        self._set_pace()
        episodes = self.environment.sample(settings.tasks, self.generators["tasks"]).to(self.device)
        done = self.iteration / settings.iterations
        if settings.augment is not None:
            # a teacher sees the full size
            shown = done if self.soften is None else 1.0
            episodes = settings.augment.episodes(episodes, self.generators["augment"], shown)
        if self.soften is not None:
            episodes = self.soften(episodes, self.generators["augment"])
            if settings.augment is not None:
                episodes = settings.augment.shrunk(episodes, done)
        result = self.engine(self.params, episodes)
        result.assign(self.params)
        self.optimizer.step()
        if self.averaged is not None and settings.average is not None:
            # the first steps, far from where training ends, are soon forgotten
            decay = min(settings.average, (1 + self.iteration) / (10 + self.iteration))
            values = [self.params[name].detach() for name in self.averaged]
            torch._foreach_lerp_(list(self.averaged.values()), values, 1 - decay)
        self.total += result.loss
        self.iteration += 1
        due = self.iteration % settings.interval == 0 or self.iteration == settings.iterations
        if due or self.device.type == "cpu":  # reading the loss makes a GPU wait
            self._check_finite(float(result.loss))
        self.seconds += time.perf_counter() - started
        if due:
            self._judge()
        return due

    def end_curve(self) -> None:
        """Add the last point to the curve of a run that was shortened to the iterations it has done."""
        last = self.curve[-1].iteration if self.curve else 0
        if last < self.iteration == self.settings.iterations:
            with self.random.active():
                self._judge()

    def _set_pace(self) -> None:
        done = self.iteration / self.settings.iterations
        factor = self.settings.schedule.factor(done, [point.best for point in self.curve if point.score is not None])
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr * factor
        if self.iteration % PACE == 0:
            self._set_drop_rate()

    def _set_drop_rate(self) -> None:
        done = self.iteration // PACE * PACE / self.settings.iterations
        for block in self.drops:
            block.rate.fill_(block.full_rate * done)  # reached linearly (A §5.2)

    def _judge(self) -> None:
        """Add a point to the curve, and keep the parameters if they are the best."""
        before = self.curve[-1].iteration if self.curve else 0
        loss = float(self.total) / (self.iteration - before)
        self.total.zero_()
        self._settle()
        score = None
        if self.validate is not None:
            model = Model(self.method, self.net, self.averaged or self.params, self.settings.dtype)
            score = evaluate(model, self.validate, tasks=self.settings.validate_tasks, seed=self.settings.seed)
            if not math.isfinite(score.mean):
                log.warning("the validation at iteration %d is %s: adaptation diverged.", self.iteration, score.mean)
        best = best_score(self.curve)
        better = score is not None and (best is None or score.beats(best))
        if better or score is None:
            self.kept = _copy(self.averaged or self.params), _copy(dict(self.net.named_buffers()))
            self.unsaved = True
        self.curve.append(Point(self.iteration, self.seconds, loss, score, better))

    def _settle(self) -> None:
        """Write the weights into the network, and measure its running statistics with them where it has any."""
        fill(self.net, self.averaged or self.params, dict(self.net.named_buffers()))
        if running_batch_norms(self.net):
            generator = torch.Generator().manual_seed(0)
            count = 8 if self.device.type == "cpu" else 40
            sets = (self.environment.sample(self.settings.tasks, generator).without_split() for _ in range(count))
            estimate_statistics(self.net.features, (each.support_x.to(self.device).flatten(0, 1) for each in sets))

    def speed(self) -> str:
        """Say how fast training is."""
        tasks = self.iteration * self.settings.tasks / max(self.seconds, 1e-9)
        if isinstance(self.environment, ImageBatches):
            return f"{tasks * self.environment.size:.3g} images/s"
        return f"{tasks:.3g} tasks/s"

    def _check_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise InputError(
                f"The loss became {loss} at iteration {self.iteration}. Lower lr (now {self.settings.lr}) or the inner "
                f"rate (now {self.method.inner or self.method.test}), or look for values in the inputs that are not "
                "finite."
            )

    def best(self) -> tuple[Params, Params]:
        """Return the parameters and buffers to keep: the best, or the last without validation."""
        return self.kept or (_copy(self.averaged or self.params), _copy(dict(self.net.named_buffers())))

    def described(self) -> dict[str, Any]:
        """Return the settings of the run, as JSON can hold them."""
        fixed = sorted(frozen_names(self.net))
        teacher = None if self.soften is None else self.soften.teacher
        taught = {} if teacher is None else {"teacher": checkpoint.describe_value(teacher.params["heads.weight"])}
        return {
            **self._model_and_method(),
            "tasks": checkpoint.describe_environment(self.environment),
            "validation": None if self.validate is None else checkpoint.describe_environment(self.validate),
            "training": self.settings.plain(),
            **({"frozen": fixed} if fixed else {}),
            **taught,
        }

    def _model_and_method(self) -> dict[str, Any]:
        return {"model": self.net.recipe, "method": checkpoint.write_method(self.method)}

    def save(self, folder: RunFolder) -> None:
        """Write the best and the latest into the folder."""
        curve = [line_of(point) for point in self.curve]
        notes = {
            "iteration": self.iteration,
            "seconds": self.seconds,
            "finished": self.finished,
            "curve": curve,
            "settings": checkpoint.fingerprint(self._model_and_method()),
        }
        if self.kept is not None and self.unsaved:
            folder.write("weights", merge(params=self.kept[0], buffers=self.kept[1]), notes)
        moments = {
            f"{index}.{key}": torch.as_tensor(value)
            for index, state in self.optimizer.state_dict()["state"].items()
            for key, value in state.items()
            if value is not None
        }
        tensors = merge(
            params=self.params,
            average=self.averaged or {},
            buffers=_copy(dict(self.net.named_buffers())),
            moments=moments,
            random=self._states(),
            loss={"total": self.total},
        )
        folder.write("state", tensors, notes)
        self.unsaved = False
        folder.write_metrics(curve)

    def _states(self) -> Params:
        return {name: generator.get_state() for name, generator in self.generators.items()} | self.random.states

    def restore(self, folder: RunFolder) -> None:
        """Go on from what `save` left, if it left anything."""
        state, weights = folder.read("state"), folder.read("weights")
        if state is None:
            return
        try:
            self._restore(folder, *state)
        except InputError:
            raise
        except PARSING_ERRORS as error:
            raise damaged(folder.path / "state.safetensors", f"its state cannot be read ({error!r})") from error
        if weights is None and self.curve:
            raise InputError(
                f"the run in {folder.path} has lost its best weights: weights.safetensors is missing. "
                "Restore it from a copy, or name another folder."
            )
        if weights is not None:
            params, buffers = part(weights[0], "params"), part(weights[0], "buffers")
            check_match(self.params, params, folder.path)
            check_match(dict(self.net.named_buffers()), buffers, folder.path)
            self.kept = (
                {key: value.to(self.device) for key, value in params.items()},
                {key: value.to(self.device) for key, value in buffers.items()},
            )

    def _restore(self, folder: RunFolder, tensors: Params, notes: dict[str, Any]) -> None:
        states = part(tensors, "random")
        if states.keys() != self._states().keys():
            kind = "a GPU" if "cuda" in states else "the CPU"
            raise InputError(f"the run in {folder.path} was begun on {kind}. Go on there, or name another folder.")
        self.iteration, self.seconds = operator.index(notes["iteration"]), float(notes["seconds"])
        if self.iteration > self.settings.iterations:
            raise InputError(
                f"the run in {folder.path} has done {self.iteration} iterations, but iterations is "
                f"{self.settings.iterations}. Use iterations={self.iteration} or more, or name another folder."
            )
        values, stored = dict(self.params), part(tensors, "params")
        if buffers := part(tensors, "buffers"):  # version 0.1.0 wrote none
            values, stored = values | dict(self.net.named_buffers()), stored | buffers
        check_match(values, stored, folder.path)
        averaged, means = self.averaged or {}, part(tensors, "average")
        check_match(averaged, means, folder.path)
        with torch.no_grad():
            for name, own in values.items():
                own.copy_(stored[name])
            for name, mean in averaged.items():
                mean.copy_(means[name])
        self._restore_moments(part(tensors, "moments"))
        for name, generator in self.generators.items():
            generator.set_state(states[name])
        self.random.states = {name: states[name] for name in self.random.states}
        with self.random.active():
            pass  # refuses states that are none
        self.total = tensors["loss.total"].to(self.device).reshape(())
        self.curve = [point_of(line) for line in notes["curve"]]
        self._set_drop_rate()

    def _restore_moments(self, stored: Params) -> None:
        moments: dict[int, dict[str, Tensor]] = {}
        for name, value in stored.items():
            index, _, key = name.partition(".")
            moments.setdefault(int(index), {})[key] = value
        trained = [value for group in self.optimizer.param_groups for value in group["params"]]
        for place, values in moments.items():
            if values.keys() != next(iter(moments.values())).keys():
                raise ValueError(f"the optimizer's state of parameter {place} is not like that of the others")
            if any(value.ndim and value.shape != trained[place].shape for value in values.values()):
                raise ValueError(f"the optimizer's state of parameter {place} has another shape")
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})


def _copy(tensors: Params) -> Params:
    return {name: value.detach().clone() for name, value in tensors.items()}


def line_of(point: Point) -> dict[str, object]:
    """Return a point as JSON can hold it."""
    score = point.score
    judged = (
        {} if score is None else {"metric": score.metric, "mean": score.mean, "ci95": score.ci95, "tasks": score.tasks}
    )
    own = {"iteration": point.iteration, "seconds": point.seconds, "loss": point.loss, "best": point.best}
    return own | {"validation": judged or None}


def point_of(line: dict[str, Any]) -> Point:
    """Return the point of a line; what single tasks scored is not kept there."""
    judged = line["validation"]
    score = None
    if judged is not None:
        metric = METRICS[METRICS.index(judged["metric"])]  # a ValueError for another
        mean, margin = float(judged["mean"]), float(judged["ci95"])
        score = Score(mean, margin, operator.index(judged["tasks"]), torch.empty(0), metric)
    iteration, seconds = operator.index(line["iteration"]), float(line["seconds"])
    return Point(iteration, seconds, float(line["loss"]), score, bool(line["best"]))
