from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from metabridge import meta_gradient, method, parameters
from metabridge.errors import InputError
from metabridge.experiments import (
    ExperimentOptions,
    Result,
    anil_fig2,
    anil_fig3,
    anil_mean,
    anil_relu,
    anil_table1,
    anil_trainings,
    linear_anil,
    load_experiment,
)
from metabridge.experiments.anil_trainings import METHODS, SETTINGS, Setting
from metabridge.experiments.linear_anil import descend, marked
from metabridge.models import mlp
from metabridge.theory.finite_tasks import factorisation_loss
from metabridge.training.checkpoint import RunFolder

LINEAR = (anil_fig2, anil_fig3, anil_table1, anil_mean)
TINY = Setting(runs=2, tasks=20, steps=12, iterations=8, designs=20, dimension=6, width=6, variances=(1.0, 2.0, 3.0))


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Iterator[dict[ModuleType, tuple[ExperimentOptions, object]]]:
    """All experiments at a scale of seconds; the settings stay so for the whole module."""
    students = replace(anil_relu.SETTINGS["quick"], iterations=2, judged=4, pool=20, batch=4, width=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SETTINGS, "quick", TINY)
        patch.setitem(anil_relu.SETTINGS, "quick", students)
        work = ExperimentOptions("quick", out=tmp_path_factory.mktemp("out"), progress=False)
        yield {module: (work, module.run(work)) for module in (*LINEAR, anil_relu)}


@pytest.mark.parametrize("module", [*LINEAR, anil_relu], ids=lambda module: module.ID)
def test_results_can_be_read_again_and_figures_are_drawn(module, done, tmp_path):
    _, outcome = done[module]
    assert load_experiment(module.ID) is module.EXPERIMENT
    assert Result.read(outcome.result.write(tmp_path)) == outcome.result
    assert len({row.name for row in outcome.result.rows}) == len(outcome.result.rows)
    module.figure(outcome, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_figures_and_table_share_their_trainings(done, monkeypatch):
    work, outcome = done[anil_fig2]
    assert set(outcome.records) == set(METHODS)
    for name in ("descend", "factorise"):
        monkeypatch.setattr(anil_trainings, name, None)
    for module in (anil_fig2, anil_fig3, anil_table1):
        assert module.run(work).records == outcome.records


def test_every_published_risk_has_a_row_and_only_the_baselines_compare_at_the_quick_scale(done):
    _, outcome = done[anil_table1]
    beside = [row for row in outcome.result.rows if row.published is not None]
    published = [value for numbers in anil_table1.PUBLISHED.values() for value, _ in numbers]
    assert [row.published for row in beside] == published
    assert all((row.agrees is None) == (not row.name.startswith(("single", "oracle"))) for row in beside)


def test_a_risk_agrees_within_three_published_deviations_and_one_of_ours():
    key = ("oracle", "ridge, 20 points")  # 0.50 ± 0.01, ours ± 0.02
    for value, agrees in ((0.549, True), (0.551, False), (0.451, True), (0.449, False)):
        spread = 0.02 / 2**0.5
        (row,) = anil_table1.risk_rows({key: [value - spread, value + spread]}, Setting(), "paper")
        assert row.agrees is agrees


def test_the_single_task_baseline_of_the_paper_is_met_without_training():
    setting = Setting(runs=2, designs=100)
    risks = anil_table1.baselines(setting, 0)
    rows = anil_table1.risk_rows(risks, setting, "paper")
    assert len(rows) == 4
    assert all(row.agrees for row in rows)


def test_curves_start_at_the_initial_net_and_end_with_the_last_step(done):
    _, outcome = done[anil_fig2]
    for name, record in outcome.records.items():
        length = TINY.iterations if name == "burer-monteiro" else TINY.steps
        assert record.curves.steps == [0, *marked(length)]
        start = 0.01 if name == "burer-monteiro" else 0.25 / TINY.alpha
        for quantity in ("smallest", "largest", "orthogonal_mean", "orthogonal_largest"):
            curves = record.curves.values[quantity]
            assert [len(curve) for curve in curves] == [len(record.curves.steps)] * TINY.runs
            assert [curve[0] for curve in curves] == pytest.approx([start] * TINY.runs)


@pytest.mark.parametrize("name", ["fo-anil", "infinite-tasks"])
def test_stopped_and_resumed_training_ends_like_one_that_was_not(name, tmp_path, monkeypatch):
    worlds = TINY.worlds(0)
    whole = descend(name, TINY, worlds, "cpu", RunFolder(tmp_path), float("inf"))
    folder = tmp_path / "stopped"
    folder.mkdir()
    clock = iter(range(1000))
    monkeypatch.setattr(linear_anil.time, "perf_counter", lambda: next(clock))
    assert descend(name, TINY, worlds, "cpu", RunFolder(folder), 10) is None
    monkeypatch.undo()
    resumed = descend(name, TINY, worlds, "cpu", RunFolder(folder), float("inf"))
    assert whole is not None
    assert resumed is not None
    assert torch.equal(whole.B, resumed.B)
    assert whole.curves == resumed.curves


def test_without_time_nothing_is_finished_and_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(SETTINGS, "quick", TINY)
    with pytest.raises(InputError, match="is finished"):
        anil_fig2.run(ExperimentOptions("quick", out=tmp_path, minutes=0.0, progress=False))


def test_only_names_that_exist_are_trained(done, tmp_path):
    with pytest.raises(InputError, match="only names reptile"):
        anil_fig2.run(ExperimentOptions("quick", out=tmp_path, only=("reptile",), progress=False))
    work, _ = done[anil_fig2]
    some = anil_fig2.run(replace(work, out=tmp_path, only=("infinite-tasks",)))
    assert list(some.records) == ["infinite-tasks"]


def test_a_record_of_another_form_is_refused_by_name(done, tmp_path):
    work = replace(done[anil_fig2][0], out=tmp_path)
    file = tmp_path / "records" / "anil-fo-anil-quick-0.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"name": "other"}))
    with pytest.raises(InputError, match=r"anil-fo-anil-quick-0.json is not a record of this version"):
        anil_fig2.run(work)


def test_burer_monteiros_loss_and_slopes_are_those_of_the_librarys_method():
    world = TINY.worlds(0)[0]
    how, net = method("burer-monteiro"), mlp(6, 1, width=6, depth=1, activation="linear", bias=False).double()
    params = parameters(how, net, classes=world.classes)
    tasks = world.tasks.to(dtype=torch.float64)
    expected = meta_gradient(how, net, params, tasks, mode="vectorised")
    both = tasks.without_split()
    B = params["features.1.weight"].detach().mT.clone().requires_grad_()
    heads = params["heads.weight"].detach().clone().requires_grad_()
    loss = factorisation_loss(B, heads, both.support_x, both.support_y[..., 0])
    slopes = torch.autograd.grad(loss, (B, heads))
    torch.testing.assert_close(slopes[0].mT, expected.gradients["features.1.weight"])
    torch.testing.assert_close(slopes[1], expected.gradients["heads.weight"])


def test_tasks_with_a_mean_have_records_of_their_own(done):
    _, outcome = done[anil_mean]
    assert {record.name.startswith("anil-mean-") for record in outcome.records.values()} == {True}
    starts = outcome.records["infinite-tasks"].curves.values["start"]
    assert all(curve[0] > 1 for curve in starts)
