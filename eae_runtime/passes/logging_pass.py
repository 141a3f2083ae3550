"""LoggingPass."""

from __future__ import annotations

from typing import Any, ClassVar

from ..adjoint import AdjointState
from ..events import EventBus, EventType
from .base import Context
from .core_pass import CorePass

__all__ = ["LoggingPass"]


class LoggingPass(CorePass):
    """Emits AdjointModified with layer_id, block, pass_name and the statistics of the adjoint, which it leaves as it
    is.

    Events go to `event_bus`; without one, to the pass's own bus and to that of the runtime that runs it. While nobody
    listens, nothing is measured.
    """

    name = "LoggingPass"
    core_name: ClassVar[str] = "logging"

    def __init__(self, event_bus: EventBus | None = None) -> None:
        self._shares = event_bus is None
        self.event_bus = event_bus or EventBus()

    def idle(self, context: Context) -> bool:
        return not self._listening(context)

    def note(self, adjoint: AdjointState, values: dict[str, Any], context: Context) -> None:
        for bus in self._listening(context):
            bus.emit(
                EventType.ADJOINT_MODIFIED,
                layer_id=adjoint.layer_id,
                block=adjoint.block,
                pass_name=self.name,
                **values,
            )

    def _listening(self, context: Context) -> list[EventBus]:
        buses = [self.event_bus]
        runtime = context.get("event_bus")
        if self._shares and runtime is not None and runtime is not self.event_bus:
            buses.append(runtime)
        return [bus for bus in buses if bus.wants(EventType.ADJOINT_MODIFIED)]
