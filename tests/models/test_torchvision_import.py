from __future__ import annotations

import sys

import pytest
import torch

from metabridge import InputError
from metabridge.models import torchvision_import
from metabridge.models.torchvision_import import import_torchvision


def test_torchvision_can_be_imported_and_its_missing_operators_raise_an_error():
    pytest.importorskip("PIL")
    import_torchvision("timm:resnet18")
    if "torchvision" not in sys.modules:
        pytest.skip("torchvision is not installed")
    import torchvision

    assert torchvision.transforms.CenterCrop(2)(torch.ones(1, 4, 4)).shape == (1, 2, 2)
    if not torchvision.extension._has_ops():
        with pytest.raises(RuntimeError, match="Could not run 'torchvision::nms'"):
            torch.ops.torchvision.nms(torch.ones(1))


@pytest.mark.parametrize(
    "reason",
    ["operator torchvision::nms does not exist", "PyTorch and torchvision were compiled with different CUDA versions"],
)
def test_if_torchvision_cannot_be_imported_the_error_says_what_to_install(monkeypatch, reason):
    def fail():
        raise RuntimeError(f"{reason}\nDetails")

    monkeypatch.setattr(torchvision_import, "_import", fail)
    monkeypatch.setattr(torchvision_import, "_declare_operators", lambda: None)
    with pytest.raises(InputError) as caught:
        import_torchvision("timm:resnet18")
    assert str(caught.value) == (
        "model is 'timm:resnet18', but torchvision cannot be imported because it was built for another PyTorch "
        f"({reason}). Install versions that match: pip install --upgrade torch torchvision"
    )
