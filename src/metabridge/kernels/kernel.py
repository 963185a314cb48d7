"""The interface of network kernels, which are analytic (infinite width) or empirical (finite width).

NTK stands for neural tangent kernel, and NNGP for neural network Gaussian process.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Kernel(Protocol):
    """The NTK Θ and the NNGP kernel K of a network, per output: for k outputs, the kernels are Θ ⊗ I_k and K ⊗ I_k.

    The rows of a matrix belong to the points `x`, and the columns to the points `z`. If `z` is None, the columns also
    belong to `x`: each pair is computed once, and the matrix is exactly symmetric.

    Example:
        >>> import torch
        >>> from metabridge.kernels import Kernel, fully_connected_kernel
        >>> kernel: Kernel = fully_connected_kernel(depth=3)
        >>> kernel.ntk(torch.ones(2, 5), torch.ones(4, 5)).shape
        torch.Size([2, 4])
    """

    def ntk(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Return Θ, the inner products of the gradients with respect to all parameters.

        Args:
            x: The n row points.
            z: The m column points; `x` if None.

        Returns:
            Θ(x, z), (n, m).
        """
        ...

    def nngp(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Return K, the inner products of the gradients with respect to the last layer's parameters.

        Args:
            x: The n row points.
            z: The m column points; `x` if None.

        Returns:
            K(x, z), (n, m).
        """
        ...

    def both(self, x: Tensor, z: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return Θ and K, which an implementation may compute together at the cost of Θ alone.

        Args:
            x: The n row points.
            z: The m column points; `x` if None.

        Returns:
            Θ(x, z) and K(x, z), each (n, m).
        """
        ...
