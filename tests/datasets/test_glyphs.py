import os
import zipfile
from importlib import metadata
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from PIL import ImageFont
from torch.nn.functional import avg_pool2d, normalize

from metabridge.datasets import glyphs as module
from metabridge.datasets import load, load_glyphs
from metabridge.environments import LabeledImages
from metabridge.errors import InputError


@pytest.fixture
def drawn_seeds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Restrict the glyphs to two small alphabets, and return the list of the seeds with which they have been drawn."""
    seeds: list[int] = []
    draw = module._draw
    alphabets = tuple(alphabet for alphabet in module.ALPHABETS if alphabet.name in ("Hebrew", "Ogham"))
    monkeypatch.setattr(module, "ALPHABETS", alphabets)
    monkeypatch.setattr(module, "_draw", lambda seed: seeds.append(seed) or draw(seed))
    return seeds


def codes(glyphs: LabeledImages) -> list[int]:
    return [int(name.rpartition("/U+")[2], 16) for name in glyphs.class_names]


def test_there_are_many_alphabets_with_many_characters_of_twenty_images(glyphs):
    sizes = torch.bincount(glyphs.superclasses)
    assert len(sizes) == len(glyphs.superclass_names) >= 12
    assert 900 <= len(glyphs.class_names) <= 1500
    assert sizes.min() >= 15
    assert (sizes >= 20).float().mean() > 0.9
    assert torch.equal(torch.bincount(glyphs.labels), torch.full((len(glyphs.class_names),), 20))
    assert glyphs.images.shape[1:] == (1, 28, 28)


def test_splits_share_no_alphabet_and_each_has_five(glyphs):
    alphabets = {split: set(glyphs.superclasses[classes].tolist()) for split, classes in glyphs.splits.items()}
    assert set(alphabets) == {"train", "validation", "test"}
    assert sum(map(len, alphabets.values())) == len(set.union(*alphabets.values())) == len(glyphs.superclass_names)
    assert min(map(len, alphabets.values())) >= 5


def test_splits_have_about_60_15_and_25_percent_of_the_characters(glyphs):
    shares = {split: len(classes) / len(glyphs.class_names) for split, classes in glyphs.splits.items()}
    assert shares == pytest.approx({"train": 0.6, "validation": 0.15, "test": 0.25}, abs=0.05)


@pytest.mark.parametrize("split", ["train", "validation", "test"])
@pytest.mark.parametrize("superclass", ["same", "different"])
def test_five_way_tasks_within_and_across_alphabets_exist_in_every_split(glyphs, split, superclass):
    glyphs.tasks(split, ways=5, shots=5, queries=15, superclass=superclass)


@pytest.mark.parametrize(
    "group", ["AΑА", "BΒВ", "OoΟοОоՕ", "CcСсϹ", "SsЅѕ", "XxΧХх", "VvνѴѵ", "Il", "ZzΖ", "HНʜ", "ΣⵉƩ"]
)
def test_one_of_several_letters_that_look_alike_is_kept(glyphs, group):
    glyph_codes = set(codes(glyphs))
    assert sum(ord(letter) in glyph_codes for letter in group) == 1


def test_no_two_classes_have_the_same_shape(glyphs):
    """Compare blurred shapes at equal size by cosine; the fonts contain hundreds of pairs with the same shape."""
    candidates = module._candidates()
    shapes = torch.from_numpy(np.stack([character.shapes[0] for character in candidates]))[:, None].float()
    blurred = normalize(avg_pool2d(avg_pool2d(shapes, 3), 3, 1, padding=1).flatten(1))
    similarities = (blurred @ blurred.T).fill_diagonal_(-1)
    glyph_codes = set(codes(glyphs))
    is_glyph = torch.tensor([character.code in glyph_codes for character in candidates])
    assert is_glyph.sum() == len(glyphs.class_names)
    assert (similarities.amax(dim=1) > 0.98).sum() > 300
    assert similarities[is_glyph][:, is_glyph].max() < 0.98


def test_no_character_is_the_replacement_box_of_a_missing_glyph(glyphs):
    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    fonts = [ImageFont.truetype(folder / f"{face}.ttf", 96) for face in module.REGULAR + module.BOLD]
    # No font has this character, so each draws its replacement box.
    boxes = {module._draw_shape(font, 0x10FFFF).tobytes() for font in fonts}
    assert len(boxes) > 1
    glyph_codes = set(codes(glyphs))
    characters = [character for character in module._candidates() if character.code in glyph_codes]
    assert not boxes & {shape.tobytes() for character in characters for shape in character.shapes}


def test_every_image_has_ink_and_background_and_fits_into_its_frame(glyphs):
    images = glyphs.images[:, 0].float() / 255
    assert images.mean(dim=(1, 2)).min() > 0.01
    assert images.mean(dim=(1, 2)).max() < 0.6
    assert images.amax(dim=(1, 2)).min() > 0.5
    share_inside_border = images[:, 1:-1, 1:-1].sum(dim=(1, 2)) / images.sum(dim=(1, 2))
    assert share_inside_border.mean() > 0.995
    assert share_inside_border.min() > 0.8


def test_the_images_of_a_character_all_differ(glyphs):
    variants = glyphs.images.view(-1, 20, 784).float()
    distances = torch.cdist(variants, variants) + 1e6 * torch.eye(20)
    assert distances.min() > 100


def test_tasks_within_an_alphabet_are_harder_than_tasks_across_alphabets(glyphs):
    """Compare the five-way one-shot accuracies of the nearest neighbor among blurred images."""
    accuracy = {}
    for superclass in ("same", "different"):
        environment = glyphs.tasks("test", ways=5, shots=1, queries=5, superclass=superclass)
        tasks = environment.sample(600, torch.Generator().manual_seed(0))
        support, query = (
            normalize(avg_pool2d(x.flatten(0, 1), 3, 1, padding=1).view(600, -1, 784), dim=-1)
            for x in (tasks.support_x, tasks.query_x)
        )
        accuracy[superclass] = ((query @ support.mT).argmax(-1) == tasks.query_y).float().mean().item()
    assert 0.4 < accuracy["same"] < accuracy["different"] - 0.03 < 0.8


def test_images_depend_on_the_seed_alone(drawn_seeds, tmp_path):
    glyphs, with_same_seed, with_other_seed = (
        load_glyphs(seed, tmp_path / folder) for seed, folder in [(0, "a"), (0, "b"), (1, "a")]
    )
    assert drawn_seeds == [0, 0, 1]
    assert torch.equal(glyphs.images, with_same_seed.images)
    assert glyphs.class_names == with_other_seed.class_names
    assert not torch.equal(glyphs.images, with_other_seed.images)


def test_glyphs_are_drawn_once_and_read_from_the_cache_unchanged(drawn_seeds, tmp_path, monkeypatch):
    monkeypatch.setenv("METABRIDGE_CACHE", str(tmp_path / "new" / "folder"))
    drawn, cached = load_glyphs(), load("glyphs")
    assert drawn_seeds == [0]
    assert [file.name for file in (tmp_path / "new" / "folder").iterdir()] == [
        f"glyphs-v{module.FORMAT}-seed0-matplotlib{metadata.version('matplotlib')}.npz"
    ]
    assert torch.equal(drawn.images, cached.images)
    assert torch.equal(drawn.labels, cached.labels)
    assert torch.equal(drawn.superclasses, cached.superclasses)
    assert (drawn.class_names, drawn.superclass_names) == (cached.class_names, cached.superclass_names)
    assert drawn.splits.keys() == cached.splits.keys()
    assert all(torch.equal(drawn.splits[name], cached.splits[name]) for name in drawn.splits)


def damage(content: bytes, kind: str) -> bytes:
    if kind == "truncated":
        return content[: len(content) // 2]
    if kind == "overwritten":
        middle = len(content) // 2
        return content[:middle] + bytes(1000) + content[middle + 1000 :]
    return {"empty": b"", "text": b"no archive"}[kind]


@pytest.mark.parametrize("kind", ["truncated", "overwritten", "empty", "text"])
def test_a_damaged_cache_file_is_drawn_again(drawn_seeds, tmp_path, kind):
    expected = load_glyphs(cache=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage(file.read_bytes(), kind))
    assert torch.equal(load_glyphs(cache=tmp_path).images, expected.images)
    assert torch.equal(load_glyphs(cache=tmp_path).images, expected.images)
    assert drawn_seeds == [0, 0]


def test_a_cache_file_with_other_content_is_drawn_again(drawn_seeds, tmp_path):
    load_glyphs(cache=tmp_path)
    (file,) = tmp_path.iterdir()
    np.savez(file, images=np.zeros(3))
    load_glyphs(cache=tmp_path)
    assert drawn_seeds == [0, 0]


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_a_decompression_bomb_in_the_cache_is_not_unpacked(drawn_seeds, tmp_path, monkeypatch, method):
    load_glyphs(cache=tmp_path)
    (file,) = tmp_path.iterdir()
    # one byte more than the limit, or a compression method with which zipfile does not limit the unpacked size
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr("superclasses.npy", bytes(2**26 + 1 if method == zipfile.ZIP_DEFLATED else 1))
    with monkeypatch.context() as patch:
        patch.setattr(zipfile.ZipFile, "read", lambda *_: pytest.fail("the cache was unpacked"))
        load_glyphs(cache=tmp_path)
    assert drawn_seeds == [0, 0]


def test_without_matplotlib_cached_glyphs_of_another_version_are_read(drawn_seeds, tmp_path, monkeypatch):
    def raise_not_found(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    drawn = load_glyphs(cache=tmp_path)
    (file,) = tmp_path.iterdir()
    file.rename(tmp_path / f"glyphs-v{module.FORMAT}-seed0-matplotlib3.0.npz")
    monkeypatch.setattr(metadata, "version", raise_not_found)
    assert torch.equal(load_glyphs(cache=tmp_path).images, drawn.images)
    with pytest.raises(InputError, match="Install matplotlib, or copy glyphs-v"):
        load_glyphs(seed=1, cache=tmp_path)
    next(tmp_path.iterdir()).write_bytes(b"")
    with pytest.raises(InputError, match="Install matplotlib, or copy glyphs-v"):
        load_glyphs(cache=tmp_path)


def test_an_unwritable_cache_is_rejected(drawn_seeds, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"images cannot be cached in .*file.* set METABRIDGE_CACHE"):
        load_glyphs(cache=tmp_path / "file" / "folder")


def test_a_failed_write_leaves_no_file(drawn_seeds, tmp_path, monkeypatch):
    def raise_no_space(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", raise_no_space)
    with pytest.raises(InputError, match="No space left on device"):
        load_glyphs(cache=tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_unknown_data_set_is_rejected():
    with pytest.raises(
        InputError, match="the data set is 'glyph', which is neither the name of a data set nor an existing path"
    ):
        load("glyph")


def test_a_negative_seed_is_rejected():
    with pytest.raises(InputError, match="seed is -1, but must not be negative"):
        load_glyphs(seed=-1)


def test_no_corruption_of_the_cache_gives_other_glyphs(tmp_path, drawn_seeds, monkeypatch):
    glyphs = load_glyphs(cache=tmp_path)
    monkeypatch.setattr(module, "_draw", lambda seed: glyphs)
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    rng = np.random.default_rng(0)
    # The last 300 bytes are in the directory of the zip archive.
    positions = [*rng.integers(len(content), size=15), *range(len(content) - 300, len(content), 20)]
    for position in positions:
        changed = bytearray(content)
        changed[position] ^= 1 << int(rng.integers(8))
        file.write_bytes(changed)
        cached = load_glyphs(cache=tmp_path)
        assert torch.equal(cached.images, glyphs.images)
        assert torch.equal(cached.labels, glyphs.labels)
        assert (cached.class_names, cached.superclass_names) == (glyphs.class_names, glyphs.superclass_names)
        assert {split: classes.tolist() for split, classes in cached.splits.items()} == {
            split: classes.tolist() for split, classes in glyphs.splits.items()
        }
