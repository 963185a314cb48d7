"""The derivatives of `torch.autograd` and of `torch.func` agree, also if they are nested."""

from __future__ import annotations

import pytest
import torch

from metabridge.autodiff import grad, grad_and_value, inside_transform, vjp


def inner(p):
    return (p["a"].sin() * p["b"]).sum() + p["a"].pow(3).sum()


def outer(p):
    """Return `inner` after a gradient step, so that the gradient of this function contains second derivatives."""
    gradient = grad(inner, p)
    updated = {name: p[name] - 0.1 * gradient[name] for name in p}
    return inner(updated)


POINT = {
    "a": torch.tensor([0.3, -1.2], dtype=torch.float64),
    "b": torch.tensor([0.7, 0.2], dtype=torch.float64),
}


def test_inside_transform_is_true_only_during_a_transform():
    inside = []
    torch.func.vmap(lambda x: inside.append(inside_transform()) or x)(torch.zeros(2))
    assert inside == [True]
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
            value_above = outer(shifted)
            shifted[name][i] -= 2 * step
            assert float(gradient[name][i]) == pytest.approx(float(value_above - outer(shifted)) / (2 * step), rel=1e-7)
    assert float(value) == pytest.approx(float(outer(POINT)))
    assert not value.requires_grad


def test_a_vjp_can_be_called_more_than_once():
    vjp_function = vjp(lambda p: grad(inner, p), POINT)
    once = vjp_function(POINT)[0]
    twice = vjp_function({name: 2 * value for name, value in POINT.items()})[0]
    expected = torch.func.vjp(torch.func.grad(inner), POINT)[1](POINT)[0]
    for name in POINT:
        assert torch.allclose(once[name], expected[name], rtol=1e-12)
        assert torch.allclose(twice[name], 2 * once[name], rtol=1e-12)


def test_inputs_that_do_not_affect_the_value_have_gradient_zero():
    gradient = grad(lambda p: p["a"].sum(), POINT)
    assert torch.equal(gradient["b"], torch.zeros(2, dtype=torch.float64))
