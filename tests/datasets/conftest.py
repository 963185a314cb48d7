import pytest


@pytest.fixture
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test decode everything itself, whatever was decoded before."""
    monkeypatch.setenv("METABRIDGE_CACHE", str(tmp_path_factory.mktemp("own")))
