from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

import pytest

import metabridge as mb

PACKAGES = (
    "metabridge",
    "metabridge.datasets",
    "metabridge.diagnosis",
    "metabridge.environments",
    "metabridge.heads",
    "metabridge.kernels",
    "metabridge.learners",
    "metabridge.models",
    "metabridge.nas",
    "metabridge.schedules",
    "metabridge.solvers",
    "metabridge.theory",
    "metabridge.theory.adaptation",
    "metabridge.theory.anil",
    "metabridge.theory.finite_tasks",
    "metabridge.theory.landscape",
    "metabridge.theory.linear_problems",
    "metabridge.theory.linear_sgd",
    "metabridge.theory.loss_surface",
    "metabridge.theory.power_law",
    "metabridge.theory.sampled_minima",
    "metabridge.theory.teachers",
    "metabridge.training",
    "metabridge.inference",
)
SECTION = re.compile(r"^( *)(Args|Returns|Yields|Raises|Attributes):\n((?:\1 +.*\n|\n)*)", re.MULTILINE)


def public_names(module: ModuleType) -> list[str]:
    """Return `__all__`; of a module without it, what it defines itself."""
    defined = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return getattr(module, "__all__", [name for name in defined if not name.startswith("_")])


def public_objects() -> dict[str, Any]:
    """Return every public class and function by the first of its public names."""
    objects: dict[int, tuple[str, Any]] = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in public_names(module):
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                objects.setdefault(id(value), (f"{package}.{name}", value))
    return dict(objects.values())


OBJECTS = public_objects()


def sections(docstring: str) -> dict[str, str]:
    return {title: body for _, title, body in SECTION.findall(f"{docstring}\n")}


def parameters(value: Any) -> list[str]:
    """Return the names of the arguments that a caller gives."""
    if is_dataclass(value):
        return [field.name for field in fields(value) if field.init and not field.name.startswith("_")]
    if inspect.isclass(value) and "__init__" not in vars(value) and "__new__" not in vars(value):
        return []
    try:
        signature = inspect.signature(value)
    except ValueError:
        return []
    return [name for name in signature.parameters if name not in ("self", "args", "kwargs")]


@pytest.mark.parametrize("name", OBJECTS)
def test_docstring_names_every_argument_and_result_and_has_an_example(name):
    value = OBJECTS[name]
    docstring = inspect.getdoc(value) or ""
    parts = sections(docstring)
    documented = re.findall(r"^ +\*{0,2}(\w+)(?: \([^)]*\))?:", parts.get("Args", ""), re.MULTILINE)
    missing = [parameter for parameter in parameters(value) if parameter not in documented]
    assert missing == [], f"Args of {name} leaves out {missing}"
    if inspect.isfunction(value) and value.__annotations__.get("return") not in (None, "None"):
        assert "Returns" in parts or "Yields" in parts, f"{name} returns something, but its docstring has no Returns"
    if not getattr(value, "_is_protocol", False) and not issubclass_of_exception(value):
        assert ">>>" in docstring, f"{name} has no example"


def methods() -> dict[str, Any]:
    """Return the public methods that public classes define, by name."""
    by_name = {}
    for name, value in OBJECTS.items():
        for method, attribute in vars(value).items() if inspect.isclass(value) else ():
            function = attribute.__func__ if isinstance(attribute, classmethod | staticmethod) else attribute
            if inspect.isfunction(function) and not method.startswith("_"):
                by_name[f"{name}.{method}"] = function
    return by_name


@pytest.mark.parametrize(("name", "method"), methods().items())
def test_docstring_of_a_method_names_its_arguments_or_the_method_that_it_overrides(name, method):
    docstring = inspect.getdoc(method) or ""
    assert docstring, f"{name} has no docstring"
    arguments = [argument for argument in parameters(method) if argument != "cls"]
    if arguments and "see `" not in docstring.lower():
        documented = sections(docstring).get("Args", "")
        assert [argument for argument in arguments if f"{argument}:" not in documented] == []


def issubclass_of_exception(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, BaseException)


def test_dir_shows_the_public_names_once_and_nothing_else():
    assert [name for name in dir(mb) if not name.startswith("__")] == sorted(mb.__all__)


def test_there_are_about_two_dozen_names_at_the_top():
    values = [name for name in mb.__all__ if not inspect.ismodule(getattr(mb, name))]
    assert len(values) <= 28


def test_no_two_public_things_have_one_name():
    seen: dict[str, Any] = {}
    in_each_package = {"load"}  # runs in metabridge, images in metabridge.datasets
    for package in PACKAGES:
        module = importlib.import_module(package)
        assert len(public_names(module)) == len(set(public_names(module))), package
        for name in public_names(module):
            value = getattr(module, name)
            if (inspect.isclass(value) or inspect.isfunction(value)) and name not in in_each_package:
                assert seen.setdefault(name, value) is value, f"{package}.{name} is not the {name} of another package"
