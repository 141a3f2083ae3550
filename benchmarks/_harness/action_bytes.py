"""Bytes over one step, action by action, for any way of training a chain.

Marks tell where one action ends and the next starts; between two marks the counter's high-water mark and the bytes held
at the end are kept. Labels are the runtime's: `3C` forward without graph, `3F` forward with graph, `7B` loss, `3R`
rebuild, `3V` VJP, `U` the optimizer's update. torch.utils.checkpoint rebuilds inside autograd, where nothing tells the
rebuild's end: `3RV` is both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .alloc_count import Counter
from .surround import surrounded


@dataclass(frozen=True)
class ActionBytes:
    """One action: the most bytes held during it, and the bytes held at its end."""

    label: str
    peak: int
    end: int


class ByteRecorder:
    """Records one step of `blocks`; sizes are less `resting` bytes.

    `kept` numbers the blocks whose graph stays from the forward (`F`); the others are run again (`C`, then `R`).
    `fused_rebuild` says that rebuild and VJP cannot be told apart.
    """

    def __init__(
        self, counter: Counter, blocks: Sequence[nn.Module], kept: Sequence[int], resting: int, *, fused_rebuild: bool
    ) -> None:
        self._counter = counter
        self._blocks = list(blocks)
        self._kept = set(kept)
        self._resting = resting
        self._fused = fused_rebuild
        self._seen: set[int] = set()
        self._label: str | None = None
        self._actions: list[ActionBytes] = []

    def record(
        self,
        step: Callable[[Callable[..., torch.Tensor]], Any],
        loss_fn: Callable[..., torch.Tensor],
        optimizer: torch.optim.Optimizer,
    ) -> list[ActionBytes]:
        """Runs `step(loss_fn)` once and returns its actions. The given step has to call the loss it is handed."""
        self._seen, self._label, self._actions = set(), None, []
        handle = optimizer.register_step_pre_hook(lambda *_: self._mark("U"))
        stack = ExitStack()
        for i, block in enumerate(self._blocks):
            stack.enter_context(surrounded(block, before=self._before(i), after=self._after(i)))

        def marked_loss(*args: torch.Tensor) -> torch.Tensor:
            self._mark(f"{len(self._blocks)}B")
            return loss_fn(*args)

        self._counter.take_peak()
        try:
            step(marked_loss)
            self._mark(None)
        finally:
            handle.remove()
            stack.close()
        return self._actions

    def _mark(self, label: str | None) -> None:
        peak = self._counter.take_peak()
        if self._label is not None:
            end = self._counter.live()
            self._actions.append(ActionBytes(self._label, peak - self._resting, end - self._resting))
        self._label = label

    def _before(self, i: int) -> Callable[[], None]:
        def look() -> None:
            if i in self._seen:
                self._mark(f"{i}RV" if self._fused else f"{i}R")
            else:
                self._seen.add(i)
                self._mark(f"{i}F" if i in self._kept else f"{i}C")

        return look

    def _after(self, i: int) -> Callable[[torch.Tensor], None]:
        tell = i in self._kept or not self._fused

        def look(output: torch.Tensor) -> None:
            if tell and output.requires_grad:
                output.register_hook(lambda _: self._mark(f"{i}V"))

        return look
