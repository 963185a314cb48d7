import json
import math
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from metabridge.environments import LabelledImages
from metabridge.nas import Architecture
from metabridge.nas.architecture_search import Found, Search, score_model
from small_searches import small_search

Command = Callable[..., tuple[int, str, str]]


def test_search_writes_architecture_log_and_picture(
    metabridge: Command, glyphs: LabelledImages, tmp_path: Path
) -> None:
    given = ("--kernel", "random", "--seed", 3, "--operators", "skip, conv_3x3")
    status, printed, _ = metabridge("search", *given, "--out", tmp_path)
    assert status == 0
    found = Architecture.load(tmp_path / "architecture.json")
    assert str(found) in printed
    assert {file.name for file in tmp_path.iterdir()} == {"architecture.json", "search.jsonl", "cells.png"}
    assert (tmp_path / "cells.png").read_bytes() == found.draw(tmp_path / "again.png").read_bytes()


def test_the_options_of_a_search_reach_it(metabridge: Command, glyphs: LabelledImages, tmp_path: Path) -> None:
    wanted = {"kernel": "random", "cells": 4, "channels": 6, "tasks": 2, "ways": 7, "shots": 3, "queries": 8}
    wanted |= {"repeats": 9, "time": "0.5", "ridge": 0.25, "inputs": 30, "seed": 11}
    options = [word for name, value in wanted.items() for word in (f"--{name}", value)]
    assert metabridge("search", *options, "--operators", "skip", "--out", tmp_path)[0] == 0
    settings = json.loads((tmp_path / "search.jsonl").read_text().splitlines()[0])["settings"]
    assert {name: settings[name] for name in wanted} == wanted
    assert settings["operators"] == ["skip"]


def test_a_search_shows_how_far_it_is(metabridge: Command, glyphs: LabelledImages, tmp_path: Path) -> None:
    few_options = ("--kernel", "none", "--cells", 3, "--repeats", 1, "--inputs", 20, "--operators", "skip")
    status, printed, shown = metabridge("search", *few_options, "--out", tmp_path)
    assert status == 0
    assert "19/19" in printed + shown


def test_what_a_search_could_not_tell_and_what_to_do_next_are_said(
    metabridge: Command, glyphs: LabelledImages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Found(small_search("random").run(glyphs).architecture, seconds=1.0, measured=9, troubled=2)
    monkeypatch.setattr(Search, "run", lambda *_, **__: found)
    monkeypatch.setattr("metabridge.datasets.load", lambda *_, **__: glyphs)
    out = tmp_path / "a search"
    out.mkdir()
    options = ("--cells", 4, "--channels", 6, "--size", 32, "--min-images", 3)
    _, printed, _ = metabridge("search", "--data", "my photos", *options, "--out", out)
    assert "2 of 9 networks had a proxy that could not be told" in printed
    words = shlex.split(printed.partition("Next: metabridge train ")[2])
    assert words == [
        *("--model", str(out / "architecture.json"), "--data", "my photos"),
        *("--model-option", "cells=4", "--model-option", "channels=6", "--size", "32", "--min-images", "3"),
    ]


@pytest.mark.parametrize("model", ["conv4", "architecture.json"])
def test_score_tells_all_proxies(metabridge: Command, glyphs: LabelledImages, tmp_path: Path, model: str) -> None:
    if model != "conv4":
        model = str(small_search("random").run(glyphs).architecture.save(tmp_path / model))
    search = {"tasks": 2, "ways": 2, "repeats": 2, "inputs": 20, "cells": 3, "channels": 4, "seed": 5}
    options = [word for name, value in search.items() for word in (f"--{name}", value)]
    status, _, _ = metabridge("score", "--model", model, *options, "--json", tmp_path / "scores.json")
    assert status == 0
    report = {row["proxy"]: row for row in json.loads((tmp_path / "scores.json").read_text())}
    names = {f"condition number, {name.upper()}": name for name in ("maml", "anil", "ntk")} | {"linear regions": "none"}
    assert list(report) == list(names)
    for told, kernel in names.items():
        wanted = score_model(Search(kernel, **search), model, glyphs).each
        assert report[told]["values"] == pytest.approx([score.value for score in wanted], rel=1e-6)
        assert report[told]["troubles"] == [score.trouble for score in wanted]
        assert all(math.isfinite(score.value) for score in wanted)


def test_the_scores_alone_go_to_stdout_if_asked_for(metabridge: Command, glyphs: LabelledImages) -> None:
    few_options = ("--tasks", 1, "--ways", 2, "--repeats", 1, "--inputs", 20)
    status, printed, _ = metabridge("score", "--model", "conv4", *few_options, "--json", "-")
    assert status == 0
    assert [row["proxy"] for row in json.loads(printed)][-1] == "linear regions"


def test_score_names_what_it_does_not_know(metabridge: Command) -> None:
    status, _, complaint = metabridge("score", "--model", "nowhere.json")
    assert status == 2
    assert "nowhere.json" in complaint
