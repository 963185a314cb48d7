"""Random damage to JSON, for testing its readers."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

UNEXPECTED_VALUES: tuple[Any, ...] = (None, True, -1, 0, 10**9, 10**30, -(2**63), 1e308, float("nan"), float("inf"))
UNEXPECTED_VALUES += ("", "x", "é\x1b[31m[/red]", [], {}, [[]], {"a": 1}, [1, "a", None], "9" * 300)


def value_paths(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value in a JSON tree."""
    keys = data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    return [path, *(subpath for key in keys for subpath in value_paths(data[key], (*path, key)))]


def damaged_json(data: Any, rng: random.Random) -> bytes:
    """Return JSON with a value replaced or removed, a key renamed, or a few bytes changed."""
    if rng.random() < 0.3:
        content = bytearray(json.dumps(data).encode())
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        return bytes(content)
    data = copy.deepcopy(data)
    *path, last = rng.choice(value_paths(data)[1:])  # any value but the whole tree
    parent = data
    for key in path:
        parent = parent[key]
    kind = rng.random()
    if kind < 0.7:
        parent[last] = copy.deepcopy(rng.choice(UNEXPECTED_VALUES))
    elif kind < 0.85 or isinstance(parent, list):
        del parent[last]
    else:
        parent[rng.choice(["x", "model", "", f"{last}s"])] = parent.pop(last)
    return json.dumps(data).encode()
