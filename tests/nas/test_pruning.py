import contextlib
import json
import logging
import math
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from damage import damaged_json
from metabridge.environments import LabelledImages
from metabridge.errors import InputError
from metabridge.nas import CELLS, EDGES, OPERATORS, ActiveOperators, Architecture
from metabridge.nas.architecture_search import Proxies, Search, TimeUpError
from metabridge.nas.proxies import Score
from metabridge.nas.pruning import Journal, Removal, Scores, evaluations, importance, prune
from metabridge.threads import stream_over_threads
from small_searches import on_first_edge, small_search, thinned

FIRST, SECOND, THIRD = OPERATORS[:3]


class Toy:
    """Networks whose proxies are known: every operator adds its worth to the regions and takes it from the kernel."""

    def __init__(self, stop_after: float = math.inf) -> None:
        self.asked: list[tuple[int, int, Removal]] = []
        self.left = stop_after

    def worth(self, cell: str, edge: int, operator: str) -> float:
        return 1 + (OPERATORS.index(operator) + edge * (1 + CELLS.index(cell))) % len(OPERATORS) + edge / 100

    def __call__(
        self, number: int, repeat: int, active: ActiveOperators, removals: Sequence[Removal]
    ) -> Iterator[tuple[Removal, Scores]]:
        for removal in removals:
            if self.left <= 0:
                raise KeyboardInterrupt
            self.left -= 1
            self.asked.append((number, repeat, removal))
            left = active.without(removal)
            total = sum(self.worth(*choice) for choice in left)
            yield removal, Scores(Score((1 + repeat) * (2000 - total)), Score(1000 + total))


def gone(file: Path) -> list[list[list[object]]]:
    return [line["gone"] for line in map(json.loads, file.read_text().splitlines()) if "gone" in line]


def test_each_round_takes_the_operator_of_least_worth_from_every_edge(tmp_path: Path) -> None:
    toy, file = Toy(), tmp_path / "search.jsonl"
    architecture = prune(ActiveOperators.full(), toy, repeats=2, journal=Journal(file, {}))
    rounds = gone(file)
    assert len(rounds) == len(OPERATORS)  # six for operators, and one for edges
    for number, taken in enumerate(rounds[:-1]):
        expected = [
            [cell, edge, sorted(OPERATORS, key=lambda operator: toy.worth(cell, edge, operator))[number]]
            for cell in CELLS
            for edge in range(len(EDGES))
        ]
        assert taken == expected
    for cell in CELLS:
        best = {
            edge: max((toy.worth(cell, edge, operator), operator) for operator in OPERATORS)
            for edge in range(len(EDGES))
        }
        for node, pairs in enumerate(getattr(architecture, cell)):
            own = [edge for edge, (target, _) in enumerate(EDGES) if target == node]
            kept = sorted(sorted(own, key=lambda edge: best[edge][0])[-2:])
            assert pairs == tuple((EDGES[edge][1], best[edge][1]) for edge in kept)


def test_as_many_networks_are_measured_as_foretold() -> None:
    toy = Toy()
    prune(ActiveOperators.full(), toy, repeats=2)
    assert len(toy.asked) == len(set(toy.asked)) == evaluations(ActiveOperators.full(), 2) == 2 * (18 * 27 + 6 + 18 + 1)


@pytest.mark.parametrize("stop_after", [0, 1, 128, 300, 510])
def test_a_search_that_was_killed_ends_as_one_that_was_not(tmp_path: Path, stop_after: int) -> None:
    whole = tmp_path / "whole.jsonl"
    wanted = prune(ActiveOperators.full(), Toy(), repeats=1, journal=Journal(whole, {}))
    file = tmp_path / "search.jsonl"
    killed = Toy(stop_after)
    with pytest.raises(KeyboardInterrupt):
        prune(ActiveOperators.full(), killed, repeats=1, journal=Journal(file, {}))
    with file.open("a") as stream:
        stream.write('{"round": 0, "repe')  # cut off in the middle of a line
    resumed = Toy()
    assert prune(ActiveOperators.full(), resumed, repeats=1, journal=Journal(file, {})) == wanted
    assert not set(killed.asked) & set(resumed.asked)
    assert without_times(file) == without_times(whole)


def without_times(file: Path) -> list[str]:
    lines = file.read_text().splitlines()
    kept = [line for line in lines if "seconds" not in line]
    assert len(kept) < len(lines)  # what was spent is noted with every round, so that a kill does not lose it
    return kept


