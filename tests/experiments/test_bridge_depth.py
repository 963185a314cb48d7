from __future__ import annotations

import pytest
import torch

from metabridge.experiments import ExperimentOptions, bridge_depth
from metabridge.experiments.bridge_depth import NETS, Measured, Scale, measure
from metabridge.experiments.bridge_fig1 import tasks
from metabridge.experiments.result import Result
from metabridge.kernels import fully_connected_kernel, mtl_kernel


@pytest.fixture(scope="module")
def outcome():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(bridge_depth.SCALES, "quick", Scale(2, (4, 8), training_tasks=4, test_tasks=3))
        return bridge_depth.run(ExperimentOptions("quick"))


def law(depth: int, pace: float, points: int) -> list[Measured]:
    """Two runs in which everything is as in its limit."""
    most, least = (pace * factor * depth for factor in ((points + 3) / 4, 3 / 4))
    return [Measured(1 / depth, most, least, most - 5, least - 0.5, depth**-2.0)] * 2


def test_eigenvalues_are_in_units_of_the_kernel_on_the_diagonal():
    train, test = tasks(0, 4, 3, "cpu")
    x = train.without_split().support_x
    kernel = fully_connected_kernel(depth=4)
    found = measure(kernel, train, test)
    unit = kernel.nngp(x[0])[0, 0]
    theta, phi = kernel.ntk(x.flatten(0, 1)) / unit, mtl_kernel(kernel, x) / unit
    for matrix, most, least in ((theta, found.anil_most, found.anil_least), (phi, found.mtl_most, found.mtl_least)):
        values = torch.linalg.eigvalsh(matrix)
        assert (most, least) == pytest.approx((float(values[-1]), float(values[0])), rel=1e-6)
    assert found.inverses == pytest.approx(float((theta.inverse() - phi.inverse()).svd().S[0]), rel=1e-6)


def test_layer_norm_changes_nothing_on_points_of_one_length_but_residual_connections_do(outcome):
    plain, residual, normed = (outcome.of(net, "gap") for net in NETS)
    for depth in plain:
        assert normed[depth] == pytest.approx(residual[depth], rel=1e-6)
        assert all(one > 1.1 * other for one, other in zip(residual[depth], plain[depth]))
    row = next(row for row in outcome.result.rows if row.name == "LayerNorm against none")
    assert row.agrees
    assert row.ours < 1e-6


def test_deeper_kernels_come_nearer_to_lemmas_4_and_5():
    train, test = tasks(0, 4, 3, "cpu")
    x, y, z = (measure(fully_connected_kernel(depth), train, test) for depth in (40, 80, 160))
    for end, limit in (("most", 43 / 4), ("least", 3 / 4)):
        for kernel in ("anil", "mtl"):
            first, second, third = (getattr(one, f"{kernel}_{end}") for one in (x, y, z))
            assert abs((third - second) / 80 - limit) < abs((second - first) / 40 - limit)
            assert (third - second) / 80 == pytest.approx(limit, rel=0.03)
    assert 1 / 4 < z.inverses / y.inverses < min(y.inverses / x.inverses, 0.28)


def test_everything_agrees_where_the_lemmas_hold_and_nothing_where_they_do_not():
    held = {net: {depth: law(depth, 1.0 if net == "plain" else 0.5, 40) for depth in (8, 16)} for net in NETS}
    made = bridge_depth.gap_rows(held) + bridge_depth.kernel_rows(held, 40)
    assert {row.agrees for row in made if row.published is not None} == {True}
    flat = {net: {depth: law(8, 1.0, 40) for depth in (8, 16)} for net in NETS}
    made = bridge_depth.gap_rows(flat) + bridge_depth.kernel_rows(flat, 40)
    assert {row.agrees for row in made if row.published is not None and "LayerNorm against" not in row.name} == {False}


def test_the_result_is_written_and_drawn(outcome, tmp_path):
    assert Result.read(outcome.result.write(tmp_path)).rows == outcome.result.rows
    bridge_depth.figure(outcome, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
