from __future__ import annotations

import pytest
import torch

from metabridge.experiments import ExperimentOptions, bridge_depth
from metabridge.experiments.bridge_depth import (
    EXPERIMENT,
    NETS,
    DepthMeasurements,
    KernelMeasurements,
    Settings,
    gap_rows,
    kernel_rows,
    measure_run,
)
from metabridge.experiments.bridge_gap import regression_tasks
from metabridge.kernels import fully_connected_kernel, mtl_kernel
from metabridge.report.results import Result


@pytest.fixture(scope="module")
def outcome():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(bridge_depth.SETTINGS, "quick", Settings(runs=2, depths=(4, 8), training_tasks=4, test_tasks=3))
        return EXPERIMENT.run(ExperimentOptions("quick"))


def exact_runs(depth: int, depth_factor: float, num_points: int) -> list[KernelMeasurements]:
    """Return two runs in which every quantity changes with the depth as the lemmas predict."""
    largest, smallest = (depth_factor * growth * depth for growth in ((num_points + 3) / 4, 3 / 4))
    # The lemmas predict how eigenvalues grow with the depth, so constants can be subtracted from those of MTL.
    return [KernelMeasurements(1 / depth, smallest, largest, smallest - 0.5, largest - 5, depth**-2.0)] * 2


def test_eigenvalues_are_divided_by_the_diagonal_of_the_kernel():
    train, test = regression_tasks(0, 4, 3, "cpu")
    x = train.without_split().support_x
    kernel = fully_connected_kernel(depth=4)
    run = measure_run(kernel, train, test)
    variance = kernel.nngp(x[0])[0, 0]
    theta, phi = kernel.ntk(x.flatten(0, 1)) / variance, mtl_kernel(kernel, x) / variance
    for matrix, largest, smallest in (
        (theta, run.anil_largest_eigenvalue, run.anil_smallest_eigenvalue),
        (phi, run.mtl_largest_eigenvalue, run.mtl_smallest_eigenvalue),
    ):
        eigenvalues = torch.linalg.eigvalsh(matrix)
        assert (largest, smallest) == pytest.approx((float(eigenvalues[-1]), float(eigenvalues[0])), rel=1e-6)
    assert run.inverse_difference == pytest.approx(float((theta.inverse() - phi.inverse()).svd().S[0]), rel=1e-6)


def test_residual_connections_change_the_gap_but_layer_norm_does_not(outcome):
    plain, residual, with_layer_norm = (outcome.data.values(net, "gap") for net in NETS)
    for depth in plain:
        assert with_layer_norm[depth] == pytest.approx(residual[depth], rel=1e-6)
        assert all(gap > 1.1 * plain_gap for gap, plain_gap in zip(residual[depth], plain[depth]))
    row = next(row for row in outcome.result.rows if row.name == "with and without LayerNorm")
    assert row.agrees
    assert row.ours < 1e-6


def test_deeper_kernels_are_closer_to_the_limits_of_lemmas_4_and_5():
    train, test = regression_tasks(0, 4, 3, "cpu")
    runs = [measure_run(fully_connected_kernel(depth), train, test) for depth in (40, 80, 160)]
    num_points = 40  # 4 tasks of 10 points
    for extreme, limit in (("largest", (num_points + 3) / 4), ("smallest", 3 / 4)):
        for kernel in ("anil", "mtl"):
            at_40, at_80, at_160 = (getattr(run, f"{kernel}_{extreme}_eigenvalue") for run in runs)
            assert abs((at_160 - at_80) / 80 - limit) < abs((at_80 - at_40) / 40 - limit)
            assert (at_160 - at_80) / 80 == pytest.approx(limit, rel=0.03)
    at_40, at_80, at_160 = (run.inverse_difference for run in runs)
    assert 1 / 4 < at_160 / at_80 < min(at_80 / at_40, 0.28)  # lemma 5: the limit is 1/4 if the depth is doubled


def test_every_row_agrees_if_the_lemmas_hold_and_none_if_nothing_changes_with_the_depth():
    depth_factors = {net: 1.0 if net == "plain" else 0.5 for net in NETS}
    exact = DepthMeasurements(
        40, {net: {L: exact_runs(L, factor, 40) for L in (8, 16)} for net, factor in depth_factors.items()}
    )
    rows = gap_rows(exact) + kernel_rows(exact)
    assert {row.agrees for row in rows if row.published is not None} == {True}
    constant = DepthMeasurements(40, {net: {L: exact_runs(8, 1.0, 40) for L in (8, 16)} for net in NETS})
    rows = gap_rows(constant) + kernel_rows(constant)
    assert {row.agrees for row in rows if row.published is not None and "without LayerNorm" not in row.name} == {False}


def test_the_result_can_be_written_and_drawn(outcome, tmp_path):
    assert Result.read(outcome.result.write(tmp_path)).rows == outcome.result.rows
    EXPERIMENT.draw(outcome, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
