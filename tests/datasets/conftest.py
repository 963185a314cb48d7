import pytest


@pytest.fixture
def empty_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an empty cache, so that the test decodes all images."""
    monkeypatch.setenv("METABRIDGE_CACHE", str(tmp_path_factory.mktemp("cache")))
