"""Random draws that depend on their place alone: a stream for each step, microbatch and block.

Note [A stream for each step, microbatch and block]
    Ranks cannot share a generator that moves on with every draw: they run side by side. So before a block's forward
    the generators are seeded from (seed, step, microbatch, block), and what a block draws no longer depends on who
    drew before it, in which order microbatches run, or on which rank. One process can run in the same mode
    (`RuntimeConfig(random_streams=True)`) and then draws the same numbers bit for bit. The loss counts as block L.
    After each sweep the process's generators stand where they stood before it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any

from ._chain import Chain
from ._program import Action
from .executor import Sweep

__all__ = ["StreamedSweep", "stream_seed"]

_MASK = (1 << 64) - 1


def stream_seed(seed: int, step: int, microbatch: int, block: int) -> int:
    """The seed of one stream, 63 bits. (The CPU's generator uses 32 of them.)"""
    key = struct.pack("<QQQQ", seed & _MASK, step & _MASK, microbatch & _MASK, block & _MASK)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


class StreamedSweep(Sweep):
    """A sweep whose blocks draw from streams of their own. `stream` is (seed, step). What draws in a block's backward
    goes on in the stream of its rebuild."""

    own_streams = True

    def __init__(self, chain: Chain, inputs: Sequence[Any], *, stream: tuple[int, int], **options: Any) -> None:
        super().__init__(chain, inputs, **options)
        self._stream = stream
        # Every block's draws start anew, so every run needs its snapshot.
        self._env.sparse = False
        # Seeding between blocks would look like a draw.
        self._env.sparse = False
        for kind in ("F", "C", "N", "B"):
            self._ops[kind] = self._seeded(self._ops[kind])

    def _seeded(self, op: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def run(b: int, m: int) -> None:
            self.finish()
            self.chain.generators.seed(stream_seed(*self._stream, max(m, 0), b))
            op(b, m)

        return run

    def run(self, actions: Sequence[Action]) -> None:
        """Executes the actions in order; see the base class. The generators then stand where they stood before the
        sweep."""
        super().run(actions)
        self.finish()
        self.chain.generators.write(self._random)
