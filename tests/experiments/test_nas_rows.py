from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from metabridge.experiments import ExperimentOptions, nas_table1, nas_table2
from metabridge.experiments.nas_rows import accuracy_rows, cost_rows, gain_rows
from metabridge.experiments.nas_searches import DEEP, METANTK, NTK, RANDOM, REGIONS, SearchRecord, SearchVariant
from metabridge.experiments.records import Record
from metabridge.experiments.training_records import TrainingRecord
from metabridge.nas import random_architecture
from small_searches import MACHINE, make_record

OPTIONS = ExperimentOptions("quick")
ARCHITECTURE = random_architecture(torch.Generator().manual_seed(0))
SEARCH = SearchRecord(
    "", {}, MACHINE, minutes=90.0, architecture=ARCHITECTURE, parameters=2_000_000, evaluated=5, failed=0
)


def training_records(variants: Iterable[SearchVariant], accuracy: float) -> dict[str, TrainingRecord]:
    """Return a record with this accuracy for each training run of the variants."""
    return {f"train-{label}": make_record(accuracy) for variant in variants for label in variant.seeds(OPTIONS)}


@pytest.fixture
def records() -> dict[str, Record]:
    """Records of equal searches, and of training runs with 70 % accuracy for the MetaNTK and 60 % for all others."""
    of_metantk = {
        **training_records((METANTK, DEEP), 0.7),
        **{f"train-maml-5-0-{recipe}": make_record(0.7) for recipe in ("longer", "muon")},
    }
    of_others = {**training_records((NTK, REGIONS, RANDOM), 0.6), "train-resnet12-0": make_record(0.6)}
    searches = {f"search-{label}": SEARCH for variant in (METANTK, DEEP) for label in variant.seeds(OPTIONS)}
    return {**searches, **of_metantk, **of_others}


@pytest.mark.parametrize(("published", "agrees"), [(73.0, True), (73.6, False)])
def test_an_accuracy_agrees_if_its_interval_reaches_the_published_mean_minus_the_deviation(published, agrees):
    # Ours is 71 ± 1, and the published standard deviation is 1.5.
    records = [make_record(value) for value in (0.70, 0.72, 0.71)]
    accuracies = dict.fromkeys((1, 5), (published, 1.5))
    rows = {row.name: row for row in accuracy_rows("x", records, accuracies, comparable=True)}
    assert rows["x, 5-shot"].ours == pytest.approx(71)
    assert rows["x, 5-shot"].ci95 == pytest.approx(1)
    assert rows["x, 5-shot"].agrees is agrees
    assert rows["x, 5-shot, spread"].ours == pytest.approx(1)
    assert rows["x, 5-shot, spread"].published == 1.5


def test_gains_agree_if_they_are_positive_and_are_undecided_within_their_interval():
    records = [make_record(0.7), make_record(0.8)], [make_record(0.72)]
    published = {1: (2.0, 0.1), 5: (3.0, 0.1)}, {1: (1.5, 0.1), 5: (1.0, 0.1)}
    gains = gain_rows("x", records, published, comparable=True)
    losses = gain_rows("x", records[::-1], published[::-1], comparable=True)
    assert [row.ours for row in gains] == pytest.approx([3, 3])
    assert [row.published for row in gains] == pytest.approx([0.5, 2])
    assert [(gain.agrees, loss.agrees) for gain, loss in zip(gains, losses)] == [(True, False)] * 2
    within_interval = gain_rows("x", ([make_record(0.7)], [make_record(0.71)]), published, comparable=True)
    assert [row.agrees for row in within_interval] == [None, None]
    assert gain_rows("x", ([], records[1]), published, comparable=True) == []


def test_the_interval_of_a_gain_combines_the_intervals_of_both_accuracies():
    published = dict.fromkeys((1, 5), (1.0, 0.1))
    rows = gain_rows("x", ([make_record(0.7)], [make_record(0.6)]), (published, published), comparable=True)
    assert [row.ci95 for row in rows] == pytest.approx([2**0.5] * 2)  # both half-widths are 1 %


def test_costs_are_in_millions_hours_and_minutes():
    rows = cost_rows("x", [SEARCH], [replace(make_record(0.5), minutes=6.0)])
    assert [(row.metric, row.ours) for row in rows] == [("million", 2.0), ("hours", 1.5), ("minutes", 6.0)]


@pytest.mark.parametrize(("table", "num_comparisons"), [(nas_table1, 2), (nas_table2, 3)])
def test_tables_contain_the_gains_of_the_metantk_over_all_others(records, table, num_comparisons):
    gains = [row.ours for row in table.rows(records, OPTIONS) if "accuracy gain" in row.name]
    assert gains == pytest.approx([10.0] * 2 * num_comparisons)  # with 1 and with 5 shots


def test_costs_are_compared_with_the_published_ones(records):
    published = {row.name: row.published for row in nas_table1.rows(records, OPTIONS)}
    for name, parameters in nas_table1.PARAMETERS.items():
        assert published[f"{name}, parameters"] == parameters
    for name, hours in nas_table1.SEARCH_HOURS.items():
        assert published[f"{name}, search"] == hours
