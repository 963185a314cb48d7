from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from metabridge import InputError
from metabridge.models import BatchNorm, Network, estimate_statistics
from metabridge.models.batch_norm import replace_batch_norm
from metabridge.models.functional_call import shallow_copy


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


NORM = BatchNorm(3).double()


def normalize(weight, bias, x):
    return torch.func.functional_call(NORM, {"weight": weight, "bias": bias}, (x,))


@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5, 5)])
def test_outputs_equal_those_of_pytorchs_batch_norm_also_under_vmap(shape):
    x, weight, bias = inputs(*shape), inputs(3), inputs(3)
    expected = F.batch_norm(x, None, None, weight, bias, training=True)
    assert torch.allclose(normalize(weight, bias, x), expected, atol=1e-12)
    tasks = torch.stack([x, 2 * x + 1])
    under_vmap = torch.func.vmap(lambda x: normalize(weight, bias, x))(tasks)
    for task, result in zip(tasks, under_vmap):
        assert torch.allclose(result, F.batch_norm(task, None, None, weight, bias, training=True), atol=1e-12)


def test_derivatives_to_second_order_match_finite_differences_with_and_without_vmap():
    x, weight, bias = (value.requires_grad_() for value in (inputs(2, 3, 3, 2), inputs(3), inputs(3)))

    def plain(weight, bias, x):
        return torch.stack([normalize(weight, bias, task) for task in x])

    def vectorized(weight, bias, x):
        return torch.func.vmap(lambda task: normalize(weight, bias, task))(x)

    for function in (plain, vectorized):
        assert torch.autograd.gradcheck(function, (weight, bias, x))
        assert torch.autograd.gradgradcheck(function, (weight, bias, x))


@pytest.mark.parametrize("batched", ["weight", "x", "both"])
def test_gradient_through_an_inner_gradient_step_under_vmap_equals_that_of_each_task(batched):
    """PyTorch's batch norm gives a wrong result here without an error."""
    x, weight, bias = inputs(2, 4, 3, 2, 2), 1 + inputs(2, 3) / 3, inputs(3)

    def loss(weight, x):
        grad = torch.func.grad(lambda w: normalize(w, bias, x).pow(3).sum())(weight)
        return normalize(weight - 0.1 * grad, bias, x).sin().sum()

    dims = {"weight": (0, None), "x": (None, 0), "both": (0, 0)}[batched]
    arguments = (weight if dims[0] == 0 else weight[0], x if dims[1] == 0 else x[0])
    through_vmap = torch.func.grad(lambda w, x: torch.func.vmap(loss, dims)(w, x).sum(), argnums=(0, 1))(*arguments)
    task_arguments = [
        tuple(value if dim is None else value[task] for value, dim in zip(arguments, dims)) for task in range(2)
    ]
    per_task = [torch.func.grad(loss, argnums=(0, 1))(*task) for task in task_arguments]
    for index, (gradient, dim) in enumerate(zip(through_vmap, dims)):
        expected = torch.stack([task[index] for task in per_task])
        assert torch.allclose(gradient, expected if dim == 0 else expected.sum(0), rtol=1e-9)


def test_estimated_statistics_are_the_mean_and_variance_of_all_inputs():
    norm = BatchNorm(3, "running").double()
    net = nn.Sequential(norm)
    batches = [5 + 2 * inputs(40, 3), inputs(40, 3)]
    estimate_statistics(net, batches)
    all_inputs = torch.cat(batches)
    assert torch.allclose(norm.mean, all_inputs.mean(0))
    assert torch.allclose(norm.variance, all_inputs.var(0, correction=0))
    single_output = norm.eval()(all_inputs[:1])
    assert torch.allclose(single_output, norm(all_inputs)[:1])  # every input is normalized independently
    assert torch.allclose(norm(all_inputs).std(0, correction=0), torch.ones(3, dtype=torch.float64), atol=1e-4)


def test_estimated_statistics_are_accurate_for_a_large_mean():
    norm = BatchNorm(3, "running")
    batches = [(1000 + inputs(400, 3) / 50).float(), (999 + inputs(400, 3) / 50).float()]
    estimate_statistics(nn.Sequential(norm), batches)
    exact = torch.cat(batches).double().var(0, correction=0)
    assert torch.allclose(norm.variance.double(), exact, rtol=1e-3)
    assert norm.eval()(batches[0]).isfinite().all()


def test_batch_statistics_depend_on_the_other_inputs_also_in_evaluation():
    norm = BatchNorm(3).double().eval()
    x = inputs(6, 3)
    assert not torch.allclose(norm(x)[:2], norm(x[:2]))


def test_pytorch_batch_norms_raise_an_error_and_their_replacements_compute_the_same():
    features = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm1d(3)))
    features(torch.randn(20, 4, generator=torch.Generator().manual_seed(0)))
    with pytest.raises(InputError, match=r"Network\.around"):
        Network(features, nn.Linear(3, 2))
    for statistics in ("batch", "running"):
        replaced = replace_batch_norm(features, statistics)
        x = torch.randn(7, 4, generator=torch.Generator().manual_seed(1))
        assert isinstance(features[1], nn.BatchNorm1d)  # the original is unchanged
        # PyTorch's layers use batch statistics only in training, and ours with statistics="batch" also in evaluation
        expected = features.eval() if statistics == "running" else features.train()
        assert torch.allclose(replaced.eval()(x), expected(x), atol=1e-5)


@pytest.mark.parametrize("statistics", ["batch", "running"])
@pytest.mark.parametrize("missing", [("weight", "bias"), ("bias",)])
def test_a_batch_norm_without_weight_or_bias_is_converted_to_one_without(statistics, missing):
    layer = nn.BatchNorm1d(3).double()
    for name in missing:
        setattr(layer, name, None)
    layer(3 + 2 * inputs(20, 3))
    replacement, x = replace_batch_norm(layer, statistics), inputs(7, 3)
    assert {name for name, _ in replacement.named_parameters()} == {"weight", "bias"} - {*missing}
    assert str(replacement) == f"BatchNorm(3, statistics='{statistics}')"
    expected = layer.eval() if statistics == "running" else layer.train()
    assert torch.allclose(replacement.eval()(x), expected(x), atol=1e-12)
    tasks = torch.stack([x, 2 * x + 1])
    one_by_one = torch.stack([replacement(task) for task in tasks])
    assert torch.allclose(torch.func.vmap(replacement)(tasks), one_by_one, atol=1e-12)
    assert torch.autograd.gradgradcheck(torch.func.vmap(replacement), tasks.requires_grad_())


def test_unknown_statistics_raise_an_input_error():
    with pytest.raises(InputError, match="'batch' or 'running'"):
        BatchNorm(3, "moving")


def test_estimated_statistics_ignore_calls_of_a_shallow_copy():
    net, x = nn.Sequential(nn.Identity(), BatchNorm(3, "running")).double(), inputs(8, 3)

    def call_a_copy(*_):
        shallow_copy(net)[1](100 + inputs(8, 3))

    net[0].register_forward_hook(call_a_copy)
    estimate_statistics(net, [x])
    assert torch.allclose(net[1].mean, x.mean(0))
