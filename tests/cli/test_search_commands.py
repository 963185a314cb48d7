import json
import math
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from metabridge.environments import LabeledImages
from metabridge.nas import Architecture, SearchConfig, SearchResult, run_search, score_model
from small_searches import small_search

Command = Callable[..., tuple[int, str, str]]


def test_search_writes_architecture_log_and_picture(metabridge: Command, glyphs: LabeledImages, tmp_path: Path) -> None:
    options = ("--kernel", "random", "--seed", 3, "--operators", "skip, conv_3x3")
    status, printed, _ = metabridge("search", *options, "--out", tmp_path)
    assert status == 0
    architecture = Architecture.load(tmp_path / "architecture.json")
    assert str(architecture) in printed
    assert {file.name for file in tmp_path.iterdir()} == {"architecture.json", "search.jsonl", "cells.png"}
    assert (tmp_path / "cells.png").read_bytes() == architecture.draw(tmp_path / "again.png").read_bytes()


def test_options_are_passed_to_the_search(metabridge: Command, glyphs: LabeledImages, tmp_path: Path) -> None:
    values = {"kernel": "random", "cells": 4, "channels": 6, "tasks": 2, "ways": 7, "shots": 3, "queries": 8}
    values |= {"repeats": 9, "adaptation-time": 0.5, "ridge": 0.25, "region-inputs": 30, "seed": 11}
    options = [word for name, value in values.items() for word in (f"--{name}", value)]
    assert metabridge("search", *options, "--operators", "skip", "--out", tmp_path)[0] == 0
    settings = json.loads((tmp_path / "search.jsonl").read_text().splitlines()[0])["settings"]
    config = {name.replace("-", "_"): value for name, value in values.items()}
    expected = SearchConfig(**config, operators=("skip",)).to_dict()
    assert {name: settings[name] for name in expected} == {**expected, "operators": ["skip"]}


def test_a_search_shows_its_progress(metabridge: Command, glyphs: LabeledImages, tmp_path: Path) -> None:
    fast_search = ("--kernel", "none", "--cells", 3, "--repeats", 1, "--region-inputs", 20, "--operators", "skip")
    status, printed, errors = metabridge("search", *fast_search, "--out", tmp_path)
    assert status == 0
    assert "19/19" in printed + errors  # the whole network, and one without each of 18 operators


def test_a_search_prints_its_failures_and_the_next_command(
    metabridge: Command, glyphs: LabeledImages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture = run_search(glyphs, small_search("random")).architecture
    result = SearchResult(architecture, seconds=1.0, evaluated=9, failed=2)
    monkeypatch.setattr("metabridge.nas.search", lambda *_, **__: result)
    monkeypatch.setattr("metabridge.datasets.load", lambda *_, **__: glyphs)
    out = tmp_path / "a search"
    out.mkdir()
    options = ("--cells", 4, "--channels", 6, "--size", 32, "--min-images", 3)
    _, printed, _ = metabridge("search", "--data", "my photos", *options, "--out", out)
    assert "A proxy failed for 2 of 9 networks" in printed
    words = shlex.split(printed.partition("Next: metabridge train ")[2])
    assert words == [
        *("--model", str(out / "architecture.json"), "--data", "my photos"),
        *("--model-option", "cells=4", "--model-option", "channels=6", "--size", "32", "--min-images", "3"),
    ]


@pytest.mark.parametrize("model", ["conv4", "architecture.json"])
def test_score_writes_all_proxies(metabridge: Command, glyphs: LabeledImages, tmp_path: Path, model: str) -> None:
    if model != "conv4":
        model = str(run_search(glyphs, small_search("random")).architecture.save(tmp_path / model))
    config = {"tasks": 2, "ways": 2, "repeats": 2, "region_inputs": 20, "cells": 3, "channels": 4, "seed": 5}
    options = [word for name, value in config.items() for word in ("--" + name.replace("_", "-"), value)]
    status, _, _ = metabridge("score", "--model", model, *options, "--json", tmp_path / "scores.json")
    assert status == 0
    report = {row["proxy"]: row for row in json.loads((tmp_path / "scores.json").read_text())}
    names = {f"condition number, {name.upper()}": name for name in ("maml", "anil", "ntk")} | {"linear regions": "none"}
    assert list(report) == list(names)
    for proxy, kernel in names.items():
        scores = score_model(model, glyphs, SearchConfig(kernel, **config)).repeats
        assert report[proxy]["values"] == pytest.approx([score.value for score in scores], rel=1e-6)
        assert report[proxy]["failures"] == [score.failure for score in scores]
        assert all(math.isfinite(score.value) for score in scores)


def test_json_to_stdout_prints_nothing_else(metabridge: Command, glyphs: LabeledImages) -> None:
    small_proxies = ("--tasks", 1, "--ways", 2, "--repeats", 1, "--region-inputs", 20)
    status, printed, _ = metabridge("score", "--model", "conv4", *small_proxies, "--json", "-")
    assert status == 0
    assert [row["proxy"] for row in json.loads(printed)][-1] == "linear regions"


def test_score_names_an_unknown_model(metabridge: Command) -> None:
    status, _, message = metabridge("score", "--model", "nowhere.json")
    assert status == 2
    assert "nowhere.json" in message
