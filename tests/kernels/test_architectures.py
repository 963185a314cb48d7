from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from metabridge.errors import InputError
from metabridge.kernels import (
    AnalyticKernel,
    AveragePool,
    Conv,
    Dense,
    Erf,
    Flatten,
    GlobalAveragePool,
    LayerNorm,
    ReLU,
    Residual,
    conv4_kernel,
    convolutional_kernel,
    fully_connected_kernel,
    residual_kernel,
)

REFERENCE = Path(__file__).parent / "reference"  # written by neural_tangents_reference.py
VECTORS = np.load(REFERENCE / "vectors.npz")
IMAGES = np.load(REFERENCE / "images.npz")
# The weight and the bias variance, by the last word of a network's name in VECTORS.
VARIANCES = {"he": (2.0, 0.0), "biased": (1.5, 0.3)}
BIASED = {"weight_variance": 1.5, "bias_variance": 0.3}

IMAGE_KERNELS = {
    "same": convolutional_kernel([Conv(3), ReLU(), Conv(3, padding=1), ReLU(), Flatten(), Dense()]),
    "valid": convolutional_kernel([Conv(3, padding="valid"), ReLU(), Conv(2, padding=0), ReLU(), Flatten(), Dense()]),
    "strided": convolutional_kernel([Conv(3, 2), ReLU(), Conv(3, 2, "valid", **BIASED), ReLU(), Flatten(), Dense()]),
    "even": convolutional_kernel([Conv(4, 3), ReLU(), Conv(2), ReLU(), Flatten(), Dense()]),
    "erf": convolutional_kernel([Conv(3), Erf(), Conv(3), Erf(), GlobalAveragePool(), Dense()]),
    "pooled": convolutional_kernel([Conv(3), ReLU(), AveragePool(2), Conv(3), ReLU(), Flatten(), Dense()]),
    "overlapping": convolutional_kernel(
        [Conv(3, **BIASED), ReLU(), AveragePool(3, 2), Conv(2, 2, "valid"), ReLU(), GlobalAveragePool(), Dense()]
    ),
    "global": convolutional_kernel(
        [Conv(3, 2), ReLU(), Conv(3, 1, "valid", **BIASED), ReLU(), GlobalAveragePool(), Dense()]
    ),
    "hidden dense layer": convolutional_kernel(
        [Conv(3, **BIASED), ReLU(), Flatten(), Dense(1.5, 0.3), ReLU(), Dense()]
    ),
    "residual": convolutional_kernel([Conv(3), *[Residual((ReLU(), Conv(3)))] * 2, ReLU(), Flatten(), Dense()]),
    "conv4 flatten": conv4_kernel(),
    "conv4 global": conv4_kernel("global", **BIASED),
}
KERNELS = {
    "relu": fully_connected_kernel(4),
    "erf with bias": fully_connected_kernel(3, "erf", 1.5, 0.3),
    "residual": residual_kernel(5),
    "residual with LayerNorm": residual_kernel(5, layer_norm=True),
    "strided": IMAGE_KERNELS["strided"],
    "pooled": IMAGE_KERNELS["pooled"],
}


def vector_kernel(name: str) -> AnalyticKernel:
    """Return the kernel of a network in VECTORS, such as "fully_connected 3 relu he" or "residual 3 norm biased"."""
    kind, depth, detail, variances = name.split()
    weight, bias = VARIANCES[variances]
    if kind == "residual":
        return residual_kernel(int(depth), layer_norm=detail == "norm", weight_variance=weight, bias_variance=bias)
    return fully_connected_kernel(int(depth), detail, weight, bias)


