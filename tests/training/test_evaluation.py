from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from metabridge import Episodes, InputError, Score, evaluate, method, parameters
from metabridge.environments import Sinusoid
from metabridge.heads import create_head
from metabridge.learners.adapt import predict_from_features
from metabridge.models import conv4, estimate_statistics, mlp
from metabridge.training import Augment, Model, TestTimeAugmentation
from metabridge.training.evaluation import FeatureTable, _sample_in_blocks, predictions, score_tasks, select_model


def test_the_interval_covers_the_true_mean_in_95_percent_of_the_cases():
    generator = torch.Generator().manual_seed(0)
    covered = [
        abs(score.mean - 0.3) < score.ci95
        for score in (Score.of((torch.rand(200, generator=generator) < 0.3).double()) for _ in range(1000))
    ]
    assert sum(covered) / 1000 == pytest.approx(0.95, abs=0.025)


@pytest.mark.parametrize("tasks", [2, 5, 10])
def test_the_interval_of_few_tasks_also_has_95_percent_coverage(tasks):
    values = torch.randn(4000, tasks, generator=torch.Generator().manual_seed(tasks), dtype=torch.float64)
    covered = sum(abs(score.mean) <= score.ci95 for score in map(Score.of, values))
    low, high = stats.binom.interval(0.9999, 4000, 0.95)
    assert low <= covered <= high


@pytest.mark.parametrize("name", ["maml", "rfs"])
def test_images_with_another_number_of_channels_raise_an_error(test_tasks, name):
    chosen, net = method(name), conv4(3, 28)
    model = Model(chosen, net, parameters(chosen, net, classes=5))
    with pytest.raises(InputError, match=r"Inputs have shape \(1, 28, 28\), but the network was built with channels=3"):
        evaluate(model, test_tasks, tasks=2)


def test_the_same_seed_evaluates_every_model_on_the_same_tasks():
    chosen, net = method("maml"), mlp(1, 1)
    model = Model(chosen, net, parameters(chosen, net))
    first, again = (evaluate(model, Sinusoid(), tasks=20, seed=3) for _ in range(2))
    assert torch.equal(first.values, again.values)
    assert not torch.equal(first.values, evaluate(model, Sinusoid(), tasks=20, seed=4).values)


def test_every_task_is_scored_separately():
    chosen, net = method("anil"), mlp(1, 1)
    model = Model(chosen, net, parameters(chosen, net))

    class Fixed:
        outputs = 1

        def __init__(self):
            self.all, self.next = Sinusoid().sample(40, torch.Generator().manual_seed(0)), 0

        def sample(self, tasks, generator):
            self.next += tasks
            return self.all[self.next - tasks : self.next]

    scores = evaluate(model, Fixed(), tasks=40).values
    for task in (0, 17, 39):  # of the first, second and third batch
        alone = score_tasks(model.predict(Fixed().all[task]), Fixed().all[task])
        assert float(scores[task]) == pytest.approx(float(alone), rel=1e-5)


def inductive(glyphs, name: str, **options) -> Model:
    """A model whose features depend on neither the task nor the other images."""
    chosen, net = method(name, **options), conv4(1, 28, statistics="running")
    images = glyphs.float_images(torch.arange(0, len(glyphs.labels), 97))
    estimate_statistics(net.features, [images])
    return Model(chosen, net, parameters(chosen, net, classes=glyphs.tasks("train").classes))


def concatenated(predicted) -> tuple[torch.Tensor, ...]:
    """The outputs, labels and classes of all tasks, concatenated."""
    parts = [(outputs, episodes.query_y, episodes.classes) for outputs, episodes in predicted]
    return tuple(torch.cat(column) for column in zip(*parts))


@pytest.fixture(scope="module")
def test_tasks(glyphs):
    return glyphs.tasks("test", ways=5, shots=2, queries=3)


@pytest.mark.parametrize("name", ["mtl", "r2d2", "metaoptnet", "anil"])
def test_features_computed_once_give_the_same_predictions_as_for_single_tasks(glyphs, test_tasks, name):
    model = inductive(glyphs, name)
    outputs, labels, classes = concatenated(predictions(model, test_tasks, tasks=20, seed=3))
    generator = torch.Generator().manual_seed(3)
    for first, count in ((0, 16), (16, 4)):
        episodes = test_tasks.sample(count, generator)
        block = slice(first, first + count)
        assert torch.allclose(outputs[block], model.predict(episodes), atol=2e-4)
        assert torch.equal(labels[block], episodes.query_y)
        assert torch.equal(classes[block], episodes.classes)


