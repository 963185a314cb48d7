"""Computes the reference kernels of test_architectures.py with the JAX library neural-tangents.

It needs a separate environment, and writes reference/vectors.npz and reference/images.npz next to this file:

    python3.11 -m venv nt
    nt/bin/pip install neural-tangents==0.6.5 jax==0.4.23 jaxlib==0.4.23 tf2jax==0.3.5 "numpy<2" "scipy<1.13"
    nt/bin/python tests/kernels/neural_tangents_reference.py
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np

if find_spec("neural_tangents"):  # pytest imports this file too, to collect doctests
    import jax
    from neural_tangents import stax

    jax.config.update("jax_enable_x64", True)

FOLDER = Path(__file__).parent / "reference"
HE = (2.0, 0.0)  # weight and bias variance
BIASED = (1.5, 0.3)  # weight and bias variance
ACTIVATIONS = ("relu", "leaky-relu", "erf", "gelu", "sin", "cos", "identity")


def activate(name):
    if name == "leaky-relu":
        return stax.LeakyRelu(0.01)
    return getattr(stax, name.title())()


def dense(weight_variance, bias_variance):
    return stax.Dense(1, W_std=weight_variance**0.5, b_std=bias_variance**0.5)


def conv(size, stride, padding, weight_variance=2.0, bias_variance=0.0):
    return stax.Conv(1, (size, size), (stride, stride), padding, W_std=weight_variance**0.5, b_std=bias_variance**0.5)


def fully_connected(depth, activation, variances):
    hidden = [layer for _ in range(depth - 1) for layer in (dense(*variances), activate(activation))]
    return stax.serial(*hidden, dense(*variances))


def residual(depth, layer_norm, variances):
    norm = [stax.LayerNorm()] if layer_norm else []
    block = [
        stax.FanOut(2),
        stax.parallel(stax.Identity(), stax.serial(stax.Relu(), dense(*variances))),
        stax.FanInSum(),
        *norm,
    ]
    return stax.serial(dense(*variances), *norm, *block * (depth - 2), stax.Relu(), dense(*variances))


def conv4(pooling, variances):
    block = [conv(3, 1, "SAME", *variances), stax.Relu(), stax.AvgPool((2, 2), (2, 2))]
    return stax.serial(*block * 4, pooling, dense(*variances))


def vector_networks():
    for depth in range(1, 6):
        for activation in ("relu", "erf"):
            yield f"fully_connected {depth} {activation} he", fully_connected(depth, activation, HE)
            yield f"fully_connected {depth} {activation} biased", fully_connected(depth, activation, BIASED)
    for activation in ACTIVATIONS:
        yield f"fully_connected 4 {activation} biased", fully_connected(4, activation, BIASED)
    for depth in range(2, 6):
        yield f"residual {depth} plain he", residual(depth, False, HE)
        yield f"residual {depth} plain biased", residual(depth, False, BIASED)
        yield f"residual {depth} norm he", residual(depth, True, HE)
        yield f"residual {depth} norm biased", residual(depth, True, BIASED)


def image_networks():
    relu, flatten, pool, global_pool = stax.Relu(), stax.Flatten(), stax.AvgPool((2, 2), (2, 2)), stax.GlobalAvgPool()
    readout = dense(*HE)
    yield "same", stax.serial(conv(3, 1, "SAME"), relu, conv(3, 1, "SAME"), relu, flatten, readout)
    yield "valid", stax.serial(conv(3, 1, "VALID"), relu, conv(2, 1, "VALID"), relu, flatten, readout)
    yield "strided", stax.serial(conv(3, 2, "SAME"), relu, conv(3, 2, "VALID", *BIASED), relu, flatten, readout)
    yield "even", stax.serial(conv(4, 3, "SAME"), relu, conv(2, 1, "SAME"), relu, flatten, readout)
    yield "erf", stax.serial(conv(3, 1, "SAME"), stax.Erf(), conv(3, 1, "SAME"), stax.Erf(), global_pool, readout)
    yield "pooled", stax.serial(conv(3, 1, "SAME"), relu, pool, conv(3, 1, "SAME"), relu, flatten, readout)
    overlapping = stax.AvgPool((3, 3), (2, 2))
    yield (
        "overlapping",
        stax.serial(conv(3, 1, "SAME", *BIASED), relu, overlapping, conv(2, 2, "VALID"), relu, global_pool, readout),
    )
    yield "global", stax.serial(conv(3, 2, "SAME"), relu, conv(3, 1, "VALID", *BIASED), relu, global_pool, readout)
    hidden = stax.serial(flatten, dense(*BIASED), relu, readout)
    yield "hidden dense layer", stax.serial(conv(3, 1, "SAME", *BIASED), relu, hidden)
    branch = stax.serial(relu, conv(3, 1, "SAME"))
    block = (stax.FanOut(2), stax.parallel(stax.Identity(), branch), stax.FanInSum())
    yield "residual", stax.serial(conv(3, 1, "SAME"), *block * 2, relu, flatten, readout)
    yield "conv4 flatten", conv4(flatten, HE)
    yield "conv4 global", conv4(global_pool, BIASED)


def kernels(networks, x, z):
    arrays = {}
    for name, (_, _, kernel) in networks:
        for key, value in kernel(x, z, ("ntk", "nngp"))._asdict().items():
            arrays[f"{name}/{key}"] = np.asarray(value)
    return arrays


def main():
    random = np.random.default_rng(0)
    FOLDER.mkdir(exist_ok=True)
    x, z = random.normal(size=(5, 7)), random.normal(size=(4, 7))
    z[0], z[1] = 2 * x[0], -x[1]  # parallel, antiparallel
    np.savez_compressed(FOLDER / "vectors.npz", x=x, z=z, **kernels(vector_networks(), x, z))
    x, z = random.normal(size=(3, 2, 9, 10)), random.normal(size=(2, 2, 9, 10))
    x[1, :, :4] = 0  # pixels of variance 0
    arrays = {"small/x": x, "small/z": z}
    networks = dict(image_networks())
    channels_last = (0, 2, 3, 1)
    small = [(name, network) for name, network in networks.items() if not name.startswith("conv4")]
    arrays |= kernels(small, x.transpose(channels_last), z.transpose(channels_last))
    x, z = random.normal(size=(2, 1, 28, 28)), random.normal(size=(2, 1, 28, 28))
    arrays |= {"large/x": x, "large/z": z}
    large = [(name, network) for name, network in networks.items() if name.startswith("conv4")]
    arrays |= kernels(large, x.transpose(channels_last), z.transpose(channels_last))
    np.savez_compressed(FOLDER / "images.npz", **arrays)


if __name__ == "__main__":
    main()