def points(kernel: AnalyticKernel, count: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    shape = (count, 2, 8, 9) if kernel.pixel_dims else (count, 6)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def difference(value: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    return ((value.double() - expected).abs().max() / expected.abs().max()).item()


# In LayerNorm, neural-tangents adds 1e-12 to the variance. At angles of 0 and π, this changes the kernel by √1e-12.
@pytest.mark.parametrize("name", sorted({key.partition("/")[0] for key in VECTORS.files if "/" in key}))
def test_kernels_of_vectors_equal_neural_tangents(name: str) -> None:
    x, z = (torch.from_numpy(VECTORS[key]) for key in "xz")
    for result, key in zip(vector_kernel(name).both(x, z), ("ntk", "nngp")):
        assert difference(result, torch.from_numpy(VECTORS[f"{name}/{key}"])) < (1e-8 if "norm" in name else 1e-13)


@pytest.mark.parametrize("name", IMAGE_KERNELS)
def test_kernels_of_images_equal_neural_tangents(name: str) -> None:
    size = "large" if name.startswith("conv4") else "small"
    x, z = (torch.from_numpy(IMAGES[f"{size}/{key}"]) for key in "xz")
    for result, key in zip(IMAGE_KERNELS[name].both(x, z), ("ntk", "nngp")):
        assert difference(result, torch.from_numpy(IMAGES[f"{name}/{key}"])) < 1e-13


Params = dict[str, Tensor]
Net = Callable[[Params, Tensor], Tensor]


def finite_dense(depth: int, width: int, inputs: int, *, skip: bool, norm: bool) -> tuple[Net, dict[str, int]]:
    """Return a network of finite width, whose parameters are standard normal, and the fan-in of each layer."""
    weight, bias = math.sqrt(BIASED["weight_variance"]), math.sqrt(BIASED["bias_variance"])

    def layer(params: Params, index: int, x: Tensor) -> Tensor:
        return weight / math.sqrt(x.shape[1]) * x @ params[f"{index}.weight"] + bias * params[f"{index}.bias"]

    def net(params: Params, x: Tensor) -> Tensor:
        h = layer(params, 0, x)
        for index in range(1, depth):
            if norm:
                h = nn.functional.layer_norm(h, h.shape[1:], eps=0)
            branch = layer(params, index, h.relu())
            h = h + branch if skip and index < depth - 1 else branch
        return h[:, 0]

    return net, {str(index): inputs if index == 0 else width for index in range(depth)}


def finite_kernels(net: Net, params: Params, x: Tensor, readout: str) -> tuple[Tensor, Tensor]:
    """Return Θ and K of a finite network. Names of the parameters of its readout begin with `readout`."""
    params = {name: value.requires_grad_() for name, value in params.items()}
    rows = [torch.autograd.grad(output, list(params.values()), retain_graph=True) for output in net(params, x)]
    grams = {
        name: (jacobian := torch.stack([row[index].flatten() for row in rows])) @ jacobian.mT
        for index, name in enumerate(params)
    }
    ntk = torch.stack(list(grams.values())).sum(0).detach()
    return ntk, torch.stack([gram for name, gram in grams.items() if name.startswith(readout)]).sum(0).detach()


def mean_errors(kernels: list[tuple[Tensor, Tensor]], limit: tuple[Tensor, Tensor]) -> Tensor:
    """Return the relative errors of Θ and K, each a mean over the networks."""
    return torch.tensor(
        [[(value - exact).norm() / exact.norm() for value, exact in zip(pair, limit)] for pair in kernels]
    ).mean(0)


@pytest.mark.parametrize("architecture", ["plain", "residual", "residual with LayerNorm"])
def test_kernels_of_finite_nets_approach_the_limit_as_one_over_the_root_of_the_width(architecture: str) -> None:
    depth, skip, norm = 4, architecture != "plain", "LayerNorm" in architecture
    kernel = residual_kernel(depth, layer_norm=norm, **BIASED) if skip else fully_connected_kernel(depth, **BIASED)
    x = points(kernel, 4)
    limit = kernel.both(x)
    errors = {}
    for width in (64, 256, 1024):
        net, fan_ins = finite_dense(depth, width, x.shape[1], skip=skip, norm=norm)
        kernels = []
        for seed in range(16):
            generator = torch.Generator().manual_seed(seed)
            params = {}
            for name, fan_in in fan_ins.items():
                outputs = 1 if name == str(depth - 1) else width
                params[f"{name}.weight"] = torch.randn(fan_in, outputs, generator=generator, dtype=torch.float64)
                params[f"{name}.bias"] = torch.randn(outputs, generator=generator, dtype=torch.float64)
            kernels.append(finite_kernels(net, params, x, readout=f"{depth - 1}."))
        errors[width] = mean_errors(kernels, limit)
    assert (errors[1024] < 0.15).all()
    assert ((errors[64] / errors[1024]) > 2.4).all()  # 4 in expectation; the margin covers the noise of 16 networks
    assert ((errors[64] / errors[1024]) < 7).all()


def test_kernels_of_finite_convolutional_nets_approach_the_limit() -> None:
    kernel = convolutional_kernel([Conv(3), ReLU(), AveragePool(2), Conv(2, padding=0), ReLU(), Flatten(), Dense()])
    x = points(kernel, 3)[:, :, :6, :7]
    limit = kernel.both(x)

    def net(params: Params, x: Tensor) -> Tensor:
        def scaled(name: str) -> Tensor:
            return params[name] * math.sqrt(2 / params[name][0].numel())

        h = nn.functional.avg_pool2d(nn.functional.conv2d(x, scaled("0."), padding=1).relu(), 2)
        h = nn.functional.conv2d(h, scaled("1.")).relu()
        return (h.flatten(1) @ scaled("2.").mT)[:, 0]

    errors = {}
    for width in (32, 512):
        kernels = []
        for seed in range(16):
            generator = torch.Generator().manual_seed(seed)
            shapes = {"0.": (width, 2, 3, 3), "1.": (width, width, 2, 2), "2.": (1, width * 2 * 2)}
            params = {
                name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()
            }
            kernels.append(finite_kernels(net, params, x, readout="2."))
        errors[width] = mean_errors(kernels, limit)
    assert (errors[512] < 0.12).all()
    assert ((errors[32] / errors[512]) > 2.4).all()  # 4 in expectation, as above


def exact_relu_kernels(x: Tensor, z: Tensor, depth: int) -> tuple[float, float]:
    """Return Θ and K of one pair to 60 digits, for He initialization without bias."""
    with mpmath.workdps(60):
        a, b = ([mpmath.mpf(value) for value in point.tolist()] for point in (x, z))
        scale = 2 * mpmath.sqrt(mpmath.fdot(a, a) * mpmath.fdot(b, b)) / len(a)
        rho = 2 * mpmath.fdot(a, b) / len(a) / scale
        ntk = rho
        for _ in range(depth - 1):
            angle = mpmath.acos(max(min(rho, mpmath.mpf(1)), mpmath.mpf(-1)))
            derivative = 1 - angle / mpmath.pi
            rho = rho * derivative + mpmath.sin(angle) / mpmath.pi
            ntk = ntk * derivative + rho
        return float(ntk * scale), float(rho * scale)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-7), (torch.float64, 1e-7)])
