from __future__ import annotations

import math

import pytest
import torch

from metabridge.experiments import ExperimentOptions, bridge_fig1
from metabridge.experiments.bridge_fig1 import ANALYTIC, CONVERGED, EXPERIMENT, REFERENCE, Settings
from metabridge.experiments.bridge_gap import fit_anil_and_mtl, prediction_gap, regression_tasks
from metabridge.kernels import EmpiricalKernel, anil_kernel, fully_connected_kernel, mtl_kernel
from metabridge.models import wide
from metabridge.report.results import Result

SMALL = Settings(
    runs=2,
    depths=(2, 4),
    widths=(16,),
    inner_times=(0.0, 0.5),
    ridges=(10.0,),
    outer_times=(0.01,),
    training_tasks=4,
    test_tasks=3,
)


@pytest.fixture(scope="module")
def outcome():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(bridge_fig1.SETTINGS, "quick", SMALL)
        return EXPERIMENT.run(ExperimentOptions("quick"))


def by_name(rows):
    return {row.name: row for row in rows}


def test_the_gap_equals_its_closed_form():
    """At λτ = 0, F_ANIL − F_MTL = Φ'(Θ⁻¹ − Φ_MTL⁻¹)Y (Wang et al. 2021, eq. 67)."""
    kernel = fully_connected_kernel(depth=3)
    train, test = regression_tasks(0, 4, 3, "cpu")
    unsplit = train.without_split()
    theta, phi = anil_kernel(kernel, unsplit.support_x, 0.0), mtl_kernel(kernel, unsplit.support_x)
    weights = (torch.linalg.inv(theta) - torch.linalg.inv(phi)) @ unsplit.support_y.flatten(0, 1)
    gaps = []
    for query, support in zip(test.query_x, test.support_x):
        at_query, at_support = (
            torch.sub(*kernel.both(points, unsplit.support_x.flatten(0, 1))) @ weights for points in (query, support)
        )
        # Both heads fit the support set, which removes the part of the difference that follows from the support points.
        removed = kernel.nngp(query, support) @ torch.linalg.solve(kernel.nngp(support), at_support)
        gaps.append((at_query - removed).norm())
    assert prediction_gap(*fit_anil_and_mtl(kernel, train), test) == pytest.approx(
        float(torch.stack(gaps).mean()), rel=1e-8
    )


def test_training_labels_have_unit_variance_and_tasks_have_the_sizes_of_the_paper():
    train, test = regression_tasks(0, 20, 20, "cpu")
    assert float(train.without_split().support_y.std()) == pytest.approx(1)
    assert train.without_split().support_x.shape == (20, 10, 10)  # 20 tasks of 10 points in 10 dimensions
    assert (test.support_x.shape[:2], test.query_x.shape[:2]) == ((20, 5), (20, 10))


def test_the_inner_time_cancels_unless_there_is_a_ridge_or_training_stops_early(outcome):
    gaps_at_zero, gaps_at_half = outcome.data.converged.values()  # λτ = 0 and 0.5
    assert gaps_at_half == pytest.approx(gaps_at_zero, rel=1e-6)
    for curves in (outcome.data.with_ridge, outcome.data.early_stopped):
        for curve in curves.values():
            assert all(abs(b / a - 1) > 0.05 for a, b in zip(*curve.values()))


def test_the_gap_of_a_wider_net_is_nearer_to_the_gap_at_infinite_width():
    train, test = regression_tasks(0, 4, 8, "cpu")
    limit = prediction_gap(*fit_anil_and_mtl(fully_connected_kernel(depth=3), train), test)

    def distance(width):
        nets = [wide(10, width=width, depth=3, seed=seed).double() for seed in range(3)]
        return sum(
            abs(prediction_gap(*fit_anil_and_mtl(EmpiricalKernel(net), train), test) / limit - 1) for net in nets
        )

    assert distance(512) < distance(32) / 2


def test_every_gap_has_a_row_with_its_reference(outcome):
    rows = by_name(outcome.result.rows)
    for name, gaps in outcome.data.by_depth.items():
        for depth, values in gaps.items():
            row = rows[f"{name}, L = {depth}"]
            assert row.ours == pytest.approx(sum(values) / len(values))
            assert row.published == (REFERENCE.get(depth) if name == ANALYTIC else None)


@pytest.mark.parametrize(("exponent", "agrees"), [(-1.0, True), (-0.5, False), (-1.5, False)])
def test_the_exponent_agrees_if_it_is_close_to_minus_one(exponent, agrees):
    gaps = {depth: [depth**exponent, 1.01 * depth**exponent] for depth in (3, 6, 12)}
    row = by_name(bridge_fig1.depth_rows({"width 8": gaps}))["width 8, L from 3 to 12"]
    assert row.ours == pytest.approx(exponent)
    assert row.agrees is agrees


@pytest.mark.parametrize(("factor", "agrees"), [(1.1, True), (1.3, False), (0.7, False)])
def test_a_gap_agrees_if_it_is_close_to_the_reference(factor, agrees):
    gaps = {depth: [factor * value] * 2 for depth, value in REFERENCE.items()}
    rows = by_name(bridge_fig1.depth_rows({ANALYTIC: gaps}))
    assert {rows[f"{ANALYTIC}, L = {depth}"].agrees for depth in REFERENCE} == {agrees}


@pytest.mark.parametrize(
    ("name", "last_gaps", "agrees"),
    [
        (CONVERGED, [1.0, 2.0], True),
        (CONVERGED, [1.1, 2.0], False),
        ("ridge", [1.5, 2.5], True),
        ("ridge", [1.1, 2.0], False),
    ],
)
def test_gaps_agree_if_they_are_constant_where_the_inner_time_cancels_and_increase_everywhere_else(
    name, last_gaps, agrees
):
    (row,) = bridge_fig1.time_rows({name: {0.0: [1.0, 2.0], 0.1: [1.2, 2.2], 0.5: last_gaps}})
    assert row.agrees is agrees
    assert row.ours == pytest.approx((last_gaps[0] / 1.0 + last_gaps[1] / 2.0) / 2)  # mean ratio to the gaps at λτ = 0


def test_the_paper_scale_has_the_settings_of_the_paper():
    settings = bridge_fig1.SETTINGS["paper"]
    assert (settings.runs, settings.training_tasks, settings.test_tasks) == (5, 20, 20)
    assert 512 in settings.widths
    assert set(settings.depths) == set(REFERENCE)


def test_the_result_can_be_written_and_drawn(outcome, tmp_path):
    assert Result.read(outcome.result.write(tmp_path)).rows == outcome.result.rows
    assert not any(math.isnan(row.ours) for row in outcome.result.rows)
    EXPERIMENT.draw(outcome, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
