from __future__ import annotations

import base64
import json
import re
from dataclasses import replace

import pytest
import torch

import metabridge as mb
from metabridge.diagnosis import Diagnosis, advice, diagnose, estimate, untrained
from metabridge.diagnosis.advice import NOTHING, WORTH, Advice, costs, kernel_twins
from metabridge.diagnosis.estimate import Geography, Interval, Prediction, hard_tasks, split_by_rate
from metabridge.diagnosis.moments import Moments, misfits, pair_moments, products, rates, regression_moments
from metabridge.environments import HardEasy, Landscape, LinearTasks, Quadratic, TaskGroup
from metabridge.environments.mixture import Mixture
from metabridge.errors import InputError
from metabridge.report import diagnosis as report
from metabridge.theory.landscape import Risks, hard_easy_risks, maml_solution, nal_solution, risk_above_floor

WORLD = HardEasy(rho_hard=0.1, rho_easy=1.0, R=3.0, r_hard=0.5, r_easy=1.0, dimension=5, noise=0.2)
ALIKE = HardEasy(rho_hard=0.5, rho_easy=1.0, R=0.0, r_hard=1.0, r_easy=1.0, dimension=5, noise=0.2)


def tasks(world: HardEasy | Landscape, shots: int = 100, queries: int = 20) -> LinearTasks:
    return LinearTasks(world if isinstance(world, Landscape) else world.landscape, shots, queries)


def moments_of(world: HardEasy | Landscape, count: int, shots: int, seed: int = 0) -> tuple[Moments, torch.Tensor]:
    """The moments of tasks, and which of them are truly hard."""
    episodes = tasks(world, shots, shots).sample(count, torch.Generator().manual_seed(seed))
    whole = episodes.without_split()
    return regression_moments(whole.support_x.double(), whole.support_y), episodes.classes[:, 0] == 0


@pytest.fixture(scope="module")
def found() -> Diagnosis:
    return diagnose(tasks(WORLD), alpha=0.9, tasks=400)


def test_the_symbols_of_a_known_world_are_found(found):
    hard, easy = found.groups
    assert found.distance == pytest.approx(WORLD.R, rel=0.1)
    assert hard.dispersion == pytest.approx(WORLD.r_hard, rel=0.15)
    assert easy.dispersion == pytest.approx(WORLD.r_easy, rel=0.15)
    assert hard.rate == pytest.approx(WORLD.rho_hard, rel=0.15)
    assert easy.rate == pytest.approx(WORLD.rho_easy, rel=0.15)
    assert found.m == 100


def test_the_predicted_ratio_is_that_of_corollary_1(found):
    assert found.ratio.value == pytest.approx(hard_easy_risks(WORLD, 0.9, 100).ratio, rel=0.1)
    assert found.ratio.low < found.ratio.value < found.ratio.high
    assert found.nal / found.maml == pytest.approx(found.ratio.value)
    assert found.advice == replace(found.advice, method="maml", adapts=True)


def test_groups_are_found_by_hardness():
    moments, hard = moments_of(WORLD, 200, 40)
    assert (split_by_rate(rates(moments)) == hard).all()
    assert (hard_tasks(moments) == hard).all()


def test_covariances_tell_groups_apart_whose_rates_overlap():
    moments, hard = moments_of(replace(WORLD, rho_hard=0.75, dimension=12), 200, 150)
    assert (split_by_rate(rates(moments)) != hard).sum() > 5
    assert (hard_tasks(moments) == hard).all()


def test_a_misfit_is_the_likelihood_of_a_covariance():
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(2, 30, 3, generator=generator).double()
    roots = torch.randn(2, 3, 3, generator=generator).double()
    shared = roots @ roots.mT
    found = misfits(regression_moments(points, points[..., :1]), shared)
    laws = [torch.distributions.MultivariateNormal(torch.zeros(3).double(), own) for own in shared]
    exact = torch.stack([-2 * law.log_prob(points).mean(1) for law in laws], 1)
    torch.testing.assert_close(found[:, 0] - found[:, 1], exact[:, 0] - exact[:, 1])


