from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass, replace

import pytest
import torch
from scipy import stats

import metabridge as mb
from metabridge.diagnosis import (
    Advice,
    Diagnosis,
    Interval,
    KernelPrediction,
    advice,
    diagnose,
    estimates,
    untrained_network,
)
from metabridge.diagnosis.advice import MIN_RATIO, NO_GAIN, RIDGES, method_costs, predict_with_kernels
from metabridge.diagnosis.diagnose_tasks import _hard_probability
from metabridge.diagnosis.estimates import LandscapeEstimate, Prediction, find_hard_tasks, split_by_rate
from metabridge.diagnosis.moments import (
    SplitMoments,
    convergence_rates,
    gaussian_deviances,
    largest_curvatures,
    pair_moments,
    regression_moments,
    symmetric_products,
)
from metabridge.environments import HardEasy, Landscape, LinearTasks, Quadratic, TaskGroup
from metabridge.environments.mixture import Mixture
from metabridge.episodes import Episodes
from metabridge.errors import InputError
from metabridge.intervals import percentile_tail
from metabridge.report import diagnosis_page
from metabridge.theory.landscape import (
    Risks,
    adapted_covariance,
    hard_easy_risks,
    maml_solution,
    nal_solution,
    risk_above_floor,
)
from metabridge.training import evaluation

HARD_EASY = HardEasy(rho_hard=0.1, rho_easy=1.0, R=3.0, r_hard=0.5, r_easy=1.0, dimension=5, noise=0.2)
SAME_CENTER = HardEasy(rho_hard=0.5, rho_easy=1.0, R=0.0, r_hard=1.0, r_easy=1.0, dimension=5, noise=0.2)


def linear_tasks(distribution: HardEasy | Landscape, shots: int = 100, queries: int = 20) -> LinearTasks:
    return LinearTasks(distribution if isinstance(distribution, Landscape) else distribution.landscape, shots, queries)


def moments_of(
    distribution: HardEasy | Landscape, count: int, shots: int, seed: int = 0
) -> tuple[SplitMoments, torch.Tensor]:
    """Return the moments of sampled tasks, and a mask of the hard tasks."""
    episodes = linear_tasks(distribution, shots, shots).sample(count, torch.Generator().manual_seed(seed))
    unsplit = episodes.without_split()
    return regression_moments(unsplit.support_x.double(), unsplit.support_y), episodes.classes[:, 0] == 0


def hard_and_easy_parts() -> tuple[LinearTasks, ...]:
    """Return an environment of only the hard tasks of `HARD_EASY`, and one of only its easy tasks."""
    return tuple(linear_tasks(Landscape((replace(group, probability=1.0),), 5)) for group in HARD_EASY.landscape.groups)


@pytest.fixture(scope="module")
def diagnosis() -> Diagnosis:
    return diagnose(linear_tasks(HARD_EASY), alpha=0.9, tasks=400)


def test_the_parameters_of_a_known_landscape_are_estimated(diagnosis):
    hard, easy = diagnosis.groups
    assert diagnosis.distance == pytest.approx(HARD_EASY.R, rel=0.1)
    assert hard.dispersion == pytest.approx(HARD_EASY.r_hard, rel=0.15)
    assert easy.dispersion == pytest.approx(HARD_EASY.r_easy, rel=0.15)
    assert hard.rate == pytest.approx(HARD_EASY.rho_hard, rel=0.15)
    assert easy.rate == pytest.approx(HARD_EASY.rho_easy, rel=0.15)
    assert diagnosis.m == 100


def test_the_predicted_ratio_is_that_of_the_closed_form(diagnosis):
    """The closed form is corollary 1 of Collins et al. (2022)."""
    assert diagnosis.ratio.value == pytest.approx(hard_easy_risks(HARD_EASY, 0.9, 100).ratio, rel=0.1)
    assert diagnosis.ratio.low < diagnosis.ratio.value < diagnosis.ratio.high
    assert diagnosis.nal / diagnosis.maml == pytest.approx(diagnosis.ratio.value)
    assert diagnosis.advice == replace(diagnosis.advice, method="maml", adapts=True)
    assert diagnosis.ratio_limit == pytest.approx(1 + diagnosis.distance**2 / diagnosis.groups[0].dispersion)
    assert diagnosis.ratio_limit == pytest.approx(1 + HARD_EASY.R**2 / HARD_EASY.r_hard, rel=0.2)


def test_groups_are_separated_by_hardness():
    moments, is_hard = moments_of(HARD_EASY, 200, 40)
    assert (split_by_rate(convergence_rates(moments)) == is_hard).all()
    assert (find_hard_tasks(moments) == is_hard).all()


def test_covariances_separate_groups_whose_rates_overlap():
    moments, is_hard = moments_of(replace(HARD_EASY, rho_hard=0.75, dimension=12), 200, 150)
    assert (split_by_rate(convergence_rates(moments)) != is_hard).sum() > 5
    assert (find_hard_tasks(moments) == is_hard).all()


