"""README and docs agree with the code and with the results."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
generate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate)


@pytest.mark.parametrize("page", generate.pages(), ids=lambda page: page.name)
def test_tables_agree_with_the_results(page):
    text = page.read_text(encoding="utf-8")
    assert generate.replace_tables(text) == text, "run `make docs`"


def test_every_table_is_on_a_page():
    text = "".join(page.read_text(encoding="utf-8") for page in generate.pages())
    shown = set(re.findall(r"<!-- table ([\w-]+) -->", text))
    results = {file.stem for file in (ROOT / "results").glob("*.json") if not file.stem.startswith("bench-")}
    assert shown == set(generate.TABLES) | results


@pytest.mark.parametrize("page", generate.pages(), ids=lambda page: page.name)
def test_every_linked_file_exists(page):
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in link:
            assert (page.parent / link).exists(), link


def test_the_examples_of_the_readme_run(glyphs, tmp_path, monkeypatch):
    """Run all Python blocks in order, with fewer iterations and tasks."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert blocks
    monkeypatch.chdir(tmp_path)
    code = re.sub(r"iterations=\d+", "iterations=2", "\n".join(blocks))
    code = re.sub(r"tasks=\d+", "tasks=2", code)
    exec(compile(code, "README.md", "exec"), {})
