"""Measure the peak memory of a function with the memory counters of Linux."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path


def added_peak(function: Callable[[], object], times: int = 3) -> float:
    """Return by how many MiB the memory of the process increases while `function` is called `times` times."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current memory
    before = _peak_mib()
    for _ in range(times):
        function()
    return _peak_mib() - before


def _peak_mib() -> float:
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) / 1024
