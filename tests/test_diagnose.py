from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass, replace

import pytest
import torch
from scipy import stats

import metabridge as mb
from metabridge.diagnosis import Diagnosis, advice, diagnose, estimates, untrained
from metabridge.diagnosis.advice import NOTHING, RIDGES, WORTH, Advice, Twin, costs, kernel_twins
from metabridge.diagnosis.diagnose_tasks import _share
from metabridge.diagnosis.estimates import Geography, Interval, Prediction, hard_tasks, split_by_rate
from metabridge.diagnosis.moments import (
    Moments,
    curvatures,
    misfits,
    pair_moments,
    products,
    rates,
    regression_moments,
)
from metabridge.environments import HardEasy, Landscape, LinearTasks, Quadratic, TaskGroup
from metabridge.environments.mixture import Mixture
from metabridge.episodes import Episodes
from metabridge.errors import InputError
from metabridge.intervals import percentile_tail
from metabridge.report import diagnosis_page as report
from metabridge.theory.landscape import (
    Risks,
    adapted_covariance,
    hard_easy_risks,
    maml_solution,
    nal_solution,
    risk_above_floor,
)

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
    assert found.limit == pytest.approx(1 + found.distance**2 / found.groups[0].dispersion)
    assert found.limit == pytest.approx(1 + WORLD.R**2 / WORLD.r_hard, rel=0.2)


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


