from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import confusion_matrix

from metabridge import FewShotClassifier, InputError
from metabridge.learners import method, parameters
from metabridge.models import conv4
from metabridge.training import Model


@pytest.fixture(scope="module")
def model():
    net = conv4(1, 16, filters=8, statistics="running").eval()
    frozen = method("frozen")
    return Model(frozen, net, parameters(frozen, net))


@pytest.fixture(scope="module")
def images():
    """Return support and query images of three classes, and images of ten other classes."""
    generator = np.random.default_rng(0)
    patterns = generator.integers(0, 215, (13, 16, 16))
    noisy = patterns[:, None] + generator.integers(0, 41, (13, 30, 16, 16))
    noisy = noisy.astype(np.uint8)
    return tuple(part.reshape(-1, 16, 16) for part in (noisy[:3, :10], noisy[:3, 10:], noisy[3:]))


LABELS, QUERY_LABELS = np.repeat(["a", "b", "c"], 10), np.repeat(["a", "b", "c"], 20)


def test_strangers_are_rejected_and_about_the_promised_rate_of_known_images(model, images):
    support, query, strangers = images
    classifier = FewShotClassifier(model, reject=0.1).fit(support, LABELS)
    known, unknown = classifier.predict(query), classifier.predict(strangers)
    assert (known == "none of these").mean() < 0.3
    assert (unknown == "none of these").mean() > 0.8
    assert classifier.outlier_label_ == "none of these"
    scores = classifier.outlier_score(np.concatenate([query, strangers]))
    np.testing.assert_array_equal(scores > classifier.threshold_, np.concatenate([known, unknown]) == "none of these")


def test_without_reject_nothing_is_rejected_but_scores_are_the_same(model, images):
    support, query, strangers = images
    rejecting, accepting = (FewShotClassifier(model, reject=rate).fit(support, LABELS) for rate in (0.1, None))
    assert set(accepting.predict(strangers)) <= {"a", "b", "c"}
    assert accepting.threshold_ is None
    np.testing.assert_array_equal(accepting.outlier_score(strangers), rejecting.outlier_score(strangers))
    np.testing.assert_array_equal(accepting.predict_proba(query), rejecting.predict_proba(query))
    details = accepting.predict_details(query)
    assert details.outlier_scores is None
    assert not details.rejected.any()


def test_details_agree_with_the_other_methods(model, images):
    support, query, strangers = images
    classifier = FewShotClassifier(model, reject=0.1).fit(support, LABELS)
    x = np.concatenate([query[::7], strangers[::50]])
    details = classifier.predict_details(x)
    np.testing.assert_array_equal(details.labels, classifier.predict(x))
    np.testing.assert_array_equal(details.probabilities, classifier.predict_proba(x))
    np.testing.assert_array_equal(details.outlier_scores, classifier.outlier_score(x))
    np.testing.assert_array_equal(details.rejected, details.labels == "none of these")
    features, support_features = classifier.transform(x), classifier.transform(support)
    norms = np.linalg.norm(features, axis=1)[:, None] * np.linalg.norm(support_features, axis=1)
    cosines = features @ support_features.T / norms
    np.testing.assert_array_equal(details.nearest, cosines.argmax(1))
    np.testing.assert_allclose(details.similarities, cosines.max(1), atol=1e-5)
    np.testing.assert_array_equal(details.nearest_labels, LABELS[details.nearest])


@pytest.mark.parametrize(
    ("names", "label"), [([3, 5, 9], -1), ([0.0, 1.0, 2.0], -1), (["a", "much longer name", "c"], "none of these")]
)
def test_the_label_of_rejected_images_has_the_type_of_the_labels(model, images, names, label):
    support, _, strangers = images
    y = np.array(names)[np.unique(LABELS, return_inverse=True)[1]]
    classifier = FewShotClassifier(model, reject=0.1).fit(support, y)
    assert classifier.outlier_label_ == label
    predictions = classifier.predict(np.concatenate([support, strangers]))
    assert set(predictions.tolist()) <= {*names, label}
    assert (predictions == label).any()
    assert predictions.dtype.kind == np.array(names).dtype.kind


