from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch

from metabridge import InputError
from metabridge.models.architecture_drawing import draw, draw_cell, figure
from metabridge.nas import Architecture, random_architecture

# all possible sources of nodes 0, 1 and 2
NODE_1_SOURCES, NODE_2_SOURCES = itertools.combinations(range(3), 2), itertools.combinations(range(4), 2)
WIRINGS = [((0, 1), *sources) for sources in itertools.product(NODE_1_SOURCES, NODE_2_SOURCES)]
OPERATORS = ("conv_1x5_5x1", "sep_conv_3x3")  # the longest labels


def cell_with_sources(sources) -> tuple:
    return tuple(tuple(zip(pair, OPERATORS)) for pair in sources)


def seeded_architecture(seed: int = 0) -> Architecture:
    return random_architecture(torch.Generator().manual_seed(seed))


def points_along(arrow: FancyArrowPatch, axes: Axes) -> np.ndarray:
    """Return closely spaced points along an arrow, in data coordinates."""
    path = arrow.get_path().transformed(axes.transData)  # in pixels, so that the lines that replace curves are short
    lines = path.to_polygons(closed_only=False)
    steps = np.linspace(0, 1, 20)[:, None]
    points = [start + steps * (end - start) for line in lines for start, end in itertools.pairwise(line)]
    return axes.transData.inverted().transform(np.concatenate(points))


@pytest.mark.parametrize("wiring", WIRINGS, ids=str)
def test_no_arrow_of_any_architecture_crosses_a_label(wiring):
    axes = Figure(figsize=(9.6, 3.5)).add_axes((0, 0, 1, 1))
    draw_cell(cell_with_sources(wiring), axes)
    arrows = [patch for patch in axes.patches if isinstance(patch, FancyArrowPatch)]
    boxes = [patch for patch in axes.patches if isinstance(patch, FancyBboxPatch)]
    circles = [patch for patch in axes.patches if isinstance(patch, Circle)]
    # arrows to operators, from operators and to the output; boxes of operators, of two previous cells and of the output
    assert (len(arrows), len(boxes), len(circles)) == (6 + 6 + 3, 6 + 3, 3)
    margin = 0.04  # arrow heads may touch the edge of a box or circle
    for arrow in arrows:
        x, y = points_along(arrow, axes).T
        for box in boxes:
            left, bottom, width, height = box.get_x(), box.get_y(), box.get_width(), box.get_height()
            is_inside_x = (x > left + margin) & (x < left + width - margin)
            is_inside_y = (y > bottom + margin) & (y < bottom + height - margin)
            assert not (is_inside_x & is_inside_y).any()
        for circle in circles:
            assert np.hypot(x - circle.center[0], y - circle.center[1]).min() > circle.radius - margin


def test_labels_lie_within_their_boxes_and_name_the_operators():
    drawing = figure(Architecture(cell_with_sources(WIRINGS[0]), cell_with_sources(WIRINGS[-1])))
    drawing.draw_without_rendering()
    for axes in drawing.axes:
        labels = [text.get_text() for text in axes.texts]
        assert {"0", "1", "2", "out", "$c_{k-2}$", "$c_{k-1}$", "conv 1×5 5×1", "sep conv 3×3"} == set(labels)
        patches = [patch for patch in axes.patches if isinstance(patch, FancyBboxPatch | Circle)]
        outlines = [patch.get_window_extent() for patch in patches]
        for text in axes.texts:
            label = text.get_window_extent()
            assert any(box.containsx(label.x0) and box.containsx(label.x1) and box.y0 < label.y0 for box in outlines)


@pytest.mark.parametrize(("name", "signature"), [("cells.png", b"\x89PNG"), ("cells.svg", b"<?xml")])
def test_the_suffix_selects_the_format_and_the_same_cells_give_the_same_bytes(tmp_path, name, signature):
    content = draw(seeded_architecture(), tmp_path / name).read_bytes()
    assert content.startswith(signature)
    assert draw(seeded_architecture(), tmp_path / f"again-{name}").read_bytes() == content
    assert draw(seeded_architecture(1), tmp_path / f"other-{name}").read_bytes() != content


def test_another_format_raises_an_input_error(tmp_path):
    with pytest.raises(InputError, match=r"file is '.*cells.pdf', but must end in .png or .svg."):
        draw(seeded_architecture(), tmp_path / "cells.pdf")
