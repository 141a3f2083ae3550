"""`pin`: a small tensor that a block's rebuild gets from the forward instead of computing it again."""

from __future__ import annotations

import threading
from typing import Protocol

import torch

from .errors import RebuildMismatchError, TensorTypeError

__all__ = ["Pins", "pin", "running"]


class Pins:
    """The pinned tensors of one run of a block, in the order of the calls. While `replaying`, they are given out."""

    __slots__ = ("_kept", "_next", "_replaying")

    def __init__(self, of: Pins | None = None, *, replaying: bool = False) -> None:
        """of: the pins of the forward, for a rebuild."""
        self._kept: list[torch.Tensor] = [] if of is None else of._kept
        self._replaying = replaying
        self._next = 0

    def handle(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._replaying:
            self._kept.append(tensor.clone())
            return tensor
        if self._next == len(self._kept):
            raise RebuildMismatchError(
                f"pin() is called more often in the rebuild than in the forward ({len(self._kept)} times): call it "
                "under conditions that depend on the block's input or on pinned values alone"
            )
        kept = self._kept[self._next]
        self._next += 1
        # The block may write to what it is given.
        return kept.clone()


class Holder(Protocol):
    """A run of a block, with its pins once there are any."""

    pins: Pins | None


class _Running(threading.local):
    """The run of a block that the calling thread is in."""

    run: Holder | None = None


running = _Running()


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Keeps `tensor` from the block's forward and gives it back in the block's rebuild.

    For small tensors that decide what a block computes: a routing choice, a mask, a sample that comes from somewhere
    the runtime cannot replay. Call it inside a block's forward: `choice = pin(logits.argmax(-1))`. The copy lives until
    the block's VJP. Outside a block that the runtime runs, and in evaluation, it returns its argument.

    Raises TensorTypeError for a tensor that requires grad: its gradient would end at the pin.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TensorTypeError(f"pin() takes a tensor, not {type(tensor).__name__}")
    if tensor.requires_grad:
        raise TensorTypeError(
            "pin() was given a tensor that requires grad, and no gradient passes a pin; pin the choice made from it "
            "(an index, a mask), or its detach()"
        )
    run = running.run
    if run is None:
        return tensor
    if run.pins is None:
        run.pins = Pins()
    return run.pins.handle(tensor)
