"""Colors and Matplotlib settings of all figures, as a light and a dark theme."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

from matplotlib import rc_context

# The color-blind-safe palette of Okabe and Ito (2008). Yellow is omitted and black is replaced by gray, so that
# all colors are visible on light and dark backgrounds.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8f98")


@dataclass(frozen=True)
class Theme:
    """Colors of the background, of the text, and of axes and grid lines."""

    background: str
    text: str
    grid: str

    def context(self) -> AbstractContextManager[None]:
        """Return a context manager in which Matplotlib draws with this theme."""
        return rc_context(
            {
                "figure.facecolor": self.background,
                "axes.facecolor": self.background,
                "text.color": self.text,
                "axes.labelcolor": self.text,
                "xtick.color": self.text,
                "ytick.color": self.text,
                "axes.edgecolor": self.grid,
                "grid.color": self.grid,
                "axes.grid": True,
                "grid.linewidth": 0.6,
                "axes.axisbelow": True,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "legend.frameon": False,
                "font.size": 10,
            }
        )


LIGHT = Theme(background="#ffffff", text="#22252b", grid="#d9dce1")
DARK = Theme(background="#15171c", text="#e4e6ea", grid="#3a3e47")
