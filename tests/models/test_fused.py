"""Without a GPU these run in Triton's interpreter, if Triton is installed: `TRITON_INTERPRET=1 pytest`."""

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cases import relative
from metabridge.models import fused, resnet12
from metabridge.models.network import apply_features

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
LOW = torch.bfloat16 if CUDA else torch.float16  # the interpreter multiplies no matrices in bfloat16
EPS, SLOPE = 1e-5, 0.1

pytestmark = pytest.mark.skipif(
    not fused.AVAILABLE or not (CUDA or os.environ.get("TRITON_INTERPRET")),
    reason="Triton's kernels need a GPU, or TRITON_INTERPRET=1",
)

SIZES = [(64, 6, 6), (160, 5, 7), (64, 11, 4)]
PRECISIONS = [(torch.float32, 2e-5), (torch.bfloat16, 1e-2)]


def normal(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, weight, bias, training=True, eps=EPS)


def rectified(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.leaky_relu(normal(x, weight, bias), SLOPE)


def merged(main: Tensor, shortcut: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return F.leaky_relu(F.max_pool2d(normal(main, w1, b1) + normal(shortcut, w2, b2), 2), SLOPE)


def branches(x: Tensor, main: Tensor, shortcut: Tensor) -> tuple[Tensor, Tensor]:
    return F.conv2d(x, main, padding=1), F.conv2d(x, shortcut)


def maps(channels: int, height: int, width: int, dtype: torch.dtype, mean: float = 0.0, points: int = 7) -> Tensor:
    x = mean + torch.randn(points, channels, height, width) * (0.5 + torch.rand(channels, 1, 1))
    return x.to(DEVICE, dtype, memory_format=torch.channels_last)


def affine(channels: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    weight, bias = 1 + 0.3 * torch.randn(channels), torch.randn(channels)
    return weight.to(DEVICE, dtype), bias.to(DEVICE, dtype)


def pulled(function: Callable[..., Tensor], inputs: list[Tensor], seed: int = 1) -> list[Tensor]:
    """The value of `function` and its gradients for one random cotangent."""
    leaves = [value.detach().requires_grad_() for value in inputs]
    value = function(*leaves)
    cotangent = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    return [value.detach(), *torch.autograd.grad(value, leaves, cotangent.to(value))]


def agree(
    function: Callable[..., Tensor], reference: Callable[..., Tensor], inputs: list[Tensor], error: float
) -> None:
    found = pulled(function, inputs)
    for value, expected in zip(found, pulled(reference, [value.double() for value in inputs])):
        assert value.dtype == inputs[0].dtype
        assert relative(value.double(), expected) < error


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.skipif(not CUDA, reason="so many tiles are for a GPU")
def test_a_map_may_have_more_tiles_than_the_second_axis_of_a_grid_has_places():
    points = 2 + (65_536 * fused.TILE // 64) // (84 * 84)
    inputs = [maps(64, 84, 84, torch.bfloat16, points=points), *affine(64, torch.bfloat16)]
    agree(lambda *given: fused.rectified(*given, EPS, SLOPE), rectified, inputs, 1e-2)


@pytest.mark.parametrize(("dtype", "error"), PRECISIONS)
@pytest.mark.parametrize("size", SIZES)
def test_rectified_is_the_rectifier_of_the_norm_with_its_gradients(size, dtype, error):
    inputs = [maps(*size, dtype), *affine(size[0], dtype)]
    agree(lambda *given: fused.rectified(*given, EPS, SLOPE), rectified, inputs, error)


@pytest.mark.parametrize(("dtype", "error"), PRECISIONS)
@pytest.mark.parametrize("size", SIZES)
def test_merged_is_the_pooled_sum_of_two_norms_with_its_gradients(size, dtype, error):
    # In float64 too a tie must be seldom: bfloat16 inputs draw their choice from exact sums.
    inputs = [maps(*size, dtype), maps(*size, dtype), *affine(size[0], dtype), *affine(size[0], dtype)]
    agree(lambda *given: fused.merged(*given, EPS, SLOPE), merged, inputs, error)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 2e-5), (LOW, 1e-2)])
@pytest.mark.parametrize("channels", [1, 3])
def test_branches_of_images_are_the_two_convolutions(channels, dtype, error):
    x = maps(channels, 7, 9, dtype)
    weights = [torch.randn(64, channels, k, k).to(DEVICE, dtype, memory_format=torch.channels_last) for k in (3, 1)]

    def both(function: Callable[..., tuple[Tensor, Tensor]], x: Tensor) -> Callable[..., Tensor]:
        return lambda *weights: torch.cat(function(x, *weights), 1)

    agree(both(fused.branches, x), both(branches, x.double()), weights, error)


def test_branches_of_maps_are_the_two_convolutions():
    x = maps(64, 5, 6, torch.float32)
    weights = [torch.randn(160, 64, k, k, device=DEVICE) / 20 for k in (3, 1)]
    agree(
        lambda *given: torch.cat(fused.branches(*given), 1),
        lambda *given: torch.cat(branches(*given), 1),
        [x, *weights],
        1e-3 if CUDA else 1e-5,  # cuDNN may round to TF32
    )


def test_statistics_keep_their_digits_where_the_mean_is_a_thousand_deviations():
    x = maps(64, 9, 9, torch.float32, mean=1000.0)
    x[0, :, 0, 0] = 0  # so that no shift by a first value helps
    inputs = [x, *affine(64, torch.float32)]
    agree(lambda *given: fused.rectified(*given, EPS, SLOPE), rectified, inputs, 2e-4)


def test_rows_beyond_one_program_are_added_up():
    inputs = [maps(16, 64, 64, torch.float32, mean=3.0, points=3 if not CUDA else 60), *affine(16, torch.float32)]
    agree(lambda *given: fused.rectified(*given, EPS, SLOPE), rectified, inputs, 2e-5)


def test_of_equal_values_the_first_is_the_maximum():
    main, shortcut = maps(64, 4, 4, torch.float32).round(), maps(64, 4, 4, torch.float32).round()
    inputs = [main, shortcut, *affine(64, torch.float32), *affine(64, torch.float32)]
    agree(lambda *given: fused.merged(*given, EPS, SLOPE), merged, inputs, 2e-5)


@pytest.mark.parametrize(("size", "side"), [(5, 10), (5, 5), (2, 7)])
def test_kept_is_what_no_square_covers(size, side):
    noise = torch.rand(3, 32, side - size + 1, side - size + 1, device=DEVICE)
    chance = torch.tensor(0.05, device=DEVICE)
    covered = F.max_pool2d(F.pad((noise < chance).float(), [size - 1] * 4), size, stride=1)
    assert torch.equal(fused.kept(noise, chance, size, torch.float32), 1 - covered)
    assert 0 < covered.mean() < 1


@pytest.mark.parametrize("kind", ["rectified", "merged"])
def test_second_derivatives_are_those_of_the_plain_composition(kind):
    maps_ = [maps(64, 5, 4, torch.float32) for _ in range(1 if kind == "rectified" else 2)]
    inputs = [*maps_, *(value for _ in maps_ for value in affine(64, torch.float32))]
    mine, reference = getattr(fused, kind), globals()[kind]

    def twice(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def slope(*given: Tensor) -> Tensor:
            value = function(*given)
            return torch.autograd.grad((value**3).sum(), given[0], create_graph=True)[0]

        return slope

    agree(twice(lambda *given: mine(*given, EPS, SLOPE)), twice(reference), inputs, 1e-4)


@pytest.mark.skipif(not CUDA, reason="the network takes the kernels on a GPU alone")
def test_resnet12_in_training_gives_the_gradients_of_its_plain_path(monkeypatch):
    net = resnet12(3, 84, drop_rate=0.0).to(DEVICE).train()
    x = torch.rand(16, 3, 84, 84, device=DEVICE)
    params = {name: value.detach().requires_grad_() for name, value in net.named_parameters()}
    body = [value for name, value in params.items() if name.startswith("features.")]
    target = torch.randn(16, 640, device=DEVICE)

    def slopes(dtype: torch.dtype | None) -> Tensor:
        features = apply_features(net, params, x, dtype)
        return torch.cat([value.flatten() for value in torch.autograd.grad((features * target).sum(), body)])

    exact, mine = slopes(None), slopes(torch.bfloat16)
    monkeypatch.setattr(fused, "AVAILABLE", False)
    plain = slopes(torch.bfloat16)
    assert not torch.equal(mine, plain)
    assert relative(mine, exact) < 1.1 * relative(plain, exact)
