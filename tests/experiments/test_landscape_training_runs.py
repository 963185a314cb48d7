from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from types import ModuleType

import pytest
import torch

from cases import numbered_images
from metabridge.environments.image_splits import hold_out_images
from metabridge.errors import InputError
from metabridge.experiments import (
    ExperimentOptions,
    Outcome,
    Result,
    landscape_table1,
    landscape_table2,
    landscape_training_runs,
    load_experiment,
)
from metabridge.experiments.landscape_table1 import SIMILAR_ALPHABETS, hardest_alphabets, split_alphabets
from metabridge.experiments.landscape_training_runs import (
    TASK_KINDS,
    Accuracy,
    AccuracyRecord,
    Conv4Training,
    PlannedRun,
    accuracy_rows,
    train_all,
)
from metabridge.report.results import Machine
from metabridge.training import Trainer, interleaved
from metabridge.training.checkpoint import RunFolder

TABLES = (landscape_table1, landscape_table2)


@pytest.fixture(scope="module")
def options_and_outcomes(glyphs, tmp_path_factory) -> Iterator[dict[ModuleType, tuple[ExperimentOptions, Outcome]]]:
    """The options and outcome of both experiments, with settings that take seconds for the whole module."""
    with pytest.MonkeyPatch.context() as patch:
        for table in TABLES:
            quick = table.SETTINGS["quick"]
            training = replace(quick.training, iterations=2, batch_size=2, test_tasks=2, filters=4)
            small = {"ranking_tasks": 3} if table is landscape_table1 else {"hard": (6, 1)}
            patch.setitem(table.SETTINGS, "quick", replace(quick, training=training, seeds=2, **small))
        options = {
            table: ExperimentOptions("quick", out=tmp_path_factory.mktemp("out"), progress=False) for table in TABLES
        }
        yield {table: (options[table], table.EXPERIMENT.run(options[table])) for table in TABLES}


@pytest.mark.parametrize("table", TABLES)
def test_every_published_number_has_a_row(table, options_and_outcomes):
    options, outcome = options_and_outcomes[table]
    published = [value for numbers in table.PUBLISHED.values() for value, _ in numbers]
    rows = [row for row in outcome.result.rows if row.published is not None]
    assert [row.published for row in rows] == published
    assert all(row.ci95 is not None and 0 <= row.ours <= 100 for row in rows)
    assert len({row.name for row in outcome.result.rows}) == len(outcome.result.rows)
    assert Result.read(outcome.result.write(options.out)) == outcome.result
    assert load_experiment(table.EXPERIMENT.id) is table.EXPERIMENT


@pytest.mark.parametrize("table", TABLES)
def test_numbers_on_other_data_are_not_compared_with_the_paper(table, options_and_outcomes):
    for row in options_and_outcomes[table][1].result.rows:
        assert row.agrees is None
        assert "glyphs at 28 px" in row.note
        assert "not " in row.note or row.published is None


@pytest.mark.parametrize("table", TABLES)
def test_a_second_call_reads_the_records_and_trains_nothing(table, options_and_outcomes, monkeypatch):
    options, outcome = options_and_outcomes[table]
    monkeypatch.setattr(landscape_training_runs, "Trainer", None)  # training would raise an error
    assert table.EXPERIMENT.run(options) == outcome
    assert table.EXPERIMENT.run(replace(options, only=tuple(table.PUBLISHED)[:1])) == outcome


