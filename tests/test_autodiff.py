"""Both ways of differentiating, plain and under a transform, agree at every depth."""

from __future__ import annotations

import pytest
import torch

from metabridge.autodiff import grad, grad_and_value, inside_transform, vjp


def inner(p):
    return (p["a"].sin() * p["b"]).sum() + p["a"].pow(3).sum()


def outer(p):
    slope = grad(inner, p)
    moved = {name: p[name] - 0.1 * slope[name] for name in p}
    return inner(moved)


POINT = {
    "a": torch.tensor([0.3, -1.2], dtype=torch.float64),
    "b": torch.tensor([0.7, 0.2], dtype=torch.float64),
}


def test_a_transform_is_seen_only_while_it_runs():
    seen = []
    torch.func.vmap(lambda x: seen.append(inside_transform()) or x)(torch.zeros(2))
    assert seen == [True]
    assert not inside_transform()


def test_nested_gradient_equals_torch_func_and_finite_differences():
    gradient, value = grad_and_value(outer, POINT)
    expected = torch.func.grad(outer)(POINT)
    for name in POINT:
        assert torch.allclose(gradient[name], expected[name], rtol=1e-12)
    step = 1e-6
    for name in POINT:
        for i in range(2):
            shifted = {n: v.clone() for n, v in POINT.items()}
            shifted[name][i] += step
            up = outer(shifted)
            shifted[name][i] -= 2 * step
            assert float(gradient[name][i]) == pytest.approx(float(up - outer(shifted)) / (2 * step), rel=1e-7)
    assert float(value) == pytest.approx(float(outer(POINT)))
    assert not value.requires_grad


def test_pull_back_can_be_used_more_than_once():
    pull = vjp(lambda p: grad(inner, p), POINT)
    once = pull(POINT)[0]
    twice = pull({name: 2 * value for name, value in POINT.items()})[0]
    expected = torch.func.vjp(torch.func.grad(inner), POINT)[1](POINT)[0]
    for name in POINT:
        assert torch.allclose(once[name], expected[name], rtol=1e-12)
        assert torch.allclose(twice[name], 2 * once[name], rtol=1e-12)


def test_what_the_value_does_not_depend_on_has_gradient_zero():
    gradient = grad(lambda p: p["a"].sum(), POINT)
    assert torch.equal(gradient["b"], torch.zeros(2, dtype=torch.float64))
