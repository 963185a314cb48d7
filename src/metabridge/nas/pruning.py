"""Pruning a supernet down to one architecture without training anything (B algorithm 1)."""

from __future__ import annotations

import json
import logging
import math
import statistics
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from metabridge.errors import PARSING_ERRORS, InputError
from metabridge.files import FolderLock, read_regular_file, write_atomically
from metabridge.models.architecture import ActiveOperators, Architecture, EdgeOperator
from metabridge.nas.proxies import Score, mean

log = logging.getLogger("metabridge")

CHECKSUM = "crc32"  # of a line of the log
Removal = EdgeOperator | None  # an operator to be taken away, or none


class Scores(NamedTuple):
    """The proxies of one network; one that is not asked for is None."""

    condition: Score | None
    regions: Score | None


# Score a network as it is (None) and without each of some operators, in a repeat of a round, in any order.
Measure = Callable[[int, int, ActiveOperators, Sequence[Removal]], Iterable[tuple[Removal, Scores]]]
Measurements = Mapping[Removal, Sequence[Scores]]  # of every repeat


def prune(active: ActiveOperators, measure: Measure, *, repeats: int, journal: Journal | None = None) -> Architecture:
    """Take the least important operator from every edge, round by round, until there is one on each.

    The first of equally important operators goes. A last round measures the network without each of the edges
    that are left, of which every node keeps the two most important.

    >>> best = {"conv_3x3", "skip"}
    >>> def measure(number, repeat, active, removals):
    ...     for removal in removals:  # whatever is not among the best makes the kernel worse
    ...         state = active.without(removal)
    ...         worse = sum(operator not in best for _, _, operator in state)
    ...         yield removal, Scores(Score(1.0 + worse), None)
    >>> {operator for _, _, operator in prune(ActiveOperators.full(), measure, repeats=1).active_operators}
    {'conv_3x3'}
    """
    journal = journal or Journal()
    number = 0
    while not active.at_most_one_per_edge:
        choices = removable(active)
        ranks = _ranks(number, active, choices, measure, repeats, journal)
        gone = [min(group, key=ranks.__getitem__) for group in _by_edge(choices)]
        for choice in gone:
            active = active.without(choice)
        journal.close_round(number, gone)
        number += 1
    choices = list(active)
    architecture = active.best_architecture(_ranks(number, active, choices, measure, repeats, journal))
    journal.close_round(number, [choice for choice in choices if choice not in set(architecture.active_operators)])
    return architecture


def evaluations(active: ActiveOperators, repeats: int) -> int:
    """How many networks a search will measure."""
    counts = [len(group) for group in _by_edge(list(active))]
    rounds = [sum(count - gone for count in counts if count - gone > 1) + 1 for gone in range(max(counts) - 1)]
    return repeats * (sum(rounds) + len(counts) + 1)


def removable(active: ActiveOperators) -> list[EdgeOperator]:
    """Return the operators on edges that have more than one."""
    return [choice for group in _by_edge(list(active)) if len(group) > 1 for choice in group]


def importance(found: Measurements) -> dict[EdgeOperator, int]:
    """Return the rank sum of every operator (B algorithm 1, lines 8-10): the lower, the sooner it goes.

    Operators stand by ΔC, the highest first, as the kernel is better conditioned without it, and by ΔR, the
    lowest first, as there are more regions without it. Changes are relative to the network with all operators,
    averaged over the repeats. Equals share a rank, and a network that cannot be told is worse than all that can.
    """
    names = [choice for choice in found if choice is not None]
    ranks = dict.fromkeys(names, 0)
    for proxy, sign in (("condition", 1), ("regions", -1)):
        changes = {choice: _change(found, choice, proxy) for choice in names}
        known = sorted({-sign * change.value for change in changes.values() if change.trouble is None})
        places = {value: place for place, value in enumerate(known)}
        for choice, change in changes.items():
            ranks[choice] += places[-sign * change.value] if change.trouble is None else len(known)
    return ranks


def _change(found: Measurements, choice: EdgeOperator, proxy: str) -> Score:
    """The mean over repeats of (whole − rest)/whole, where the whole is the network with all operators."""
    rests = [getattr(scores, proxy) for scores in found[choice]]
    if rests[0] is None:
        return Score(0.0)
    wholes = [_whole(found, repeat, proxy) for repeat in range(len(rests))]
    return mean([Score(1 - rest.value / whole, rest.trouble) for whole, rest in zip(wholes, rests)])


def _whole(found: Measurements, repeat: int, proxy: str) -> float:
    """The whole's value in a repeat; if it cannot be told, the median of those that can."""
    values: dict[Removal, Score] = {choice: getattr(scores[repeat], proxy) for choice, scores in found.items()}
    told = [score.value for score in values.values() if score.trouble is None]
    return values[None].value if values[None].trouble is None else statistics.median(told or [1.0])


def _by_edge(choices: Sequence[EdgeOperator]) -> list[list[EdgeOperator]]:
    edges = dict.fromkeys(choice[:2] for choice in choices)
    return [[choice for choice in choices if choice[:2] == edge] for edge in edges]


