"""Compare fused layers with PyTorch. Without a GPU, `TRITON_INTERPRET=1 pytest` runs them in Triton's interpreter."""

import os
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cases import relative_error
from metabridge.models import cell_triton_layers, cells, fused_layers, fused_triton_kernels, resnet12, triton_tiles
from metabridge.models.cells import cell_network
from metabridge.models.network import apply_features

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
LOW_PRECISION = torch.bfloat16 if CUDA else torch.float16  # the interpreter has no matrix products in bfloat16
EPS, SLOPE = 1e-5, 0.1

pytestmark = pytest.mark.skipif(
    not fused_triton_kernels.AVAILABLE or not (CUDA or os.environ.get("TRITON_INTERPRET")),
    reason="Triton's kernels need a GPU, or TRITON_INTERPRET=1",
)

SIZES = [(64, 6, 6), (160, 5, 7), (64, 11, 4)]  # channels, height and width of feature maps
PRECISIONS = [(torch.float32, 2e-5), (torch.bfloat16, 1e-2)]  # dtypes and tolerances


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, weight, bias, training=True, eps=EPS)


def reference_norm_leaky_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.leaky_relu(batch_norm(x, weight, bias), SLOPE)


def reference_residual_pool(main: Tensor, shortcut: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return F.leaky_relu(F.max_pool2d(batch_norm(main, w1, b1) + batch_norm(shortcut, w2, b2), 2), SLOPE)


def reference_first_convolutions(x: Tensor, main: Tensor, shortcut: Tensor) -> tuple[Tensor, Tensor]:
    return F.conv2d(x, main, padding=1), F.conv2d(x, shortcut)


def random_maps(
    channels: int, height: int, width: int, dtype: torch.dtype, mean: float = 0.0, count: int = 7
) -> Tensor:
    x = mean + torch.randn(count, channels, height, width) * (0.5 + torch.rand(channels, 1, 1))
    return x.to(DEVICE, dtype, memory_format=torch.channels_last)


def random_weight_and_bias(channels: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    weight, bias = 1 + 0.3 * torch.randn(channels), torch.randn(channels)
    return weight.to(DEVICE, dtype), bias.to(DEVICE, dtype)


def output_and_grads(function: Callable[..., Tensor], inputs: list[Tensor], seed: int = 1) -> list[Tensor]:
    """Return the output of `function` and its vector-Jacobian products with a random cotangent."""
    leaves = [value.detach().requires_grad_() for value in inputs]
    output = function(*leaves)
    # rounded to bfloat16, so that it is the same in all dtypes
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    return [output.detach(), *torch.autograd.grad(output, leaves, cotangent.to(output))]


def compare(
    function: Callable[..., Tensor], reference: Callable[..., Tensor], inputs: list[Tensor], tolerance: float
) -> None:
    """Compare the outputs and gradients of `function` with those of `reference` in float64."""
    results = output_and_grads(function, inputs)
    # contiguous, because PyTorch's average pooling has a bug for channels-last inputs, see `AvgPool`
    double_inputs = [value.double().contiguous() for value in inputs]
    for value, expected in zip(results, output_and_grads(reference, double_inputs)):
        assert value.dtype == inputs[0].dtype
        assert relative_error(value.double(), expected) < tolerance


@pytest.fixture(autouse=True)
def _fixed_seed_and_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # keep convolutions in float32


@pytest.mark.skipif(not CUDA, reason="too many tiles for a CPU")
def test_a_map_can_have_more_tiles_than_the_second_axis_of_a_grid_allows():
    rows_per_tile = triton_tiles.TILE_ELEMENTS // 64  # for 64 channels
    count = 2 + 65_536 * rows_per_tile // (84 * 84)  # the number of images that need 65 536 tiles, and a bit more
    inputs = [random_maps(64, 84, 84, torch.bfloat16, count=count), *random_weight_and_bias(64, torch.bfloat16)]
    compare(
        lambda *tensors: fused_layers.norm_leaky_relu(*tensors, EPS, SLOPE), reference_norm_leaky_relu, inputs, 1e-2
    )


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("size", SIZES)
def test_norm_leaky_relu_equals_pytorchs_layers_with_gradients(size, dtype, tolerance):
    inputs = [random_maps(*size, dtype), *random_weight_and_bias(size[0], dtype)]
    compare(
        lambda *tensors: fused_layers.norm_leaky_relu(*tensors, EPS, SLOPE),
        reference_norm_leaky_relu,
        inputs,
        tolerance,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("size", SIZES)
def test_residual_pool_equals_pytorchs_layers_with_gradients(size, dtype, tolerance):
    # ties must be rare, because the kernel and the reference in float64 may resolve them differently
    inputs = [
        random_maps(*size, dtype),
        random_maps(*size, dtype),
        *random_weight_and_bias(size[0], dtype),
        *random_weight_and_bias(size[0], dtype),
    ]
    compare(
        lambda *tensors: fused_layers.residual_pool(*tensors, EPS, SLOPE), reference_residual_pool, inputs, tolerance
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (LOW_PRECISION, 1e-2)])
@pytest.mark.parametrize("channels", [1, 3])
def test_first_convolutions_of_images_equal_those_of_pytorch(channels, dtype, tolerance):
    x = random_maps(channels, 7, 9, dtype)
    weights = [torch.randn(64, channels, k, k).to(DEVICE, dtype, memory_format=torch.channels_last) for k in (3, 1)]

    def concatenated(function: Callable[..., tuple[Tensor, Tensor]], x: Tensor) -> Callable[..., Tensor]:
        return lambda *weights: torch.cat(function(x, *weights), 1)

    compare(
        concatenated(fused_layers.first_convolutions, x),
        concatenated(reference_first_convolutions, x.double()),
        weights,
        tolerance,
    )


def test_first_convolutions_of_maps_equal_those_of_pytorch():
    x = random_maps(64, 5, 6, torch.float32)
    weights = [torch.randn(160, 64, k, k, device=DEVICE) / 20 for k in (3, 1)]
    compare(
        lambda *tensors: torch.cat(fused_layers.first_convolutions(*tensors), 1),
        lambda *tensors: torch.cat(reference_first_convolutions(*tensors), 1),
        [x, *weights],
        1e-3 if CUDA else 1e-5,  # cuDNN may round to TF32
    )


def test_statistics_are_accurate_for_a_mean_of_a_thousand_standard_deviations():
    x = random_maps(64, 9, 9, torch.float32, mean=1000.0)
    x[0, :, 0, 0] = 0  # so that the result is not accurate merely because the first value was subtracted
    inputs = [x, *random_weight_and_bias(64, torch.float32)]
    compare(
        lambda *tensors: fused_layers.norm_leaky_relu(*tensors, EPS, SLOPE), reference_norm_leaky_relu, inputs, 2e-4
    )


def test_sums_include_the_rows_of_all_programs():
    inputs = [
        # so many images that several programs are needed; on a GPU, each of them sums several tiles
        random_maps(16, 64, 64, torch.float32, mean=3.0, count=60 if CUDA else 3),
        *random_weight_and_bias(16, torch.float32),
    ]
    compare(
        lambda *tensors: fused_layers.norm_leaky_relu(*tensors, EPS, SLOPE), reference_norm_leaky_relu, inputs, 2e-5
    )


def test_residual_pool_takes_the_first_of_equal_values_as_the_maximum():
    # rounded, so that some values are equal
    main, shortcut = random_maps(64, 4, 4, torch.float32).round(), random_maps(64, 4, 4, torch.float32).round()
    inputs = [main, shortcut, *random_weight_and_bias(64, torch.float32), *random_weight_and_bias(64, torch.float32)]
    compare(lambda *tensors: fused_layers.residual_pool(*tensors, EPS, SLOPE), reference_residual_pool, inputs, 2e-5)


@pytest.mark.parametrize(("square_size", "size"), [(5, 10), (5, 5), (2, 7)])
def test_drop_block_mask_is_zero_exactly_in_the_squares(square_size, size):
    noise = torch.rand(3, 32, size - square_size + 1, size - square_size + 1, device=DEVICE)
    probability = torch.tensor(0.05, device=DEVICE)
    covered = F.max_pool2d(F.pad((noise < probability).float(), [square_size - 1] * 4), square_size, stride=1)
    assert torch.equal(fused_layers.drop_block_mask(noise, probability, square_size, torch.float32), 1 - covered)
    assert 0 < covered.mean() < 1


@pytest.mark.parametrize("kind", ["norm_leaky_relu", "residual_pool"])
def test_second_derivatives_equal_those_of_pytorchs_layers(kind):
    maps = [random_maps(64, 5, 4, torch.float32) for _ in range(1 if kind == "norm_leaky_relu" else 2)]
    inputs = [*maps, *(value for _ in maps for value in random_weight_and_bias(64, torch.float32))]
    fused, reference = getattr(fused_layers, kind), globals()[f"reference_{kind}"]
    compare(gradient_of(lambda *tensors: fused(*tensors, EPS, SLOPE)), gradient_of(reference), inputs, 1e-4)


# the layers of `cell_triton_layers`, each with a reference from PyTorch
LAYERS: dict[str, tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., Tensor]]] = {
    "conv_1x1": (cell_triton_layers.conv_1x1, F.conv2d),
    "relu": (cell_triton_layers.relu, F.relu),
    "relu_even_odd": (
        cell_triton_layers.relu_even_odd,
        lambda x: torch.cat([F.relu(x)[..., ::2, ::2], F.pad(F.relu(x), (0, 1, 0, 1))[..., 1::2, 1::2]], 1),
    ),
}
for stride in (1, 2):
    LAYERS[f"max_pool, stride {stride}"] = (
        partial(cell_triton_layers.max_pool, stride=stride),
        partial(F.max_pool2d, kernel_size=3, stride=stride, padding=1),
    )
    LAYERS[f"avg_pool, stride {stride}"] = (
        partial(cell_triton_layers.avg_pool, stride=stride),
        partial(F.avg_pool2d, kernel_size=3, stride=stride, padding=1, count_include_pad=False),
    )
    for dilation in (1, 2):
        options = {"stride": stride, "dilation": dilation}
        LAYERS[f"relu_depthwise_conv, stride {stride}, dilation {dilation}"] = (
            partial(cell_triton_layers.relu_depthwise_conv, **options),
            lambda x, weight, options=options: F.conv2d(
                F.relu(x), weight, padding=options["dilation"], groups=x.shape[1], **options
            ),
        )


