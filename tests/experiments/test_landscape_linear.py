from __future__ import annotations

import pytest
import torch

from metabridge.experiments import ExperimentOptions, Result, load_experiment
from metabridge.experiments import landscape_fig1 as fig1
from metabridge.experiments import landscape_fig2 as fig2
from metabridge.experiments import landscape_fig3 as fig3
from metabridge.experiments import landscape_fig7 as fig7
from metabridge.experiments import landscape_rates as rates
from metabridge.experiments import landscape_table3 as table3
from metabridge.experiments.landscape_linear import SgdSettings, compare_with_theory
from metabridge.theory.landscape import hard_easy_risks

SGD = SgdSettings(iterations=30, test_tasks=40, runs=3)
SMALL = {
    fig1: SGD,
    fig2: fig2.Settings(SGD, (50, 20), (0.2, 1.0)),
    fig3: fig3.Settings(SGD, (1.0, 2.0)),
    fig7: fig7.Settings(SGD, (0.2, 1.0)),
    table3: SGD,
    rates: rates.Settings((32, 128), (8, 32), (64, 256), runs=3),
}
OPTIONS = ExperimentOptions("quick", progress=False)


@pytest.fixture(scope="module")
def outcomes():
    """The outcome of each experiment, with settings that take a second."""
    with pytest.MonkeyPatch.context() as patch:
        for module, settings in SMALL.items():
            patch.setitem(module.SETTINGS, "quick", settings)
        return {module: module.EXPERIMENT.run(OPTIONS) for module in SMALL}


@pytest.mark.parametrize("module", SMALL, ids=lambda module: module.EXPERIMENT.id)
def test_results_can_be_read_again_and_figures_are_drawn(module, outcomes, tmp_path):
    outcome, experiment = outcomes[module], module.EXPERIMENT
    assert Result.read(outcome.result.write(tmp_path)).rows == outcome.result.rows
    assert len({(row.name, row.metric) for row in outcome.result.rows}) == len(outcome.result.rows)
    experiment.draw(outcome, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert load_experiment(experiment.id) is experiment


def test_the_paper_settings_are_those_of_the_paper():
    for module in (fig2, fig3, fig7):
        assert module.SETTINGS["paper"].sgd == SgdSettings(iterations=5000, test_tasks=3000, runs=10, queries=25)
    assert table3.SETTINGS["paper"] == SgdSettings(iterations=4000, test_tasks=3000, runs=5, queries=25)
    assert table3.BATCH_SIZE == 10
    assert {2000, 500, 50} <= set(fig2.SETTINGS["paper"].samples)


@pytest.mark.parametrize(("shift", "agrees"), [(0.0, True), (1.9, True), (2.1, False)])
def test_means_agree_with_closed_forms_within_twice_their_interval(shift, agrees):
    values = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    margin = compare_with_theory("", "", values, 0.0).ci95
    closed_form = 1.5 + shift * margin  # 1.5 is the mean of the values
    assert compare_with_theory("", "", values, closed_form).agrees is agrees


def test_rows_compare_the_results_of_sgd_with_closed_forms(outcomes):
    rows = {(row.name, row.metric): row for row in outcomes[fig2].result.rows}
    row = rows["MAML, m = 50, ρ_H = 0.2", "first coordinate"]
    # Eq. 8 for d = 10, α = 1, m = 50, ρ_H = 0.2 and ρ_E = 1: a_i = ρ_i(1 − αρ_i)² + (d + 1)/m·α²ρ_i³
    a_H, a_E = 0.2 * 0.8**2 + 11 / 50 * 0.2**3, 11 / 50
    assert row.published == pytest.approx((a_H - a_E) / (a_H + a_E))
    assert row.ours == pytest.approx(float(outcomes[fig2].data[50, 0.2]["maml"].coordinate.mean()))
    rows = {(row.name, row.metric): row for row in outcomes[fig3].result.rows}
    limit = rows["limit of NAL / MAML, hard tasks close together", "ratio of 𝓔_m"].published
    assert limit == pytest.approx(11)  # 1 + R²/r_H
    assert all(row.agrees for (name, _), row in rows.items() if name.startswith("limit"))


def test_the_last_landscape_has_the_published_ratio_of_risks_which_is_the_largest():
    ratios = [hard_easy_risks(tasks, 1 / tasks.rho_easy, fig1.M).ratio for tasks in fig1.LANDSCAPES.values()]
    assert ratios[0] == pytest.approx(1)
    assert max(ratios) == ratios[-1] == pytest.approx(fig1.PUBLISHED_RATIO, abs=0.1)


def test_closed_forms_of_table_3_are_near_the_published_values():
    """The published test errors fit a variance of ⅓, and are too low for the variance of 1 in the text of the paper.

    The tolerances are multiples of the published standard deviations, but at least 0.04 and 0.025.
    """
    variance_1, variance_third = table3.LANDSCAPES.values()
    for name, ((coordinate, coordinate_std), (error, error_std)) in table3.PUBLISHED.items():
        learner = table3.LEARNERS[name]
        our_coordinate, our_error = table3.closed_form(learner, variance_third)
        assert abs(our_coordinate - coordinate) < 2 * max(coordinate_std, 0.02)
        assert abs(our_error - error) < max(error_std, 0.025)
        assert table3.closed_form(learner, variance_1)[1] > error + 0.13


def test_exponents_of_rates_agree_only_if_they_are_minus_one_half():
    for exponent, agrees in ((-0.5, True), (-0.3, False), (-0.9, False)):
        points = {size: [size**exponent, 1.01 * size**exponent] for size in (8, 32, 128)}
        exponent_row, *distance_rows = rates.rows({"NAL, points n": points}, OPTIONS)
        assert exponent_row.ours == pytest.approx(exponent)
        assert exponent_row.agrees is agrees
        assert [row.ours for row in distance_rows] == [pytest.approx(sum(values) / 2) for values in points.values()]


def test_the_covariances_in_landscape_rates_do_not_commute():
    """If they did, one rotation of the inputs would make all of them diagonal, which is a special case."""
    first, second, third = rates.landscape().distribution.covariance
    for a, b in ((first, second), (second, third)):
        assert float((a @ b - b @ a).norm()) > 0.01
