from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from metabridge.datasets import load
from metabridge.errors import InputError
from metabridge.learners.method import method
from metabridge.models.network import apply_features
from metabridge.training.config import ImageTrainingConfig, SoftTargets
from metabridge.training.evaluation import Model
from metabridge.training.image_training import image_trainer, method_of, network_of, train_on_images, training_tasks
from metabridge.training.soft_targets import LabelSoftener, mix_up


@pytest.fixture(scope="module")
def images():
    """Return glyphs of eight classes per split."""
    glyphs = load("glyphs")
    return replace(glyphs, splits={split: members[:8] for split, members in glyphs.splits.items()})


def config(name: str, **options: object) -> ImageTrainingConfig:
    small = ImageTrainingConfig(
        name, batch_size=8 if name == "rfs" else 1, shots=2, queries=2, iterations=4, validate_every=2
    )
    return replace(small, model_options={"filters": 4}, statistics="running", validate_tasks=4, **options)


@pytest.mark.parametrize("name", ["mtl", "rfs"])
def test_soft_targets_with_default_options_do_not_change_the_trained_weights(name: str, images) -> None:
    baseline = train_on_images(config(name), images, progress=False)
    soft = train_on_images(config(name, soft_targets=SoftTargets()), images, progress=False)
    for key, value in baseline.params.items():
        assert torch.allclose(soft.params[key], value, atol=1e-5), key


@pytest.mark.parametrize("name", ["mtl", "rfs"])
@pytest.mark.parametrize("options", [{"smoothing": 0.3}, {"mixup": 0.5}, {"distillation": 0.5}])
def test_soft_targets_change_the_trained_weights(name: str, options: dict[str, float], images) -> None:
    baseline = train_on_images(config(name), images, progress=False)
    teacher = train_on_images(config(name, seed=1), images, progress=False) if "distillation" in options else None
    soft = train_on_images(config(name, soft_targets=SoftTargets(**options)), images, progress=False, teacher=teacher)
    assert not torch.allclose(soft.params["heads.weight"], baseline.params["heads.weight"])


@pytest.mark.parametrize("name", ["mtl", "rfs"])
def test_full_distillation_gives_the_teachers_predictions_as_targets(name: str, images) -> None:
    teacher = train_on_images(config(name), images, progress=False)
    episodes = training_tasks(config(name), images, method_of(config(name))).sample(1, torch.Generator().manual_seed(0))
    softener = LabelSoftener(SoftTargets(distillation=1.0, temperature=2.0), teacher.method, teacher)
    targets = softener(episodes, torch.Generator().manual_seed(0)).support_y[0]
    unsplit = episodes.without_split()
    features = apply_features(teacher.net, teacher.params, unsplit.support_x[0])
    logits = features @ teacher.params["heads.weight"].T + teacher.params["heads.bias"]
    expected = (logits[:, unsplit.classes[0]] / 2).softmax(-1)
    assert torch.allclose(targets, expected, atol=1e-5)


def test_mixup_mixes_targets_with_the_same_weights_as_images() -> None:
    x = torch.eye(6)[None]  # each image equals its one-hot target
    y = torch.eye(6)[None]
    mixed_x, mixed_y = mix_up(x, y, 0.5, torch.Generator().manual_seed(0))
    assert torch.allclose(mixed_x, mixed_y)
    assert torch.allclose(mixed_y.sum(-1), torch.ones(1, 6))
    assert ((mixed_y > 0.01) & (mixed_y < 0.99)).any()


@pytest.mark.parametrize("ema_decay", [None, 0.5])
def test_a_resumed_run_ends_with_the_same_weights(ema_decay: float | None, images, tmp_path) -> None:
    options = {"soft_targets": SoftTargets(smoothing=0.1, mixup=0.3), "optimizer": "muon", "ema_decay": ema_decay}
    uninterrupted = train_on_images(config("rfs", **options), images, progress=False)
    trainer = image_trainer(config("rfs", **options), images, out=tmp_path)
    for _ in range(3):
        trainer.step()
    trainer.save()
    trainer.close()
    resumed = train_on_images(config("rfs", **options), images, out=tmp_path, progress=False)
    assert resumed.params.keys() == uninterrupted.params.keys()
    assert all(torch.equal(value, resumed.params[key]) for key, value in uninterrupted.params.items())


def test_the_moving_average_is_a_weighted_mean_of_the_weights(images) -> None:
    baseline, averaged = (
        image_trainer(config("rfs", ema_decay=decay, iterations=1, validate_every=1), images) for decay in (None, 0.9)
    )
    initial = averaged.params["heads.weight"].detach().clone()
    baseline.step(), averaged.step()
    updated = baseline.params["heads.weight"]  # after one step, without averaging
    average = averaged.run().params["heads.weight"]
    # the decay is 1/10 in the first step, and rises to `ema_decay` later
    assert torch.allclose(average, torch.lerp(initial, updated, 1 - 1 / 10), atol=1e-6)


def test_methods_teachers_and_options_that_do_not_match_or_are_out_of_range_raise_an_error(images) -> None:
    with pytest.raises(InputError, match="only methods whose head covers all training classes"):
        LabelSoftener(SoftTargets(smoothing=0.1), method("maml"), None)
    with pytest.raises(InputError, match="no teacher was passed"):
        LabelSoftener(SoftTargets(distillation=0.1), method("rfs"), None)
    teacher = Model(method("mtl"), network_of(config("mtl"), images), {})
    with pytest.raises(InputError, match="same method"):
        LabelSoftener(SoftTargets(distillation=0.1), method("rfs"), teacher)
    with pytest.raises(InputError, match="smoothing is 2"):
        SoftTargets(smoothing=2)


def test_training_the_teachers_network_does_not_change_the_teacher(images) -> None:
    run = train_on_images(config("mtl"), images, progress=False)
    run.net.train()
    softener = LabelSoftener(SoftTargets(distillation=1.0), run.method, run)
    episodes = training_tasks(config("mtl"), images, method_of(config("mtl"))).sample(
        1, torch.Generator().manual_seed(0)
    )
    targets = softener(episodes, torch.Generator().manual_seed(0)).support_y
    softener_in_eval_mode = LabelSoftener(SoftTargets(distillation=1.0), run.method, replace(run, net=run.net.eval()))
    assert torch.equal(targets, softener_in_eval_mode(episodes, torch.Generator().manual_seed(0)).support_y)
