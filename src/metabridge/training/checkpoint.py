"""Runs on disk. Settings are JSON and tensors are safetensors, so that reading a run never runs code.

A run's folder holds
- `settings.json`: the model, the method, the data and how it was trained, and which parameters are frozen, if any;
- `weights.safetensors`: the best parameters so far, and the network's buffers;
- `state.safetensors`: everything that training needs to go on as if it had never stopped;
- `metrics.jsonl`: a line for every point of the learning curve, and `curves.png`, its picture.
Every file is written whole or not at all, by the one process that holds the folder's lock. Files of tensors have a
checksum.
"""

from __future__ import annotations

import itertools
import json
import operator
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, SupportsFloat

import torch
from torch import Tensor

from metabridge.errors import PARSING_ERRORS, InputError
from metabridge.files import json_bytes, read_regular_file, write_atomically
from metabridge.heads import Head
from metabridge.learners.method import Method, balance
from metabridge.models import BUILDERS, FORMER_NAMES, Network, Params, build
from metabridge.models.size_limit import SizeLimit
from metabridge.solvers import Solver, task_loss

KEYS = {"model": True, "method": False, "tasks": True, "validation": True, "training": False}  # whether it may be null
FILES = ("weights.safetensors", "state.safetensors", "metrics.jsonl")  # that a run writes, besides its settings
VERSION = 1  # of the folder's form; raise it when a reader of the old form would misread the new one

CHECKSUM = "crc32"  # of the whole file, where it is eight zeros
_NONE = "00000000"


@dataclass(frozen=True)
class RunFolder:
    """Reads and writes the folder of one run."""

    path: Path

    @property
    def started(self) -> bool:
        """Whether a run has left its settings here."""
        return (self.path / "settings.json").exists()

    def held(self) -> dict[str, Any] | None:
        """Return the settings of the run that can be taken up here, if there is one."""
        settings = self.settings() if self.started else None  # which must be a run's
        known = [name for name in FILES if (self.path / name).exists()]
        if settings is None and known:
            raise InputError(f"{self.path} holds a {known[0]} that is not of a run. Name another folder.")
        return settings if "state.safetensors" in known else None  # else nothing was trained before it failed

    def check(self, settings: Mapping[str, Any]) -> bool:
        """Refuse settings other than those of the run that was begun here, and return whether only its length differs.

        The length is the number of iterations.
        """
        held = self.held()
        difference = None if held is None else _difference(_without_length(held), _without_length(plain(settings)))
        if difference:
            raise InputError(
                f"{self.path} holds a run with other settings ({difference}). "
                "Name another folder, or give the same settings to go on with that run."
            )
        return held is not None and held != plain(settings)

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        """Write the settings."""
        write_atomically(self.path / "settings.json", json_bytes(plain(settings), indent=2), follow=False)

    def settings(self) -> dict[str, Any]:
        """Return the settings of the run."""
        file = self.path / "settings.json"
        if not self.path.is_dir():
            raise InputError(f"there is no run at {self.path}. Name the folder that was given to train as --out.")
        try:
            content = read_regular_file(file)
        except OSError as error:
            raise InputError(
                f"{self.path} is not a run: {file.name} cannot be read ({error.strerror}). "
                "Name the folder that was given to train as --out."
            ) from error
        try:
            settings = json.loads(content)
        except PARSING_ERRORS as error:
            raise InputError(f"{file} is damaged: it is not JSON ({error}).") from error
        if not isinstance(settings, dict) or "version" not in settings:
            raise InputError(f"{self.path} is not a run: its {file.name} is not of metabridge. Name another folder.")
        if settings["version"] != VERSION:
            raise InputError(
                f"{self.path} was written in form {settings['version']}, but this version of metabridge reads form "
                f"{VERSION}. Train again, or use the version that wrote it."
            )
        for key, nullable in KEYS.items():
            if key not in settings:
                raise InputError(f"{file} is damaged: it does not say the {key}. Restore it from a copy.")
            if not (isinstance(settings[key], dict) or (nullable and settings[key] is None)):
                raise damaged(file, f"its {key} is {settings[key]!r}")
        return settings

    def write(self, name: str, tensors: Mapping[str, Tensor], notes: Mapping[str, object]) -> None:
        """Write tensors with JSON notes as `name`.safetensors."""
        from safetensors.torch import save

        whole = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
        header, values = _split(save(whole, {"metabridge": json.dumps(notes), CHECKSUM: _NONE}))
        header = header.replace(_mark(_NONE), _mark(_checksum(header, values, _NONE)), 1)
        write_atomically(self.path / f"{name}.safetensors", b"".join((header, values)), follow=False)

    def read(self, name: str) -> tuple[Params, dict[str, Any]] | None:
        """Return what `write` left as `name`, or None if there is nothing."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        file = self.path / f"{name}.safetensors"
        try:
            content = read_regular_file(file)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise InputError(
                f"{file} cannot be read ({error.strerror}). Check who may read it, or name another folder."
            ) from error
        try:
            header, values = _split(content)
            metadata = json.loads(header[8:])["__metadata__"]
            sealed = set(metadata) != {"metabridge"}  # version 0.1.0 wrote nothing else, and no checksum
            if sealed and _checksum(header, values, metadata[CHECKSUM]) != metadata[CHECKSUM]:
                raise InputError("its checksum is that of another content")
            notes = json.loads(metadata["metabridge"])
            if not isinstance(notes, dict):
                raise InputError("its notes are not of a run")
            return load(content), notes
        except (SafetensorError, *PARSING_ERRORS) as error:
            raise InputError(
                f"{file} is damaged or not of a run ({error}). Delete it, or restore it from a copy."
            ) from error

    def write_metrics(self, lines: list[dict[str, object]]) -> None:
        """Write the learning curve, a line a point."""
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        write_atomically(self.path / "metrics.jsonl", text.encode(), follow=False)


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as they are read back: with their version, and tuples as lists."""
    return json.loads(json.dumps({"version": VERSION} | dict(settings)))  # type: ignore[no-any-return]


