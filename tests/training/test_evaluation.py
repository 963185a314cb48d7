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
    in_interval = [
        abs(score.mean - 0.3) < score.ci95
        for score in (Score.of((torch.rand(200, generator=generator) < 0.3).double()) for _ in range(1000))
    ]
    assert sum(in_interval) / 1000 == pytest.approx(0.95, abs=0.025)  # more than three standard errors


@pytest.mark.parametrize("tasks", [2, 5, 10])
def test_the_interval_of_few_tasks_also_has_95_percent_coverage(tasks):
    values = torch.randn(4000, tasks, generator=torch.Generator().manual_seed(tasks), dtype=torch.float64)
    covered = sum(abs(score.mean) <= score.ci95 for score in map(Score.of, values))
    low, high = stats.binom.interval(0.9999, 4000, 0.95)  # of the number of intervals that contain the true mean 0
    assert low <= covered <= high


@pytest.mark.parametrize("name", ["maml", "rfs"])
def test_images_with_another_number_of_channels_raise_an_error(test_tasks, name):
    learner, net = method(name), conv4(3, 28)
    model = Model(learner, net, parameters(learner, net, classes=5))
    with pytest.raises(InputError, match=r"Inputs have shape \(1, 28, 28\), but the network was built with channels=3"):
        evaluate(model, test_tasks, tasks=2)


def test_the_same_seed_evaluates_every_model_on_the_same_tasks():
    learner, net = method("maml"), mlp(1, 1)
    model = Model(learner, net, parameters(learner, net))
    first, second = (evaluate(model, Sinusoid(), tasks=20, seed=3) for _ in range(2))
    assert torch.equal(first.values, second.values)
    assert not torch.equal(first.values, evaluate(model, Sinusoid(), tasks=20, seed=4).values)


def test_every_task_is_scored_separately():
    learner, net = method("anil"), mlp(1, 1)
    model = Model(learner, net, parameters(learner, net))

    class FixedTasks:
        outputs = 1

        def __init__(self):
            self.tasks, self.num_sampled = Sinusoid().sample(40, torch.Generator().manual_seed(0)), 0

        def sample(self, tasks, generator):
            self.num_sampled += tasks
            return self.tasks[self.num_sampled - tasks : self.num_sampled]

    scores = evaluate(model, FixedTasks(), tasks=40).values
    for task in (0, 17, 39):  # of the first, second and third batch
        episodes = FixedTasks().tasks[task]
        score = score_tasks(model.predict(episodes), episodes)
        assert float(scores[task]) == pytest.approx(float(score), rel=1e-5)


def model_with_fixed_features(glyphs, name: str, **options) -> Model:
    """Return a model whose features depend on neither the task nor the other images."""
    learner, net = method(name, **options), conv4(1, 28, statistics="running")
    images = glyphs.float_images(torch.arange(0, len(glyphs.labels), 97))
    estimate_statistics(net.features, [images])
    return Model(learner, net, parameters(learner, net, classes=glyphs.tasks("train").classes))


def concatenated(batches) -> tuple[torch.Tensor, ...]:
    """Return the outputs, labels and classes of all batches of `predictions`, concatenated."""
    tensors = [(outputs, episodes.query_y, episodes.classes) for outputs, episodes in batches]
    return tuple(torch.cat(column) for column in zip(*tensors))


@pytest.fixture(scope="module")
def test_tasks(glyphs):
    """Return tasks of the test split; this is a fixture, not a test."""
    return glyphs.tasks("test", ways=5, shots=2, queries=3)


@pytest.mark.parametrize("name", ["mtl", "r2d2", "metaoptnet", "anil"])
def test_features_computed_once_give_the_same_predictions_as_for_single_tasks(glyphs, test_tasks, name):
    model = model_with_fixed_features(glyphs, name)
    outputs, labels, classes = concatenated(predictions(model, test_tasks, tasks=20, seed=3))
    generator = torch.Generator().manual_seed(3)
    for start, count in ((0, 16), (16, 4)):  # tasks are sampled in blocks of 16
        episodes = test_tasks.sample(count, generator)
        block = slice(start, start + count)
        assert torch.allclose(outputs[block], model.predict(episodes), atol=2e-4)
        assert torch.equal(labels[block], episodes.query_y)
        assert torch.equal(classes[block], episodes.classes)