def _ranks(
    number: int,
    active: ActiveOperators,
    choices: Sequence[EdgeOperator],
    measure: Measure,
    repeats: int,
    journal: Journal,
) -> dict[EdgeOperator, int]:
    """Measure what the journal does not know yet, and rank."""
    for repeat in range(repeats):
        missing = [removal for removal in (None, *choices) if (number, repeat, removal) not in journal.known]
        if missing:
            for removal, scores in measure(number, repeat, active, missing):
                journal.add(number, repeat, removal, scores)
    known = journal.known
    return importance({r: [known[number, repeat, r] for repeat in range(repeats)] for r in (None, *choices)})


class Journal:
    """Every score of a search, kept in a file as it is found: what is there already is not measured again.

    The first line holds the settings of the search, which must be the same when it goes on. Every line has a checksum.
    A line that was cut off by a kill is measured anew.
    """

    def __init__(
        self, file: Path | None = None, settings: Mapping[str, Any] | None = None, lock: FolderLock | None = None
    ) -> None:
        self.known: dict[tuple[int, int, Removal], Scores] = {}
        self.file, self.seconds, self._since = file, 0.0, time.perf_counter()
        self._lock = lock
        self.on_score: Callable[[int, int], None] = lambda number, count: None
        self._closed: set[int] = set()
        if file is not None:
            self._open(file, json.loads(json.dumps(settings or {})))

    def add(self, number: int, repeat: int, removal: Removal, scores: Scores) -> None:
        """Note the scores of one network."""
        self.known[number, repeat, removal] = scores
        cell, edge, operator = removal or (None, None, None)
        proxies = {name: score for name, score in scores._asdict().items() if score is not None}
        self._write(
            {"round": number, "repeat": repeat, "cell": cell, "edge": edge, "operator": operator}
            | {name: score.value if math.isfinite(score.value) else None for name, score in proxies.items()}
            | {f"{name}_trouble": score.trouble for name, score in proxies.items() if score.trouble is not None}
        )
        self.on_score(number, len(self.known))

    def close_round(self, number: int, gone: Sequence[EdgeOperator]) -> None:
        """Note what a round took away."""
        if number not in self._closed:
            self._closed.add(number)
            self._write({"round": number, "gone": gone})
            self.note_time()

    def note_time(self) -> None:
        """Note how long the search took since this was noted, so that a kill loses no more than a round's."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        self.seconds += seconds
        self._write({"seconds": seconds})

    def _open(self, file: Path, settings: dict[str, Any]) -> None:
        lines = self._read(file) if file.exists() else []
        if not any("round" in line for line in lines):  # nothing was measured before it failed
            lines, self.seconds = [], 0.0
        before = lines[0]["settings"] if lines else settings
        if before != settings:
            names = {**before, **settings}
            other = next((name for name in names if before.get(name) != settings.get(name)), "other settings")
            raise InputError(
                f"{file} is of a search with {other}={before.get(other)!r}, not {settings.get(other)!r}. "
                "Name another folder, or remove the file."
            )
        write_atomically(file, "".join(map(_sealed, lines or [{"settings": settings}])).encode(), follow=False)

    def _read(self, file: Path) -> list[dict[str, Any]]:
        """Take up what lines say, but for one that was cut off or damaged and what follows it."""
        try:
            texts = read_regular_file(file).splitlines()
        except OSError as error:
            raise InputError(f"{file} cannot be read ({error.strerror}). Name another folder.") from error
        lines: list[dict[str, Any]] = []
        for number, text in enumerate(texts, 1):
            try:
                line = _unsealed(json.loads(text))
                self._take_up(line) if lines else line["settings"].keys()
            except PARSING_ERRORS as error:
                if not lines:  # which is never cut off
                    raise InputError(
                        f"{file} is not the log of a search. Name another folder, or remove it."
                    ) from error
                if number < len(texts):
                    log.warning("line %d of %s is damaged: what follows is measured again.", number, file)
                break
            lines.append(line)
        return lines

    def _take_up(self, line: Mapping[str, Any]) -> None:
        if "gone" in line:
            self._closed.add(int(line["round"]))
        elif "seconds" in line:
            self.seconds += float(line["seconds"])
        else:
            self.known[_key(line)] = Scores(_score(line, "condition"), _score(line, "regions"))

    def _write(self, line: Mapping[str, Any]) -> None:
        if self.file is None:
            return
        if self._lock is not None:
            self._lock.check()
        try:
            with self.file.open("a", encoding="utf-8") as stream:
                stream.write(_sealed(line))
        except OSError as error:
            raise InputError(
                f"{self.file} cannot be written ({error.strerror}). Free space; the same search then goes on."
            ) from error


def _sealed(line: Mapping[str, Any]) -> str:
    """Return a line of the log, with its checksum last."""
    return f"{json.dumps({**line, CHECKSUM: zlib.crc32(json.dumps(line).encode())})}\n"


def _unsealed(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line without its checksum, refusing one that is of another line; older logs have none."""
    checksum = line.pop(CHECKSUM, None)
    if checksum is not None and checksum != zlib.crc32(json.dumps(line).encode()):
        raise ValueError("the checksum is of another line")
    return line


def _key(line: Mapping[str, Any]) -> tuple[int, int, Removal]:
    choice = None if line["cell"] is None else (line["cell"], line["edge"], line["operator"])
    return int(line["round"]), int(line["repeat"]), choice


def _score(line: Mapping[str, Any], name: str) -> Score | None:
    if name not in line:
        return None
    value, trouble = line[name], line.get(f"{name}_trouble")
    return Score(math.nan if value is None else float(value), None if trouble is None else str(trouble))