def test_models_with_and_without_fixed_features_are_evaluated_on_the_same_tasks(glyphs, test_tasks):
    """One model computes features once and solves heads in large batches; the other adapts all layers in small ones."""
    chosen, net = method("maml", steps=1), conv4(1, 28)
    direct = Model(chosen, net, parameters(chosen, net))
    one, other = (
        concatenated(predictions(model, test_tasks, tasks=35)) for model in (inductive(glyphs, "mtl"), direct)
    )
    assert torch.equal(one[1], other[1])
    assert torch.equal(one[2], other[2])


def test_tasks_do_not_depend_on_the_batch_size(test_tasks):
    """A GPU samples several blocks at once."""
    for environment in (test_tasks, Sinusoid()):
        together = _sample_in_blocks(environment, 40, torch.Generator().manual_seed(0), torch.device("cpu"))
        generator = torch.Generator().manual_seed(0)
        apart = [environment.sample(count, generator) for count in (16, 16, 8)]
        for index, tensor in enumerate(together.tensors()):
            assert torch.equal(tensor, torch.cat([block.tensors()[index] for block in apart]))


@pytest.mark.parametrize("name", ["mtl", "r2d2"])
def test_an_unchanged_copy_duplicates_every_support_image(glyphs, test_tasks, name):
    model = inductive(glyphs, name)
    same = Augment(padding=0, jitter=0, flip=False)
    outputs, _, _ = concatenated(
        predictions(model, test_tasks, tasks=12, seed=1, augmentation=TestTimeAugmentation(1, augment=same))
    )
    episodes = test_tasks.sample(12, torch.Generator().manual_seed(1))
    doubled = type(episodes)(
        episodes.support_x.repeat(1, 2, 1, 1, 1),
        episodes.support_y.repeat(1, 2),
        episodes.query_x,
        episodes.query_y,
        episodes.classes,
    )
    expected = model.predict(doubled)
    assert torch.allclose(outputs, expected, atol=2e-4)
    assert not torch.allclose(expected, model.predict(episodes), atol=1e-2)


def test_copies_are_changed_support_images_with_the_same_labels_and_queries_do_not_change(glyphs, test_tasks):
    model = inductive(glyphs, "mtl")
    augment = Augment(padding=3)
    table = FeatureTable.of(model, test_tasks, TestTimeAugmentation(2, augment=augment), seed=5)
    tables = (FeatureTable.of(model, test_tasks), table)
    original, copied = (each.episodes(test_tasks, 3, torch.Generator().manual_seed(0)) for each in tables)
    assert torch.equal(original.query_x, copied.query_x)
    assert copied.support_y.tolist() == original.support_y.repeat(1, 3).tolist()
    unchanged, first, second = copied.support_x.chunk(3, dim=1)
    assert torch.equal(unchanged, original.support_x)
    assert not torch.allclose(unchanged, first, atol=1e-3)
    assert not torch.allclose(first, second, atol=1e-3)
    generator = torch.Generator().manual_seed(5)
    rows = test_tasks.image_indices[:64]
    expected = model.features(augment(glyphs.float_images(rows), generator))
    assert torch.allclose(table.features[1, table.positions[rows]], expected, atol=1e-4)


def test_a_feature_table_scores_another_head_on_the_tasks_of_evaluate(glyphs, test_tasks):
    logistic, ridge = (inductive(glyphs, "mtl", test_solver=create_head(name)) for name in ("logistic", "ridge"))
    scores = FeatureTable.of(logistic, test_tasks).evaluate([logistic, ridge], test_tasks, tasks=520, seed=2)
    for model, score in zip((logistic, ridge), scores):
        assert torch.equal(score.values, evaluate(model, test_tasks, tasks=520, seed=2).values)
    assert not torch.equal(scores[0].values, scores[1].values)


def test_mirrored_features_are_the_mean_over_an_image_and_its_mirror_image(glyphs, test_tasks):
    model = inductive(glyphs, "mtl")
    table = FeatureTable.of(model, test_tasks, TestTimeAugmentation(mirrored=True))
    rows = test_tasks.image_indices[100:130]
    images = glyphs.float_images(rows)
    mean = (model.features(images) + model.features(images.flip(-1))) / 2
    assert torch.allclose(table.features[0, table.positions[rows]], mean, atol=1e-4)
    episodes = table.episodes(test_tasks, 16, torch.Generator().manual_seed(2))
    expected = score_tasks(predict_from_features(model.method, model.params, episodes), episodes)
    assert torch.equal(
        evaluate(model, test_tasks, tasks=16, seed=2, augmentation=TestTimeAugmentation(mirrored=True)).values, expected
    )


