"""What every kernel of a network answers, whether in closed form or from its Jacobian."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Kernel(Protocol):
    """The kernels Θ (NTK) and K (NNGP) of one architecture, per output: for k outputs, ⊗ I_k.

    Rows are the points `x`, columns the points `z`. Without `z` the columns are `x` as well, each pair is computed
    once, and the matrix is exactly symmetric.
    """

    def ntk(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Return Θ, (n, m): the inner products of the gradients in all parameters."""
        ...

    def nngp(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Return K, (n, m): the same for the parameters of the last layer alone."""
        ...

    def both(self, x: Tensor, z: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (Θ, K) for the price of one."""
        ...
