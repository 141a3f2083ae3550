"""Blocks that count what theory counts: forwards run, interiors alive."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F


class Counted(nn.Module):
    """Another module, with its forwards counted."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.forwards = 0

    def forward(self, value: Any) -> Any:
        self.forwards += 1
        return self.inner(value)


def counted(*blocks: nn.Module) -> nn.Sequential:
    return nn.Sequential(*[Counted(block) for block in blocks])


def forwards(model: nn.Sequential) -> list[int]:
    """Forwards of each block since the last call."""
    counts = [block.forwards for block in model]
    for block in model:
        block.forwards = 0
    return counts


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
