"""Compare the numbers of two folders of results, such as one from before a change and one from after it.

Every row of every `ID.json` is compared. Durations differ from run to run and are left out.

    python benchmarks/compare_results.py before after --tolerance 1e-6
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

NUMBERS = ("ours", "ci95", "published")


def rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a result."""
    return list(json.loads(file.read_text(encoding="utf-8"))["rows"])


def is_duration(row: dict[str, Any]) -> bool:
    """Return whether a row holds a time, or a ratio of times."""
    return any(unit in row["metric"].split() for unit in ("seconds", "minutes", "hours", "images/s"))


def differences(before: list[dict[str, Any]], after: list[dict[str, Any]], tolerance: float) -> list[str]:
    """Return one line for every number that differs."""
    if len(before) != len(after):
        return [f"{len(before)} rows before, {len(after)} after"]
    lines = []
    for old, new in zip(before, after, strict=True):
        for key in NUMBERS:
            left, right = old[key], new[key]
            same = left == right or (
                None not in (left, right) and math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance)
            )
            if not same:
                lines.append(f"{old['name']} [{old['metric']}] {key}: {left} before, {right} after")
    return lines


def main() -> None:
    """Print a line for each result, and end with status 1 if any number differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--tolerance", type=float, default=1e-6, help="Relative and absolute (default: 1e-6).")
    options = parser.parse_args()
    failed = False
    for file in sorted(options.before.glob("*.json")):
        other = options.after / file.name
        if not other.exists():
            print(f"{file.stem}: missing in {options.after}")
            failed = True
            continue
        before, after = rows(file), rows(other)
        timed = sum(map(is_duration, before))
        before, after = ([row for row in each if not is_duration(row)] for each in (before, after))
        lines = differences(before, after, options.tolerance)
        exact = not differences(before, after, 0.0)
        failed = failed or bool(lines)
        verdict = "identical" if exact else f"equal to {options.tolerance:g}" if not lines else "DIFFERS"
        print(f"{file.stem}: {len(before)} rows {verdict}" + (f", {timed} durations left out" if timed else ""))
        for line in lines:
            print(f"  {line}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
