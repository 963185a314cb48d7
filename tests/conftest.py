import os
import sys
from collections.abc import Callable, Iterator

import pytest

from metabridge import cli
from metabridge.datasets import load_glyphs
from metabridge.environments import LabeledImages


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use a temporary cache, unless METABRIDGE_CACHE is set."""
    with pytest.MonkeyPatch.context() as patch:
        if "METABRIDGE_CACHE" not in os.environ:
            patch.setenv("METABRIDGE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def glyphs(cache: None) -> LabeledImages:
    """All glyphs, drawn once per session."""
    return load_glyphs()


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, glyphs: LabeledImages) -> None:
    """Shrink the experiment `glyphs` at the scale "quick", so that it takes seconds."""
    from metabridge.experiments.glyph_methods import SETTINGS, MethodSettings, Settings

    methods = {
        "anil": MethodSettings(12, 1e-2, {"steps": 2, "lr": 0.3}, batch_size=2),
        "mtl": MethodSettings(4, 1e-2, batch_size=2, queries=2),
    }
    monkeypatch.setitem(SETTINGS, "quick", Settings(methods, validation_tasks=4, test_tasks=6, other_tasks=4))


@pytest.fixture
def metabridge(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run the command line and return its exit status, its stdout and its stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["metabridge", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "250")
        with pytest.raises(SystemExit) as caught:
            cli.main()
        stdout, stderr = capsys.readouterr()
        return int(caught.value.code or 0), stdout, stderr

    return call
