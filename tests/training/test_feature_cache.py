from __future__ import annotations

import os

import pytest
import torch

from metabridge.environments import LabeledImages
from metabridge.learners import method, parameters
from metabridge.models import resnet12
from metabridge.training import Model, evaluate, feature_cache
from metabridge.training.evaluation import TestTimeAugmentation

FROZEN = method("frozen")


@pytest.fixture
def images() -> LabeledImages:
    generator = torch.Generator().manual_seed(0)
    return LabeledImages(
        images=torch.randint(0, 256, (30, 3, 16, 16), generator=generator, dtype=torch.uint8),
        labels=torch.arange(30) % 5,
        class_names=tuple("abcde"),
        superclasses=torch.zeros(5, dtype=torch.int64),
        superclass_names=("all",),
        splits={"test": torch.arange(5)},
    )


@pytest.fixture
def model(monkeypatch, tmp_path) -> Model:
    """A model whose features are cached in an empty folder."""
    monkeypatch.setenv("METABRIDGE_CACHE", str(tmp_path))
    monkeypatch.setattr(feature_cache, "MIN_PARAMETERS", 1)
    net = resnet12(3, 16, widths=(4, 4, 4, 4), statistics="running", drop_rate=0.0).eval()
    for layer in net.modules():
        if hasattr(layer, "variance"):
            layer.mean.fill_(0.1)
    return Model(FROZEN, net, parameters(FROZEN, net))


class Counter:
    """Counts the images whose features a model computes."""

    def __init__(self, model: Model) -> None:
        self.images = 0
        model.net.features.register_forward_hook(self._count)

    def _count(self, module, inputs, outputs) -> None:
        self.images += len(outputs)


def score(model: Model, images: LabeledImages, **options):
    return evaluate(model, images.tasks("test", ways=3, shots=1, queries=2), tasks=8, **options)


def files(tmp_path):
    return sorted((tmp_path / "features").glob("*.safetensors"))


def test_the_second_evaluation_computes_no_features_and_has_the_same_result(model, images):
    first = score(model, images)
    counter = Counter(model)
    assert torch.equal(score(model, images).values, first.values)
    assert counter.images == 0


def test_other_weights_images_or_augmentation_have_an_entry_of_their_own(model, images, tmp_path):
    first = score(model, images)
    score(model, images, augmentation=TestTimeAugmentation(mirrored=True))
    assert len(files(tmp_path)) == 2
    images.images[3, 0, 0, 0] += 1
    score(model, images)
    assert len(files(tmp_path)) == 3
    model.net.features[0].get_parameter(next(name for name, _ in model.net.features[0].named_parameters())).data += 0.1
    changed = Model(FROZEN, model.net, parameters(FROZEN, model.net))
    assert not torch.equal(score(changed, images).values, first.values)
    assert len(files(tmp_path)) == 4
    next(layer for layer in model.net.modules() if hasattr(layer, "variance")).variance += 1
    score(changed, images)
    assert len(files(tmp_path)) == 5


def test_a_damaged_entry_is_computed_again(model, images, tmp_path):
    first = score(model, images)
    (file,) = files(tmp_path)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    for damaged in (bytes(content), content[:50], b""):
        file.write_bytes(damaged)
        assert torch.equal(score(model, images).values, first.values)
        assert file.read_bytes() != damaged


def test_the_least_recently_used_entries_are_deleted_first(model, images, tmp_path, monkeypatch):
    score(model, images)
    (oldest,) = files(tmp_path)
    score(model, images, augmentation=TestTimeAugmentation(mirrored=True))
    (second,) = set(files(tmp_path)) - {oldest}
    os.utime(oldest, (1, 1))
    os.utime(second, (2, 2))
    score(model, images)  # uses the oldest entry
    monkeypatch.setattr(feature_cache, "MAX_BYTES", 2 * oldest.stat().st_size)
    score(model, images, augmentation=TestTimeAugmentation(cropped=True))
    assert oldest in files(tmp_path)
    assert second not in files(tmp_path)


def test_a_cache_that_cannot_be_written_only_logs_a_warning(model, images, tmp_path, caplog):
    (tmp_path / "features").write_text("not a folder")
    score(model, images)
    assert "The features are not cached" in caplog.text


def test_models_that_are_trained_and_small_models_are_not_cached(model, images, tmp_path, monkeypatch):
    rfs = method("rfs")
    score(Model(rfs, model.net, parameters(rfs, model.net, classes=5)), images)
    monkeypatch.setattr(feature_cache, "MIN_PARAMETERS", 10**6)
    score(model, images)
    assert files(tmp_path) == []
