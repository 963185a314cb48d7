"""Saved runs. Settings are JSON and tensors are safetensors, so reading a run never executes code.

The folder of a run contains
- `settings.json`: model, method, training and validation tasks and training options; if there are any, the names of
  frozen parameters and checksums of the teacher and of the initial weights;
- `weights.safetensors`: the best weights so far, parameters and buffers;
- `state.safetensors`: everything that is needed to continue training with the same results as without interruption;
- `metrics.jsonl`: one line per point of the learning curve, and `curves.png`, its plot.
Files are replaced atomically, by the process that has locked the folder. The safetensors files have a checksum.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metabridge.decode_options import as_decode_options
from metabridge.errors import PARSING_ERRORS, InputError
from metabridge.files import json_bytes, read_regular_file, write_atomically
from metabridge.heads import Head
from metabridge.learners.method import Method, balancing_regularizer
from metabridge.models import Network, Params, rebuild
from metabridge.models.size_limit import SizeLimit
from metabridge.solvers import Solver, task_loss
from metabridge.training.config import as_python_number, replace_former_names

# Sections of settings.json, and whether each may be null.
SECTIONS = {"model": True, "method": False, "tasks": True, "validation": True, "training": False}
# The files of a run besides settings.json, without curves.png, which is only a plot of metrics.jsonl.
FILES = ("weights.safetensors", "state.safetensors", "metrics.jsonl")
VERSION = 2  # format of settings.json; increase it if older versions of metabridge would misread a new format

CHECKSUM = "crc32"  # metadata key of the checksum of the file
_NO_CHECKSUM = "00000000"  # is in the place of the checksum while the checksum is computed


@dataclass(frozen=True)
class RunFolder:
    """Reads and writes the folder of one run."""

    path: Path

    def resumable_settings(self) -> dict[str, Any] | None:
        """Return the settings of the run in this folder if it can be continued, otherwise None.

        Raises:
            InputError: If the settings cannot be read, or are missing although there are other files of a run.
        """
        settings = self.settings() if (self.path / "settings.json").exists() else None
        existing_files = [name for name in FILES if (self.path / name).exists()]
        if settings is None and existing_files:
            raise InputError(
                f"{self.path} contains {existing_files[0]}, but no settings.json of a run. Use another folder."
            )
        # without a state, there is nothing to continue
        return settings if "state.safetensors" in existing_files else None

    def check_same_settings(self, stored: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Raise an `InputError` if the run's stored settings differ from `settings` in more than the length.

        The length of training depends on the iterations and the patience.
        """
        difference = _difference(_without_length(stored), _without_length(json_round_trip(settings)))
        if difference:
            raise InputError(
                f"{self.path} contains a run with other settings ({difference}). "
                "Use another folder, or use the same settings to continue that run."
            )

    def check_same_init(self, stored: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Raise an `InputError` if the run did not start from the initial weights in `settings`."""
        if stored.get("init") == json_round_trip(settings).get("init"):
            return
        if "init" not in settings:
            raise InputError(
                f"init is missing, but the run in {self.path} started from the weights of another model. Pass that "
                "model to continue the run, or use another folder."
            )
        if "init" not in stored:
            raise InputError(
                f"init is a trained model, but the run in {self.path} did not start from one. Omit init to continue "
                "the run, or use another folder."
            )
        raise InputError(
            f"init is a model with other weights than those that the run in {self.path} started from. Pass the same "
            "model to continue the run, or use another folder."
        )

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        """Write settings.json."""
        write_atomically(self.path / "settings.json", json_bytes(json_round_trip(settings), indent=2), follow=False)

    def settings(self) -> dict[str, Any]:
        """Return the settings of the run, converted to the format of this version."""
        file = self.path / "settings.json"
        if not self.path.is_dir():
            raise InputError(
                f"there is no run at {self.path}. Pass the folder that fit(out=...) or metabridge train --out wrote."
            )
        try:
            content = read_regular_file(file)
        except OSError as error:
            raise InputError(
                f"{self.path} is not a run: {file.name} cannot be read ({error.strerror}). "
                "Pass the folder that fit(out=...) or metabridge train --out wrote."
            ) from error
        try:
            settings = json.loads(content)
        except PARSING_ERRORS as error:
            raise InputError(f"{file} is damaged: it is not JSON ({error}).") from error
        if not isinstance(settings, dict) or "version" not in settings:
            raise InputError(f"{self.path} is not a run: metabridge did not write its {file.name}. Use another folder.")
        if settings["version"] not in (1, VERSION):
            raise InputError(
                f"{self.path} was written in format {settings['version']}, but this version of metabridge reads format "
                f"{VERSION}. Train again, or use the version that wrote it."
            )
        for section, may_be_null in SECTIONS.items():
            if section not in settings:
                raise InputError(f"{file} is damaged: the {section} is missing. Restore it from a copy.")
            if not (isinstance(settings[section], dict) or (may_be_null and settings[section] is None)):
                raise damage_error(file, f"its {section} is {settings[section]!r}")
        return settings if settings["version"] == VERSION else upgrade_from_version_1(settings)

    def write(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, object]) -> None:
        """Write tensors to `name`.safetensors, with `metadata` as JSON in its header."""
        from safetensors.torch import save

        contiguous = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
        header, values = _split_header(save(contiguous, {"metabridge": json.dumps(metadata), CHECKSUM: _NO_CHECKSUM}))
        header = header.replace(
            _checksum_entry(_NO_CHECKSUM), _checksum_entry(_checksum(header, values, _NO_CHECKSUM)), 1
        )
        write_atomically(self.path / f"{name}.safetensors", b"".join((header, values)), follow=False)

    def read(self, name: str) -> tuple[Params, dict[str, Any]] | None:
        """Return the tensors and the metadata of `name`.safetensors, or None if there is no such file."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        file = self.path / f"{name}.safetensors"
        try:
            content = read_regular_file(file)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise InputError(
                f"{file} cannot be read ({error.strerror}). Check its permissions, or use another folder."
            ) from error
        try:
            header, values = _split_header(content)
            header_metadata = json.loads(header[8:])["__metadata__"]
            has_checksum = set(header_metadata) != {"metabridge"}  # early files of version 0.1.0 have none
            if has_checksum and _checksum(header, values, header_metadata[CHECKSUM]) != header_metadata[CHECKSUM]:
                raise InputError("its checksum is wrong")
            metadata = json.loads(header_metadata["metabridge"])
            if not isinstance(metadata, dict):
                raise InputError("its metadata was not written by metabridge")
            return load(content), metadata
        except (SafetensorError, *PARSING_ERRORS) as error:
            raise InputError(
                f"{file} is damaged or is not a file of a run ({error}). Delete it, or restore it from a copy."
            ) from error

    def write_metrics(self, points: list[dict[str, object]]) -> None:
        """Write the learning curve, one line per point."""
        text = "".join(f"{json.dumps(point)}\n" for point in points)
        write_atomically(self.path / "metrics.jsonl", text.encode(), follow=False)


def json_round_trip(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as they would be read from settings.json: with the format version, and tuples as lists."""
    return json.loads(json.dumps({"version": VERSION} | dict(settings)))  # type: ignore[no-any-return]


def upgrade_from_version_1(settings: dict[str, Any]) -> dict[str, Any]:
    """Convert settings from format 1, which version 0.1.0 wrote, to the current format.

    The model and the method are the same in both formats, so the fingerprint in old weights stays valid.
    """
    unchanged = {"version": VERSION, "model": settings["model"], "method": settings["method"]}
    renamed = {name: _with_new_spelling(value) for name, value in settings.items()}
    return renamed | unchanged | {"training": replace_former_names(settings["training"])}


def _with_new_spelling(value: Any) -> Any:
    """Convert the names of fields in a setting of version 0.1.0 to the current spelling."""
    if isinstance(value, dict):
        return {name.replace("centre", "center"): _with_new_spelling(item) for name, item in value.items()}
    return [_with_new_spelling(item) for item in value] if isinstance(value, list) else value


def fingerprint(settings: Mapping[str, Any]) -> int:
    """Return a checksum of the settings of the model and the method, to detect weights that do not belong to them."""
    return zlib.crc32(json.dumps([settings["model"], settings["method"]], sort_keys=True).encode())


def damage_error(file: Path, reason: object) -> InputError:
    """Return the error for a file of a run that cannot be used."""
    return InputError(f"{file} is damaged: {reason}. Restore it from a copy, or use another folder.")


def write_method(method: Method) -> dict[str, object]:
    """Return a method as a dictionary that JSON can store.

    >>> from metabridge.learners.method import method
    >>> write_method(method("maml"))["inner"]
    {'solver': 'GradientDescent', 'steps': 5, 'lr': 0.01, 'rates': 'fixed'}
    """
    if method.loss is not task_loss or method.regularizer not in (None, balancing_regularizer):
        raise InputError(
            "a method with a custom loss or regularizer cannot be saved. Train it without out=, and keep run.params."
        )
    solvers = {
        key: None if solver is None else _plain_options(solver.to_dict())
        for key, solver in (("inner", method.inner), ("test", method.test_solver))
    }
    # the keys are still those of version 0.1.0, in which some fields had other names
    choices = {"adapts": method.adapts, "outer": method.outer, "head": method.training_head, "split": method.split}
    return {**choices, **solvers, "regulariser": None if method.regularizer is None else "balance"}


def read_method(data: Mapping[str, Any]) -> Method:
    """Return the method from the dictionary that `write_method` returned.

    >>> from metabridge.learners.method import method
    >>> read_method(write_method(method("r2d2"))) == method("r2d2")
    True
    """
    data = dict(data)
    # convert the keys of version 0.1.0 to today's field names
    data["training_head"], regularized = data.pop("head"), data.pop("regulariser")
    data["test_solver"] = data.pop("test")
    if data["inner"] is not None:
        data["inner"] = Solver.from_dict(data["inner"])
    if data["test_solver"] is not None:
        base_class = Head if data["test_solver"]["solver"] in Head.by_stored_name() else Solver
        data["test_solver"] = base_class.from_dict(data["test_solver"])
    return Method(**data, regularizer=balancing_regularizer if regularized else None)


def read_network(settings: Mapping[str, Any], net: Network | None, stored: Params) -> Network:
    """Return `net`, or a new network if it is None, with the frozen parameters of the run.

    A new network that is much larger than the tensors in `stored` raises an error before it is built.
    """
    if net is None:
        stored_values = sum(value.numel() for value in stored.values())
        # the limits are higher than the stored sizes, since building may need more memory than its result
        with SizeLimit(values=4 * stored_values + 2**24, tensors=4 * len(stored) + 2**10):
            net = rebuild(settings["model"])
    data = (settings.get("tasks") or {}).get("data")
    if net.decode_options is None and isinstance(data, dict) and data.get("decode_options") is not None:
        net.decode_options = as_decode_options(data["decode_options"])  # those of the pretrained network
    frozen = settings.get("frozen", ())
    for name, weight in net.named_parameters():
        if name in frozen:
            weight.requires_grad_(False)
    return net


def check_match(expected: Mapping[str, Tensor], stored: Params, folder: Path) -> None:
    """Raise an `InputError` if tensors of a network differ in name, shape or dtype from those stored in a run."""
    for name, value in expected.items():
        tensor = stored.get(name)
        if tensor is None or tensor.shape != value.shape:
            shape = "no such tensor" if tensor is None else f"{tuple(tensor.shape)}"
            raise InputError(
                f"the network has {name!r} of shape {tuple(value.shape)}, but the run in {folder} has {shape}. "
                "Pass the network that was trained, or use another folder."
            )
        if tensor.dtype != value.dtype:
            raise InputError(
                f"the network has {name!r} in {value.dtype}, but the run in {folder} has it in {tensor.dtype}. "
                "Pass the network that was trained, or use another folder."
            )


def copy_into(net: Network, params: Params, buffers: Params) -> None:
    """Copy parameters and buffers into a network."""
    with torch.no_grad():
        for name, weight in net.named_parameters():
            weight.copy_(params[name])
        for name, buffer in net.named_buffers():
            buffer.copy_(buffers[name])


def merge_groups(**groups: Mapping[str, Tensor]) -> Params:
    """Merge groups of tensors into one dictionary, with the group's name as a prefix of each name.

    >>> sorted(merge_groups(a={"x": torch.ones(1)}, b={"x": torch.ones(1)}))
    ['a.x', 'b.x']
    """
    return {f"{group}.{name}": value for group, tensors in groups.items() for name, value in tensors.items()}


def select_group(tensors: Params, group: str) -> Params:
    """Return one of the groups that `merge_groups` merged."""
    prefix = f"{group}."
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def describe_environment(environment: object) -> dict[str, object]:
    """Return the settings of an environment in a form that JSON can store: its class, fields and source of images."""
    name = getattr(type(environment), "stored_name", type(environment).__name__)
    description: dict[str, object] = {"environment": name}
    if not is_dataclass(environment):
        return description
    for field in fields(environment):
        value = getattr(environment, field.name)
        if field.name == "data":
            description["data"] = getattr(value, "load_arguments", None)
            # load_arguments do not tell whether rotated classes were added, but the number of classes does
            description["classes"] = getattr(environment, "classes", None)
            description["class_names"] = list(getattr(environment, "class_names", ()))
        else:
            description[field.name] = describe_value(value)
    return description


def describe_value(value: object) -> object:
    """Return a setting in a form that JSON can store. A tensor is described by its shape and a checksum."""
    value = value if isinstance(value, Tensor) else as_python_number(value)
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, Tensor):
        return {"shape": list(value.shape), "crc32": zlib.crc32(value.detach().cpu().contiguous().numpy().tobytes())}
    if isinstance(value, tuple | list):
        return [describe_value(item) for item in value]
    return describe_environment(value)


def _plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the numbers in the options of a solver to Python numbers, also inside dictionaries."""
    return {
        name: _plain_options(value) if isinstance(value, Mapping) else as_python_number(value)
        for name, value in options.items()
    }


def _split_header(content: bytes) -> tuple[bytes, memoryview]:
    """Return the header of a safetensors file, including its 8-byte length, and the values of the tensors."""
    end = 8 + int.from_bytes(content[:8], "little")
    if end > len(content):
        raise InputError("it is truncated")
    return content[:end], memoryview(content)[end:]


def _checksum_entry(checksum: str) -> bytes:
    """Return the part of the header that contains a checksum."""
    return f'"{CHECKSUM}":"{checksum}"'.encode()


def _checksum(header: bytes, values: memoryview, stored: str) -> str:
    """Return the checksum of a file whose header contains the checksum `stored`."""
    blank_header = header.replace(_checksum_entry(stored), _checksum_entry(_NO_CHECKSUM), 1)
    return f"{zlib.crc32(values, zlib.crc32(blank_header)):08x}"


def _without_length(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without the iterations and the patience, which may change when a run is continued."""
    return {**settings, "training": {**settings["training"], "iterations": None, "patience": None}}


def _difference(stored: object, new: object, name: str = "") -> str | None:
    """Return a description of the first setting that differs, or None."""
    if isinstance(stored, dict) and isinstance(new, dict):
        for key in {**stored, **new}:
            difference = _difference(stored.get(key), new.get(key), f"{name}.{key}" if name else key)
            if difference:
                return difference
        return None
    if isinstance(stored, list) and isinstance(new, list):
        for index, items in enumerate(itertools.zip_longest(stored, new)):
            difference = _difference(*items, f"{name}[{index}]")
            if difference:
                return difference
        return None
    return None if stored == new else f"{name} was {stored} and is now {new}"
