from __future__ import annotations

import pytest
import torch

from metabridge.device import as_device


@pytest.mark.parametrize(("is_available", "expected"), [(True, "cuda"), (False, "cpu")])
def test_auto_is_the_gpu_if_there_is_one(monkeypatch, is_available, expected):
    monkeypatch.setattr("torch.cuda.is_available", lambda: is_available)
    assert as_device("auto") == torch.device(expected)
