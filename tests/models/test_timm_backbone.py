from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from torch import nn

from metabridge import InputError
from metabridge.models import build, timm


@pytest.mark.parametrize("make", [lambda: timm("resnet18"), lambda: build("timm:resnet18", size=32)])
def test_without_timm_the_error_says_how_to_install_it(monkeypatch, make):
    for module in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(InputError) as caught:
        make()
    assert str(caught.value) == (
        "model is 'timm:resnet18', but timm is not installed. Install it with: pip install 'metabridge[timm]'"
    )


def test_a_timm_backbone_gets_a_head_and_can_be_rebuilt_from_its_recipe():
    pytest.importorskip("timm")
    net = build("timm:resnet10t", size=32, outputs=3)
    assert net.recipe["name"] == "resnet10t"
    assert str(build(**net.recipe)) == str(net)
    with pytest.raises(InputError, match="timm has no model 'resnet9000'"):
        timm("resnet9000")


def test_the_error_for_images_that_a_backbone_does_not_accept_names_the_model_and_the_size(monkeypatch):
    backbone = nn.Sequential(nn.Conv2d(3, 4, 7), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    fake_timm = SimpleNamespace(create_model=lambda name, **options: backbone, is_model=lambda name: True)
    monkeypatch.setitem(sys.modules, "timm", fake_timm)
    monkeypatch.setitem(sys.modules, "timm.models", fake_timm)
    assert build("timm:seven", size=8).head.in_features == 4
    with pytest.raises(InputError, match=r"'timm:seven', which does not accept .*size=5 \(.*Kernel size.*Use another"):
        build("timm:seven", size=5)
