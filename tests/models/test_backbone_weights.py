from __future__ import annotations

import argparse
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from metabridge import InputError
from metabridge.models.backbone_weights import first_names, hub_file, not_cached, read_weights, without_wrappers

TENSORS = {"conv.weight": torch.ones(2, 3), "conv.bias": torch.zeros(2)}


class RunsACommand:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


def same(tensors, expected=TENSORS):
    return tensors.keys() == expected.keys() and all(torch.equal(tensors[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", ["weights.safetensors", "weights"])
def test_safetensors_are_read_whatever_the_name_of_the_file(tmp_path, name):
    save_file(TENSORS, tmp_path / name)
    assert same(read_weights(tmp_path / name))


@pytest.mark.parametrize(
    "content",
    [
        TENSORS,
        {"state_dict": TENSORS, "epoch": 3, "args": argparse.Namespace(lr=0.1)},
        {"model": TENSORS, "optimizer": {"state": {}}},
        {"state_dict": {"w": torch.ones(1)}, "state_dict_ema": TENSORS},
        {"model": {"state_dict": TENSORS}},
    ],
)
def test_the_weights_in_the_state_of_a_training_program_are_found(tmp_path, content):
    torch.save(content, tmp_path / "checkpoint.pth")
    assert same(read_weights(tmp_path / "checkpoint.pth"))


@pytest.mark.parametrize("write", [torch.save, lambda content, file: file.write_bytes(pickle.dumps(content, 2))])
def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(tmp_path, write):
    created = tmp_path / "created"
    write({"state_dict": RunsACommand(created)}, tmp_path / "weights.pth")
    with pytest.raises(InputError, match=r"could run code, so it is not read\. Save only the weights"):
        read_weights(tmp_path / "weights.pth")
    assert not created.exists()
    pickle.loads(pickle.dumps(RunsACommand(created)))  # the test could fail
    assert created.exists()


@pytest.mark.parametrize("content", [b"", b"no weights", b"\x10" + bytes(7) + b"{damaged header", b"PK\x03\x04"])
def test_a_damaged_file_raises_an_error(tmp_path, content):
    (tmp_path / "weights").write_bytes(content)
    with pytest.raises(InputError, match=r"^weights is .* which is damaged"):
        read_weights(tmp_path / "weights")


def test_missing_files_folders_and_devices_raise_an_error(tmp_path):
    with pytest.raises(InputError, match=r"cannot be read \(No such file or directory\)"):
        read_weights(tmp_path / "missing")
    for path in (tmp_path, "/dev/zero"):
        with pytest.raises(InputError, match="which is not a file"):
            read_weights(path)


def test_a_file_without_weights_raises_an_error(tmp_path):
    torch.save({"epoch": 3}, tmp_path / "checkpoint.pth")
    with pytest.raises(InputError, match="contains no weights"):
        read_weights(tmp_path / "checkpoint.pth")


@pytest.mark.parametrize("prefix", ["", "module.", "model.", "backbone.", "_orig_mod.module.", "state_dict.model."])
def test_names_of_modules_around_the_model_are_removed(prefix):
    tensors = {f"{prefix}{name}": value for name, value in TENSORS.items()} | {"fc.weight": torch.ones(1)}
    result = without_wrappers(tensors, TENSORS.keys)
    assert result.keys() >= TENSORS.keys()


def test_a_module_of_the_model_itself_is_kept():
    tensors = {"encoder.weight": torch.ones(1), "norm.weight": torch.ones(1)}
    assert without_wrappers(tensors, lambda: ["encoder.weight", "norm.weight"]).keys() == tensors.keys()


def fake_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a cache of the hub with one repository, and return the repository's folder of files."""
    constants = pytest.importorskip("huggingface_hub.constants")
    repository = folder / "models--owner--model"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return snapshot


def test_files_of_the_hub_are_found_in_the_cache_without_network(tmp_path, monkeypatch):
    snapshot = fake_cache(tmp_path, monkeypatch)
    (snapshot / "pytorch_model.bin").write_bytes(b"")
    names = ["model.safetensors", "pytorch_model.bin"]
    assert hub_file("hf:owner/model", "owner/model", names, download=False) == snapshot / "pytorch_model.bin"


@pytest.mark.parametrize("repository", ["owner/other", "owner/model@revision", "not a name/at/all"])
def test_without_permission_nothing_is_downloaded(tmp_path, monkeypatch, repository):
    fake_cache(tmp_path, monkeypatch)
    monkeypatch.setattr("socket.socket.connect", lambda *arguments: pytest.fail("the network was used"))
    with pytest.raises(
        InputError, match=r"not in the local cache, .*download=True \(--model-option download=true\).*weights=FILE"
    ):
        hub_file("hf:owner/other", repository, ["model.safetensors"], download=False)


def test_a_failed_download_raises_an_error_with_the_reason(monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def fail(*arguments, local_files_only, **options):
        assert not local_files_only
        raise ConnectionError("No route to host\nDetails")

    monkeypatch.setattr(hub, "hf_hub_download", fail)
    with pytest.raises(InputError, match=r"cannot be downloaded \(No route to host\)\. Check the name and the network"):
        hub_file("hf:owner/model", "owner/model", ["model.safetensors"], download=True)


def test_errors_name_no_host_and_only_the_first_weights():
    assert "http" not in str(not_cached("hf:x", None))
    assert first_names("abcde") == "'a', 'b', 'c' and 2 more"