def test_a_deviance_is_minus_twice_the_log_likelihood():
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(2, 30, 3, generator=generator).double()
    roots = torch.randn(2, 3, 3, generator=generator).double()
    covariances = roots @ roots.mT
    deviances = gaussian_deviances(regression_moments(points, points[..., :1]), covariances)
    normals = [
        torch.distributions.MultivariateNormal(torch.zeros(3).double(), covariance) for covariance in covariances
    ]
    exact = torch.stack([-2 * normal.log_prob(points).mean(1) for normal in normals], 1)
    torch.testing.assert_close(deviances[:, 0] - deviances[:, 1], exact[:, 0] - exact[:, 1])


def test_the_ratio_is_predicted_for_random_covariances():
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
    predicted = LandscapeEstimate(moments, is_hard, m, 0.5).predict(alpha, torch.Generator().manual_seed(0))
    assert predicted.risks.ratio == pytest.approx(float(exact[0] / exact[1]), rel=0.1)
    assert predicted.risks.maml == pytest.approx(float(exact[1]), rel=0.15)


@pytest.mark.parametrize("shots", [4, 25], ids=["fewer examples than dimensions", "enough examples"])
def test_noise_of_few_examples_does_not_increase_the_dispersion(shots):
    """All tasks of a group have the same solution, so estimates differ only by noise."""
    hard_easy = HardEasy(rho_hard=0.5, rho_easy=1.0, R=1.0, dimension=10, noise=2.0)
    moments, is_hard = moments_of(hard_easy, 2000, shots)
    estimate = LandscapeEstimate(moments, is_hard, shots)
    landscape = estimate.landscape(0.5)
    variance_with_noise = estimate.solutions[is_hard].mean(1).T.cov().diagonal().mean()
    assert variance_with_noise > 0.1
    assert landscape.groups[0].spread < 0.2 * variance_with_noise
    assert estimate.distance(landscape, 0.5) == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize(("task_count", "max_median_width"), [(10, 0.6), (40, 0.2)])
