from __future__ import annotations

from collections import Counter
from pathlib import Path

import metabridge

PACKAGE = Path(metabridge.__file__).parent


def test_no_two_modules_of_the_package_have_the_same_file_name():
    names = Counter(path.stem for path in PACKAGE.rglob("*.py") if not path.stem.startswith("__"))
    assert [name for name, count in names.items() if count > 1] == []
