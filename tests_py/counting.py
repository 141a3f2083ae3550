"""Blocks that count what theory counts: forwards run, interiors alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

# Not an attribute: what a forward does to its module is undone around a rebuild.
_forwards: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


class Counted(nn.Module):
    """Another module, with its forwards counted."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, value: Any) -> Any:
        _forwards[self] = _forwards.get(self, 0) + 1
        return self.inner(value)


def counted(*blocks: nn.Module) -> nn.Sequential:
    return nn.Sequential(*[Counted(block) for block in blocks])


def forwards(model: nn.Sequential) -> list[int]:
    """Forwards of each block since the last call."""
    return [_forwards.pop(block, 0) for block in model]


def before_each_run(block: nn.Module, look: Callable[[], Any]) -> None:
    """Calls `look` before each run of a block's forward, rebuilds too: a hook that only watches is not called there."""
    inner = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        look()
        return inner(*args, **kwargs)

    block.forward = forward  # type: ignore[method-assign]


class Interior(nn.Module):
    """Linear, GELU, Linear. The class knows how much interior of all its instances is alive, and the peak."""

    alive: ClassVar[list[weakref.ref[torch.Tensor]]] = []
    peak: ClassVar[int] = 0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        Interior.note(h)
        a = F.gelu(h)
        Interior.note(a)
        return self.down(a)

    @classmethod
    def note(cls, tensor: torch.Tensor) -> None:
        cls.alive.append(weakref.ref(tensor))
        cls.peak = max(cls.peak, cls.held())

    @classmethod
    def held(cls) -> int:
        """Rows of interior tensors that are alive: two tensors a block."""
        cls.alive[:] = [r for r in cls.alive if r() is not None]
        return sum(len(t) for t in (r() for r in cls.alive) if t is not None)

    @classmethod
    def forget(cls) -> None:
        cls.alive.clear()
        cls.peak = 0
