from __future__ import annotations

import pytest

from metabridge.kernels import cost_model, empirical, gradient_products, jacobian, layer_calls, layer_overrides


@pytest.fixture(params=[False, True], ids=["as on a CPU", "as on a GPU"])
def gpu(request: pytest.FixtureRequest) -> bool:
    """Whether everything is computed as it is on a GPU: both, one after the other."""
    if request.param:
        request.getfixturevalue("as_on_gpu")
    return bool(request.param)


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let everything be computed here as it is on a GPU."""
    for module in (layer_calls, jacobian, gradient_products, layer_overrides, cost_model, empirical):
        monkeypatch.setattr(module, "cached", lambda x: False)
