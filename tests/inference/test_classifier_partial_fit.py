from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from metabridge import FewShotClassifier, InputError
from metabridge.heads import Head
from metabridge.learners import method, parameters
from metabridge.models import conv4
from metabridge.training import Model

WAYS, SHOTS, SIZE = 3, 4, 16
METHODS = ["maml", "anil", "r2d2", "frozen"]


def model(name="frozen", statistics="running"):
    net = conv4(1, SIZE, WAYS, filters=4, statistics=statistics).eval()
    learner = method(name)
    return Model(learner, net, parameters(learner, net, classes=WAYS))


@pytest.fixture(scope="module")
def images():
    """Return twelve support images of three classes and six query images."""
    generator = np.random.default_rng(0)
    patterns = generator.integers(0, 200, (WAYS, SIZE, SIZE))
    labels = np.repeat(["a", "bb", "c"], SHOTS)
    support = patterns.repeat(SHOTS, 0) + generator.integers(0, 56, (WAYS * SHOTS, SIZE, SIZE))
    queries = patterns.repeat(2, 0) + generator.integers(0, 56, (2 * WAYS, SIZE, SIZE))
    return support.astype(np.uint8), labels, queries.astype(np.uint8)


def fit_in_chunks(classifier, support, labels, chunks):
    for rows in chunks:
        classifier.partial_fit(support[rows], labels[rows])
    return classifier


def random_chunks(count, chunks, seed=0):
    return np.array_split(np.random.default_rng(seed).permutation(count), chunks)


def by_class(count, chunks):
    return np.arange(count).reshape(WAYS, SHOTS)[::-1]


@pytest.mark.parametrize("order", [random_chunks, by_class])
@pytest.mark.parametrize("head", Head.registry)
def test_chunks_in_any_order_give_the_predictions_of_fit_with_every_head(images, head, order):
    support, labels, queries = images
    expected = FewShotClassifier(model(), head=head, reject=0.1).fit(support, labels)
    chunks = order(len(support), 5)
    classifier = fit_in_chunks(FewShotClassifier(model(), head=head, reject=0.1), support, labels, chunks)
    np.testing.assert_allclose(classifier.predict_proba(queries), expected.predict_proba(queries), atol=1e-6)
    np.testing.assert_allclose(classifier.outlier_score(queries), expected.outlier_score(queries), atol=1e-6)
    assert (classifier.penalty_, classifier.classes_.tolist()) == (expected.penalty_, expected.classes_.tolist())
    assert classifier.temperature_ == pytest.approx(expected.temperature_, abs=1e-6)
    assert classifier.threshold_ == pytest.approx(expected.threshold_, abs=1e-6)


@pytest.mark.filterwarnings("ignore:the batch norm")
@pytest.mark.parametrize("statistics", ["running", "batch"])
@pytest.mark.parametrize("name", METHODS)
def test_chunks_in_any_order_give_the_predictions_of_fit_with_every_kind_of_method(images, name, statistics):
    support, labels, queries = images
    expected = FewShotClassifier(model(name, statistics)).fit(support, labels).predict_proba(queries)
    classifier = fit_in_chunks(FewShotClassifier(model(name, statistics)), support, labels, random_chunks(12, 4))
    np.testing.assert_allclose(classifier.predict_proba(queries), expected, atol=1e-6)
    reversed_order = FewShotClassifier(model(name, statistics)).fit(support[::-1], labels[::-1])
    np.testing.assert_allclose(reversed_order.predict_proba(queries), expected, atol=1e-6)


@pytest.mark.filterwarnings("ignore:the batch norm")
@pytest.mark.parametrize("statistics", ["running", "batch"])
@pytest.mark.parametrize("name", METHODS)
def test_images_can_be_added_to_a_loaded_classifier(images, name, statistics, tmp_path):
    support, labels, queries = images
    expected = FewShotClassifier(model(name, statistics)).fit(support, labels).predict_proba(queries)
    some = np.arange(12) % SHOTS != 1
    FewShotClassifier(model(name, statistics)).fit(support[some], labels[some]).save(tmp_path)
    loaded = FewShotClassifier.load(tmp_path).partial_fit(support[~some], labels[~some])
    np.testing.assert_allclose(loaded.predict_proba(queries), expected, atol=1e-6)


@pytest.mark.parametrize("name", ["frozen", "maml"])
def test_the_nearest_support_images_are_numbered_in_the_order_in_which_they_were_passed(images, name):
    support, labels, _ = images
    chunks = random_chunks(12, 4)
    classifier = fit_in_chunks(FewShotClassifier(model(name)), support, labels, chunks)
    order = np.concatenate(chunks)
    details = classifier.predict_details(support[order])
    assert details.nearest.tolist() == list(range(12))
    assert details.nearest_labels.tolist() == labels[order].tolist()
    np.testing.assert_allclose(details.similarities, 1, atol=1e-5)


