from __future__ import annotations

import os

import numpy as np
import pytest
from PIL import Image

import metabridge as mb
from metabridge import InputError
from metabridge.datasets.image_decoding import Unreadable
from metabridge.decode_options import DecodeOptions
from metabridge.inference.image_input import convert_images, read_images
from metabridge.training.model_images import image_shape, model_decode_options


@pytest.mark.parametrize(
    ("net", "shape"),
    [
        (mb.models.conv4(1, 28), (1, 28)),
        (mb.models.resnet12(3, 32, widths=(4, 4, 4, 4)), (3, 32)),
        (mb.models.mlp(784, 5), (1, 28)),
        (mb.models.mlp(3 * 32**2, 5), (3, 32)),
    ],
)
def test_the_shape_of_input_images_follows_from_the_network(net, shape):
    assert image_shape(net) == shape


def test_a_network_without_a_recipe_is_rejected():
    net = mb.models.conv4(1, 28)
    net.recipe = None
    with pytest.raises(InputError, match="does not contain the size of its input images"):
        image_shape(net)


def test_images_are_preprocessed_as_in_the_data_set_of_the_run(glyphs):
    anil, net = mb.method("anil"), mb.models.conv4(1, 28)
    params = mb.parameters(anil, net)

    def decode_options(name):
        return model_decode_options(mb.Run(anil, net, params, settings={"tasks": {"data": {"name": name}}}))

    assert decode_options("omniglot:somewhere") == DecodeOptions(size=28, channels=1, invert=True)
    assert decode_options("mini-imagenet") == DecodeOptions(size=28, channels=1)
    assert decode_options("photos") == decode_options("glyphs") == DecodeOptions(size=28, channels=1, crop=True)


def test_images_stay_in_order_and_unreadable_ones_have_a_reason(tmp_path):
    images = [np.full((4, 4), value, dtype=np.uint8) for value in range(200)]
    images[70] = tmp_path / "no image"
    images[70].write_bytes(b"no image")
    names, results = zip(*read_images(images, DecodeOptions(size=2, channels=1)))
    assert results[70] == Unreadable("it is not an image that Pillow reads")
    assert (names[69], names[70]) == ("X[69]", str(images[70]))
    assert [int(image.max()) for index, image in enumerate(results) if index != 70] == [*range(70), *range(71, 200)]


def test_transparent_pixels_become_white():
    transparent = np.zeros((9, 9, 4), dtype=np.uint8)
    for image in (transparent, Image.fromarray(transparent)):
        assert (convert_images([image], DecodeOptions(size=9, channels=3)) == 255).all()


def test_an_error_names_the_damaged_image(tmp_path):
    file = tmp_path / "cut.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (50, 50), dtype=np.uint8)).save(file)
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(InputError, match=r"X\[0\] cannot be read \(.*\). Fix or remove it."):
        convert_images([Image.open(file)], DecodeOptions(size=9, channels=1))
    with pytest.raises(InputError, match=r"cut.png cannot be read"):
        convert_images([file], DecodeOptions(size=9, channels=1))


def test_floats_are_rounded_to_the_nearest_of_256_values():
    image = (np.arange(64).reshape(8, 8) * 4 + 0.6) / 255
    assert np.array_equal(
        convert_images([image], DecodeOptions(size=8, channels=1))[0, 0], np.arange(64).reshape(8, 8) * 4 + 1
    )


def test_a_pipe_is_rejected_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(InputError, match=r"a\.png cannot be read \(it is not a regular file\)"):
        convert_images([tmp_path / "a.png"], DecodeOptions(size=8, channels=1))


def test_a_pillow_image_with_values_out_of_range_is_named():
    image = Image.fromarray(np.full((8, 8), 300, dtype=np.float32))
    with pytest.raises(InputError, match=r"X\[0\] cannot be read \(it has a pixel of value 300\.0, but"):
        convert_images([image], DecodeOptions(size=8, channels=1))
