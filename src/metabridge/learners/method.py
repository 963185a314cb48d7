"""The taxonomy of methods: what adapts, how the inner problem is solved, and how the outer gradient treats the solve.

A method is a dataclass of these choices. `PRESETS` contains the methods of the papers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from types import FunctionType
from typing import Any, Literal, get_args

from torch import Tensor

from metabridge.errors import InputError
from metabridge.heads import Head, LogisticRegression, RidgeClassifier, create_head
from metabridge.learners.outer_gradients import OUTER_RULES
from metabridge.models.network import Params
from metabridge.solvers import GradientDescent, Loss, Proximal, RidgeSolver, Solver, SVMSolver, task_loss

Adapts = Literal["all", "head", "none"]
TrainingHead = Literal["learned", "frozen", "solved", "task-rows", "all-rows"]
CLASS_ROW_HEADS: tuple[TrainingHead, ...] = ("task-rows", "all-rows")  # training heads with one row per training class


@dataclass(frozen=True, repr=False)
class Method:
    """A few-shot learning method: what adapts, how the inner problem is solved, and how the outer gradient treats it.

    Args:
        adapts: The parameters that the inner loop adapts: "all", the "head" only, or "none".
        inner: The inner solver, or None if nothing adapts during training.
        outer: How the outer gradient treats the inner solve, a name in `OUTER_RULES`: "exact" differentiates through
            it, "first-order" differentiates through it, treating inner gradients and support features as constants,
            "implicit" solves the linear system of its optimality conditions, "displacement" is θ − θ' for the initial
            parameters θ and the adapted ones θ' (Reptile; multiplied by the strength of a proximal solver), and "plain"
            is the gradient of the loss without an inner solve.
        training_head: The head during training: "learned", a shared initial head that is trained; "frozen", a shared
            initial head that is not trained (without an inner solver, nothing is trained at all, as in the preset
            "frozen"); "solved", solved on each support set; "task-rows", one row per training
            class, where a task uses the rows of its classes (multi-task learning); "all-rows", one classifier over all
            training classes (the preset "rfs").
        split: Whether the loss of a task is computed on a query set, separate from its support set. If false, both
            sets contain all examples of the task.
        loss: The loss, a function of predictions and targets.
        test_solver: The solver or head that adapts at test time (default: `inner`).
        regularizer: A function of the parameters whose value is added to the mean loss.

    Raises:
        InputError: If the choices contradict each other; the message names valid choices.

    >>> import metabridge as mb
    >>> mb.Method(adapts="head", inner=mb.solvers.Proximal(strength=1.0), outer="implicit").training_head
    'learned'
    """

    adapts: Adapts
    inner: Solver | None
    outer: str = "exact"
    training_head: TrainingHead = "learned"
    split: bool = True
    loss: Loss = task_loss
    test_solver: Solver | Head | None = None
    regularizer: Callable[[Params], Tensor] | None = None

    def __post_init__(self) -> None:
        self._check_types()
        self._check_inner()
        self._check_outer()
        self._check_training_head()
        self._check_test_solver()

    def __repr__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.loss is task_loss:
            del values["loss"]
        return f"Method({', '.join(f'{name}={_name_or_repr(value)}' for name, value in values.items())})"

    def _check_types(self) -> None:
        for name, choices in (("adapts", Adapts), ("training_head", TrainingHead)):
            if getattr(self, name) not in get_args(choices):
                expected = ", ".join(map(repr, get_args(choices)))
                raise InputError(f"{name} is {getattr(self, name)!r}, but must be one of {expected}.")
        if not isinstance(self.split, bool):
            raise InputError(f"split is {self.split!r}, but must be true or false.")
        for name in ("loss", "regularizer"):
            value = getattr(self, name)
            if not (callable(value) or (value is None and name == "regularizer")):
                raise InputError(f"{name} is {value!r}, but must be a function.")
        if self.test_solver is not None and not isinstance(self.test_solver, test_solver_types()):
            names = ", ".join(f"{cls.__name__}()" for cls in test_solver_types())
            raise InputError(f"test_solver is {self.test_solver!r}, but must be one of {names}, or None.")
        inner: object = self.inner
        if not isinstance(inner, Solver | None):
            names = ", ".join(f"{cls.__name__}()" for cls in Solver.registry.values())
            raise InputError(f"inner is {inner!r}, but must be one of {names}, or None.")

    def _check_inner(self) -> None:
        if (self.adapts == "none") != (self.inner is None):
            raise InputError(
                f"adapts is {self.adapts!r}, but inner is {_name(self.inner)}. Use inner=None if and only if "
                "adapts='none'."
            )
        solves_exactly = self.inner is not None and self.inner.solves_exactly
        if solves_exactly and self.adapts != "head":
            raise InputError(
                f"{_name(self.inner)} solves a linear head, but adapts is {self.adapts!r}. Use adapts='head'."
            )
        if solves_exactly != (self.training_head == "solved"):
            names = ", ".join(cls.__name__ for cls in Solver.registry.values() if cls.solves_exactly)
            raise InputError(
                f"training_head is {self.training_head!r}, but inner is {_name(self.inner)}. Use "
                f"training_head='solved' with the solvers that compute an optimal head ({names}), and only with them."
            )

    def _check_outer(self) -> None:
        supported = ("plain",) if self.inner is None else self.inner.outer_rules
        if self.outer not in supported:
            if self.inner is None:
                raise InputError(f"outer is {self.outer!r}, but there is no inner solver. Use outer='plain'.")
            raise InputError(
                f"outer is {self.outer!r}, which {_name(self.inner)} does not support. "
                f"Use one of {', '.join(map(repr, supported))}."
            )
        rule = OUTER_RULES[self.outer]
        if rule.all_layers and self.adapts != "all":
            raise InputError(f"outer is {self.outer!r}, which trains only adapted parameters. Use adapts='all'.")
        if self.inner is not None and self.inner.rates != "fixed" and not rule.learns_solver_params:
            raise InputError(
                f"rates is {self.inner.rates!r}, but outer is {self.outer!r}, which learns no rates. Use rates='fixed'."
            )

    def _check_training_head(self) -> None:
        if self.training_head in CLASS_ROW_HEADS and self.inner is not None:
            raise InputError(
                f"training_head is {self.training_head!r}, whose rows are trained jointly. Use adapts='none', "
                "inner=None."
            )
        if self.training_head == "frozen" and self.inner is None and not isinstance(self.test_solver, Head):
            raise InputError(
                "training_head is 'frozen' without an inner solver, so nothing is trained, and test_solver is "
                f"{_name(self.test_solver)}. Set test_solver to a head such as LogisticRegression(), or use "
                "training_head='learned', or adapts='head' with an inner solver."
            )

    def _check_test_solver(self) -> None:
        if self.test_solver is None and self.inner is None:
            raise InputError(
                "test_solver is None, but nothing adapts in training either. Set test_solver to a solver or a head."
            )
        if not isinstance(self.test_solver, Solver):
            return
        if self.training_head in CLASS_ROW_HEADS:
            raise InputError(
                f"test_solver is {_name(self.test_solver)}, which starts from a shared head, but training_head is "
                f"{self.training_head!r}. Use a test-time head, such as LogisticRegression()."
            )
        rates = "fixed" if self.inner is None else self.inner.rates
        if self.test_solver.rates not in ("fixed", rates):
            raise InputError(
                f"test_solver has rates={self.test_solver.rates!r}, but training uses rates={rates!r}. Use "
                "rates='fixed' at test time, or the same rates in both."
            )

    @property
    def trains(self) -> bool:
        """Whether the outer loop trains anything; if not, a head is fitted on fixed features at test time."""
        return self.inner is not None or self.training_head != "frozen"


def test_solver_types() -> tuple[type[Solver] | type[Head], ...]:
    """Return the classes that `test_solver` accepts: solvers that start from a shared head, and test-time heads."""
    return (*(cls for cls in Solver.registry.values() if not cls.solves_exactly), *Head.registry.values())


def method_name(method: Method) -> str:
    """Return the name of the preset that equals a method; if there is none, a text such as "adapts='head'"."""
    names = (name for name, preset in PRESETS.items() if preset == method)
    return next(names, f"adapts={method.adapts!r}")


def balancing_regularizer(params: Params) -> Tensor:
    """Return ⅛‖BᵀB − WᵀW‖²_F of a linear network with features Bᵀx and head rows W (Yüksel et al. 2023, eq. 12).

    Raises:
        InputError: If the features are not a single weight matrix.

    >>> import torch
    >>> balancing_regularizer({"features.1.weight": torch.eye(2), "heads.weight": torch.zeros(3, 2)})
    tensor(0.2500)
    """
    body = [value for name, value in params.items() if name.startswith("features.") and name.endswith("weight")]
    if len(body) != 1 or body[0].ndim != 2:
        shapes = ", ".join(str(tuple(value.shape)) for value in body) or "none"
        raise InputError(
            "Burer–Monteiro needs a linear network with one weight matrix as features, but the weights of its features "
            f"are {shapes}. Use mlp(inputs, outputs, depth=1, activation='linear', bias=False)."
        )
    imbalance = body[0] @ body[0].mT - params["heads.weight"].mT @ params["heads.weight"]
    return imbalance.square().sum() / 8


_LOGISTIC = LogisticRegression(penalty=0.33, normalize=True)

PRESETS: dict[str, Method] = {
    "maml": Method("all", GradientDescent(steps=5, lr=0.01)),
    "fo-maml": Method("all", GradientDescent(steps=5, lr=0.01), outer="first-order"),
    "anil": Method("head", GradientDescent(steps=5, lr=0.1)),
    "fo-anil": Method("head", GradientDescent(steps=5, lr=0.1), outer="first-order"),
    "anil-frozen": Method("head", GradientDescent(steps=5, lr=0.1), training_head="frozen"),
    "reptile": Method("all", GradientDescent(steps=5, lr=0.01), outer="displacement", split=False),
    "imaml": Method("all", Proximal(strength=2.0, steps=16, lr=0.05, cg_steps=5), outer="implicit"),
    "minibatch-prox": Method("all", Proximal(strength=1.0, steps=5, lr=0.05), outer="displacement", split=False),
    "r2d2": Method("head", RidgeSolver(), training_head="solved"),
    "metaoptnet": Method("head", SVMSolver(C=0.1), outer="implicit", training_head="solved"),
    # multi-task learning
    "mtl": Method("none", None, outer="plain", training_head="task-rows", split=False, test_solver=_LOGISTIC),
    # non-adaptive learning: training without adaptation
    "nal": Method("none", None, outer="plain", split=False, test_solver=GradientDescent(steps=10, lr=0.01)),
    # Rethinking Few-Shot Image Classification (Tian et al. 2020)
    "rfs": Method("none", None, outer="plain", training_head="all-rows", split=False, test_solver=_LOGISTIC),
    # no training at all: a head on the features of a pretrained network
    "frozen": Method("none", None, outer="plain", training_head="frozen", split=False, test_solver=_LOGISTIC),
    "burer-monteiro": Method(
        "none",
        None,
        outer="plain",
        training_head="task-rows",
        split=False,
        test_solver=RidgeClassifier(),
        regularizer=balancing_regularizer,
    ),
}


def method(name: str, **options: object) -> Method:
    """Return a method of `PRESETS`, with some options changed.

    Args:
        name: The name of the preset.
        **options: Fields of `Method` or of its inner solver (of its `test_solver` for methods that adapt only at test
            time). `inner` may be the name of a solver, and `test_solver` the name of a test-time head or a solver.

    Returns:
        The method.

    Raises:
        InputError: If there is no such method or option, or options contradict each other.

    >>> import metabridge as mb
    >>> mb.method("maml", steps=3, lr=0.4).inner
    GradientDescent(steps=3, lr=0.4, rates='fixed')
    >>> mb.method("maml", inner="proximal", steps=3).inner.steps
    3
    >>> mb.method("anil", test_solver="svm").test_solver
    SVM(C=1.0, loss='squared-hinge', normalize=True)
    """
    if name not in PRESETS:
        raise InputError(f"method is {name!r}, but must be one of {', '.join(PRESETS)}.")
    preset = PRESETS[name]
    method_fields = {field.name for field in fields(Method)}
    for field_name, types in (("inner", Solver.registry.values()), ("test_solver", test_solver_types())):
        if isinstance(value := options.get(field_name), str):
            options[field_name] = _create(field_name, value, types)
    solver_field = "test_solver" if options.get("inner", preset.inner) is None else "inner"
    solver: Any = options.get(solver_field) or getattr(preset, solver_field)
    if not isinstance(solver, Solver | Head):
        raise InputError(f"{solver_field} is {solver!r}, but must be a solver such as GradientDescent().")
    solver_fields = {field.name for field in fields(solver)}  # type: ignore[arg-type]
    for option in options:
        if option not in method_fields | solver_fields:
            raise InputError(
                f"{name} has no option {option!r}. Its options are {', '.join(sorted(solver_fields))}, and the options "
                f"of every method: {', '.join(sorted(method_fields))}."
            )
    # `loss` is a function in a method, and a name in the SVM head
    solver_options = {key: value for key, value in options.items() if key in solver_fields and not callable(value)}
    changes = {key: value for key, value in options.items() if key not in solver_options}
    if solver_options:
        changes[solver_field] = replace(solver, **solver_options)  # type: ignore[type-var]
    return replace(preset, **changes)  # type: ignore[arg-type]


def _create(field_name: str, name: str, types: Iterable[type[Solver] | type[Head]]) -> Solver | Head:
    """Return the solver or head with this name, with its default options."""
    type_by_name = {cls.name: cls for cls in types}
    if name not in type_by_name:
        raise InputError(f"{field_name} is {name!r}, but must be one of {', '.join(sorted(type_by_name))}.")
    cls = type_by_name[name]
    return create_head(name) if issubclass(cls, Head) else cls()


def _name_or_repr(value: object) -> str:
    return value.__name__ if isinstance(value, FunctionType) else repr(value)


def _name(solver: Solver | None) -> str:
    return "None" if solver is None else type(solver).__name__
