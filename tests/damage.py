"""Random damage to JSON, for testing its readers."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

STRANGE: tuple[Any, ...] = (None, True, -1, 0, 10**9, 10**30, -(2**63), 1e308, float("nan"), float("inf"), "", "x")
STRANGE += ("é\x1b[31m[/red]", [], {}, [[]], {"a": 1}, [1, "a", None], "9" * 300)


def value_paths(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value in a JSON tree."""
    keys = data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    return [path, *(below for key in keys for below in value_paths(data[key], (*path, key)))]


def damaged_json(data: Any, draw: random.Random) -> bytes:
    """Return JSON with a value replaced or removed, a key renamed, or a few bytes changed."""
    if draw.random() < 0.3:
        content = bytearray(json.dumps(data).encode())
        for _ in range(draw.randint(1, 4)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        return bytes(content)
    data = copy.deepcopy(data)
    *path, last = draw.choice(value_paths(data)[1:])
    parent = data
    for key in path:
        parent = parent[key]
    kind = draw.random()
    if kind < 0.7:
        parent[last] = copy.deepcopy(draw.choice(STRANGE))
    elif kind < 0.85 or isinstance(parent, list):
        del parent[last]
    else:
        parent[draw.choice(["x", "model", "", f"{last}s"])] = parent.pop(last)
    return json.dumps(data).encode()
