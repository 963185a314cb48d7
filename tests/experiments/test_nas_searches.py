from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from metabridge import InputError
from metabridge.experiments import ExperimentOptions, load_experiment, nas_searches
from metabridge.experiments.nas_searches import DEEP, METANTK, RANDOM, REGIONS, SearchRecord
from metabridge.nas.architecture_search import ProxyEvaluator, SearchConfig
from small_searches import SEARCH, shrink_experiments, small_settings


def test_an_interrupted_search_resumes_and_finds_the_same_cells(glyphs, monkeypatch, tmp_path):
    shrink_experiments(monkeypatch, glyphs)
    search = replace(SEARCH, operators=("skip", "conv_3x3"))
    monkeypatch.setitem(nas_searches.SETTINGS, "quick", replace(small_settings(), search=search))
    evaluated = []
    original = ProxyEvaluator.__call__

    def record_candidates(self, round_index, repeat, active, removals):
        for candidate in original(self, round_index, repeat, active, removals):
            evaluated.append((round_index, candidate[0]))  # the round and the removed operator
            yield candidate

    monkeypatch.setattr(ProxyEvaluator, "__call__", record_candidates)
    options = ExperimentOptions("quick", out=tmp_path / "uninterrupted", progress=False, only=("search-regions-5-0",))
    uninterrupted = load_experiment("nas-fig2").run(options)
    expected = evaluated.copy()
    evaluated.clear()
    interrupted = replace(options, out=tmp_path / "interrupted")
    for _ in range(3):
        with pytest.raises(InputError, match="no part of nas-fig2 is finished"):
            load_experiment("nas-fig2").run(replace(interrupted, minutes=0))
    assert len(evaluated) == 3  # without time left, each call evaluates one candidate
    resumed = load_experiment("nas-fig2").run(interrupted)
    first, second = (outcome.data["search-regions-5-0"] for outcome in (uninterrupted, resumed))
    assert first.architecture == second.architecture
    assert first.evaluated == second.evaluated == len(expected)
    assert sorted(evaluated, key=str) == sorted(expected, key=str)
    assert second.minutes > 0


@pytest.mark.parametrize(
    ("data", "problem"),
    [(None, "no --data is passed"), (Path("nowhere"), "--data nowhere does not contain it")],
)
def test_the_paper_scale_without_mini_imagenet_raises_an_error(tmp_path, data, problem):
    with pytest.raises(InputError, match=rf"the paper scale needs mini-imagenet, but {problem}. Pass the folder"):
        load_experiment("nas-fig2").run(ExperimentOptions("paper", out=tmp_path, data=data, progress=False))


def test_variants_have_the_settings_of_the_paper():
    assert (DEEP.adaptation_time, DEEP.ridge) == (1.0, 1e-5)
    assert (METANTK.adaptation_time, METANTK.ridge) == (SearchConfig().adaptation_time, SearchConfig().ridge)
    assert [len(variant.seeds(ExperimentOptions("paper"))) for variant in (METANTK, REGIONS, RANDOM)] == [3, 3, 3]


def test_saved_records_equal_loaded_ones_and_have_the_stored_keys(glyphs, monkeypatch, tmp_path):
    shrink_experiments(monkeypatch, glyphs)
    options = ExperimentOptions("quick", out=tmp_path, progress=False)
    record = nas_searches.search_or_load(options, RANDOM, "random-5-0", 0)
    assert SearchRecord.load(options, record.name, record.plan) == record
    # In the file, the numbers of evaluated and of failed networks have these keys of version 0.1.0: the last two.
    keys = ["name", "plan", "environment", "minutes", "architecture", "parameters", "measured", "troubled"]
    assert list(record.to_json()) == keys