def random_inputs(layer: str, channels: int, height: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    shapes = {"conv_1x1": (32, channels, 1, 1), "relu_depthwise_conv": (channels, 1, 3, 3)}
    weights = [torch.randn(shape).to(DEVICE, dtype) for kind, shape in shapes.items() if layer.startswith(kind)]
    return [random_maps(channels, height, width, dtype, count=3), *weights]


@pytest.mark.parametrize(
    ("size", "dtype", "tolerance"), [((16, 7, 6), torch.float32, 2e-5), ((32, 4, 9), torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_equals_pytorchs_and_returns_its_input(layer, size, dtype, tolerance):
    fused, reference = LAYERS[layer]
    inputs = random_inputs(layer, *size, dtype)

    def output_and_square_of_input(function: Callable[..., tuple[Tensor, Tensor]], *tensors: Tensor) -> Tensor:
        y, x = function(*tensors)
        return torch.cat([y.flatten(), (x * x).flatten()])

    compare(lambda *tensors: fused(*tensors)[0], reference, inputs, tolerance)
    compare(
        partial(output_and_square_of_input, fused),
        partial(output_and_square_of_input, lambda *tensors: (reference(*tensors), tensors[0])),
        inputs,
        tolerance,
    )


def test_max_pool_takes_the_first_of_equal_values_as_the_maximum():
    compare(  # rounded inputs, so that some values are equal
        lambda x: cell_triton_layers.max_pool(x, 1)[0],
        LAYERS["max_pool, stride 1"][1],
        [random_maps(16, 6, 5, LOW_PRECISION).round()],
        1e-2,
    )


def test_weight_gradients_include_the_pixels_of_all_programs(monkeypatch):
    monkeypatch.setattr(cell_triton_layers, "WEIGHT_PROGRAMS", 2)
    fused, reference = LAYERS["relu_depthwise_conv, stride 1, dilation 1"]
    compare(
        lambda *tensors: fused(*tensors)[0],
        reference,
        random_inputs("relu_depthwise_conv", 16, 11, 13, torch.float32),
        2e-5,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_relu_concat_equals_pytorchs_layers(dtype, tolerance):
    inputs = [random_maps(channels, 5, 7, dtype) for channels in (48, 16, 32)]
    compare(cell_triton_layers.relu_concat, lambda *tensors: F.relu(torch.cat(tensors, 1)), inputs, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("size", SIZES)
def test_add_norm_equals_pytorchs_layers(size, dtype, tolerance):
    # a factor for each of seven images, as from drop path with rate 0.2
    factor = torch.tensor([0.0, 1.25, 1.25, 0.0, 1.25, 1.25, 1.25], device=DEVICE)
    inputs = [random_maps(*size, dtype), *random_weight_and_bias(size[0], dtype)]
    for addend in (random_maps(*size, dtype), None):
        tensors = inputs if addend is None else [addend, *inputs]

        def fused(*tensors: Tensor) -> Tensor:
            return fused_layers.add_norm(tensors[0] if len(tensors) == 4 else None, *tensors[-3:], EPS, factor)

        def reference(*tensors: Tensor) -> Tensor:
            return sum(tensors[:-3], factor.view(-1, 1, 1, 1) * batch_norm(*tensors[-3:]))

        compare(fused, reference, tensors, tolerance)


def gradient_of(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def gradient(*tensors: Tensor) -> Tensor:
        value = function(*tensors)
        return torch.autograd.grad((value**3).sum(), tensors[0], create_graph=True)[0]

    return gradient


@pytest.mark.parametrize("layer", LAYERS)
def test_second_derivatives_of_a_layer_equal_those_of_pytorchs_layer(layer):
    fused, reference = LAYERS[layer]

    def output_and_input(function: Callable[..., tuple[Tensor, Tensor]], *tensors: Tensor) -> Tensor:
        y, x = function(*tensors)
        return torch.cat([y.flatten(), x.flatten()])

    inputs = random_inputs(layer, 16, 5, 4, torch.float32)
    compare(
        gradient_of(partial(output_and_input, fused)),
        gradient_of(partial(output_and_input, lambda *tensors: (reference(*tensors), tensors[0]))),
        inputs,
        1e-4,
    )


def test_second_derivatives_of_add_norm_and_relu_concat_equal_those_of_pytorchs_layers():
    factor = torch.tensor([0.0, 1.25, 1.25], device=DEVICE)
    inputs = [random_maps(16, 5, 4, torch.float32, count=3), *random_weight_and_bias(16, torch.float32)]

    def fused(x: Tensor, *norm: Tensor) -> Tensor:
        return cell_triton_layers.relu_concat(fused_layers.add_norm(x, x**2, *norm, EPS, factor), x)

    def reference(x: Tensor, *norm: Tensor) -> Tensor:
        return F.relu(torch.cat([x + factor.view(-1, 1, 1, 1) * batch_norm(x**2, *norm), x], 1))

    compare(gradient_of(fused), gradient_of(reference), inputs, 1e-4)


def test_fused_cells_have_the_gradients_of_unfused_cells(monkeypatch):
    nodes = [[(0, "sep_conv_3x3"), (1, "max_pool_3x3")], [(0, "skip"), (2, "dil_conv_3x3")]]
    normal = [*nodes, [(1, "skip"), (3, "skip")]]
    reduction = [*nodes, [(1, "avg_pool_3x3"), (2, "conv_1x5_5x1")]]
    architecture = {"normal": normal, "reduction": reduction}
    net = cell_network(architecture, cells=3, channels=16, drop_rate=0.3).to(DEVICE).train()
    batch_size, size = (16, 32) if CUDA else (4, 7)
    # 192 features: three nodes with 16 channels, doubled twice
    x, target = torch.rand(batch_size, 3, size, size, device=DEVICE), torch.randn(batch_size, 192, device=DEVICE)
    params = {name: value.detach().requires_grad_() for name, value in net.named_parameters()}
    body = [value for name, value in params.items() if name.startswith("features.")]

    def gradients(dtype: torch.dtype | None) -> Tensor:
        torch.manual_seed(0)
        features = apply_features(net, params, x, dtype)
        return torch.cat([value.flatten() for value in torch.autograd.grad((features * target).sum(), body)])

    float32_grads = gradients(None)
    if not CUDA:  # nothing is fused on a CPU by default
        monkeypatch.setattr(cells, "can_fuse", lambda x, channels: True)
        fused_grads = gradients(None)
        assert not torch.equal(fused_grads, float32_grads)
        assert relative_error(fused_grads, float32_grads) < 1e-4
        return
    fused_grads = gradients(torch.bfloat16)
    monkeypatch.setattr(fused_triton_kernels, "AVAILABLE", False)
    unfused_grads = gradients(torch.bfloat16)
    assert not torch.equal(fused_grads, unfused_grads)
    assert relative_error(fused_grads, float32_grads) < 1.1 * relative_error(unfused_grads, float32_grads)


@pytest.mark.skipif(not CUDA, reason="the network uses the kernels only on a GPU")
def test_fused_resnet12_has_the_gradients_of_the_unfused_one(monkeypatch):
    net = resnet12(3, 84, drop_rate=0.0).to(DEVICE).train()
    x = torch.rand(16, 3, 84, 84, device=DEVICE)
    params = {name: value.detach().requires_grad_() for name, value in net.named_parameters()}
    body = [value for name, value in params.items() if name.startswith("features.")]
    target = torch.randn(16, 640, device=DEVICE)

    def gradients(dtype: torch.dtype | None) -> Tensor:
        features = apply_features(net, params, x, dtype)
        return torch.cat([value.flatten() for value in torch.autograd.grad((features * target).sum(), body)])

    float32_grads, fused_grads = gradients(None), gradients(torch.bfloat16)
    monkeypatch.setattr(fused_triton_kernels, "AVAILABLE", False)
    unfused_grads = gradients(torch.bfloat16)
    assert not torch.equal(fused_grads, unfused_grads)
    assert relative_error(fused_grads, float32_grads) < 1.1 * relative_error(unfused_grads, float32_grads)