def test_rotated_features_are_the_concatenation_over_four_quarter_turns(glyphs, test_tasks):
    model = inductive(glyphs, "mtl")
    table = FeatureTable.of(model, test_tasks, TestTimeAugmentation(rotated=True))
    rows = test_tasks.image_indices[5:20]
    images = glyphs.float_images(rows)
    quarter = images.transpose(-2, -1).flip(-2)
    turns = [images, quarter, images.flip(-2, -1), quarter.flip(-2, -1)]
    expected = torch.cat([model.features(turn) for turn in turns], -1)
    assert torch.allclose(table.features[0, table.positions[rows]], expected, atol=1e-4)


def test_cropped_features_are_the_mean_over_the_image_and_five_crops(glyphs, test_tasks):
    model = inductive(glyphs, "mtl")
    images = glyphs.float_images(test_tasks.image_indices[:6])
    corners = [images[:, :, :21, :21], images[:, :, :21, 7:], images[:, :, 7:, :21], images[:, :, 7:, 7:]]
    parts = [*corners, images[:, :, 3:24, 3:24]]
    stretched = [torch.nn.functional.interpolate(part, size=28, mode="bilinear") for part in parts]
    expected = torch.stack([model.features(part) for part in (images, *stretched)]).mean(0)
    assert torch.allclose(TestTimeAugmentation(cropped=True).features(model, images), expected, atol=1e-5)
    assert not torch.allclose(expected, model.features(images), atol=1e-2)


def test_a_negative_number_of_copies_raises_an_error():
    with pytest.raises(InputError, match="copies is -1"):
        TestTimeAugmentation(copies=-1)


def test_copies_need_features_that_do_not_depend_on_the_task(glyphs, test_tasks):
    chosen, net = method("maml"), conv4(1, 28)
    for augmentation in (
        TestTimeAugmentation(copies=2),
        TestTimeAugmentation(mirrored=True),
        TestTimeAugmentation(rotated=True),
    ):
        with pytest.raises(InputError, match="but this model's features depend on the task"):
            evaluate(Model(chosen, net, parameters(chosen, net)), test_tasks, tasks=2, augmentation=augmentation)


def test_the_difference_of_scores_is_paired_by_task():
    one, other = torch.tensor([0.2, 0.9, 0.5, 0.6]), torch.tensor([0.1, 0.9, 0.2, 0.6])
    gap = Score.of(one).minus(Score.of(other))
    assert torch.allclose(gap.values.float(), one - other)
    assert gap.mean == pytest.approx(0.1)
    assert gap.ci95 == pytest.approx(stats.t.ppf(0.975, 3) * float((one - other).std()) / 2, rel=1e-5)
    assert gap.ci95 < Score.of(one).ci95
    with pytest.raises(InputError, match="the scores are means over 4 and 3 tasks"):
        Score.of(one).minus(Score.of(other[:3]))


def test_evaluation_does_not_change_the_mode_of_the_network(glyphs, test_tasks):
    model = inductive(glyphs, "mtl")
    for training in (True, False):
        model.net.train(training)
        evaluate(model, test_tasks, tasks=2)
        assert model.net.training == training


def test_any_number_beats_nan_and_nan_outputs_count_as_wrong():
    for metric in ("accuracy", "squared error"):
        finite, nan = (Score.of(torch.tensor(values), metric) for values in ([0.1, 0.2], [math.nan, 1.0]))
        assert finite.beats(nan)
        assert not nan.beats(finite)
        assert not nan.beats(nan)
    labels = torch.zeros(1, 4, dtype=torch.int64)
    x = torch.zeros(1, 4, 2)
    outputs = torch.tensor([[[2.0, 1.0], [math.nan, 1.0], [math.nan, math.nan], [1.0, 2.0]]])
    assert score_tasks(outputs, Episodes(x, labels, x, labels)).tolist() == [0.25]


