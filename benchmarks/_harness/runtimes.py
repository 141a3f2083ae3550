"""The runtimes that are compared: this package's and 0.1.1's. A process holds one of the two, whichever it imports.

Where no optimizer is given, a `train_step` is its forward, its backward and whatever bookkeeping it cannot do without;
gradients are left in `.grad` as the peers leave them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from . import peer_011


def engine(blocks: Sequence[nn.Module], optimizer: torch.optim.Optimizer | None = None, **config: Any) -> Any:
    """An `EAERuntime` of this process's `eae_runtime`; everything at its default but `config`."""
    from eae_runtime import EAERuntime, RuntimeConfig

    return EAERuntime(list(blocks), optimizer=optimizer, config=RuntimeConfig(**config))


def old_engine(blocks: Sequence[nn.Module], optimizer: torch.optim.Optimizer | None = None, **config: Any) -> Any:
    """The same, and certainly 0.1.1's. It runs no integer input, so the blocks must not start with an embedding."""
    peer_011.assert_loaded()
    return engine(blocks, optimizer, **config)


def language_model() -> ModuleType:
    """This checkout's `eae_runtime.contrib.lm`, without the runtime: also in a process whose `eae_runtime` is 0.1.1.

    It is imported below a bare package of another name, whose `__init__` does not run, so that a peer's process holds
    nothing of ours but the model.
    """
    name = "checkout_eae_runtime"
    if name not in sys.modules:
        bare = ModuleType(name)
        bare.__path__ = [str(Path(__file__).resolve().parents[2] / "eae_runtime")]
        sys.modules[name] = bare
    return importlib.import_module(f"{name}.contrib.lm")
