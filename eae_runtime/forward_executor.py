"""ForwardExecutor: the forward sweep without graph, as a call of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from . import _tree
from ._ambient import Generators
from ._records import Environment, Record, RestartStep
from .blockcall import BlockCall
from .boundary_store import BoundaryStore
from .events import EventBus, EventType

__all__ = ["ForwardExecutor"]


class ForwardExecutor:
    """Runs a chain forward without keeping a graph and stores the boundaries x_0..x_L."""

    def __init__(self, event_bus: EventBus | None = None, compute_dtype: torch.dtype | None = None) -> None:
        self.event_bus = event_bus or EventBus()
        self.compute_dtype = compute_dtype

    def run(self, blocks: Sequence[nn.Module], x0: torch.Tensor, boundary_store: BoundaryStore) -> torch.Tensor:
        """Returns x_L, detached. The store gets copies of its own of every boundary, 0 to L."""
        events = self.event_bus
        if events.wants(EventType.FORWARD_STARTED):
            events.emit(EventType.FORWARD_STARTED, num_blocks=len(blocks))
        env = Environment(Generators([x0.device]), (x0.device.type,))
        x = x0
        boundary_store.put(0, x)
        for i, block in enumerate(blocks):
            call = BlockCall(block, f"{type(block).__name__}_{i}", i, self.compute_dtype)
            x = self._run_one(call, x, env)
            boundary_store.put(i + 1, x)
        if events.wants(EventType.FORWARD_FINISHED):
            events.emit(EventType.FORWARD_FINISHED, num_boundaries=len(boundary_store))
        return x

    @staticmethod
    def _run_one(call: BlockCall, x: torch.Tensor, env: Environment) -> torch.Tensor:
        while True:
            undo: list[Record] = []
            try:
                outputs, _, _, _ = call.forward([x.detach()], _tree.SINGLE, (x.is_floating_point(),), env, False, undo)
                return outputs[0]
            except RestartStep:
                for record in undo:
                    record.undo()
                    env.generators.write(record.random)
