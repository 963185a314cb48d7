"""Prune a supernet to one architecture without training (Wang et al. 2022, algorithm 1)."""

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
from metabridge.nas.proxies import ProxyScore, mean_score

log = logging.getLogger("metabridge")

CHECKSUM = "crc32"  # the key of a log line's checksum
Removal = EdgeOperator | None  # the operator that a candidate lacks; None for the network with all operators


class CandidateScores(NamedTuple):
    """The proxies of one candidate; None for a proxy that the search does not use."""

    condition: ProxyScore | None
    regions: ProxyScore | None


# (round, repeat, active operators, removals) -> pairs of a removal and its scores, in any order
ScoreCandidates = Callable[[int, int, ActiveOperators, Sequence[Removal]], Iterable[tuple[Removal, CandidateScores]]]
ScoresByRemoval = Mapping[Removal, Sequence[CandidateScores]]  # one entry per repeat


def prune(
    active: ActiveOperators, score_candidates: ScoreCandidates, *, repeats: int, search_log: SearchLog | None = None
) -> Architecture:
    """Remove the least important operator of every edge, round by round, until each edge has one.

    Among equally important operators the first is removed. The last round scores the network without each of the
    remaining operators, and every node keeps its two most important edges.

    Args:
        active: Operators to start from.
        score_candidates: Function that takes the round, the repeat, the active operators and the removals, and yields
            each removal with its scores.
        repeats: Number of initializations and batches of tasks that scores are averaged over.
        search_log: Log of scores. Scores that it already contains are not computed again.

    Returns:
        The remaining architecture.

    >>> best = {"conv_3x3", "skip"}
    >>> def score_candidates(round_index, repeat, active, removals):
    ...     for removal in removals:  # every operator that is not among the best makes the score worse
    ...         worse = sum(operator not in best for _, _, operator in active.without(removal))
    ...         yield removal, CandidateScores(ProxyScore(1.0 + worse), None)
    >>> architecture = prune(ActiveOperators.full(), score_candidates, repeats=1)
    >>> {operator for _, _, operator in architecture.active_operators}
    {'conv_3x3'}
    """
    search_log = search_log or SearchLog()
    round_index = 0
    while not active.at_most_one_per_edge:
        operators = removable_operators(active)
        ranks = _importance(round_index, active, operators, score_candidates, repeats, search_log)
        removed_operators = [min(group, key=ranks.__getitem__) for group in _group_by_edge(operators)]
        for operator in removed_operators:
            active = active.without(operator)
        search_log.add_round(round_index, removed_operators)
        round_index += 1
    operators = list(active)
    ranks = _importance(round_index, active, operators, score_candidates, repeats, search_log)
    architecture = active.best_architecture(ranks)
    remaining = set(architecture.active_operators)
    search_log.add_round(round_index, [operator for operator in operators if operator not in remaining])
    return architecture


def count_evaluations(active: ActiveOperators, repeats: int) -> int:
    """Return the number of networks that a search evaluates, counting every repeat.

    >>> count_evaluations(ActiveOperators.full(), repeats=3)
    1533
    """
    counts = [len(group) for group in _group_by_edge(list(active))]
    networks_per_round = [  # the network with all operators, and one without each removable operator
        1 + sum(count - round_index for count in counts if count - round_index > 1)
        for round_index in range(max(counts) - 1)
    ]
    networks_in_last_round = 1 + len(counts)
    return repeats * (sum(networks_per_round) + networks_in_last_round)


def removable_operators(active: ActiveOperators) -> list[EdgeOperator]:
    """Return all operators on edges that have more than one operator."""
    return [operator for group in _group_by_edge(list(active)) if len(group) > 1 for operator in group]


def importance_ranks(scores: ScoresByRemoval) -> dict[EdgeOperator, int]:
    """Return the sum of two ranks for every operator (Wang et al. 2022, algorithm 1, lines 8-10).

    The operator with the lowest sum is the least important. ΔC and ΔR are the relative decreases of the condition
    number and of the number of linear regions if the operator is removed. The operator with the highest ΔC, without
    which the kernel is best conditioned, has rank 0 by ΔC. The operator with the lowest ΔR, without which there are the
    most regions, has rank 0 by ΔR. Equal values share a rank, and operators with a failed proxy have the last rank.
    """
    operators = [removal for removal in scores if removal is not None]
    ranks = dict.fromkeys(operators, 0)
    for proxy, sign in (("condition", 1), ("regions", -1)):  # rank 0: the highest ΔC, but the lowest ΔR
        decreases = {operator: _relative_decrease(scores, operator, proxy) for operator in operators}
        values = sorted({-sign * decrease.value for decrease in decreases.values() if decrease.failure is None})
        rank_of = {value: rank for rank, value in enumerate(values)}
        for operator, decrease in decreases.items():
            ranks[operator] += rank_of[-sign * decrease.value] if decrease.failure is None else len(values)
    return ranks