def test_a_finished_search_measures_nothing_again(tmp_path: Path) -> None:
    file = tmp_path / "search.jsonl"
    wanted = prune(ActiveOperators.full(), Toy(), repeats=1, journal=Journal(file, {}))
    before, again = file.read_text(), Toy(stop_after=0)
    assert prune(ActiveOperators.full(), again, repeats=1, journal=Journal(file, {})) == wanted
    assert file.read_text() == before


@pytest.mark.skipif(sys.platform == "win32", reason="an open file keeps its folder there")
def test_a_search_whose_folder_was_moved_does_not_write_into_the_one_in_its_place(tmp_path, monkeypatch, glyphs):
    run, measure = tmp_path / "run", Proxies.__call__

    def moved(self, *asked):
        run.rename(tmp_path / "moved")
        run.mkdir()
        return measure(self, *asked)

    monkeypatch.setattr(Proxies, "__call__", moved)
    with pytest.raises(InputError, match="is not the one that was locked"):
        small_search("none").run(glyphs, out=run, progress=False)
    assert not list(run.iterdir())


def test_a_journal_of_other_settings_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path / "search.jsonl", {"seed": 2, "cells": 5})  # which measures nothing, and leaves its place
    journal = Journal(tmp_path / "search.jsonl", {"seed": 0, "cells": 5})
    journal.add(0, 0, None, Scores(Score(1.0), None))
    with pytest.raises(InputError, match=re.escape("a search with seed=0, not 1")):
        Journal(tmp_path / "search.jsonl", {"seed": 1, "cells": 5})


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
def test_what_follows_a_damaged_line_is_measured_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, line: str
) -> None:
    file = tmp_path / "search.jsonl"
    wanted = prune(ActiveOperators.full(), Toy(), repeats=1, journal=Journal(file, {}))
    lines = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join([*lines[:100], line.encode("latin1"), *lines[100:]]))
    again = Toy()
    with caplog.at_level(logging.WARNING, "metabridge"):
        assert prune(ActiveOperators.full(), again, repeats=1, journal=Journal(file, {})) == wanted
    assert f"line 101 of {file} is damaged" in caplog.text
    assert len(again.asked) == evaluations(ActiveOperators.full(), 1) - 99


@pytest.mark.parametrize("first", ["garbage", "[1]", "{}", '{"settings": 5}'])
def test_a_file_that_is_no_log_is_left_alone(tmp_path: Path, first: str) -> None:
    file = tmp_path / "search.jsonl"
    file.write_text(f'{first}\n{{"seconds": 1.0}}\n')
    with pytest.raises(InputError, match="is not the log of a search"):
        Journal(file, {})
    assert file.read_text().startswith(first)
    with pytest.raises(InputError, match=r"cannot be read \(Is a directory\)"):
        Journal(tmp_path, {})


def scored(*pairs: tuple[float, float]) -> list[Scores]:
    return [Scores(Score(condition), Score(regions)) for condition, regions in pairs]


def test_importance_is_the_sum_of_two_ranks() -> None:
    found = {
        None: scored((10, 100)),
        on_first_edge(FIRST): scored((5, 90)),  # without it the kernel is best, the regions fewest
        on_first_edge(SECOND): scored((8, 120)),
        on_first_edge(THIRD): scored((20, 110)),
    }
    assert importance(found) == {on_first_edge(FIRST): 0 + 2, on_first_edge(SECOND): 1 + 0, on_first_edge(THIRD): 2 + 1}


def test_equals_share_a_rank_and_the_first_of_them_goes() -> None:
    def constant(
        number: int, repeat: int, active: ActiveOperators, removals: Sequence[Removal]
    ) -> Iterator[tuple[Removal, Scores]]:
        yield from ((removal, Scores(Score(2.0), Score(3.0))) for removal in removals)

    left = prune(ActiveOperators.full(), constant, repeats=1)
    assert {operator for _, _, operator in left.active_operators} == {OPERATORS[-1]}
    assert all([source for source, _ in pairs] == [0, 1] for pairs in (*left.normal, *left.reduction))


def test_every_repeat_counts_alike_whatever_its_scale() -> None:
    found = {
        None: scored((1e6, 1), (1, 1), (1, 1)),
        on_first_edge(FIRST): scored((0.9e6, 1), (2, 1), (2, 1)),
        on_first_edge(SECOND): scored((1.1e6, 1), (1, 1), (1, 1)),
    }
    ranks = importance(found)
    assert ranks[on_first_edge(SECOND)] < ranks[on_first_edge(FIRST)]


