from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from metabridge.environments import LabelledImages
from metabridge.experiments import (
    ExperimentOptions,
    load_experiment,
    mini_imagenet_trainings,
    nas_fig2,
    nas_ranks,
    nas_table1,
    nas_table2,
    nas_trainings,
    training_records,
)
from metabridge.experiments.landscape_trainings import NetTraining, PlannedTraining, train_all
from metabridge.experiments.nas_ranks import Judged, correlation, judge
from metabridge.experiments.nas_trainings import DEEP, METANTK, Finding
from metabridge.nas import random_architecture, score_model
from metabridge.training import evaluate, load
from metabridge.training.checkpoint import RunFolder
from metabridge.training.config import ImageTrainingConfig
from metabridge.training.evaluation import Score
from small_searches import MACHINE, SEARCH, make_record, shrink_experiments, small_images

BRIEF = ImageTrainingConfig("mtl", batch_size=1, iterations=1, validate_every=1, validate_tasks=2)
DRAWN = random_architecture(torch.Generator().manual_seed(0))
FOUND = Finding("", {}, MACHINE, 90.0, DRAWN, 2_000_000, 5, 0)


@pytest.fixture
def sizes(monkeypatch, glyphs) -> list[int]:
    """The sizes of images that small searches and trainings ask for."""
    shrink_experiments(monkeypatch, glyphs)
    small, asked = nas_trainings.images, []

    def noted(work: ExperimentOptions, size: int) -> LabelledImages:
        asked.append(size)
        return small(work, size)

    monkeypatch.setattr(nas_trainings, "images", noted)
    return asked


@pytest.mark.parametrize("case", [METANTK, DEEP])
def test_a_case_is_searched_by_its_kernel_and_trained_by_its_seed_at_their_sizes(sizes, tmp_path, case):
    label = f"{case.guide}-{case.cells}-1"
    work = ExperimentOptions("quick", out=tmp_path, progress=False, only=(f"search-{label}", f"train-{label}"))
    outcome = load_experiment("nas-table1").run(work)
    searched, training = outcome.findings[label].plan, outcome.trainings[label].plan
    told = [searched[key] for key in ("kernel", "cells", "time", "ridge", "seed")]
    assert told == [case.guide, case.cells, str(case.time), case.ridge, 1]
    assert training["lr"] == nas_trainings.SCALES["quick"].lr != nas_trainings.SCALES["quick"].plan.lr
    assert (training["seed"], training["model_options"]["cells"]) == (1, case.cells)
    assert sizes == [32, 84]
    (folder,) = (tmp_path / "runs").glob(f"nas-train-{label}*")
    assert outcome.trainings[label].minutes == pytest.approx(load(folder).seconds / 60)


def test_costs_are_in_millions_hours_and_minutes():
    rows = nas_trainings.cost_rows("x", [FOUND], [replace(make_record(0.5), minutes=6.0)])
    assert [(row.metric, row.ours) for row in rows] == [("million", 2.0), ("hours", 1.5), ("minutes", 6.0)]


def test_a_gain_has_the_margin_of_both_sides():
    published = dict.fromkeys((1, 5), (1.0, 0.1))
    for row in nas_trainings.gain_rows(
        "x", ([make_record(0.7)], [make_record(0.6)]), (published, published), judged=True
    ):
        assert row.ci95 == pytest.approx(2**0.5)  # of 1 % each


@pytest.fixture
def studied(monkeypatch) -> ExperimentOptions:
    """Work whose searches all found the same, and whose trainings gave 70 % in our cases and 60 % in all others."""
    work = ExperimentOptions("quick")
    ours = {label: make_record(0.7) for case in (METANTK, DEEP) for label in case.labels(work)}
    ours[nas_trainings.longer("maml-5-0")] = make_record(0.7)
    others = {
        label: make_record(0.6)
        for case in (nas_trainings.NTK, nas_trainings.REGIONS, nas_trainings.RANDOM)
        for label in case.labels(work)
    }
    others[nas_trainings.resnet12(work)] = make_record(0.6)
    monkeypatch.setattr(nas_trainings, "studied", lambda *_, **__: (dict.fromkeys(ours, FOUND), {**ours, **others}))
    return work


@pytest.mark.parametrize(("table", "rivals"), [(nas_table1, 2), (nas_table2, 3)])
def test_gains_are_ours_over_the_others(studied, table, rivals):
    gains = [row.ours for row in table.run(studied).result.rows if ", over " in row.name]
    assert gains == pytest.approx([10.0] * 2 * rivals)


def test_costs_stand_beside_the_published_ones(studied):
    published = {row.name: row.published for row in nas_table1.run(studied).result.rows}
    for name, parameters in nas_table1.PARAMETERS.items():
        assert published[f"{name}, parameters"] == parameters
    for name, hours in nas_table1.HOURS.items():
        assert published[f"{name}, search"] == hours


def test_what_two_searches_have_in_common_is_told_for_edges_and_for_operators(monkeypatch):
    other = replace(DRAWN, normal=(((0, "skip"), (1, "skip")), *DRAWN.normal[1:]))
    found = dict(zip(METANTK.labels(ExperimentOptions("quick")), (FOUND, replace(FOUND, architecture=other))))
    monkeypatch.setattr(nas_trainings, "findings", lambda *_: found)
    rows = {row.name: row for row in nas_fig2.run(ExperimentOptions("quick")).result.rows}
    assert rows["5 cells, MAML kernel, edges in common"].ours == pytest.approx(100)
    assert rows["5 cells, MAML kernel, operators in common"].ours == pytest.approx(100 * 10 / 12)
    assert "2.0 of 12 differ" in rows["5 cells, MAML kernel, operators in common"].note


