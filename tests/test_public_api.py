from __future__ import annotations

import ast
import builtins
import doctest
import importlib
import inspect
import re
import textwrap
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import metabridge as mb
from metabridge.datasets.data_check import DatasetReport, SplitReport
from metabridge.models.architecture import random_architecture
from metabridge.nas import SearchResult
from metabridge.training import Trainer

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
    """Return `__all__` or, if a module has none, the public names that the module itself defines."""
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
    """Return the names of the arguments that a caller passes."""
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


def methods() -> dict[str, tuple[type, Any]]:
    """Return the public methods that public classes define, with their classes, by name."""
    by_name = {}
    for name, value in OBJECTS.items():
        for method, attribute in vars(value).items() if inspect.isclass(value) else ():
            function = attribute.__func__ if isinstance(attribute, classmethod | staticmethod) else attribute
            if inspect.isfunction(function) and not method.startswith("_"):
                by_name[f"{name}.{method}"] = (value, function)
    return by_name


METHODS = methods()


def method_docstring(owner: type, method: Any) -> str:
    """Return the docstring of a method, followed by that of the overridden method to which it refers."""
    docstring = inspect.getdoc(method) or ""
    bases = {base.__name__: base for base in owner.__mro__[1:]}
    for base, name in re.findall(r"see `(\w+)\.(\w+)`", docstring):
        if name == method.__name__ and base in bases:
            docstring += f"\n{inspect.getdoc(vars(bases[base])[name])}"
    return docstring


@pytest.mark.parametrize("name", METHODS)
def test_docstring_of_a_method_or_of_the_method_that_it_overrides_names_arguments_and_result(name):
    owner, method = METHODS[name]
    docstring = method_docstring(owner, method)
    assert docstring, f"{name} has no docstring"
    arguments = [argument for argument in parameters(method) if argument != "cls"]
    documented = sections(docstring).get("Args", "")
    assert [argument for argument in arguments if f"{argument}:" not in documented] == []
    if method.__annotations__.get("return") not in (None, "None"):
        one_line = docstring.startswith("Return ") and "\n" not in docstring
        assert one_line or {"Returns", "Yields"} & sections(docstring).keys(), f"{name} has no Returns"


def raises_input_error(function: Any) -> bool:
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    raised = (node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise))
    return any(isinstance(error, ast.Call) and ast.unparse(error.func) == "InputError" for error in raised)


def test_docstrings_of_functions_methods_and_classes_that_raise_an_input_error_have_raises():
    docstrings = {name: (value, inspect.getdoc(value)) for name, value in OBJECTS.items() if inspect.isfunction(value)}
    docstrings |= {name: (method, method_docstring(owner, method)) for name, (owner, method) in METHODS.items()}
    for name, value in OBJECTS.items():
        for method in ("__init__", "__post_init__", "__new__") if inspect.isclass(value) else ():
            if inspect.isfunction(vars(value).get(method)) and not method_is_generated(value, method):
                docstrings[f"{name}.{method}"] = (vars(value)[method], inspect.getdoc(value))
    raising = {name: docstring for name, (value, docstring) in docstrings.items() if raises_input_error(value)}
    assert len(raising) > 50
    assert [name for name, docstring in raising.items() if "Raises" not in sections(docstring or "")] == []


def method_is_generated(owner: type, method: str) -> bool:
    """Return whether `dataclass` or `NamedTuple` generated the method, which then has no source code."""
    return vars(owner)[method].__code__.co_filename.startswith("<")


