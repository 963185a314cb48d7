"""Closed-form twins: NTK and NNGP of wide and of finite networks, kernels between tasks, and what they predict."""

from metabridge.kernels.activations import Cosine, Erf, Gelu, ReLU, Sine
from metabridge.kernels.analytic import conv4, convolutional, fully_connected, residual
from metabridge.kernels.convolution import AveragePool, Conv, Flatten, GlobalAveragePool
from metabridge.kernels.empirical import Empirical
from metabridge.kernels.kernel import Kernel
from metabridge.kernels.layers import Dense, LayerNorm, Residual
from metabridge.kernels.meta import anil_kernel, mtl_kernel, split_kernel
from metabridge.kernels.network import AnalyticKernel
from metabridge.kernels.predict import FittedKernel, KernelLearner, predict_anil, predict_maml, predict_mtl

__all__ = [
    "AnalyticKernel",
    "AveragePool",
    "Conv",
    "Cosine",
    "Dense",
    "Empirical",
    "Erf",
    "FittedKernel",
    "Flatten",
    "Gelu",
    "GlobalAveragePool",
    "Kernel",
    "KernelLearner",
    "LayerNorm",
    "ReLU",
    "Residual",
    "Sine",
    "anil_kernel",
    "conv4",
    "convolutional",
    "fully_connected",
    "mtl_kernel",
    "predict_anil",
    "predict_maml",
    "predict_mtl",
    "residual",
    "split_kernel",
]
