"""Without a GPU these run in Triton's interpreter, if Triton is installed: `TRITON_INTERPRET=1 pytest`."""

import os
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cases import relative
from metabridge.models import cell_triton_layers, cells, fused_layers, fused_triton_kernels, resnet12, triton_tiles
from metabridge.models.cells import cell_network
from metabridge.models.network import apply_features

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
LOW = torch.bfloat16 if CUDA else torch.float16  # the interpreter multiplies no matrices in bfloat16
EPS, SLOPE = 1e-5, 0.1

pytestmark = pytest.mark.skipif(
    not fused_triton_kernels.AVAILABLE or not (CUDA or os.environ.get("TRITON_INTERPRET")),
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
    exact = [value.double().contiguous() for value in inputs]  # not with channels last: see MeanPool
    for value, expected in zip(found, pulled(reference, exact)):
        assert value.dtype == inputs[0].dtype
        assert relative(value.double(), expected) < error


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # convolutions in full single precision


@pytest.mark.skipif(not CUDA, reason="so many tiles are for a GPU")
def test_a_map_may_have_more_tiles_than_the_second_axis_of_a_grid_has_places():
    points = 2 + (65_536 * triton_tiles.TILE // 64) // (84 * 84)
    inputs = [maps(64, 84, 84, torch.bfloat16, points=points), *affine(64, torch.bfloat16)]
    agree(lambda *given: fused_layers.norm_leaky_relu(*given, EPS, SLOPE), rectified, inputs, 1e-2)


@pytest.mark.parametrize(("dtype", "error"), PRECISIONS)
@pytest.mark.parametrize("size", SIZES)
def test_rectified_is_the_rectifier_of_the_norm_with_its_gradients(size, dtype, error):
    inputs = [maps(*size, dtype), *affine(size[0], dtype)]
    agree(lambda *given: fused_layers.norm_leaky_relu(*given, EPS, SLOPE), rectified, inputs, error)


@pytest.mark.parametrize(("dtype", "error"), PRECISIONS)
@pytest.mark.parametrize("size", SIZES)
def test_merged_is_the_pooled_sum_of_two_norms_with_its_gradients(size, dtype, error):
    # In float64 too a tie must be seldom: bfloat16 inputs draw their choice from exact sums.
    inputs = [maps(*size, dtype), maps(*size, dtype), *affine(size[0], dtype), *affine(size[0], dtype)]
    agree(lambda *given: fused_layers.residual_pool(*given, EPS, SLOPE), merged, inputs, error)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 2e-5), (LOW, 1e-2)])
@pytest.mark.parametrize("channels", [1, 3])
def test_branches_of_images_are_the_two_convolutions(channels, dtype, error):
    x = maps(channels, 7, 9, dtype)
    weights = [torch.randn(64, channels, k, k).to(DEVICE, dtype, memory_format=torch.channels_last) for k in (3, 1)]

    def both(function: Callable[..., tuple[Tensor, Tensor]], x: Tensor) -> Callable[..., Tensor]:
        return lambda *weights: torch.cat(function(x, *weights), 1)

    agree(both(fused_layers.stem_convolutions, x), both(branches, x.double()), weights, error)


def test_branches_of_maps_are_the_two_convolutions():
    x = maps(64, 5, 6, torch.float32)
    weights = [torch.randn(160, 64, k, k, device=DEVICE) / 20 for k in (3, 1)]
    agree(
        lambda *given: torch.cat(fused_layers.stem_convolutions(*given), 1),
        lambda *given: torch.cat(branches(*given), 1),
        [x, *weights],
        1e-3 if CUDA else 1e-5,  # cuDNN may round to TF32
    )


def test_statistics_keep_their_digits_where_the_mean_is_a_thousand_deviations():
    x = maps(64, 9, 9, torch.float32, mean=1000.0)
    x[0, :, 0, 0] = 0  # so that no shift by a first value helps
    inputs = [x, *affine(64, torch.float32)]
    agree(lambda *given: fused_layers.norm_leaky_relu(*given, EPS, SLOPE), rectified, inputs, 2e-4)


def test_rows_beyond_one_program_are_added_up():
    inputs = [maps(16, 64, 64, torch.float32, mean=3.0, points=3 if not CUDA else 60), *affine(16, torch.float32)]
    agree(lambda *given: fused_layers.norm_leaky_relu(*given, EPS, SLOPE), rectified, inputs, 2e-5)