def test_random_covariances_are_predicted_too():
    generator = torch.Generator().manual_seed(3)
    roots = torch.randn(2, 4, 4, generator=generator).double()
    hard, easy = roots @ roots.mT / 4 + 0.1 * torch.eye(4).double()
    hard, easy = 0.1 * hard / hard.trace(), easy / easy.trace()
    landscape = Landscape((TaskGroup(hard, 3.0, 0.3, 0.1, 0.5), TaskGroup(easy, 0.0, 0.3, 0.1, 0.5)), 4)
    alpha, m = 1.0, 80
    exact = [
        risk_above_floor(landscape, w, alpha, m) for w in (nal_solution(landscape), maml_solution(landscape, alpha, m))
    ]
    moments, is_hard = moments_of(landscape, 600, m)
    predicted = Geography(moments, is_hard, m, 0.5).predict(alpha, torch.Generator().manual_seed(0))
    assert predicted.risks.ratio == pytest.approx(float(exact[0] / exact[1]), rel=0.1)
    assert predicted.risks.maml == pytest.approx(float(exact[1]), rel=0.15)


@pytest.mark.parametrize("shots", [4, 25], ids=["fewer points than dimensions", "points enough"])
def test_noise_of_few_points_is_not_taken_for_dispersion(shots):
    """Tasks of one group all have the same solution: what differs between estimates is noise alone."""
    world = HardEasy(rho_hard=0.5, rho_easy=1.0, R=1.0, dimension=10, noise=2.0)
    moments, hard = moments_of(world, 2000, shots)
    geography = Geography(moments, hard, shots)
    landscape = geography.landscape(0.5)
    naive = geography.solutions[hard].mean(1).T.cov().diagonal().mean()
    assert naive > 0.1
    assert landscape.groups[0].spread < 0.2 * naive
    assert geography.distance(landscape, 0.5) == pytest.approx(1.0, abs=0.15)


def test_intervals_hold_the_ratio_as_often_as_they_say(monkeypatch):
    monkeypatch.setattr(estimate, "REPEATS", 40)
    world = replace(WORLD, rho_hard=0.6, R=2.0, dimension=3)
    exact, held = hard_easy_risks(world, 0.9, 60).ratio, 0
    for seed in range(40):
        moments, hard = moments_of(world, 40, 60, seed)
        ratio = Geography(moments, hard, 60, 0.5).predict(0.9, torch.Generator().manual_seed(seed)).ratio
        held += ratio.low <= exact <= ratio.high
    assert 34 <= held < 40  # from 85 % on, and not by being as wide as all there is


def test_intervals_know_that_covariances_are_estimated():
    """Without noise and dispersion every task's solution is found exactly: the covariances alone are uncertain."""
    world = HardEasy(rho_hard=0.3, rho_easy=1.0, R=1.0, dimension=3)
    moments, hard = moments_of(world, 60, 30)
    ratio = Geography(moments, hard, 30, 0.5).predict(0.9, torch.Generator().manual_seed(0)).ratio
    assert ratio.low < hard_easy_risks(world, 0.9, 30).ratio < ratio.high
    assert ratio.high - ratio.low > 0.01


def test_a_step_that_few_tasks_tell_of_does_not_diverge_on_resampled_ones():
    """The steepest of few tasks decides the step: resampled without it, or with it twice, they have another."""
    moments, hard = moments_of(WORLD, 40, 20)
    steep = torch.ones(40, 1, 1, 1).double()
    steep[(~hard).nonzero()[0]] = 300.0
    geography = Geography(replace(moments, covariance=steep * moments.covariance), hard, 20, 0.5)
    ratio = geography.predict(None, torch.Generator().manual_seed(0)).ratio
    assert 1 <= ratio.low <= ratio.value <= ratio.high
    fixed = geography.predict(geography.stable_step(), torch.Generator().manual_seed(0)).ratio
    assert 1 <= fixed.low <= fixed.value <= fixed.high


