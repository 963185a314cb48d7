"""Fuzz the readers of files. `--reader NAME --case NUMBER` repeats a single case."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fuzz.campaign import Campaign, Tally
from fuzz.readers import READERS
from fuzz.sandbox import FAILURES
from fuzz.worker import Worker
from metabridge.files import write_atomically
from metabridge.report.results import Machine

READERS_PATH = "fuzz.readers:READERS"  # module and name of the dictionary of readers, imported by the workers
INPUTS = 10_000  # cases per reader


def main() -> int:
    """Run the command line, and return 1 if a case failed."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--reader", action="append", choices=READERS, help="fuzz only this reader; may be repeated")
    parser.add_argument("--case", type=int, help="run one case of the reader and keep its files")
    parser.add_argument("--inputs", type=int, default=INPUTS, help="number of inputs per reader (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random changes (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="number of processes (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("demo/fuzz"), help="output folder (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file for the counts, written after a full run of all readers")
    options = parser.parse_args()
    names = options.reader or list(READERS)
    if options.case is not None:
        return _replay(names[0], options.seed, options.case, options.out)
    campaign = Campaign(READERS_PATH, names, inputs=options.inputs, seed=options.seed, out=options.out)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bars = {
            name: progress.add_task(name, total=options.inputs, completed=tally.inputs)
            for name, tally in campaign.tallies.items()
        }
        campaign.run(options.workers, lambda tally: progress.update(bars[tally.reader], completed=tally.inputs))
    tallies = list(campaign.tallies.values())
    _print(tallies)
    if options.json is not None and names == list(READERS):
        result = {
            "seed": options.seed,
            "environment": asdict(Machine.current("cpu")),  # the machine; the key is the one in all result files
            "readers": [tally.row() for tally in tallies],
        }
        write_atomically(options.json, f"{json.dumps(result, indent=1)}\n".encode())
    return int(any(tally.num_failed for tally in tallies))


def _print(tallies: list[Tally]) -> None:
    rows = [tally.row() for tally in tallies]
    table = Table(*(name.replace("_", " ") for name in rows[0]))
    for row in rows:
        table.add_row(*map(str, row.values()))
    console = Console(width=200 if not sys.stdout.isatty() else None)
    console.print(table)
    for tally in tallies:
        for location, failure in tally.failures.items():
            count, description = failure["count"], failure["description"]
            console.print(Text(f"{tally.reader} --case {failure['case']} ({count} times) {location}: {description!a}"))


def _replay(name: str, seed: int, number: int, out: Path) -> int:
    worker = Worker(READERS_PATH, seed)
    try:
        folder = out / f"{name}-{number}"
        (outcome,) = worker.run(name, number, number + 1, folder)
        print(worker.stderr_file.read_text(errors="replace"), file=sys.stderr)
    finally:
        worker.close()
    print(json.dumps(asdict(outcome), indent=1))
    print(f"The files are in {folder}")
    return int(outcome.kind in FAILURES)


if __name__ == "__main__":
    sys.exit(main())
