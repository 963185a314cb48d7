"""Fused layers of many tasks against PyTorch. Without a GPU, use `TRITON_INTERPRET=1 pytest`."""

import os

import pytest
import torch

from cases import relative
from metabridge.episodes import Episodes
from metabridge.learners import Engine, method, parameters
from metabridge.models import batch_norm, conv4, fused_tasks, fused_triton_kernels, task_folding, triton_support
from metabridge.models.task_folding import POOL_2X2

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"

pytestmark = pytest.mark.skipif(
    not fused_triton_kernels.AVAILABLE or not (CUDA or os.environ.get("TRITON_INTERPRET")),
    reason="Triton's kernels need a GPU, or TRITON_INTERPRET=1",
)

SIZES = [(64, 6, 6), (160, 5, 7), (32, 11, 4)]
PRECISIONS = [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)]


def maps(count, channels, height, width, dtype):
    x = torch.randn(count, 5, channels, height, width, generator=torch.Generator().manual_seed(channels))
    return [value.to(DEVICE, dtype, memory_format=torch.channels_last) for value in x]


def per_channel(count, channels):
    return list(torch.randn(count, channels, generator=torch.Generator().manual_seed(1)).to(DEVICE))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("dtype", "error"), PRECISIONS)
def test_batch_norm_and_its_two_derivatives_equal_the_plain_ones(size, dtype, error):
    g, x, u = maps(3, *size, dtype)
    weight, bias, v, s = per_channel(4, size[0])
    y, mean, r = fused_tasks.batch_norm(x + 3, weight, bias, 1e-5)
    exact = torch.native_batch_norm((x + 3).double(), weight.double(), bias.double(), None, None, True, 0.0, 1e-5)
    assert all(relative(result.double(), expected) < error for result, expected in zip((y, mean, r), exact))

    _, mean, r = fused_tasks.batch_norm(x, weight, bias, 1e-5)
    doubles = [value.double() for value in (g, x, weight, mean, r)]
    results = fused_tasks.batch_norm_backward(g, x, weight, mean, r)
    exact = torch.ops.aten.native_batch_norm_backward(
        *doubles[:3], None, None, *doubles[3:], True, 1e-5, [True, True, True]
    )
    assert all(relative(result.double(), expected) < error for result, expected in zip(results, exact))

    results = fused_tasks.batch_norm_double_backward(g, x, weight, mean, r, u, v, s)
    exact = batch_norm._double_backward(*doubles, u.double(), v.double(), s.double())
    assert all(relative(result.double(), expected) < error for result, expected in zip(results, exact))
    assert all(result.dtype == expected for result, expected in zip(results, (dtype, dtype, torch.float32)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pooling_unpooling_and_gathering_equal_pytorchs(size, dtype):
    x, u = maps(2, *size, dtype)
    x = x.round()  # so that some windows contain equal values
    y, choice = fused_tasks.max_pool_2x2(x)
    exact, indices = torch.ops.aten.max_pool2d_with_indices(x.float().contiguous(), *POOL_2X2)
    assert torch.equal(y.float(), exact)
    values = torch.randn_like(y)
    unpooled = torch.ops.aten.max_pool2d_with_indices_backward(
        values.float().contiguous(), x.float().contiguous(), *POOL_2X2, indices
    )
    assert torch.equal(fused_tasks.max_unpool_2x2(values, choice, x).float(), unpooled)
    gathered = u.float().flatten(2).gather(2, indices.flatten(2)).view_as(indices)
    assert torch.equal(fused_tasks.gather_2x2(u, choice).float(), gathered)


def test_the_maximum_of_a_window_with_nan_is_nan():
    (x,) = maps(1, 32, 4, 4, torch.float32)
    x[0, 0, 1, 1] = torch.nan
    assert fused_tasks.max_pool_2x2(x)[0].isnan().sum() == 1


@pytest.mark.parametrize("name", ["maml", "anil"])
def test_meta_gradient(name, monkeypatch):
    monkeypatch.setattr(triton_support, "can_fuse_tasks", lambda x: x.dtype == torch.float32 and x.shape[1] % 16 == 0)
    monkeypatch.setattr(task_folding, "is_faster", lambda x: True)
    method_, net = method(name, steps=2, lr=0.03), conv4(3, 20, 5, filters=16).to(DEVICE)
    x = torch.randn(2, 2, 5, 3, 20, 20, generator=torch.Generator().manual_seed(0))
    y = torch.arange(5).expand(2, -1)
    episodes = Episodes(x[0], y, x[1], y)
    exact = Engine(method_, net.double(), mode="loop")
    expected = exact(parameters(method_, net), episodes.to(DEVICE, dtype=torch.float64)).gradients
    results = Engine(method_, net.float(), mode="vectorized")(parameters(method_, net), episodes.to(DEVICE)).gradients
    assert all(relative(results[key].double(), value) < 1e-3 for key, value in expected.items())