def test_where_tasks_lie_in_one_place_nothing_beats_plain_pre_training():
    found = diagnose(tasks(ALIKE), alpha=0.9, tasks=150)
    assert found.ratio.value == pytest.approx(1, abs=0.02)
    assert found.ratio.low >= 1  # MAML has the least risk there is
    assert not found.advice.adapts
    assert found.advice.method == "nal"
    assert NOTHING in found.told().lower()


def test_the_recommendation_turns_where_the_gain_is_worth_it(found):
    assert found.ratio.low > WORTH
    assert found.advice.confidence == 1
    assert "MAML" in found.advice.headline
    assert NOTHING in Advice("nal", False, 0.9, ()).headline.lower()


def test_the_same_seed_gives_the_same_diagnosis(found):
    again = diagnose(tasks(WORLD), alpha=0.9, tasks=400)
    assert again == found
    assert diagnose(tasks(WORLD), alpha=0.9, tasks=400, seed=1) != found


def test_pairs_have_the_length_of_the_matrix_they_stand_for():
    a, b = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0)).double()
    symmetric = (a[..., None] * b[..., None, :] + b[..., None] * a[..., None, :]) / 2
    torch.testing.assert_close(products(a, b).square().sum(-1), symmetric.square().sum((-2, -1)))


def test_which_class_is_called_the_first_changes_nothing():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(3, 40, 4, generator=generator).double()
    labels = torch.arange(5).repeat(3, 8)
    renamed = torch.tensor([3, 0, 4, 1, 2])[labels]
    # the order of the classes decides which points are in a half, so that points go along with their names
    order, other = labels.argsort(dim=1, stable=True), renamed.argsort(dim=1, stable=True)
    assert not torch.equal(order, other)
    first, second = pair_moments(features, labels), pair_moments(features, renamed)
    torch.testing.assert_close(first.covariance, second.covariance)
    torch.testing.assert_close(first.pull, second.pull)


def test_the_metric_of_classes_apart_along_one_direction_is_that_direction():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(4).repeat_interleave(50)[None]
    features = torch.randn(1, 200, 3, generator=generator).double()
    features[..., 0] += 4 * (labels - 1.5)
    moments = pair_moments(features, labels)
    solution = moments.solutions(moments.covariance.mean(1)).mean(1)[0]
    assert solution.abs().argmax() == 0


def test_superclasses_of_images_can_be_the_groups(glyphs):
    found = diagnose(glyphs.tasks("train", queries=5), untrained(glyphs), groups="superclasses", tasks=24)
    assert [group.tasks for group in found.groups] == [12, 12]
    assert found.space == "pairs of features"
    assert found.m == 10  # pairs of five images
    assert [cost.method for cost in found.costs] == ["rfs", "mtl", "anil", "maml"]


def test_parts_of_a_mixture_can_be_the_groups():
    hard, easy = (tasks(Landscape((replace(group, probability=1.0),), 5)) for group in WORLD.landscape.groups)
    found = diagnose(Mixture((hard, easy), (0.5, 0.5)), groups="parts", alpha=0.9, tasks=200)
    assert found.ratio.value == pytest.approx(hard_easy_risks(WORLD, 0.9, 100).ratio, rel=0.15)


def test_features_of_a_network_serve_regression():
    found = diagnose(Quadratic(shots=20, queries=20), mb.models.mlp(10, 1), tasks=24)
    assert found.space == "features and a constant"
    assert found.dimension == 10
    assert [cost.method for cost in found.costs] == ["nal", "anil", "maml"]


def test_costs_are_those_of_the_presets():
    net = mb.models.mlp(4, 2, width=8)
    by_name = {cost.method: cost for cost in costs(("rfs", "anil", "maml", "fo-maml"), net, 0)}
    everything, head = sum(value.numel() for value in net.parameters()), 8 * 2 + 2
    assert (by_name["maml"].moved, by_name["maml"].gradients, by_name["maml"].training) == (everything, 5, 16)
    assert (by_name["anil"].moved, by_name["anil"].gradients) == (head, 0)
    assert by_name["rfs"].training == 1 < by_name["anil"].training < by_name["fo-maml"].training == 6


