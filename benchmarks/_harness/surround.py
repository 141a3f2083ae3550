"""Looks before and after each run of a block's forward, rebuilds included.

A forward hook would not do: the runtime does not call hooks that only watch in a rebuild.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["surrounded"]


@contextmanager
def surrounded(
    block: nn.Module, before: Callable[[], Any], after: Callable[[torch.Tensor], Any] | None = None
) -> Iterator[None]:
    """Calls `before()`, and `after(output)`, around each run of the block's forward while the body runs."""
    inner = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        before()
        output = inner(*args, **kwargs)
        if after is not None:
            after(output)
        return output

    own = block.__dict__.get("forward")
    block.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        if own is None:
            del block.forward
        else:
            block.forward = own  # type: ignore[method-assign]
