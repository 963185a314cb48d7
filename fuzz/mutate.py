"""Random changes to files: changes of raw bytes, and changes within a file format."""

from __future__ import annotations

import io
import json
import pickletools
import random
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from typing import Any

Change = Callable[[bytes, random.Random], bytes]

NUMBERS: tuple[int, ...] = (  # sizes, offsets and counts that are likely to cause errors
    0,
    1,
    2,
    7,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    2**63 - 1,
    2**64 - 1,
)
NAMES = (  # unusual or malicious names of files and keys
    "",
    ".",
    "..",
    "../../outside/secret.png",
    "/etc/hostname",
    "/dev/zero",
    "a/../../../outside/secret.png",
    "C:\\x.png",
    "nul\0.png",
    "[/]a",
    "[red]x",
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "\ud800",
    "a\nb",
    "é" * 300,
    "x" * 5000,
    "-rf",
    "%s%n",
    "💥",
)
VALUES: tuple[Any, ...] = (  # unusual values in JSON
    *(0, -1, 1, 3, 10**9, -(10**9), 2**31, 2**63, 10**30, 10**400, 0.5, -0.0, 1e308, 1e-320),
    *(float("nan"), float("inf"), float("-inf"), True, False, None),
    *("nan", "0", "timm:resnet18", "conv4", "x.json", "GradientDescent", "cpu"),
    *([], {}, [[]], [None], {"": None}, [0] * 1000, {"solver": "Ridge"}),
    *NAMES,
)
NESTING_DEPTH = 100_000  # more levels of nesting than any parser should accept


def damage(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """Return a file with changed bytes, as after an interrupted transfer, or joined with a part of another file.

    >>> damage(b"abc", random.Random(0)) != b"abc"
    True
    """
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        changes = (*RAW_CHANGES, *(lambda data, rng, other=other: _splice(data, other, rng) for other in others[:1]))
        data = rng.choice(changes)(data, rng)
    return data


def _flip_bits(data: bytes, rng: random.Random) -> bytes:
    return _edit_bytes(data, rng, lambda value: value ^ (1 << rng.randrange(8)))


def _set_bytes(data: bytes, rng: random.Random) -> bytes:
    return _edit_bytes(
        data, rng, lambda value: rng.choice((0, 1, 0x7F, 0x80, 0xFF, 0x2E, 0x2F, 0x0A, rng.randrange(256)))
    )


def _edit_bytes(data: bytes, rng: random.Random, edit: Callable[[int], int]) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        if changed:
            position = rng.randrange(len(changed))
            changed[position] = edit(changed[position])
    return bytes(changed)


def _set_number(data: bytes, rng: random.Random) -> bytes:
    """Overwrite 2, 4 or 8 bytes with a number that is likely to cause errors, in either byte order."""
    size = rng.choice((2, 4, 8))
    raw = (rng.choice(NUMBERS) % (1 << 8 * size)).to_bytes(size, rng.choice(("little", "big")))
    start = rng.randrange(min(len(data), 64) if rng.random() < 0.5 else len(data)) if data else 0
    return data[:start] + raw + data[start + size :]


def _random_range(data: bytes, rng: random.Random) -> tuple[int, int]:
    start = rng.randint(0, len(data))
    return start, min(len(data), start + rng.choice((1, 2, 4, 16, 64, rng.randint(0, len(data)))))


def _delete(data: bytes, rng: random.Random) -> bytes:
    start, end = _random_range(data, rng)
    return data[:start] + data[end:]


def _duplicate(data: bytes, rng: random.Random) -> bytes:
    start, end = _random_range(data, rng)
    return data[:end] + data[start:end] * rng.choice((1, 1, 3, 50)) + data[end:]


def _insert(data: bytes, rng: random.Random) -> bytes:
    start, _ = _random_range(data, rng)
    return data[:start] + rng.randbytes(rng.choice((1, 2, 8, 100))) + data[start:]


def _fill(data: bytes, rng: random.Random) -> bytes:
    start, end = _random_range(data, rng)
    return data[:start] + rng.choice((b"\0", b"\xff", b"A")) * (end - start) + data[end:]


def _truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.choice((0, 1, len(data) - 1, rng.randint(0, len(data)), rng.randint(0, len(data))))]


