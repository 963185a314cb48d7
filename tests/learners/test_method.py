from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cases import METHODS, TESTED_ELSEWHERE
from metabridge import InputError, Method, adapt, method, parameters
from metabridge.heads import SVM, LogisticRegression
from metabridge.learners import PRESETS
from metabridge.learners.method import balancing_regularizer, method_name
from metabridge.models import mlp
from metabridge.solvers import GradientDescent, Proximal, RidgeSolver, Solver, SVMSolver

EXACT_SOLVER_NAMES = ", ".join(cls.__name__ for cls in Solver.registry.values() if cls.solves_exactly)
GD, TEST_SOLVER = GradientDescent(), GradientDescent(steps=2)


def test_a_preset_is_found_by_its_name():
    for name in PRESETS:
        assert method(name) == PRESETS[name]


def test_solvers_and_heads_are_found_by_their_names():
    assert method("maml", inner="proximal", outer="implicit", steps=3).inner == Proximal(steps=3)
    assert method("r2d2", inner="svm", outer="implicit").inner == SVMSolver()
    assert method("mtl", test_solver="svm").test_solver == SVM(normalize=True)
    assert method("anil", test_solver="gradient-descent").test_solver == GD


def test_the_name_of_a_method_is_its_preset_or_what_it_adapts():
    assert all(method_name(method(name)) == name for name in PRESETS)
    assert method_name(method("anil", steps=2)) == "adapts='head'"


def test_a_loss_is_an_option_of_the_svm_if_it_is_a_name_and_of_the_method_if_it_is_a_function():
    learner = method("mtl", test_solver="svm", loss="hinge")
    assert (learner.test_solver, learner.loss) == (SVM(loss="hinge", normalize=True), method("mtl").loss)
    learner = method("mtl", test_solver="svm", loss=torch.nn.functional.mse_loss)
    assert (learner.test_solver, learner.loss) == (SVM(normalize=True), torch.nn.functional.mse_loss)


def test_options_change_the_test_solver_if_there_is_no_inner_solver():
    options = {"adapts": "none", "inner": None, "outer": "plain", "test_solver": "gradient-descent"}
    learner = method("maml", **options, steps=3)
    assert (learner.inner, learner.test_solver) == (None, GradientDescent(steps=3))


def test_every_preset_is_in_the_methods_that_other_tests_share():
    assert PRESETS.keys() - METHODS.keys() == TESTED_ELSEWHERE


def test_options_change_the_solver_or_the_method():
    learner = method("maml", steps=2, lr=0.3, split=False)
    assert learner.inner == GradientDescent(steps=2, lr=0.3)
    assert not learner.split
    assert method("nal", steps=1).test_solver == GradientDescent(steps=1, lr=0.01)
    assert method("mtl", penalty=2.0).test_solver == LogisticRegression(penalty=2.0, normalize=True)
    assert method("metaoptnet", C=1.0).inner == SVMSolver(C=1.0)
    assert method("maml", inner=Proximal(), steps=3).inner == Proximal(steps=3)
    assert method("mtl", test_solver=TEST_SOLVER, lr=0.3, training_head="learned").test_solver == GradientDescent(
        steps=2, lr=0.3
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: method("mamel"), "method is 'mamel', but must be one of maml, fo-maml, anil"),
        (lambda: method("maml", rate=0.1), "maml has no option 'rate'. Its options are lr, rates, steps"),
        (lambda: method("maml", steps=-1), "steps is -1"),
        (lambda: method("maml", lr=0.0), "lr is 0.0, but must be a positive number"),
        (lambda: method("maml", lr={"head": float("nan")}), "lr is nan"),
        (lambda: method("maml", rates="all"), "rates is 'all'"),
        (lambda: method("imaml", strength=-1.0), "strength is -1.0"),
        (lambda: method("imaml", tolerance=-1.0), "tolerance is -1.0"),
        (lambda: Method("body", GD), "adapts is 'body'"),
        (lambda: Method("none", GD), "adapts is 'none', but inner is GradientDescent"),
        (lambda: Method("all", None, outer="plain"), "adapts is 'all', but inner is None"),
        (lambda: Method("all", GD, outer="implicit"), "which GradientDescent does not support"),
        (
            lambda: Method("head", RidgeSolver(), outer="implicit", training_head="solved"),
            "RidgeSolver does not support",
        ),
        (
            lambda: Method("all", RidgeSolver(), training_head="solved"),
            "solves a linear head, but adapts is 'all'",
        ),
        (lambda: Method("head", RidgeSolver()), f"solvers that compute an optimal head ({EXACT_SOLVER_NAMES})"),
        (lambda: Method("head", GD, training_head="solved"), "with the solvers that compute an optimal head"),
        (lambda: Method("head", GD, training_head="task-rows"), "rows are trained jointly"),
        (
            lambda: Method("none", None, outer="plain", training_head="frozen", test_solver=GD),
            "so nothing is trained, and test_solver is GradientDescent",
        ),
        (lambda: Method("head", Proximal(), outer="displacement"), "trains only adapted parameters"),
        (
            lambda: Method("none", None, outer="plain", training_head="task-rows", test_solver=GD),
            "from a shared head",
        ),
        (lambda: Method("none", None, outer="plain"), "Set test_solver to a solver or a head"),
    ],
)
def test_a_contradictory_combination_raises_an_error_with_a_clear_message(make, message):
    with pytest.raises(InputError) as error:
        make()
    assert message in str(error.value)