def test_of_equal_values_the_first_is_the_maximum():
    main, shortcut = maps(64, 4, 4, torch.float32).round(), maps(64, 4, 4, torch.float32).round()
    inputs = [main, shortcut, *affine(64, torch.float32), *affine(64, torch.float32)]
    agree(lambda *given: fused_layers.residual_pool(*given, EPS, SLOPE), merged, inputs, 2e-5)


@pytest.mark.parametrize(("size", "side"), [(5, 10), (5, 5), (2, 7)])
def test_kept_is_what_no_square_covers(size, side):
    noise = torch.rand(3, 32, side - size + 1, side - size + 1, device=DEVICE)
    chance = torch.tensor(0.05, device=DEVICE)
    covered = F.max_pool2d(F.pad((noise < chance).float(), [size - 1] * 4), size, stride=1)
    assert torch.equal(fused_layers.drop_block_mask(noise, chance, size, torch.float32), 1 - covered)
    assert 0 < covered.mean() < 1


@pytest.mark.parametrize("kind", ["rectified", "merged"])
def test_second_derivatives_are_those_of_the_plain_composition(kind):
    maps_ = [maps(64, 5, 4, torch.float32) for _ in range(1 if kind == "rectified" else 2)]
    inputs = [*maps_, *(value for _ in maps_ for value in affine(64, torch.float32))]
    mine, reference = getattr(fused_layers, kind), globals()[kind]
    agree(twice(lambda *given: mine(*given, EPS, SLOPE)), twice(reference), inputs, 1e-4)


LAYERS: dict[str, tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., Tensor]]] = {
    "pointwise": (cell_triton_layers.conv_1x1, F.conv2d),
    "positive": (cell_triton_layers.relu, F.relu),
    "halved": (
        cell_triton_layers.relu_even_odd,
        lambda x: torch.cat([F.relu(x)[..., ::2, ::2], F.pad(F.relu(x), (0, 1, 0, 1))[..., 1::2, 1::2]], 1),
    ),
}
for stride in (1, 2):
    LAYERS[f"max_pooled, stride {stride}"] = (
        partial(cell_triton_layers.max_pool, stride=stride),
        partial(F.max_pool2d, kernel_size=3, stride=stride, padding=1),
    )
    LAYERS[f"mean_pooled, stride {stride}"] = (
        partial(cell_triton_layers.mean_pool, stride=stride),
        partial(F.avg_pool2d, kernel_size=3, stride=stride, padding=1, count_include_pad=False),
    )
    for dilation in (1, 2):
        options = {"stride": stride, "dilation": dilation}
        LAYERS[f"depthwise, stride {stride}, dilation {dilation}"] = (
            partial(cell_triton_layers.relu_depthwise_conv, **options),
            lambda x, weight, options=options: F.conv2d(
                F.relu(x), weight, padding=options["dilation"], groups=x.shape[1], **options
            ),
        )


