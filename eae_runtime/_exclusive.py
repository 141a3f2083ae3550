"""One step at a time on a block: two at once would mix their gradients."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from .errors import EAEError

__all__ = ["exclusive", "is_inside"]

# Who is inside a step, for each block (by id).
_in_step: dict[int, weakref.ref[object]] = {}


def is_inside(runtime: object) -> bool:
    """Whether the runtime is inside a step."""
    return any(other() is runtime for other in _in_step.values())


@contextmanager
def exclusive(runtime: object, blocks: Sequence[nn.Module], names: Sequence[str]) -> Iterator[None]:
    """Holds the blocks for the runtime. Raises EAEError, with the block, if one is held."""
    for block, name in zip(blocks, names, strict=True):
        other = _in_step.get(id(block))
        if other is not None and other() is not None:
            who = "this runtime is" if other() is runtime else "another EAERuntime is"
            raise EAEError(
                f"block {name!r} is inside a step: {who} running it. Do not call a runtime from a block, a pass, "
                "an event subscriber or another thread, and run two runtimes on one model one after the other"
            )
    mine = weakref.ref(runtime)
    ids = {id(b) for b in blocks}
    for key in ids:
        _in_step[key] = mine
    try:
        yield
    finally:
        for key in ids:
            del _in_step[key]
