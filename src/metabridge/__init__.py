"""metabridge: few-shot learning with gradient-based meta-learning and multi-task learning."""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.2.0"

if TYPE_CHECKING:
    from metabridge.api import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        """Import the library and PyTorch on first use, so that `metabridge --help` starts fast."""
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module("metabridge.api"), name)

    def __dir__() -> list[str]:
        return list(import_module("metabridge.api").__all__)
