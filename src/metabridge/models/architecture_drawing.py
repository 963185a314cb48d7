"""The two cells of an architecture as graphs.

A cell reads from left to right: the outputs of the two cells before it, the three nodes, each with its two operators
in front, and the output. Arrows go along lanes of their own, so that nothing covers a label: what comes from c_{k-2}
above everything, from c_{k-1} below, and from node 0 to node 2 close to the operators of node 1. What the output puts
side by side is gathered in grey below.
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
from matplotlib.path import Path as Curve

from metabridge.errors import InputError
from metabridge.figure_theme import COLOURS, LIGHT, Theme
from metabridge.files import write_atomically
from metabridge.models.architecture import CELLS, NODES, OPERATORS, SOURCES, Architecture, Cell

BLUE, ORANGE, GREEN, PINK, YELLOW, SKY, GREY = COLOURS
FILLS = dict(zip(OPERATORS, (ORANGE, YELLOW, GREY, PINK, SKY, BLUE, GREEN)))
LABELS = {name: re.sub(r"(?<=\d)x(?=\d)", "×", name.replace("_", " ")) for name in OPERATORS}
TITLES = {"normal": "normal cell", "reduction": "reduction cell: half the sides, twice the channels"}
FORMATS = (".png", ".svg")

Point = tuple[float, float]

FIRST, APART = 2.1, 3.75  # where the operators of node 0 are centred, and how far those of the next node
LONG, HIGH = 1.7, 0.5  # an operator's box
NODE, RADIUS = 1.75, 0.3  # how far a node is from its operators
SLOT = 0.42  # how far its two operators are above and below the middle
OUTER, INNER, GATHERED = 1.65, 1.1, -2.3  # the lanes
INPUTS = ((0.0, 1.05), (0.0, -1.05))
OUT = FIRST + NODES * APART - 0.9


def draw(architecture: Architecture, file: str | Path) -> Path:
    """Draw both cells, into a PNG or an SVG by the file's ending.

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
    # text stays text, and the same cells give the same bytes
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "metabridge"}):
        metadata = {"Date": None} if file.suffix == ".svg" else None
        figure(architecture).savefig(stream, format=file.suffix[1:], dpi=150, metadata=metadata)
    return write_atomically(file, stream.getvalue())


def figure(architecture: Architecture, theme: Theme = LIGHT) -> Figure:
    """Return the drawing of both cells, one above the other."""
    with theme.context():
        whole = Figure(figsize=(9.6, 7.0), layout="constrained")
        for kind, axes in zip(CELLS, whole.subplots(len(CELLS))):
            draw_cell(getattr(architecture, kind), axes, theme)
            axes.set_title(TITLES[kind], fontsize=12, loc="left")
    return whole


def draw_cell(cell: Cell, axes: Axes, theme: Theme = LIGHT) -> None:
    """Draw one cell into axes of its own."""
    axes.set_axis_off()
    axes.set_aspect("equal")
    axes.set(xlim=(-0.85, OUT + 0.6), ylim=(GATHERED - 0.25, OUTER + 0.25))
    between = [source for source, _ in cell[1]]
    side = -1 if 0 in between and 1 not in between else 1  # of the way from node 0 to node 2, past node 1
    for node, pairs in enumerate(cell):
        centre = _centre(node)
        ordered = sorted(pairs, key=lambda pair: -_height(pair[0], node, side))
        for slot, (source, operator) in zip((SLOT, -SLOT), ordered):
            box = (centre[0] - NODE, slot)
            way = _way(source, node, side, (box[0] - LONG / 2, slot))
            _arrow(axes, _smooth(way), theme.ink)
            _arrow(axes, _smooth([(box[0] + LONG / 2, slot), (centre[0] - RADIUS, slot / 3)]), theme.ink)
            _box(axes, box, (LONG, HIGH), LABELS[operator], FILLS[operator], theme)
        _gather(axes, node)
        axes.add_patch(Circle(centre, RADIUS, facecolor=theme.paper, edgecolor=theme.ink, linewidth=1.4, zorder=3))
        axes.text(*centre, str(node), ha="center", va="center", fontsize=12, zorder=4)
    for place, name in zip(INPUTS, SOURCES):
        _box(axes, place, (1.1, 0.6), f"${name}$", theme.line, theme)
    _box(axes, (OUT, 0.0), (0.8, 0.6), "out", theme.line, theme)


def _centre(node: int) -> Point:
    return FIRST + NODE + node * APART, 0.0


def _height(source: int, node: int, side: int) -> float:
    """The height at which an arrow comes near the operators of a node."""
    if source < 2:
        return OUTER if source == 0 else -OUTER
    return 0.0 if source - 2 == node - 1 else side * INNER


def _way(source: int, node: int, side: int, end: Point) -> list[Point]:
    """The points through which an arrow goes from a source to an operator of a node."""
    if source < 2:
        start, first = (INPUTS[source][0] + 0.55, INPUTS[source][1]), 0
    else:
        start, first = (_centre(source - 2)[0] + RADIUS, 0.0), source - 1
    if first == node:
        return [start, end]
    lane = _height(source, node, side)
    leaves = _centre(node - 1)[0] + (RADIUS if source < 2 else 0)  # lower lanes earlier, so as not to meet
    return [start, (_centre(first)[0] - NODE - LONG / 2, lane), (leaves, lane), end]


def _smooth(points: Sequence[Point]) -> Curve:
    """A curve through the points that is level in each of them."""
    vertices, codes = [points[0]], [Curve.MOVETO]
    for (x, y), (u, v) in itertools.pairwise(points):
        vertices += [((x + u) / 2, y), ((x + u) / 2, v), (u, v)]
        codes += [Curve.CURVE4] * 3
    return Curve(np.array(vertices), codes)


def _gather(axes: Axes, node: int) -> None:
    """The way from a node to the output."""
    x, _ = _centre(node)
    if node == NODES - 1:
        way = Curve(np.array([(x + RADIUS, 0.0), (OUT - 0.4, 0.0)]))
    else:
        corners = [(x, -RADIUS), (x, GATHERED + 0.3), (x, GATHERED), (x + 0.3, GATHERED)]
        corners += [(OUT - 0.3, GATHERED), (OUT, GATHERED), (OUT, GATHERED + 0.3), (OUT, -0.3)]
        turn = [Curve.LINETO, Curve.CURVE3, Curve.CURVE3]
        way = Curve(np.array(corners), [Curve.MOVETO, *turn, *turn, Curve.LINETO])
    _arrow(axes, way, GREY)


def _arrow(axes: Axes, way: Curve, colour: str) -> None:
    axes.add_patch(
        FancyArrowPatch(path=way, arrowstyle="-|>", mutation_scale=11, color=colour, linewidth=1.4, zorder=2)
    )


def _box(axes: Axes, place: Point, size: Point, text: str, colour: str, theme: Theme) -> None:
    corner = (place[0] - size[0] / 2, place[1] - size[1] / 2)
    shape = "round,pad=0,rounding_size=0.16"
    pale = 0.3 * np.array(to_rgb(colour)) + 0.7 * np.array(to_rgb(theme.paper))
    axes.add_patch(FancyBboxPatch(corner, *size, shape, facecolor=pale, edgecolor=colour, linewidth=1.4, zorder=3))
    axes.text(*place, text, ha="center", va="center", fontsize=10, zorder=4)