def test_new_classes_may_have_longer_names_or_labels_of_another_type(images):
    support, labels, queries = images
    for names in (["a", "longer", "the longest"], [1, 2.0, 3], [1, 2, "three"], [False, 7, 8]):
        renamed = [names[index] for index in np.unique(labels, return_inverse=True)[1]]
        expected = FewShotClassifier(model()).fit(support, np.array(renamed)).predict(queries)
        classifier = FewShotClassifier(model())
        for start in (0, SHOTS, 2 * SHOTS):
            classifier.partial_fit(support[start : start + SHOTS], renamed[start : start + SHOTS])
        assert classifier.predict(queries).tolist() == expected.tolist()
        assert classifier.classes_.dtype == np.array(renamed).dtype


def test_a_classifier_without_enough_classes_says_so(images):
    support, labels, queries = images
    classifier = FewShotClassifier(model()).partial_fit(support[:SHOTS], labels[:SHOTS])
    with pytest.raises(InputError, match=r"has images of 1 class so far, but needs 2\. Call partial_fit"):
        classifier.predict(queries)
    anil = FewShotClassifier(model("anil")).partial_fit(support[: 2 * SHOTS], labels[: 2 * SHOTS])
    with pytest.raises(InputError, match="has images of 2 classes so far, but needs 3"):
        anil.predict_proba(queries)
    anil.partial_fit(support[2 * SHOTS :], labels[2 * SHOTS :])
    expected = anil.predict(queries).tolist()
    with pytest.raises(InputError, match=r"y has 4 classes, but the run was trained for 3"):
        anil.partial_fit(support[:1], ["a fourth class"])
    assert anil.predict(queries).tolist() == expected  # the rejected image was not added


def test_too_few_images_to_reject_are_an_error_in_predict_but_not_in_partial_fit(images):
    support, labels, queries = images
    first = np.arange(WAYS) * SHOTS
    classifier = FewShotClassifier(model(), reject=0.1).partial_fit(support[first], labels[first])
    assert classifier.predict_proba(queries).shape == (6, 3)
    with pytest.raises(InputError, match="the threshold cannot be calibrated"):
        classifier.predict(queries)
    with pytest.raises(InputError, match="the threshold cannot be calibrated"):
        FewShotClassifier(model(), reject=0.1).fit(support[first], labels[first])
    others = np.setdiff1d(np.arange(12), first)
    expected = FewShotClassifier(model(), reject=0.1).fit(support, labels).predict(queries)
    assert classifier.partial_fit(support[others], labels[others]).predict(queries).tolist() == expected.tolist()


def test_fit_forgets_the_images_of_partial_fit(images):
    support, labels, _ = images
    classifier = FewShotClassifier(model()).partial_fit(support[:SHOTS], ["other"] * SHOTS)
    assert classifier.fit(support, labels).classes_.tolist() == ["a", "bb", "c"]


def test_labels_that_are_not_in_classes_are_an_error(images):
    support, labels, _ = images
    classifier = FewShotClassifier(model()).partial_fit(support, labels, classes=["a", "bb", "c", "d"])
    assert classifier.classes_.tolist() == ["a", "bb", "c"]
    with pytest.raises(InputError, match="y has the label 'e', which is not in classes"):
        classifier.partial_fit(support[:1], ["e"], classes=["a", "bb", "c", "d"])


def test_images_cannot_be_added_without_the_support_images_or_the_method(images, tmp_path):
    support, labels, queries = images
    classifier = FewShotClassifier(model()).fit(support, labels)
    classifier.support_ = None
    classifier.save(tmp_path)
    loaded = FewShotClassifier.load(tmp_path)
    np.testing.assert_array_equal(loaded.predict_proba(queries), classifier.predict_proba(queries))
    assert loaded.predict_details(queries).nearest is None
    for use in (
        lambda: loaded.partial_fit(support[:1], ["a"]),
        loaded.confusion,
        lambda: loaded.outlier_score(queries),
    ):
        with pytest.raises(InputError, match="loaded from a file that does not contain its support images"):
            use()
    with pytest.raises(InputError, match="loaded from a file that does not contain its support images"):
        FewShotClassifier.load(tmp_path, reject=0.1)


def custom_loss(outputs, targets):
    return (outputs.softmax(-1) - 0.1).square().sum()


def test_a_method_that_cannot_be_saved_still_predicts_and_rejects(images, tmp_path):
    support, labels, queries = images
    anil = model("anil")
    custom = replace(anil, method=replace(anil.method, loss=custom_loss))
    classifier = FewShotClassifier(custom, reject=0.1).fit(support, labels)
    classifier.save(tmp_path)
    loaded = FewShotClassifier.load(tmp_path)
    assert loaded.predict(queries).tolist() == classifier.predict(queries).tolist()
    with pytest.raises(InputError, match="does not contain its support images or its method"):
        loaded.partial_fit(support[:1], ["a"])