def fingerprint(settings: Mapping[str, Any]) -> int:
    """Tell the model and the method of some settings from others."""
    return zlib.crc32(json.dumps([settings["model"], settings["method"]], sort_keys=True).encode())


def damaged(file: Path, reason: object) -> InputError:
    """Return the error that says why a file of a run cannot be used."""
    return InputError(f"{file} is damaged: {reason}. Restore it from a copy, or name another folder.")


def write_method(method: Method) -> dict[str, object]:
    """Return a method as plain data.

    >>> from metabridge.learners.method import method
    >>> write_method(method("maml"))["inner"]
    {'solver': 'GradientDescent', 'steps': 5, 'lr': 0.01, 'rates': 'fixed'}
    """
    if method.loss is not task_loss or method.regulariser not in (None, balance):
        raise InputError(
            "a method with a loss or regulariser of your own cannot be saved. "
            "Train it without out=, and keep run.params."
        )
    solvers = {
        place: None if (solver := getattr(method, place)) is None else _plain_options(solver.to_dict())
        for place in ("inner", "test")
    }
    plain = {"adapts": method.adapts, "outer": method.outer, "head": method.training_head, "split": method.split}
    return {**plain, **solvers, "regulariser": None if method.regulariser is None else "balance"}


def read_method(data: Mapping[str, Any]) -> Method:
    """Return the method that `write_method` described.

    >>> from metabridge.learners.method import method
    >>> read_method(write_method(method("r2d2"))) == method("r2d2")
    True
    """
    data = dict(data)
    data["training_head"] = data.pop("head")  # the key of version 0.1.0
    if data["inner"] is not None:
        data["inner"] = Solver.from_dict(data["inner"])
    if data["test"] is not None:
        root = Head if data["test"]["solver"] in Head.by_stored_name() else Solver
        data["test"] = root.from_dict(data["test"])
    return Method(**data | {"regulariser": balance if data["regulariser"] else None})


def read_network(settings: Mapping[str, Any], net: Network | None, stored: Params) -> Network:
    """Return the run's network, made anew unless it is given, if it is about as large as its `stored` tensors."""
    if net is None:
        recipe = dict(settings["model"])
        if (
            FORMER_NAMES.get(recipe["model"], recipe["model"]) not in BUILDERS
        ):  # such as the path of an architecture: a run keeps the architecture itself
            raise ValueError(f"its model is {recipe['model']!r}")
        if recipe.get("pretrained"):
            recipe["pretrained"] = False  # the run's own weights come next: nothing to download
        values = sum(value.numel() for value in stored.values())
        with SizeLimit(values=4 * values + 2**24, tensors=4 * len(stored) + 2**10):  # more while it is made
            net = build(**recipe)
    frozen = settings.get("frozen", ())
    for name, weight in net.named_parameters():
        if name in frozen:
            weight.requires_grad_(False)
    return net


