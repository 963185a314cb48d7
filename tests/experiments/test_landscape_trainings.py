from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from types import ModuleType

import pytest
import torch

from metabridge.environments import LabelledImages
from metabridge.errors import InputError
from metabridge.experiments import (
    ExperimentOptions,
    Result,
    landscape_table1,
    landscape_table2,
    landscape_trainings,
    load_experiment,
)
from metabridge.experiments.landscape_table1 import ALIKE, alphabets, divided, hardest
from metabridge.experiments.landscape_table2 import held_out
from metabridge.experiments.landscape_trainings import KINDS, Accuracy, Asked, Outcome, Record, Training, rows, trained
from metabridge.experiments.result import Environment
from metabridge.training import Fitting, fitting
from metabridge.training.checkpoint import RunFolder

TABLES = (landscape_table1, landscape_table2)


@pytest.fixture(scope="module")
def done(glyphs, tmp_path_factory) -> Iterator[dict[ModuleType, tuple[ExperimentOptions, Outcome]]]:
    """Both experiments, run to the end at a scale of seconds; the settings stay so for the whole module."""
    with pytest.MonkeyPatch.context() as patch:
        for table in TABLES:
            quick = table.SCALES["quick"]
            tiny = replace(quick.training, iterations=2, tasks=2, judged=2, filters=4)
            small = {"ranking_tasks": 3} if table is landscape_table1 else {"hard": (6, 1)}
            patch.setitem(table.SCALES, "quick", replace(quick, training=tiny, seeds=2, **small))
        works = {
            table: ExperimentOptions("quick", out=tmp_path_factory.mktemp("out"), progress=False) for table in TABLES
        }
        yield {table: (work, table.run(work)) for table, work in works.items()}


@pytest.mark.parametrize("table", TABLES)
def test_every_published_number_has_a_row_beside_it(table, done):
    work, outcome = done[table]
    published = [value for own in table.PUBLISHED.values() for value, _ in own]
    beside = [row for row in outcome.result.rows if row.published is not None]
    assert [row.published for row in beside] == published
    assert all(row.ci95 is not None and 0 <= row.ours <= 100 for row in beside)
    assert len({row.name for row in outcome.result.rows}) == len(outcome.result.rows)
    assert Result.read(outcome.result.write(work.out)) == outcome.result
    assert load_experiment(table.ID) is table.EXPERIMENT


@pytest.mark.parametrize("table", TABLES)
def test_numbers_on_stand_in_data_say_so_and_are_not_held_against_the_paper(table, done):
    for row in done[table][1].result.rows:
        assert row.agrees is None
        assert "glyphs at 28 px" in row.note
        assert "not " in row.note or row.published is None


@pytest.mark.parametrize("table", TABLES)
def test_called_again_it_reads_its_records_and_trains_nothing(table, done, monkeypatch):
    work, outcome = done[table]
    monkeypatch.setattr(landscape_trainings, "Fitting", None)
    again = table.run(work)
    assert again == outcome
    assert table.run(replace(work, only=tuple(table.PUBLISHED)[:1])) == outcome


