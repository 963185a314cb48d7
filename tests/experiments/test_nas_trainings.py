from __future__ import annotations

import itertools
import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from metabridge import InputError
from metabridge.experiments import (
    ExperimentOptions,
    load_experiment,
    nas_fig2,
    nas_ranks,
    nas_table1,
    nas_table2,
    nas_trainings,
)
from metabridge.experiments.nas_ranks import Judged, correlation
from metabridge.experiments.nas_trainings import METANTK, RANDOM, REGIONS
from metabridge.experiments.result import Result
from metabridge.nas import OPERATORS, random_architecture
from metabridge.nas.architecture_search import ProxyEvaluator, SearchConfig
from small_searches import SEARCH, make_record, shrink_experiments, small_images, small_scale

NAMES = ("nas-table1", "nas-table2", "nas-fig2")


@pytest.fixture
def small(monkeypatch, glyphs) -> None:
    shrink_experiments(monkeypatch, glyphs)


@pytest.fixture(scope="module")
def out(glyphs, tmp_path_factory) -> Path:
    """A folder with the records of every search and training, done once."""
    folder = tmp_path_factory.mktemp("nas")
    with pytest.MonkeyPatch.context() as patch:
        shrink_experiments(patch, glyphs)
        for name in NAMES:
            load_experiment(name).run(ExperimentOptions("quick", out=folder, progress=False))
    return folder


def rows(name: str, out: Path, **options):
    outcome = load_experiment(name).run(ExperimentOptions("quick", out=out, progress=False, **options))
    return {row.name: row for row in outcome.result.rows}


@pytest.mark.parametrize("name", NAMES)
def test_records_are_read_and_nothing_is_searched_or_trained_again(small, out, monkeypatch, tmp_path, name):
    monkeypatch.setattr(nas_trainings, "images", lambda *_: pytest.fail("loaded images"))
    first, again = (load_experiment(name).run(ExperimentOptions("quick", out=out, progress=False)) for _ in range(2))
    assert first.result == again.result
    assert Result.read(first.result.write(tmp_path)).rows == first.result.rows
    load_experiment(name).draw(first, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "published"), [("nas-table1", nas_table1.PUBLISHED), ("nas-table2", nas_table2.PUBLISHED)]
)
def test_a_table_has_every_published_accuracy_and_claims_nothing_at_the_quick_scale(small, out, name, published):
    found = rows(name, out)
    for case, own in published.items():
        for shots, (value, _) in own.items():
            assert found[f"{case}, {shots}-shot"].published == value
            assert 0 <= found[f"{case}, {shots}-shot"].ours <= 100
    assert {row.agrees for row in found.values()} == {None}


def test_both_tables_share_the_searches_that_are_the_same(small, out):
    names = [file.name for file in (out / "records").iterdir()]
    # five cases with two seeds, each searched and trained; ResNet-12, and one training that is longer
    assert len(names) == 5 * 2 * 2 + 2
    assert "nas-search-maml-5-0-quick.json" in names
    assert "nas-train-resnet12-0-quick.json" in names


def test_what_is_trained_is_what_was_found(small, out):
    outcome = load_experiment("nas-table2").run(ExperimentOptions("quick", out=out, progress=False))
    for label, trained in outcome.trainings.items():
        finding = outcome.findings[label]
        assert trained.parameters == finding.parameters
        assert (
            nas_trainings.Architecture.from_dict(trained.plan["model_options"]["architecture"]) == finding.architecture
        )
    for seed in (0, 1):
        drawn = random_architecture(torch.Generator().manual_seed(seed), SEARCH.operators)
        assert outcome.findings[f"random-5-{seed}"].architecture == drawn


def test_the_longer_training_is_of_the_first_search_by_the_same_plan_but_its_length(small, out):
    trained = load_experiment("nas-table1").run(ExperimentOptions("quick", out=out, progress=False)).trainings
    usual, longer = trained["maml-5-0"], trained["maml-5-0-longer"]
    assert longer.plan == {**usual.plan, "iterations": 10, "validate_every": 1}
    assert (usual.iterations, longer.iterations) == (1, 10)
    assert usual.plan["model_options"]["drop_rate"] == nas_trainings.SCALES["quick"].drop_rate
    assert "maml-5-1-longer" not in trained


