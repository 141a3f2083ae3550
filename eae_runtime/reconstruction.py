"""ReconstructionEngine: one block rebuilt and differentiated, as a call of its own."""

from __future__ import annotations

import torch
from torch import nn

from . import _tree
from ._ambient import Generators
from ._leaves import graph_leaves
from ._sharing import Collector
from .adjoint import AdjointState
from .blockcall import BlockCall, Environment, Record
from .errors import PassError
from .events import EventBus, EventType

__all__ = ["ReconstructionEngine"]


class ReconstructionEngine:
    """Rebuilds a block from its boundary and takes the local VJP (paper, eq. 3-5).

    A block that has run in the runtime's last forward is rebuilt under the state it ran in: generators, autocast, training flags,
    buffers. Any other block is run as it is now, and its buffers are put back.
    """

    def __init__(self, event_bus: EventBus | None = None, compute_dtype: torch.dtype | None = None) -> None:
        self.event_bus = event_bus or EventBus()
        self.compute_dtype = compute_dtype
        self._runs: dict[int, tuple[BlockCall, Record]] = {}

    def remember(self, runs: dict[int, tuple[BlockCall, Record]]) -> None:
        """Takes the runs of the last forward, keyed by the id of the block; a block that ran twice is left out by the caller."""
        self._runs = runs

    def reconstruct(
        self, block: nn.Module, input_activation: torch.Tensor, adjoint: AdjointState, block_name: str = ""
    ) -> tuple[AdjointState, dict[torch.Tensor, torch.Tensor]]:
        """Returns the adjoint at the block's input (zeros if the block does not depend on it) and {leaf: gradient}.

        Raises PassError if the adjoint does not have the shape of the block's output.
        """
        call, record = self._run_of(block, input_activation, block_name)
        env = Environment(Generators([input_activation.device]), (input_activation.device.type,))
        random = env.generators.read()
        try:
            rebuilt = call.rebuild(record, [input_activation.detach()], env, (max(adjoint.layer_id - 1, 0), "R", 0))
        finally:
            env.generators.write(random)
        output = rebuilt.outputs[0]
        if adjoint.tensor.shape != output.shape:
            raise PassError(
                f"block {block_name!r}: the adjoint has shape {list(adjoint.tensor.shape)}, the block's output {list(output.shape)}"
            )
        gradients: dict[torch.Tensor, torch.Tensor] = {}
        known = {id(t) for t in rebuilt.inputs}
        leaves = [t for t in graph_leaves([output]) if id(t) not in known]
        cotangent = adjoint.tensor.to(device=output.device, dtype=output.dtype)
        roots = [output] if output.requires_grad else []
        found = Collector(gradients).vjp(roots, [cotangent] if roots else [], rebuilt.inputs, leaves, ())
        before = found[0] if found[0] is not None else torch.zeros_like(input_activation)
        result = AdjointState(
            tensor=before.detach(), layer_id=adjoint.layer_id - 1, block=block_name, metadata=dict(adjoint.metadata)
        )
        result.record(f"reconstruct:{block_name}")
        if self.event_bus.wants(EventType.BLOCK_RECONSTRUCTED):
            norm = torch.linalg.vector_norm(before.float()).item()
            self.event_bus.emit(EventType.BLOCK_RECONSTRUCTED, block=block_name, layer_id=adjoint.layer_id, grad_norm=norm)
        return result, gradients

    def _run_of(self, block: nn.Module, x: torch.Tensor, name: str) -> tuple[BlockCall, Record]:
        run = self._runs.get(id(block))
        floating = x.is_floating_point() or x.is_complex()
        if run is not None and run[0].module is block:
            call, record = run
            return call, record.for_input((floating,))
        call = BlockCall(block, name or type(block).__name__, 0, self.compute_dtype)
        env = Environment(Generators([x.device]), (x.device.type,))
        random = env.generators.read()
        undo: list[Record] = []
        try:
            _, _, record, _ = call.forward([x.detach()], _tree.SINGLE, (floating,), env, False, undo)
        finally:
            for one in undo:
                one.restore_buffers()
            env.generators.write(random)
        return call, record
