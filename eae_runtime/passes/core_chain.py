"""A run of consecutive passes of the Go core behind one handle: one crossing for all of them."""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .. import _bridge
from ..errors import PassError

if TYPE_CHECKING:
    from .core_pass import CorePass

__all__ = ["CoreChain", "Report", "core_context"]

# `name` of the pass, and what it has to say by key: numbers, booleans and strings; lists of them for several tensors.
Report = dict[str, Any]


def core_context(context: dict[str, Any], boundary: int, *, report: bool, stats: bool) -> str:
    """The part of a pass's context that the core reads. An unknown step is -1, unknown rows and weight are 0.

    report  whether the reply shall tell what each pass reports
    stats   whether the logging pass shall measure
    """
    get = context.get
    fields = {
        "step": get("step", -1),
        "block": boundary,
        "microbatch": get("microbatch", 0),
        "loss_scale": get("loss_scale", 1.0),
        "rows": get("rows", 0),
        "weight": get("weight", 0.0),
        "report": report,
        "stats": stats,
    }
    return json.dumps(fields)


def _close(handle: int) -> None:
    if not _bridge.in_child:
        _bridge.call("ChainClose", handle)


class CoreChain:
    """Go passes in a row. Their state (noise counters and the like) lives in the core.

    Note [A pass has one state]
        A stateful pass may be used alone and in pipelines by turns. Its state moves to the chain that uses it: `home`
        of a pass is the chain that holds its state now, `slot` its place there.
    """

    def __init__(self, passes: Sequence[CorePass], pool: int = 0) -> None:
        """pool: handle of the core's pool that results lie in; 0 is one of the chain's own."""
        self.key = self.key_of(passes)
        spec = [{"name": item.core_name, "params": item.params()} for item in passes]
        self._handle: int = _bridge.call("ChainNew", json.dumps(spec), pool)
        # Not at exit: the process's memory goes with it.
        self._finalizer = weakref.finalize(self, _close, self._handle)
        self._finalizer.atexit = False

    def trace_into(self, trace: int) -> None:
        """Has the core's trace of that handle record every run; 0 ends it."""
        _bridge.call("ChainTrace", self._handle, trace)

    def close(self) -> None:
        """Frees the core's side. A second call does nothing."""
        self._finalizer()

    @staticmethod
    def key_of(passes: Sequence[CorePass]) -> tuple[Any, ...]:
        """Equal exactly when a chain made for one serves the other."""
        return tuple((id(item), *item.params().values()) for item in passes)

    def settle(self, passes: Sequence[CorePass]) -> None:
        """Makes this chain the home of its stateful passes."""
        moved = [(slot, item) for slot, item in enumerate(passes) if item.stateful and item.home is not self]
        if not moved:
            return
        states = self.state()
        for slot, item in moved:
            saved = item.state()
            if saved is not None:
                states[slot] = saved
        self.set_state(states)
        for slot, item in moved:
            item.home, item.slot = self, slot

    def apply(self, tensors: Sequence[torch.Tensor], context: str) -> tuple[list[torch.Tensor], list[Report]]:
        """The transformed tensors, in memory of their own, and each pass's report if the context asks for it. The
        given tensors are only read.

        Raises PassError, with pass and boundary, for NaN or Inf where a pass cannot carry them.
        """
        addresses: list[int] = []
        try:
            for tensor in tensors:
                addresses.append(_bridge.export(tensor.detach()))
        except BaseException:
            for address in addresses:
                _bridge.adopt(address)
            raise
        try:
            reply = _bridge.core.api_ChainApply(self._handle, ",".join(map(str, addresses)), context)
        except RuntimeError as error:
            raise _bridge.translate(error) from None
        made, _, reports = reply.partition("\n")
        return [_bridge.adopt(int(address)) for address in made.split(",")], json.loads(reports) if reports else []

    def state(self) -> list[Any]:
        """The state of each pass, None for those without."""
        states: list[Any] = json.loads(_bridge.call("ChainState", self._handle))
        return states

    def set_state(self, states: list[Any]) -> None:
        """Continues from a value of :meth:`state`."""
        if len(states) != len(self.key):
            raise PassError(f"a state for {len(states)} passes was given to a chain of {len(self.key)}")
        _bridge.call("ChainSetState", self._handle, json.dumps(states))
