from __future__ import annotations

import json
import sys

import pytest
import torch

from metabridge import InputError, fit, load, method
from metabridge.decode_options import DecodeOptions
from metabridge.models import Network, build
from metabridge.models.backbone_inputs import Normalize
from small_runs import colors

SOURCE = """
import torch
from torch import nn
from metabridge.decode_options import DecodeOptions
from metabridge.models import conv4

def pixels():
    return nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 4))

def sized(size, channels):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size**2, 4))

def with_options():
    module = pixels()
    module.decode_options = DecodeOptions(size=20, channels=3, crop=True, resize=24, interpolation="bicubic")
    return module

def network():
    return conv4(3, 32)

def number():
    return 7

not_callable = 7
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module into the current directory, and return its name."""
    monkeypatch.chdir(tmp_path)
    name = f"my_networks_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    yield name
    sys.modules.pop(name, None)


def test_a_function_of_the_current_directory_gives_the_features(module):
    path = list(sys.path)
    net = build(f"{module}:pixels", size=16, outputs=3)
    assert sys.path == path
    assert net(torch.rand(2, 3, 16, 16)).shape == (2, 3)
    assert net.decode_options == DecodeOptions(size=16, channels=3, crop=True)
    assert net.recipe is None


def test_size_and_channels_are_passed_to_functions_with_these_parameters(module):
    assert build(f"{module}:sized", size=6, channels=1).features[1].in_features == 36


def test_mean_and_std_are_applied_to_the_images(module):
    net = build(f"{module}:pixels", size=16, mean=[0.5, 0.4, 0.3], std=[0.2, 0.2, 0.1])
    assert isinstance(net.features[0], Normalize)
    x = torch.rand(2, 3, 16, 16)
    torch.testing.assert_close(net.features(x), net.features[1](net.features[0](x)))
    with pytest.raises(InputError, match="mean and std belong together"):
        build(f"{module}:pixels", mean=[0.5])


def test_the_options_of_the_module_determine_how_images_are_decoded(module):
    net = build(f"{module}:with_options")
    assert (net.decode_options.size, net.decode_options.resize) == (20, 24)
    with pytest.raises(InputError, match="size is 30"):
        build(f"{module}:with_options", size=30)


def test_a_network_gets_a_new_head(module):
    net = build(f"{module}:network", size=32, outputs=7)
    assert isinstance(net, Network)
    assert net.head.out_features == 7


def test_weights_are_loaded_into_the_module(module, tmp_path):
    weights = build(f"{module}:pixels", size=16).features.state_dict()
    torch.save({"state_dict": {f"module.{name}": value for name, value in weights.items()}}, tmp_path / "weights.pth")
    torch.manual_seed(1)
    net = build(f"{module}:pixels", size=16, weights=tmp_path / "weights.pth")
    assert torch.equal(net.features[2].weight, weights["2.weight"])
    torch.save({"2.weight": torch.ones(4, 12)}, tmp_path / "part.pth")
    with pytest.raises(InputError, match=rf"weights do not belong to '{module}:pixels': they lack '2.bias'"):
        build(f"{module}:pixels", size=16, weights=tmp_path / "part.pth")
    torch.save(weights | {"2.weight": torch.ones(1, 12)}, tmp_path / "other.pth")
    with pytest.raises(InputError, match=r"'2\.weight' has another shape"):
        build(f"{module}:pixels", size=16, weights=tmp_path / "other.pth")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:build", "there is no module 'no_such_module'"),
        ("torch.no_such_module:build", "there is no module 'torch.no_such_module'"),
        ("{}:missing", "has no function 'missing'"),
        ("{}:not_callable", "has no function 'not_callable'"),
        ("{}:number", "returned a int, but must return an nn.Module"),
    ],
)
def test_names_that_are_no_function_of_a_network_raise_an_error(module, name, message):
    with pytest.raises(InputError, match=message):
        build(name.format(module))


def test_a_saved_run_needs_the_network_and_reading_it_imports_no_module(module, tmp_path):
    net, tasks = build(f"{module}:pixels", size=18, outputs=2), colors().tasks("train", ways=2, shots=1, queries=1)
    run = fit(net, method("anil"), tasks, iterations=1, batch_size=1, progress=False, out=tmp_path / "run")
    del sys.modules[module]
    with pytest.raises(
        InputError, match=r"not built by metabridge\.models\. Build it and pass it: load\(folder, net=net"
    ):
        load(tmp_path / "run")
    loaded = load(tmp_path / "run", net=net)
    assert torch.equal(loaded.params["head.weight"], run.params["head.weight"])
    settings = json.loads((tmp_path / "run" / "settings.json").read_text())
    for model in ({"model": f"{module}:pixels"}, {"model": "function_network", "name": f"{module}:pixels"}):
        (tmp_path / "run" / "settings.json").write_text(json.dumps(settings | {"model": model}))
        with pytest.raises(InputError, match="its settings cannot be read"):
            load(tmp_path / "run")
    assert module not in sys.modules
