"""Tests that run for every registered solver and head, including new ones."""

from __future__ import annotations

import inspect
import json
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import ClassVar

import pytest

from metabridge import heads, solvers
from metabridge.heads import Head
from metabridge.registry import Registered
from metabridge.solvers import Solver

CLASSES = {f"{root.__name__} {name}": kind for root in (Solver, Head) for name, kind in root.registry.items()}
every_class = pytest.mark.parametrize("kind", CLASSES.values(), ids=CLASSES.keys())


@every_class
def test_a_class_is_a_frozen_dataclass_with_defaults_in_a_module_of_its_own(kind):
    assert is_dataclass(kind)
    assert kind.__dataclass_params__.frozen
    assert all(field.default is not MISSING or field.default_factory is not MISSING for field in fields(kind))
    assert [other for other in CLASSES.values() if other.__module__ == kind.__module__] == [kind]


@every_class
def test_a_class_is_exported_by_its_package(kind):
    package = heads if issubclass(kind, Head) else solvers
    assert getattr(package, kind.__name__) is kind
    assert kind.__name__ in package.__all__


@every_class
def test_a_class_has_a_docstring_with_all_fields_and_an_example(kind):
    text = inspect.getdoc(kind)
    assert ">>> " in text
    for field in fields(kind):
        assert f"\n    {field.name}: " in text


@every_class
def test_an_object_is_loaded_from_json_as_it_was_stored(kind):
    root = Head if issubclass(kind, Head) else Solver
    stored = json.loads(json.dumps(kind().to_dict()))
    assert stored["solver"] == kind.stored_name
    assert root.from_dict(stored) == kind()


@every_class
def test_a_summary_starts_with_the_label_and_contains_the_numbers(kind):
    summary = kind().summary()
    assert summary.startswith(kind.label)
    for field in fields(kind):
        if isinstance(field.default, float):
            assert f"{field.name.replace('_', ' ')} {field.default:g}" in summary


def test_names_that_version_0_1_0_stored_still_load():
    assert {"GradientDescent", "Proximal", "Ridge", "SupportVectors"} <= Solver.by_stored_name().keys()
    assert {"LogisticRegression", "SVM", "Ridge", "NearestCentroid"} <= Head.by_stored_name().keys()
    assert Solver.from_dict({"solver": "Ridge", "penalty": 2.0, "scale": 5.0}) == solvers.RidgeSolver(2.0)
    assert Head.from_dict({"solver": "Ridge", "penalty": 2.0, "normalize": True}) == heads.RidgeClassifier(2.0, True)


class Pet(Registered, abstract=True):
    registry: ClassVar[dict[str, type[Pet]]] = {}
    required: ClassVar[tuple[str, ...]] = ("name", "label", "legs")
    legs: ClassVar[int]


@dataclass(frozen=True)
class Cat(Pet):
    name: ClassVar[str] = "cat"
    label: ClassVar[str] = "house cat"
    legs: ClassVar[int] = 4

    age: int = 1
    indoors: bool = True


def test_a_subclass_is_registered_and_described():
    assert Pet.registry == {"cat": Cat}
    assert Cat(3).to_dict() == {"solver": "Cat", "age": 3, "indoors": True}
    assert Cat(3).summary() == "house cat: age 3"
    assert Cat(3, indoors=False).summary() == "house cat: age 3, indoors no"


def test_a_subclass_without_a_required_attribute_is_refused():
    with pytest.raises(TypeError, match="Bird must set the class attribute 'legs'"):
        type("Bird", (Pet,), {"name": "bird", "label": "bird"})
    assert "bird" not in Pet.registry


def test_two_subclasses_with_the_same_name_are_refused():
    with pytest.raises(TypeError, match="Tomcat and Cat have the same name"):
        type("Tomcat", (Pet,), {"name": "cat", "label": "tomcat", "legs": 4})
    with pytest.raises(TypeError, match="Lion and Cat have the same name"):
        type("Lion", (Pet,), {"name": "lion", "label": "lion", "legs": 4, "stored_name": "Cat"})