def test_twins_are_judged_beside_the_support_alone(monkeypatch):
    monkeypatch.setattr(advice, "TRAINING_POINTS", 200)
    twins = kernel_twins(mb.kernels.fully_connected(depth=3), Quadratic(), seed=0)
    assert [twin.method for twin in twins] == ["support alone", "mtl", "anil", "maml"]
    assert twins[0].gain == 0
    assert twins[1].gain == pytest.approx(twins[0].mean - twins[1].mean)  # of a squared error, less is better
    assert twins[1].gain > twins[1].gain_ci95


def test_the_page_holds_its_pictures_and_the_json_all_numbers(found, tmp_path):
    html = report.write(found, tmp_path).read_text()
    sources = re.findall(r'(?:src|srcset|href)="([^"]*)"', html)
    assert len(sources) == 2 * 3
    for source in sources:
        assert base64.b64decode(source.removeprefix("data:image/png;base64,"), validate=True).startswith(b"\x89PNG")
    assert found.advice.headline in html
    stored = json.loads((tmp_path / "diagnosis.json").read_text())
    assert stored["ratio"]["value"] == found.ratio.value
    assert len(stored["rates"]) == len(stored["places"]) == 400


def test_the_command_writes_a_page(metabridge, glyphs, tmp_path):
    status, printed, _ = metabridge(
        "diagnose", "--out", tmp_path, "--tasks", 20, "--queries", 5, "--no-twins", "--device", "cpu"
    )
    assert status == 0
    assert "rate" in printed
    assert {"index.html", "diagnosis.json", "hardness.png", "map.png", "gain.png"} == {
        file.name for file in tmp_path.iterdir()
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"alpha": 3.0}, "alpha is 3.0, but steps of"),
        ({"alpha": 0.0}, "alpha is 0.0, but must be a positive number"),
        ({"tasks": 6}, "tasks is 6, but two groups need at least 10"),
        ({"groups": "superclasses"}, "only tasks of images have them"),
        ({"groups": "parts"}, "no Mixture of two"),
        ({"groups": "colours"}, "groups is 'colours', but must be one of"),
        ({"net": mb.models.mlp(5, 1), "features": torch.tanh}, "net and features are both given"),
    ],
)
def test_what_cannot_be_diagnosed_is_refused(options, words):
    with pytest.raises(InputError, match=re.escape(words)):
        diagnose(tasks(WORLD), **({"tasks": 40} | options))


def test_a_singular_covariance_is_refused():
    moments, hard = moments_of(WORLD, 40, 20)
    flat = torch.zeros_like(moments.covariance)
    with pytest.raises(InputError, match="the covariance of a task's features is singular"):
        Geography(replace(moments, covariance=flat), hard, 20).landscape(0.5)


def test_more_than_one_value_at_a_point_is_refused():
    with pytest.raises(InputError, match="Diagnose the outputs one by one"):
        regression_moments(torch.zeros(2, 8, 3).double(), torch.zeros(2, 8, 2))


def test_images_without_features_are_refused(glyphs):
    with pytest.raises(InputError, match="Give net or features"):
        diagnose(glyphs.tasks("train"), tasks=20)


@pytest.mark.parametrize("kinds", ["one", "each"])
def test_classes_without_superclasses_cannot_be_grouped_by_them(glyphs, kinds):
    count = len(glyphs.class_names)
    own = torch.zeros(count, dtype=torch.int64) if kinds == "one" else torch.arange(count)
    bare = replace(glyphs, superclasses=own, superclass_names=tuple(map(str, range(count))))
    with pytest.raises(InputError, match="no superclasses to group by"):
        diagnose(bare.tasks("train"), untrained(glyphs), groups="superclasses", tasks=20)


def test_a_task_with_nothing_to_fit_does_not_turn_the_groups_around():
    moments, hard = moments_of(WORLD, 200, 40)
    empty = torch.zeros(200, dtype=torch.bool)
    empty[[3, 77]] = True
    bare = replace(moments, pull=torch.where(empty[:, None, None], 0, moments.pull))
    assert rates(bare).isfinite().all()
    assert torch.equal(rates(bare)[~empty], rates(moments)[~empty])
    assert (hard_tasks(bare) == hard).all()


