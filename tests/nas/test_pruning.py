import contextlib
import json
import logging
import math
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from damage import damaged_json
from metabridge.errors import InputError
from metabridge.nas import CELLS, EDGES, OPERATORS, ActiveOperators, ProxyScore
from metabridge.nas.pruning import CandidateScores, Removal, SearchLog, count_evaluations, importance_ranks, prune
from small_searches import on_first_edge

OPERATOR_A, OPERATOR_B, OPERATOR_C = (on_first_edge(name) for name in OPERATORS[:3])
ALL_OPERATORS = ActiveOperators.full()


class ScoreByFormula:
    """Scores candidates by a formula: every operator has a value, and a higher total value improves both proxies.

    After `stop_after` scores, the search is interrupted.
    """

    def __init__(self, stop_after: float = math.inf) -> None:
        self.calls: list[tuple[int, int, Removal]] = []
        self.remaining = stop_after

    def value(self, cell: str, edge: int, operator: str) -> float:
        """Return the value of an operator: operators of an edge have different values, in an order that varies."""
        return 1 + (OPERATORS.index(operator) + edge * (1 + CELLS.index(cell))) % len(OPERATORS) + edge / 100

    def __call__(
        self, round_index: int, repeat: int, active: ActiveOperators, removals: Sequence[Removal]
    ) -> Iterator[tuple[Removal, CandidateScores]]:
        for removal in removals:
            if self.remaining <= 0:
                raise KeyboardInterrupt
            self.remaining -= 1
            self.calls.append((round_index, repeat, removal))
            total = sum(self.value(*operator) for operator in active.without(removal))
            yield removal, CandidateScores(ProxyScore((1 + repeat) * (2000 - total)), ProxyScore(1000 + total))


def removed_operators(file: Path) -> list[list[list[object]]]:
    """Return the operators that each round removed, each as a cell, an edge and the name of the operator."""
    return [line["gone"] for line in map(json.loads, file.read_text().splitlines()) if "gone" in line]


def test_each_round_removes_the_operator_of_least_value_from_every_edge(tmp_path: Path) -> None:
    score, file = ScoreByFormula(), tmp_path / "search.jsonl"
    architecture = prune(ALL_OPERATORS, score, repeats=2, search_log=SearchLog(file, {}))
    rounds = removed_operators(file)
    assert len(rounds) == len(OPERATORS)  # six for operators, and one for edges
    for index, removed in enumerate(rounds[:-1]):
        expected = [
            [cell, edge, sorted(OPERATORS, key=lambda operator: score.value(cell, edge, operator))[index]]
            for cell in CELLS
            for edge in range(len(EDGES))
        ]
        assert removed == expected
    for cell in CELLS:
        best = {
            edge: max((score.value(cell, edge, operator), operator) for operator in OPERATORS)
            for edge in range(len(EDGES))
        }
        for node, pairs in enumerate(getattr(architecture, cell)):
            incoming = [edge for edge, (target, _) in enumerate(EDGES) if target == node]
            best_two = sorted(sorted(incoming, key=lambda edge: best[edge][0])[-2:])
            assert pairs == tuple((EDGES[edge][1], best[edge][1]) for edge in best_two)


def test_count_evaluations_is_the_number_of_networks_that_are_scored() -> None:
    score = ScoreByFormula()
    prune(ALL_OPERATORS, score, repeats=2)
    # Per repeat: six rounds, in which each of 18 edges has 7, 6, ..., 2 operators to remove, and the last round, which
    # removes each of 18. Every round also scores the network with all operators.
    expected = 2 * (18 * (7 + 6 + 5 + 4 + 3 + 2) + 6 + 18 + 1)
    assert len(score.calls) == len(set(score.calls)) == count_evaluations(ALL_OPERATORS, 2) == expected


@pytest.mark.parametrize("stop_after", [0, 1, 128, 300, 510])  # of 511 scores
def test_a_killed_search_continues_to_the_same_architecture(tmp_path: Path, stop_after: int) -> None:
    uninterrupted_log = tmp_path / "uninterrupted.jsonl"
    expected = prune(ALL_OPERATORS, ScoreByFormula(), repeats=1, search_log=SearchLog(uninterrupted_log, {}))
    file = tmp_path / "search.jsonl"
    killed_search = ScoreByFormula(stop_after)
    with pytest.raises(KeyboardInterrupt):
        prune(ALL_OPERATORS, killed_search, repeats=1, search_log=SearchLog(file, {}))
    with file.open("a") as stream:
        stream.write('{"round": 0, "repe')  # cut off in the middle of a line
    resumed_search = ScoreByFormula()
    assert prune(ALL_OPERATORS, resumed_search, repeats=1, search_log=SearchLog(file, {})) == expected
    assert not set(killed_search.calls) & set(resumed_search.calls)
    assert lines_without_times(file) == lines_without_times(uninterrupted_log)