def test_models_with_and_without_fixed_features_are_evaluated_on_the_same_tasks(glyphs, test_tasks):
    """One model computes features once and solves heads in large batches; the other adapts all layers in small ones."""
    learner, net = method("maml", steps=1), conv4(1, 28)
    maml_model = Model(learner, net, parameters(learner, net))
    (_, *mtl_tasks), (_, *maml_tasks) = (
        concatenated(predictions(model, test_tasks, tasks=35))
        for model in (model_with_fixed_features(glyphs, "mtl"), maml_model)
    )
    assert all(map(torch.equal, mtl_tasks, maml_tasks))


def test_tasks_do_not_depend_on_the_batch_size(test_tasks):
    """On a GPU, a batch consists of several blocks."""
    for environment in (test_tasks, Sinusoid()):
        batch = _sample_in_blocks(environment, 40, torch.Generator().manual_seed(0), torch.device("cpu"))
        generator = torch.Generator().manual_seed(0)
        blocks = [environment.sample(count, generator) for count in (16, 16, 8)]
        for index, tensor in enumerate(batch.tensors()):
            assert torch.equal(tensor, torch.cat([block.tensors()[index] for block in blocks]))


@pytest.mark.parametrize("name", ["mtl", "r2d2"])
def test_an_unchanged_copy_duplicates_every_support_image(glyphs, test_tasks, name):
    model = model_with_fixed_features(glyphs, name)
    no_change = Augment(padding=0, jitter=0, flip=False)
    outputs, _, _ = concatenated(
        predictions(model, test_tasks, tasks=12, seed=1, augmentation=TestTimeAugmentation(copies=1, augment=no_change))
    )
    episodes = test_tasks.sample(12, torch.Generator().manual_seed(1))
    with_duplicates = type(episodes)(
        episodes.support_x.repeat(1, 2, 1, 1, 1),
        episodes.support_y.repeat(1, 2),
        episodes.query_x,
        episodes.query_y,
        episodes.classes,
    )
    expected = model.predict(with_duplicates)
    assert torch.allclose(outputs, expected, atol=2e-4)
    assert not torch.allclose(expected, model.predict(episodes), atol=1e-2)


def test_copies_are_changed_support_images_with_the_same_labels_and_queries_do_not_change(glyphs, test_tasks):
    model = model_with_fixed_features(glyphs, "mtl")
    augment = Augment(padding=3)
    table_with_copies = FeatureTable.of(model, test_tasks, TestTimeAugmentation(copies=2, augment=augment), seed=5)
    tables = (FeatureTable.of(model, test_tasks), table_with_copies)
    original, copied = (table.episodes(test_tasks, 3, torch.Generator().manual_seed(0)) for table in tables)
    assert torch.equal(original.query_x, copied.query_x)
    assert copied.support_y.tolist() == original.support_y.repeat(1, 3).tolist()
    unchanged, first_copy, second_copy = copied.support_x.chunk(3, dim=1)
    assert torch.equal(unchanged, original.support_x)
    assert not torch.allclose(unchanged, first_copy, atol=1e-3)
    assert not torch.allclose(first_copy, second_copy, atol=1e-3)
    generator = torch.Generator().manual_seed(5)
    image_indices = test_tasks.image_indices[:64]
    expected = model.features(augment(glyphs.float_images(image_indices), generator))
    positions = table_with_copies.positions[image_indices]
    assert torch.allclose(table_with_copies.features[1, positions], expected, atol=1e-4)


def test_a_feature_table_scores_another_head_on_the_tasks_of_evaluate(glyphs, test_tasks):
    logistic, ridge = (
        model_with_fixed_features(glyphs, "mtl", test_solver=create_head(name)) for name in ("logistic", "ridge")
    )
    # 520 tasks are two batches of the table
    scores = FeatureTable.of(logistic, test_tasks).evaluate([logistic, ridge], test_tasks, tasks=520, seed=2)
    for model, score in zip((logistic, ridge), scores):
        assert torch.equal(score.values, evaluate(model, test_tasks, tasks=520, seed=2).values)
    assert not torch.equal(scores[0].values, scores[1].values)