def test_intervals_contain_the_ratio_with_their_nominal_probability(task_count, max_median_width, monkeypatch):
    monkeypatch.setattr(estimates, "BOOTSTRAP_SAMPLES", 60)
    hard_easy = replace(HARD_EASY, rho_hard=0.6, R=2.0, dimension=3)
    exact, covered_count, widths = hard_easy_risks(hard_easy, 0.9, 60).ratio, 0, []
    for seed in range(30):
        # three times as many tasks as needed, so that each group surely has half of the needed ones
        moments, is_hard = moments_of(hard_easy, 3 * task_count, 60, seed)
        subset = torch.cat([group.nonzero().flatten()[: task_count // 2] for group in (is_hard, ~is_hard)])
        estimate = LandscapeEstimate(moments.select(subset), is_hard[subset], 60, 0.5)
        ratio = estimate.predict(0.9, torch.Generator().manual_seed(seed)).ratio
        covered_count += ratio.low <= exact <= ratio.high
        widths.append((ratio.high - ratio.low) / ratio.value)
    assert covered_count >= stats.binom.interval(0.999, 30, 0.95)[0]  # 30 intervals of 95 %
    assert sorted(widths)[15] < max_median_width  # the median of the 30 widths


def test_intervals_include_the_uncertainty_of_covariances():
    """Without noise and dispersion the solutions are exact, so only the covariances are uncertain."""
    hard_easy = HardEasy(rho_hard=0.3, rho_easy=1.0, R=1.0, dimension=3)
    moments, is_hard = moments_of(hard_easy, 60, 30)
    ratio = LandscapeEstimate(moments, is_hard, 30, 0.5).predict(0.9, torch.Generator().manual_seed(0)).ratio
    assert ratio.low < hard_easy_risks(hard_easy, 0.9, 30).ratio < ratio.high
    assert ratio.high - ratio.low > 0.01


def test_the_step_does_not_diverge_on_bootstrap_samples():
    """One task has a large curvature, which limits the step. A bootstrap sample can omit this task or repeat it."""
    moments, is_hard = moments_of(HARD_EASY, 40, 20)
    scale = torch.ones(40, 1, 1, 1).double()
    scale[(~is_hard).nonzero()[0]] = 300.0
    estimate = LandscapeEstimate(replace(moments, covariance=scale * moments.covariance), is_hard, 20, 0.5)
    for step in (estimate.default_step_size(), 1 / estimate.curvature):
        ratio = estimate.predict(step, torch.Generator().manual_seed(0)).ratio
        assert 1 <= ratio.low <= ratio.value <= ratio.high


def test_pre_training_without_adaptation_is_recommended_if_the_groups_have_the_same_center():
    diagnosis = diagnose(linear_tasks(SAME_CENTER), alpha=0.9, tasks=150)
    assert diagnosis.ratio.value == pytest.approx(1, abs=0.02)
    assert diagnosis.ratio.low >= 1  # MAML has the lowest possible risk
    assert diagnosis.advice.adapts is False
    assert diagnosis.advice.method == "nal"
    assert NO_GAIN in str(diagnosis).lower()


def test_adaptation_is_recommended_if_it_gains_enough(diagnosis):
    assert diagnosis.ratio.low > MIN_RATIO
    assert diagnosis.advice.confidence == 1
    assert "MAML" in diagnosis.advice.headline
    assert NO_GAIN in Advice("nal", False, 0.9, ()).headline.lower()


def test_the_same_seed_gives_the_same_diagnosis(diagnosis):
    again = diagnose(linear_tasks(HARD_EASY), alpha=0.9, tasks=400)
    assert again == diagnosis
    assert diagnose(linear_tasks(HARD_EASY), alpha=0.9, tasks=400, seed=1) != diagnosis


def test_symmetric_products_have_the_norm_of_the_symmetric_matrix():
    a, b = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0)).double()
    symmetric = (a[..., None] * b[..., None, :] + b[..., None] * a[..., None, :]) / 2
    torch.testing.assert_close(symmetric_products(a, b).square().sum(-1), symmetric.square().sum((-2, -1)))


def test_the_numbering_of_the_classes_does_not_change_the_moments_of_pairs():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(3, 40, 4, generator=generator).double()
    labels = torch.arange(5).repeat(3, 8)
    renumbered = torch.tensor([3, 0, 4, 1, 2])[labels]
    assert not torch.equal(labels.argsort(dim=1, stable=True), renumbered.argsort(dim=1, stable=True))
    first, second = pair_moments(features, labels), pair_moments(features, renumbered)
    torch.testing.assert_close(first.covariance, second.covariance)
    torch.testing.assert_close(first.cross_moment, second.cross_moment)


def test_the_solution_for_classes_that_differ_in_one_direction_is_that_direction():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(4).repeat_interleave(50)[None]
    features = torch.randn(1, 200, 3, generator=generator).double()
    features[..., 0] += 4 * (labels - 1.5)
    moments = pair_moments(features, labels)
    solution = moments.solutions(moments.covariance.mean(1)).mean(1)[0]
    assert solution.abs().argmax() == 0


def test_superclasses_of_images_can_be_the_groups(glyphs):
    diagnosis = diagnose(glyphs.tasks("train", queries=5), untrained_network(glyphs), groups="superclasses", tasks=24)
    assert [group.tasks for group in diagnosis.groups] == [12, 12]
    assert diagnosis.space == "pairs of features"
    assert diagnosis.m == 10  # pairs of five images
    assert [cost.method for cost in diagnosis.costs] == ["rfs", "mtl", "anil", "maml"]


def test_parts_of_a_mixture_can_be_the_groups():
    diagnosis = diagnose(Mixture(hard_and_easy_parts(), (0.5, 0.5)), groups="parts", alpha=0.9, tasks=200)
    assert diagnosis.ratio.value == pytest.approx(hard_easy_risks(HARD_EASY, 0.9, 100).ratio, rel=0.15)


def test_regression_tasks_use_the_features_of_a_network():
    diagnosis = diagnose(Quadratic(shots=20, queries=20), mb.models.mlp(10, 1), tasks=24)
    assert diagnosis.space == "features and a constant"
    assert diagnosis.dimension == 10
    assert [cost.method for cost in diagnosis.costs] == ["nal", "anil", "maml"]


def test_costs_are_those_of_the_presets():
    net = mb.models.mlp(4, 2, width=8)
    by_name = {cost.method: cost for cost in method_costs(("rfs", "anil", "maml", "fo-maml"), net, 0)}
    net_size, head_size = sum(value.numel() for value in net.parameters()), 8 * 2 + 2
    # MAML takes five steps; each costs a gradient and, in training, a Hessian-vector product, which counts as two more
    assert (by_name["maml"].adapted_parameters, by_name["maml"].test_gradients, by_name["maml"].training_gradients) == (
        net_size,
        5,
        1 + 5 * 3,
    )
    assert (by_name["anil"].adapted_parameters, by_name["anil"].test_gradients) == (head_size, 0)
    assert by_name["rfs"].training_gradients == 1
    assert 1 < by_name["anil"].training_gradients < by_name["fo-maml"].training_gradients == 1 + 5


def test_costs_count_hessian_vector_products_and_the_parameters_that_adapt_at_test_time():
    net = mb.models.mlp(4, 2, width=8)
    imaml, nal = method_costs(("imaml", "nal"), net, 0)
    assert imaml.training_gradients == 1 + 16 + 2 * 5  # 16 steps and 5 conjugate-gradient steps
    assert (nal.adapted_parameters, nal.test_gradients) == (8 * 2 + 2, 0)  # its solver adapts only the head
    nal, anil = method_costs(("nal", "anil"), None, 7)
    assert (nal.adapted_parameters, nal.test_gradients, nal.training_gradients) == (7, 10, 1)
    assert (anil.adapted_parameters, anil.test_gradients, anil.training_gradients) == (7, 5, 1 + 5 * 3)


def test_kernel_predictions_are_compared_with_regression_on_the_support_set(monkeypatch):
    monkeypatch.setattr(advice, "TRAINING_EXAMPLES", 200)
    predictions = predict_with_kernels(mb.kernels.fully_connected_kernel(depth=3), Quadratic(), seed=0)
    assert [prediction.method for prediction in predictions] == ["no meta-training", "mtl", "anil", "maml"]
    assert predictions[0].gain == 0
    assert predictions[1].gain == pytest.approx(
        predictions[0].mean - predictions[1].mean
    )  # a lower squared error is better
    assert predictions[1].gain > predictions[1].gain_ci95


def test_the_html_report_contains_its_figures_and_the_json_file_the_numbers(diagnosis, tmp_path):
    html = diagnosis_page.write(diagnosis, tmp_path).read_text()
    sources = re.findall(r'(?:src|srcset|href)="([^"]*)"', html)
    assert len(sources) == 2 * 3  # three figures, each for the light and the dark theme
    for source in sources:
        assert base64.b64decode(source.removeprefix("data:image/png;base64,"), validate=True).startswith(b"\x89PNG")
    assert diagnosis.advice.headline in html
    stored = json.loads((tmp_path / "diagnosis.json").read_text())
    assert stored["ratio"]["value"] == diagnosis.ratio.value
    assert len(stored["rates"]) == len(stored["solution_map"]) == 400


def test_the_command_writes_a_report(metabridge, glyphs, tmp_path):
    status, printed, _ = metabridge(
        "diagnose", "--out", tmp_path, "--tasks", 20, "--queries", 5, "--no-kernels", "--device", "cpu"
    )
    assert status == 0
    assert "rate" in printed
    assert {"index.html", "diagnosis.json", "hardness.png", "map.png", "gain.png"} == {
        file.name for file in tmp_path.iterdir()
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 3.0}, "alpha is 3.0, but steps of"),
        ({"alpha": 0.0}, "alpha is 0.0, but must be a positive number"),
        ({"tasks": 6}, "there are 6 tasks, but two groups need at least 10"),
        ({"groups": "superclasses"}, "only image tasks have superclasses"),
        ({"groups": "parts"}, "is not a Mixture of two"),
        ({"groups": "colors"}, "groups is 'colors', but must be one of"),
        ({"net": mb.models.mlp(5, 1), "features": torch.tanh}, "net and features are both set"),
    ],
)
def test_invalid_arguments_are_rejected(options, message):
    with pytest.raises(InputError, match=re.escape(message)):
        diagnose(linear_tasks(HARD_EASY), **({"tasks": 40} | options))


