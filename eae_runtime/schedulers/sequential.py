"""The reference scheduler."""

from __future__ import annotations

from .generated import GeneratedScheduler

__all__ = ["SequentialScheduler"]


class SequentialScheduler(GeneratedScheduler):
    """Every block forward, the loss, every block back, one after the other (the paper's Algorithm 2)."""

    name = "SequentialScheduler"
    generator = "sequential"
