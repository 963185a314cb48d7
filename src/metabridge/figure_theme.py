"""Colors and Matplotlib settings of all figures, for light and dark pages."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

from matplotlib import rc_context

# The color-blind-safe palette of Okabe and Ito (2008). Yellow is left out and black replaced by gray, so that all
# colors are visible on light and dark pages.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8f98")


@dataclass(frozen=True)
class Theme:
    """The colors of the background (`paper`), of the text (`ink`), and of axes and grids (`line`)."""

    paper: str
    ink: str
    line: str

    def context(self) -> AbstractContextManager[None]:
        """Return a context manager in which Matplotlib draws with this theme."""
        return rc_context(
            {
                "figure.facecolor": self.paper,
                "axes.facecolor": self.paper,
                "text.color": self.ink,
                "axes.labelcolor": self.ink,
                "xtick.color": self.ink,
                "ytick.color": self.ink,
                "axes.edgecolor": self.line,
                "grid.color": self.line,
                "axes.grid": True,
                "grid.linewidth": 0.6,
                "axes.axisbelow": True,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "legend.frameon": False,
                "font.size": 10,
            }
        )


LIGHT = Theme(paper="#ffffff", ink="#22252b", line="#d9dce1")
DARK = Theme(paper="#15171c", ink="#e4e6ea", line="#3a3e47")