def test_a_singular_covariance_is_rejected():
    moments, is_hard = moments_of(HARD_EASY, 40, 20)
    zero = torch.zeros_like(moments.covariance)
    with pytest.raises(InputError, match="the covariance of a task's features is singular"):
        LandscapeEstimate(replace(moments, covariance=zero), is_hard, 20).landscape(0.5)


def test_more_than_one_output_is_rejected():
    with pytest.raises(InputError, match="Diagnose each output separately"):
        regression_moments(torch.zeros(2, 8, 3).double(), torch.zeros(2, 8, 2))


def test_images_without_features_are_rejected(glyphs):
    with pytest.raises(InputError, match="Pass net or features"):
        diagnose(glyphs.tasks("train"), tasks=20)


@pytest.mark.parametrize(
    ("superclass_count", "problem"),
    [("one", "all classes have the same superclass"), ("all", "no two classes share a superclass")],
)
def test_classes_without_superclasses_cannot_be_grouped_by_them(glyphs, superclass_count, problem):
    count = len(glyphs.class_names)
    superclasses = torch.zeros(count, dtype=torch.int64) if superclass_count == "one" else torch.arange(count)
    ungrouped = replace(glyphs, superclasses=superclasses, superclass_names=tuple(map(str, range(count))))
    with pytest.raises(InputError, match=problem):
        diagnose(ungrouped.tasks("train"), untrained_network(glyphs), groups="superclasses", tasks=20)


def test_tasks_without_any_signal_do_not_change_the_groups():
    moments, is_hard = moments_of(HARD_EASY, 200, 40)
    has_no_signal = torch.zeros(200, dtype=torch.bool)
    has_no_signal[[3, 77]] = True
    changed = replace(moments, cross_moment=torch.where(has_no_signal[:, None, None], 0, moments.cross_moment))
    assert convergence_rates(changed).isfinite().all()
    assert torch.equal(convergence_rates(changed)[~has_no_signal], convergence_rates(moments)[~has_no_signal])
    assert (find_hard_tasks(changed) == is_hard).all()


def test_the_ratio_is_one_if_there_is_nothing_to_gain(tmp_path):
    identical_tasks = HardEasy(rho_hard=0.1, rho_easy=1.0, R=0.0, r_hard=0.0, r_easy=0.0, dimension=3, noise=0.0)
    diagnosis = diagnose(linear_tasks(identical_tasks, 20, 20), tasks=40)
    assert diagnosis.ratio.value == 1
    assert diagnosis.advice.adapts is False
    assert diagnosis.ratio_limit is None
    assert diagnosis_page.write(diagnosis, tmp_path).exists()
    json.loads(diagnosis.to_json())


def test_tasks_without_pairs_of_the_same_class_are_rejected(glyphs):
    with pytest.raises(InputError, match=r"no two images of the same class.*Use queries=2"):
        diagnose(glyphs.tasks("train", shots=1, queries=1), untrained_network(glyphs), tasks=20)


def make_prediction(ratio: float, ratios: list[float], gain: float = 0.1, residual: float = 0.1) -> Prediction:
    samples = torch.tensor(ratios, dtype=torch.float64)
    interval = Interval(ratio, float(samples.min()), float(samples.max()))
    gains = torch.full_like(samples, gain)
    return Prediction(Risks(ratio, 1.0), interval, Interval(gain, gain / 2, 2 * gain), residual, samples, gains)


def make_advice(prediction: Prediction, *kernels: KernelPrediction, problems: tuple[str, ...] = ()) -> Advice:
    return advice.advise(prediction, "nal", "anil", (0.1, 1.0), kernels, problems)