def test_where_there_is_nothing_to_gain_the_ratio_is_one(tmp_path):
    nothing = HardEasy(rho_hard=0.1, rho_easy=1.0, R=0.0, r_hard=0.0, r_easy=0.0, dimension=3, noise=0.0)
    found = diagnose(tasks(nothing, 20, 20), tasks=40)
    assert found.ratio.value == 1
    assert not found.advice.adapts
    assert report.write(found, tmp_path).exists()
    json.loads(found.to_json())


def test_tasks_without_pairs_of_one_class_are_refused(glyphs):
    with pytest.raises(InputError, match=r"no two images of one class.*Use queries=2"):
        diagnose(glyphs.tasks("train", shots=1, queries=1), untrained(glyphs), tasks=20)


def predicted(ratio: float, ratios: list[float]) -> Prediction:
    told = torch.tensor(ratios, dtype=torch.float64)
    interval = Interval(ratio, float(told.min()), float(told.max()))
    return Prediction(Risks(ratio, 1.0), interval, Interval(0.1, 0.05, 0.2), 0.1, told)


@pytest.mark.parametrize(("ratios", "adapts"), [([1.0, 1.1, 9.0], False), ([1.0, 1.5, 9.0], True)])
def test_the_advice_is_what_most_resampled_tasks_say(ratios, adapts):
    found = advice.advise(predicted(2.0, ratios), "nal", "maml", (0.1, 1.0), ())
    assert (found.adapts, found.method) == (adapts, "maml" if adapts else "nal")
    assert found.confidence == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("faster", "words"), [(0.1, "those named hard are the fast ones"), (1.2, "little tells them apart")]
)
def test_groups_that_are_not_what_they_are_called_are_said_to_be_so(faster, words):
    found = advice.advise(predicted(2.0, [2.0]), "nal", "maml", (1.0, faster), ())
    assert any(words in reason for reason in found.reasons)


def test_a_step_below_the_limit_of_the_tasks_is_taken_whatever_resampled_ones_allow():
    few = tasks(WORLD, 20, 20)
    with pytest.raises(InputError, match=r"alpha is 100\.0, but steps of") as refused:
        diagnose(few, alpha=100.0, tasks=40)
    most = float(re.search(r"steps of ([\d.]+)", str(refused.value))[1])
    assert diagnose(few, alpha=0.999 * most, tasks=40).alpha == 0.999 * most


def test_what_kernels_cannot_be_computed_is_left_out_and_said(monkeypatch, caplog):
    def refuse(*_, **__):
        raise InputError("points 0 and 1 are the same")

    monkeypatch.setattr("metabridge.diagnosis.diagnosis.kernel_twins", refuse)
    found = diagnose(tasks(ALIKE), tasks=40, kernel=mb.kernels.fully_connected(depth=2))
    assert found.twins == ()
    assert "what kernels predict is left out: points 0 and 1 are the same" in caplog.text


def test_risks_have_a_ratio_where_there_are_none():
    assert hard_easy_risks(HardEasy(0.1, 1.0, R=2.0), 1.0, float("inf")).ratio == float("inf")
    assert Risks(0.0, 0.0).ratio == 1


def test_points_that_are_not_finite_are_refused():
    def lost(x):
        return x.sqrt()  # of negative numbers too

    with pytest.raises(InputError, match="some features are NaN or infinite"):
        diagnose(tasks(WORLD), features=lost, tasks=40)


def test_few_tasks_are_warned_of(caplog):
    diagnose(tasks(WORLD), tasks=20)
    assert "intervals from fewer than 50 are too narrow" in caplog.text
    caplog.clear()
    diagnose(tasks(WORLD), tasks=50)
    assert not caplog.text


def test_joined_moments_have_the_points_of_the_part_that_has_fewest():
    first, second = (moments_of(WORLD, 5, shots)[0] for shots in (40, 10))
    assert Moments.joined([first, second]).points == second.points < first.points
