from __future__ import annotations

import pytest
import torch
from matplotlib.figure import Figure

from metabridge.report.loss_surface_figures import MARKS, draw_loss_surface


def test_a_label_has_the_same_mark_in_all_panels():
    losses = torch.linspace(0, 1, 25, dtype=torch.float64).reshape(5, 5)
    panels = Figure().subplots(1, 2)
    for axes, first_points in zip(panels, ([(0.0, 0.0)], [])):
        draw_loss_surface(axes, losses, 2.0, "loss", {"first": first_points, "second": [(1.0, -1.0), (1.5, 0.5)]})
        (marks,) = (collection for collection in axes.collections if collection.get_label() == "second")
        assert marks.get_sizes().tolist() == [MARKS[1][2]]
        assert marks.get_offsets().tolist() == [[1.0, -1.0], [1.5, 0.5]]
    labels = [axes.get_legend_handles_labels()[1] for axes in panels]
    assert labels == [["first", "second"], ["second"]]


def test_the_first_axis_of_the_losses_is_horizontal():
    losses = torch.ones(5, 5, dtype=torch.float64)
    losses[4, 2] = 0.01  # the lowest loss is on the right
    axes = Figure().subplots()
    draw_loss_surface(axes, losses, 2.0, "loss", {})
    lowest = next(path for path in axes.collections[0].get_paths() if len(path))
    assert lowest.vertices[:, 0].mean() > 1.5
    assert lowest.vertices[:, 1].mean() == pytest.approx(0, abs=0.1)
