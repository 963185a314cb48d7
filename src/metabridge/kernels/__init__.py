"""Closed-form twins: NTK and NNGP of wide and of finite networks, kernels between tasks, and what they predict."""

from metabridge.kernels.activations import Cosine, Erf, Gelu, ReLU, Sine
from metabridge.kernels.analytic_kernel import AnalyticKernel
from metabridge.kernels.architectures import conv4, convolutional, fully_connected, residual
from metabridge.kernels.conv_layers import AveragePool, Conv, Flatten, GlobalAveragePool
from metabridge.kernels.empirical import Empirical
from metabridge.kernels.kernel import Kernel
from metabridge.kernels.kernel_predictors import FittedKernel, KernelLearner, predict_anil, predict_maml, predict_mtl
from metabridge.kernels.layers import Dense, LayerNorm, Residual
from metabridge.kernels.meta_kernels import anil_kernel, mtl_kernel, split_kernel

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
