from __future__ import annotations

from dataclasses import replace

import pytest

from metabridge.experiments import ExperimentOptions, Result, load_experiment, metantk_thm1, metantk_thm2
from metabridge.experiments.metantk_thm1 import Measurements, TrainingRun
from metabridge.experiments.wide_nets import initialization_seeds

OPTIONS = ExperimentOptions("quick", progress=False)
SMALL = {
    metantk_thm1: metantk_thm1.Settings(widths=(16, 128), nets=2, steps=12),
    metantk_thm2: metantk_thm2.Settings(
        widths=(16, 256), nets=2, test_tasks=4, inner_steps=3, outer_steps=6, remainder=0.3
    ),
}


@pytest.fixture(scope="module")
def outcomes():
    """The outcomes of both experiments with small settings."""
    with pytest.MonkeyPatch.context() as patch:
        for module, settings in SMALL.items():
            patch.setitem(module.SETTINGS, "quick", settings)
        return {module: module.EXPERIMENT.run(OPTIONS) for module in SMALL}


@pytest.mark.parametrize("module", list(SMALL), ids=lambda module: module.EXPERIMENT.id)
def test_results_can_be_read_again_and_figures_are_drawn(module, outcomes, tmp_path):
    outcome, experiment = outcomes[module], module.EXPERIMENT
    assert Result.read(outcome.result.write(tmp_path)).rows == outcome.result.rows
    assert len({row.name for row in outcome.result.rows}) == len(outcome.result.rows)
    experiment.draw(outcome, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert load_experiment(experiment.id) is experiment


def test_the_losses_stay_within_the_bound_of_the_theorem(outcomes):
    outcome = outcomes[metantk_thm1]
    for run in outcome.data.by_width[128]:
        assert len(run.losses) == 12
        assert all(loss <= outcome.data.bound**t * run.losses[0] for t, loss in enumerate(run.losses))
    assert all(row.agrees for row in outcome.result.rows if row.name == "loss, width 128")


def test_wider_networks_move_less_and_start_closer_to_their_limit(outcomes):
    for name in metantk_thm1.QUANTITIES:
        quantity = outcomes[metantk_thm1].data.quantity(name)
        assert sum(quantity[128]) < sum(quantity[16])


def test_wider_trained_networks_agree_better_with_their_kernels(outcomes):
    errors = [
        errors_by_width
        for errors_by_method in outcomes[metantk_thm2].data.values()
        for errors_by_width in errors_by_method.values()
    ]
    assert len(errors) == 2 * len(metantk_thm2.METHODS)  # two stages of training
    for errors_by_width in errors:
        # If errors are proportional to 1/√width, 16 times the width has a quarter of the error; half of it is required.
        assert sum(errors_by_width[256]) < sum(errors_by_width[16]) / 2
        assert max(errors_by_width[256]) < 0.5


def test_rows_disagree_if_losses_exceed_the_bound_or_quantities_do_not_decrease_with_the_width():
    falling = TrainingRun(tuple(0.5**step for step in range(10)), path=1.0, kernel_change=1.0, kernel_error=1.0)
    constant = replace(falling, losses=(1.0,) * 10)
    constant_other = replace(constant, path=1.1, kernel_change=1.1, kernel_error=1.1)
    measurements = Measurements({8: [falling, falling], 16: [falling, constant]}, bound=0.9, limit=0.6)
    width_8, width_16 = metantk_thm1.loss_rows(measurements)
    assert (width_8.ours, width_8.agrees) == (pytest.approx(0.5), True)
    assert (width_16.ours, width_16.agrees) == (pytest.approx(0.75), False)
    assert "11 of 20 losses of 2 training runs" in width_16.note  # the falling ones and the first of the constant ones
    measurements = Measurements({8: [constant, constant_other], 16: [constant, constant_other]}, bound=0.9, limit=0.6)
    exponents = [row for row in metantk_thm1.power_law_rows(measurements) if row.metric.startswith("exponent")]
    assert [row.agrees for row in exponents] == [False, False, None]
    assert all(row.ours == pytest.approx(0) for row in exponents)


def test_errors_agree_if_they_fall_with_the_width():
    flat, falling = (
        {8: [1.0, 1.1], 16: [factor, 1.1 * factor], 32: [factor**2, 1.1 * factor**2]} for factor in (1.0, 0.7)
    )
    rows = metantk_thm2.rows({"stopped early": {"maml": flat, "mtl": falling}}, OPTIONS)
    assert [row.agrees for row in rows if row.agrees is not None] == [False, True]


def test_all_networks_have_different_seeds():
    seeds_by_width = [initialization_seeds((8, 16), 3, seed) for seed in (0, 1)]
    seeds = [seed for by_width in seeds_by_width for of_width in by_width.values() for seed in of_width]
    assert len(set(seeds)) == 12  # 2 calls × 2 widths × 3 networks