@pytest.mark.parametrize(("ratios", "adapts"), [([*4 * [1.1], 9.0], False), ([1.1, *4 * [MIN_RATIO]], True)])
def test_the_advice_is_that_of_most_bootstrap_samples(ratios, adapts):
    recommendation = make_advice(make_prediction(2.0, ratios))
    assert (recommendation.adapts, recommendation.method) == (adapts, "anil" if adapts else "nal")
    assert recommendation.confidence == pytest.approx(0.8)


@pytest.mark.parametrize("adapting_samples", [4, 5, 6])
def test_nothing_is_recommended_if_bootstrap_samples_disagree(adapting_samples):
    recommendation = make_advice(make_prediction(2.0, [1.1] * (9 - adapting_samples) + [9.0] * adapting_samples))
    assert (recommendation.adapts, recommendation.method) == (None, None)
    assert recommendation.confidence == pytest.approx(max(adapting_samples, 9 - adapting_samples) / 9)
    assert re.match(r"Undecided: (44|56|67) % of bootstrap samples favor.*sample more", recommendation.headline)


def test_a_ratio_without_upper_bound_is_a_reason_or_a_problem():
    undecided_advice = make_advice(make_prediction(2.0, [*99 * [1.0], 1e9]))  # an interval from 1 to infinity
    assert undecided_advice.adapts is None
    assert "no upper bound" in undecided_advice.headline
    adaptive_advice = make_advice(make_prediction(1e9, [*99 * [1e9], 1.3]))  # an interval from 1.3 to infinity
    assert adaptive_advice.adapts is True
    assert any("no upper bound" in reason for reason in adaptive_advice.reasons)
    negligible_gain_advice = make_advice(make_prediction(2.0, [*99 * [1.0], 1e9], gain=1e-6))
    assert negligible_gain_advice.adapts is False
    bounded_ratio_advice = make_advice(make_prediction(2.0, [2.0, 3.0]))
    assert not any("upper bound" in reason for reason in bounded_ratio_advice.reasons)


def test_a_negligible_gain_is_not_worth_adaptation():
    recommendation = make_advice(make_prediction(9.0, [9.0], gain=0.0004))
    assert (recommendation.adapts, recommendation.method) == (False, "nal")
    assert any("negligible" in reason for reason in recommendation.reasons)
    larger_gain_advice = make_advice(make_prediction(9.0, [9.0], gain=0.01))
    assert larger_gain_advice.adapts is True
    assert not any("negligible" in reason for reason in larger_gain_advice.reasons)


def test_nothing_is_recommended_if_there_are_problems():
    recommendation = make_advice(make_prediction(9.0, [9.0]), problems=("the data are bad: use others", "they are few"))
    assert (recommendation.adapts, recommendation.method, recommendation.confidence) == (None, None, 1.0)
    assert recommendation.headline == "Undecided: the data are bad: use others."
    assert recommendation.reasons[0] == "they are few"


def test_maml_is_recommended_if_its_kernel_prediction_is_clearly_better():
    def kernels(gain: float, margin: float = 0.1) -> list[KernelPrediction]:
        gains = {"no meta-training": 0.0, "mtl": 0.05, "anil": 0.3, "maml": gain}
        return [KernelPrediction(name, "accuracy", 0.5, 0.1, value, margin) for name, value in gains.items()]

    prediction = make_prediction(9.0, [9.0])
    # the gain of ANIL is 0.3, and the half-width of the interval of the difference is about 0.14
    assert make_advice(prediction, *kernels(0.5)).method == "maml"
    assert make_advice(prediction, *kernels(0.4)).method == "anil"
    assert make_advice(prediction, *kernels(0.1)).method == "anil"
    assert make_advice(make_prediction(1.0, [1.0]), *kernels(0.5)).method == "nal"
    reason = "according to the infinite-width kernel predictions, {} significantly better than "
    reason += "regression on the support set without meta-training"
    assert reason.format("ANIL and MAML are") in make_advice(prediction, *kernels(0.5)).reasons
    all_reasons = make_advice(prediction, *kernels(0.5, margin=0.01)).reasons
    assert reason.format("MTL, ANIL and MAML are") in all_reasons
    assert reason.format("ANIL is") in make_advice(prediction, *kernels(0.1)).reasons
    assert reason.format("no method is") in make_advice(prediction, *kernels(0.1, margin=1.0)).reasons


def test_a_large_residual_loss_is_a_reason():
    def is_mentioned(residual: float) -> bool:
        reasons = make_advice(make_prediction(2.0, [2.0], residual=residual)).reasons
        return any("better features would help" in reason for reason in reasons)

    assert is_mentioned(0.51)
    assert not is_mentioned(0.5)


@pytest.mark.parametrize(
    ("ratio", "words"),
    [(0.1, "so the group of hard tasks is learned faster"), (1.2, "the two groups hardly differ")],
)
def test_unclear_groups_are_mentioned(ratio, words):
    unclear_advice, clear_advice = (
        advice.advise(make_prediction(2.0, [2.0]), "nal", "maml", (1.0, rate), ()) for rate in (ratio, 1.5)
    )
    assert any(words in reason for reason in unclear_advice.reasons)
    assert not any(words in reason for reason in clear_advice.reasons)


