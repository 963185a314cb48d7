from __future__ import annotations

import pytest
import torch

from metabridge.experiments import ExperimentOptions, bridge_depth
from metabridge.experiments.bridge_depth import (
    EXPERIMENT,
    NETS,
    KernelMeasurements,
    Settings,
    Spectra,
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
        patch.setitem(bridge_depth.SETTINGS, "quick", Settings(2, (4, 8), training_tasks=4, test_tasks=3))
        return EXPERIMENT.run(ExperimentOptions("quick"))


def exact_runs(depth: int, factor: float, points: int) -> list[KernelMeasurements]:
    """Return two runs in which every quantity equals its limit."""
    largest, smallest = (factor * limit * depth for limit in ((points + 3) / 4, 3 / 4))
    return [KernelMeasurements(1 / depth, smallest, largest, smallest - 0.5, largest - 5, depth**-2.0)] * 2


def test_eigenvalues_are_divided_by_the_diagonal_of_the_kernel():
    train, test = regression_tasks(0, 4, 3, "cpu")
    x = train.without_split().support_x
    kernel = fully_connected_kernel(depth=4)
    run = measure_run(kernel, train, test)
    unit = kernel.nngp(x[0])[0, 0]
    theta, phi = kernel.ntk(x.flatten(0, 1)) / unit, mtl_kernel(kernel, x) / unit
    for matrix, *ends in (
        (theta, run.anil_largest, run.anil_smallest),
        (phi, run.mtl_largest, run.mtl_smallest),
    ):
        values = torch.linalg.eigvalsh(matrix)
        assert tuple(ends) == pytest.approx((float(values[-1]), float(values[0])), rel=1e-6)
    assert run.inverses == pytest.approx(float((theta.inverse() - phi.inverse()).svd().S[0]), rel=1e-6)


def test_residual_connections_change_the_gap_but_layer_norm_does_not(outcome):
    plain, residual, normed = (outcome.data.values(net, "gap") for net in NETS)
    for depth in plain:
        assert normed[depth] == pytest.approx(residual[depth], rel=1e-6)
        assert all(one > 1.1 * other for one, other in zip(residual[depth], plain[depth]))
    row = next(row for row in outcome.result.rows if row.name == "with and without LayerNorm")
    assert row.agrees
    assert row.ours < 1e-6


def test_deeper_kernels_are_closer_to_the_limits_of_lemmas_4_and_5():
    train, test = regression_tasks(0, 4, 3, "cpu")
    x, y, z = (measure_run(fully_connected_kernel(depth), train, test) for depth in (40, 80, 160))
    for end, limit in (("largest", 43 / 4), ("smallest", 3 / 4)):
        for kernel in ("anil", "mtl"):
            first, second, third = (getattr(run, f"{kernel}_{end}") for run in (x, y, z))
            assert abs((third - second) / 80 - limit) < abs((second - first) / 40 - limit)
            assert (third - second) / 80 == pytest.approx(limit, rel=0.03)
    assert 1 / 4 < z.inverses / y.inverses < min(y.inverses / x.inverses, 0.28)


def test_every_row_agrees_if_the_lemmas_hold_and_none_if_they_do_not():
    limits = Spectra(40, {net: {L: exact_runs(L, 1.0 if net == "plain" else 0.5, 40) for L in (8, 16)} for net in NETS})
    rows = gap_rows(limits) + kernel_rows(limits)
    assert {row.agrees for row in rows if row.published is not None} == {True}
    constant = Spectra(40, {net: {L: exact_runs(8, 1.0, 40) for L in (8, 16)} for net in NETS})
    rows = gap_rows(constant) + kernel_rows(constant)
    assert {row.agrees for row in rows if row.published is not None and "without LayerNorm" not in row.name} == {False}


def test_the_result_can_be_written_and_drawn(outcome, tmp_path):
    assert Result.read(outcome.result.write(tmp_path)).rows == outcome.result.rows
    EXPERIMENT.draw(outcome, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
