"""Base class of inner solvers and test-time heads, which are registered by name.

A registered class is a frozen dataclass in a module of its package. Importing the package imports all its modules, and
each class registers itself, so no list of the classes has to be maintained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, ClassVar, Self

_FIELD_NAMES = {"normalise": "normalize"}  # field names by their keys in files; the keys must never change


class Registered:
    """A dataclass that is registered by name in its root class.

    A root class is declared with `abstract=True` and sets `registry` to an empty dictionary. Its subclasses set the
    class attributes in `required`, and optionally `stored_name`. Base classes between a root class and registered
    classes are also declared with `abstract=True`.

    Attributes:
        name: The name that users type, unique under the root class.
        label: The name in tables, such as "gradient descent".
        stored_name: The name in files of runs (default: the name of the class). It must never change.
        registry: The registered subclasses of the root class, by name.
        required: The class attributes that every registered class must set.
    """

    name: ClassVar[str]
    label: ClassVar[str]
    stored_name: ClassVar[str]
    registry: ClassVar[dict[str, Any]]
    required: ClassVar[tuple[str, ...]] = ("name", "label")

    def __init_subclass__(cls, *, abstract: bool = False, **options: Any) -> None:
        """Register a subclass, unless it is a base class declared with `abstract=True`.

        Raises:
            TypeError: If a required attribute is missing, or another class has the same name or stored name.
        """
        super().__init_subclass__(**options)
        if abstract:
            return
        missing = [attribute for attribute in cls.required if not hasattr(cls, attribute)]
        if missing:
            raise TypeError(f"{cls.__name__} must set the class attribute {missing[0]!r}.")
        if "stored_name" not in vars(cls):
            cls.stored_name = cls.__name__
        for other in cls.registry.values():
            if cls.name == other.name or cls.stored_name == other.stored_name:
                raise TypeError(f"{cls.__name__} and {other.__name__} have the same name. Rename one of them.")
        cls.registry[cls.name] = cls

    @classmethod
    def by_stored_name(cls) -> dict[str, type[Self]]:
        """Return the registered classes by their stored names."""
        return {registered.stored_name: registered for registered in cls.registry.values()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the object that `to_dict` converted.

        Raises:
            KeyError: If `data` has no key "solver", or no registered class has that stored name.
            TypeError: If another key is not the name of a field.
        """
        options = {_FIELD_NAMES.get(name, name): value for name, value in data.items()}
        return cls.by_stored_name()[options.pop("solver")](**options)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, and the stored name under the key "solver", which heads use, too."""
        keys = {field: key for key, field in _FIELD_NAMES.items()}
        options = {keys.get(name, name): value for name, value in asdict(self).items()}  # type: ignore[call-overload]
        return {"solver": self.stored_name} | options

    def summary(self) -> str:
        """Return the label and all fields, except strings and booleans that have their default values."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}  # type: ignore[arg-type]
        settings = [
            f"{name.replace('_', ' ')} {_as_word(value)}"
            for name, (value, default) in values.items()
            if value != default or not isinstance(value, str | bool)
        ]
        return f"{self.label}: {', '.join(settings)}" if settings else self.label


def import_modules(package: str, path: Iterable[str]) -> None:
    """Import all modules of a package, given its `__path__`, so that their classes register themselves."""
    for module in iter_modules(path):
        import_module(f"{package}.{module.name}")


def _as_word(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