def test_only_the_named_part_is_done_and_one_that_was_stopped_goes_on(small, tmp_path):
    found = rows("nas-table2", tmp_path, only=("search-regions-5-1",))
    assert {name.partition(", ")[0] for name in found} == {"regions alone"}
    assert [file.name for file in (tmp_path / "records").iterdir()] == ["nas-search-regions-5-1-quick.json"]
    rows("nas-table2", tmp_path, only=("train-regions-5-1",), minutes=0)
    assert not (tmp_path / "records" / "nas-train-regions-5-1-quick.json").exists()
    rows("nas-table2", tmp_path, only=("train-regions-5-1",))
    assert (tmp_path / "records" / "nas-train-regions-5-1-quick.json").exists()


def test_a_training_without_its_search_is_refused(small, tmp_path):
    with pytest.raises(InputError, match=r"train-maml-5-0 needs a search that is finished. Add search-maml-5-0 to"):
        rows("nas-table1", tmp_path, only=("train-maml-5-0",))
    with pytest.raises(
        InputError, match=r"train-maml-5-0-longer needs a search that is finished. Add search-maml-5-0 to"
    ):
        rows("nas-table1", tmp_path, only=("train-maml-5-0-longer",))
    with pytest.raises(InputError, match="only names train-ntk-5-0, but the trainings are search-maml-5-0,"):
        rows("nas-table1", tmp_path, only=("train-ntk-5-0",))


def test_a_search_that_was_stopped_goes_on_to_the_same_cells(small, monkeypatch, tmp_path):
    search = replace(SEARCH, operators=("skip", "conv_3x3"))
    monkeypatch.setitem(nas_trainings.SCALES, "quick", replace(small_scale(), search=search))
    measured = []
    original = ProxyEvaluator.__call__

    def counted(self, number, repeat, active, removals):
        for found in original(self, number, repeat, active, removals):
            measured.append((number, found[0]))
            yield found

    monkeypatch.setattr(ProxyEvaluator, "__call__", counted)
    parts = {"only": ("search-regions-5-0",)}
    whole = load_experiment("nas-fig2").run(ExperimentOptions("quick", out=tmp_path / "whole", progress=False, **parts))
    wanted, measured[:] = list(measured), []
    for _ in range(3):
        with pytest.raises(InputError, match="no training of nas-fig2 is finished"):
            rows("nas-fig2", tmp_path / "stopped", minutes=0, **parts)
    assert len(measured) == 3
    stopped = load_experiment("nas-fig2").run(
        ExperimentOptions("quick", out=tmp_path / "stopped", progress=False, **parts)
    )
    first, second = (outcome.findings["regions-5-0"] for outcome in (whole, stopped))
    assert first.architecture == second.architecture
    assert first.measured == second.measured == len(wanted)
    assert sorted(measured, key=str) == sorted(wanted, key=str)
    assert second.minutes > 0


@pytest.mark.parametrize("data", [None, Path("nowhere")])
def test_the_paper_scale_without_its_data_is_refused_with_a_sentence(tmp_path, data):
    with pytest.raises(InputError, match=rf"--data names \(now {data}\)\. Use --scale quick"):
        load_experiment("nas-fig2").run(ExperimentOptions("paper", out=tmp_path, data=data, progress=False))


def test_random_cells_have_in_common_what_chance_says():
    generator = torch.Generator().manual_seed(0)
    drawn = [random_architecture(generator) for _ in range(60)]
    shares = zip(*(nas_fig2.in_common(*pair) for pair in itertools.combinations(drawn, 2)))
    assert [statistics.mean(share) for share in shares] == pytest.approx(nas_fig2.by_chance(len(OPERATORS)), abs=1)


def test_cells_have_everything_in_common_with_themselves():
    architecture = random_architecture(torch.Generator().manual_seed(0))
    assert nas_fig2.in_common(architecture, architecture) == (100, 100)


@pytest.mark.parametrize(("published", "agrees"), [(73.0, True), (73.6, False)])
def test_an_accuracy_agrees_within_its_interval_and_the_published_spread(published, agrees):
    records = [make_record(value) for value in (0.70, 0.72, 0.71)]
    found = {
        row.name: row
        for row in nas_trainings.accuracy_rows("x", records, dict.fromkeys((1, 5), (published, 1.5)), judged=True)
    }
    assert found["x, 5-shot"].ours == pytest.approx(71)
    assert found["x, 5-shot"].ci95 == pytest.approx(1)
    assert found["x, 5-shot"].agrees is agrees
    assert found["x, 5-shot, spread"].ours == pytest.approx(1)
    assert found["x, 5-shot, spread"].published == 1.5