def test_the_largest_step_size_that_an_error_names_is_accepted():
    environment = linear_tasks(HARD_EASY, 20, 20)
    with pytest.raises(InputError, match=r"alpha is 100\.0, but steps of") as error:
        diagnose(environment, alpha=100.0, tasks=40)
    max_step = float(re.search(r"steps of ([\d.]+)", str(error.value))[1])
    assert diagnose(environment, alpha=0.999 * max_step, tasks=40).alpha == 0.999 * max_step


def test_a_step_that_overflows_is_rejected():
    with pytest.raises(
        InputError, match=r"^alpha is 1e\+300, for which the risk overflows. Use alpha=[\d.]+ or less\.$"
    ):
        diagnose(linear_tasks(HARD_EASY, 20, 20), alpha=1e300, tasks=40)


def test_kernel_predictions_that_fail_are_left_out_with_a_warning(monkeypatch, caplog):
    def reject(*_, **__):
        raise InputError("points 0 and 1 are the same")

    monkeypatch.setattr("metabridge.diagnosis.diagnose_tasks.predict_with_kernels", reject)
    diagnosis = diagnose(linear_tasks(SAME_CENTER), tasks=40, kernel=mb.kernels.fully_connected_kernel(depth=2))
    assert diagnosis.kernel_predictions == ()
    assert "Continuing without kernel predictions: points 0 and 1 are the same" in caplog.text


def test_the_ratio_of_zero_risks_is_defined():
    assert hard_easy_risks(HardEasy(0.1, 1.0, R=2.0), 1.0, float("inf")).ratio == float("inf")
    assert Risks(0.0, 0.0).ratio == 1


def test_features_that_are_not_finite_are_rejected():
    def square_root(x):
        return x.sqrt()  # NaN for negative numbers

    with pytest.raises(InputError, match="some features are NaN or infinite"):
        diagnose(linear_tasks(HARD_EASY), features=square_root, tasks=40)


def test_few_tasks_give_a_warning(caplog):
    diagnose(linear_tasks(HARD_EASY), tasks=20)
    assert "intervals from fewer than 50 tasks are too narrow" in caplog.text
    caplog.clear()
    diagnose(linear_tasks(HARD_EASY), tasks=50)
    assert not caplog.text


def test_concatenated_moments_have_the_smallest_number_of_examples():
    first, second = (moments_of(HARD_EASY, 5, shots)[0] for shots in (40, 10))
    assert (
        SplitMoments.concatenate([first, second]).examples_per_dimension
        == second.examples_per_dimension
        < first.examples_per_dimension
    )


@dataclass(frozen=True)
class ModifiedTasks:
    """Tasks of `HARD_EASY` with inputs multiplied by random numbers and with another distribution of the noise."""

    # Functions that transform uniform random numbers of the shape in the comment.
    example_scale: object = None  # (tasks, examples, 1)
    task_scale: object = None  # (tasks, 1, 1)
    noise: object = None  # (tasks, examples, 1)
    shots: int = 100
    outputs = 1

    def sample(self, tasks: int, generator: torch.Generator) -> Episodes:
        unsplit = LinearTasks(replace(HARD_EASY, noise=0.0).landscape, self.shots, 20).sample(tasks, generator)
        unsplit = unsplit.without_split()
        x, y = unsplit.support_x, unsplit.support_y
        for transform, shape in ((self.example_scale, y.shape), (self.task_scale, (tasks, 1, 1))):
            if transform is not None:
                scale = transform(torch.rand(shape, generator=generator))
                x, y = scale * x, scale * y
        if self.noise is not None:
            y = y + self.noise(torch.rand(y.shape, generator=generator))
        return Episodes.split(x, y, self.shots)


def cauchy(uniform: torch.Tensor) -> torch.Tensor:
    return 0.3 * torch.tan(torch.pi * (uniform - 0.5))


def spiked(uniform: torch.Tensor) -> torch.Tensor:
    """Return numbers s with E[s²] = 1 and E[s⁴] = `SPIKED_FOURTH_MOMENT`."""
    return torch.where(uniform < 0.075, 10.25, 0.25).sqrt()


SPIKED_FOURTH_MOMENT = 0.075 * 10.25**2 + 0.925 * 0.25**2  # 7.9


def test_the_ratio_of_heavy_tailed_inputs_uses_their_fourth_moments():
    """Gaussian inputs with the same covariance have a ratio of 1.8."""
    gaussian_ratio = hard_easy_risks(HARD_EASY, 0.9, 100).ratio
    covariance = HARD_EASY.landscape.distribution.covariance
    trace = covariance.square().sum((-2, -1))[:, None, None]
    fourth_moment = SPIKED_FOURTH_MOMENT * (trace * covariance + 2 * covariance @ covariance @ covariance)
    solutions = (
        nal_solution(HARD_EASY.landscape),
        maml_solution(HARD_EASY.landscape, 0.9, 100, fourth_moments=fourth_moment),
    )
    nal, maml = risk_above_floor(HARD_EASY.landscape, torch.stack(solutions), 0.9, 100, fourth_moments=fourth_moment)
    for seed in range(2):
        diagnosis = diagnose(ModifiedTasks(example_scale=spiked), alpha=0.9, tasks=200, seed=seed)
        assert diagnosis.ratio.low <= float(nal / maml) <= diagnosis.ratio.high < 1.1 < gaussian_ratio
        assert diagnosis.advice.adapts is False
        assert [group.kurtosis for group in diagnosis.groups] == pytest.approx(2 * [SPIKED_FOURTH_MOMENT], rel=0.15)
        assert re.search(r"hard: .* fourth moments [789](\.\d)? times those of Gaussian inputs", str(diagnosis))


