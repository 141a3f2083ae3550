"""The ways to get a chain's gradients that are compared, each behind one call.

A `Step` runs forward and backward of one step and leaves the gradients in `.grad` (accumulated, as `loss.backward()`
does); the optimizer is the caller's affair. The peers are here; what needs an `eae_runtime` is in `runtimes.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Loss = Callable[[torch.Tensor], torch.Tensor]
Step = Callable[[torch.Tensor, Loss], Any]


def plain(blocks: Sequence[nn.Module]) -> Step:
    """`loss.backward()` with every activation kept."""

    def step(x: torch.Tensor, loss_fn: Loss) -> None:
        h = x
        for block in blocks:
            h = block(h)
        loss = loss_fn(h)
        del h  # the output's bytes are then held only as long as autograd needs them
        loss.backward()

    return step


def bare_loop(blocks: Sequence[nn.Module]) -> Step:
    """The design's loop with no bookkeeping at all: the floor of the overhead benchmark. Float input only."""

    def step(x: torch.Tensor, loss_fn: Loss) -> None:
        bounds, h = [x], x
        with torch.no_grad():
            for b in blocks[:-1]:
                h = b(h)
                bounds.append(h)
        a = None
        for i in reversed(range(len(blocks))):
            xi = bounds.pop().detach().requires_grad_(i > 0)
            y = blocks[i](xi)
            if a is None:
                loss_fn(y).backward()
            else:
                torch.autograd.backward(y, a)
            a = xi.grad

    return step


def checkpointed(blocks: Sequence[nn.Module], *, reentrant: bool, first: int = 0, last: int | None = None) -> Step:
    """torch.utils.checkpoint around each of blocks[first:last]; the others run plainly.

    Reentrant checkpoint gives parameters no gradient unless an input needs one: a float `x` is then made to need one.
    """

    wrapped = range(len(blocks))[first:last]

    def step(x: torch.Tensor, loss_fn: Loss) -> None:
        h = x.detach().requires_grad_() if reentrant and x.is_floating_point() else x
        for i, block in enumerate(blocks):
            h = checkpoint(block, h, use_reentrant=reentrant) if i in wrapped else block(h)
        loss = loss_fn(h)
        del h
        loss.backward()

    return step
