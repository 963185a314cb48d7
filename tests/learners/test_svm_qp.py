"""The quadratic-program solver and the multi-class support vector machine on it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import optimize
from sklearn import svm
from torch import Tensor

from metabridge.learners import svm_qp
from metabridge.learners.svm_qp import crammer_singer, one_against_one, solve


def points(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def program(seed: int, b: int = 2, n: int = 5, m: int = 2) -> tuple[Tensor, ...]:
    """A feasible program with two-sided, one-sided and absent bounds."""
    root = points(b, n, n, seed=seed)
    A, inside = points(b, m, n, seed=seed + 1), points(b, n, seed=seed + 2)
    kind = torch.arange(b * n).reshape(b, n) % 4
    lo = torch.where(kind < 2, inside - 0.3, -torch.inf)
    hi = torch.where(kind % 2 == 0, inside + 0.5, torch.inf)
    return root @ root.mT, points(b, n, seed=seed + 3), A, (A @ inside[..., None])[..., 0].sum(0), lo, hi


@pytest.mark.parametrize("seed", range(5))
def test_solution_is_scipys(seed):
    Q, e, A, r, lo, hi = program(seed)
    blocks, linear, rows = torch.block_diag(*Q).numpy(), e.flatten().numpy(), torch.cat(list(A), -1).numpy()
    reference = optimize.minimize(
        lambda a: a @ blocks @ a / 2 - linear @ a,
        np.zeros(linear.size),
        jac=lambda a: blocks @ a - linear,
        method="SLSQP",
        bounds=list(zip(lo.flatten().tolist(), hi.flatten().tolist())),
        constraints={"type": "eq", "fun": lambda a: rows @ a - r.numpy(), "jac": lambda a: rows},
        options={"ftol": 1e-14, "maxiter": 1000},
    )
    found = solve(Q, e, A, r, lo, hi)
    np.testing.assert_allclose(found.alpha.flatten().numpy(), reference.x, rtol=1e-5, atol=1e-5)
    assert found.gap < 1e-8
    assert found.residual < 1e-8


def test_batched_and_mapped_solutions_are_those_of_each_program_alone():
    programs = [program(seed) for seed in range(0, 24, 4)]
    batch = [torch.stack(parts) for parts in zip(*programs)]
    alone = torch.stack([solve(*each).alpha for each in programs])
    folded = solve(*(part.unflatten(0, (2, 3)) for part in batch)).alpha
    torch.testing.assert_close(folded.flatten(0, 1), alone)
    torch.testing.assert_close(torch.func.vmap(solve)(*batch).alpha, alone)


def test_program_without_inequalities_is_solved_by_its_linear_system():
    Q, e, A, r, lo, _ = program(0)
    everywhere = torch.full_like(lo, torch.inf)
    found = solve(Q, e, A, r, -everywhere, everywhere)
    rows = torch.cat(list(A), -1)
    system = torch.cat([torch.cat([torch.block_diag(*Q), -rows.mT], 1), torch.cat([rows, rows.new_zeros(2, 2)], 1)])
    torch.testing.assert_close(
        torch.cat([found.alpha.flatten(), found.dual]), torch.linalg.solve(system, torch.cat([e.flatten(), r]))
    )


def episode(tasks: int, n: int, d: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Unit vectors of five classes, every class with as many points."""
    labels = torch.arange(n).expand(tasks, n) % 5
    x = points(tasks, n, d, seed=seed) + points(tasks, 5, d, seed=seed + 1)[:, labels[0]]
    return x / x.norm(dim=-1, keepdim=True), labels


shapes = pytest.mark.parametrize(("n", "d"), [(25, 64), (25, 8), (5, 16), (40, 6)])
strengths = pytest.mark.parametrize("C", [0.01, 0.1, 1.0, 10.0])


def gap(x: Tensor, labels: Tensor, alpha: Tensor, C: float) -> Tensor:
    """The objective of the weights of some α less that of the dual there, an upper bound on what is missing."""
    weight = alpha @ x
    scores = x @ weight.mT
    own = scores.gather(-1, labels[..., None])
    rival = 1 - torch.nn.functional.one_hot(labels, alpha.shape[-2])
    square = weight.square().sum((-2, -1))
    return square + C * (scores - own + rival).amax(-1).sum(-1) - (alpha.mT.gather(-1, labels[..., None])).sum((-2, -1))