def test_adapted_covariances_use_the_fourth_moments_of_the_inputs():
    unsplit = ModifiedTasks(example_scale=spiked).sample(200, torch.Generator().manual_seed(0)).without_split()
    moments = regression_moments(unsplit.support_x.double(), unsplit.support_y)
    estimate = LandscapeEstimate(moments, find_hard_tasks(moments), 100)
    covariance = HARD_EASY.landscape.distribution.covariance[1]
    gaussian_fourth_moment = covariance.square().sum() * covariance + 2 * covariance @ covariance @ covariance
    fourth_moment = SPIKED_FOURTH_MOMENT * gaussian_fourth_moment
    exact = adapted_covariance(covariance, 0.9, 100, fourth_moment)
    torch.testing.assert_close(estimate.adapted_covariances(0.9)[1], exact, rtol=0.15, atol=0.1)
    assert (adapted_covariance(covariance, 0.9, 100).diagonal() < 0.2 * exact.diagonal()).all()


def test_the_kurtosis_of_gaussian_inputs_is_one(diagnosis):
    assert [group.kurtosis for group in diagnosis.groups] == pytest.approx([1, 1], rel=0.05)


def test_fourth_moments_of_few_examples_are_unbiased():
    moments, is_hard = moments_of(HARD_EASY, 4000, 3)
    covariance = HARD_EASY.landscape.distribution.covariance[1]
    expected = covariance.square().sum() * covariance + 2 * covariance @ covariance @ covariance
    torch.testing.assert_close(moments.fourth_moment[~is_hard].mean((0, 1)), expected, rtol=0.1, atol=0.3)


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_recommended_if_the_variance_of_the_noise_is_infinite(seed, monkeypatch):
    monkeypatch.setattr(estimates, "BOOTSTRAP_SAMPLES", 10)
    diagnosis = diagnose(ModifiedTasks(noise=cauchy), alpha=0.9, tasks=60, seed=seed)
    assert (diagnosis.advice.adapts, diagnosis.advice.method) == (None, None)
    assert re.match(
        r"Undecided: a few values dominate the variance of the targets of (hard|easy)", diagnosis.advice.headline
    )
    assert str(diagnosis).startswith(diagnosis.advice.headline)


def test_heavy_tails_of_inputs_and_targets_are_distinguished():
    def heavy_tailed(environment, count: int = 60) -> set[str]:
        """Return "inputs" if they are heavy-tailed, and "targets" if they are."""
        unsplit = environment.sample(count, torch.Generator().manual_seed(0)).without_split()
        moments = regression_moments(unsplit.support_x.double(), unsplit.support_y)
        estimate = LandscapeEstimate(moments, torch.arange(count) % 2 == 0, 100)
        return {name.split()[0] for name in estimate.heavy_tailed_variables()}

    assert heavy_tailed(ModifiedTasks()) == heavy_tailed(ModifiedTasks(example_scale=spiked)) == set()
    assert heavy_tailed(ModifiedTasks(noise=cauchy)) == {"targets"}
    assert heavy_tailed(ModifiedTasks(example_scale=cauchy)) == {"inputs", "targets"}
    # about one task in 20 has much larger inputs and targets than the others
    assert heavy_tailed(ModifiedTasks(task_scale=lambda u: 100.0 * (u < 1 / 20) + 1.0)) == {"inputs", "targets"}
    assert heavy_tailed(linear_tasks(replace(SAME_CENTER, dimension=1))) == set()


def test_curvatures_of_few_examples_are_not_too_large():
    moments, is_hard = moments_of(replace(HARD_EASY, dimension=10), 400, 8)
    curvatures = largest_curvatures(moments)
    assert float(curvatures[~is_hard].mean()) == pytest.approx(HARD_EASY.rho_easy, rel=0.1)
    assert float(curvatures[is_hard].mean()) == pytest.approx(HARD_EASY.rho_hard, rel=0.1)
    assert torch.linalg.eigvalsh(moments.covariance)[~is_hard].amax(-1).mean() > 2 * HARD_EASY.rho_easy


def test_a_step_that_diverges_on_single_tasks_is_reported(monkeypatch):
    """10 % of the tasks have inputs with eight times the variance, which hardly changes the mean covariance.

    The step diverges on those of them that are easy, about 5 % of all tasks, where α·λ_max is about 0.9 · 8 = 7.2.
    """
    monkeypatch.setattr(estimates, "BOOTSTRAP_SAMPLES", 10)
    environment = ModifiedTasks(task_scale=lambda u: torch.where(u < 0.1, 8**0.5, 1.0))
    diagnosis = diagnose(environment, alpha=0.9, tasks=200)
    products = 0.9 * torch.tensor(diagnosis.curvatures)
    assert diagnosis.diverging_share == float((products >= 2).double().mean())
    assert 0.02 < diagnosis.diverging_share < 0.09
    assert 5 < products.max() < 12
    assert f"the step diverges on {100 * diagnosis.diverging_share:.1f} % of the tasks" in str(diagnosis)
    with_default_step = diagnose(environment, tasks=200)
    assert with_default_step.diverging_share == 0
    assert with_default_step.alpha * max(with_default_step.curvatures) == pytest.approx(1.9)
    environment = ModifiedTasks(task_scale=lambda u: torch.where(u < 0.4, 8**0.5, 1.0))
    more_diverging = diagnose(environment, alpha=0.6, tasks=200)
    assert more_diverging.diverging_share > 0.05
    assert more_diverging.advice.adapts is None
    texts = (more_diverging.advice.problem, *more_diverging.advice.reasons)
    assert any("diverges on" in text and "use alpha=" in text for text in texts)


