from __future__ import annotations

import itertools
import statistics
from dataclasses import replace

import pytest
import torch

from metabridge.experiments import ExperimentOptions, nas_fig2
from metabridge.experiments.nas_searches import METANTK, SearchRecord
from metabridge.nas import OPERATORS, random_architecture
from small_searches import MACHINE

ARCHITECTURE = random_architecture(torch.Generator().manual_seed(0))


def test_random_cells_overlap_as_expected():
    generator = torch.Generator().manual_seed(0)
    architectures = [random_architecture(generator) for _ in range(60)]
    percentages = zip(*(nas_fig2.overlap(*pair) for pair in itertools.combinations(architectures, 2)))
    means = [statistics.mean(values) for values in percentages]
    assert means == pytest.approx(nas_fig2.expected_overlap(len(OPERATORS)), abs=1)


def test_equal_cells_overlap_completely():
    assert nas_fig2.overlap(ARCHITECTURE, ARCHITECTURE) == (100, 100)


def test_rows_contain_the_overlap_of_edges_and_of_operators():
    # Two of the 12 operators differ. The edges are the same, because a first node has only two possible inputs.
    other = replace(ARCHITECTURE, normal=(((0, "skip"), (1, "skip")), *ARCHITECTURE.normal[1:]))
    options = ExperimentOptions("quick")
    records = {
        f"search-{label}": SearchRecord("", {}, MACHINE, 90.0, architecture, parameters=1, evaluated=5, failed=0)
        for label, architecture in zip(METANTK.seeds(options), (ARCHITECTURE, other))
    }
    rows = {row.name: row for row in nas_fig2.rows(records, options)}
    assert rows["5 cells, MAML kernel, edges in common"].ours == pytest.approx(100)
    assert rows["5 cells, MAML kernel, operators in common"].ours == pytest.approx(100 * 10 / 12)
    assert "2.0 of 12 differ" in rows["5 cells, MAML kernel, operators in common"].note
