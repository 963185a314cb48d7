"""Training and evaluation of methods on tasks.

Everything is imported on first use, since it needs PyTorch; `metabridge.training.config` does not, so the help of the
command line imports only that.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from metabridge.training.exports import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        # for a submodule, raise an AttributeError, so that Python imports only the submodule
        if (name.startswith("__") and name != "__all__") or find_spec(f"{__name__}.{name}"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module("metabridge.training.exports"), name)

    def __dir__() -> list[str]:
        return [*globals(), *import_module("metabridge.training.exports").__all__]