class FixedOutputs:
    """A predictor that returns fixed outputs, (tasks, queries, outputs), task by task."""

    device = torch.device("cpu")

    def __init__(self, outputs: torch.Tensor):
        self.outputs, self.next = outputs, 0

    def predict(self, episodes: Episodes) -> torch.Tensor:
        self.next += len(episodes)
        return self.outputs[self.next - len(episodes) : self.next]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_tasks_on_which_adaptation_diverged_count_as_wrong_and_are_counted(test_tasks, bad):
    labels = torch.cat([test_tasks.sample(n, g).query_y for g in [torch.Generator().manual_seed(0)] for n in (16, 4)])
    outputs = torch.nn.functional.one_hot(labels, 5).float()
    outputs[[2, 17]] = bad
    score = evaluate(FixedOutputs(outputs), test_tasks, tasks=20)
    assert score.values.tolist() == [0.0 if task in (2, 17) else 1.0 for task in range(20)]
    assert score.diverged == 2
    assert str(score).endswith("(adaptation diverged on 2 of 20 tasks)")


def test_the_accuracy_is_nan_if_adaptation_diverged_on_every_task(test_tasks):
    score = evaluate(FixedOutputs(torch.full((6, 15, 5), math.nan)), test_tasks, tasks=6)
    assert math.isnan(score.mean)
    assert math.isnan(score.ci95)
    assert score.diverged == score.tasks == 6


def test_the_squared_error_is_nan_if_adaptation_diverged_and_names_the_number_of_tasks():
    outputs = torch.zeros(20, 10, 1)
    outputs[4, 0] = math.inf
    score = evaluate(FixedOutputs(outputs), Sinusoid(), tasks=20)
    assert math.isnan(score.mean)
    assert score.values.isfinite().sum() == 19
    assert "diverged on 1 of 20 tasks" in str(score)


def test_a_feature_table_also_counts_diverged_tasks(glyphs, test_tasks):
    features = torch.randn(1, len(glyphs.labels), 8, generator=torch.Generator().manual_seed(0))
    table, net = FeatureTable(features, torch.arange(len(glyphs.labels))), mlp(3, 5, width=8)
    models = [Model(chosen, net, parameters(chosen, net)) for chosen in (method("anil"), method("anil", lr=3e38))]
    finite, diverged = table.evaluate(models, test_tasks, tasks=20)
    assert (finite.diverged, diverged.diverged) == (0, 20)
    assert math.isnan(diverged.mean)


@pytest.mark.parametrize("name", ["maml", "anil"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_raise_an_error_with_their_name(name, bad):
    chosen, net = method(name), mlp(1, 1)
    params = parameters(chosen, net)
    params["head.weight"] = params["head.weight"].detach().clone()
    params["head.weight"][0, 0] = bad
    with pytest.raises(InputError, match=r"the weight 'head\.weight' contains NaN or infinite values"):
        evaluate(Model(chosen, net, params), Sinusoid(), tasks=2)


def test_statistics_that_are_not_finite_raise_an_error_with_their_name(glyphs, test_tasks):
    model = inductive(glyphs, "mtl")
    name, buffer = next((name, value) for name, value in model.net.named_buffers() if name.endswith("mean"))
    buffer[0] = math.nan
    with pytest.raises(InputError, match=f"the weight '{name}' contains NaN"):
        evaluate(model, test_tasks, tasks=2)


def test_prediction_does_not_change_the_mode_of_any_layer():
    net = mlp(1, 1)
    net.features.append(torch.nn.Dropout(0.9))
    net.train()
    net.features[0].eval()
    before = [layer.training for layer in net.modules()]
    model = Model(method("anil"), net, parameters(method("anil"), net))
    task = Sinusoid().sample(2, torch.Generator().manual_seed(0))
    first, again = (model.predict(task) for _ in range(2))
    assert torch.equal(first, again)  # nothing is dropped
    assert [layer.training for layer in net.modules()] == before


def test_a_mask_with_infinite_values_is_not_a_diverged_weight():
    net = mlp(1, 1)
    net.features.register_buffer("mask", torch.full((2, 2), -math.inf))
    chosen = method("anil")
    assert evaluate(Model(chosen, net, parameters(chosen, net)), Sinusoid(), tasks=2).tasks == 2
    net.features.mask[0, 0] = math.nan
    with pytest.raises(InputError, match=r"the weight 'features\.mask' contains NaN"):
        evaluate(Model(chosen, net, parameters(chosen, net)), Sinusoid(), tasks=2)


def test_the_first_model_with_the_best_validation_score_is_selected():
    maml, net = method("maml"), mlp(1, 1)
    models = [
        Model(maml, net, {name: scale * value for name, value in parameters(maml, net).items()})
        for scale in (30.0, 1.0, 1.0)
    ]
    assert select_model(iter(models), Sinusoid(), tasks=4) is models[1]
    with pytest.raises(InputError, match="models is empty"):
        select_model([], Sinusoid(), tasks=4)
