import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from PIL import Image

from metabridge.datasets import detect, image_cache, load
from metabridge.errors import InputError
from pictures import encoded, names_in, shared

pytestmark = pytest.mark.usefixtures("empty_cache")

ALPHABETS = {
    "images_background": [f"Alphabet{letter}" for letter in "ABCDEFG"],
    "images_evaluation": ["Greek", "Tengwar"],
}


def drawing(position: int) -> bytes:
    """Return a white image file with a black horizontal stroke at the left, `5 * position` pixels from the top."""
    image = Image.new("1", (105, 105), 1)
    image.paste(0, (0, 5 * position, 50, 5 * position + 8))
    return encoded(image)


@pytest.fixture
def folders(tmp_path) -> Path:
    for subset, alphabets in ALPHABETS.items():
        for alphabet in alphabets:
            for character in ("character01", "character02"):
                folder = tmp_path / "folders" / subset / alphabet / character
                folder.mkdir(parents=True)
                for drawer in range(2):
                    (folder / f"0001_{drawer}.png").write_bytes(drawing(drawer))
    return tmp_path / "folders"


@pytest.fixture
def archives(folders, tmp_path) -> Path:
    (tmp_path / "archives").mkdir()
    for subset in ALPHABETS:
        shutil.make_archive(str(tmp_path / "archives" / subset), "zip", folders, subset)
    return tmp_path / "archives"


@pytest.fixture(params=["folders", "archives"])
def root(request) -> Path:
    return request.getfixturevalue(request.param)


def test_the_last_sixth_of_the_background_alphabets_is_for_validation(root):
    assert detect(root) == "omniglot"
    images = load("omniglot", root)
    alphabets = {split: {name.split("/")[0] for name in names} for split, names in names_in(images).items()}
    assert alphabets == {
        "train": set(ALPHABETS["images_background"][:-1]),
        "validation": {"AlphabetG"},
        "test": {"Greek", "Tengwar"},
    }
    assert images.superclass_names[images.superclasses[images.class_names.index("Greek/character02")]] == "Greek"
    assert torch.bincount(images.labels).tolist() == 18 * [2]  # 9 alphabets of 2 characters


def test_ink_is_white_on_black_in_28_pixels(root):
    image = load(root).images[0]
    assert image.shape == (1, 28, 28)
    assert image[0, 0, :10].min() > 200
    assert image[0, 10:].max() == 0
    assert image[0, 0, -10:].max() == 0


def test_rotations_are_new_classes_in_the_same_alphabet_and_split(archives):
    original, rotated = load("omniglot", archives), load("omniglot", archives, rotations=True)
    assert {split: 4 * len(members) for split, members in original.splits.items()} == {
        split: len(members) for split, members in rotated.splits.items()
    }
    upright, turned = (rotated.class_names.index(f"Greek/character01{suffix}") for suffix in ("", "/turned90"))
    assert rotated.superclasses[upright] == rotated.superclasses[turned]
    assert "Greek/character01/turned90" in names_in(rotated)["test"]
    assert torch.equal(
        torch.rot90(rotated.images[rotated.labels == upright], 1, (2, 3)), rotated.images[rotated.labels == turned]
    )


def test_a_truncated_archive_is_rejected(archives):
    file = archives / "images_evaluation.zip"
    file.write_bytes(file.read_bytes()[:-300])
    with pytest.raises(InputError, match=r"images_evaluation\.zip is not a valid zip archive \(.*\)\. Download the"):
        load("omniglot", archives)


def test_a_damaged_drawing_in_an_archive_is_skipped(archives, caplog):
    file = archives / "images_evaluation.zip"
    with zipfile.ZipFile(file) as archive:
        start = archive.getinfo("images_evaluation/Greek/character01/0001_1.png").header_offset
    content = bytearray(file.read_bytes())
    content[start + 100 : start + 110] = bytes(10)
    file.write_bytes(content)
    assert len(load("omniglot", archives).images) == 35
    assert "Skipped 1 unreadable image: images_evaluation/Greek/character01/0001_1.png" in caplog.text
    with pytest.raises(InputError, match=r"images_evaluation/Greek/character01/0001_1\.png .* or load without strict"):
        load("omniglot", archives, strict=True)


def test_an_empty_character_is_skipped_with_a_warning(folders, archives, caplog):
    with zipfile.ZipFile(archives / "images_evaluation.zip", "a") as archive:
        archive.mkdir("images_evaluation/Greek/character03")
    (folders / "images_evaluation" / "Greek" / "character03").mkdir()
    for root in (folders, archives):
        caplog.clear()
        assert "Greek/character03" not in load("omniglot", root).class_names
        assert "Skipped 1 class without a readable image: 'Greek/character03'." in caplog.text


def test_a_missing_subset_is_rejected(archives):
    (archives / "images_evaluation.zip").unlink()
    with pytest.raises(InputError, match=r"has neither images_evaluation\.zip nor the folder images_evaluation\. Put"):
        load("omniglot", archives)


def test_an_archive_that_unpacks_to_far_more_than_its_size_is_rejected(archives):
    with zipfile.ZipFile(archives / "images_evaluation.zip", "a", zipfile.ZIP_DEFLATED) as archive:
        for number in range(3):
            archive.writestr(f"images_evaluation/Greek/character01/{number}.png", bytes(2**24))
    assert (archives / "images_evaluation.zip").stat().st_size < 2**17
    with pytest.raises(InputError, match=r"images_evaluation\.zip unpacks from 0\.1 MiB to 48 MiB, which is too much"):
        load("omniglot", archives)


def test_a_huge_drawing_in_an_archive_is_not_unpacked(archives, caplog):
    with zipfile.ZipFile(archives / "images_evaluation.zip", "a") as archive:
        archive.writestr("images_evaluation/Greek/character01/huge.png", bytes(2**24 + 1))
    assert len(load("omniglot", archives).images) == 36
    assert "huge.png (it is 16 MiB, but a drawing has at most 16 MiB)" in caplog.text


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_an_archive_with_an_unsupported_compression_method_is_rejected(archives, method):
    with zipfile.ZipFile(archives / "images_evaluation.zip", "a", method) as archive:
        archive.writestr("images_evaluation/Greek/character01/9.png", drawing(9))
    with pytest.raises(
        InputError, match=r"images_evaluation\.zip uses an unsupported compression method\. Pack it again"
    ):
        load("omniglot", archives)


def test_links_between_folders_add_no_characters(folders, caplog):
    (folders / "images_evaluation" / "Greek" / "character03").symlink_to(folders / "images_background")
    assert len(load("omniglot", folders).class_names) == 18
    assert (
        "skipped links to folders that are read under another path: images_evaluation/Greek/character03" in caplog.text
    )


def test_the_whole_of_omniglot_is_decoded_once(monkeypatch):
    root = shared("omniglot")
    images = load(root)
    monkeypatch.setattr(image_cache, "decode", lambda *_: pytest.fail("an image was decoded again"))
    assert torch.equal(load("omniglot", root).images, images.images)
    assert torch.equal(torch.bincount(images.labels), torch.full((1623,), 20))
    assert len(images.superclass_names) == 50
    assert {split: len(members) for split, members in images.splits.items()} == {
        "train": 813,
        "validation": 151,
        "test": 659,
    }
    assert images.images.float().mean() < 50  # most pixels are background, which is 0
