"""Figures of loss surfaces on the plane of two weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.ticker import FuncFormatter
from torch import Tensor

MARKS = (  # marker, color and size; the sizes differ, so that points remain visible if they coincide
    ("o", "white", 75),
    ("*", "#ff5a36", 150),
    ("X", "#ffd23f", 140),
    ("^", "#ff9df5", 55),
)


def draw_loss_surface(
    axes: Axes, losses: Tensor, extent: float, title: str, points: Mapping[str, Sequence[Sequence[float]]]
) -> None:
    """Draw non-negative losses on the square [−extent, extent]² as contours with logarithmically spaced levels.

    Args:
        axes: The panel.
        losses: Losses on a square grid of points. The first dimension of the tensor is the horizontal axis.
        extent: Largest coordinate of the grid.
        title: Title of the panel.
        points: Points to mark, by label; at most four labels. The mark depends on the position of the label, so panels
            with the same labels use the same marks, even if a label has no points in one of them.

    Example:
        >>> import torch
        >>> from matplotlib.figure import Figure
        >>> axes = Figure().subplots()
        >>> draw_loss_surface(axes, torch.rand(5, 5), 2.0, "loss", {"minimum": [(0.5, 1.0)]})
        >>> axes.get_legend_handles_labels()[1]
        ['minimum']
    """
    low = max(losses.min().item(), 1e-4 * losses.max().item())  # 0 has no logarithm
    levels = np.geomspace(low * (1 - 1e-9), losses.max().item() * (1 + 1e-9), 16)
    grid, values = np.linspace(-extent, extent, len(losses)), losses.mT.clamp_min(low).numpy()
    filled = axes.contourf(grid, grid, values, levels, cmap="viridis", norm=LogNorm(levels[0], levels[-1]))
    axes.contour(grid, grid, values, levels[1:-1], colors="white", linewidths=0.3, alpha=0.6)
    bar = axes.figure.colorbar(filled, ax=axes, shrink=0.82, pad=0.03, ticks=levels[::5])
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda level, _: f"{level:.2g}"))
    bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=8)
    for (label, coordinates), (marker, color, size) in zip(points.items(), MARKS):
        if coordinates:
            xs, ys = zip(*coordinates)
            axes.scatter(xs, ys, size, color, marker=marker, edgecolor="black", linewidth=0.8, label=label, zorder=3)
    axes.set(aspect="equal", xlim=(-extent, extent), ylim=(-extent, extent))
    axes.set(xticks=range(-2, 3), yticks=range(-2, 3), xlabel="first weight of the neuron", ylabel="second weight")
    axes.set_title(title, fontsize=10)
    axes.grid(visible=False)