def lines_without_times(file: Path) -> list[str]:
    lines = file.read_text().splitlines()
    lines_without_time = [line for line in lines if "seconds" not in line]
    assert len(lines_without_time) < len(lines)  # every round adds a line with its time
    return lines_without_time


def test_a_finished_search_computes_no_scores_again(tmp_path: Path) -> None:
    file = tmp_path / "search.jsonl"
    expected = prune(ALL_OPERATORS, ScoreByFormula(), repeats=1, search_log=SearchLog(file, {}))
    log_before = file.read_text()
    assert prune(ALL_OPERATORS, ScoreByFormula(stop_after=0), repeats=1, search_log=SearchLog(file, {})) == expected
    assert file.read_text() == log_before


def test_a_log_with_other_settings_is_rejected_unless_it_has_no_scores(tmp_path: Path) -> None:
    file = tmp_path / "search.jsonl"
    SearchLog(file, {"seed": 2, "cells": 5})
    search_log = SearchLog(file, {"seed": 0, "cells": 5})
    search_log.add_scores(0, 0, None, CandidateScores(ProxyScore(1.0), None))
    with pytest.raises(InputError, match=re.escape("the log of a search with seed=0, not 1. Use another folder")):
        SearchLog(file, {"seed": 1, "cells": 5})


@pytest.mark.parametrize(
    "line",
    [
        "5",
        "",
        "\xff",
        '{"round": 0}',
        '{"round": 0, "repeat": 0, "cell": "normal", "edge": 1, "operator": "skip", "condition": "x"}',
        '{"round": 0, "repeat": 0, "cell": "normal", "edge": [1], "operator": "skip", "condition": 1.0}',
    ],
)
def test_scores_after_a_damaged_line_are_computed_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, line: str
) -> None:
    file = tmp_path / "search.jsonl"
    expected = prune(ALL_OPERATORS, ScoreByFormula(), repeats=1, search_log=SearchLog(file, {}))
    lines = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join([*lines[:100], line.encode("latin1"), *lines[100:]]))
    resumed_search = ScoreByFormula()
    with caplog.at_level(logging.WARNING, "metabridge"):
        assert prune(ALL_OPERATORS, resumed_search, repeats=1, search_log=SearchLog(file, {})) == expected
    assert f"Line 101 of {file} is damaged" in caplog.text
    assert len(resumed_search.calls) == count_evaluations(ALL_OPERATORS, 1) - 99  # line 1 contains the settings


@pytest.mark.parametrize("first_line", ["garbage", "[1]", "{}", '{"settings": 5}'])
def test_a_file_that_is_not_a_log_is_rejected_and_left_unchanged(tmp_path: Path, first_line: str) -> None:
    file = tmp_path / "search.jsonl"
    file.write_text(f'{first_line}\n{{"seconds": 1.0}}\n')
    with pytest.raises(InputError, match="is not a search log"):
        SearchLog(file, {})
    assert file.read_text().startswith(first_line)
    with pytest.raises(InputError, match=r"cannot be read \(Is a directory\)"):
        SearchLog(tmp_path, {})


def make_scores(*pairs: tuple[float, float]) -> list[CandidateScores]:
    return [CandidateScores(ProxyScore(condition), ProxyScore(regions)) for condition, regions in pairs]


def test_importance_is_the_sum_of_two_ranks() -> None:
    ranks = importance_ranks(
        {
            None: make_scores((10, 100)),
            OPERATOR_A: make_scores((5, 90)),  # lowest condition number, fewest regions
            OPERATOR_B: make_scores((8, 120)),
            OPERATOR_C: make_scores((20, 110)),
        }
    )
    # rank by condition number + rank by regions
    assert ranks == {OPERATOR_A: 0 + 2, OPERATOR_B: 1 + 0, OPERATOR_C: 2 + 1}


def test_equal_operators_share_a_rank_and_the_first_is_removed() -> None:
    def score_equally(
        round_index: int, repeat: int, active: ActiveOperators, removals: Sequence[Removal]
    ) -> Iterator[tuple[Removal, CandidateScores]]:
        yield from ((removal, CandidateScores(ProxyScore(2.0), ProxyScore(3.0))) for removal in removals)

    architecture = prune(ALL_OPERATORS, score_equally, repeats=1)
    assert {operator for _, _, operator in architecture.active_operators} == {OPERATORS[-1]}
    nodes = (*architecture.normal, *architecture.reduction)
    assert all([source for source, _ in pairs] == [0, 1] for pairs in nodes)


def test_all_repeats_have_the_same_weight_whatever_their_scale() -> None:
    ranks = importance_ranks(
        {
            None: make_scores((1e6, 1), (1, 1), (1, 1)),
            OPERATOR_A: make_scores((0.9e6, 1), (2, 1), (2, 1)),
            OPERATOR_B: make_scores((1.1e6, 1), (1, 1), (1, 1)),
        }
    )
    assert ranks[OPERATOR_B] < ranks[OPERATOR_A]


