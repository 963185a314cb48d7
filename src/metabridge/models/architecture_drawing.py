"""Draw the two cells of an architecture as graphs.

A drawing shows, from left to right, the outputs c_{k-2} and c_{k-1} of the two previous cells, the three nodes (each
to the right of its two operators) and the output of the cell. An arrow leads from a source to an operator. If the
operator belongs to the next node to the right of the source, the arrow runs directly to it. The other arrows run in
separate lanes and cross no label: arrows from c_{k-2} run above all boxes, arrows from c_{k-1} below, and arrows from
node 0 to node 2 above or below the operators of node 1. Gray arrows lead from the nodes to the output, which
concatenates them.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path as Curve  # pathlib.Path is the path of a file

from metabridge.errors import InputError
from metabridge.figure_theme import COLORS, LIGHT, Theme
from metabridge.files import write_atomically
from metabridge.models.architecture import CELLS, NODES, OPERATORS, SOURCE_NAMES, Architecture, CellSpec

BLUE, VERMILION, GREEN, PINK, ORANGE, SKY, GRAY = COLORS
OPERATOR_COLORS = dict(zip(OPERATORS, (VERMILION, ORANGE, GRAY, PINK, SKY, BLUE, GREEN)))
LABELS = {name: re.sub(r"(?<=\d)x(?=\d)", "×", name.replace("_", " ")) for name in OPERATORS}
TITLES = {"normal": "normal cell", "reduction": "reduction cell: half the height and width, twice the channels"}
FORMATS = (".png", ".svg")

Point = tuple[float, float]

FIRST_OPERATOR_X, NODE_SPACING = 2.1, 3.75  # x of the operators of node 0; distance between neighboring nodes
BOX_WIDTH, BOX_HEIGHT = 1.7, 0.5  # size of the box of an operator
OPERATOR_DISTANCE, NODE_RADIUS = 1.75, 0.3  # distance of a node from its operators; radius of its circle
OPERATOR_Y = 0.42  # the two operators of a node are at this height and at its negative
# heights of the lanes of arrows from previous cells (±), of arrows from node 0 to node 2 (±) and of gray arrows
OUTER_Y, INNER_Y, OUTPUT_Y = 1.65, 1.1, -2.3
INPUT_CENTERS = ((0.0, 1.05), (0.0, -1.05))  # of the boxes of sources 0 and 1
OUTPUT_X = FIRST_OPERATOR_X + NODES * NODE_SPACING - 0.9  # center of the output's box


def draw(architecture: Architecture, file: str | Path) -> Path:
    """Draw both cells into a PNG or SVG file, depending on its suffix, and return its path.

    >>> from tempfile import TemporaryDirectory
    >>> import torch
    >>> from metabridge.nas import random_architecture
    >>> with TemporaryDirectory() as folder:
    ...     draw(random_architecture(torch.Generator().manual_seed(0)), f"{folder}/cells.svg").name
    'cells.svg'
    """
    file = Path(file)
    if file.suffix not in FORMATS:
        raise InputError(f"file is {str(file)!r}, but must end in {' or '.join(FORMATS)}.")
    stream = io.BytesIO()
    # in SVG files, keep labels as text, and make the bytes reproducible
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "metabridge"}):
        metadata = {"Date": None} if file.suffix == ".svg" else None
        figure(architecture).savefig(stream, format=file.suffix[1:], dpi=150, metadata=metadata)
    return write_atomically(file, stream.getvalue())


def figure(architecture: Architecture, theme: Theme = LIGHT) -> Figure:
    """Return a figure of both cells, one above the other."""
    with theme.context():
        drawing = Figure(figsize=(9.6, 7.0), layout="constrained")
        for kind, axes in zip(CELLS, drawing.subplots(len(CELLS))):
            draw_cell(getattr(architecture, kind), axes, theme)
            axes.set_title(TITLES[kind], fontsize=12, loc="left")
    return drawing


def draw_cell(cell: CellSpec, axes: Axes, theme: Theme = LIGHT) -> None:
    """Draw one cell into empty axes."""
    axes.set_axis_off()
    axes.set_aspect("equal")
    axes.set(xlim=(-0.85, OUTPUT_X + 0.6), ylim=(OUTPUT_Y - 0.25, OUTER_Y + 0.25))
    node_1_sources = [source for source, _ in cell[1]]
    # An arrow from node 0 to node 2 passes node 1 above (side 1), or below (side -1) if an arrow enters an operator of
    # node 1 from above but none from below.
    side = -1 if 0 in node_1_sources and 1 not in node_1_sources else 1
    for node, pairs in enumerate(cell):
        center = _center(node)
        pairs_from_top = sorted(pairs, key=lambda pair: -_lane(pair[0], node, side))
        for y, (source, operator) in zip((OPERATOR_Y, -OPERATOR_Y), pairs_from_top):
            box = (center[0] - OPERATOR_DISTANCE, y)
            _arrow(axes, _smooth(_route(source, node, side, (box[0] - BOX_WIDTH / 2, y))), theme.text)
            _arrow(axes, _smooth([(box[0] + BOX_WIDTH / 2, y), (center[0] - NODE_RADIUS, y / 3)]), theme.text)
            _box(axes, box, (BOX_WIDTH, BOX_HEIGHT), LABELS[operator], OPERATOR_COLORS[operator], theme)
        _output_arrow(axes, node)
        axes.add_patch(
            Circle(center, NODE_RADIUS, facecolor=theme.background, edgecolor=theme.text, linewidth=1.4, zorder=3)
        )
        axes.text(*center, str(node), ha="center", va="center", fontsize=12, zorder=4)
    for center, name in zip(INPUT_CENTERS, SOURCE_NAMES):
        _box(axes, center, (1.1, 0.6), f"${name}$", theme.grid, theme)
    _box(axes, (OUTPUT_X, 0.0), (0.8, 0.6), "out", theme.grid, theme)


def _center(node: int) -> Point:
    return FIRST_OPERATOR_X + OPERATOR_DISTANCE + node * NODE_SPACING, 0.0


def _lane(source: int, node: int, side: int) -> float:
    """Return the height of the lane in which the arrow from a source to a node runs; for `side`, see `draw_cell`."""
    if source < 2:
        return OUTER_Y if source == 0 else -OUTER_Y
    return 0.0 if source - 2 == node - 1 else side * INNER_Y


def _route(source: int, node: int, side: int, end: Point) -> list[Point]:
    """Return the points through which the arrow from a source to an operator of a node runs, up to `end`."""
    if source < 2:
        start, next_node = (INPUT_CENTERS[source][0] + 0.55, INPUT_CENTERS[source][1]), 0  # right edge of the box
    else:
        start, next_node = (_center(source - 2)[0] + NODE_RADIUS, 0.0), source - 1
    if next_node == node:
        return [start, end]
    lane = _lane(source, node, side)
    # lanes from previous cells and from node 0 end at different x, so that the arrows do not cross
    lane_end = _center(node - 1)[0] + (NODE_RADIUS if source < 2 else 0)
    return [start, (_center(next_node)[0] - OPERATOR_DISTANCE - BOX_WIDTH / 2, lane), (lane_end, lane), end]


def _smooth(points: Sequence[Point]) -> Curve:
    """Return a curve through the points that is horizontal at each of them."""
    vertices, codes = [points[0]], [Curve.MOVETO]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        vertices += [((x0 + x1) / 2, y0), ((x0 + x1) / 2, y1), (x1, y1)]
        codes += [Curve.CURVE4] * 3
    return Curve(np.array(vertices), codes)


def _output_arrow(axes: Axes, node: int) -> None:
    """Draw the arrow from a node to the output."""
    x, _ = _center(node)
    if node == NODES - 1:
        curve = Curve(np.array([(x + NODE_RADIUS, 0.0), (OUTPUT_X - 0.4, 0.0)]))
    else:
        corners = [(x, -NODE_RADIUS), (x, OUTPUT_Y + 0.3), (x, OUTPUT_Y), (x + 0.3, OUTPUT_Y)]
        corners += [(OUTPUT_X - 0.3, OUTPUT_Y), (OUTPUT_X, OUTPUT_Y), (OUTPUT_X, OUTPUT_Y + 0.3), (OUTPUT_X, -0.3)]
        line_and_turn = [Curve.LINETO, Curve.CURVE3, Curve.CURVE3]
        curve = Curve(np.array(corners), [Curve.MOVETO, *line_and_turn, *line_and_turn, Curve.LINETO])
    _arrow(axes, curve, GRAY)


def _arrow(axes: Axes, curve: Curve, color: str) -> None:
    axes.add_patch(
        FancyArrowPatch(path=curve, arrowstyle="-|>", mutation_scale=11, color=color, linewidth=1.4, zorder=2)
    )


def _box(axes: Axes, center: Point, size: Point, text: str, color: str, theme: Theme) -> None:
    corner = (center[0] - size[0] / 2, center[1] - size[1] / 2)
    shape = "round,pad=0,rounding_size=0.16"
    fill_color = 0.3 * np.array(to_rgb(color)) + 0.7 * np.array(to_rgb(theme.background))
    axes.add_patch(FancyBboxPatch(corner, *size, shape, facecolor=fill_color, edgecolor=color, linewidth=1.4, zorder=3))
    axes.text(*center, text, ha="center", va="center", fontsize=10, zorder=4)