def test_kernels_of_twenty_layers_are_accurate_at_every_angle(dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x, orthogonal = torch.randn(2, 50, generator=generator, dtype=torch.float64)
    orthogonal = (orthogonal - (orthogonal @ x) / (x @ x) * x) * x.norm() / orthogonal.norm()
    angles = [0, 1e-9, 1e-8, 3e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1, 1, 2, 3, 3.14, 3.1415, 3.14159265, math.pi]
    z = torch.stack([x * math.cos(angle) + orthogonal * math.sin(angle) for angle in angles]).to(dtype)
    x = x.to(dtype)
    ntk, nngp = fully_connected_kernel(20).both(x[None], z)
    for column, point in enumerate(z):
        exact_ntk, exact_nngp = exact_relu_kernels(x, point, 20)
        assert ntk[0, column].item() == pytest.approx(exact_ntk, rel=tolerance)
        assert nngp[0, column].item() == pytest.approx(exact_nngp, rel=tolerance)


def test_single_precision_agrees_with_double_precision_at_twenty_layers() -> None:
    for kernel in (
        fully_connected_kernel(20),
        fully_connected_kernel(20, "erf"),
        residual_kernel(20),
        residual_kernel(20, layer_norm=True),
    ):
        x = points(kernel, 20, dtype=torch.float32)
        x = torch.cat([x, x[:3] * (1 + 1e-4), -x[3:6], x[6:9] + 1e-4 * x[9:12]])
        for single, double in zip(kernel.both(x), kernel.both(x.double())):
            torch.testing.assert_close(single.double(), double, rtol=1e-6, atol=1e-6 * double.max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kernel_of_equal_points_equals_the_diagonal(dtype: torch.dtype) -> None:
    kernel = fully_connected_kernel(20)
    x = torch.randn(30, 784, generator=torch.Generator().manual_seed(0)).to(dtype)
    same = kernel.ntk(x, x.clone()).diagonal()
    torch.testing.assert_close(same, kernel.ntk(x).diagonal(), rtol=1e-13 if dtype == torch.float64 else 1e-6, atol=0)
    # Each of the 20 layers adds K(x, x) to Θ(x, x).
    torch.testing.assert_close(same, 20 * 2 * x.square().mean(1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_without_z_is_symmetric_and_equals_the_kernel_with_z_equal_to_x(name: str) -> None:
    kernel = KERNELS[name]
    x = points(kernel, 7)
    for without_z, with_z in zip(kernel.both(x), kernel.both(x, x.clone())):
        assert torch.equal(without_z, without_z.mT)
        torch.testing.assert_close(without_z, with_z, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_does_not_depend_on_the_size_of_the_tiles(name: str) -> None:
    kernel = KERNELS[name]
    x, z = points(kernel, 13), points(kernel, 11, seed=1)
    memories = (2**power for power in range(5, 40))
    minimum = next(memory for memory in memories if _fits_in_memory(replace(kernel, memory=memory), x))
    for memory in (minimum, 5 * minimum, 30 * minimum):
        tiled = replace(kernel, memory=memory)
        for columns in (None, z):
            for value, untiled in zip(tiled.both(x, columns), kernel.both(x, columns)):
                torch.testing.assert_close(value, untiled, rtol=1e-12, atol=1e-12)


def _fits_in_memory(kernel: AnalyticKernel, x: Tensor) -> bool:
    try:
        kernel.nngp(x[:1])
    except InputError:
        return False
    return True


class MemoryMeter(TorchDispatchMode):
    """Counts the bytes held by tensors and records the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.current = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in (result,) if isinstance(result, Tensor) else ():
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.seen and storage.nbytes():
                self.seen.add(storage.data_ptr())
                self.current += storage.nbytes()
                self.peak = max(self.peak, self.current)
                weakref.finalize(storage, self._release, storage.data_ptr(), storage.nbytes())
        return result

    def _release(self, pointer: int, size: int) -> None:
        self.seen.discard(pointer)
        self.current -= size


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_stays_within_its_memory_limit(name: str) -> None:
    kernel = replace(KERNELS[name], memory=2**22 if KERNELS[name].pixel_dims == 4 else 2**20)
    x = points(kernel, 12 if kernel.pixel_dims == 4 else 60 if kernel.pixel_dims else 400)
    with MemoryMeter() as meter:
        kernel.both(x, x.clone())
    results_and_inputs = 2 * 8 * len(x) ** 2 + 2 * x.nbytes
    assert meter.peak - results_and_inputs < kernel.memory


@pytest.mark.parametrize("depth", [1, 2, 10, 100])
def test_he_initialized_relu_nets_keep_the_variance(depth: int) -> None:
    x = points(fully_connected_kernel(depth), 5)
    ntk, nngp = fully_connected_kernel(depth).both(x)
    torch.testing.assert_close(nngp.diagonal(), 2 * x.square().mean(1), rtol=1e-12, atol=0)
    torch.testing.assert_close(ntk.diagonal(), depth * nngp.diagonal(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("depth", [2, 5, 20])
def test_nngp_of_residual_nets_doubles_per_layer_and_ntk_with_layer_norm_grows_linearly(depth: int) -> None:
    x = points(fully_connected_kernel(depth), 5)
    nngp = residual_kernel(depth).nngp(x).diagonal()
    torch.testing.assert_close(nngp, 2.0 ** (depth - 2) * 2 * x.square().mean(1), rtol=1e-12, atol=0)
    ntk, nngp = residual_kernel(depth, layer_norm=True).both(x)
    torch.testing.assert_close(nngp.diagonal(), torch.ones_like(nngp.diagonal()), rtol=1e-12, atol=0)
    torch.testing.assert_close(ntk.diagonal(), (depth / 2 + 1) * torch.ones(5, dtype=x.dtype), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_are_positive_definite(name: str) -> None:
    kernel = KERNELS[name]
    for matrix in kernel.both(points(kernel, 12)):
        assert torch.linalg.eigvalsh(matrix).min() > 0


@pytest.mark.parametrize("name", KERNELS)
def test_nngp_and_ntk_equal_the_results_of_both(name: str) -> None:
    kernel = KERNELS[name]
    x, z = points(kernel, 4), points(kernel, 3, seed=1)
    assert torch.equal(kernel.nngp(x, z), kernel.both(x, z)[1])
    assert torch.equal(kernel.ntk(x), kernel.both(x)[0])


def test_no_points_give_an_empty_kernel() -> None:
    x = torch.ones(3, 4)
    assert fully_connected_kernel(3).ntk(x, x[:0]).shape == (3, 0)
    assert fully_connected_kernel(3).ntk(x[:0]).shape == (0, 0)


def test_pooling_over_windows_of_one_pixel_changes_nothing() -> None:
    unpooled = convolutional_kernel([Conv(3), ReLU(), Flatten(), Dense()])
    pooled = convolutional_kernel([Conv(3), ReLU(), AveragePool(1), Flatten(), Dense()])
    x = points(unpooled, 3)
    torch.testing.assert_close(unpooled.ntk(x), pooled.ntk(x))


def test_zero_points_have_a_kernel_if_there_is_a_bias() -> None:
    kernel = fully_connected_kernel(3, bias_variance=0.1)
    assert kernel.ntk(torch.zeros(1, 4)).item() == pytest.approx(0.6)  # sum over 3 layers of K: 0.1, 0.2, 0.3


NAN = torch.tensor([[1.0, 2.0], [math.nan, 1.0], [1.0, math.inf]])
ZERO = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
ONES = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (lambda: fully_connected_kernel(3).ntk(NAN), "rows 1, 2 of x: NaN"),
        (lambda: fully_connected_kernel(3).ntk(ZERO[:1], NAN), "rows 1, 2 of z: NaN"),
        (lambda: fully_connected_kernel(3).ntk(ZERO), "row 1 of x: zero"),
        (lambda: residual_kernel(3, layer_norm=True).ntk(ZERO), "row 1 of x: zero"),
        (lambda: conv4_kernel().ntk(torch.zeros(1, 1, 16, 16)), "row 0 of x: zero"),
        (lambda: fully_connected_kernel(3).ntk(ONES.long()), "Use x.double()"),
        (lambda: fully_connected_kernel(3).ntk(ONES.half()), "Use x.double()"),
        (lambda: fully_connected_kernel(3).ntk(ONES, ONES.double()), "must have the same dtype"),
        (lambda: fully_connected_kernel(3).ntk(ONES, ONES[:, :2]), "the same shape"),
        (lambda: fully_connected_kernel(3).ntk(ONES, torch.ones(2, 3, device="meta")), "Use z.to"),
        (lambda: fully_connected_kernel(3).ntk(torch.ones(2, 3, 4, 4)), r"x.flatten\(1\)"),
        (lambda: conv4_kernel().ntk(ONES), "must be images"),
        (lambda: conv4_kernel().ntk(torch.ones(1, 1, 15, 16)), "15×16 pixels are too small"),
        (lambda: conv4_kernel(memory=2**20).ntk(torch.ones(1, 1, 28, 28)), "memory is 1048576 bytes"),
        (lambda: residual_kernel(200).ntk(ONES), "overflows torch.float32"),
        (lambda: fully_connected_kernel(0), "depth is 0"),
        (lambda: residual_kernel(0), "depth is 0"),
        (lambda: fully_connected_kernel(2, "tanh"), "activation is 'tanh', but must be one of relu"),
        (lambda: fully_connected_kernel(2, ["relu"]), r"activation is \['relu'\], but must be one of relu"),
        (lambda: fully_connected_kernel(2, weight_variance=0.0), "weight_variance is 0.0"),
        (lambda: fully_connected_kernel(2, bias_variance=-1.0), "bias_variance is -1.0"),
        (lambda: conv4_kernel("max"), "pooling is 'max'"),
        (lambda: Conv(0), "size is 0"),
        (lambda: Conv(3, padding="full"), "padding is 'full'"),
        (lambda: convolutional_kernel([Conv(3), Dense()]), "one Flatten or GlobalAveragePool"),
        (lambda: convolutional_kernel([Flatten(), Conv(3), Dense()]), "one Flatten or GlobalAveragePool"),
        (lambda: AnalyticKernel((Residual((ReLU(), Conv(3))), Dense())), "one Flatten or GlobalAveragePool"),
        (lambda: convolutional_kernel([Dense()]), "needs a Flatten"),
        (lambda: AnalyticKernel((Dense(), ReLU())), "last layer must be Dense"),
        (
            lambda: convolutional_kernel([Conv(3), Residual((ReLU(), Conv(3, 2))), Flatten(), Dense()]).ntk(
                torch.ones(1, 1, 8, 8)
            ),
            "changes the size of the images",
        ),
    ],
)
def test_invalid_input_is_reported(compute: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(InputError, match=message):
        compute()


def test_pooling_in_a_residual_branch_uses_every_pair_of_pixels() -> None:
    """Pooling over windows of one pixel is the identity, but is defined only on covariances of all pairs of pixels."""
    unpooled, pooled = (
        convolutional_kernel([Conv(3), Residual((ReLU(), *pool, Conv(3))), ReLU(), Flatten(), Dense()])
        for pool in ((), (AveragePool(1),))
    )
    x = points(unpooled, 3)
    torch.testing.assert_close(pooled.ntk(x), unpooled.ntk(x))


def test_layer_norm_makes_the_kernel_independent_of_the_scale_of_points() -> None:
    kernel = AnalyticKernel((Dense(), LayerNorm(), ReLU(), Dense()))
    x = points(kernel, 4)
    torch.testing.assert_close(kernel.nngp(x), kernel.nngp(3 * x))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_on_the_gpu_equal_those_on_the_cpu(name: str) -> None:
    kernel = KERNELS[name]
    x, z = points(kernel, 9), points(kernel, 6, seed=1)
    for columns in (None, z):
        gpu_kernels = kernel.both(x.cuda(), None if columns is None else columns.cuda())
        for gpu, cpu in zip(gpu_kernels, kernel.both(x, columns)):
            torch.testing.assert_close(gpu.cpu(), cpu, rtol=1e-10, atol=1e-10)
