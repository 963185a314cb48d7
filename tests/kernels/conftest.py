from __future__ import annotations

import pytest

from metabridge.kernels import cost_model, empirical, gradient_products, jacobian, layer_calls, layer_overrides


@pytest.fixture(params=[False, True], ids=["cpu path", "gpu path"])
def gpu_path(request: pytest.FixtureRequest) -> bool:
    """Run a test on the code path of a CPU and on that of a GPU, both on a CPU; return whether it is the GPU path."""
    if request.param:
        request.getfixturevalue("simulate_gpu_path")
    return bool(request.param)


@pytest.fixture
def simulate_gpu_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the code path of a GPU on a CPU."""
    for module in (layer_calls, jacobian, gradient_products, layer_overrides, cost_model, empirical):
        monkeypatch.setattr(module, "on_cpu", lambda x: False)