def _append(data: bytes, rng: random.Random) -> bytes:
    return data + rng.choice((b"\0" * 16, rng.randbytes(16), data, b"\n"))


def _splice(data: bytes, other: bytes, rng: random.Random) -> bytes:
    fraction = rng.random()
    return data[: int(fraction * len(data))] + other[int(rng.choice((fraction, rng.random())) * len(other)) :]


RAW_CHANGES: tuple[Change, ...] = (  # a change that is listed twice is chosen twice as often
    *(_flip_bits, _flip_bits, _set_bytes, _set_number, _set_number),
    *(_delete, _duplicate, _insert, _fill, _truncate, _append),
)


def change_value(value: Any, rng: random.Random) -> Any:
    """Return plain data (dictionaries, lists, numbers, text) with a changed, removed, added or repeated item."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        kind = rng.random()
        if kind < 0.12:
            return {name: item for name, item in value.items() if name != key}
        if kind < 0.2:
            return value | {rng.choice(NAMES): rng.choice(VALUES)}
        if kind < 0.26:
            return {(rng.choice(NAMES) if name == key else name): item for name, item in value.items()}
        return value | {key: change_value(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        position = rng.randrange(len(value))
        kind = rng.random()
        if kind < 0.1:
            return value[:position] + value[position + 1 :]
        if kind < 0.2:
            return [*value[:position], rng.choice(value), *value[position:]]
        if kind < 0.25:
            return value * rng.choice((2, 50))
        return [*value[:position], change_value(value[position], rng), *value[position + 1 :]]
    if isinstance(value, int | float) and abs(value) < 1e300 and rng.random() < 0.4:
        return rng.choice(
            (value + 1, value - 1, -value, value * 10, value * 10**6, value / 2, float(value), str(value))
        )
    if isinstance(value, str) and rng.random() < 0.3:
        return rng.choice((value + "x", value[:-1], value.upper(), value + "\0", [value], value * 2))
    return rng.choice(VALUES)


def change_json(data: bytes, rng: random.Random) -> bytes:
    """Return a JSON document with changed values, missing, unknown or repeated keys, or very deep nesting."""
    value = json.loads(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = change_value(value, rng)
    text = json.dumps(value)
    kind = rng.random()
    if kind < 0.05:
        keys = [position for position in range(len(text)) if text.startswith('": ', position)]
        if keys:
            position = rng.choice(keys) + 3
            text = text[:position] + "[" * NESTING_DEPTH + rng.choice(("", "]" * NESTING_DEPTH)) + text[position:]
    elif kind < 0.12 and isinstance(value, dict) and value:
        key = json.dumps(rng.choice(list(value)))
        text = text[:-1] + f", {key}: {json.dumps(rng.choice(VALUES))}}}"
    elif kind < 0.15:
        text = text.replace("1", rng.choice(("1e999", "-1", "1" * 5000, "01", "NaN")), 1)
    return text.encode("utf-8", "surrogatepass")


def change_json_lines(data: bytes, rng: random.Random) -> bytes:
    """Return a JSON lines file with one line changed, removed or repeated, or with all lines shuffled."""
    lines = data.splitlines()
    position = rng.randrange(len(lines))
    kind = rng.random()
    if kind < 0.7 and lines[position].endswith(b"}"):
        lines[position] = change_json(lines[position], rng)
    elif kind < 0.8:
        del lines[position]
    elif kind < 0.9:
        lines.insert(position, rng.choice(lines))
    else:
        rng.shuffle(lines)
    return b"\n".join(lines) + b"\n" * rng.randrange(2)


def change_pickle(data: bytes, rng: random.Random) -> bytes:
    """Return a pickle with deleted, repeated, swapped, inserted or replaced opcodes, or with changed arguments."""
    try:
        starts = [position for _, _, position in pickletools.genops(data) if position is not None]
    except Exception:  # after earlier changes, it may not be a valid pickle
        return damage(data, rng)
    codes = [data[start:end] for start, end in zip(starts, [*starts[1:], len(data)])]
    for _ in range(rng.choice((1, 1, 2, 4))):
        position = rng.randrange(len(codes))
        kind = rng.randrange(6)
        if kind == 0:
            codes[position] = b""
        elif kind == 1:
            codes.insert(position, rng.choice(codes))
        elif kind == 2:
            other = rng.randrange(len(codes))
            codes[position], codes[other] = codes[other], codes[position]
        elif kind == 3:
            codes.insert(position, rng.choice(OPCODES))
        elif kind == 4:
            codes[position] = rng.choice(OPCODES)
        else:
            codes[position] = codes[position][:1] + damage(codes[position][1:], rng)
    return b"".join(codes)


OPCODES = (
    *(b"(", b")", b"]", b"}", b"0", b"1", b"2", b"N", b"t", b"l", b"d", b"R", b"b", b"s", b"u", b"a", b"e", b"\x94"),
    *(b"\x85", b"\x86", b"\x87", b"\x88", b"\x89", b"\x8f", b"\x90", b"\x91", b"\x93", b"\x81", b"\x92", b"o", b"Q"),
    *(
        b"h\0",
        b"h\x01",
        b"j\xff\xff\xff\x7f",
        b"r\xff\xff\xff\x7f",
        b"q\0",
        b"K\xff",
        b"J\xff\xff\xff\x7f",
        b"M\xff\xff",
    ),
    *(
        b"\x8a\xff" + b"\xff" * 255,
        b"G" + b"\x7f" * 8,
        b"X\xff\xff\xff\x7f",
        b"B\xff\xff\xff\x7f",
        b"\x8e" + b"\xff" * 8,
    ),
    *(
        b"\x8d\xff\xff\xff\xff\0\0\0\0",
        b"\x96\0\0\0\0\x01\0\0\0",
        b"\x97",
        b"\x98",
        b"\x95" + b"\xff" * 8,
        b"C\x04abcd",
    ),
    *(
        b"cos\nsystem\n",
        b"cbuiltins\neval\n",
        b"cnumpy\nndarray\n",
        b"cnumpy\ndtype\n",
        b"cnumpy.core.multiarray\nscalar\n",
    ),
    *(
        b"c_codecs\nencode\n",
        b"I9" + b"9" * 5000 + b"\n",
        b"Fnan\n",
        b"S'x'\n",
        b"Pid\n",
        b"ios\nsystem\n",
        b"\x82\x01",
        b".",
    ),
    b"cnumpy._core.numeric\n_frombuffer\n",
    b"(" * 20000,
    b"](" * 20000,
)


def change_png(data: bytes, rng: random.Random) -> bytes:
    """Return a PNG file with changed chunks and valid checksums."""
    chunks, position = [], 8
    while position + 8 <= len(data):
        size = int.from_bytes(data[position : position + 4], "big")
        chunks.append((data[position + 4 : position + 8], data[position + 8 : position + 8 + size]))
        position += 12 + size
    index = rng.randrange(len(chunks))
    kind, content = chunks[index]
    change = rng.randrange(6)
    if change == 0:
        del chunks[index]
    elif change == 1:
        chunks.insert(rng.randrange(len(chunks)), (kind, content))
    elif change == 2:
        chunks.insert(
            1, (rng.choice((b"tRNS", b"PLTE", b"iCCP", b"zTXt", b"iTXt", b"eXIf", b"acTL", b"gAMA")), rng.randbytes(40))
        )
    elif change == 3 and kind == b"IDAT":
        chunks[index] = (kind, zlib.compress(damage(_decompress(content), rng)))
    elif change == 4:
        width, height = (rng.choice((0, 1, 5, 1000, 30000, 2**31 - 1, 2**32 - 1)) for _ in range(2))
        header = struct.pack(">II", width, height) + bytes(
            rng.choice(values) for values in ((1, 8, 16, 9), (0, 2, 3, 4, 6, 7), (0, 1), (0, 1), (0, 1, 2))
        )
        chunks[0] = (b"IHDR", header)
    else:
        chunks[index] = (kind, damage(content, rng))
    return png_file(chunks)


def _decompress(content: bytes) -> bytes:
    try:
        return zlib.decompress(content)
    except zlib.error:
        return content


def png_file(chunks: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return a PNG file with these chunks.

    >>> png_file([(b"IEND", b"")])[-4:].hex()
    'ae426082'
    """
    encoded_chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(encoded_chunks)