def test_mirrored_features_are_the_mean_over_an_image_and_its_mirror_image(glyphs, test_tasks):
    model = model_with_fixed_features(glyphs, "mtl")
    table = FeatureTable.of(model, test_tasks, TestTimeAugmentation(mirrored=True))
    image_indices = test_tasks.image_indices[100:130]
    images = glyphs.float_images(image_indices)
    mean = (model.features(images) + model.features(images.flip(-1))) / 2
    assert torch.allclose(table.features[0, table.positions[image_indices]], mean, atol=1e-4)
    episodes = table.episodes(test_tasks, 16, torch.Generator().manual_seed(2))
    expected = score_tasks(predict_from_features(model.method, model.params, episodes), episodes)
    assert torch.equal(
        evaluate(model, test_tasks, tasks=16, seed=2, augmentation=TestTimeAugmentation(mirrored=True)).values, expected
    )


def test_rotated_features_are_the_concatenation_over_four_quarter_turns(glyphs, test_tasks):
    model = model_with_fixed_features(glyphs, "mtl")
    table = FeatureTable.of(model, test_tasks, TestTimeAugmentation(rotated=True))
    image_indices = test_tasks.image_indices[5:20]
    images = glyphs.float_images(image_indices)
    rotated_90 = images.transpose(-2, -1).flip(-2)
    rotations = [images, rotated_90, images.flip(-2, -1), rotated_90.flip(-2, -1)]
    expected = torch.cat([model.features(rotation) for rotation in rotations], -1)
    assert torch.allclose(table.features[0, table.positions[image_indices]], expected, atol=1e-4)


def test_cropped_features_are_the_mean_over_the_image_and_five_crops(glyphs, test_tasks):
    model = model_with_fixed_features(glyphs, "mtl")
    images = glyphs.float_images(test_tasks.image_indices[:6])
    # a crop has 21 of the 28 rows and columns, which is three quarters
    corners = [images[:, :, :21, :21], images[:, :, :21, 7:], images[:, :, 7:, :21], images[:, :, 7:, 7:]]
    crops = [*corners, images[:, :, 3:24, 3:24]]
    resized = [torch.nn.functional.interpolate(crop, size=28, mode="bilinear") for crop in crops]
    expected = torch.stack([model.features(view) for view in (images, *resized)]).mean(0)
    assert torch.allclose(TestTimeAugmentation(cropped=True).features(model, images), expected, atol=1e-5)
    assert not torch.allclose(expected, model.features(images), atol=1e-2)


def test_a_negative_number_of_copies_raises_an_error():
    with pytest.raises(InputError, match="copies is -1"):
        TestTimeAugmentation(copies=-1)


def test_test_time_augmentation_needs_features_that_do_not_depend_on_the_task(glyphs, test_tasks):
    learner, net = method("maml"), conv4(1, 28)
    for augmentation in (
        TestTimeAugmentation(copies=2),
        TestTimeAugmentation(mirrored=True),
        TestTimeAugmentation(rotated=True),
    ):
        with pytest.raises(InputError, match="but this model's features depend on the task"):
            evaluate(Model(learner, net, parameters(learner, net)), test_tasks, tasks=2, augmentation=augmentation)


def test_the_difference_of_scores_is_paired_by_task():
    first, second = torch.tensor([0.2, 0.9, 0.5, 0.6]), torch.tensor([0.1, 0.9, 0.2, 0.6])
    difference = Score.of(first).minus(Score.of(second))
    assert torch.allclose(difference.values.float(), first - second)
    assert difference.mean == pytest.approx(0.1)
    assert difference.ci95 == pytest.approx(stats.t.ppf(0.975, 3) * float((first - second).std()) / 2, rel=1e-5)
    assert difference.ci95 < Score.of(first).ci95
    with pytest.raises(InputError, match="the scores are means over 4 and 3 tasks"):
        Score.of(first).minus(Score.of(second[:3]))


def test_evaluation_does_not_change_the_mode_of_the_network(glyphs, test_tasks):
    model = model_with_fixed_features(glyphs, "mtl")
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
        self.outputs, self.predicted_tasks = outputs, 0

    def predict(self, episodes: Episodes) -> torch.Tensor:
        self.predicted_tasks += len(episodes)
        return self.outputs[self.predicted_tasks - len(episodes) : self.predicted_tasks]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_tasks_on_which_adaptation_diverged_count_as_wrong_and_are_counted(test_tasks, value):
    generator = torch.Generator().manual_seed(0)
    # tasks are sampled in blocks of 16
    labels = torch.cat([test_tasks.sample(count, generator).query_y for count in (16, 4)])
    outputs = torch.nn.functional.one_hot(labels, 5).float()
    outputs[[2, 17]] = value
    score = evaluate(FixedOutputs(outputs), test_tasks, tasks=20)
    assert score.values.tolist() == [0.0 if task in (2, 17) else 1.0 for task in range(20)]
    assert score.diverged == 2
    assert str(score).endswith("(adaptation diverged on 2 of 20 tasks)")


