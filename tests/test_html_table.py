from __future__ import annotations

from metabridge.html_table import html_table


def test_caption_header_and_cells_are_escaped():
    html = html_table("<b>", ["<i>"], [["a & b", "<script>"]])
    assert html == (
        "<table><caption>&lt;b&gt;</caption><tr><th>&lt;i&gt;</th></tr>"
        "<tr><td>a &amp; b</td><td>&lt;script&gt;</td></tr></table>"
    )