def given(layer: str, channels: int, height: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    shapes = {"pointwise": (32, channels, 1, 1), "depthwise": (channels, 1, 3, 3)}
    weights = [torch.randn(shape).to(DEVICE, dtype) for kind, shape in shapes.items() if layer.startswith(kind)]
    return [maps(channels, height, width, dtype, points=3), *weights]


@pytest.mark.parametrize(
    ("size", "dtype", "error"), [((16, 7, 6), torch.float32, 2e-5), ((32, 4, 9), torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_gives_what_the_plain_one_does_and_hands_its_map_on(layer, size, dtype, error):
    mine, plain = LAYERS[layer]
    inputs = given(layer, *size, dtype)

    def both(layer: Callable[..., tuple[Tensor, Tensor]], *given: Tensor) -> Tensor:
        y, x = layer(*given)
        return torch.cat([y.flatten(), (x * x).flatten()])

    agree(lambda *given: mine(*given)[0], plain, inputs, error)
    agree(partial(both, mine), partial(both, lambda *given: (plain(*given), given[0])), inputs, error)


def test_of_equal_values_in_a_window_the_first_is_the_largest():
    agree(
        lambda x: cell_triton_layers.max_pool(x, 1)[0],
        LAYERS["max_pooled, stride 1"][1],
        [maps(16, 6, 5, LOW).round()],
        1e-2,
    )


def test_pixels_beyond_one_program_are_added_up(monkeypatch):
    monkeypatch.setattr(cell_triton_layers, "WEIGHT_PROGRAMS", 2)
    mine, plain = LAYERS["depthwise, stride 1, dilation 1"]
    agree(lambda *given: mine(*given)[0], plain, given("depthwise", 16, 11, 13, torch.float32), 2e-5)


@pytest.mark.parametrize(("dtype", "error"), PRECISIONS)
def test_joined_are_the_rectified_maps_side_by_side(dtype, error):
    inputs = [maps(channels, 5, 7, dtype) for channels in (48, 16, 32)]
    agree(cell_triton_layers.relu_concat, lambda *given: F.relu(torch.cat(given, 1)), inputs, error)


@pytest.mark.parametrize(("dtype", "error"), PRECISIONS)
@pytest.mark.parametrize("size", SIZES)
def test_added_is_the_total_and_each_points_share_of_the_norm(size, dtype, error):
    factor = torch.tensor([0.0, 1.25, 1.25, 0.0, 1.25, 1.25, 1.25], device=DEVICE)
    inputs = [maps(*size, dtype), *affine(size[0], dtype)]
    for total in (maps(*size, dtype), None):
        given = inputs if total is None else [total, *inputs]

        def mine(*given: Tensor) -> Tensor:
            return fused_layers.add_norm(given[0] if len(given) == 4 else None, *given[-3:], EPS, factor)

        def plain(*given: Tensor) -> Tensor:
            return sum(given[:-3], factor.view(-1, 1, 1, 1) * normal(*given[-3:]))

        agree(mine, plain, given, error)


def twice(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def slope(*given: Tensor) -> Tensor:
        value = function(*given)
        return torch.autograd.grad((value**3).sum(), given[0], create_graph=True)[0]

    return slope


@pytest.mark.parametrize("layer", LAYERS)
def test_second_derivatives_of_a_layer_are_those_of_the_plain_one(layer):
    mine, plain = LAYERS[layer]

    def both(layer: Callable[..., tuple[Tensor, Tensor]], *given: Tensor) -> Tensor:
        y, x = layer(*given)
        return torch.cat([y.flatten(), x.flatten()])

    inputs = given(layer, 16, 5, 4, torch.float32)
    agree(twice(partial(both, mine)), twice(partial(both, lambda *given: (plain(*given), given[0]))), inputs, 1e-4)


def test_second_derivatives_of_a_node_are_those_of_the_plain_composition():
    factor = torch.tensor([0.0, 1.25, 1.25], device=DEVICE)
    inputs = [maps(16, 5, 4, torch.float32, points=3), *affine(16, torch.float32)]

    def mine(x: Tensor, *norm: Tensor) -> Tensor:
        return cell_triton_layers.relu_concat(fused_layers.add_norm(x, x**2, *norm, EPS, factor), x)

    def plain(x: Tensor, *norm: Tensor) -> Tensor:
        return F.relu(torch.cat([x + factor.view(-1, 1, 1, 1) * normal(x**2, *norm), x], 1))

    agree(twice(mine), twice(plain), inputs, 1e-4)


def test_cells_in_training_give_the_gradients_of_their_plain_path(monkeypatch):
    nodes = [[(0, "sep_conv_3x3"), (1, "max_pool_3x3")], [(0, "skip"), (2, "dil_conv_3x3")]]
    normal = [*nodes, [(1, "skip"), (3, "skip")]]
    reduction = [*nodes, [(1, "avg_pool_3x3"), (2, "conv_1x5_5x1")]]
    architecture = {"normal": normal, "reduction": reduction}
    net = cell_network(architecture, cells=3, channels=16, drop_rate=0.3).to(DEVICE).train()
    points, side = (16, 32) if CUDA else (4, 7)
    x, target = torch.rand(points, 3, side, side, device=DEVICE), torch.randn(points, 192, device=DEVICE)
    params = {name: value.detach().requires_grad_() for name, value in net.named_parameters()}
    body = [value for name, value in params.items() if name.startswith("features.")]

    def slopes(dtype: torch.dtype | None) -> Tensor:
        torch.manual_seed(0)
        features = apply_features(net, params, x, dtype)
        return torch.cat([value.flatten() for value in torch.autograd.grad((features * target).sum(), body)])

    exact = slopes(None)
    if not CUDA:  # where nothing is fused unless asked for
        monkeypatch.setattr(cells, "can_fuse", lambda x, channels: True)
        mine = slopes(None)
        assert not torch.equal(mine, exact)
        assert relative(mine, exact) < 1e-4
        return
    mine = slopes(torch.bfloat16)
    monkeypatch.setattr(fused_triton_kernels, "AVAILABLE", False)
    plain = slopes(torch.bfloat16)
    assert not torch.equal(mine, plain)
    assert relative(mine, exact) < 1.1 * relative(plain, exact)


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
    monkeypatch.setattr(fused_triton_kernels, "AVAILABLE", False)
    plain = slopes(torch.bfloat16)
    assert not torch.equal(mine, plain)
    assert relative(mine, exact) < 1.1 * relative(plain, exact)