@pytest.mark.parametrize("trouble", [Score(math.nan), Score(math.inf), Score(3.0, "lost in rounding")])
def test_a_network_that_cannot_be_told_is_worse_than_any_other(trouble: Score) -> None:
    found = {
        None: [Scores(Score(1.0), None)] * 2,
        on_first_edge(FIRST): [Scores(trouble, None), Scores(Score(0.1), None)],
        on_first_edge(SECOND): [Scores(Score(1e300), None)] * 2,
        on_first_edge(THIRD): [Scores(Score(2.0), None)] * 2,
    }
    ranks = importance(found)
    assert ranks[on_first_edge(THIRD)] < ranks[on_first_edge(SECOND)] < ranks[on_first_edge(FIRST)]


def test_where_the_whole_cannot_be_told_the_rest_is_still_ranked() -> None:
    found = {
        None: [Scores(Score(math.inf), None)],
        on_first_edge(FIRST): [Scores(Score(math.inf), None)],
        on_first_edge(SECOND): [Scores(Score(7.0), None)],
        on_first_edge(THIRD): [Scores(Score(5.0), None)],
    }
    assert importance(found) == {on_first_edge(FIRST): 2, on_first_edge(SECOND): 1, on_first_edge(THIRD): 0}


def test_troubles_survive_the_journal(tmp_path: Path) -> None:
    file = tmp_path / "search.jsonl"
    scores = Scores(Score(math.inf, "lost in rounding"), None)
    Journal(file, {}).add(0, 0, on_first_edge(FIRST), scores)
    (known,) = Journal(file, {}).known.values()
    assert known.condition is not None
    assert known.condition.trouble == "lost in rounding"
    assert known.regions is None
    assert json.loads(file.read_text().splitlines()[1])["condition"] is None  # JSON has no infinity


@pytest.mark.parametrize("kernel", ["maml", "none"])
def test_fast_and_reference_proxies_are_the_same(glyphs: LabelledImages, kernel: str) -> None:
    active, removals = thinned(), [None, ("normal", 2, "skip"), ("reduction", 0, "avg_pool_3x3")]
    fast, reference = (
        dict(Proxies(small_search(kernel), glyphs, way=way)(1, 0, active, removals)) for way in ("fast", "reference")
    )
    assert fast.keys() == reference.keys() == set(removals)
    for removal in removals:
        assert fast[removal].regions == reference[removal].regions
        if kernel == "none":
            assert fast[removal].condition is None
        else:
            assert fast[removal].condition.value == pytest.approx(reference[removal].condition.value, rel=1e-3)


def test_rounds_and_repeats_have_weights_and_images_of_their_own(glyphs: LabelledImages) -> None:
    proxies = Proxies(small_search(), glyphs)
    values = []
    for number, repeat in ((0, 0), (0, 1), (1, 0), (0, 0)):
        ((_, scores),) = proxies(number, repeat, thinned(), [None])
        values.append(scores.condition.value)
    assert len(set(values)) == 3
    assert values[0] == values[3]


@pytest.mark.parametrize("way", ["fast", "reference"])
def test_a_search_of_networks_that_are_too_large_is_refused_before_one_is_built(
    glyphs: LabelledImages, tmp_path: Path, way: str
) -> None:
    with pytest.raises(InputError, match="too large to build"):
        small_search(channels=10**9).run(glyphs, out=tmp_path / "search", way=way, progress=False)
    assert not (tmp_path / "search").exists()


def test_random_cells_follow_the_seed(glyphs: LabelledImages) -> None:
    first, again, other = (small_search("random", seed=seed).run(glyphs).architecture for seed in (0, 0, 1))
    assert first == again != other


def test_a_search_leaves_its_architecture_and_log_and_goes_on_when_its_time_was_up(
    glyphs: LabelledImages, tmp_path: Path
) -> None:
    search = small_search("none", operators=("skip", "conv_3x3"))
    with pytest.raises(TimeUpError, match="goes on where it stopped"):
        search.run(glyphs, out=tmp_path, minutes=0, progress=False)
    assert not (tmp_path / "architecture.json").exists()
    found = search.run(glyphs, out=tmp_path, progress=False)
    assert Architecture.load(tmp_path / "architecture.json") == found.architecture
    assert {operator for _, _, operator in found.architecture.active_operators} <= set(search.operators)
    assert found.measured == evaluations(ActiveOperators.full(search.operators), 1)
    again = search.run(glyphs, out=tmp_path, progress=False)
    assert again.architecture == found.architecture
    assert again.seconds > found.seconds
    with pytest.raises(InputError, match="seed"):
        replace(search, seed=1).run(glyphs, out=tmp_path, progress=False)


