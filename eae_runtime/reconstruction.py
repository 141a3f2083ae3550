"""ReconstructionEngine: one block rebuilt and differentiated, as a call of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from . import _tree
from ._ambient import Generators
from ._bits import same_random
from ._leaves import graph_leaves
from ._records import Environment, Record, RestartStep
from ._sharing import Collector
from .adjoint import AdjointState
from .blockcall import BlockCall
from .errors import PassError, RebuildMismatchError
from .events import EventBus, EventType

__all__ = ["ReconstructionEngine"]

# A run of a block, with the shape of what it was given.
Run = tuple[BlockCall, Record, torch.Size]


class ReconstructionEngine:
    """Rebuilds a block from its boundary and takes the local VJP (paper, eq. 3-5).

    A block that has run in the runtime's last forward is rebuilt under the state it ran in: generators, autocast,
    training flags, buffers. Any other block is run as it is now, and its buffers are put back; so is one that is
    rebuilt from a part of its input, unless it draws random numbers or writes buffers: what it did to the whole input
    cannot be repeated on a part (RebuildMismatchError).
    """

    def __init__(self, event_bus: EventBus | None = None, compute_dtype: torch.dtype | None = None) -> None:
        self.event_bus = event_bus or EventBus()
        self.compute_dtype = compute_dtype
        # By the id of the module, its runs by their number in the chain.
        self._runs: dict[int, dict[int, Run]] = {}

    def remember(self, runs: Sequence[Run]) -> None:
        """Takes the runs of the last forward: each with the shape of its input. Of a module that stands in the chain
        twice, the adjoint's `layer_id` tells which run is meant."""
        self._runs = {}
        for run in runs:
            self._runs.setdefault(id(run[0].module), {})[run[0].index] = run

    def reconstruct(
        self, block: nn.Module, input_activation: torch.Tensor, adjoint: AdjointState, block_name: str = ""
    ) -> tuple[AdjointState, dict[torch.Tensor, torch.Tensor]]:
        """Returns the adjoint at the block's input (zeros if the block does not depend on it) and {leaf: gradient}.

        Raises PassError if the adjoint does not have the shape of the block's output.
        """
        call, record = self._run_of(block, input_activation, block_name, adjoint.layer_id - 1)
        env = Environment(Generators([input_activation.device]), (input_activation.device.type,))
        random = env.generators.read()
        try:
            rebuilt = call.rebuild(record, [input_activation.detach()], env, (max(adjoint.layer_id - 1, 0), "R", 0))
        finally:
            env.generators.write(random)
        output = rebuilt.outputs[0]
        if adjoint.tensor.shape != output.shape:
            raise PassError(
                f"block {block_name!r}: the adjoint has shape {list(adjoint.tensor.shape)}, the block's output "
                f"{list(output.shape)}"
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
            self.event_bus.emit(
                EventType.BLOCK_RECONSTRUCTED, block=block_name, layer_id=adjoint.layer_id, grad_norm=norm
            )
        return result, gradients

    def _run_of(self, block: nn.Module, x: torch.Tensor, name: str, index: int) -> tuple[BlockCall, Record]:
        runs = self._runs.get(id(block), {})
        run = next(iter(runs.values())) if len(runs) == 1 else runs.get(index)
        floating = x.is_floating_point() or x.is_complex()
        part = False
        if run is not None and run[0].module is block:
            call, record, shape = run
            if x.shape == shape:
                # Where nothing needed a gradient, nothing does now.
                return call, record.for_input((floating,)) if record.facts.differentiable else record
            part = True
        call = BlockCall(block, name or type(block).__name__, max(index, 0), self.compute_dtype)
        return call, self._fresh_run(call, x, floating, part)

    @staticmethod
    def _fresh_run(call: BlockCall, x: torch.Tensor, floating: bool, part: bool) -> Record:
        env = Environment(Generators([x.device]), (x.device.type,))
        random = env.generators.read()
        while True:
            undo: list[Record] = []
            try:
                _, _, record, _ = call.forward([x.detach()], _tree.SINGLE, (floating,), env, False, undo)
                if part and (record.state or not same_random(random, env.generators.read())):
                    raise RebuildMismatchError(
                        f"{call.where()} was run on the whole batch and shall be rebuilt from a "
                        "part of it, but it draws "
                        "random numbers "
                        "or writes buffers; rebuild it from the whole boundary, or use the "
                        "pipeline scheduler, which runs "
                        "the forward in "
                        "parts too"
                    )
                return record
            except RestartStep:
                continue
            finally:
                for one in undo:
                    one.undo()
                env.generators.write(random)