@shapes
@strengths
def test_crammer_singer_closes_the_duality_gap(n, d, C):
    x, labels = episode(10, n, d)
    truth = torch.nn.functional.one_hot(labels, 5).mT.double()
    A = torch.eye(n, dtype=torch.float64).expand(10, 5, n, n)
    found = solve(C * (x @ x.mT)[:, None], truth, A, x.new_zeros(10, n), torch.full_like(truth, -torch.inf), truth)
    assert gap(x, labels, C * found.alpha, C).abs().max() < 1e-8
    assert found.gap.max() < 1e-8
    assert found.residual.max() < 1e-10
    torch.testing.assert_close(crammer_singer(x, labels, 5, C), C * found.alpha @ x)


@shapes
@strengths
def test_crammer_singer_has_liblinears_weights(n, d, C):
    x, labels = episode(5, n, d)
    weight = crammer_singer(x, labels, 5, C)
    reference = svm.LinearSVC(C=C, multi_class="crammer_singer", fit_intercept=False, tol=1e-9, max_iter=1_000_000)
    for ours, features, classes in zip(weight, x, labels):
        theirs = torch.from_numpy(reference.fit(features.numpy(), classes.numpy()).coef_)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def loss(x: Tensor, labels: Tensor, mix: Tensor, C: float) -> Tensor:
    return (crammer_singer(x, labels, 5, C).tanh() * mix).sum()


@shapes
@pytest.mark.parametrize("C", [0.1, 1.0])
def test_derivative_of_crammer_singer_is_that_of_finite_differences(n, d, C):
    x, labels = episode(4, n, d, seed=3)
    mix = points(4, 5, d, seed=5)
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf, labels, mix, C), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(x, labels, mix, C), gradient)
    mapped = torch.func.vmap(torch.func.grad(loss), (0, 0, 0, None))(x, labels, mix, C)
    assert (mapped - gradient).abs().max() < 1e-6 * gradient.abs().max()
    for seed in range(6, 9):
        way = points(4, n, d, seed=seed)
        difference = (loss(x + 1e-5 * way, labels, mix, C) - loss(x - 1e-5 * way, labels, mix, C)) / 2e-5
        torch.testing.assert_close((gradient * way).sum(), difference, rtol=0, atol=1e-6 * float(gradient.norm()))


def test_duplicate_points_leave_crammer_singer_and_its_derivative_finite():
    x, labels = episode(3, 10, 4)
    x = x[:, [0, 0, 2, 3, 4, 0, 6, 3, 8, 9]].requires_grad_()
    weight = crammer_singer(x, labels, 5, 0.1)
    weight.square().sum().backward()
    assert weight.isfinite().all()
    assert x.grad.norm() < 10


def test_weight_has_the_dtype_of_the_features():
    x, labels = episode(2, 10, 4)
    single = crammer_singer(x.float(), labels, 5, 0.1)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), crammer_singer(x, labels, 5, 0.1), rtol=1e-5, atol=1e-5)


def test_classes_of_different_sizes_share_a_batch():
    x = points(2, 9, 4)
    labels = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 2], [0, 1, 1, 2, 2, 2, 2, 2, 2]])
    gram = x @ x.mT
    coefficient, bias, _ = one_against_one(gram, labels, 3, 1.0)
    for task in range(2):
        alone = one_against_one(gram[task : task + 1], labels[task : task + 1], 3, 1.0)
        torch.testing.assert_close(alone[:2], (coefficient[task : task + 1], bias[task : task + 1]))