def test_an_architecture_is_scored_in_every_repeat_and_judged_on_test_tasks(glyphs, tmp_path):
    images, search = small_images(glyphs), replace(SEARCH, cells=3, tasks=2, repeats=2)
    run = BRIEF.train(images, progress=False)
    judged = judge(ExperimentOptions("quick"), DRAWN, search, images, run, tasks=20)
    file = str(DRAWN.save(tmp_path / "architecture.json"))
    for proxy, kernel in {**nas_ranks.CONDITIONS, "linear regions": "none"}.items():
        wanted = score_model(file, images, replace(search, kernel=kernel)).mean.value
        assert judged.proxies[proxy] == pytest.approx(wanted, rel=1e-5)
    validation, test = (evaluate(run, images.tasks(split), tasks=20, seed=0) for split in ("validation", "test"))
    assert judged.accuracy == test.mean != validation.mean


def test_an_interval_of_a_correlation_holds_95_percent():
    y = torch.rand(20, generator=torch.Generator().manual_seed(0)).tolist()
    found = correlation("Spearman", [float(place) for place in range(20)], y, resamples=500, seed=0)
    assert 0.7 < found.high - found.low < 1.2  # about 2 · 1.96/√19 where nothing is related


def test_a_row_has_half_the_interval_of_its_correlation(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    drawn = [random_architecture(generator) for _ in range(nas_ranks.SCALES["quick"].architectures)]
    judged = tuple(
        Judged(one, dict.fromkeys(nas_ranks.PROXIES, float(place)), accuracy, 0.1, 1.0)
        for place, (one, accuracy) in enumerate(zip(drawn, (0.5, 0.4, 0.7, 0.6)))
    )
    monkeypatch.setattr(nas_ranks, "stored", lambda *_: nas_ranks.Record("", {}, MACHINE, judged))
    outcome = nas_ranks.run(ExperimentOptions("quick", progress=False))
    rows = {row.name: row for row in outcome.result.rows}
    for proxy, found in outcome.spearman.items():
        assert found.low < found.value < found.high
        assert rows[f"{proxy}, Spearman"].ours == found.value
        assert rows[f"{proxy}, Spearman"].ci95 == pytest.approx((found.high - found.low) / 2)


class Telling:
    """In place of a table of features: scores that tell what they are asked for."""

    @classmethod
    def of(cls, *_, **__) -> Telling:
        return cls()

    def evaluate(self, models, environment, *, tasks, seed=0) -> list[Score]:
        told = 1000 * seed + 100 * (environment.split == "test") + 10 * environment.shots
        return [Score.of(torch.tensor([told + model.method.test.penalty] * tasks)) for model in models]


def test_every_score_is_of_its_split_shots_penalty_and_seed(glyphs, monkeypatch, tmp_path):
    monkeypatch.setattr(training_records, "FeatureTable", Telling)
    work = ExperimentOptions("quick", out=tmp_path, seed=7, progress=False)
    images, evaluation = small_images(glyphs), training_records.Evaluation((1, 5), 2, ())
    record = training_records.train_or_load(work, "", "brief", BRIEF, lambda: images, evaluation)
    assert {(one.split, one.shots, one.penalty): one.mean for one in record.scores} == {
        (split, shots, penalty): pytest.approx(7000 + 100 * (split == "test") + 10 * shots + penalty)
        for split in ("validation", "test")
        for shots in (1, 5)
        for penalty in training_records.PENALTIES
    }


def test_trainings_have_the_seed_of_the_options(monkeypatch, tmp_path):
    seeds = {}

    def note_seed(options: ExperimentOptions, training: str, name: str, plan: ImageTrainingConfig, *_) -> None:
        seeds[name] = plan.seed

    monkeypatch.setattr(mini_imagenet_trainings, "train_or_load", note_seed)
    mini_imagenet_trainings.train_or_load_all(ExperimentOptions("quick", out=tmp_path, seed=3), ("mtl", "maml-5"))
    assert seeds == {"glyphs-mtl-quick-3": 3, "glyphs-maml-5-quick-3": 3}


def test_a_planned_training_is_run_with_its_settings(glyphs, tmp_path):
    training = NetTraining("maml", 0.02, 2, batch_size=3, test_tasks=2, filters=4, steps=2, inner_lr=0.3, seed=5)
    planned = PlannedTraining("part", training, glyphs.tasks("train", queries=2), {}, {})
    train_all(ExperimentOptions("quick", out=tmp_path, progress=False), "table", glyphs, [planned])
    (folder,) = (tmp_path / "runs").iterdir()
    settings = RunFolder(folder).settings()
    assert [settings["training"][key] for key in ("iterations", "batch_size", "lr", "seed")] == [2, 3, 0.02, 5]
    assert (settings["method"]["inner"]["steps"], settings["method"]["inner"]["lr"]) == (2, 0.3)
    assert (settings["model"]["filters"], settings["model"]["seed"]) == (4, 5)
