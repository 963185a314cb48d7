"""metabridge: few-shot learning with gradient-based meta-learning and multi-task learning."""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from metabridge.api import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        """Import the library, and PyTorch, as soon as it is asked for something: the command's help does without."""
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module("metabridge.api"), name)

    def __dir__() -> list[str]:
        return [*globals(), *import_module("metabridge.api").__all__]
