from __future__ import annotations

import math

import pytest
import torch

from metabridge.experiments import ExperimentOptions, bridge_fig1
from metabridge.experiments.bridge_fig1 import ANALYTIC, REFERENCE, TO_THE_END, Scale, gap, tasks, twins
from metabridge.experiments.result import Result
from metabridge.kernels import EmpiricalKernel, anil_kernel, fully_connected_kernel, mtl_kernel
from metabridge.models import wide

SMALL = Scale(2, (2, 4), (16,), (0.0, 0.5), (10.0,), (0.01,), training_tasks=4, test_tasks=3)


@pytest.fixture(scope="module")
def outcome():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(bridge_fig1.SCALES, "quick", SMALL)
        return bridge_fig1.run(ExperimentOptions("quick"))


def rows(made):
    return {row.name: row for row in made}


def test_the_gap_is_that_of_the_difference_of_inverses():
    """At λτ = 0, F_ANIL − F_MTL = Φ'(Θ⁻¹ − Φ_MTL⁻¹)Y (A eq. 67)."""
    kernel = fully_connected_kernel(depth=3)
    train, test = tasks(0, 4, 3, "cpu")
    whole = train.without_split()
    theta, phi = anil_kernel(kernel, whole.support_x, 0.0), mtl_kernel(kernel, whole.support_x)
    weights = (torch.linalg.inv(theta) - torch.linalg.inv(phi)) @ whole.support_y.flatten(0, 1)
    gaps = []
    for query, support in zip(test.query_x, test.support_x):
        body, own = (
            torch.sub(*kernel.both(points, whole.support_x.flatten(0, 1))) @ weights for points in (query, support)
        )
        gaps.append((body - kernel.nngp(query, support) @ torch.linalg.solve(kernel.nngp(support), own)).norm())
    assert gap(*twins(kernel, train), test) == pytest.approx(float(torch.stack(gaps).mean()), rel=1e-8)


def test_labels_of_training_tasks_have_unit_variance_and_tasks_the_sizes_of_the_paper():
    train, test = tasks(0, 20, 20, "cpu")
    assert float(train.without_split().support_y.std()) == pytest.approx(1)
    assert train.without_split().support_x.shape == (20, 10, 10)
    assert (test.support_x.shape[:2], test.query_x.shape[:2]) == ((20, 5), (20, 10))


def test_the_inner_time_cancels_unless_there_is_a_ridge_or_training_stops_early(outcome):
    none, half = outcome.to_the_end.values()
    assert half == pytest.approx(none, rel=1e-6)
    for own in (outcome.ridges, outcome.stopped):
        for curve in own.values():
            assert all(abs(b / a - 1) > 0.05 for a, b in zip(*curve.values()))


def test_the_gap_of_a_wide_net_is_nearer_to_that_of_infinite_width():
    train, test = tasks(0, 4, 8, "cpu")
    limit = gap(*twins(fully_connected_kernel(depth=3), train), test)

    def apart(width):
        nets = [wide(10, width=width, depth=3, seed=seed).double() for seed in range(3)]
        return sum(abs(gap(*twins(EmpiricalKernel(net), train), test) / limit - 1) for net in nets)

    assert apart(512) < apart(32) / 2


def test_every_gap_has_a_row_with_the_reference_beside_it(outcome):
    found = rows(outcome.result.rows)
    for name, gaps in outcome.depths.items():
        for depth, values in gaps.items():
            row = found[f"{name}, L = {depth}"]
            assert row.ours == pytest.approx(sum(values) / len(values))
            assert row.published == (REFERENCE.get(depth) if name == ANALYTIC else None)


@pytest.mark.parametrize(("exponent", "agrees"), [(-1.0, True), (-0.5, False), (-1.5, False)])
def test_the_exponent_agrees_if_it_is_about_minus_one(exponent, agrees):
    gaps = {depth: [depth**exponent, 1.01 * depth**exponent] for depth in (3, 6, 12)}
    row = rows(bridge_fig1.depth_rows({"width 8": gaps}))["width 8, L from 3 to 12"]
    assert row.ours == pytest.approx(exponent)
    assert row.agrees is agrees


@pytest.mark.parametrize(("factor", "agrees"), [(1.1, True), (1.3, False), (0.7, False)])
def test_a_gap_agrees_if_it_is_near_the_reference(factor, agrees):
    gaps = {depth: [factor * value] * 2 for depth, value in REFERENCE.items()}
    found = rows(bridge_fig1.depth_rows({ANALYTIC: gaps}))
    assert {found[f"{ANALYTIC}, L = {depth}"].agrees for depth in REFERENCE} == {agrees}


@pytest.mark.parametrize(
    ("name", "last", "agrees"),
    [
        (TO_THE_END, [1.0, 2.0], True),
        (TO_THE_END, [1.1, 2.0], False),
        ("ridge", [1.5, 2.5], True),
        ("ridge", [1.1, 2.0], False),
    ],
)
def test_the_trend_agrees_if_it_is_flat_where_it_must_be_and_rises_all_the_way_elsewhere(name, last, agrees):
    (row,) = bridge_fig1.time_rows({name: {0.0: [1.0, 2.0], 0.1: [1.2, 2.2], 0.5: last}})
    assert row.agrees is agrees
    assert row.ours == pytest.approx(last[0] / 2 + last[1] / 4)


def test_the_paper_scale_is_that_of_the_paper():
    scale = bridge_fig1.SCALES["paper"]
    assert (scale.runs, scale.training_tasks, scale.test_tasks) == (5, 20, 20)
    assert 512 in scale.widths
    assert set(scale.depths) == set(REFERENCE)


def test_the_result_is_written_and_drawn(outcome, tmp_path):
    assert Result.read(outcome.result.write(tmp_path)).rows == outcome.result.rows
    assert not any(math.isnan(row.ours) for row in outcome.result.rows)
    bridge_fig1.figure(outcome, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
