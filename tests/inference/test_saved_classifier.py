from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from metabridge import FewShotClassifier, InputError
from metabridge.inference.saved_classifier import read_classifier
from metabridge.training.checkpoint import RunFolder

OLD_FILES = sorted((Path(__file__).parents[1] / "data" / "v0.1.0").glob("adapted-*"))


@pytest.mark.parametrize("folder", OLD_FILES, ids=lambda folder: folder.name)
def test_files_of_format_1_are_read_with_temperature_one_and_without_support_images(folder):
    saved = read_classifier(folder, torch.device("cpu"))
    assert (saved.temperature, saved.penalty, saved.support, saved.model) == (1.0, None, None, None)
    classifier = FewShotClassifier.load(folder)
    metadata = RunFolder(folder).read("adapted")[1]
    assert (classifier.model, classifier.head) == (metadata["arguments"]["run"], metadata["arguments"]["head"])
    image = np.zeros((1, saved.decode_options.size, saved.decode_options.size))
    assert classifier.predict_details(image).nearest is None
    for use in (
        lambda: classifier.partial_fit(image, ["j"]),
        classifier.confusion,
        lambda: classifier.outlier_score(image),
        lambda: FewShotClassifier.load(folder, reject=0.1),
    ):
        with pytest.raises(InputError, match="was loaded from a file that does not contain its support images"):
            use()


def test_a_classifier_of_format_1_can_be_saved_again(tmp_path):
    classifier = FewShotClassifier.load(OLD_FILES[0])
    classifier.save(tmp_path)
    size = classifier.decode_options_.size
    images = np.random.default_rng(0).random((3, size, size))
    again = FewShotClassifier.load(tmp_path)
    np.testing.assert_array_equal(again.predict_proba(images), classifier.predict_proba(images))


def test_files_of_later_formats_are_rejected(run, support, tmp_path):
    FewShotClassifier(run).fit(*support).save(tmp_path)
    tensors, metadata = RunFolder(tmp_path).read("adapted")
    RunFolder(tmp_path).write("adapted", tensors, metadata | {"version": 3})
    with pytest.raises(InputError, match="has file format 3, but this version of metabridge reads format 2"):
        FewShotClassifier.load(tmp_path)


def test_a_file_contains_all_parameters_but_images_only_if_they_are_needed(run, anil, support, query, tmp_path):
    classifier = FewShotClassifier(run, head="svm", penalty=2, reject=0.1).fit(*support)
    classifier.save(tmp_path / "features")
    tensors, metadata = RunFolder(tmp_path / "features").read("adapted")
    assert metadata["arguments"] == {
        "model": str(run.resolve()),
        "head": "svm",
        "penalty": 2.0,
        "reject": 0.1,
        "weights": None,
    }
    assert "support.images" not in tensors
    assert not [name for name in tensors if name.startswith(("initial.features.", "initial.head."))]
    loaded = FewShotClassifier.load(tmp_path / "features")
    assert loaded.penalty_ == classifier.penalty_ == 2
    assert loaded.temperature_ == classifier.temperature_
    details, expected = loaded.predict_details(query[0]), classifier.predict_details(query[0])
    for name in ("labels", "probabilities", "outlier_scores", "nearest", "nearest_labels", "similarities"):
        np.testing.assert_array_equal(getattr(details, name), getattr(expected, name))
    assert str(loaded.confusion()) == str(classifier.confusion())
    FewShotClassifier(anil).fit(*support).save(tmp_path / "images")
    tensors, _ = RunFolder(tmp_path / "images").read("adapted")
    assert tensors["support.images"].shape == (20, 1, 28, 28)
    assert {name for name in tensors if name.startswith("initial.")} == {"initial.head.weight", "initial.head.bias"}