@pytest.mark.parametrize(("table", "name"), [(landscape_table1, "large-nal-1"), (landscape_table2, "p0.5-nal")])
def test_a_changed_setting_trains_anew_beside_the_old_run(table, name, done, monkeypatch, tmp_path):
    work, outcome = done[table]
    shutil.copytree(work.out, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(table, "NAL_LR", 1e-5)
    before = len(list((tmp_path / "runs").iterdir()))
    found = table.run(replace(work, out=tmp_path, only=(name,)))
    assert len(list((tmp_path / "runs").iterdir())) == before + 2  # a run a seed
    label = f"{table.ID}-{name}-quick-0"
    assert found.records[label].plan == outcome.records[label].plan | {"lr": 1e-5}


def test_a_training_that_is_stopped_goes_on_to_the_same_numbers(done, tmp_path):
    _, outcome = done[landscape_table2]
    work = ExperimentOptions("quick", out=tmp_path, only=("p0.5-maml",), progress=False)
    with pytest.raises(InputError, match="no training of landscape-table2 is finished"):
        landscape_table2.run(replace(work, minutes=0.0))
    found = landscape_table2.run(work)
    assert len(found.result.rows) == len(KINDS)
    for name, record in found.records.items():
        assert record.scores == outcome.records[name].scores


@pytest.fixture
def two_at_once(monkeypatch) -> None:
    """Let a CPU train two nets in turns."""
    monkeypatch.setitem(fitting.AT_ONCE, "cpu", 2)


def pair(glyphs, iterations: int) -> list[Asked]:
    """Two trainings of tiny nets, of other methods and seeds."""
    tasks = glyphs.tasks("train", queries=2)
    methods = enumerate(("maml", "nal"))
    hows = [Training(name, 1e-2, iterations, tasks=2, judged=3, filters=4, seed=seed) for seed, name in methods]
    return [Asked(how.method, how, tasks, {"test": glyphs.tasks("test", queries=2)}, {}) for how in hows]


def weights(work: ExperimentOptions) -> dict[str, torch.Tensor]:
    """The weights of all runs in a folder, by the name of the run and their own."""
    read = {folder.name: RunFolder(folder).read("weights") for folder in (work.out / "runs").iterdir()}
    return {f"{run}/{name}": value for run, (tensors, _) in read.items() for name, value in tensors.items()}


def test_trainings_in_turns_end_as_they_do_one_after_the_other(glyphs, two_at_once, monkeypatch, tmp_path, capsys):
    steps, step = [], Fitting.step

    def noted(one: Fitting) -> bool:
        steps.append(one.loop.settings.seed)
        return step(one)

    monkeypatch.setattr(Fitting, "step", noted)
    asked = pair(glyphs, iterations=6)
    beside = ExperimentOptions("quick", out=tmp_path / "beside")
    assert trained(replace(beside, minutes=0.0), "table", glyphs, asked) == [None, None]
    found = trained(beside, "table", glyphs, asked)
    assert steps == [0, 1] * 6
    said = capsys.readouterr().err
    assert all(f"{each.label} 6/6: loss" in said for each in asked)

    monkeypatch.delitem(fitting.AT_ONCE, "cpu")
    steps.clear()
    apart = ExperimentOptions("quick", out=tmp_path / "apart", progress=False)
    alone = trained(apart, "table", glyphs, asked)
    assert steps == [0] * 6 + [1] * 6
    assert [(one.name, one.plan, one.scores) for one in found] == [(one.name, one.plan, one.scores) for one in alone]
    assert trained(beside, "table", glyphs, asked) == found
    here, there = weights(beside), weights(apart)
    assert here.keys() == there.keys()
    assert all(torch.equal(value, there[name]) for name, value in here.items())


def test_where_one_of_several_trainings_fails_its_error_is_raised_and_the_others_are_saved(
    glyphs, two_at_once, monkeypatch, tmp_path
):
    step = Fitting.step

    def failing(one: Fitting) -> bool:
        if one.loop.settings.seed == 1 and one.loop.iteration == 3:
            raise InputError("this one fails.")
        return step(one)

    monkeypatch.setattr(Fitting, "step", failing)
    with pytest.raises(InputError, match="this one fails"):
        trained(ExperimentOptions("quick", out=tmp_path, progress=False), "table", glyphs, pair(glyphs, 1000))
    states = [RunFolder(folder).read("state") for folder in sorted((tmp_path / "runs").iterdir())]
    assert [notes["iteration"] for _, notes in states] == [4, 3]
    assert not (tmp_path / "records").exists()


def test_only_the_trainings_named_are_done_and_the_others_rows_are_missing(done, tmp_path):
    work = ExperimentOptions("quick", out=tmp_path, progress=False)
    with pytest.raises(InputError, match="the hard alphabets come from the ranking, which is not finished"):
        landscape_table1.run(replace(work, only=("small-nal-1",)))
    ranked = landscape_table1.run(replace(work, only=("ranking",)))
    assert [row.name for row in ranked.result.rows] == ["ranking, hard alphabets", "ranking, easy alphabets"]
    found = landscape_table1.run(replace(work, only=("small-nal-1",)))
    assert [row.name for row in found.result.rows[2:]] == [f"small r_H, NAL-1, {kind}" for kind in KINDS]
    with pytest.raises(InputError, match="only names maml, but the trainings are ranking, large-maml"):
        landscape_table1.run(replace(work, only=("maml",)))


@pytest.mark.parametrize("table", TABLES)
def test_the_paper_scale_asks_for_its_data(table, tmp_path):
    with pytest.raises(InputError, match=r"the paper scale needs .* Use --scale quick"):
        table.run(ExperimentOptions("paper", data=tmp_path, out=tmp_path))


def test_the_hard_alphabets_are_those_of_the_rankings_record(done):
    outcome = done[landscape_table1][1]
    ranking = outcome.records["landscape-table1-ranking-quick-0"]
    hard = hardest(ranking)
    assert len(hard) == 4
    assert max(ranking.scores[name].mean for name in hard) <= min(
        score.mean for name, score in ranking.scores.items() if name not in hard
    )
    large = outcome.records["landscape-table1-large-maml-quick-0"].plan["alphabets"]
    assert {*large["hard train"], *large["hard test"]} == set(hard)
    small = outcome.records["landscape-table1-small-maml-quick-0"].plan["alphabets"]
    assert [*small["hard train"], *small["hard test"]] == hard[:2]


def record(scores: dict[str, Accuracy], seed: int = 0, images: str = "omniglot at 28 px") -> Record:
    return Record("name", {"seed": seed, "images": images}, Environment("cpu", "", "", None), 1.0, scores)


NAMES = [f"alphabet {index}" for index in range(48)] + list(ALIKE)


@pytest.mark.parametrize("setting", ["large", "small"])
@pytest.mark.parametrize("alike", ["hard", "easy", "one of each"])
def test_no_alphabet_is_in_two_splits_and_their_numbers_are_the_papers(setting, alike):
    low = {"hard": NAMES[-10:], "easy": NAMES[:10], "one of each": NAMES[39:49]}[alike]
    ranking = record({name: Accuracy(0.5 if name in low else 0.9, 0.01, 10) for name in NAMES})
    parts = divided(NAMES, ranking, setting, seed=3)
    assert not any(set(one) & set(other) for one, other in combinations(parts.values(), 2))
    if setting == "large":
        assert [len(parts[kind]) for kind in KINDS] == [25, 5, 15, 5]
        assert {*parts["hard train"], *parts["hard test"]} == set(low)
    else:
        assert (parts["hard train"], parts["hard test"]) == (["Sanskrit"], ["Bengali"])
        assert len(parts["easy train"]) + len(parts["easy test"]) == 40 - len(set(ALIKE) - set(low))


def test_a_seed_gives_the_same_split_and_another_seed_another():
    ranking = record({name: Accuracy(index / 100, 0.01, 10) for index, name in enumerate(NAMES)})
    assert divided(NAMES, ranking, "large", 0) == divided(NAMES, ranking, "large", 0)
    assert divided(NAMES, ranking, "large", 0) != divided(NAMES, ranking, "large", 1)


def test_an_alphabet_too_small_to_be_ranked_is_easy():
    ranking = record({name: Accuracy(0.5, 0.01, 10) for name in NAMES})
    parts = divided([*NAMES, "tiny"], ranking, "large", 0)
    assert "tiny" in parts["easy train"] + parts["easy test"]


def test_alphabets_are_gathered_out_of_all_splits(glyphs):
    own = alphabets(glyphs)
    assert list(own) == list(glyphs.superclass_names)
    assert torch.equal(torch.cat(list(own.values())).sort().values, torch.arange(len(glyphs.class_names)))
    for name, members in own.items():
        assert {glyphs.superclass_names[index] for index in glyphs.superclasses[members].tolist()} == {name}


def pictures(classes: int, each: int) -> LabelledImages:
    """Images whose two pixels say their class and their own index among its images."""
    labels = torch.arange(classes).repeat_interleave(each)
    own = torch.arange(each).repeat(classes)
    return LabelledImages(
        images=torch.stack([labels, own], dim=-1).to(torch.uint8)[:, None, None, :],
        labels=labels,
        class_names=tuple(f"class{index}" for index in range(classes)),
        superclasses=torch.zeros(classes, dtype=torch.int64),
        superclass_names=("all",),
        splits=dict(zip(("train", "validation", "test"), torch.arange(classes).split([64, 16, 20]))),
    )


@pytest.mark.parametrize(("each", "least", "held"), [(600, 60, 150), (20, 10, 10)])
def test_images_of_training_classes_are_parted_and_those_of_test_classes_are_not(each, least, held):
    images = pictures(100, each)
    parted = held_out(images, least)
    assert {split: len(own) for split, own in parted.splits.items()} == {"train": 80, "validation": 80, "test": 20}
    counts = parted.labels.bincount()
    assert (counts[parted.splits["train"]] == each - held).all()
    assert (counts[parted.splits["validation"]] == held).all()
    assert (counts[parted.splits["test"]] == each).all()
    for kept, apart in zip(parted.splits["train"], parted.splits["validation"]):
        shown = images.labels[(parted.labels == kept) | (parted.labels == apart)]
        assert (shown == kept).all()
    assert parted.class_names[100] == "class0 (held out)"


@pytest.fixture
def asked(monkeypatch):
    """The trainings of the paper scale: how each is trained, on which tasks, judged on which; none is done."""
    calls = {}

    def note(work, table, images, asked):
        for each in asked:
            calls.setdefault(each.part, (each.how, each.tasks, each.kinds))
        scores = [{name: Accuracy(0.5, 0.01, 2) for name in each.kinds} for each in asked]
        return [record(own) if each.part == "ranking" else None for each, own in zip(asked, scores)]

    monkeypatch.setattr(landscape_table1, "trained", note)
    monkeypatch.setattr(landscape_table2, "trained", note)
    return calls


def points_a_class(environment, ways):
    tasks = environment.sample(2, torch.Generator().manual_seed(0)).without_split()
    return tasks.support_y.shape[1] / ways


def test_table_1_is_trained_as_the_paper_says(asked, glyphs, monkeypatch):
    monkeypatch.setattr(landscape_table1, "_images", lambda work: glyphs)
    landscape_table1.run(ExperimentOptions("paper"))
    for setting in ("large", "small"):
        for learner, points, lr in (("maml", 11, 1e-3), ("nal-1", 11, 1e-6), ("nal-10", 20, 1e-6)):
            how, tasks, kinds = asked[f"{setting}-{learner}"]
            assert (how.iterations, how.tasks, how.judged, how.lr) == (20_000, 8, 500, lr)
            assert (how.method, how.steps, how.inner_lr, how.filters) == (learner.partition("-")[0], 1, 0.1, 64)
            assert points_a_class(tasks, 5) == points
            assert tasks.weights == (0.5, 0.5)
            assert [kinds[kind].superclass for kind in KINDS] == ["different", "same"] * 2


def test_table_2_is_trained_as_the_paper_says(asked, monkeypatch):
    images = held_out(pictures(100, 240), 60)
    monkeypatch.setattr(landscape_table2, "_images", lambda work, scale: images)
    with pytest.raises(InputError, match="no training that is finished"):
        landscape_table2.run(ExperimentOptions("paper"))
    for share in (0.99, 0.5, 0.01):
        for learner, points, lr, steps in (("maml", (60, 15), 1e-3, 1), ("nal", (15, 15), 1e-6, 5)):
            how, tasks, kinds = asked[f"p{share}-{learner}"]
            assert (how.iterations, how.tasks, how.judged, how.lr) == (10_000, 2, 500, lr)
            assert (how.method, how.steps, how.inner_lr, how.filters) == (learner, steps, 0.1, 64)
            assert tuple(points_a_class(own, own.ways) for own in tasks.environments) == points
            assert tasks.weights == pytest.approx((1 - share, share))
            assert tasks.outputs == 20
            forms = [(kinds[kind].ways, kinds[kind].shots, kinds[kind].split) for kind in KINDS]
            assert forms == [(2, 50, "validation"), (20, 5, "validation"), (2, 50, "test"), (20, 5, "test")]


def test_rows_are_means_over_seeds_and_agree_where_intervals_meet():
    both = [
        record({kind: Accuracy(mean, 0.03, 500) for kind in KINDS}, seed=seed) for seed, mean in ((0, 0.5), (1, 0.6))
    ]
    published = ((55.0, 0.1), (57.2, 0.1), (57.2, 0.0), (52.0, 1.0))
    made = rows("MAML", both, published, "omniglot")
    assert [row.name for row in made] == [f"MAML, {kind}" for kind in KINDS]
    assert made[0].ours == pytest.approx(55)
    assert made[0].ci95 == pytest.approx(3 / 2**0.5)
    assert [row.agrees for row in made] == [True, True, False, True]
    assert "50.0 with seed 0, 60.0 with seed 1; interval over 1000 tasks" in made[0].note
    assert rows("MAML", [], published, "omniglot") == []


@pytest.mark.parametrize("text", ["{}", '{"scores": []}'])
def test_a_record_of_another_form_is_refused_by_name(text, done, tmp_path):
    (tmp_path / "records").mkdir()
    file = tmp_path / "records" / "landscape-table2-p0.99-nal-quick-0.json"
    file.write_text(text)
    with pytest.raises(InputError, match="is not a record of this version"):
        landscape_table2.run(ExperimentOptions("quick", out=tmp_path, progress=False))


def test_the_figure_is_a_picture(done, tmp_path):
    for table in TABLES:
        table.figure(done[table][1], tmp_path / "figure.png")
        assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
