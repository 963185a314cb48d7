from __future__ import annotations

import io
import os

import pytest
from PIL import Image

from metabridge.errors import InputError
from metabridge.inference.query_files import find_query_files, has_image_signature

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


def encoded(name):
    content = io.BytesIO()
    Image.new("RGB", (4, 4)).save(content, name)
    return content.getvalue()


@pytest.mark.parametrize("name", FORMATS)
def test_images_without_a_suffix_are_recognized_by_their_first_bytes(tmp_path, name):
    (tmp_path / "image").write_bytes(encoded(name))
    (tmp_path / "README").write_text("no image")
    (tmp_path / "empty").touch()
    (tmp_path / "RIFF").write_bytes(b"RIFF\0\0\0\0WAVE")
    (tmp_path / "notes.txt").write_bytes(encoded(name))  # has a suffix, which is not that of an image
    (tmp_path / ".hidden").write_bytes(encoded(name))
    assert [file.path.name for file in find_query_files([tmp_path])] == ["image"]


def test_files_are_listed_in_the_order_of_the_arguments_with_their_class_folders(tmp_path):
    for name in ("query/b/2.png", "query/a/deep/1.jpg", "query/0.png", "single", "photo.unknown"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    files = find_query_files([tmp_path / "single", tmp_path / "query", tmp_path / "photo.unknown"])
    assert [(file.path.relative_to(tmp_path).as_posix(), file.folder) for file in files] == [
        ("single", "."),
        ("query/0.png", "."),
        ("query/a/deep/1.jpg", "a/deep"),
        ("query/b/2.png", "b"),
        ("photo.unknown", "."),
    ]


def test_missing_paths_and_folders_without_images_are_errors(tmp_path):
    with pytest.raises(InputError, match=r"--query is \S+nowhere, which does not exist. Pass a folder of images"):
        find_query_files([tmp_path / "nowhere"])
    with pytest.raises(InputError, match=r"which contains no images \(\.png, \.jpg"):
        find_query_files([tmp_path])


def test_pipes_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert not has_image_signature(tmp_path / "pipe")