def test_the_accuracy_is_nan_if_adaptation_diverged_on_every_task(test_tasks):
    score = evaluate(FixedOutputs(torch.full((6, 15, 5), math.nan)), test_tasks, tasks=6)
    assert math.isnan(score.mean)
    assert math.isnan(score.ci95)
    assert score.diverged == score.tasks == 6


def test_the_squared_error_is_nan_and_reports_the_number_of_tasks_if_adaptation_diverged():
    outputs = torch.zeros(20, 10, 1)
    outputs[4, 0] = math.inf
    score = evaluate(FixedOutputs(outputs), Sinusoid(), tasks=20)
    assert math.isnan(score.mean)
    assert score.values.isfinite().sum() == 19
    assert "diverged on 1 of 20 tasks" in str(score)


def test_a_feature_table_also_counts_diverged_tasks(glyphs, test_tasks):
    features = torch.randn(1, len(glyphs.labels), 8, generator=torch.Generator().manual_seed(0))
    table, net = FeatureTable(features, torch.arange(len(glyphs.labels))), mlp(3, 5, width=8)
    learners = method("anil"), method("anil", lr=3e38)  # adaptation with this learning rate diverges
    models = [Model(learner, net, parameters(learner, net)) for learner in learners]
    finite_score, diverged_score = table.evaluate(models, test_tasks, tasks=20)
    assert (finite_score.diverged, diverged_score.diverged) == (0, 20)
    assert math.isnan(diverged_score.mean)


@pytest.mark.parametrize("name", ["maml", "anil"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_raise_an_error_with_their_name(name, value):
    learner, net = method(name), mlp(1, 1)
    params = parameters(learner, net)
    params["head.weight"] = params["head.weight"].detach().clone()
    params["head.weight"][0, 0] = value
    with pytest.raises(InputError, match=r"the weight 'head\.weight' contains NaN or infinite values"):
        evaluate(Model(learner, net, params), Sinusoid(), tasks=2)


def test_statistics_that_are_not_finite_raise_an_error_with_their_name(glyphs, test_tasks):
    model = model_with_fixed_features(glyphs, "mtl")
    name, buffer = next((name, value) for name, value in model.net.named_buffers() if name.endswith("mean"))
    buffer[0] = math.nan
    with pytest.raises(InputError, match=f"the weight '{name}' contains NaN"):
        evaluate(model, test_tasks, tasks=2)


def test_prediction_does_not_change_the_mode_of_any_layer():
    net = mlp(1, 1)
    net.features.append(torch.nn.Dropout(0.9))
    net.train()
    net.features[0].eval()
    modes = [layer.training for layer in net.modules()]
    model = Model(method("anil"), net, parameters(method("anil"), net))
    task = Sinusoid().sample(2, torch.Generator().manual_seed(0))
    first, second = (model.predict(task) for _ in range(2))
    assert torch.equal(first, second)  # dropout is inactive
    assert [layer.training for layer in net.modules()] == modes


def test_a_mask_with_infinite_values_is_not_a_diverged_weight():
    net = mlp(1, 1)
    net.features.register_buffer("mask", torch.full((2, 2), -math.inf))
    learner = method("anil")
    assert evaluate(Model(learner, net, parameters(learner, net)), Sinusoid(), tasks=2).tasks == 2
    net.features.mask[0, 0] = math.nan
    with pytest.raises(InputError, match=r"the weight 'features\.mask' contains NaN"):
        evaluate(Model(learner, net, parameters(learner, net)), Sinusoid(), tasks=2)


def test_the_first_model_with_the_best_validation_score_is_selected():
    maml, net = method("maml"), mlp(1, 1)
    models = [
        Model(maml, net, {name: scale * value for name, value in parameters(maml, net).items()})
        for scale in (30.0, 1.0, 1.0)
    ]
    assert select_model(iter(models), Sinusoid(), tasks=4) is models[1]
    with pytest.raises(InputError, match="models is empty"):
        select_model([], Sinusoid(), tasks=4)
