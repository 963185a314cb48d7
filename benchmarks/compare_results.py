"""Compare the numbers in two folders of results, such as those from before and after a change of the code.

Every row of every experiment's `ID.json` is compared, except durations and speeds, which differ from run to run.
Results of benchmarks are skipped.

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
    """Return the rows of an experiment's result; an empty list for the result of a benchmark."""
    result = json.loads(file.read_text(encoding="utf-8"))
    return list(result["rows"]) if "scale" in result else []


def is_duration(row: dict[str, Any]) -> bool:
    """Return whether a row contains a duration or a speed."""
    return any(unit in row["metric"].split() for unit in ("seconds", "minutes", "hours", "images/s"))


def differences(before: list[dict[str, Any]], after: list[dict[str, Any]], tolerance: float) -> list[str]:
    """Return a line of text for every number that differs."""
    if len(before) != len(after):
        return [f"{len(before)} rows before, {len(after)} after"]
    lines = []
    for old, new in zip(before, after, strict=True):
        for key in NUMBERS:
            old_number, new_number = old[key], new[key]
            is_equal = old_number == new_number or (
                None not in (old_number, new_number)
                and math.isclose(old_number, new_number, rel_tol=tolerance, abs_tol=tolerance)
            )
            if not is_equal:
                lines.append(f"{old['name']} [{old['metric']}] {key}: {old_number} before, {new_number} after")
    return lines


def main() -> None:
    """Print a line for each result, and exit with status 1 if any number differs or a result is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument(
        "--tolerance", type=float, default=1e-6, help="relative and absolute tolerance (default: %(default)s)"
    )
    options = parser.parse_args()
    has_differences = False
    for file in sorted(options.before.glob("*.json")):
        before = rows(file)
        if not before:
            continue
        file_after = options.after / file.name
        if not file_after.exists():
            print(f"{file.stem}: missing in {options.after}")
            has_differences = True
            continue
        after = rows(file_after)
        durations = sum(map(is_duration, before))
        before, after = ([row for row in result if not is_duration(row)] for result in (before, after))
        lines = differences(before, after, options.tolerance)
        is_identical = not differences(before, after, 0.0)
        has_differences = has_differences or bool(lines)
        verdict = "identical" if is_identical else f"equal up to {options.tolerance:g}" if not lines else "DIFFERENT"
        print(f"{file.stem}: {len(before)} rows {verdict}" + (f", {durations} durations ignored" if durations else ""))
        for line in lines:
            print(f"  {line}")
    sys.exit(has_differences)


if __name__ == "__main__":
    main()
