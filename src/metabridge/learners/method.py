"""The taxonomy: every learner is what it adapts × how × how the outer gradient sees it.

A method is data. The table of the papers is the table `PRESETS` below.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from torch import Tensor

from metabridge.errors import InputError, check_positive
from metabridge.learners import heads
from metabridge.learners.inner_solvers import GradientDescent, Loss, Proximal, Ridge, Solver, SupportVectors, task_loss
from metabridge.models.network import Params

Adapts = Literal["all", "head", "none"]
Outer = Literal["exact", "first-order", "implicit", "displacement", "plain"]
TestHead = heads.LogisticRegression | heads.SVM | heads.Ridge | heads.NearestCentroid
TESTS = (GradientDescent, Proximal, *get_args(TestHead))
Head = Literal["learned", "frozen", "solved", "task-rows", "all-rows"]

# Which outer gradients a solver admits.
ADMITS: dict[type, tuple[str, ...]] = {
    GradientDescent: ("exact", "first-order", "displacement"),
    Proximal: ("exact", "first-order", "implicit", "displacement"),
    Ridge: ("exact", "first-order"),
    SupportVectors: ("implicit", "first-order"),
    type(None): ("plain",),
}


@dataclass(frozen=True)
class Method:
    """One point of the taxonomy.

    - `adapts`: what moves in the inner loop.
    - `inner`: how the inner problem is solved; None when nothing adapts during training.
    - `outer`: how the outer gradient treats the inner solve: "exact" differentiates through it,
      "first-order" takes its Jacobian for the identity, "implicit" solves the optimality conditions'
      linear system, "displacement" is θ − θ' (Reptile; times λ for the proximal problem), and
      "plain" has no inner solve to treat.
    - `head`: "learned", a shared initial head; "frozen", the same but not trained; "solved", found
      anew from every support set; "task-rows", persistent rows of which a task uses its classes'
      (MTL); "all-rows", one classifier over all training classes (RFS).
    - `split`: whether adaptation and judgement use different sets; without it both use all points.
    - `test`: how to adapt at test time, where that differs from `inner`.
    - `regulariser`: a term in the parameters, added to the mean loss.

    >>> Method(adapts="head", inner=Proximal(strength=1.0), outer="implicit").head
    'learned'
    """

    adapts: Adapts
    inner: Solver | None
    outer: Outer = "exact"
    head: Head = "learned"
    split: bool = True
    loss: Loss = task_loss
    test: GradientDescent | Proximal | TestHead | None = None
    regulariser: Callable[[Params], Tensor] | None = None

    def __post_init__(self) -> None:
        for name, kinds in (("adapts", Adapts), ("head", Head)):
            if getattr(self, name) not in get_args(kinds):
                wanted = ", ".join(map(repr, get_args(kinds)))
                raise InputError(f"{name} is {getattr(self, name)!r}, but must be one of {wanted}.")
        if not isinstance(self.split, bool):
            raise InputError(f"split is {self.split!r}, but must be true or false.")
        for name in ("loss", "regulariser"):
            value = getattr(self, name)
            if not (callable(value) or (value is None and name == "regulariser")):
                raise InputError(f"{name} is {value!r}, but must be a function.")
        if self.test is not None and not isinstance(self.test, TESTS):
            wanted = ", ".join(kind.__name__ for kind in TESTS)
            raise InputError(f"test is {self.test!r}, but must be one of {wanted}, or a head's name, such as 'svm'.")
        if self.inner is not None and not isinstance(self.inner, get_args(Solver)):
            wanted = ", ".join(f"{kind.__name__}()" for kind in get_args(Solver))
            raise InputError(f"inner is {self.inner!r}, but must be one of {wanted}, or None.")
        solver = "no inner solver" if self.inner is None else type(self.inner).__name__
        if (self.adapts == "none") != (self.inner is None):
            raise InputError(
                f"adapts is {self.adapts!r} with {solver}, which contradict each other. "
                "Give an inner solver exactly when something adapts."
            )
        if self.outer not in ADMITS[type(self.inner)]:
            raise InputError(
                f"outer is {self.outer!r}, which {solver} does not admit. "
                f"Use one of {', '.join(map(repr, ADMITS[type(self.inner)]))}."
            )
        closed = isinstance(self.inner, Ridge | SupportVectors)
        if closed and self.adapts != "head":
            raise InputError(f"{solver} solves a linear head, but adapts is {self.adapts!r}. Use adapts='head'.")
        if closed != (self.head == "solved"):
            raise InputError(
                f"head is {self.head!r} with {solver}, but a head is 'solved' exactly by Ridge and SupportVectors."
            )
        if self.head in ("task-rows", "all-rows") and self.inner is not None:
            raise InputError(f"head is {self.head!r}, whose rows are trained jointly. Use adapts='none', inner=None.")
        if self.head == "frozen" and self.inner is None:
            raise InputError("head is 'frozen', but nothing adapts it. Use head='learned', or let adapts='head'.")
        if self.outer == "displacement" and self.adapts != "all":
            raise InputError("outer is 'displacement', which leaves what does not adapt untrained. Use adapts='all'.")
        if self.head in ("task-rows", "all-rows") and isinstance(self.test, GradientDescent | Proximal):
            raise InputError(
                f"test is {type(self.test).__name__}, which starts from a shared head, but head is {self.head!r}. "
                "Use a head that is solved, such as LogisticRegression()."
            )
        rates = getattr(self.inner, "rates", "fixed")
        if rates != "fixed" and self.outer == "displacement":
            raise InputError(
                f"rates is {rates!r}, but outer is 'displacement', which learns no rates. Use rates='fixed'."
            )
        if getattr(self.test, "rates", "fixed") not in ("fixed", rates):
            raise InputError(
                f"test has the rates {getattr(self.test, 'rates', None)!r}, but those in training are {rates!r}. Use "
                "rates='fixed' at test, or the same in both."
            )
        if self.test is None and self.inner is None:
            raise InputError("test is None, but nothing adapts in training either. Say how to adapt at test time.")


def balance(params: Params) -> Tensor:
    """⅛‖BᵀB − WWᵀ‖²_F of a linear net with body B and the heads W (D eq. 12)."""
    body = [value for name, value in params.items() if name.startswith("features.") and name.endswith("weight")]
    if len(body) != 1 or body[0].ndim != 2:
        raise InputError(
            "Burer–Monteiro factorises a linear net with one weight matrix as its features, but this net has "
            f"{len(body)}. Use mlp(inputs, outputs, depth=1, activation='linear', bias=False)."
        )
    gap = body[0] @ body[0].mT - params["heads.weight"].mT @ params["heads.weight"]
    return gap.square().sum() / 8


_LOGISTIC = heads.LogisticRegression(penalty=0.33, normalise=True)

PRESETS: dict[str, Method] = {
    "maml": Method("all", GradientDescent(steps=5, lr=0.01)),
    "fo-maml": Method("all", GradientDescent(steps=5, lr=0.01), outer="first-order"),
    "anil": Method("head", GradientDescent(steps=5, lr=0.1)),
    "fo-anil": Method("head", GradientDescent(steps=5, lr=0.1), outer="first-order"),
    "anil-frozen": Method("head", GradientDescent(steps=5, lr=0.1), head="frozen"),
    "reptile": Method("all", GradientDescent(steps=5, lr=0.01), outer="displacement", split=False),
    "imaml": Method("all", Proximal(strength=2.0, steps=16, lr=0.05, cg_steps=5), outer="implicit"),
    "minibatch-prox": Method("all", Proximal(strength=1.0, steps=5, lr=0.05), outer="displacement", split=False),
    "r2d2": Method("head", Ridge(), head="solved"),
    "metaoptnet": Method("head", SupportVectors(C=0.1), outer="implicit", head="solved"),
    "mtl": Method("none", None, outer="plain", head="task-rows", split=False, test=_LOGISTIC),
    "nal": Method("none", None, outer="plain", split=False, test=GradientDescent(steps=10, lr=0.01)),
    "rfs": Method("none", None, outer="plain", head="all-rows", split=False, test=_LOGISTIC),
    "burer-monteiro": Method(
        "none", None, outer="plain", head="task-rows", split=False, test=heads.Ridge(), regulariser=balance
    ),
}


def named_head(name: str, penalty: float | None = None) -> TestHead:
    """Return a test-time head by name, on unit-norm features: "logistic", "svm", "ridge" or "centroid".

    >>> named_head("svm", penalty=0.5)
    SVM(C=2.0, loss='squared-hinge', normalise=True)
    """
    if name == "centroid" and penalty is None:
        return heads.NearestCentroid(normalise=True)
    made: dict[str, Callable[[float], TestHead]] = {
        "logistic": lambda penalty: replace(_LOGISTIC, penalty=penalty),
        "svm": lambda penalty: heads.SVM(C=1 / penalty),
        "ridge": lambda penalty: heads.Ridge(penalty, normalise=True),
    }
    if name not in made:
        raise InputError(
            f"head is {name!r} with penalty {penalty}, but must be logistic, svm, ridge, or centroid without a penalty."
        )
    if penalty is None:
        penalty = _LOGISTIC.penalty if name == "logistic" else 1.0
    check_positive("penalty", penalty)
    return made[name](penalty)


def method(name: str, **options: object) -> Method:
    """Return a method of the taxonomy by name, with options of its inner solver or of the method changed.

    >>> method("maml", steps=3, lr=0.4).inner
    GradientDescent(steps=3, lr=0.4, rates='fixed')
    >>> method("anil", split=False).split
    False
    """
    if name not in PRESETS:
        raise InputError(f"There is no method {name!r}. The methods are {', '.join(PRESETS)}.")
    preset = PRESETS[name]
    own = {field.name for field in fields(Method)}
    # A method that adapts at test time alone takes the options of that adaptation.
    place = "inner" if preset.inner is not None else "test"
    if isinstance(options.get("test"), str):
        options["test"] = named_head(str(options["test"]))
    solver: Any = options.get(place) or getattr(preset, place)
    kinds: tuple[type[Any], ...] = (*get_args(Solver), *TESTS)
    if type(solver) not in kinds:
        raise InputError(f"{place} is {solver!r}, but must be a solver such as GradientDescent().")
    inner = {field.name for field in fields(solver)}
    for option in options:
        if option not in own | inner:
            raise InputError(
                f"{name} has no option {option!r}. "
                f"Its options are {', '.join(sorted(inner))}, and those of every method: {', '.join(sorted(own))}."
            )
    solver_options = {key: value for key, value in options.items() if key in inner}
    changes = {key: value for key, value in options.items() if key in own}
    if solver_options:
        changes[place] = replace(solver, **solver_options)
    return replace(preset, **changes)  # type: ignore[arg-type]
