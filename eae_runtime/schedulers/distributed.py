"""Blocks spread over the processes of a torch.distributed group."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from typing import Any

from .. import _bridge
from .generated import GeneratedScheduler

__all__ = ["DistributedScheduler"]


class DistributedScheduler(GeneratedScheduler):
    """Each rank runs its own blocks; microbatches go through the ranks in 1F1B order. With one process:
    RuntimeWarning and sequential.

    block_ranks: the rank of each block, never falling along the chain; None takes RuntimeConfig's, and None there
    spreads the blocks evenly. shared: groups of parameter names ("BLOCK.path") that are one parameter, for ties that
    no rank can see because it has None in place of the other block. Ties that a rank can see, also between meta
    blocks, are found without.
    """

    name = "DistributedScheduler"
    generator = "sequential"

    def __init__(self, block_ranks: Sequence[int] | None = None, shared: Sequence[Sequence[str]] = ()) -> None:
        self.block_ranks = None if block_ranks is None else list(block_ranks)
        self.shared = [list(names) for names in shared]

    def schedule(self, spec: dict[str, Any]) -> str:
        """As text, two lines a rank; see the base class."""
        if spec.get("world", 1) > 1:
            return str(_bridge.call("SchedGenerate", "distributed", json.dumps(spec)))
        warnings.warn(
            "the distributed scheduler runs in a single process and is sequential there; start with torchrun and call "
            "torch.distributed.init_process_group() before the runtime is made",
            RuntimeWarning,
            stacklevel=2,
        )
        return super().schedule(spec)