def _relative_decrease(scores: ScoresByRemoval, operator: EdgeOperator, proxy: str) -> ProxyScore:
    """Return the mean over repeats of (full − reduced)/full, where `reduced` is the value without the operator."""
    reduced_scores = [getattr(candidate, proxy) for candidate in scores[operator]]
    if reduced_scores[0] is None:
        return ProxyScore(0.0)
    full_values = [_full_network_value(scores, repeat, proxy) for repeat in range(len(reduced_scores))]
    return mean_score(
        [ProxyScore(1 - reduced.value / full, reduced.failure) for full, reduced in zip(full_values, reduced_scores)]
    )


def _full_network_value(scores: ScoresByRemoval, repeat: int, proxy: str) -> float:
    """Return the value of the network with all operators, or the median of all other values if its proxy failed."""
    score_of: dict[Removal, ProxyScore] = {
        removal: getattr(candidates[repeat], proxy) for removal, candidates in scores.items()
    }
    if score_of[None].failure is None:
        return score_of[None].value
    return statistics.median([score.value for score in score_of.values() if score.failure is None] or [1.0])


def _group_by_edge(operators: Sequence[EdgeOperator]) -> list[list[EdgeOperator]]:
    edges = dict.fromkeys(operator[:2] for operator in operators)
    return [[operator for operator in operators if operator[:2] == edge] for edge in edges]


def _importance(
    round_index: int,
    active: ActiveOperators,
    operators: Sequence[EdgeOperator],
    score_candidates: ScoreCandidates,
    repeats: int,
    search_log: SearchLog,
) -> dict[EdgeOperator, int]:
    """Compute the scores that the log does not contain yet, and return the ranks of the operators."""
    removals: list[Removal] = [None, *operators]
    for repeat in range(repeats):
        missing_removals = [removal for removal in removals if (round_index, repeat, removal) not in search_log.scores]
        if missing_removals:
            for removal, scores in score_candidates(round_index, repeat, active, missing_removals):
                search_log.add_scores(round_index, repeat, removal, scores)
    return importance_ranks(
        {
            removal: [search_log.scores[round_index, repeat, removal] for repeat in range(repeats)]
            for removal in removals
        }
    )


