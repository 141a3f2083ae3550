"""forward() and backward() as two calls: what waits between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from . import _tree
from ._graph_sweep import GraphSweep
from ._losses import Loss, Scale, check_loss
from ._program import ALL
from ._records import Remembered, RestartStep
from ._sharing import Collector
from ._structure import Structure
from ._transaction import clipped
from .adjoint import AdjointState
from .errors import EAEError, LossError, PlanError, RebuildMismatchError
from .events import EventType
from .executor import Sweep
from .schedulers import ReverseContext

if TYPE_CHECKING:
    from .runtime import EAERuntime

__all__ = ["AnySweep", "Split"]

LossFn = Callable[..., Any]
Gradients = dict[torch.Tensor, torch.Tensor]
AnySweep = Sweep | GraphSweep


class Split:
    """The sweep of a runtime that has gone forward and waits for its loss. See the runtime's methods of the same
    names."""

    def __init__(self, runtime: EAERuntime) -> None:
        self._runtime = runtime
        self._sweep: AnySweep | None = None
        # Of the parameters, at the forward.
        self._versions: list[tuple[torch.Tensor, int]] = []
        # Of the chain, at the forward.
        self._structure: Structure | None = None

    def forward(self, x: Any) -> Any:
        if self._runtime._ranks is not None:
            raise PlanError(
                "with blocks on several ranks a step runs as a whole: call train_step() instead of forward(), "
                "backward() or compute_gradients()"
            )
        tensors = self._runtime._check_input(x)
        parts = self._runtime._parts(tensors)
        events = self._runtime.event_bus
        self._runtime._last_grads = []
        for _ in self._runtime._attempts():
            if events.wants(EventType.FORWARD_STARTED):
                events.emit(EventType.FORWARD_STARTED, num_blocks=len(self._runtime.blocks))
            sweep: AnySweep
            if self._runtime._whole is not None:
                sweep = self._runtime._new_graph_sweep(x, parts, tensors)
            else:
                input_grad = any(t.requires_grad for t in tensors)
                program = self._runtime._program(parts, split=True, targets=False, input_grad=input_grad)
                sweep = self._runtime._new_sweep(x, parts, tensors, program, keep_output=True)
            try:
                with self._runtime.profiler.track("forward"), torch.enable_grad():
                    sweep.go_forward()
            except RestartStep:
                sweep.undo()
                continue
            except BaseException as error:
                self._runtime._explain(error, sweep.where)
                sweep.undo()
                raise
            self._sweep = sweep
            self._versions = [(p, p._version) for p in self._runtime._trained()]
            self._structure = None if isinstance(sweep, GraphSweep) else self._runtime._chain.structure
            if events.wants(EventType.FORWARD_FINISHED):
                events.emit(EventType.FORWARD_FINISHED, num_boundaries=len(self._runtime.boundary_store))
            return sweep.whole_output()
        raise AssertionError("unreachable")

    def backward(
        self, output: Any, loss_fn: LossFn, scale: Scale | None = None, *, clip: bool = True
    ) -> tuple[torch.Tensor, Gradients]:
        """scale: what the loss is multiplied by for the gradients; the loss returned is without it. clip: whether
        `grad_clip_norm` applies here."""
        check_loss(loss_fn)
        sweep = self._sweep
        if sweep is None:
            raise EAEError("backward() needs a forward() before it; each forward() serves one backward()")
        if self._structure is not None and not self._structure.same_parts():
            raise RebuildMismatchError(
                "submodules or parameters were replaced between forward() and backward(); run forward() again"
            )
        for parameter, version in self._versions:
            if parameter._version != version:
                raise RebuildMismatchError(
                    f"parameter {self._runtime._name_of(parameter)} was changed between forward() and backward(); run "
                    "forward() again"
                )
        gradients: dict[torch.Tensor, torch.Tensor] = {}
        states = self._runtime.pipeline.state() if self._runtime.pipeline.stateful else None
        try:
            with self._runtime.profiler.track("reverse_pass"), torch.enable_grad():
                sweep.set_loss(Loss(loss_fn, scale=scale), Collector(gradients))
                if isinstance(sweep, GraphSweep):
                    loss = sweep.gradients_into(output, gradients)
                    sweep.finish()
                else:
                    sweep.out_values[ALL if sweep.parts > 1 else 0] = _tree.flatten(output)[0]
                    loss = self._chain_reverse(sweep, gradients)
        except RestartStep as restart:
            # The forward will be run again and must then be the first.
            sweep.undo()
            self.drop()
            self._runtime._restore_passes(states)
            raise Remembered(f"{restart}; it is remembered now: run forward() and backward() again") from None
        except BaseException as error:
            self._runtime._explain(error, sweep.where)
            sweep.finish()
            self._runtime._restore_passes(states)
            if not isinstance(error, LossError):
                self.drop()
            raise
        self._sweep = None
        self._versions = []
        sweep.release()
        if clip and self._runtime.config.grad_clip_norm is not None:
            gradients = clipped(gradients, self._runtime.config.grad_clip_norm)
        return loss, gradients

    def _chain_reverse(self, sweep: Sweep, gradients: Gradients) -> torch.Tensor:
        if self._runtime._custom():
            return self._custom_reverse(sweep, gradients)
        sweep.go_back()
        sweep.finish()
        return sweep.total_loss()

    def _custom_reverse(self, sweep: Sweep, gradients: Gradients) -> torch.Tensor:
        """The reverse pass of a scheduler written in Python."""
        length = len(self._runtime.blocks)
        loss, adjoint = sweep.loss_alone(length)
        state = AdjointState(tensor=adjoint, layer_id=length, block="output")
        pipeline = self._runtime.pipeline
        known = sweep.pass_context(0)
        with pipeline.within(known):
            state = pipeline.run(state, {"block_index": length, "block_name": "output"})
        self._runtime.reconstruction_engine.remember(sweep.runs())
        context = ReverseContext(
            blocks=self._runtime.blocks,
            block_names=self._runtime.block_names,
            boundary_store=self._runtime.boundary_store,
            reconstruction_engine=self._runtime.reconstruction_engine,
            pipeline=self._runtime.pipeline,
            memory_manager=self._runtime.memory_manager,
            event_bus=self._runtime.event_bus,
            profiler=self._runtime.profiler,
            initial_adjoint=state,
        )
        try:
            with pipeline.within(known):
                found = self._runtime.scheduler.run(context)
        finally:
            self._runtime.reconstruction_engine.remember([])
        if not isinstance(found, dict):
            raise EAEError(
                f"{type(self._runtime.scheduler).__name__}.run returned {type(found).__name__}; it has to return "
                f"{{parameter: gradient}}"
            )
        for leaf, grad in found.items():
            gradients[leaf] = grad if leaf not in gradients else gradients[leaf] + grad
        return loss

    def both(
        self, x: Any, loss_fn: LossFn, scale: Scale | None = None, *, clip: bool = True
    ) -> tuple[torch.Tensor, Gradients]:
        """Both, or neither: when the backward fails, the forward is undone."""
        output = self.forward(x)
        sweep = self._sweep
        assert sweep is not None
        try:
            return self.backward(output, loss_fn, scale, clip=clip)
        except BaseException:
            sweep.undo()
            self.drop()
            raise

    def drop(self) -> None:
        if self._sweep is not None:
            self._sweep.release()
            self._sweep = None
            self._versions = []