@pytest.mark.parametrize(("table", "run_name"), [(landscape_table1, "large-nal-1"), (landscape_table2, "p0.5-nal")])
def test_a_changed_setting_starts_a_new_run_and_keeps_the_old_one(
    table, run_name, options_and_outcomes, monkeypatch, tmp_path
):
    options, outcome = options_and_outcomes[table]
    shutil.copytree(options.out, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(table, "NAL_LR", 1e-5)
    before = len(list((tmp_path / "runs").iterdir()))
    changed = table.EXPERIMENT.run(replace(options, out=tmp_path, only=(run_name,)))
    assert len(list((tmp_path / "runs").iterdir())) == before + 2  # one run per seed
    name = f"{table.EXPERIMENT.id}-{run_name}-quick-0"
    assert changed.data[name].plan == outcome.data[name].plan | {"lr": 1e-5}


def test_a_stopped_run_resumes_and_ends_with_the_same_numbers(options_and_outcomes, tmp_path):
    _, outcome = options_and_outcomes[landscape_table2]
    options = ExperimentOptions("quick", out=tmp_path, only=("p0.5-maml",), progress=False)
    with pytest.raises(InputError, match="no part of landscape-table2 is finished"):
        landscape_table2.EXPERIMENT.run(replace(options, minutes=0.0))
    resumed = landscape_table2.EXPERIMENT.run(options)
    assert len(resumed.result.rows) == len(TASK_KINDS)
    for name, record in resumed.data.items():
        assert record.scores == outcome.data[name].scores


@pytest.fixture
def two_at_once(monkeypatch) -> None:
    """Train two networks concurrently on the CPU, one step of each in turn."""
    monkeypatch.setitem(interleaved.CONCURRENT_RUNS, "cpu", 2)


def plan_two_runs(glyphs, iterations: int) -> list[PlannedRun]:
    """Return training runs of two small networks with different methods and seeds."""
    tasks, test_tasks = glyphs.tasks("train", queries=2), {"test": glyphs.tasks("test", queries=2)}
    return [
        PlannedRun(
            name,
            Conv4Training(name, 1e-2, iterations, batch_size=2, test_tasks=3, filters=4, seed=seed),
            tasks,
            test_tasks,
            {},
        )
        for seed, name in enumerate(("maml", "nal"))
    ]


def weights(options: ExperimentOptions) -> dict[str, torch.Tensor]:
    """Return the weights of all runs in a folder, by the names of the run and of the parameter."""
    runs = {folder.name: RunFolder(folder).read("weights") for folder in (options.out / "runs").iterdir()}
    return {f"{run}/{name}": value for run, (tensors, _) in runs.items() for name, value in tensors.items()}


def test_concurrent_runs_give_the_same_numbers_as_runs_one_after_another(
    glyphs, two_at_once, monkeypatch, tmp_path, capsys
):
    seeds, step = [], Trainer.step

    def step_and_record_seed(trainer: Trainer) -> bool:
        seeds.append(trainer.config.seed)
        return step(trainer)

    monkeypatch.setattr(Trainer, "step", step_and_record_seed)
    planned = plan_two_runs(glyphs, iterations=6)
    concurrent = ExperimentOptions("quick", out=tmp_path / "concurrent")
    assert train_all(replace(concurrent, minutes=0.0), "table", glyphs, planned) == [None, None]
    records = train_all(concurrent, "table", glyphs, planned)
    assert seeds == [0, 1] * 6  # one step of each run in turn, in both calls together
    printed = capsys.readouterr().err
    assert all(f"{run.label} 6/6: loss" in printed for run in planned)

    monkeypatch.delitem(interleaved.CONCURRENT_RUNS, "cpu")
    seeds.clear()
    in_sequence = ExperimentOptions("quick", out=tmp_path / "in-sequence", progress=False)
    expected = train_all(in_sequence, "table", glyphs, planned)
    assert seeds == [0] * 6 + [1] * 6
    assert [(r.name, r.plan, r.scores) for r in records] == [(r.name, r.plan, r.scores) for r in expected]
    assert train_all(concurrent, "table", glyphs, planned) == records
    actual_weights, expected_weights = weights(concurrent), weights(in_sequence)
    assert actual_weights.keys() == expected_weights.keys()
    assert all(torch.equal(value, expected_weights[name]) for name, value in actual_weights.items())


def test_if_one_run_fails_its_error_is_raised_and_the_others_are_saved(glyphs, two_at_once, monkeypatch, tmp_path):
    step = Trainer.step

    def fail_in_the_second_run(trainer: Trainer) -> bool:
        if trainer.config.seed == 1 and trainer.iteration == 3:
            raise InputError("this one fails.")
        return step(trainer)

    monkeypatch.setattr(Trainer, "step", fail_in_the_second_run)
    options = ExperimentOptions("quick", out=tmp_path, progress=False)
    with pytest.raises(InputError, match="this one fails"):
        train_all(options, "table", glyphs, plan_two_runs(glyphs, 1000))
    states = [RunFolder(folder).read("state") for folder in sorted((tmp_path / "runs").iterdir())]
    assert [metadata["iteration"] for _, metadata in states] == [4, 3]  # the first run is one step ahead
    assert not (tmp_path / "records").exists()


def test_only_selects_training_runs_and_rows(options_and_outcomes, tmp_path):
    run, options = landscape_table1.EXPERIMENT.run, ExperimentOptions("quick", out=tmp_path, progress=False)
    with pytest.raises(InputError, match="the ranking, which selects the hard alphabets, is not finished"):
        run(replace(options, only=("small-nal-1",)))
    ranked = run(replace(options, only=("ranking",)))
    assert [row.name for row in ranked.result.rows] == ["ranking, hard alphabets", "ranking, easy alphabets"]
    outcome = run(replace(options, only=("small-nal-1",)))
    assert [row.name for row in outcome.result.rows[2:]] == [f"small r_H, NAL-1, {kind}" for kind in TASK_KINDS]
    with pytest.raises(InputError, match=r"only is maml, .* its parts are ranking, large-maml"):
        run(replace(options, only=("maml",)))


@pytest.mark.parametrize("table", TABLES)
def test_the_paper_scale_needs_the_data_of_the_paper(table, tmp_path):
    with pytest.raises(InputError, match=r"the paper scale needs .* Use --scale quick"):
        table.EXPERIMENT.run(ExperimentOptions("paper", data=tmp_path, out=tmp_path))


def test_the_ranking_selects_the_hard_alphabets(options_and_outcomes):
    records = options_and_outcomes[landscape_table1][1].data
    ranking = records["landscape-table1-ranking-quick-0"]
    hard = hardest_alphabets(ranking)
    assert len(hard) == 4
    assert max(ranking.scores[name].mean for name in hard) <= min(
        score.mean for name, score in ranking.scores.items() if name not in hard
    )
    large = records["landscape-table1-large-maml-quick-0"].plan["alphabets"]
    assert {*large["hard train"], *large["hard test"]} == set(hard)
    small = records["landscape-table1-small-maml-quick-0"].plan["alphabets"]
    assert [*small["hard train"], *small["hard test"]] == hard[:2]


def record(scores: dict[str, Accuracy], seed: int = 0, images: str = "omniglot at 28 px") -> AccuracyRecord:
    """Return a record with these accuracies."""
    return AccuracyRecord("name", {"seed": seed, "images": images}, Machine("cpu", "", "", None), 1.0, scores)


# Omniglot has 50 alphabets. The last two of these names are those of the paper's similar alphabets.
NAMES = [f"alphabet {index}" for index in range(48)] + list(SIMILAR_ALPHABETS)


@pytest.mark.parametrize("variant", ["large", "small"])
@pytest.mark.parametrize("similar_alphabets", ["hard", "easy", "one of each"])
def test_splits_of_alphabets_are_disjoint_and_have_the_sizes_of_the_paper(variant, similar_alphabets):
    hard = {"hard": NAMES[-10:], "easy": NAMES[:10], "one of each": NAMES[39:49]}[similar_alphabets]
    ranking = record({name: Accuracy(0.5 if name in hard else 0.9, 0.01, 10) for name in NAMES})
    splits = split_alphabets(NAMES, ranking, variant, seed=3)
    assert list(splits) == list(TASK_KINDS)
    assert not any(set(a) & set(b) for a, b in combinations(splits.values(), 2))
    if variant == "large":
        assert [len(splits[kind]) for kind in TASK_KINDS] == [25, 5, 15, 5]  # 40 easy alphabets and 10 hard ones
        assert {*splits["hard train"], *splits["hard test"]} == set(hard)
    else:
        assert (splits["hard train"], splits["hard test"]) == (["Sanskrit"], ["Bengali"])
        assert len(splits["easy train"]) + len(splits["easy test"]) == 40 - len(set(SIMILAR_ALPHABETS) - set(hard))


def test_the_split_of_alphabets_depends_on_the_seed():
    ranking = record({name: Accuracy(index / 100, 0.01, 10) for index, name in enumerate(NAMES)})
    assert split_alphabets(NAMES, ranking, "large", 0) == split_alphabets(NAMES, ranking, "large", 0)
    assert split_alphabets(NAMES, ranking, "large", 0) != split_alphabets(NAMES, ranking, "large", 1)


def test_an_alphabet_too_small_for_the_ranking_is_easy():
    ranking = record({name: Accuracy(0.5, 0.01, 10) for name in NAMES})
    splits = split_alphabets([*NAMES, "tiny"], ranking, "large", 0)
    assert "tiny" in splits["easy train"] + splits["easy test"]


@pytest.fixture
def planned(monkeypatch) -> dict[str, PlannedRun]:
    """The planned runs of an experiment, by name. Nothing is trained, and only the ranking gets a record."""
    runs: dict[str, PlannedRun] = {}

    def train_nothing(options, experiment, images, planned):
        for run in planned:
            runs.setdefault(run.name, run)
        scores = [{kind: Accuracy(0.5, 0.01, 2) for kind in run.test_environments} for run in planned]
        return [record(s) if run.name == "ranking" else None for run, s in zip(planned, scores)]

    monkeypatch.setattr(landscape_table1, "train_all", train_nothing)
    monkeypatch.setattr(landscape_table2, "train_all", train_nothing)
    return runs


def points_per_class(environment, ways):
    """Return how many images a task has of each class, in its support and query set together."""
    tasks = environment.sample(2, torch.Generator().manual_seed(0)).without_split()
    return tasks.support_y.shape[1] / ways


def test_table_1_is_trained_as_in_the_paper(planned, glyphs, monkeypatch):
    monkeypatch.setattr(landscape_table1, "load_images", lambda options: glyphs)
    landscape_table1.measure(ExperimentOptions("paper"))
    for variant in ("large", "small"):
        # the second entry is the number of images per class: 1 or 10 shots and 10 queries
        for learner, points, lr in (("maml", 11, 1e-3), ("nal-1", 11, 1e-6), ("nal-10", 20, 1e-6)):
            run = planned[f"{variant}-{learner}"]
            assert run.training == Conv4Training(learner.partition("-")[0], lr, 20_000, batch_size=8, test_tasks=500)
            assert (run.training.steps, run.training.inner_lr, run.training.filters) == (1, 0.1, 64)
            assert points_per_class(run.train_environment, 5) == points
            assert run.train_environment.weights == (0.5, 0.5)
            assert [run.test_environments[kind].superclass for kind in TASK_KINDS] == ["different", "same"] * 2


def test_table_2_is_trained_as_in_the_paper(planned, monkeypatch):
    images = hold_out_images(numbered_images(100, 240), 60)
    monkeypatch.setattr(landscape_table2, "load_images", lambda options, settings: images)
    landscape_table2.measure(ExperimentOptions("paper"))
    for share in (0.99, 0.5, 0.01):
        # `points` are the images per class of easy and of hard tasks: 50 or 5 shots and 10 queries
        for learner, points, lr, steps in (("maml", (60, 15), 1e-3, 1), ("nal", (15, 15), 1e-6, 5)):
            run = planned[f"p{share}-{learner}"]
            assert run.training == Conv4Training(learner, lr, 10_000, batch_size=2, test_tasks=500, steps=steps)
            assert (run.training.inner_lr, run.training.filters) == (0.1, 64)
            assert tuple(points_per_class(part, part.ways) for part in run.train_environment.environments) == points
            assert run.train_environment.weights == pytest.approx((1 - share, share))
            assert run.train_environment.outputs == 20
            test_tasks = [run.test_environments[kind] for kind in TASK_KINDS]
            assert [(tasks.ways, tasks.shots, tasks.split) for tasks in test_tasks] == [
                (2, 50, "validation"),
                (20, 5, "validation"),
                (2, 50, "test"),
                (20, 5, "test"),
            ]


def test_records_have_the_keys_of_version_0_1_0(glyphs):
    plan = plan_two_runs(glyphs, 3)[0].empty_record(ExperimentOptions("quick"), "table", glyphs).plan
    keys = ["images", "method", "lr", "iterations", "tasks", "judged", "filters", "steps", "inner_lr", "seed"]
    assert list(plan) == keys
    assert (plan["tasks"], plan["judged"]) == (2, 3)


def test_rows_are_means_over_seeds_and_agree_if_intervals_overlap():
    records = [
        record({kind: Accuracy(mean, 0.03, 500) for kind in TASK_KINDS}, seed=seed)
        for seed, mean in ((0, 0.5), (1, 0.6))
    ]
    # Ours is 55 ± 2.12. All of these intervals overlap with it, except for the third.
    published = ((55.0, 0.1), (57.2, 0.1), (57.2, 0.0), (52.0, 1.0))
    rows = list(accuracy_rows("MAML", records, published, "omniglot"))
    assert [row.name for row in rows] == [f"MAML, {kind}" for kind in TASK_KINDS]
    assert rows[0].ours == pytest.approx(55)
    assert rows[0].ci95 == pytest.approx(3 / 2**0.5)
    assert [row.agrees for row in rows] == [True, True, False, True]
    assert "50.0 with seed 0, 60.0 with seed 1; interval over 1000 tasks" in rows[0].note
    assert list(accuracy_rows("MAML", [], published, "omniglot")) == []


@pytest.mark.parametrize("text", ["{}", '{"scores": []}'])
def test_an_error_names_a_malformed_record(text, options_and_outcomes, tmp_path):
    (tmp_path / "records").mkdir()
    file = tmp_path / "records" / "landscape-table2-p0.99-nal-quick-0.json"
    file.write_text(text)
    with pytest.raises(InputError, match=f"{file.name} is not a record of this version"):
        landscape_table2.EXPERIMENT.run(ExperimentOptions("quick", out=tmp_path, progress=False))


def test_the_figures_are_drawn(options_and_outcomes, tmp_path):
    for table in TABLES:
        table.EXPERIMENT.draw(options_and_outcomes[table][1], tmp_path / "figure.png")
        assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_planned_runs_are_trained_with_their_settings(glyphs, tmp_path):
    training = Conv4Training("maml", 0.02, 2, batch_size=3, test_tasks=2, filters=4, steps=2, inner_lr=0.3, seed=5)
    planned = PlannedRun("part", training, glyphs.tasks("train", queries=2), {}, {})
    train_all(ExperimentOptions("quick", out=tmp_path, progress=False), "table", glyphs, [planned])
    (folder,) = (tmp_path / "runs").iterdir()
    settings = RunFolder(folder).settings()
    assert [settings["training"][key] for key in ("iterations", "batch_size", "lr", "seed")] == [2, 3, 0.02, 5]
    assert (settings["method"]["inner"]["steps"], settings["method"]["inner"]["lr"]) == (2, 0.3)
    assert (settings["model"]["filters"], settings["model"]["seed"]) == (4, 5)