class SearchLog:
    """All scores of a search, written to a file one by one so that a stopped search can be continued.

    The first line of the file contains the settings of the search. Opening the file with other settings raises an
    error, unless it has no scores; then it is overwritten. Every line has a checksum. A damaged or truncated line and
    all lines after it are dropped and computed again.

    Lines have the keys of version 0.1.0. There are four kinds of lines:

    - `settings`
    - `round`, `repeat`, `cell`, `edge` and `operator`, with the scores `condition` and `regions` and their failures
      `condition_trouble` and `regions_trouble`
    - `round` and `gone`, the operators that the round removed
    - `seconds`, the computing time since the previous line of this kind

    Args:
        file: Path of the log; None keeps the scores in memory only.
        settings: Settings of the search, as JSON data.
        lock: Lock of the file's folder, checked before every write.

    Raises:
        InputError: If the file cannot be read, is not a search log, or has scores for other settings.
    """

    def __init__(
        self, file: Path | None = None, settings: Mapping[str, Any] | None = None, lock: FolderLock | None = None
    ) -> None:
        self.scores: dict[tuple[int, int, Removal], CandidateScores] = {}  # by round, repeat and removal
        self.file, self.seconds, self._last_time = file, 0.0, time.perf_counter()
        self._lock = lock
        # called after each new score, with the round and the number of scores in the log
        self.on_score: Callable[[int, int], None] = lambda round_index, count: None
        self._finished_rounds: set[int] = set()
        if file is not None:
            self._open(file, json.loads(json.dumps(settings or {})))

    def add_scores(self, round_index: int, repeat: int, removal: Removal, scores: CandidateScores) -> None:
        """Add the scores of one candidate."""
        self.scores[round_index, repeat, removal] = scores
        cell, edge, operator = removal or (None, None, None)
        proxies = {name: score for name, score in scores._asdict().items() if score is not None}
        self._write(
            {"round": round_index, "repeat": repeat, "cell": cell, "edge": edge, "operator": operator}
            | {name: score.value if math.isfinite(score.value) else None for name, score in proxies.items()}
            | {f"{name}_trouble": score.failure for name, score in proxies.items() if score.failure is not None}
        )
        self.on_score(round_index, len(self.scores))

    def add_round(self, round_index: int, removed_operators: Sequence[EdgeOperator]) -> None:
        """Add the operators that a round removed, unless the log already contains them."""
        if round_index not in self._finished_rounds:
            self._finished_rounds.add(round_index)
            self._write({"round": round_index, "gone": removed_operators})
            self.add_time()

    def add_time(self) -> None:
        """Add the time since the last call. A killed search loses the time of one round at most."""
        now = time.perf_counter()
        seconds, self._last_time = now - self._last_time, now
        self.seconds += seconds
        self._write({"seconds": seconds})

    def _open(self, file: Path, settings: dict[str, Any]) -> None:
        lines = self._read(file) if file.exists() else []
        if not any("round" in line for line in lines):  # a log without scores is overwritten
            lines, self.seconds = [], 0.0
        logged_settings = lines[0]["settings"] if lines else settings
        if logged_settings != settings:
            names = {**logged_settings, **settings}
            name = next((name for name in names if logged_settings.get(name) != settings.get(name)), "other settings")
            raise InputError(
                f"{file} is the log of a search with {name}={logged_settings.get(name)!r}, not {settings.get(name)!r}. "
                "Use another folder, or remove the file."
            )
        write_atomically(file, "".join(map(_with_checksum, lines or [{"settings": settings}])).encode(), follow=False)

    def _read(self, file: Path) -> list[dict[str, Any]]:
        """Read the lines of a log up to the first that is damaged or truncated."""
        try:
            texts = read_regular_file(file).splitlines()
        except OSError as error:
            raise InputError(f"{file} cannot be read ({error.strerror}). Use another folder.") from error
        lines: list[dict[str, Any]] = []
        for number, text in enumerate(texts, 1):
            try:
                line = _without_checksum(json.loads(text))
                if lines:
                    self._load_line(line)
                else:
                    line["settings"].keys()  # raises an error unless this is the settings line
            except PARSING_ERRORS as error:
                if not lines:  # the first line is written atomically, so a bad first line means another kind of file
                    raise InputError(f"{file} is not a search log. Use another folder, or remove the file.") from error
                if number < len(texts):
                    log.warning("Line %d of %s is damaged: computing it and everything after it again.", number, file)
                break
            lines.append(line)
        return lines

    def _load_line(self, line: Mapping[str, Any]) -> None:
        if "gone" in line:
            self._finished_rounds.add(int(line["round"]))
        elif "seconds" in line:
            self.seconds += float(line["seconds"])
        else:
            operator = None if line["cell"] is None else (line["cell"], line["edge"], line["operator"])
            scores = CandidateScores(_load_score(line, "condition"), _load_score(line, "regions"))
            self.scores[int(line["round"]), int(line["repeat"]), operator] = scores

    def _write(self, line: Mapping[str, Any]) -> None:
        if self.file is None:
            return
        if self._lock is not None:
            self._lock.check()
        try:
            with self.file.open("a", encoding="utf-8") as stream:
                stream.write(_with_checksum(line))
        except OSError as error:
            raise InputError(
                f"{self.file} cannot be written ({error.strerror}). Free some disk space and run the same search again "
                "to continue it."
            ) from error


def _with_checksum(line: Mapping[str, Any]) -> str:
    """Return a line of the log as JSON, with its checksum as the last entry."""
    return f"{json.dumps({**line, CHECKSUM: zlib.crc32(json.dumps(line).encode())})}\n"


def _without_checksum(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line without its checksum, or raise ValueError if it does not match. Old logs have no checksums."""
    checksum = line.pop(CHECKSUM, None)
    if checksum is not None and checksum != zlib.crc32(json.dumps(line).encode()):
        raise ValueError("the checksum does not match")
    return line


def _load_score(line: Mapping[str, Any], name: str) -> ProxyScore | None:
    if name not in line:
        return None
    value, failure = line[name], line.get(f"{name}_trouble")
    return ProxyScore(math.nan if value is None else float(value), None if failure is None else str(failure))