@pytest.mark.parametrize(
    ("operators", "complaint"), [((), "operators is empty"), (("conv_9x9",), "no operator 'conv_9x9'")]
)
def test_a_search_needs_operators_that_there_are(operators: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        Search(operators=operators)


def test_threads_share_the_work_and_pass_errors_on() -> None:
    before = torch.get_num_threads()
    assert sorted(stream_over_threads(lambda share: (item * 2 for item in share), [1, 2, 3])) == [2, 4, 6]

    def failing(share: Sequence[int]) -> Iterator[int]:
        yield from share
        raise InputError("no more")

    with pytest.raises(InputError, match="no more"):
        list(stream_over_threads(failing, [1, 2, 3]))
    assert torch.get_num_threads() == before


SEARCHED = """
import sys
sys.path.insert(0, {tests!r})
from metabridge.datasets import load_glyphs
from metabridge.nas.architecture_search import Proxies
from small_searches import small_search

measure = Proxies.__call__

def paused(self, *asked):
    for count, measured in enumerate(measure(self, *asked)):
        yield measured
        if count == 2:
            print("searching", flush=True)
            sys.stdin.read()

Proxies.__call__ = paused
small_search("none", operators=("skip", "conv_3x3")).run(load_glyphs(), out=sys.argv[1], progress=False)
"""


def test_two_searches_do_not_write_into_one_log_and_a_killed_one_goes_on(
    glyphs: LabelledImages, tmp_path: Path
) -> None:
    search, out = small_search("none", operators=("skip", "conv_3x3")), tmp_path / "search"
    program = SEARCHED.format(tests=str(Path(__file__).parent.parent))
    words = [sys.executable, "-c", program, str(out)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "searching\n"
        before = (out / "search.jsonl").read_bytes()
        with pytest.raises(InputError, match=f"is in use by process {other.pid} on"):
            search.run(glyphs, out=out, progress=False)
        assert (out / "search.jsonl").read_bytes() == before
        other.kill()
    found = search.run(glyphs, out=out, progress=False)
    assert found.architecture == search.run(glyphs, progress=False).architecture
    assert found.measured == evaluations(ActiveOperators.full(search.operators), 1)
    assert {file.name for file in out.iterdir()} == {"search.jsonl", "architecture.json"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_search_on_a_full_disk_ends_in_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "search.jsonl"
    journal = Journal(file, {})
    file.unlink()
    file.symlink_to("/dev/full")
    with pytest.raises(InputError, match=r"search.jsonl cannot be written \(No space left on device\)\. Free space"):
        journal.add(0, 0, None, Scores(Score(1.0), None))
    with pytest.raises(InputError, match=r"cannot be read \(Not a regular file\)"):
        Journal(file, {})


def test_every_changed_digit_of_a_log_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "search.jsonl"
    for number, value in enumerate((1.25, 3.5, 2.75)):
        Journal(file, {"seed": 1}).add(0, number, None, Scores(Score(value), Score(4.0)))
    content, whole = file.read_bytes(), Journal(file, {"seed": 1}).known
    for place in [place for place, byte in enumerate(content) if chr(byte).isdigit()]:
        changed = bytearray(content)
        changed[place] = ord("7") if content[place] != ord("7") else ord("8")
        file.write_bytes(changed)
        try:
            known = Journal(file, {"seed": 1}).known
        except InputError:
            continue
        assert known.items() <= whole.items()


@pytest.mark.parametrize("checksum", [True, False])
def test_a_damaged_log_gives_a_search_or_one_sentence(tmp_path: Path, checksum: bool) -> None:
    file, draw = tmp_path / "search.jsonl", random.Random(0)
    journal = Journal(file, {"seed": 1, "time": "inf"})
    for number in range(3):
        journal.add(0, number, on_first_edge(FIRST), Scores(Score(1.25), Score(4.0, "lost")))
    journal.close_round(0, [on_first_edge(FIRST)])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    if not checksum:
        lines = [{key: value for key, value in line.items() if key != "crc32"} for line in lines]
    for _ in range(300):
        texts = [json.dumps(line).encode() for line in lines]
        place = draw.randrange(len(lines))
        texts[place] = damaged_json(lines[place], draw)
        file.write_bytes(b"\n".join(texts))
        with contextlib.suppress(InputError):
            assert len(Journal(file, {"seed": 1, "time": "inf"}).known) <= 3
