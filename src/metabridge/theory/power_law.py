"""Power laws fitted to measured values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from metabridge.intervals import t_quantile

ValuesBySize = Mapping[int, Sequence[float]]  # the values of several runs for each width, depth or number of tasks


@dataclass(frozen=True)
class PowerLaw:
    """The power law value ≈ factor · size^exponent.

    Args:
        factor: The value at size 1.
        exponent: The exponent of the size.
        ci95: Half-width of the 95 % confidence interval of the exponent.

    Example:
        >>> PowerLaw(factor=3.0, exponent=-0.5, ci95=0.0)(4)
        1.5
    """

    factor: float
    exponent: float
    ci95: float

    @classmethod
    def fit(cls, values_by_size: ValuesBySize) -> PowerLaw:
        """Fit a power law by least squares on the logarithms of sizes and values.

        Args:
            values_by_size: The values of several runs for each size.

        Returns:
            The power law. Its confidence interval treats all values as independent.

        Example:
            >>> PowerLaw.fit({4: [1.0, 1.1], 16: [0.5, 0.55], 64: [0.25, 0.275]})
            PowerLaw(factor=2.0..., exponent=-0.5..., ci95=0.058...)
        """
        from scipy import stats

        pairs = [(math.log(size), math.log(value)) for size, values in values_by_size.items() for value in values]
        regression = stats.linregress(*zip(*pairs))
        ci95 = t_quantile(len(pairs) - 2) * float(regression.stderr)
        return cls(math.exp(regression.intercept), float(regression.slope), ci95)

    def __call__(self, size: float) -> float:
        """Return the value at a size."""
        return float(self.factor * size**self.exponent)


def last_exponents(values_by_size: ValuesBySize) -> list[float]:
    """Return d log(value) / d log(size) between the last two sizes, for every run.

    Args:
        values_by_size: The values of several runs for each size, with the runs always in the same order.

    Returns:
        The exponent of every run.

    Example:
        >>> last_exponents({4: [1.0], 16: [0.5], 64: [0.125]})
        [-1.0]
    """
    (size, values), (last_size, last_values) = list(values_by_size.items())[-2:]
    return [math.log(last / value) / math.log(last_size / size) for value, last in zip(values, last_values)]


def last_slopes(values_by_size: ValuesBySize) -> list[float]:
    """Return d value / d size between the last two sizes, for every run.

    Args:
        values_by_size: The values of several runs for each size, with the runs always in the same order.

    Returns:
        The slope of every run.

    Example:
        >>> last_slopes({4: [1.0], 16: [2.0], 64: [26.0]})
        [0.5]
    """
    (size, values), (last_size, last_values) = list(values_by_size.items())[-2:]
    return [(last - value) / (last_size - size) for value, last in zip(values, last_values)]
