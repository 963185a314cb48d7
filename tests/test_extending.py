"""Every entry of the table in CONTRIBUTING is registered, exported and tested."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import get_args, get_type_hints

import pytest
import torch
import typer

import metabridge.cli
from cases import METHODS
from metabridge import datasets, experiments, heads, kernels, models, solvers
from metabridge.choices import head_names, model_names
from metabridge.cli import search_commands
from metabridge.cli.options import app
from metabridge.experiments import experiment_modules
from metabridge.kernels.activations import Activation
from metabridge.kernels.layers import Layer
from metabridge.learners.engine import Mode
from metabridge.learners.outer_gradients import OUTER_RULES
from metabridge.models import BUILDERS
from metabridge.models.architecture import OPERATORS
from metabridge.nas.architecture_search import SearchConfig, SearchKernel
from metabridge.nas.proxies import KernelMatrices, KernelName
from metabridge.training.config import ImageTrainingConfig, options_of

TESTS = Path(__file__).parent
PACKAGE = Path(metabridge.cli.__file__).parents[1]


@cache
def words_of(path: Path) -> set[str]:
    """Return the names, keywords, imported modules and strings in the code of a file or folder."""
    words = set()
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.Name(id=word) | ast.Attribute(attr=word) | ast.keyword(arg=word) | ast.Constant(value=word):
                    words.add(word)
                case ast.Import(names=names) | ast.ImportFrom(module=None, names=names):
                    words.update(part for name in names for part in name.name.split("."))
                case ast.ImportFrom(module=module, names=names):
                    words.update([*module.split("."), *(name.name for name in names)])
    return words


def is_used(word: str, *paths: str) -> bool:
    """Return whether the code of test files or folders contains a word, other than in comments or longer strings."""
    return any(word in words_of(TESTS / path) for path in paths)


def modules_of(package: object) -> list[str]:
    return [module.name for module in pkgutil.iter_modules(package.__path__)]


def unimported(package: ModuleType) -> set[str]:
    """Return the names of the modules of a package that none of them imports."""
    imported = set()
    for file in PACKAGE.glob(f"{package.__name__.rpartition('.')[2]}/*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                imported.update([node.module, *(f"{node.module}.{name.name}" for name in node.names)])
    return {name for name in modules_of(package) if f"{package.__name__}.{name}" not in imported}


def public_functions(module: ModuleType) -> dict[str, Callable[..., object]]:
    """Return the public functions that a module defines, by name."""
    functions = {name: value for name, value in vars(module).items() if inspect.isfunction(value)}
    return {k: v for k, v in functions.items() if v.__module__ == module.__name__ and not k.startswith("_")}


@pytest.mark.parametrize("kind", solvers.Solver.registry.values(), ids=lambda kind: kind.name)
def test_every_solver_is_exported_and_tested(kind):
    assert kind.__name__ in solvers.__all__
    assert (TESTS / "solvers" / f"test_{kind.__module__.rpartition('.')[2]}.py").exists()


@pytest.mark.parametrize("kind", heads.Head.registry.values(), ids=lambda kind: kind.name)
def test_every_head_is_exported_and_tested(kind):
    assert kind.__name__ in heads.__all__
    assert is_used(kind.__name__, "heads")


@pytest.mark.parametrize("rule", OUTER_RULES)
def test_every_outer_rule_has_a_solver_and_a_tested_method(rule):
    assert rule == "plain" or any(rule in kind.outer_rules for kind in solvers.Solver.registry.values())
    assert any(method.outer == rule for method in METHODS.values())


def test_every_outer_rule_that_a_solver_names_exists():
    assert {rule for kind in solvers.Solver.registry.values() for rule in kind.outer_rules} <= OUTER_RULES.keys()


def test_every_reader_of_a_data_set_is_registered_and_tested():
    readers = {reader.open_source for reader in datasets.DATASETS.values()}
    registered = {getattr(reader, "func", reader) for reader in readers}
    assert not unimported(datasets), "define open_source in the new module, and add it to DATASETS"
    for name in modules_of(datasets):
        module = importlib.import_module(f"metabridge.datasets.{name}")
        if hasattr(module, "open_source"):
            assert module.open_source in registered, f"add {name} to DATASETS"
            assert (TESTS / "datasets" / f"test_{name}.py").exists()


def test_every_builder_of_a_network_is_registered_and_tested():
    for name in modules_of(models):
        module = importlib.import_module(f"metabridge.models.{name}")
        for function_name, function in public_functions(module).items():
            returns_network = inspect.signature(function).return_annotation == "Network"
            # a recipe describes neither a supernet nor a user's function, which a file must not call
            if returns_network and function_name not in ("supernet", "function_network"):
                assert BUILDERS.get(function_name) is function, f"decorate {function_name} with @stores_build_arguments"
    for name in BUILDERS:
        assert is_used(name, "models"), f"no test of models uses {name}"


@pytest.mark.parametrize("name", options_of(ImageTrainingConfig))
def test_every_training_option_is_read_and_tested(name):
    source = [file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py") if file.name != "config.py"]
    assert any(re.search(rf"\.{name}\b", text) for text in source), f"nothing reads {name}"
    flags = options_of(ImageTrainingConfig)[name].metadata["flags"] or (f"--{name.replace('_', '-')}",)
    assert any(is_used(word, "training", "cli") for word in (name, *flags)), f"no test uses {name}"


def registered_commands() -> list[typer.models.CommandInfo]:
    groups = [group.typer_instance.registered_commands for group in app.registered_groups]
    return [*app.registered_commands, *(command for group in groups for command in group)]


def test_every_module_of_commands_is_imported_and_registers_its_functions():
    callbacks = [command.callback for command in registered_commands()]
    callbacks += [group.typer_instance.registered_callback.callback for group in app.registered_groups]
    registered = {(callback.__module__, callback.__name__) for callback in callbacks}
    assert not unimported(metabridge.cli), "import the new module in cli/__init__.py"
    for statement in ast.parse(inspect.getsource(metabridge.cli)).body:
        if isinstance(statement, ast.ImportFrom) and statement.module == "metabridge.cli":
            for module in (importlib.import_module(f"metabridge.cli.{name.name}") for name in statement.names):
                functions = public_functions(module)
                assert functions, f"{module.__name__} has no command"
                for name in functions:
                    assert (module.__name__, name) in registered, (
                        f"decorate {name} with @app.command(), or rename it _{name}"
                    )


def test_every_command_has_an_example_and_a_test():
    for command in registered_commands():
        name = command.name or command.callback.__name__
        assert "Example: **metabridge " in command.callback.__doc__, f"the help of {name} has no example"
        assert is_used(name, "cli", "test_cli.py", "inference"), f"no test runs {name}"


def test_every_module_of_experiments_defines_an_experiment_or_is_imported_by_one():
    defining = {module.rpartition(".")[2] for module in experiment_modules().values()}
    assert unimported(experiments) <= defining, "add a line EXPERIMENT = ... to the new module"


@pytest.mark.parametrize("name", experiment_modules())
def test_every_experiment_is_tested(name):
    module = experiment_modules()[name].rpartition(".")[2]
    assert is_used(name, "experiments") or is_used(module, "experiments")


@pytest.mark.parametrize("mode", get_args(Mode))
def test_every_mode_of_the_engine_is_tested(mode):
    assert is_used(mode, "learners/test_engine.py")


@pytest.mark.parametrize("kernel", get_args(SearchKernel))
def test_every_search_kernel_has_a_proxy_and_is_tested(kernel):
    proxy = SearchConfig(kernel).condition_number
    assert (proxy is None) == (kernel in ("none", "random"))
    if proxy is not None:
        assert proxy.kernel == kernel
        assert proxy.from_matrices(KernelMatrices(torch.eye(4), torch.eye(4)), tasks=2, queries=1).failure is None
    assert is_used(kernel, "nas")


def test_commands_offer_every_kernel_and_name_every_operator():
    assert tuple(search_commands.SearchKernel) == get_args(SearchKernel)
    assert tuple(search_commands.ScoreKernel) == get_args(KernelName)
    operators = get_type_hints(search_commands.search, include_extras=True)["operators"].__metadata__[0]
    assert all(operator in operators.help for operator in OPERATORS)


def test_every_builder_and_head_is_a_choice_on_the_command_line():
    assert {name.removesuffix(":NAME") for name in model_names()} == {
        "package.module:function",
        *(
            "the path of an architecture.json from metabridge search" if name == "cell_network" else name
            for name in BUILDERS
        ),
    }
    assert head_names() == sorted(heads.Head.registry)


@pytest.mark.parametrize(
    ("command", "names"), [("train", model_names()), ("score", model_names()), ("evaluate", head_names())]
)
def test_help_texts_name_every_choice(metabridge, command, names):
    _, printed, _ = metabridge(command, "--help")
    text = " ".join(printed.replace("│", " ").split())
    assert all(name in text for name in names)


def test_every_kernel_layer_is_exported_and_tested():
    for name in modules_of(kernels):
        module = importlib.import_module(f"metabridge.kernels.{name}")
        for kind in vars(module).values():
            is_class = inspect.isclass(kind) and not kind.__name__.startswith("_")
            is_local = is_class and kind.__module__ == module.__name__
            if is_local and kind not in (Activation, Layer) and not inspect.isabstract(kind) and _is_layer(kind):
                assert kind.__name__ in kernels.__all__, f"add {kind.__name__} to kernels/__init__.py"
                assert is_used(kind.__name__, "kernels") or is_used(kind.__name__.lower(), "kernels")


def _is_layer(kind: type) -> bool:
    members = [name for name in vars(Layer) if not name.startswith("_")]
    return not getattr(kind, "_is_protocol", False) and all(hasattr(kind, name) for name in members)
