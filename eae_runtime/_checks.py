"""Which blocks' rebuilds are compared with their forwards, and when (RuntimeConfig.verify_rebuild)."""

from __future__ import annotations

__all__ = ["COMPARED", "LEARNT_ANEW", "MODES", "level"]

MODES = ("off", "sample", "always")

# The rebuilt outputs are compared; moreover the forward looks at the block as at first sight.
COMPARED, LEARNT_ANEW = 1, 2

# Steps in which "sample" compares every block.
_FIRST_STEPS = 2


def level(mode: str, block: int, step: int, blocks: int) -> int:
    """How closely block `block` of `blocks` is looked at in step `step`, both from 0.

    "sample": every block in the first two steps, then one block a step in turn. Every fourth time that its turn comes,
    a block runs in grad mode and is looked at as at first sight: does it write to its input, draw from other
    generators, hand tensors of its graph out, change other state than before?
    """
    if mode == "off":
        return 0
    if step < _FIRST_STEPS:
        return COMPARED
    if step % blocks != block:
        return COMPARED if mode == "always" else 0
    return LEARNT_ANEW if step // blocks % 4 == 3 else COMPARED
