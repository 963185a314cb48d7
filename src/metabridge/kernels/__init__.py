"""NTK and NNGP kernels of networks, and predictions of multi-task learning (MTL), ANIL and MAML from them.

The neural tangent kernel (NTK) consists of the inner products of the gradients with respect to all parameters, and the
kernel of the neural network Gaussian process (NNGP) of those with respect to the last layer's parameters. Networks may
be finite or infinitely wide.
"""

from metabridge.kernels.activations import GELU, Cos, Erf, ReLU, Sin
from metabridge.kernels.analytic_kernel import AnalyticKernel
from metabridge.kernels.architectures import conv4_kernel, convolutional_kernel, fully_connected_kernel, residual_kernel
from metabridge.kernels.conv_layers import AveragePool, Conv, Flatten, GlobalAveragePool
from metabridge.kernels.empirical import EmpiricalKernel
from metabridge.kernels.kernel import Kernel
from metabridge.kernels.kernel_predictors import (
    FittedKernelLearner,
    KernelLearner,
    predict_anil,
    predict_maml,
    predict_mtl,
)
from metabridge.kernels.layers import Dense, LayerNorm, Residual
from metabridge.kernels.meta_kernels import anil_kernel, meta_ntk, mtl_kernel

__all__ = [
    "GELU",
    "AnalyticKernel",
    "AveragePool",
    "Conv",
    "Cos",
    "Dense",
    "EmpiricalKernel",
    "Erf",
    "FittedKernelLearner",
    "Flatten",
    "GlobalAveragePool",
    "Kernel",
    "KernelLearner",
    "LayerNorm",
    "ReLU",
    "Residual",
    "Sin",
    "anil_kernel",
    "conv4_kernel",
    "convolutional_kernel",
    "fully_connected_kernel",
    "meta_ntk",
    "mtl_kernel",
    "predict_anil",
    "predict_maml",
    "predict_mtl",
    "residual_kernel",
]