def check_match(wanted: Mapping[str, Tensor], stored: Params, folder: Path) -> None:
    """Refuse a network whose tensors are not those that a run has stored."""
    for name, own in wanted.items():
        found = stored.get(name)
        if found is None or found.shape != own.shape:
            told = "no such tensor" if found is None else f"{tuple(found.shape)}"
            raise InputError(
                f"the network has {name!r} of shape {tuple(own.shape)}, but the run in {folder} has {told}. "
                "Give the network that was trained, or name another folder."
            )
        if found.dtype != own.dtype:
            raise InputError(
                f"the network has {name!r} in {own.dtype}, but the run in {folder} in {found.dtype}. "
                "Give the network that was trained, or name another folder."
            )


def fill(net: Network, params: Params, buffers: Params) -> None:
    """Write parameters and buffers into a network."""
    with torch.no_grad():
        for name, weight in net.named_parameters():
            weight.copy_(params[name])
        for name, buffer in net.named_buffers():
            buffer.copy_(buffers[name])


def merge(**groups: Mapping[str, Tensor]) -> Params:
    """Put groups of tensors into one, each name after its group's.

    >>> sorted(merge(a={"x": torch.ones(1)}, b={"x": torch.ones(1)}))
    ['a.x', 'b.x']
    """
    return {f"{group}.{name}": value for group, members in groups.items() for name, value in members.items()}


def part(tensors: Params, group: str) -> Params:
    """Return one group of what `merge` put together."""
    prefix = f"{group}."
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def describe_environment(environment: object) -> dict[str, object]:
    """Return what is known of a source of tasks: its own settings, and where its images come from."""
    name = getattr(type(environment), "stored_name", type(environment).__name__)
    known: dict[str, object] = {"environment": name}
    if not is_dataclass(environment):
        return known
    for field in fields(environment):
        value = getattr(environment, field.name)
        if field.name == "data":
            known["data"] = getattr(value, "load_arguments", None)
            known["classes"] = getattr(environment, "classes", None)  # quarter turns make more of the same source
            known["class_names"] = list(getattr(environment, "class_names", ()))
        else:
            known[field.name] = describe_value(value)
    return known


def plain_number(value: Any) -> Any:
    """Return a number of NumPy or of a tensor as Python's own, which JSON can hold; anything else as it is."""
    if value is None or isinstance(value, int | float | str):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return float(value) if isinstance(value, SupportsFloat) and getattr(value, "ndim", 0) == 0 else value


def describe_value(value: object) -> object:
    """A setting as JSON can hold it; of a tensor enough to tell it from another."""
    value = value if isinstance(value, Tensor) else plain_number(value)
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, Tensor):
        return {"shape": list(value.shape), "crc32": zlib.crc32(value.detach().cpu().contiguous().numpy().tobytes())}
    if isinstance(value, tuple | list):
        return [describe_value(each) for each in value]
    return describe_environment(value)


def _plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a solver with Python's own numbers, also where one is given for each parameter."""
    return {
        name: _plain_options(value) if isinstance(value, Mapping) else plain_number(value)
        for name, value in options.items()
    }


def _split(content: bytes) -> tuple[bytes, memoryview]:
    """Return the header of a safetensors file, with its length, and the values of the tensors."""
    end = 8 + int.from_bytes(content[:8], "little")
    if end > len(content):
        raise InputError("it is cut off")
    return content[:end], memoryview(content)[end:]


def _mark(checksum: str) -> bytes:
    """Return how the header says a checksum."""
    return f'"{CHECKSUM}":"{checksum}"'.encode()


def _checksum(header: bytes, values: memoryview, stored: str) -> str:
    """Return the checksum of a file, where it says the `stored` one."""
    return f"{zlib.crc32(values, zlib.crc32(header.replace(_mark(stored), _mark(_NONE), 1))):08x}"


def _without_length(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without the number of iterations, which a run can go on to another of."""
    return {**settings, "training": {**settings["training"], "iterations": None}}


def _difference(there: object, here: object, name: str = "") -> str | None:
    """Name the first setting that differs."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in {**there, **here}:
            found = _difference(there.get(key), here.get(key), f"{name}.{key}" if name else key)
            if found:
                return found
        return None
    if isinstance(there, list) and isinstance(here, list):
        pairs = enumerate(itertools.zip_longest(there, here))
        return next((found for at, pair in pairs if (found := _difference(*pair, f"{name}[{at}]"))), None)
    return None if there == here else f"{name} is {there} there and {here} here"
