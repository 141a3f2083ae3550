"""A step is all or nothing: what is remembered before it and put back after a failure.

Note [What a failed step leaves]
    Parameters change only in the commit, so up to there it is enough to put back `.grad`, buffers, generators and the
    state of passes. Ctrl-C is held back around the commit alone. An exception from inside the optimizer cannot be
    undone without a copy of everything it owns: the error says so.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["Gradients", "annotate", "clipped", "deferred_interrupt"]


class Gradients:
    """The `.grad` of leaves as they are now. `restore` puts them back.

    owned: leaves whose `.grad` the step replaces by a new tensor; a reference is enough. A `.grad` that the step may
    add to in place (`borrowed`) is copied.
    """

    def __init__(self, owned: Iterable[torch.Tensor]) -> None:
        self._before: list[tuple[torch.Tensor, torch.Tensor | None]] = [(t, t.grad) for t in owned]
        self._known = {id(t) for t, _ in self._before}
        self._versions: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add_borrowed(self, leaves: Iterable[torch.Tensor]) -> None:
        """Includes leaves that are not among the owned ones, before their first VJP."""
        for leaf in leaves:
            if id(leaf) not in self._known and leaf.is_leaf:
                self._known.add(id(leaf))
                self._before.append((leaf, leaf.grad))
                if leaf.grad is not None:
                    self._versions.append((leaf.grad, leaf.grad.clone()))

    def clear_owned(self) -> None:
        """Sets every owned `.grad` to None."""
        for leaf, _ in self._before:
            leaf.grad = None

    def restore(self) -> None:
        """Puts every `.grad` back."""
        for leaf, grad in self._before:
            leaf.grad = grad
        with torch.no_grad():
            for grad, values in self._versions:
                grad.copy_(values)


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Holds Ctrl-C back until the body has ended. Does nothing off the main thread, where Python delivers no
    signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[tuple[int, Any]] = []
    handler = signal.getsignal(signal.SIGINT)
    if handler is None:
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: pending.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pending and callable(handler):
            handler(*pending[0])


def annotate(error: BaseException, note: str) -> None:
    """Adds where it happened to an exception without changing its type. Python 3.10 has no notes: there the note
    becomes the cause, unless there is one."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    elif error.__cause__ is None:
        error.__cause__ = RuntimeError(note)


def clipped(gradients: dict[torch.Tensor, torch.Tensor], limit: float) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients scaled so that their global norm is at most `limit`, as torch.nn.utils.clip_grad_norm_ does it."""
    if not gradients:
        return gradients
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients.values()]))
    scale = torch.clamp(limit / (norm + 1e-6), max=1.0)
    return {leaf: grad * scale.to(grad.device) for leaf, grad in gradients.items()}
