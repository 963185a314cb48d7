from __future__ import annotations

import torch

from metabridge.kernels import fully_connected_kernel
from metabridge.kernels.kernel_table import KernelTable


def test_a_table_has_the_kernel_of_all_points_up_to_a_constant():
    kernel, x = fully_connected_kernel(depth=3), torch.randn(8, 5, dtype=torch.float64)
    table, rows, columns = KernelTable.compute(kernel, x), torch.tensor([4, 0, 4]), torch.tensor([1, 7])
    scale = kernel.ntk(x).diagonal().mean()
    for looked_up, expected in zip(
        table.both(rows[:, None].double(), columns[:, None].double()), kernel.both(x[rows], x[columns])
    ):
        assert torch.allclose(looked_up, expected / scale)
    assert torch.allclose(table.nngp(rows[:, None]), kernel.nngp(x[rows]) / scale)
    assert torch.isclose(table.ntk_matrix.diagonal().mean(), torch.ones((), dtype=torch.float64))
