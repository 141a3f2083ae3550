"""AdjointPipeline: the passes that an adjoint goes through between two blocks, in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

from .adjoint import AdjointState
from .errors import EAEError, PassError
from .events import EventBus, EventType
from .passes.base import Context, EAEPass
from .passes.core_chain import CoreChain
from .passes.core_pass import CorePass, apply_core
from .profiler import Profiler

__all__ = ["AdjointPipeline", "PassManager"]

AnyPass = EAEPass | Callable[..., AdjointState]


class AdjointPipeline:
    """Applies `passes` one after another. The list may be changed between runs.

    Each pass's name goes into the adjoint's history; its time into the profiler as `pass:NAME`; an event PassApplied
    (pass_name, layer_id, elapsed_seconds) tells of it. Consecutive passes of the Go core are one call that takes the
    data through all of them block by block, so there is no time of each: the call's time is shared out equally, and
    their events follow together.
    """

    def __init__(
        self,
        passes: Iterable[AnyPass] | None = None,
        event_bus: EventBus | None = None,
        profiler: Profiler | None = None,
    ) -> None:
        self.passes: list[AnyPass] = list(passes) if passes else []
        self.event_bus = event_bus or EventBus()
        self.profiler = profiler
        # The core's trace that records the runs of core passes made from now on; 0 is none.
        self.trace = 0
        # The core's pool that their results lie in; 0 is one for each run.
        self.pool = 0
        # What every context holds beside what the caller of `run` says; see `within`.
        self._given: Context = {}
        # The chain made for the run of core passes that starts at this place.
        self._chains: dict[int, CoreChain] = {}

    def add_pass(self, p: AnyPass) -> None:
        """Appends a pass."""
        self.passes.append(p)

    def run(self, adjoint: AdjointState, context: Context | None = None) -> AdjointState:
        """The adjoint behind the last pass. The given one stays as it is.

        Raises PassError, with the pass and the boundary, when a pass fails; the pass's own exception is its cause.
        """
        return self.run_all([adjoint], context)[0]

    def run_all(self, adjoints: list[AdjointState], context: Context | None = None) -> list[AdjointState]:
        """The same for a boundary of several tensors, in flatten order. A core pass sees them together (its norm is
        joint), a Python pass one by one, with `tensor_index` in its context."""
        if not self.passes or not adjoints:
            return adjoints
        shared: Context = {"event_bus": self.event_bus, **self._given, **(context or {})}
        start = 0
        while start < len(self.passes):
            run = self._core_run(start)
            if run:
                adjoints = self._run_core(start, run, adjoints, shared)
                start += len(run)
            else:
                adjoints = self._run_python(self.passes[start], adjoints, shared)
                start += 1
        return adjoints

    @contextmanager
    def within(self, context: Context) -> Iterator[None]:
        """A region in which `context` is part of every context: what a driver knows that those who call `run` in it do
        not (the loss scale, the microbatch)."""
        before, self._given = self._given, context
        try:
            yield
        finally:
            self._given = before

    def __call__(self, adjoint: AdjointState, context: Context | None = None) -> AdjointState:
        return self.run(adjoint, context)

    def __len__(self) -> int:
        return len(self.passes)

    def close(self) -> None:
        """Frees what the core holds for the passes. Their state stays with them, and the pipeline can be used again."""
        for item in self.passes:
            if isinstance(item, CorePass):
                item.leave()
        for chain in self._chains.values():
            chain.close()
        self._chains.clear()

    @property
    def stateful(self) -> bool:
        """Whether any pass carries something from step to step."""
        return any(getattr(item, "stateful", False) for item in self.passes)

    def state(self) -> list[Any]:
        """The state of each pass, None for those that carry none."""
        return [item.state() if isinstance(item, EAEPass) and item.stateful else None for item in self.passes]

    def load_state(self, states: list[Any]) -> None:
        """Continues from a value of :meth:`state` of a pipeline with the same passes."""
        if len(states) != len(self.passes):
            raise PassError(f"a state for {len(states)} passes was given to a pipeline of {len(self.passes)}")
        for item, state in zip(self.passes, states, strict=True):
            if isinstance(item, EAEPass) and (item.stateful or state is not None):
                item.load_state(state)

    def _core_run(self, start: int) -> tuple[CorePass, ...]:
        """The core passes from `start` on that can share a call. One with a state stands in it once."""
        run: list[CorePass] = []
        for item in self.passes[start:]:
            if not _is_core(item) or (item.stateful and item in run):
                break
            run.append(item)
        return tuple(run)

    def _run_core(
        self, start: int, passes: tuple[CorePass, ...], adjoints: list[AdjointState], context: Context
    ) -> list[AdjointState]:
        busy = [not item.idle(context) for item in passes]
        began = time.perf_counter()
        if any(busy):
            # Idle passes stay in the chain: a noise pass draws by its place there.
            chain = self._chains.get(start)
            if chain is None or chain.key != CoreChain.key_of(passes):
                chain = self._chains[start] = CoreChain(passes, self.pool)
                if self.trace:
                    chain.trace_into(self.trace)
            adjoints = apply_core(chain, passes, adjoints, context)
        else:
            adjoints = [adjoint.clone() for adjoint in adjoints]
        share = (time.perf_counter() - began) / max(1, sum(busy))
        for item, worked in zip(passes, busy, strict=True):
            for adjoint in adjoints:
                adjoint.record(item.name)
            self._tell(item.name, adjoints[0].layer_id, share if worked else 0.0)
        return adjoints

    def _run_python(self, item: AnyPass, adjoints: list[AdjointState], context: Context) -> list[AdjointState]:
        name = str(getattr(item, "name", None) or getattr(item, "__name__", type(item).__name__))
        start = time.perf_counter()
        made = []
        for index, adjoint in enumerate(adjoints):
            if len(adjoints) > 1:
                context["tensor_index"] = index
            made.append(_guarded(item, name, adjoint, context))
        context.pop("tensor_index", None)
        self._tell(name, made[0].layer_id, time.perf_counter() - start)
        return made

    def _tell(self, name: str, layer_id: int, seconds: float) -> None:
        if self.profiler is not None:
            self.profiler.record("pass:" + name, seconds)
        if self.event_bus.wants(EventType.PASS_APPLIED):
            self.event_bus.emit(EventType.PASS_APPLIED, pass_name=name, layer_id=layer_id, elapsed_seconds=seconds)


def _is_core(item: AnyPass) -> TypeGuard[CorePass]:
    """Whether the core may run the pass without asking Python: one that overrides `process` wants to be asked."""
    if not isinstance(item, CorePass):
        return False
    return type(item).process is CorePass.process and type(item).__call__ is EAEPass.__call__


def _guarded(item: AnyPass, name: str, adjoint: AdjointState, context: Context) -> AdjointState:
    where = f"pass {name} at boundary {adjoint.layer_id} ({adjoint.block or 'unnamed'})"
    try:
        made = item(adjoint, context)
    except EAEError:
        raise
    except Exception as error:
        raise PassError(f"{where} raised {type(error).__name__}: {error}") from error
    if not isinstance(made, AdjointState):
        raise PassError(f"{where} returned {type(made).__name__}, not an AdjointState")
    return made


PassManager = AdjointPipeline
