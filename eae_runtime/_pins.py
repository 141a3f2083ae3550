"""`pin`: a small tensor that a block's rebuild gets from the forward instead of computing it again."""

from __future__ import annotations

import threading

import torch

from .errors import RebuildMismatchError, TensorTypeError

__all__ = ["Pins", "pin", "running"]


class Pins:
    """The pinned tensors of one run of a block, in the order of the calls. While `replaying`, they are given out."""

    __slots__ = ("_next", "kept", "replaying")

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []
        self.replaying = False
        self._next = 0

    def replay(self) -> Pins:
        """The same tensors, to be given out from the first one on."""
        copy = Pins()
        copy.kept, copy.replaying = self.kept, True
        return copy

    def handle(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self.replaying:
            self.kept.append(tensor.clone())
            return tensor
        if self._next == len(self.kept):
            raise RebuildMismatchError(
                f"pin() is called more often in the rebuild than in the forward ({len(self.kept)} times): call it "
                "under conditions that depend on the block's input or on pinned values alone"
            )
        kept = self.kept[self._next]
        self._next += 1
        # The block may write to what it is given.
        return kept.clone()


class _Running(threading.local):
    """The pins of the run that the calling thread is in."""

    pins: Pins | None = None


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
    return tensor if running.pins is None else running.pins.handle(tensor)
