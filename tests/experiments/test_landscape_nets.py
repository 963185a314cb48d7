from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from metabridge.experiments import ExperimentOptions, Result, landscape_fig4, landscape_fig6, load_experiment
from metabridge.experiments.landscape_nets import Case, CaseMinima, minima_rows
from metabridge.experiments.landscape_thm1 import BoundCheck, check_theorem, theorem_rows
from metabridge.theory.sampled_minima import SampledMinima
from metabridge.theory.teachers import HardTaskPreference

NEURONS = {"easy": ((-1.0, 0.5), (0.0, -1.0)), "hard": ((1.0, 1.0),)}
CASE = Case("one hard", "softplus", support=30, **NEURONS, minima_differ=True)


def minima(nal: float, maml: float, positions: dict[str, list[list[float]]]) -> CaseMinima:
    """Return the minima of two draws. Their risks are those given; the risk of NAL is 1 % higher in the second draw."""
    tensors = {name: torch.tensor(points, dtype=torch.float64) for name, points in positions.items()}
    risks = {"NAL": [nal, 1.01 * nal], "MAML": [maml, maml]}
    return CaseMinima(CASE, SampledMinima(CASE.tasks, alpha=4.0, positions=tensors, risks=risks, surfaces={}))


def test_rows_agree_only_if_maml_is_nearer_to_hard_tasks_and_has_a_lower_risk():
    far, near = [[-0.5, -0.5], [-0.51, -0.5]], [[0.5, 0.5], [0.51, 0.5]]
    as_claimed, opposite = minima(0.2, 0.1, {"NAL": far, "MAML": near}), minima(0.1, 0.2, {"NAL": near, "MAML": far})
    for measured, agrees in ((as_claimed, True), (opposite, False)):
        rows = {row.name.partition(": ")[2]: row for row in minima_rows(measured)}
        assert rows["mean distance to hard tasks, NAL − MAML"].agrees is agrees
        assert rows["risk of NAL / risk of MAML"].agrees is agrees
    # means over the two draws in `opposite`
    assert rows["risk of NAL / risk of MAML"].ours == pytest.approx((0.1 / 0.2 + 0.101 / 0.2) / 2)
    distances = math.dist((0.5, 0.5), (1, 1)), math.dist((0.51, 0.5), (1, 1))
    assert rows["minimum of NAL to hard tasks"].ours == pytest.approx(sum(distances) / 2, abs=1e-4)
    assert rows["minimum of MAML, first coordinate"].ours == pytest.approx((-0.5 - 0.51) / 2)
    unpublished = as_claimed._replace(case=replace(CASE, minima_differ=None))
    assert all(row.agrees is None for row in minima_rows(unpublished))


def test_a_stationary_point_beyond_the_bound_of_theorem_1_makes_the_row_disagree():
    within = HardTaskPreference(
        alpha=0.5, ratio=0.8, adapted_ratio=0.9, hard_curvatures=(0.1, 0.2), easy_curvatures=(0.3, 0.4)
    )
    beyond = replace(within, ratio=1.2)
    after, before = theorem_rows([BoundCheck("tanh", 0.5, 3, (within, beyond))])
    assert after.agrees is True
    assert (before.agrees, before.ours) == (False, 1.2)
    assert before.published == pytest.approx(((1 - 0.15) / (1 - 0.1)) ** 2)  # ((1 − αβ₂)/(1 − αL₁))²
    assert "2 of 3 stationary points satisfy the conditions and 1 the bound" in before.note
    assert list(theorem_rows([BoundCheck("tanh", 0.5, 3, ())])) == []


def test_theorem_1_holds_at_numerically_found_stationary_points():
    rows = list(theorem_rows(check_theorem("softplus", pairs=2, seed=1)))
    assert len(rows) == 8  # for four α, before and after adaptation
    assert all(row.agrees for row in rows)


@pytest.fixture(scope="module")
def outcomes():
    """The outcomes of both experiments, with settings that take seconds."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (landscape_fig4, landscape_fig6):
            settings = module.SETTINGS["quick"]
            cases = settings.cases[:2] if module is landscape_fig6 else settings.cases
            small = replace(settings, cases=cases, draws=2, grid=7, test_episodes=5, pairs=1, episodes=4, queries=5)
            patch.setitem(module.SETTINGS, "quick", small)
        patch.setattr("metabridge.theory.loss_surface.SEARCH_POINTS", 9)
        patch.setattr("metabridge.theory.loss_surface.PRECISION", 1e-2)
        patch.setattr("metabridge.experiments.landscape_thm1.RELATIVE_ALPHAS", (0.1, 0.5))
        options = ExperimentOptions("quick", progress=False)
        return {module: module.EXPERIMENT.run(options) for module in (landscape_fig4, landscape_fig6)}


@pytest.mark.parametrize("module", [landscape_fig4, landscape_fig6])
def test_results_can_be_read_again_and_figures_are_drawn(module, outcomes, tmp_path):
    outcome, experiment = outcomes[module], module.EXPERIMENT
    assert Result.read(outcome.result.write(tmp_path)).rows == outcome.result.rows
    assert len({row.name for row in outcome.result.rows}) == len(outcome.result.rows)
    experiment.draw(outcome, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert load_experiment(experiment.id) is experiment


def test_nal_and_maml_have_the_same_population_minimum_only_for_equally_hard_tasks_in_a_square(outcomes):
    rows = {row.name: row for row in outcomes[landscape_fig4].result.rows}
    assert rows["four easy tasks: population minima of NAL and MAML"].agrees is True
    assert rows["four easy tasks, asymmetric: population minima of NAL and MAML"].ours > 0.1
    assert rows["one hard task: population minima of NAL and MAML"].ours > 1
    assert rows["hard task 1"].ours < rows["easy task 1"].ours
