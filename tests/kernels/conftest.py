from __future__ import annotations

import pytest

from metabridge.kernels import empirical, gram, jacobian, stand_ins, survey


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let everything be computed here as it is on a GPU."""
    for module in (jacobian, gram, stand_ins, survey, empirical):
        monkeypatch.setattr(module, "cached", lambda x: False)