def test_the_representation_of_a_method_names_functions_and_omits_the_default_loss():
    assert "loss" not in repr(method("maml"))
    assert repr(method("maml")).startswith("Method(adapts='all', inner=GradientDescent(steps=5, lr=0.01")
    assert "loss=balancing_regularizer" in repr(method("maml", loss=balancing_regularizer))
    assert "regularizer=balancing_regularizer)" in repr(method("burer-monteiro"))
    assert all(" at 0x" not in repr(method(name)) for name in PRESETS)


def test_the_solver_at_test_time_uses_its_own_learning_rate():
    learned_rates = GradientDescent(2, 0.01, "per-tensor")
    net = mlp(1, 1, activation="tanh")
    params = parameters(Method("all", learned_rates), net)
    x = torch.linspace(-1, 1, 5)[:, None]
    outputs = {}
    for lr in (0.01, 0.5):
        solver = GradientDescent(1, lr)
        methods = Method("all", learned_rates, test_solver=solver), Method("all", solver)
        outputs[lr] = [adapt(learner, net, params, x, x.sin())(x) for learner in methods]
        assert torch.equal(*outputs[lr])
    assert not torch.allclose(outputs[0.01][0], outputs[0.5][0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: method("nal", rates="per-element"), "test_solver has rates='per-element'"),
        (lambda: method("reptile", rates="per-tensor"), "which learns no rates"),
        (lambda: Method("all", "gd"), "inner is 'gd', but must be one of GradientDescent"),
        (lambda: Method("all", GradientDescent), "inner is <class"),
        (lambda: method("maml", inner="sgd"), "inner is 'sgd', but must be one of gradient-descent, proximal"),
        (lambda: method("maml", inner="ridge"), "RidgeSolver solves a linear head, but adapts is 'all'"),
        (lambda: method("mtl", test_solver="foo"), "test_solver is 'foo', but must be one of centroid, gradient-d"),
        (lambda: replace(method("maml"), test_solver="svm"), "test_solver is 'svm', but must be one of Gradient"),
        (lambda: Method("none", None, outer="exact", test_solver=GD), "there is no inner solver. Use outer='plain'"),
        (lambda: method("maml", lr="0.1"), "lr is '0.1', but must be a positive number"),
        (lambda: method("maml", lr=None), "lr is None, but must be a positive number"),
    ],
)
def test_wrong_solvers_and_unlearnable_rates_raise_errors(make, message):
    with pytest.raises(InputError, match=message):
        make()