@pytest.mark.parametrize(("count", "widest"), [(10, 0.6), (40, 0.2)])
def test_intervals_hold_the_ratio_as_often_as_they_say(count, widest, monkeypatch):
    monkeypatch.setattr(estimates, "REPEATS", 60)
    world = replace(WORLD, rho_hard=0.6, R=2.0, dimension=3)
    exact, held, widths = hard_easy_risks(world, 0.9, 60).ratio, 0, []
    for seed in range(30):
        moments, hard = moments_of(world, 3 * count, 60, seed)
        own = torch.cat([each.nonzero().flatten()[: count // 2] for each in (hard, ~hard)])
        geography = Geography(moments.of_tasks(own), hard[own], 60, 0.5)
        ratio = geography.predict(0.9, torch.Generator().manual_seed(seed)).ratio
        held += ratio.low <= exact <= ratio.high
        widths.append((ratio.high - ratio.low) / ratio.value)
    assert held >= stats.binom.interval(0.999, 30, 0.95)[0]
    assert sorted(widths)[15] < widest  # and not by being as wide as all there is


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
    for step in (geography.stable_step(), 1 / geography.curvature):
        ratio = geography.predict(step, torch.Generator().manual_seed(0)).ratio
        assert 1 <= ratio.low <= ratio.value <= ratio.high


def test_where_tasks_lie_in_one_place_nothing_beats_plain_pre_training():
    found = diagnose(tasks(ALIKE), alpha=0.9, tasks=150)
    assert found.ratio.value == pytest.approx(1, abs=0.02)
    assert found.ratio.low >= 1  # MAML has the least risk there is
    assert found.advice.adapts is False
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
    twins = kernel_twins(mb.kernels.fully_connected_kernel(depth=3), Quadratic(), seed=0)
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
    assert found.advice.adapts is False
    assert found.limit is None
    assert report.write(found, tmp_path).exists()
    json.loads(found.to_json())


def test_tasks_without_pairs_of_one_class_are_refused(glyphs):
    with pytest.raises(InputError, match=r"no two images of one class.*Use queries=2"):
        diagnose(glyphs.tasks("train", shots=1, queries=1), untrained(glyphs), tasks=20)


def predicted(ratio: float, ratios: list[float], saved: float = 0.1, left: float = 0.1) -> Prediction:
    told = torch.tensor(ratios, dtype=torch.float64)
    interval = Interval(ratio, float(told.min()), float(told.max()))
    savings = torch.full_like(told, saved)
    return Prediction(Risks(ratio, 1.0), interval, Interval(saved, saved / 2, 2 * saved), left, told, savings)


def advised(prediction: Prediction, *twins: Twin, doubts: tuple[str, ...] = ()) -> Advice:
    return advice.advise(prediction, "nal", "anil", (0.1, 1.0), twins, doubts)


@pytest.mark.parametrize(("ratios", "adapts"), [([*4 * [1.1], 9.0], False), ([1.1, *4 * [WORTH]], True)])
def test_the_advice_is_what_most_resampled_tasks_say(ratios, adapts):
    found = advised(predicted(2.0, ratios))
    assert (found.adapts, found.method) == (adapts, "anil" if adapts else "nal")
    assert found.confidence == pytest.approx(0.8)


@pytest.mark.parametrize("adapting", [4, 5, 6])
def test_nothing_is_recommended_where_resampled_tasks_do_not_agree(adapting):
    found = advised(predicted(2.0, [1.1] * (9 - adapting) + [9.0] * adapting))
    assert (found.adapts, found.method) == (None, None)
    assert found.confidence == pytest.approx(max(adapting, 9 - adapting) / 9)
    assert re.match(r"Undecided: (44|56|67) % of resampled sets of tasks favour.*sample more", found.headline)


def test_where_the_ratio_has_no_upper_bound_the_headline_agrees_with_the_text():
    unsure = advised(predicted(2.0, [*99 * [1.0], 1e9]))
    assert unsure.adapts is None
    assert "no upper bound" in unsure.headline
    sure = advised(predicted(1e9, [*99 * [1e9], 1.3]))
    assert sure.adapts is True
    assert any("no upper bound" in reason for reason in sure.reasons)
    nothing = advised(predicted(2.0, [*99 * [1.0], 1e9], saved=1e-6))
    assert nothing.adapts is False
    bounded = advised(predicted(2.0, [2.0, 3.0]))
    assert not any("upper bound" in reason for reason in bounded.reasons)


def test_what_saves_nothing_of_the_loss_is_no_difference():
    found = advised(predicted(9.0, [9.0], saved=0.0004))
    assert (found.adapts, found.method) == (False, "nal")
    assert any("no difference" in reason for reason in found.reasons)
    worth = advised(predicted(9.0, [9.0], saved=0.01))
    assert worth.adapts is True
    assert not any("no difference" in reason for reason in worth.reasons)


def test_a_doubt_about_the_prediction_forbids_a_recommendation():
    found = advised(predicted(9.0, [9.0]), doubts=("it is dark: use a lamp", "it is late"))
    assert (found.adapts, found.method, found.confidence) == (None, None, 1.0)
    assert found.headline == "Undecided: it is dark: use a lamp."
    assert found.reasons[0] == "it is late"


def test_maml_is_recommended_where_its_twin_is_better_beyond_the_interval():
    def twins(gain: float, margin: float = 0.1) -> list[Twin]:
        gains = {"support alone": 0.0, "mtl": 0.05, "anil": 0.3, "maml": gain}
        return [Twin(name, "accuracy", 0.5, 0.1, each, margin) for name, each in gains.items()]

    found = predicted(9.0, [9.0])
    assert advised(found, *twins(0.5)).method == "maml"
    assert advised(found, *twins(0.4)).method == "anil"
    assert advised(found, *twins(0.1)).method == "anil"
    assert advised(predicted(1.0, [1.0]), *twins(0.5)).method == "nal"
    told = "kernels of wide nets find {} better than regression on the support alone"
    assert told.format("ANIL, MAML") in advised(found, *twins(0.5)).reasons
    assert told.format("ANIL") in advised(found, *twins(0.1)).reasons
    assert told.format("nothing") in advised(found, *twins(0.1, margin=1.0)).reasons


def test_what_a_step_leaves_to_learn_is_said_from_half_on():
    def told(left: float) -> bool:
        return any("still to be learnt" in reason for reason in advised(predicted(2.0, [2.0], left=left)).reasons)

    assert told(0.51)
    assert not told(0.5)


@pytest.mark.parametrize(
    ("faster", "words"), [(0.1, "those named hard are the fast ones"), (1.2, "little tells them apart")]
)
def test_groups_that_are_not_what_they_are_called_are_said_to_be_so(faster, words):
    found, clear = (advice.advise(predicted(2.0, [2.0]), "nal", "maml", (1.0, rate), ()) for rate in (faster, 1.5))
    assert any(words in reason for reason in found.reasons)
    assert not any(words in reason for reason in clear.reasons)


def test_a_step_below_the_limit_of_the_tasks_is_taken_whatever_resampled_ones_allow():
    few = tasks(WORLD, 20, 20)
    with pytest.raises(InputError, match=r"alpha is 100\.0, but steps of") as refused:
        diagnose(few, alpha=100.0, tasks=40)
    most = float(re.search(r"steps of ([\d.]+)", str(refused.value))[1])
    assert diagnose(few, alpha=0.999 * most, tasks=40).alpha == 0.999 * most


def test_a_step_whose_square_is_no_number_is_refused():
    with pytest.raises(InputError, match=r"^alpha is 1e\+300, which is too large .* Use alpha=[\d.]+ or less\.$"):
        diagnose(tasks(WORLD, 20, 20), alpha=1e300, tasks=40)


def test_what_kernels_cannot_be_computed_is_left_out_and_said(monkeypatch, caplog):
    def refuse(*_, **__):
        raise InputError("points 0 and 1 are the same")

    monkeypatch.setattr("metabridge.diagnosis.diagnose_tasks.kernel_twins", refuse)
    found = diagnose(tasks(ALIKE), tasks=40, kernel=mb.kernels.fully_connected_kernel(depth=2))
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


@dataclass(frozen=True)
class Changed:
    """Tasks of `WORLD` with inputs multiplied by random numbers, and with noise of its own law."""

    points: object = None  # what points are multiplied by, of (tasks, points, 1) uniform numbers
    each: object = None  # what tasks are multiplied by, of (tasks, 1, 1) uniform numbers
    noise: object = None  # of (tasks, points, 1) uniform numbers
    shots: int = 100
    outputs = 1

    def sample(self, tasks: int, generator: torch.Generator) -> Episodes:
        whole = LinearTasks(replace(WORLD, noise=0.0).landscape, self.shots, 20).sample(tasks, generator)
        whole = whole.without_split()
        x, y = whole.support_x, whole.support_y
        for law, shape in ((self.points, y.shape), (self.each, (tasks, 1, 1))):
            if law is not None:
                scale = law(torch.rand(shape, generator=generator))
                x, y = scale * x, scale * y
        if self.noise is not None:
            y = y + self.noise(torch.rand(y.shape, generator=generator))
        return Episodes.split(x, y, self.shots)


def cauchy(uniform: torch.Tensor) -> torch.Tensor:
    return 0.3 * torch.tan(torch.pi * (uniform - 0.5))


def spiked(uniform: torch.Tensor) -> torch.Tensor:
    """Numbers s with E[s²] = 1 and E[s⁴] = `SPIKED`."""
    return torch.where(uniform < 0.075, 10.25, 0.25).sqrt()


SPIKED = 0.075 * 10.25**2 + 0.925 * 0.25**2  # 7.9


def test_the_ratio_of_heavy_tailed_inputs_is_that_of_their_own_fourth_moments():
    """Their covariance is that of `WORLD`, whose normal inputs have a ratio of 1.8."""
    normal, covariance = hard_easy_risks(WORLD, 0.9, 100).ratio, WORLD.landscape.distribution.covariance
    trace = covariance.square().sum((-2, -1))[:, None, None]
    fourth = SPIKED * (trace * covariance + 2 * covariance @ covariance @ covariance)
    solutions = nal_solution(WORLD.landscape), maml_solution(WORLD.landscape, 0.9, 100, fourth=fourth)
    nal, maml = risk_above_floor(WORLD.landscape, torch.stack(solutions), 0.9, 100, fourth=fourth)
    for seed in range(2):
        found = diagnose(Changed(points=spiked), alpha=0.9, tasks=200, seed=seed)
        assert found.ratio.low <= float(nal / maml) <= found.ratio.high < 1.1 < normal
        assert found.advice.adapts is False
        assert [group.kurtosis for group in found.groups] == pytest.approx([SPIKED, SPIKED], rel=0.15)
        assert re.search(r"hard: .* fourth moments [789](\.\d)? times those of normal inputs", found.told())


def test_solutions_are_weighed_by_what_heavy_tailed_inputs_leave_after_a_step():
    whole = Changed(points=spiked).sample(200, torch.Generator().manual_seed(0)).without_split()
    moments = regression_moments(whole.support_x.double(), whole.support_y)
    geography = Geography(moments, hard_tasks(moments), 100)
    covariance = WORLD.landscape.distribution.covariance[1]
    fourth = SPIKED * (covariance.square().sum() * covariance + 2 * covariance @ covariance @ covariance)
    exact = adapted_covariance(covariance, 0.9, 100, fourth)
    torch.testing.assert_close(geography.adapted(0.9)[1], exact, rtol=0.15, atol=0.1)
    assert (adapted_covariance(covariance, 0.9, 100).diagonal() < 0.2 * exact.diagonal()).all()


def test_fourth_moments_of_normal_inputs_are_found_normal(found):
    assert [group.kurtosis for group in found.groups] == pytest.approx([1, 1], rel=0.05)


def test_fourth_moments_are_without_bias_however_few_the_points_are():
    moments, hard = moments_of(WORLD, 4000, 3)
    covariance = WORLD.landscape.distribution.covariance[1]
    expected = covariance.square().sum() * covariance + 2 * covariance @ covariance @ covariance
    torch.testing.assert_close(moments.fourth[~hard].mean((0, 1)), expected, rtol=0.1, atol=0.3)


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_recommended_where_label_noise_has_no_variance(seed, monkeypatch):
    monkeypatch.setattr(estimates, "REPEATS", 10)
    found = diagnose(Changed(noise=cauchy), alpha=0.9, tasks=60, seed=seed)
    assert (found.advice.adapts, found.advice.method) == (None, None)
    assert re.match(r"Undecided: few values dominate the variance of the targets of (hard|easy)", found.advice.headline)
    assert found.told().startswith(found.advice.headline)


def test_heavy_tails_of_inputs_and_of_targets_are_told_apart_and_normal_ones_are_none():
    def tails(environment, count: int = 60) -> set[str]:
        whole = environment.sample(count, torch.Generator().manual_seed(0)).without_split()
        moments = regression_moments(whole.support_x.double(), whole.support_y)
        return {name.split()[0] for name in Geography(moments, torch.arange(count) % 2 == 0, 100).heavy_tails()}

    assert tails(Changed()) == tails(Changed(points=spiked)) == set()
    assert tails(Changed(noise=cauchy)) == {"targets"}
    assert tails(Changed(points=cauchy)) == {"inputs", "targets"}
    assert tails(Changed(each=lambda u: 100.0 * (u < 1 / 20) + 1.0)) == {"inputs", "targets"}
    assert tails(tasks(replace(ALIKE, dimension=1))) == set()


def test_curvatures_of_few_points_are_without_the_bias_of_a_largest_eigenvalue():
    moments, hard = moments_of(replace(WORLD, dimension=10), 400, 8)
    found = curvatures(moments)
    assert float(found[~hard].mean()) == pytest.approx(WORLD.rho_easy, rel=0.1)
    assert float(found[hard].mean()) == pytest.approx(WORLD.rho_hard, rel=0.1)
    assert torch.linalg.eigvalsh(moments.covariance)[~hard].amax(-1).mean() > 2 * WORLD.rho_easy


def test_a_step_that_diverges_on_single_tasks_is_not_called_stable(monkeypatch):
    """A tenth of the tasks has inputs of eight times the variance: the mean covariance hardly shows it."""
    monkeypatch.setattr(estimates, "REPEATS", 10)
    environment = Changed(each=lambda u: torch.where(u < 0.1, 8**0.5, 1.0))
    found = diagnose(environment, alpha=0.9, tasks=200)
    steps = 0.9 * torch.tensor(found.curvatures)
    assert found.unstable == float((steps >= 2).double().mean())
    assert 0.02 < found.unstable < 0.09
    assert 5 < steps.max() < 12
    assert f"the step diverges on {100 * found.unstable:.1f} % of the tasks" in found.told()
    chosen = diagnose(environment, tasks=200)
    assert chosen.unstable == 0
    assert chosen.alpha * max(chosen.curvatures) == pytest.approx(1.9)
    more = diagnose(Changed(each=lambda u: torch.where(u < 0.4, 8**0.5, 1.0)), alpha=0.6, tasks=200)
    assert more.unstable > 0.05
    assert more.advice.adapts is None
    assert any("diverges on" in said and "use alpha=" in said for said in (more.advice.doubt, *more.advice.reasons))


def still(*scales: float) -> Geography:
    """Tasks with the covariance diag(1, 2) times a number, known exactly; the first five are hard."""
    covariance = torch.tensor(scales)[:, None, None, None] * torch.diag(torch.tensor([1.0, 2.0])).expand(1, 2, 2, 2)
    count, covariance = len(scales), covariance.double()
    empty = torch.zeros(count, 2, 2).double()
    moments = Moments(covariance, covariance, empty, empty[..., 0], empty, 9.0)
    return Geography(moments, torch.arange(count) < 5, 10)


def test_the_chosen_step_is_the_inverse_of_the_largest_curvature_unless_a_task_is_far_steeper():
    assert still(*5 * [0.1], *5 * [1.0]).stable_step() == pytest.approx(1 / 2)
    assert still(*5 * [3.0], *5 * [1.0]).stable_step() == pytest.approx(1 / 6)
    assert still(*5 * [0.1], *9 * [1.0], 1.5).stable_step() == pytest.approx(1 / 2 / (10.5 / 10))
    assert still(*5 * [0.1], *9 * [1.0], 11.0).stable_step() == pytest.approx(1.9 / 22)


def test_intervals_of_few_tasks_reach_as_far_as_students():
    repeats = torch.linspace(0, 1, 2001, dtype=torch.float64)
    for easy in (5, 7):  # the smaller group decides
        interval = still(*(5 + easy) * [1.0])._interval(0.5, repeats)
        tail = percentile_tail(5)
        assert (interval.low, interval.high) == pytest.approx((tail, 1 - tail))
    assert tail < 0.002


def test_the_share_of_hard_tasks_is_the_weight_of_the_first_part():
    parts = tuple(tasks(Landscape((replace(group, probability=1.0),), 5)) for group in WORLD.landscape.groups)
    assert _share(Mixture(parts, (3.0, 1.0))) == 0.75
    assert _share(parts[0]) == 0.5
    groups = (replace(group, probability=share) for group, share in zip(WORLD.landscape.groups, (0.75, 0.25)))
    landscape = Landscape(tuple(groups), 5)
    exact = [
        float(risk_above_floor(landscape, w, 0.9, 100))
        for w in (nal_solution(landscape), maml_solution(landscape, 0.9, 100))
    ]
    found = diagnose(Mixture(parts, (3.0, 1.0)), groups="parts", alpha=0.9, tasks=200)
    assert found.nal == pytest.approx(exact[0], rel=0.1)
    assert found.maml == pytest.approx(exact[1], rel=0.1)
    even = hard_easy_risks(WORLD, 0.9, 100)
    assert even.maml != pytest.approx(exact[1], rel=0.2)


@pytest.mark.parametrize("best", RIDGES)
def test_twins_have_the_ridge_that_is_best_on_other_tasks_than_they_are_judged_on(best, monkeypatch):
    monkeypatch.setattr(advice, "TRAINING_POINTS", 60)
    judged = []

    def evaluate(fitted, environment, *, tasks, seed):
        own = fitted.learner
        if own.outer_time == 0:
            return mb.Score.of(torch.tensor([2.0, 2.0]), "squared error")
        if seed == 1:
            return mb.Score.of(torch.full((2,), 1.0 + (own.ridge != pytest.approx(best * scale))), "squared error")
        assert seed == 2
        judged.append(own)
        return mb.Score.of(torch.tensor([1.0, 1.0]), "squared error")

    kernel = mb.kernels.fully_connected_kernel(depth=2)
    example = Quadratic().sample(1, torch.Generator().manual_seed(0))
    scale = float(kernel.ntk(example.support_x[0].double()).diagonal().mean())
    monkeypatch.setattr(advice, "evaluate", evaluate)
    twins = kernel_twins(kernel, Quadratic(), seed=0)
    assert [own.method for own in judged] == ["mtl", "anil", "maml"]
    assert [own.ridge for own in judged] == pytest.approx(3 * [best * scale])
    assert [twin.gain for twin in twins] == [0, 1, 1, 1]