@pytest.mark.parametrize(("names", "label"), [([-1, 0, 1], "-1"), (["none of these", "b", "c"], "'none of these'")])
def test_a_class_with_the_label_of_rejected_images_is_an_error(model, images, names, label):
    y = np.array(names)[np.unique(LABELS, return_inverse=True)[1]]
    with pytest.raises(InputError, match=f"y has the label {label}, which stands for rejected images"):
        FewShotClassifier(model, reject=0.1).fit(images[0], y)
    FewShotClassifier(model).fit(images[0], y)


def test_rates_and_support_sets_that_cannot_be_used_are_errors(model, images):
    support = images[0]
    for rate in (0, 1, 5, float("nan")):
        with pytest.raises(InputError, match=r"reject is \S+, but must be between 0 and 1, such as 0\.05"):
            FewShotClassifier(model, reject=rate).fit(support, LABELS)
    with pytest.raises(InputError, match="the threshold cannot be calibrated"):
        FewShotClassifier(model, reject=0.1).fit(support[::10], LABELS[::10])


def test_reject_must_be_set_before_fitting(model, images):
    classifier = FewShotClassifier(model).fit(images[0], LABELS).set_params(reject=0.1)
    with pytest.raises(InputError, match=r"reject was set to 0\.1 after fitting\. Fit again"):
        classifier.predict(images[1])
    assert classifier.fit(images[0], LABELS).predict(images[1]).shape == (60,)


@pytest.mark.parametrize("saved_rate", [None, 0.1])
def test_a_loaded_classifier_rejects_as_when_it_was_saved_or_with_another_rate(model, images, tmp_path, saved_rate):
    support, query, strangers = images
    classifier = FewShotClassifier(model, reject=saved_rate).fit(support, LABELS)
    classifier.save(tmp_path)
    x = np.concatenate([query, strangers])
    np.testing.assert_array_equal(FewShotClassifier.load(tmp_path).predict(x), classifier.predict(x))
    other = FewShotClassifier(model, reject=0.4).fit(support, LABELS)
    loaded = FewShotClassifier.load(tmp_path, reject=0.4)
    assert loaded.reject == 0.4
    np.testing.assert_array_equal(loaded.predict(x), other.predict(x))
    with pytest.raises(InputError, match=r"reject is 2, but must be between 0 and 1"):
        FewShotClassifier.load(tmp_path, reject=2)


def test_the_confusion_matrix_counts_predictions_of_labeled_images(model, images):
    support, query, strangers = images
    classifier = FewShotClassifier(model).fit(support, LABELS)
    confusion = classifier.confusion(query, QUERY_LABELS)
    np.testing.assert_array_equal(confusion.matrix, confusion_matrix(QUERY_LABELS, classifier.predict(query)))
    assert confusion.accuracy == classifier.score(query, QUERY_LABELS)
    with pytest.raises(InputError, match="y has the label 'z', which is not a class"):
        classifier.confusion(query[:1], ["z"])
    with pytest.raises(InputError, match="X has 2 images, but y has 1 labels"):
        classifier.confusion(query[:2], ["a"])
    rejecting = FewShotClassifier(model, reject=0.1).fit(support, LABELS)
    x, y = np.concatenate([query, strangers]), [*QUERY_LABELS, *["stranger"] * len(strangers)]
    confusion = rejecting.confusion(x, y)
    assert confusion.class_names == ("a", "b", "c", "none of these")
    expected = confusion_matrix([*QUERY_LABELS, *["none of these"] * len(strangers)], rejecting.predict(x))
    np.testing.assert_array_equal(confusion.matrix, expected)


def test_without_images_the_confusion_matrix_counts_left_out_support_images(model, images):
    support = images[0]
    classifier = FewShotClassifier(model).fit(support[:21], LABELS[:21])  # the last class has one image
    assert classifier.confusion().matrix.sum(1).tolist() == [10, 10, 0]
    maml, net = method("maml"), conv4(1, 16, 3, statistics="running").eval()
    classifier = FewShotClassifier(Model(maml, net, parameters(maml, net))).fit(support, LABELS)
    with pytest.raises(InputError, match="X is None, but support images can be left out only if"):
        classifier.confusion()