def undefined_names(source: str) -> set[str]:
    """Return the names that a script reads but neither assigns nor imports."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {(node.id, isinstance(node.ctx, ast.Load)) for node in nodes if isinstance(node, ast.Name)}
    imported = {alias.name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}
    aliases = {alias.asname for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assigned = {name for name, is_read in names if not is_read}
    return {name for name, is_read in names if is_read} - assigned - imported - aliases - vars(builtins).keys()


TOP_LEVEL = [name for name in mb.__all__ if not inspect.ismodule(getattr(mb, name))]


@pytest.mark.parametrize("name", TOP_LEVEL)
def test_the_examples_of_top_level_names_import_all_that_they_use(name):
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(getattr(mb, name)) or "")
    assert undefined_names("".join(example.source for example in examples)) == set()


def issubclass_of_exception(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, BaseException)


def test_dir_lists_exactly_the_names_that_resolve_to_objects_of_the_library():
    names = mb.__dir__()
    assert len(names) == len(set(names))
    assert [name for name in names if name.startswith("_")] == []
    assert all(getattr(mb, name) is not None for name in names)
    api = importlib.import_module("metabridge.api")
    imported = {name for name, value in vars(api).items() if origin(value).startswith("metabridge.") and name[0] != "_"}
    assert imported - set(names) == set()


def origin(value: Any) -> str:
    """Return the name of a module, or of the module that defines a class or function."""
    return value.__name__ if inspect.ismodule(value) else str(getattr(value, "__module__", ""))


def test_the_top_level_has_at_most_28_names():
    assert len(TOP_LEVEL) <= 28


def test_no_two_public_objects_have_the_same_name():
    seen: dict[str, Any] = {}
    allowed_duplicates = {"load"}  # metabridge.load loads runs, metabridge.datasets.load loads images
    for package in PACKAGES:
        module = importlib.import_module(package)
        assert len(public_names(module)) == len(set(public_names(module))), package
        for name in public_names(module):
            value = getattr(module, name)
            if (inspect.isclass(value) or inspect.isfunction(value)) and name not in allowed_duplicates:
                assert seen.setdefault(name, value) is value, f"{package}.{name} is not the {name} of another package"


@pytest.fixture(scope="module")
def displayed_objects(glyphs) -> dict[str, Any]:
    """Return objects that users display."""
    net, maml, sinusoids = mb.models.conv4(), mb.method("maml"), mb.environments.Sinusoid()
    run = mb.fit(mb.models.mlp(1, 1), maml, sinusoids, iterations=1, progress=False)
    x, labels = torch.randn(1, 50, 16), torch.arange(5).repeat(10)[None]
    hard_easy = mb.environments.HardEasy(rho_hard=0.1, rho_easy=1.0, R=5.0, r_hard=0.5, r_easy=0.5)
    architecture = random_architecture(torch.Generator().manual_seed(0))
    wrapped = nn.Sequential(nn.Flatten(), mb.models.mlp(4, 2))
    return {
        "images": glyphs,
        "image tasks": glyphs.tasks("train"),
        "image batches": glyphs.batches("train"),
        "episodes": sinusoids.sample(2, torch.Generator()),
        "network": net,
        "network built by hand": mb.models.Network(nn.Linear(4, 8), nn.Linear(8, 5)),
        "engine": mb.Engine(maml, net),
        "run": run,
        "model": mb.Model(run.method, run.net, run.params),
        "adapted": mb.adapt(run.method, run.net, run.params, torch.randn(3, 1), torch.randn(3, 1)),
        "score": mb.evaluate(run, sinusoids, tasks=2),
        "trainer": Trainer(net, maml, glyphs.tasks("train"), mb.TrainingConfig()),
        "linear head": mb.heads.LogisticRegression().fit(x, labels, outputs=5),
        "pairwise head": mb.heads.SVM(loss="hinge").fit(x, labels, outputs=5),
        "problem": mb.solvers.Problem(lambda params, x: x, mb.task_loss, x[0], labels[0]),
        "empirical kernel": mb.kernels.EmpiricalKernel(mb.models.mlp(4, 2)),
        "empirical kernel of a module": mb.kernels.EmpiricalKernel(wrapped),
        "analytic kernel": mb.kernels.conv4_kernel(),
        "diagnosis": mb.diagnose(mb.environments.LinearTasks(hard_easy.landscape, shots=50, queries=50), tasks=50),
        "search result": SearchResult(architecture, seconds=12.5, evaluated=1533, failed=0),
        "data report": DatasetReport(
            "folder", "<folders>", (SplitReport("test", 1, 9, 4, 4.5, 5, "a < b"),), {}, {}, (), (), ("oak",), ()
        ),
    }


def test_objects_have_a_short_representation_on_one_line(displayed_objects):
    for name, value in displayed_objects.items():
        text = repr(value)
        assert text.startswith(type(value).__name__), name
        assert "\n" not in text, name
        assert " at 0x" not in text, name
        assert name == "data report" or len(text) < 200, name


def test_the_representation_names_the_method_and_the_network(displayed_objects):
    assert repr(displayed_objects["network"]) == "Network(conv4, 32,773 parameters, 5 outputs)"
    assert repr(displayed_objects["network built by hand"]) == "Network(85 parameters, 5 outputs)"
    assert repr(displayed_objects["run"]) == "Run(maml, mlp, 1 iterations, finished)"
    assert repr(displayed_objects["adapted"]) == "Adapted(maml, mlp)"
    assert repr(displayed_objects["trainer"]) == "Trainer(maml, conv4, 0 of 1000 iterations)"
    assert repr(displayed_objects["linear head"]) == "LinearHead(weight: float32 of shape (1, 5, 16), normalize=True)"


# a part of the HTML table of each object
TABLES = {
    "image batches": "<td>64</td><td>709</td>",
    "score": "<th>squared error</th><th>tasks</th></tr><tr><td>",
    "diagnosis": "<td>recommendation</td><td>Pre-train w",
    "search result": "<td>networks evaluated</td><td>1,533</td>",
    "data report": "folder: &lt;folders&gt;; 0 unreadable images, 0 groups of duplicates, 1 empty classes</caption>",
}


@pytest.mark.parametrize("name", TABLES)
def test_notebooks_show_results_as_tables(displayed_objects, name):
    html = displayed_objects[name]._repr_html_()
    assert html.startswith("<table><caption>")
    assert html.endswith("</table>")
    assert TABLES[name] in html
    assert "<folders>" not in html
