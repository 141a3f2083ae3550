"""A whole step as one transaction: zero, forward and reverse, loss scale, clip, optimizer step.

Note [One sweep, any driver]
    What runs the model here is a sweep: it goes forward and back once, leaves gradients in `.grad`, and can undo what
    it did to buffers and generators. Around it stands the same transaction for every driver.

Note [Accumulation]
    The calls of one accumulation add into `.grad` as several `loss.backward()` would. A call that fails must leave the
    sums of the calls before it, and the engine adds in place: so from the second call on the sums are copied first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ._graph_sweep import GraphSweep
from ._losses import Scale, split_losses
from ._records import Remembered, RestartStep
from ._sharing import Collector
from ._transaction import Gradients, annotate, deferred_interrupt
from .errors import ConfigError, PlanError, UpdateError
from .events import EventType

if TYPE_CHECKING:
    from .runtime import EAERuntime

__all__ = ["Request", "Training"]

LossFn = Callable[..., Any]


@dataclass
class Request:
    """The arguments of EAERuntime.train_step."""

    x: Any
    loss_fn: LossFn
    targets: Any
    reduction: str
    weigh: Callable[[Any], Any] | None
    accumulate: int


class Training:
    """The steps of one runtime.

    pending: calls whose gradients wait in `.grad` for an optimizer step. accumulate: how many make one.
    states_before: of the passes, before the first of these calls; they come back when the loss scaler skips the step.
    """

    def __init__(self, runtime: EAERuntime) -> None:
        self._runtime = runtime
        self.pending = 0
        self.accumulate = 1
        self.states_before: list[Any] | None = None

    def check(self, accumulate: int) -> None:
        """Raises ConfigError for a number that is none, or another one than that of the accumulation under way, and for
        a loss scaler without an optimizer; PlanError for either with blocks on several ranks."""
        if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
            raise ConfigError(f"accumulate={accumulate!r}: allowed is a whole number from 1")
        if self.pending and accumulate != self.accumulate:
            raise ConfigError(
                f"accumulate={accumulate} in the middle of an accumulation over {self.accumulate} calls, of which "
                f"{self.pending} are done; finish it, or start anew with zero_grad()"
            )
        scaler = self._runtime.config.loss_scaler
        if scaler is not None and self._runtime.optimizer is None:
            raise ConfigError("loss_scaler needs an optimizer: it decides whether the optimizer steps")
        if self._runtime._ranks is not None and (accumulate > 1 or scaler is not None):
            raise PlanError(
                "with blocks on several ranks a step is whole: accumulate=1 and no loss_scaler; cut the batch into "
                "more num_microbatches instead"
            )

    def scale(self, accumulate: int) -> Scale | None:
        """What this call's loss is multiplied by; None for 1."""
        scaler = self._runtime.config.loss_scaler
        if accumulate == 1 and scaler is None:
            return None
        return Scale(scaler, accumulate)

    def _states(self) -> list[Any] | None:
        """The state of the passes now, kept also for the case that the optimizer's step will be skipped."""
        pipeline = self._runtime.pipeline
        states = pipeline.state() if pipeline.stateful else None
        if not self.pending:
            self.states_before = states
        return states

    def _begin(self, parameters: list[nn.Parameter]) -> Gradients:
        """Remembers the gradients, and clears them if this call is the first one of its optimizer step."""
        if not self.pending:
            before = Gradients(parameters)
            before.clear_owned()
            return before
        before = Gradients(())
        before.add_borrowed(parameters)
        return before

    def step(self, request: Request) -> float:
        """One call of train_step, once. Raises RestartStep after undoing it when it has to be run again."""
        runtime = self._runtime
        events, profiler = runtime.event_bus, runtime.profiler
        runtime._last_grads = []
        tensors = runtime._check_input(request.x)
        parts = runtime._parts(tensors)
        rows = tensors[0].shape[0] if parts > 1 else 0
        loss = split_losses(request.loss_fn, request.targets, parts, rows, request.reduction, request.weigh)
        loss.scale = self.scale(request.accumulate)
        sweep = runtime._training_sweep(request.x, parts, tensors, request.targets is not None)
        parameters = runtime._trained()
        states = self._states()
        before = self._begin(parameters)
        try:
            if events.active and events.wants(EventType.TRAIN_STEP_STARTED):
                events.emit(EventType.TRAIN_STEP_STARTED)
            sweep.set_loss(loss, Collector(None))
            sweep.before_vjp = before.add_borrowed
            with torch.enable_grad():
                if events.active and events.wants(EventType.FORWARD_STARTED):
                    events.emit(EventType.FORWARD_STARTED, num_blocks=len(runtime.blocks))
                with profiler.track("forward"):
                    sweep.go_forward()
                if events.active and events.wants(EventType.FORWARD_FINISHED):
                    events.emit(EventType.FORWARD_FINISHED, num_boundaries=len(runtime.boundary_store))
                with profiler.track("reverse_pass"):
                    sweep.go_back()
            sweep.finish()
            total = sweep.total_loss()
            if self._is_last(request.accumulate) and runtime.config.loss_scaler is None:
                self._clip(parameters)
        except BaseException as error:
            if not isinstance(error, (RestartStep, Remembered)):
                runtime._explain(error, sweep.where)
            sweep.undo()
            before.restore()
            runtime._restore_passes(states)
            if isinstance(sweep, GraphSweep) and sweep.lost:
                annotate(error, f"not put back: {', '.join(sorted(sweep.lost))}, large and written for the first time")
            raise
        sweep.release()
        return self.commit(total, parameters, request.accumulate)

    def _is_last(self, accumulate: int) -> bool:
        return self.pending + 1 >= accumulate

    def _clip(self, parameters: list[nn.Parameter]) -> None:
        limit = self._runtime.config.grad_clip_norm
        if limit is not None:
            nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], limit)

    def commit(self, loss: torch.Tensor, parameters: list[nn.Parameter], accumulate: int = 1) -> float:
        """The optimizer's step, if this call completes one. From here on the call counts as done."""
        runtime = self._runtime
        with deferred_interrupt():
            runtime._stats = {}
            runtime._last_grads = [p.grad for p in parameters if p.grad is not None]
            self.accumulate = accumulate
            last = self._is_last(accumulate)
            self.pending = 0 if last else self.pending + 1
            if last and runtime.optimizer is not None:
                self._update(runtime.optimizer, parameters)
                runtime.optimizer.zero_grad(set_to_none=True)
            runtime.steps += 1
            runtime.last_loss = loss.item()
        events = runtime.event_bus
        if events.active and events.wants(EventType.TRAIN_STEP_FINISHED):
            events.emit(EventType.TRAIN_STEP_FINISHED, loss=runtime.last_loss, **runtime.last_grad_stats)
        return runtime.last_loss

    def _update(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        scaler = self._runtime.config.loss_scaler
        try:
            if scaler is None:
                optimizer.step()
                return
            scaler.unscale_(optimizer)
            self._clip(parameters)
            stepped: list[None] = []
            handle = optimizer.register_step_post_hook(lambda *_: stepped.append(None))
            try:
                scaler.step(optimizer)
            finally:
                handle.remove()
            scaler.update()
        except Exception as error:
            raise UpdateError(
                f"{type(optimizer).__name__}.step() failed: {error}. Parameters and optimizer may be half updated; "
                "load a checkpoint"
            ) from error
        if not stepped:
            self._runtime._restore_passes(self.states_before)

    def custom_step(self, request: Request) -> float:
        """A step for a scheduler written in Python: forward, backward, apply."""
        runtime = self._runtime
        parameters = runtime._trained()
        states = self._states()

        def loss_fn(output: Any) -> Any:
            return request.loss_fn(output) if request.targets is None else request.loss_fn(output, request.targets)

        before = self._begin(parameters)
        try:
            if runtime.event_bus.wants(EventType.TRAIN_STEP_STARTED):
                runtime.event_bus.emit(EventType.TRAIN_STEP_STARTED)
            loss, gradients = runtime._split.both(request.x, loss_fn, self.scale(request.accumulate), clip=False)
            runtime.apply_gradients(gradients)
            if self._is_last(request.accumulate) and runtime.config.loss_scaler is None:
                self._clip(parameters)
        except BaseException:
            before.restore()
            runtime._restore_passes(states)
            raise
        return self.commit(loss, parameters, request.accumulate)
