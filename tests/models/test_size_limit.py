from __future__ import annotations

import resource
import threading

import pytest
import torch
from torch import nn

from backbones import library, small_transformer
from metabridge import InputError
from metabridge.models import build, rebuild
from metabridge.models.size_limit import SizeLimit
from metabridge.nas import random_architecture


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("mlp", {"inputs": 1, "outputs": 1, "width": 10**6}),
        ("mlp", {"inputs": 10**30, "outputs": 1}),
        ("wide", {"inputs": 10**6, "width": 10**6}),
        ("conv4", {"filters": 10**6}),
        ("conv4", {"size": 10**9}),
        ("resnet12", {"widths": [10**9] * 4}),
        ("architecture.json", {"channels": 10**9}),
    ],
)
def test_a_network_that_is_too_large_raises_an_error_before_memory_is_allocated(tmp_path, monkeypatch, model, options):
    monkeypatch.chdir(tmp_path)
    random_architecture(torch.Generator().manual_seed(0)).save("architecture.json")
    with pytest.raises(InputError, match=r"more than 1073741824 values in its tensors, which is too large to build\."):
        build(model, **options)


def test_a_network_of_too_many_layers_raises_an_error(monkeypatch):
    # the defaults of `values` and `tensors`
    monkeypatch.setattr("metabridge.models.size_limit.SizeLimit.__init__.__defaults__", (2**30, 100))
    for options in ({"width": 1}, {"width": 40}):
        with pytest.raises(InputError, match=r"more than 100 tensors, which is too large to build\."):
            build("mlp", inputs=1, outputs=1, depth=10**9, **options)


def test_a_network_within_the_limit_is_the_same_as_without_it():
    with SizeLimit(values=1000, tensors=20):
        limited = build("mlp", inputs=1, outputs=1, width=8)
    unlimited = build("mlp", inputs=1, outputs=1, width=8)
    assert all(torch.equal(value, unlimited.state_dict()[name]) for name, value in limited.state_dict().items())
    assert limited.head.weight.device.type == "cpu"


def test_a_limit_applies_only_to_the_thread_that_sets_it():
    built: list[nn.Module] = []
    with SizeLimit(values=1):
        thread = threading.Thread(target=lambda: built.append(nn.Linear(10, 10)))
        thread.start()
        thread.join()
    assert len(built) == 1


@pytest.mark.parametrize(
    "recipe",
    [
        {"model": "timm", "name": "test_vit", "size": 7071},
        {"model": "timm", "name": "vit_giant_patch14_dinov2"},
        {"model": "hf", "name": "x", "size": 28, "config": small_transformer("vit", hidden_size=2**14)},
        {"model": "hf", "name": "x", "size": 28, "config": small_transformer("vit", num_hidden_layers=2**18)},
        {"model": "hf", "name": "x", "size": 28, "config": small_transformer("dinov2", image_size=2**18)},
    ],
    ids=lambda recipe: f"{recipe['model']}-{recipe.get('config', recipe).get('model_type', recipe['name'])}",
)
def test_a_recipe_of_a_pretrained_model_that_is_too_large_raises_an_error(recipe):
    library({"timm": "timm", "hf": "transformers"}[recipe["model"]])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with SizeLimit(values=2**20, tensors=1000), pytest.raises(InputError, match="too large to build"):
        rebuild(recipe)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # KiB


def test_sources_of_weights_in_a_recipe_from_a_file_are_ignored(tmp_path):
    library("timm")
    recipe = {"model": "timm", "name": "test_resnet", "size": 32, "outputs": 5}
    for sources in ({"weights": str(tmp_path / "missing")}, {"weights": "/dev/zero"}, {"pretrained": True}):
        assert rebuild(recipe | sources | {"download": True}).recipe["weights"] is None
