"""Read the weights of pretrained models from files and from the local cache of the model hub, without running code."""

from __future__ import annotations

import argparse
import pickle
import stat
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metabridge.errors import PARSING_ERRORS, InputError

# names under which training programs store the weights, from the preferred one to the last
_CONTAINERS = ("state_dict_ema", "model_ema", "state_dict", "model_state_dict", "model", "teacher", "net", "module")
# names of the module that contains the model
_WRAPPERS = frozenset(
    {"_orig_mod", "module", "model", "backbone", "encoder", "net", "network", "state_dict", "teacher"}
)
_NAMES_IN_ERRORS = 3


def read_weights(file: str | Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file or of a file that `torch.save` wrote.

    Args:
        file: The file.

    Returns:
        The tensors by name. If the file contains the state of a training program, only the weights of the model.

    Raises:
        InputError: If the file cannot be read, contains anything but weights, settings and plain values, or contains no
            weights.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     torch.save({"state_dict": {"weight": torch.ones(2)}, "epoch": 3}, Path(folder, "model.pth"))
    ...     read_weights(Path(folder, "model.pth"))
    {'weight': tensor([1., 1.])}
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = Path(file)
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise InputError(f"weights is {file}, which is not a file. Pass a safetensors file or a PyTorch file.")
        with file.open("rb") as opened:
            is_safetensors = opened.read(9)[8:] == b"{"  # after the length of the header
        if is_safetensors:
            return load_file(file)
        with torch.serialization.safe_globals([argparse.Namespace]):  # the settings in checkpoints of timm
            content = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise InputError(f"weights is {file}, which cannot be read ({error.strerror}). Check the path.") from error
    except pickle.UnpicklingError as error:
        raise InputError(
            f"weights is {file}, which is damaged or contains Python objects that could run code, so it is not read. "
            "Save only the weights: torch.save(model.state_dict(), ...)."
        ) from error
    except InputError:
        raise
    except (SafetensorError, EOFError, *PARSING_ERRORS) as error:
        raise InputError(
            f"weights is {file}, which is damaged, or neither a safetensors file nor a PyTorch file. Download or save "
            "it again."
        ) from error
    tensors = _find_tensors(content)
    if not tensors:
        raise InputError(
            f"weights is {file}, which contains no weights. Save them: torch.save(model.state_dict(), ...)."
        )
    return tensors


def _find_tensors(content: Any) -> dict[str, Tensor]:
    while isinstance(content, Mapping):
        container = next((name for name in _CONTAINERS if isinstance(content.get(name), Mapping)), None)
        if container is None:
            return {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
        content = content[container]
    return {}


def without_wrappers(tensors: Mapping[str, Tensor], expected: Callable[[], Collection[str]]) -> dict[str, Tensor]:
    """Remove the names of modules around a model, such as "module.backbone.", from the names of its weights.

    Args:
        tensors: The weights by name.
        expected: Function that returns the names of the model's parameters. It is called only if needed.

    Returns:
        The weights below the prefix with which most names match. Without a match, all weights under their names.

    >>> tensors = {"module.backbone.conv.weight": torch.ones(1), "module.head.weight": torch.ones(1)}
    >>> list(without_wrappers(tensors, lambda: ["conv.weight", "conv.bias"]))
    ['conv.weight']
    """
    prefixes = {""}
    for name in tensors:
        prefix = ""
        for part in name.split(".")[:-1]:
            if part not in _WRAPPERS:
                break
            prefix += f"{part}."
            prefixes.add(prefix)
    if len(prefixes) == 1:
        return dict(tensors)
    names = set(expected())
    candidates = [
        {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        for prefix in sorted(prefixes, key=len)
    ]
    return max(candidates, key=lambda candidate: len(names & candidate.keys()))


def hub_file(source: str, repository: str, names: Iterable[str], *, download: bool) -> Path:
    """Return the path of a file of a repository of the model hub in the local cache.

    Args:
        source: The model, for error messages.
        repository: Name of the repository, or NAME@REVISION.
        names: Names of the file, from the preferred one to the last.
        download: Whether to download the file if it is not in the cache. Otherwise, the network is not used.

    Returns:
        The path of the first file that exists.

    Raises:
        InputError: If none of the files is in the cache or can be downloaded.
    """
    from huggingface_hub import hf_hub_download

    repository, _, revision = repository.partition("@")
    reason = ""
    for name in names:
        try:
            return Path(hf_hub_download(repository, name, revision=revision or None, local_files_only=not download))
        except Exception as error:  # of many types, depending on the version of the hub's client and the network
            reason = str(error).partition("\n")[0].partition(". ")[0]
    raise not_cached(source, reason if download else None)


def not_cached(source: str, download_error: str | None) -> InputError:
    """Return the error for weights that are not in the cache, or whose download failed with `download_error`."""
    if download_error is None:
        return InputError(
            f"model is {source!r}, whose pretrained weights are not in the local cache, and nothing is downloaded "
            "without permission. Allow it with download=True (--model-option download=true), or pass the file of the "
            "weights: weights=FILE (--weights FILE)."
        )
    return InputError(
        f"model is {source!r}, whose pretrained weights cannot be downloaded ({download_error}). Check the name and "
        "the network connection, or pass the file of the weights: weights=FILE (--weights FILE)."
    )


def first_names(names: Iterable[str]) -> str:
    """Return the first names of a list as text.

    >>> first_names(["a", "b", "c", "d"])
    "'a', 'b', 'c' and 1 more"
    """
    names = list(names)
    rest = len(names) - _NAMES_IN_ERRORS
    return ", ".join(map(repr, names[:_NAMES_IN_ERRORS])) + (f" and {rest} more" if rest > 0 else "")