@pytest.mark.parametrize(
    "failed_score", [ProxyScore(math.nan), ProxyScore(math.inf), ProxyScore(3.0, "lost in rounding")]
)
def test_a_failed_network_ranks_after_all_others(failed_score: ProxyScore) -> None:
    ranks = importance_ranks(
        {
            None: [CandidateScores(ProxyScore(1.0), None)] * 2,
            OPERATOR_A: [CandidateScores(failed_score, None), CandidateScores(ProxyScore(0.1), None)],
            OPERATOR_B: [CandidateScores(ProxyScore(1e300), None)] * 2,
            OPERATOR_C: [CandidateScores(ProxyScore(2.0), None)] * 2,
        }
    )
    assert ranks[OPERATOR_C] < ranks[OPERATOR_B] < ranks[OPERATOR_A]


def condition_scores(*values: float) -> list[CandidateScores]:
    return [CandidateScores(ProxyScore(value), None) for value in values]


def test_operators_are_ranked_even_if_the_full_network_failed() -> None:
    ranks = importance_ranks(
        {
            None: condition_scores(math.inf),
            OPERATOR_A: condition_scores(math.inf),
            OPERATOR_B: condition_scores(7.0),
            OPERATOR_C: condition_scores(5.0),
        }
    )
    assert ranks == {OPERATOR_A: 2, OPERATOR_B: 1, OPERATOR_C: 0}


def test_a_failed_full_network_has_the_median_of_the_others() -> None:
    ranks = importance_ranks(
        {
            None: condition_scores(math.inf, 1.0),
            OPERATOR_A: condition_scores(1.0, 4.5),  # sum of the values relative to 3 and 1: 4.83
            OPERATOR_B: condition_scores(3.0, 4.0),  # 5
            OPERATOR_C: condition_scores(9.0, 1.0),  # 4
        }
    )
    assert ranks == {OPERATOR_A: 1, OPERATOR_B: 2, OPERATOR_C: 0}


def test_failures_are_logged(tmp_path: Path) -> None:
    file = tmp_path / "search.jsonl"
    scores = CandidateScores(ProxyScore(math.inf, "lost in rounding"), None)
    SearchLog(file, {}).add_scores(0, 0, OPERATOR_A, scores)
    (logged_scores,) = SearchLog(file, {}).scores.values()
    assert logged_scores.condition is not None
    assert logged_scores.condition.failure == "lost in rounding"
    assert logged_scores.regions is None
    assert json.loads(file.read_text().splitlines()[1])["condition"] is None  # JSON has no infinity


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_full_disk_raises_an_input_error(tmp_path: Path) -> None:
    file = tmp_path / "search.jsonl"
    search_log = SearchLog(file, {})
    file.unlink()
    file.symlink_to("/dev/full")
    with pytest.raises(InputError, match=r"search.jsonl cannot be written \(No space left on device\)\. Free some"):
        search_log.add_scores(0, 0, None, CandidateScores(ProxyScore(1.0), None))
    with pytest.raises(InputError, match=r"cannot be read \(Not a regular file\)"):
        SearchLog(file, {})


def test_every_changed_digit_of_a_log_is_detected(tmp_path: Path) -> None:
    file = tmp_path / "search.jsonl"
    for repeat, value in enumerate((1.25, 3.5, 2.75)):
        scores = CandidateScores(ProxyScore(value), ProxyScore(4.0))
        SearchLog(file, {"seed": 1}).add_scores(0, repeat, None, scores)
    content, expected = file.read_bytes(), SearchLog(file, {"seed": 1}).scores
    for position in [position for position, byte in enumerate(content) if chr(byte).isdigit()]:
        changed = bytearray(content)
        changed[position] = ord("7") if content[position] != ord("7") else ord("8")
        file.write_bytes(changed)
        try:
            scores_read = SearchLog(file, {"seed": 1}).scores
        except InputError:
            continue
        assert scores_read.items() <= expected.items()


@pytest.mark.parametrize("with_checksums", [True, False])
def test_a_damaged_log_is_read_in_part_or_rejected(tmp_path: Path, with_checksums: bool) -> None:
    file, rng = tmp_path / "search.jsonl", random.Random(0)
    search_log = SearchLog(file, {"seed": 1, "time": "inf"})
    for repeat in range(3):
        scores = CandidateScores(ProxyScore(1.25), ProxyScore(4.0, "lost"))
        search_log.add_scores(0, repeat, OPERATOR_A, scores)
    search_log.add_round(0, [OPERATOR_A])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    if not with_checksums:
        lines = [{key: value for key, value in line.items() if key != "crc32"} for line in lines]
    for _ in range(300):
        texts = [json.dumps(line).encode() for line in lines]
        index = rng.randrange(len(lines))
        texts[index] = damaged_json(lines[index], rng)
        file.write_bytes(b"\n".join(texts))
        with contextlib.suppress(InputError):
            assert len(SearchLog(file, {"seed": 1, "time": "inf"}).scores) <= 3
