"""Images and networks for tests of pretrained backbones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from metabridge.inference.image_input import convert_images
from metabridge.models import Network
from metabridge.models.torchvision_import import import_torchvision

# (width, height) in pixels; some differences to the resized size are odd, and one image needs no resizing
SIZES = [(243, 180), (171, 238), (330, 99), (168, 168), (175, 168)]


def library(name: str) -> Any:
    """Import timm or transformers, or skip the test if it is not installed."""
    import_torchvision(name)
    return pytest.importorskip(name)


def photographs() -> list[Image.Image]:
    """Return smooth random color images."""
    rng = np.random.default_rng(0)
    pixels = [rng.integers(0, 256, (height // 12, width // 12, 3), dtype=np.uint8) for width, height in SIZES]
    return [Image.fromarray(image).resize(size, Image.Resampling.BICUBIC) for image, size in zip(pixels, SIZES)]


def features_of_images(net: Network, images: list[Image.Image]) -> Tensor:
    """Return the features of images that are converted with the options of the network."""
    assert net.decode_options is not None
    pixels = torch.from_numpy(convert_images(images, net.decode_options))
    with torch.no_grad():
        return net.eval().features(pixels / 255)  # type: ignore[no-any-return]


def with_random_statistics(model: nn.Module) -> nn.Module:
    """Give batch norms random running statistics, and return the model in evaluation mode."""
    generator = torch.Generator().manual_seed(0)
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.running_mean.uniform_(-0.5, 0.5, generator=generator)
            layer.running_var.uniform_(0.5, 2, generator=generator)
    return model.eval()


def small_transformer(model_type: str, **options: object) -> Mapping[str, object]:
    """Return the configuration of a small vision transformer for images of 28×28 pixels."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return {"model_type": model_type, **sizes, "image_size": 28, "patch_size": 14, **options}
