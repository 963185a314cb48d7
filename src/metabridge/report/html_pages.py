"""Self-contained HTML pages: they contain their pictures and load no other files."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from metabridge.report import figures
from metabridge.report.figures import DARK, LIGHT, Theme


@dataclass(frozen=True)
class Picture:
    """A figure as PNG files for the light and the dark theme.

    Args:
        name: File name without `.png`.
        alt: Alternative text for readers who cannot see the picture.
        light: Content of the PNG file for the light theme.
        dark: Content of the PNG file for the dark theme.
    """

    name: str
    alt: str
    light: bytes
    dark: bytes

    @classmethod
    def draw(cls, name: str, alt: str, draw_figure: Callable[[Theme], Figure]) -> Picture:
        """Return the picture of the figure that `draw_figure` draws with each theme."""
        return cls(name, alt, figures.png(draw_figure(LIGHT)), figures.png(draw_figure(DARK)))

    @property
    def html(self) -> Markup:
        """The `<picture>` element, which contains both files and shows the one for the browser's color scheme."""
        light, dark = (f"data:image/png;base64,{base64.b64encode(png).decode()}" for png in (self.light, self.dark))
        return Markup(
            '<picture><source srcset="{}" media="(prefers-color-scheme: dark)"><img src="{}" alt="{}"></picture>'
        ).format(dark, light, self.alt)


def render(template: str, **values: object) -> bytes:
    """Return the HTML page of a template of this package, filled with `values` and encoded in UTF-8."""
    templates = Environment(
        loader=PackageLoader("metabridge", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return templates.get_template(template).render(**values, light=LIGHT, dark=DARK).encode(errors="backslashreplace")
