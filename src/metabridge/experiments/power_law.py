"""Means over runs, and power laws through them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from scipy import stats

from metabridge.intervals import half_width, t_quantile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = Mapping[int, Sequence[float]]  # by width or depth, a value for each run


def mean(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the half-width of its 95 % interval, Student's.

    >>> mean([1.0, 3.0])
    (2.0, 12.7...)
    """
    return sum(values) / len(values), half_width(torch.tensor(values, dtype=torch.float64))


@dataclass(frozen=True)
class PowerLaw:
    """values ≈ factor · width^exponent, with the half-width of the exponent's 95 % interval."""

    factor: float
    exponent: float
    ci95: float

    @classmethod
    def fit(cls, points: Points) -> PowerLaw:
        """Fit a line to the logarithms by least squares; the interval is over initialisations.

        >>> PowerLaw.fit({4: [1.0, 1.1], 16: [0.5, 0.55], 64: [0.25, 0.275]})
        PowerLaw(factor=2.0..., exponent=-0.5..., ci95=0.058...)
        """
        pairs = [(math.log(width), math.log(value)) for width, values in points.items() for value in values]
        line = stats.linregress(*zip(*pairs))
        margin = t_quantile(len(pairs) - 2) * float(line.stderr)
        return cls(math.exp(line.intercept), float(line.slope), margin)

    def __call__(self, width: float) -> float:
        """Return the value at a width."""
        return float(self.factor * width**self.exponent)


def draw_laws(axes: Axes, laws: Mapping[str, Points]) -> None:
    """Draw every value against its width, both in logarithms, with the power law through them and its exponent."""
    from matplotlib.ticker import NullLocator

    from metabridge.report.figures import COLOURS, MARKERS, plain_numbers

    for (label, points), colour, marker in zip(laws.items(), COLOURS, MARKERS):
        law, widths = PowerLaw.fit(points), list(points)
        xs, ys = zip(*((width, value) for width, values in points.items() for value in values))
        axes.plot(xs, ys, marker, color=colour, markersize=4, alpha=0.6)
        fitted = [law(width) for width in widths]
        exponent = f"{law.exponent:.2f} ± {law.ci95:.2f}".replace("-", "−")
        axes.plot(widths, fitted, color=colour, label=f"{label}, exponent {exponent}")
    guide = [fitted[0] * (width / widths[0]) ** -0.5 for width in widths]
    axes.plot(widths, guide, "--", color="grey", label="in proportion to width$^{-1/2}$")
    axes.set(xscale="log", yscale="log", xlabel="width")
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.xaxis.set_minor_locator(NullLocator())
    plain_numbers(axes.yaxis)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1))