def test_a_gain_agrees_where_the_first_is_above_the_second_beyond_doubt():
    sides = [make_record(0.7), make_record(0.8)], [make_record(0.72)]
    published = {1: (2.0, 0.1), 5: (3.0, 0.1)}, {1: (1.5, 0.1), 5: (1.0, 0.1)}
    forth = nas_trainings.gain_rows("x", sides, published, judged=True)
    back = nas_trainings.gain_rows("x", sides[::-1], published[::-1], judged=True)
    assert [row.ours for row in forth] == pytest.approx([3, 3])
    assert [row.published for row in forth] == pytest.approx([0.5, 2])
    assert [(row.agrees, other.agrees) for row, other in zip(forth, back)] == [(True, False)] * 2
    close = nas_trainings.gain_rows(
        "x", ([make_record(0.7)], [make_record(0.71)]), published, judged=True
    )  # each to 1 %
    assert [row.agrees for row in close] == [None, None]
    assert nas_trainings.gain_rows("x", ([], sides[1]), published, judged=True) == []


def test_eight_cells_go_by_their_own_kernel():
    assert (nas_trainings.DEEP.time, nas_trainings.DEEP.ridge) == (1.0, 1e-5)
    assert (METANTK.time, METANTK.ridge) == (SearchConfig().adaptation_time, SearchConfig().ridge)
    assert [len(case.labels(ExperimentOptions("paper"))) for case in (METANTK, REGIONS, RANDOM)] == [3, 3, 3]


@pytest.fixture
def ranking(monkeypatch, glyphs) -> None:
    plan = replace(nas_ranks.SCALES["quick"].plan, iterations=2, validate_every=2, validate_tasks=2, batch_size=8)
    scale = nas_ranks.Scale(4, replace(SEARCH, cells=3), plan, test_tasks=4, resamples=20)
    monkeypatch.setitem(nas_ranks.SCALES, "quick", scale)
    monkeypatch.setattr(nas_ranks, "load", lambda name: small_images(glyphs))


def test_every_proxy_is_correlated_and_what_was_judged_is_kept(ranking, monkeypatch, tmp_path):
    work = ExperimentOptions("quick", out=tmp_path, progress=False)
    with pytest.raises(InputError, match="nas-ranks has judged 0 architectures, but correlates no fewer than 3"):
        nas_ranks.run(replace(work, minutes=0))
    whole = nas_ranks.run(work)
    assert {row.name for row in whole.result.rows[:-2]} == {
        f"{proxy}, {kind}" for proxy in nas_ranks.PROXIES for kind in ("Spearman", "Kendall")
    }
    assert all(set(one.proxies) == set(nas_ranks.PROXIES) for one in whole.judged)
    assert len({one.architecture for one in whole.judged}) == 4
    nas_ranks.figure(whole, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr("metabridge.experiments.nas_ranks.image_trainer", lambda *_, **__: pytest.fail("trained"))
    assert nas_ranks.run(work).result == whole.result
    shorter = replace(nas_ranks.SCALES["quick"], architectures=3)
    monkeypatch.setitem(nas_ranks.SCALES, "quick", shorter)
    assert nas_ranks.run(work).judged == whole.judged[:3]


def test_ranking_goes_on_with_the_architecture_that_is_missing_though_later_ones_are_there(ranking, tmp_path):
    work = ExperimentOptions("quick", out=tmp_path, progress=False)
    judged = nas_ranks.run(work).judged
    (file,) = (tmp_path / "records").iterdir()
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, "judged": record["judged"][1:]}))
    assert {one.architecture for one in nas_ranks.run(work).judged} == {one.architecture for one in judged}


def test_a_proxy_that_cannot_be_told_promises_least():
    architecture = random_architecture(torch.Generator().manual_seed(0))

    def promise(proxy: str, value: float | None) -> float:
        return Judged(architecture, {proxy: value}, 0.5, 0.1, 1.0).promise(proxy)

    assert promise("NTK", None) < promise("NTK", 1e9) < promise("NTK", 2.0)
    assert promise("parameters", None) < promise("parameters", 2.0) < promise("parameters", 1e9)


@pytest.mark.parametrize("kind", nas_ranks.STATISTICS)
def test_a_rank_correlation_knows_order_alone(kind):
    x = [float(value) for value in range(20)]
    rising = correlation(kind, x, [value**3 for value in x], resamples=50, seed=0)
    assert (rising.value, rising.low, rising.high) == pytest.approx((1, 1, 1))
    falling = correlation(kind, x, [float("-inf") if value == 19 else -value for value in x], resamples=50, seed=0)
    assert falling.value == pytest.approx(-1)
    unrelated = torch.rand(20, generator=torch.Generator().manual_seed(0)).tolist()
    found = correlation(kind, x, unrelated, resamples=200, seed=0)
    assert found.low < 0 < found.high
    assert correlation(kind, x, [1.0] * 20, resamples=5, seed=0).value == 0
