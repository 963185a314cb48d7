"""Power laws through measured values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from metabridge.intervals import t_quantile

Points = Mapping[int, Sequence[float]]  # the values of several runs by size: width, depth or number of tasks


@dataclass(frozen=True)
class PowerLaw:
    """value ≈ factor · size^exponent.

    Args:
        factor: The value at size 1.
        exponent: The exponent of the size.
        ci95: Half-width of the exponent's 95 % interval.
    """

    factor: float
    exponent: float
    ci95: float

    @classmethod
    def fit(cls, points: Points) -> PowerLaw:
        """Fit a line to the logarithms by least squares.

        Args:
            points: The values of several runs by size.

        Returns:
            The power law; its interval is over runs.

        >>> PowerLaw.fit({4: [1.0, 1.1], 16: [0.5, 0.55], 64: [0.25, 0.275]})
        PowerLaw(factor=2.0..., exponent=-0.5..., ci95=0.058...)
        """
        from scipy import stats

        pairs = [(math.log(size), math.log(value)) for size, values in points.items() for value in values]
        line = stats.linregress(*zip(*pairs))
        margin = t_quantile(len(pairs) - 2) * float(line.stderr)
        return cls(math.exp(line.intercept), float(line.slope), margin)

    def __call__(self, size: float) -> float:
        """Return the value at a size."""
        return float(self.factor * size**self.exponent)
