from __future__ import annotations

import pytest
import torch

from metabridge import InputError
from metabridge.decode_options import DecodeOptions
from metabridge.models.backbone_inputs import Normalize, check_multiple, check_one_source, input_options


def test_normalize_subtracts_the_mean_and_divides_by_the_standard_deviation_of_each_channel():
    x = torch.rand(2, 3, 4, 4)
    result = Normalize([0.1, 0.2, 0.3], [0.5, 1.0, 2.0])(x)
    for channel, (mean, std) in enumerate([(0.1, 0.5), (0.2, 1.0), (0.3, 2.0)]):
        torch.testing.assert_close(result[:, channel], (x[:, channel] - mean) / std)


def test_normalize_treats_a_gray_image_as_an_rgb_image():
    normalize, gray = Normalize([0.1, 0.2, 0.3], [0.5, 1.0, 2.0]), torch.rand(2, 1, 4, 4)
    assert torch.equal(normalize(gray), normalize(gray.expand(-1, 3, -1, -1)))


def test_normalize_has_no_weights_and_keeps_the_precision_of_its_input():
    normalize = Normalize([0.5], [0.5])
    assert not normalize.state_dict()
    assert normalize(torch.ones(1, 3, 2, 2, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize(("mean", "std"), [([0.5], [0.0]), ([0.5, 0.5], [1.0]), ([], [])])
def test_normalize_rejects_numbers_that_do_not_fit(mean, std):
    with pytest.raises(InputError, match="one number per channel"):
        Normalize(mean, std)


def test_the_size_is_that_of_the_options_or_the_default():
    options = DecodeOptions(size=32, channels=3)
    assert input_options(options, 3, None, 224) == (options, 32)
    assert input_options(options.to_json(), 3, 32, 224) == (options, 32)
    assert input_options(None, 3, 48, 224) == (None, 48)


@pytest.mark.parametrize("size", [0, -1, 10**9, 2.5, True])
def test_a_size_out_of_range_raises_an_error(size):
    with pytest.raises(InputError, match="must be from 1 to 7071 pixels"):
        input_options(None, 3, size, 224)


def test_options_of_other_images_raise_an_error():
    with pytest.raises(InputError, match=r"size is 28 and channels is 3\. Use equal values"):
        input_options(DecodeOptions(size=32, channels=3), 3, 28, 224)


def test_a_size_between_multiples_of_the_patch_size_raises_an_error_with_the_nearest_sizes():
    check_multiple("timm:vit", 84, 14)
    with pytest.raises(InputError, match=r"patches have 14 pixels, but size is 100, .* Use size=98 or size=112\."):
        check_multiple("timm:vit", 100, 14)
    with pytest.raises(InputError, match=r"Use size=14\."):
        check_multiple("timm:vit", 5, 14)


def test_weights_come_from_one_source():
    with pytest.raises(InputError, match="Pass only one of them"):
        check_one_source(True, "weights.pth")
