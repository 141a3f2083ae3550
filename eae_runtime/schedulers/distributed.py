"""Blocks spread over the processes of a torch.distributed group."""

from __future__ import annotations

from collections.abc import Sequence

from .generated import GeneratedScheduler

__all__ = ["DistributedScheduler"]


class DistributedScheduler(GeneratedScheduler):
    """Each rank runs its own blocks; see the class's user, the runtime.

    block_ranks: the rank of each block, never falling along the chain; None spreads the blocks evenly.
    """

    name = "DistributedScheduler"
    generator = "sequential"

    def __init__(self, block_ranks: Sequence[int] | None = None) -> None:
        self.block_ranks = None if block_ranks is None else list(block_ranks)
