"""A kernel with precomputed matrices, for computations that need the same entries many times."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from metabridge.kernels.kernel import Kernel


@dataclass(frozen=True, eq=False)
class KernelTable:
    """A kernel with precomputed matrices. Its inputs are the indices of points, with shape (n, 1).

    The class `IndexedTasks` in `metabridge.environments` samples tasks whose inputs are such indices.

    Args:
        ntk_matrix: Θ between all points, (n, n).
        nngp_matrix: K between all points, (n, n).

    Example:
        >>> import torch
        >>> from metabridge.kernels import fully_connected_kernel
        >>> table = KernelTable.compute(fully_connected_kernel(depth=3), torch.randn(10, 5))
        >>> table.ntk(torch.tensor([[0], [3]])).shape
        torch.Size([2, 2])
    """

    ntk_matrix: Tensor
    nngp_matrix: Tensor

    @classmethod
    def compute(cls, kernel: Kernel, x: Tensor) -> KernelTable:
        """Compute the matrices Θ and K of the points, divided by the mean of the diagonal of Θ.

        Args:
            kernel: The kernel.
            x: The points, (n, ...).

        Returns:
            The table, on the CPU.
        """
        ntk, nngp = (matrix.cpu() for matrix in kernel.both(x))
        scale = ntk.diagonal().mean()
        return cls(ntk / scale, nngp / scale)

    def ntk(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Return Θ(x, z); see `Kernel.ntk`."""
        return self.both(x, z)[0]

    def nngp(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Return K(x, z); see `Kernel.nngp`."""
        return self.both(x, z)[1]

    def both(self, x: Tensor, z: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return Θ(x, z) and K(x, z); see `Kernel.both`."""
        rows, columns = (indices[:, 0].long() for indices in (x, x if z is None else z))
        return self.ntk_matrix[rows[:, None], columns], self.nngp_matrix[rows[:, None], columns]