def exact_estimate(*scales: float) -> LandscapeEstimate:
    """Return an estimate for tasks with the exact covariances scale·diag(1, 2), of which the first five are hard."""
    covariance = torch.tensor(scales)[:, None, None, None] * torch.diag(torch.tensor([1.0, 2.0])).expand(1, 2, 2, 2)
    count, covariance = len(scales), covariance.double()
    empty = torch.zeros(count, 2, 2).double()
    moments = SplitMoments(covariance, covariance, empty, empty[..., 0], empty, 9.0)
    return LandscapeEstimate(moments, torch.arange(count) < 5, 10)


def test_the_default_step_is_the_inverse_of_the_largest_curvature_unless_a_task_has_a_much_larger_one():
    assert exact_estimate(*5 * [0.1], *5 * [1.0]).default_step_size() == pytest.approx(1 / 2)
    assert exact_estimate(*5 * [3.0], *5 * [1.0]).default_step_size() == pytest.approx(1 / 6)
    # The easy group's mean scale is 10.5/10, so its largest curvature is 2 · 10.5/10.
    assert exact_estimate(*5 * [0.1], *9 * [1.0], 1.5).default_step_size() == pytest.approx(1 / 2 / (10.5 / 10))
    # The largest curvature of a task is 22, and the step times this curvature is at most 1.9.
    assert exact_estimate(*5 * [0.1], *9 * [1.0], 11.0).default_step_size() == pytest.approx(1.9 / 22)


def test_intervals_of_few_tasks_are_expanded():
    samples = torch.linspace(0, 1, 2001, dtype=torch.float64)
    for easy_count in (5, 7):  # the smaller group, that of five hard tasks, decides
        interval = exact_estimate(*(5 + easy_count) * [1.0])._interval(0.5, samples)
        tail = percentile_tail(5)
        assert (interval.low, interval.high) == pytest.approx((tail, 1 - tail))
    assert tail < 0.002  # without the expansion, it would be 0.025


def test_the_probability_of_hard_tasks_is_the_weight_of_the_first_part():
    parts = hard_and_easy_parts()
    assert _hard_probability(Mixture(parts, (3.0, 1.0))) == 0.75
    assert _hard_probability(parts[0]) == 0.5
    groups = (replace(group, probability=share) for group, share in zip(HARD_EASY.landscape.groups, (0.75, 0.25)))
    landscape = Landscape(tuple(groups), 5)
    exact = [
        float(risk_above_floor(landscape, w, 0.9, 100))
        for w in (nal_solution(landscape), maml_solution(landscape, 0.9, 100))
    ]
    diagnosis = diagnose(Mixture(parts, (3.0, 1.0)), groups="parts", alpha=0.9, tasks=200)
    assert diagnosis.nal == pytest.approx(exact[0], rel=0.1)
    assert diagnosis.maml == pytest.approx(exact[1], rel=0.1)
    risks_of_equal_weights = hard_easy_risks(HARD_EASY, 0.9, 100)
    assert risks_of_equal_weights.maml != pytest.approx(exact[1], rel=0.2)


@pytest.mark.parametrize("best_ridge", RIDGES)
def test_the_ridge_of_kernel_predictions_is_chosen_on_validation_tasks(best_ridge, monkeypatch):
    monkeypatch.setattr(advice, "TRAINING_EXAMPLES", 60)
    tested_learners = []

    def evaluate(fitted, environment, *, tasks, seed):
        learner = fitted.learner
        if learner.outer_time == 0:  # the baseline without meta-training
            return mb.Score.of(torch.tensor([2.0, 2.0]), "squared error")
        if seed == 1:  # validation tasks
            error = 1.0 + (learner.ridge != pytest.approx(best_ridge * ntk_scale))
            return mb.Score.of(torch.full((2,), error), "squared error")
        assert seed == 2  # test tasks
        tested_learners.append(learner)
        return mb.Score.of(torch.tensor([1.0, 1.0]), "squared error")

    kernel = mb.kernels.fully_connected_kernel(depth=2)
    example = Quadratic().sample(1, torch.Generator().manual_seed(0))
    ntk_scale = float(kernel.ntk(example.support_x[0].double()).diagonal().mean())
    monkeypatch.setattr(advice, "evaluate", evaluate)
    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    predictions = predict_with_kernels(kernel, Quadratic(), seed=0)
    assert [learner.method for learner in tested_learners] == ["mtl", "anil", "maml"]
    assert [learner.ridge for learner in tested_learners] == pytest.approx(3 * [best_ridge * ntk_scale])
    assert [prediction.gain for prediction in predictions] == [0, 1, 1, 1]
