"""Backends resolve to what the machine has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from eae_runtime.backend import BackendManager
from eae_runtime.errors import ConfigError


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("name", BackendManager.SUPPORTED)
def test_a_missing_device_becomes_the_cpu(name: str, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    manager = BackendManager(name)
    want = "cuda" if there and name != "cpu" else "cpu"
    assert (manager.requested, manager.resolved, manager.device_for()) == (name, want, torch.device(want))


def test_a_block_may_choose_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    block = nn.ReLU()
    block.eae_backend = "cpu"  # type: ignore[assignment]
    assert BackendManager("cuda").device_for(block) == torch.device("cpu")
    block.eae_backend = None  # type: ignore[assignment]
    assert BackendManager("cuda").device_for(block) == torch.device("cuda")
    block.eae_backend = "tpu"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="tpu"):
        BackendManager("cuda").device_for(block)


def test_an_unknown_name_is_a_value_error_that_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"'tpu'.*'rocm'"):
        BackendManager("tpu")


def test_autocast() -> None:
    manager = BackendManager("cpu")
    a = torch.ones(2, 2)
    with manager.autocast():
        assert (a @ a).dtype is torch.float32
    with manager.autocast(True):
        assert (a @ a).dtype is torch.float16
    with manager.autocast(True, torch.bfloat16):
        assert (a @ a).dtype is torch.bfloat16
