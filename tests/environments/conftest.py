import pytest

from metabridge.environments import LabelledImages
from metabridge.environments.datasets import load_glyphs


@pytest.fixture(scope="session")
def glyphs(tmp_path_factory: pytest.TempPathFactory) -> LabelledImages:
    """All the glyphs, drawn once a session and apart from the user's own cache."""
    return load_glyphs(cache=tmp_path_factory.mktemp("cache"))
