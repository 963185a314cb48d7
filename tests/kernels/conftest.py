from __future__ import annotations

import pytest

from metabridge.kernels import calls, empirical, gram, jacobian, stand_ins, survey


@pytest.fixture(params=[False, True], ids=["as on a CPU", "as on a GPU"])
def gpu(request: pytest.FixtureRequest) -> bool:
    """Whether everything is computed as it is on a GPU: both, one after the other."""
    if request.param:
        request.getfixturevalue("as_on_gpu")
    return bool(request.param)


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let everything be computed here as it is on a GPU."""
    for module in (calls, jacobian, gram, stand_ins, survey, empirical):
        monkeypatch.setattr(module, "cached", lambda x: False)
