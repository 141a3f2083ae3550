"""What a scheduler is, and the context that it runs in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..adjoint import AdjointState
from ..boundary_store import BoundaryStore
from ..events import EventBus, EventType
from ..memory import MemoryManager
from ..pipeline import AdjointPipeline
from ..profiler import Profiler
from ..reconstruction import ReconstructionEngine

__all__ = ["BaseScheduler", "ReverseContext"]

Gradients = dict[torch.Tensor, torch.Tensor]


@dataclass
class ReverseContext:
    """All that a reverse pass needs: the blocks, their boundaries x_0..x_L in `boundary_store`, and the adjoint a_L."""

    blocks: list[nn.Module]
    block_names: list[str]
    boundary_store: BoundaryStore
    reconstruction_engine: ReconstructionEngine
    pipeline: AdjointPipeline
    memory_manager: MemoryManager
    event_bus: EventBus
    profiler: Profiler
    initial_adjoint: AdjointState


class BaseScheduler:
    """Decides the order of the reverse pass. To write one in Python, subclass it and implement :meth:`run`.

    The built-in schedulers name a generator of the Go core, whose list of actions the runtime walks; a subclass that
    overrides `run` is called with a :class:`ReverseContext` instead.
    """

    name: str = "BaseScheduler"

    def run(self, context: ReverseContext) -> Gradients:
        """Takes every block's VJP, from the last to the first, and returns {parameter: gradient}."""
        raise NotImplementedError(f"{type(self).__name__} has to implement run(context)")

    @staticmethod
    def _accumulate(target: Gradients, updates: Gradients) -> None:
        """Adds `updates` into `target`, leaf by leaf."""
        for leaf, grad in updates.items():
            total = target.get(leaf)
            target[leaf] = grad if total is None else total + grad

    @staticmethod
    def _reconstruct_one(context: ReverseContext, i: int, adjoint: AdjointState) -> tuple[AdjointState, Gradients]:
        """Rebuilds block i, takes its VJP with the adjoint at boundary i + 1, and sends the result through the passes.
        Returns the adjoint at boundary i and the block's gradients."""
        return reverse_block(context, i, adjoint, context.boundary_store.get(i), {})


def reverse_block(
    context: ReverseContext, i: int, adjoint: AdjointState, x: torch.Tensor, payload: dict[str, Any]
) -> tuple[AdjointState, Gradients]:
    """R, V and P of block i from its boundary `x`; `payload` goes to the passes' context and to the SchedulerStep
    event."""
    name = context.block_names[i]
    with context.profiler.track(f"reconstruct:{name}"):
        before, gradients = context.reconstruction_engine.reconstruct(context.blocks[i], x, adjoint, block_name=name)
    before = context.pipeline.run(before, {"block_index": i, "block_name": name, **payload})
    if context.event_bus.wants(EventType.SCHEDULER_STEP):
        context.event_bus.emit(EventType.SCHEDULER_STEP, block_index=i, block_name=name, **payload)
    return before, gradients
