"""Compare the fused layers of many tasks with PyTorch. Without a GPU, use `TRITON_INTERPRET=1 pytest`."""

import os

import pytest
import torch

from cases import relative_error
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

SIZES = [(64, 6, 6), (160, 5, 7), (32, 11, 4)]  # channels (of all tasks together), height and width of feature maps
PRECISIONS = [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)]  # dtypes and tolerances


def random_maps(count, channels, height, width, dtype):
    x = torch.randn(count, 5, channels, height, width, generator=torch.Generator().manual_seed(channels))
    return [value.to(DEVICE, dtype, memory_format=torch.channels_last) for value in x]


def random_channel_params(count, channels):
    return list(torch.randn(count, channels, generator=torch.Generator().manual_seed(1)).to(DEVICE))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_fused_batch_norm_and_its_first_and_second_derivatives_equal_the_unfused_ones(size, dtype, tolerance):
    # g, u, v and s are named as in `batch_norm._double_backward`
    g, x, u = random_maps(3, *size, dtype)
    weight, bias, v, s = random_channel_params(4, size[0])
    results = fused_tasks.batch_norm(x + 3, weight, bias, 1e-5)
    references = torch.native_batch_norm((x + 3).double(), weight.double(), bias.double(), None, None, True, 0.0, 1e-5)
    assert all(relative_error(result.double(), expected) < tolerance for result, expected in zip(results, references))

    _, mean, rstd = fused_tasks.batch_norm(x, weight, bias, 1e-5)
    doubles = [value.double() for value in (g, x, weight, mean, rstd)]
    results = fused_tasks.batch_norm_backward(g, x, weight, mean, rstd)
    references = torch.ops.aten.native_batch_norm_backward(
        *doubles[:3], None, None, *doubles[3:], True, 1e-5, [True, True, True]
    )
    assert all(relative_error(result.double(), expected) < tolerance for result, expected in zip(results, references))

    results = fused_tasks.batch_norm_double_backward(g, x, weight, mean, rstd, u, v, s)
    references = batch_norm._double_backward(*doubles, u.double(), v.double(), s.double())
    assert all(relative_error(result.double(), expected) < tolerance for result, expected in zip(results, references))
    assert all(result.dtype == expected for result, expected in zip(results, (dtype, dtype, torch.float32)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pooling_unpooling_and_gathering_equal_pytorchs(size, dtype):
    x, u = random_maps(2, *size, dtype)
    x = x.round()  # some windows contain equal values
    y, indices = fused_tasks.max_pool_2x2(x)
    expected, flat_indices = torch.ops.aten.max_pool2d_with_indices(x.float().contiguous(), *POOL_2X2)
    assert torch.equal(y.float(), expected)
    values = torch.randn_like(y)
    unpooled = torch.ops.aten.max_pool2d_with_indices_backward(
        values.float().contiguous(), x.float().contiguous(), *POOL_2X2, flat_indices
    )
    assert torch.equal(fused_tasks.max_unpool_2x2(values, indices, x).float(), unpooled)
    gathered = u.float().flatten(2).gather(2, flat_indices.flatten(2)).view_as(flat_indices)
    assert torch.equal(fused_tasks.gather_2x2(u, indices).float(), gathered)


def test_the_maximum_of_a_window_with_nan_is_nan():
    (x,) = random_maps(1, 32, 4, 4, torch.float32)
    x[0, 0, 1, 1] = torch.nan
    assert fused_tasks.max_pool_2x2(x)[0].isnan().sum() == 1


@pytest.mark.parametrize("name", ["maml", "anil"])
def test_meta_gradients_with_fused_layers_equal_those_of_the_loop(name, monkeypatch):
    # fuse also on a CPU, in Triton's interpreter
    monkeypatch.setattr(triton_support, "can_fuse_tasks", lambda x: x.dtype == torch.float32 and x.shape[1] % 16 == 0)
    monkeypatch.setattr(task_folding, "is_faster", lambda x: True)
    method_, net = method(name, steps=2, lr=0.03), conv4(3, 20, 5, filters=16).to(DEVICE)
    x = torch.randn(2, 2, 5, 3, 20, 20, generator=torch.Generator().manual_seed(0))
    y = torch.arange(5).expand(2, -1)
    episodes = Episodes(x[0], y, x[1], y)
    loop_engine = Engine(method_, net.double(), mode="loop")
    expected = loop_engine(parameters(method_, net), episodes.to(DEVICE, dtype=torch.float64)).gradients
    results = Engine(method_, net.float(), mode="vectorized")(parameters(method_, net), episodes.to(DEVICE)).gradients
    assert all(relative_error(results[key].double(), value) < 1e-3 for key, value in expected.items())
