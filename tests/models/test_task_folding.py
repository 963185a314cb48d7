"""Convolutions and poolings of many tasks at once, against those of each task by itself."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from metabridge.episodes import Episodes
from metabridge.learners import Engine, method, parameters
from metabridge.models import conv4, task_folding
from metabridge.models.task_folding import Folding

TASKS = 3


def draw(*shape):
    return torch.randn(TASKS, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture(autouse=True)
def folded(monkeypatch):
    """Fold on a CPU too."""
    monkeypatch.setattr(task_folding, "is_faster", lambda x: True)


@pytest.fixture
def aligned(monkeypatch):
    """As on a GPU: channels last, and groups of a multiple of four channels."""
    monkeypatch.setattr(
        task_folding, "_channels_last", lambda value: value.contiguous(memory_format=torch.channels_last)
    )
    monkeypatch.setattr(
        task_folding, "_padding_channels", lambda value, channels, groups: -channels % 4 if groups > 1 else 0
    )


@pytest.fixture(params=["plain", "aligned"])
def layout(request):
    """As on a CPU, and as on a GPU."""
    if request.param == "aligned":
        request.getfixturevalue("aligned")


def slopes(function, *arguments):
    """Return a scalar's gradient and the gradient of that gradient's size, for every argument."""

    def size(*arguments):
        found = torch.func.grad(lambda args: function(*args).square().sum())(arguments)
        return sum(value.square().sum() for value in found), found

    outer, inner = torch.func.grad(lambda args: size(*args), has_aux=True)(arguments)
    return (*inner, *outer)


def compare(function, *arguments):
    def folded(*own):
        with Folding():
            return function(*own)

    found = torch.func.vmap(lambda *own: slopes(folded, *own))(*arguments)
    each = [slopes(function, *(value[task] for value in arguments)) for task in range(TASKS)]
    for place, value in enumerate(found):
        exact = torch.stack([task[place] for task in each])
        torch.testing.assert_close(value, exact, rtol=1e-9, atol=1e-9 * float(exact.abs().max()))


@pytest.mark.parametrize(
    ("inputs", "outputs", "options"),
    [
        (3, 8, {"padding": 1}),
        (3, 5, {"stride": 2}),  # of seven pixels: one is met by no window
        (4, 6, {"padding": 2, "dilation": 2, "groups": 2}),
        (2, 3, {"stride": (2, 1), "padding": (1, 0)}),
        (2, 3, {"padding": "same"}),
    ],
)
def test_convolution(layout, inputs, outputs, options):
    weight = draw(outputs, inputs // options.get("groups", 1), 3, 3)
    compare(lambda x, w, b: F.conv2d(x, w, b, **options), draw(2, inputs, 8, 7), weight, draw(outputs))


@pytest.mark.parametrize("options", [{"kernel_size": 2}, {"kernel_size": 3, "stride": 2, "padding": 1}])
def test_pooling(layout, options):
    compare(lambda x: F.max_pool2d(x, **options), draw(2, 3, 9, 8))


def test_calls_of_another_form_are_pytorchs():
    x = draw(3, 2, 9, 8)[0]
    with Folding():
        assert torch.equal(F.max_pool2d(x, 2, return_indices=True)[1], F.max_pool2d_with_indices(x, 2)[1])
        assert torch.equal(F.max_pool2d(x[0], 2), F.max_pool2d(x, 2)[0])
        assert F.conv2d(input=x, weight=x[:, :, :3, :3]).shape == (3, 3, 7, 6)


def episodes(size=16):
    x = torch.randn(2, TASKS, 10, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.arange(5).repeat(2).expand(TASKS, -1)
    return Episodes(x[0], y, x[1], y)


@pytest.mark.parametrize("name", ["maml", "anil"])
def test_meta_gradient(layout, name):
    chosen, net = method(name, steps=2, lr=0.03), conv4(3, 16, 5, filters=6).double()
    params = parameters(chosen, net)
    together, apart = (Engine(chosen, net, mode=mode)(params, episodes()) for mode in ("vectorised", "loop"))
    for key, value in apart.gradients.items():
        torch.testing.assert_close(together.gradients[key], value, rtol=1e-9, atol=1e-12)


class Copied(TorchDispatchMode):
    """Counts the copies of maps that have more than a few pixels and a multiple of seven channels."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default):
            self.count += made.ndim > 3 and made.shape[-1] > 5 and made.numel() % 7 == 0
        return made


def test_maps_are_not_copied(aligned):
    maml, net = method("maml", steps=1), conv4(3, 64, 5, filters=28)
    with Copied() as copied:
        Engine(maml, net, mode="vectorised")(parameters(maml, net), episodes(64).to(dtype=torch.float32))
    assert copied.count == 0