def change_zip(data: bytes, rng: random.Random, inner: Change = damage) -> bytes:
    """Return a zip archive with changed members (names, contents, compression) or changed fields of its directory.

    `inner` changes the content of a member.
    """
    if rng.random() < 0.4:
        return _change_directory(data, rng)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    position = rng.randrange(len(members))
    name, content = members[position]
    kind = rng.randrange(5)
    if kind == 0:
        del members[position]
    elif kind == 1:
        members.append((name, content))
    elif kind == 2:
        folder = name.rpartition("/")[0]
        members[position] = (rng.choice((rng.choice(NAMES), f"{folder}/{rng.choice(NAMES)}.png")), content)
    else:
        members[position] = (name, inner(content, rng))
    return zip_archive(
        members, rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    )


def zip_archive(members: Sequence[tuple[str, bytes]], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """Return a zip archive with these members; names may repeat.

    >>> zip_archive([("a", b"1")])[:2]
    b'PK'
    """
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, content in members:
            info = zipfile.ZipInfo("x", (1980, 1, 1, 0, 0, 0))
            info.filename = name.encode("utf-8", "replace").decode()[:60000]
            info.compress_type = method
            archive.NameToInfo.pop(info.filename, None)
            archive.writestr(info, content)
    return stream.getvalue()


def _change_directory(data: bytes, rng: random.Random) -> bytes:
    signatures = (b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06")
    positions = [position for signature in signatures for position in _find_all(data, signature)]
    start = rng.choice(positions) + 4 + rng.randrange(42)
    size = rng.choice((2, 4))
    return data[:start] + (rng.choice(NUMBERS) % (1 << 8 * size)).to_bytes(size, "little") + data[start + size :]


def _find_all(data: bytes, pattern: bytes) -> list[int]:
    positions, position = [], data.find(pattern)
    while position >= 0:
        positions.append(position)
        position = data.find(pattern, position + 1)
    return positions


def change_safetensors(data: bytes, rng: random.Random) -> bytes:
    """Return a safetensors file with a changed header, changed JSON in its metadata, or changed tensors."""
    size = int.from_bytes(data[:8], "little")
    header, tensors = json.loads(data[8 : 8 + size]), data[8 + size :]
    kind = rng.random()
    metadata = header.get("__metadata__", {})
    json_keys = [key for key in metadata if metadata[key].startswith("{")]
    if kind < 0.5 and json_keys:
        key = rng.choice(json_keys)
        changed = change_json(metadata[key].encode(), rng).decode("utf-8", "replace")
        header["__metadata__"] = metadata | {key: changed}
    elif kind < 0.85:
        header = change_value(header, rng)
    elif kind < 0.95:
        tensors = damage(tensors, rng)
    else:
        names = [name for name in header if name != "__metadata__"]
        first, second = rng.choice(names), rng.choice(names)
        header[first], header[second] = header[second], header[first]
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + tensors