def machines(n: int, d: int, *, shift: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Points of three classes in steps of 1/16, exact in the float32 in which libsvm keeps its kernel matrix."""
    labels = torch.arange(n).expand(20, n) % 3
    x = points(20, n, d, seed=seed) + shift * points(20, 3, d, seed=seed + 1)[:, labels[0]]
    return (16 * x).round() / 16, labels


def unequal(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Move all points but two to class 0, other two in every task."""
    moved = torch.zeros_like(labels)
    for task, row in enumerate(moved):
        row[task % labels.shape[-1]], row[(task + 4) % labels.shape[-1]] = 1, 2
    return x, moved


def doubled(x: Tensor, labels: Tensor, turn: int) -> tuple[Tensor, Tensor]:
    """Repeat every point, in its class or in the one `turn` further."""
    return x.repeat(1, 2, 1), torch.cat([labels, (labels + turn) % 3], -1)


MACHINES = {
    "separable": machines(15, 40),
    "one shot": machines(3, 8),
    "no difference between classes": machines(15, 40, shift=0.0),
    # Of seed 0 one machine has no free point but for libsvm, by rounding; its bias could be any between two limits.
    "overlapping": machines(18, 3, seed=2),
    "unequal classes": unequal(*machines(12, 30)),
    "unequal and overlapping": unequal(*machines(16, 4)),
    "the same point twice in a class": doubled(*machines(9, 24), turn=0),
    "the same point in two classes": doubled(*machines(9, 24), turn=1),
}
each_machine = pytest.mark.parametrize(("x", "labels"), MACHINES.values(), ids=MACHINES.keys())


def decisions(x: Tensor, labels: Tensor, C: float, query: Tensor) -> Tensor:
    coefficient, bias, _ = one_against_one(x @ x.mT, labels, 3, C)
    return query @ (coefficient @ x).mT + bias[:, None]


@each_machine
@pytest.mark.parametrize("C", [0.001, 0.05, 1.0, 100.0])
def test_machines_between_classes_decide_as_svc_and_as_interior_points(x, labels, C, monkeypatch):
    query = points(20, 30, x.shape[-1], seed=9)
    ours = decisions(x, labels, C, query)
    reference = svm.SVC(C=C, kernel="linear", tol=1e-10, decision_function_shape="ovo")
    theirs = [reference.fit(a.numpy(), b.numpy()).decision_function(c.numpy()) for a, b, c in zip(x, labels, query)]
    torch.testing.assert_close(ours, torch.from_numpy(np.stack(theirs)), rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(svm_qp, "_EXCHANGES", 0)
    torch.testing.assert_close(ours, decisions(x, labels, C, query), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("C", [0.001, 0.05, 1.0, 100.0])
def test_machines_of_few_points_in_many_features_need_no_interior_points(C, monkeypatch):
    monkeypatch.setattr(svm_qp, "solve", None)
    x, labels = machines(15, 200)
    assert decisions(x, labels, C, x).isfinite().all()


def test_point_pushed_to_its_bound_is_not_free_for_the_bias():
    x = torch.tensor([[[0.0], [1.0], [10.0], [11.0]]], dtype=torch.float64)
    labels = torch.tensor([[0, 1, 0, 1]])
    _, bias, _ = one_against_one(x @ x.mT, labels, 2, 0.01)
    reference = svm.SVC(C=0.01, kernel="linear", tol=1e-10).fit(x[0].numpy(), labels[0].numpy())
    assert abs(bias.item() + reference.intercept_.item()) < 1e-6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_crammer_singer_and_its_derivative_replay_from_a_cuda_graph():
    x, labels = (tensor.cuda() for tensor in episode(8, 25, 64))
    other = episode(8, 25, 64, seed=7)[0].cuda()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    leaf = x.clone().requires_grad_()
    with torch.cuda.stream(side):
        torch.autograd.grad(crammer_singer(leaf, labels, 5, 0.1).square().sum(), leaf)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (gradient,) = torch.autograd.grad(crammer_singer(leaf, labels, 5, 0.1).square().sum(), leaf)
    leaf.data.copy_(other)
    graph.replay()
    fresh = other.cpu().requires_grad_()
    (expected,) = torch.autograd.grad(crammer_singer(fresh, labels.cpu(), 5, 0.1).square().sum(), fresh)
    torch.testing.assert_close(gradient.cpu(), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("scale", "C"), [(1.0, 1e4), (100.0, 0.1), (1e4, 1e-4)])
def test_crammer_singer_of_large_features_has_liblinears_weights(scale, C):
    x, labels = episode(2, 40, 6)
    reference = svm.LinearSVC(
        C=C * scale**2, multi_class="crammer_singer", fit_intercept=False, tol=1e-9, max_iter=100_000
    )
    for ours, features, classes in zip(scale * crammer_singer(scale * x, labels, 5, C), x, labels):
        theirs = torch.from_numpy(reference.fit(features.numpy(), classes.numpy()).coef_)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))
