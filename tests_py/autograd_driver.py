"""A BlockCall behind a module's own forward, driven by the user's `loss.backward()`: the smallest second driver.

The node takes every leaf that the block uses as an input of its own and returns their gradients, so that accumulation,
hooks, DDP's buckets, its search for unused parameters and shared weights stay with the outer engine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from eae_runtime import _tree
from eae_runtime._ambient import Generators
from eae_runtime._leaves import capture, held_back
from eae_runtime._records import Environment, Record, RestartStep
from eae_runtime.blockcall import BlockCall


class _Node(torch.autograd.Function):
    """The block's output in the outer graph, below it the block's input and its leaves."""

    @staticmethod
    def forward(ctx: Any, call: BlockCall, record: Record, output: torch.Tensor, *below: torch.Tensor) -> torch.Tensor:
        ctx.call, ctx.record = call, record
        # The engine's own guard: a boundary that was written in place is an error.
        ctx.save_for_backward(*below)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        x, *leaves = ctx.saved_tensors
        call, record = ctx.call, ctx.record
        env = Environment(Generators(), ("cpu",))
        resume = env.generators.read()
        with torch.enable_grad():
            rebuilt = call.rebuild(record, [x.detach()], env, (call.index, "R", 0))
            wanted = [t for t in (*rebuilt.inputs, *leaves) if t is not None]
            # The leaves' hooks are the outer engine's to call.
            with held_back(leaves):
                found = list(capture(rebuilt.outputs, list(grads), wanted))
        env.generators.write(resume)
        first = found.pop(0) if rebuilt.inputs[0] is not None else None
        return None, None, None, first, *found


class Driven(nn.Module):
    """A module of one tensor in and one out that keeps only its input for the backward."""

    def __init__(self, inner: nn.Module, name: str = "block") -> None:
        super().__init__()
        self.inner = inner
        self._call = BlockCall(inner, name, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return self.inner(x)
        self._call.refresh()
        output, needs, record = self._run(x.detach(), x.requires_grad)
        if not needs:
            return output
        return _Node.apply(self._call, record, output, x, *record.facts.leaves)

    def _run(self, x: torch.Tensor, needs_grad: bool) -> tuple[torch.Tensor, bool, Record]:
        env = Environment(Generators(), ("cpu",))
        while True:
            undo: list[Record] = []
            try:
                [output], [needs], record, _ = self._call.forward([x], _tree.SINGLE, (needs_grad,), env, False, undo)
                return output, needs, record
            except RestartStep:
                for one in undo:
                    one.undo()
                    env.generators.write(one.random)
