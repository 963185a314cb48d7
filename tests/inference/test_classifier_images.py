"""The kinds of images that the methods of the classifier accept, and their memory."""

from __future__ import annotations

import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from metabridge import FewShotClassifier
from metabridge.inference import image_input
from metabridge.learners import method, parameters
from metabridge.models import conv4
from metabridge.training import Model

METHODS = ("predict", "predict_proba", "decision_function", "transform", "outlier_score")


@pytest.fixture(scope="module")
def classifier():
    """Return a classifier of three classes of color images."""
    net = conv4(3, 16, filters=4, statistics="running").eval()
    frozen = method("frozen")
    images = np.random.default_rng(0).integers(0, 256, (6, 16, 16, 3), dtype=np.uint8)
    return FewShotClassifier(Model(frozen, net, parameters(frozen, net)), reject=0.2).fit(images, list("aabbcc"))


@pytest.fixture(scope="module")
def color():
    return np.random.default_rng(1).integers(0, 256, (16, 16, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def file(color, tmp_path_factory):
    file = tmp_path_factory.mktemp("images") / "image.png"
    Image.fromarray(color).save(file)
    return file


@pytest.mark.parametrize("name", METHODS)
def test_a_single_image_of_any_kind_is_a_list_of_one_image(classifier, color, file, name):
    tensor = torch.from_numpy(color).permute(2, 0, 1)
    kinds = [file, str(file), Image.open(file), color, color / 255, tensor, tensor.float() / 255, tensor[None]]
    expected = getattr(classifier, name)([file])
    assert len(expected) == 1
    for image in kinds:
        np.testing.assert_array_equal(getattr(classifier, name)(image), expected)


def test_gray_images_may_be_arrays_and_tensors_of_any_dimension(classifier, color):
    gray = color[:, :, 0]
    expected = classifier.predict_proba([gray])
    tensor = torch.from_numpy(gray)
    for image in (gray, gray[None], gray[..., None], gray[None, ..., None], tensor, tensor[None], tensor[None, None]):
        np.testing.assert_array_equal(classifier.predict_proba(image), expected)
    assert classifier.predict(np.stack([gray] * 5)).shape == (5,)
    assert classifier.predict(torch.stack([tensor] * 5)).shape == (5,)
    assert classifier.predict([tensor, tensor[None], tensor.expand(3, -1, -1)]).shape == (3,)


def test_three_stacked_gray_images_are_an_array_of_images_but_a_tensor_of_channels(classifier, color):
    planes = np.ascontiguousarray(color.transpose(2, 0, 1))
    assert classifier.predict(planes).shape == (3,)
    np.testing.assert_array_equal(classifier.predict_proba(torch.from_numpy(planes)), classifier.predict_proba([color]))
    assert classifier.predict(torch.from_numpy(planes)[:, None]).shape == (3,)


def test_half_precision_tensors_that_need_gradients_are_read(classifier, color):
    tensor = (torch.from_numpy(color).permute(2, 0, 1) / 255).bfloat16().requires_grad_()
    assert classifier.predict_proba(tensor).shape == (1, 3)


def test_transform_returns_the_features_of_the_network_without_normalization(classifier, color):
    images = torch.from_numpy(np.stack([color, 255 - color])).permute(0, 3, 1, 2)
    features = classifier.transform(images)
    expected = classifier.model_.features(images.float() / 255)
    np.testing.assert_allclose(features, expected, atol=1e-5)
    assert abs(np.linalg.norm(features, axis=1) - 1).min() > 0.01
    fitted = FewShotClassifier(classifier.model_)
    assert fitted.fit_transform(images, [0, 1]).shape == features.shape


def test_many_images_are_decoded_and_classified_in_bounded_memory(classifier, color, monkeypatch):
    alive, counts = set(), []

    def count(content, options):
        image = decode(content, options)
        alive.add(id(image))
        weakref.finalize(image, alive.discard, id(image))
        counts.append(len(alive))
        return image

    decode = image_input.decode
    monkeypatch.setattr(image_input, "decode", count)
    monkeypatch.setattr("metabridge.inference.support_adaptation.CHUNK_SIZE", 32)
    assert classifier.predict(color for _ in range(2000)).shape == (2000,)
    assert len(counts) == 2000
    # a chunk of 32 images, and the images that eight threads at most have decoded or are decoding
    assert max(counts) <= 32 + 16 * (2 * 8 + 1)


def test_a_generator_of_paths_gives_the_predictions_of_a_list(classifier, file):
    expected = classifier.predict_proba([file] * 3)
    np.testing.assert_array_equal(classifier.predict_proba(path for path in [file] * 3), expected)


def test_unreadable_images_are_skipped_on_request_and_keep_their_positions(classifier, file, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    details = classifier.predict_details([broken, file, Path("nowhere.png"), file], skip_unreadable=True)
    assert details.indices.tolist() == [1, 3]
    assert details.unreadable == {
        0: (str(broken), "it is not an image that Pillow reads"),
        2: ("nowhere.png", "No such file or directory"),
    }
    np.testing.assert_array_equal(details.probabilities, classifier.predict_proba([file, file]))
    with pytest.raises(ValueError, match=r"broken\.png cannot be read"):
        classifier.predict_details([file, broken])
    with pytest.raises(ValueError, match=r"none of the 2 images can be read \(.*broken\.png: it is not"):
        classifier.predict_details([broken, broken], skip_unreadable=True)


def test_features_of_a_pretrained_model_are_computed_once_for_the_same_images(monkeypatch, tmp_path):
    monkeypatch.setenv("METABRIDGE_CACHE", str(tmp_path))
    images = np.random.default_rng(0).integers(0, 256, (6, 20, 20, 3), dtype=np.uint8)
    first = FewShotClassifier("photos", device="cpu").fit(images, [0, 1, 2] * 2)
    probabilities = first.predict_proba(images)
    again = FewShotClassifier("photos", device="cpu")
    monkeypatch.setattr("metabridge.inference.support_adaptation.apply_features", lambda *_: pytest.fail("computed"))
    np.testing.assert_array_equal(again.fit(images, [0, 1, 2] * 2).predict_proba(images), probabilities)
