"""Compare convolution and max pooling of many tasks at once with those of each task."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from metabridge.episodes import Episodes
from metabridge.learners import Engine, method, parameters
from metabridge.models import conv4, task_folding
from metabridge.models.task_folding import Folding

TASKS = 3


def random_inputs(*shape):
    return torch.randn(TASKS, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture(autouse=True)
def fold_on_cpu(monkeypatch):
    """Fold tasks also on a CPU."""
    monkeypatch.setattr(task_folding, "is_faster", lambda x: True)


@pytest.fixture
def gpu_layout(monkeypatch):
    """Use the layout of a GPU: channels-last, and groups padded to a multiple of four channels."""
    monkeypatch.setattr(
        task_folding, "_channels_last", lambda value: value.contiguous(memory_format=torch.channels_last)
    )
    monkeypatch.setattr(
        task_folding, "_padding_channels", lambda value, channels, groups: -channels % 4 if groups > 1 else 0
    )


@pytest.fixture(params=["cpu", "gpu"])
def layout(request):
    """Run a test with the layout of a CPU and with that of a GPU."""
    if request.param == "gpu":
        request.getfixturevalue("gpu_layout")


def first_and_second_gradients(function, *arguments):
    """Return the gradient of a scalar and the gradient of its squared norm, for every argument."""

    def squared_norm_and_gradients(*arguments):
        grads = torch.func.grad(lambda args: function(*args).square().sum())(arguments)
        return sum(value.square().sum() for value in grads), grads

    second, first = torch.func.grad(lambda args: squared_norm_and_gradients(*args), has_aux=True)(arguments)
    return (*first, *second)


def compare(function, *arguments):
    """Compare the folded function under `vmap` with a loop over the tasks."""

    def folded(*tensors):
        with Folding():
            return function(*tensors)

    results = torch.func.vmap(lambda *tensors: first_and_second_gradients(folded, *tensors))(*arguments)
    per_task = [first_and_second_gradients(function, *(value[task] for value in arguments)) for task in range(TASKS)]
    for index, value in enumerate(results):
        expected = torch.stack([task[index] for task in per_task])
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("in_channels", "out_channels", "options"),
    [
        (3, 8, {"padding": 1}),
        (3, 5, {"stride": 2}),  # one of the seven pixels is in no window
        (4, 6, {"padding": 2, "dilation": 2, "groups": 2}),
        (2, 3, {"stride": (2, 1), "padding": (1, 0)}),
        (2, 3, {"padding": "same"}),
    ],
)
def test_folded_convolution_equals_that_of_each_task(layout, in_channels, out_channels, options):
    weight = random_inputs(out_channels, in_channels // options.get("groups", 1), 3, 3)
    x, bias = random_inputs(2, in_channels, 8, 7), random_inputs(out_channels)
    compare(lambda x, w, b: F.conv2d(x, w, b, **options), x, weight, bias)


@pytest.mark.parametrize("options", [{"kernel_size": 2}, {"kernel_size": 3, "stride": 2, "padding": 1}])
def test_folded_max_pooling_equals_that_of_each_task(layout, options):
    compare(lambda x: F.max_pool2d(x, **options), random_inputs(2, 3, 9, 8))


def test_unsupported_calls_use_pytorchs_functions():
    x = random_inputs(3, 2, 9, 8)[0]
    with Folding():
        assert torch.equal(F.max_pool2d(x, 2, return_indices=True)[1], F.max_pool2d_with_indices(x, 2)[1])
        assert torch.equal(F.max_pool2d(x[0], 2), F.max_pool2d(x, 2)[0])
        assert F.conv2d(input=x, weight=x[:, :, :3, :3]).shape == (3, 3, 7, 6)


def episodes(size=16):
    x = torch.randn(2, TASKS, 10, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.arange(5).repeat(2).expand(TASKS, -1)
    return Episodes(x[0], y, x[1], y)


@pytest.mark.parametrize("name", ["maml", "anil"])
def test_vectorized_meta_gradients_equal_those_of_the_loop(layout, name):
    method_, net = method(name, steps=2, lr=0.03), conv4(3, 16, 5, filters=6).double()
    params = parameters(method_, net)
    vectorized, loop = (Engine(method_, net, mode=mode)(params, episodes()) for mode in ("vectorized", "loop"))
    for key, value in loop.gradients.items():
        torch.testing.assert_close(vectorized.gradients[key], value, rtol=1e-9, atol=1e-12)


class CopyCounter(TorchDispatchMode):
    """Count the copies of feature maps, which are wider than 5 pixels and have a multiple of 7 elements.

    The feature maps of the test have 28 channels; its images have no multiple of 7 elements.
    """

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default):
            self.count += result.ndim > 3 and result.shape[-1] > 5 and result.numel() % 7 == 0
        return result


def test_maps_are_not_copied(gpu_layout):
    maml, net = method("maml", steps=1), conv4(3, 64, 5, filters=28)
    with CopyCounter() as counter:
        Engine(maml, net, mode="vectorized")(parameters(maml, net), episodes(64).to(dtype=torch.float32))
    assert counter.count == 0
