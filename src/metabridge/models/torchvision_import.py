"""Import torchvision, even if its compiled operators were built for another version of PyTorch."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from threading import Lock

import torch

from metabridge.errors import InputError

_LOCK = Lock()
_OPERATOR_LIBRARIES: list[torch.library.Library] = []  # operators exist as long as their library object
_MISSING_OPERATOR = re.compile(r"operator torchvision::\w+ does not exist")
_REGISTRATION = re.compile(r"register_fake\(\s*[\"']torchvision::(\w+)")


def import_torchvision(source: str) -> None:
    """Import torchvision if it is installed, for libraries that use only its image transforms.

    If torchvision was built for another PyTorch, such as one with CUDA instead of one without, its compiled operators
    cannot be loaded, and the import fails because it describes operators that do not exist. Pretrained models use none
    of these operators. They are therefore declared without an implementation: calling one still raises an error.

    Args:
        source: The model that needs torchvision, for error messages.

    Raises:
        InputError: If torchvision is installed, but cannot be imported.

    >>> import_torchvision("timm:resnet18")
    """
    with _LOCK:
        try:
            try:
                _import()
            except RuntimeError as error:
                if not _MISSING_OPERATOR.search(str(error)):
                    raise
                _declare_operators()
                _import()
        except (RuntimeError, ImportError, OSError, AttributeError) as error:
            reason = str(error).partition("\n")[0]
            raise InputError(
                f"model is {source!r}, but torchvision cannot be imported because it was built for another PyTorch "
                f"({reason}). Install versions that match: pip install --upgrade torch torchvision"
            ) from error


def _import() -> None:
    """Import torchvision unless it is not installed. After an error, forget its modules, so that it can be retried."""
    try:
        if "torchvision" not in sys.modules and find_spec("torchvision") is not None:
            import torchvision  # noqa: F401
    except BaseException:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        raise


def _declare_operators() -> None:
    """Declare the operators that torchvision describes during its import."""
    spec = find_spec("torchvision")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).with_name("_meta_registrations.py").read_text(encoding="utf-8")
    library = torch.library.Library("torchvision", "FRAGMENT")
    _OPERATOR_LIBRARIES.append(library)
    for name in _REGISTRATION.findall(source):
        library.define(f"{name}(Tensor x) -> Tensor")
