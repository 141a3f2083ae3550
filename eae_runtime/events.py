"""Events: what the runtime tells whoever subscribes.

Note [Events cost nothing when nobody listens]
    `EventBus.active` says whether anyone listens at all, :meth:`EventBus.wants` whether an event of a type would
    reach anyone. Code on the hot path asks first, and builds a payload (a norm, a shape string) only when the answer
    is yes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Event", "EventBus", "EventType", "tell_rebuilt"]

_ANY = "*"


class EventType:
    """The names of the runtime's events. Users may emit and subscribe to names of their own as well."""

    FORWARD_STARTED = "ForwardStarted"
    FORWARD_FINISHED = "ForwardFinished"
    BLOCK_RECONSTRUCTED = "BlockReconstructed"
    ADJOINT_CREATED = "AdjointCreated"
    ADJOINT_MODIFIED = "AdjointModified"
    MEMORY_ALLOCATED = "MemoryAllocated"
    MEMORY_RELEASED = "MemoryReleased"
    SCHEDULER_STEP = "SchedulerStep"
    KERNEL_LAUNCH = "KernelLaunch"
    COMMUNICATION_START = "CommunicationStart"
    COMMUNICATION_FINISH = "CommunicationFinish"
    TRAIN_STEP_STARTED = "TrainStepStarted"
    TRAIN_STEP_FINISHED = "TrainStepFinished"
    PASS_APPLIED = "PassApplied"


@dataclass
class Event:
    """One event: its type, the payload given to :meth:`EventBus.emit`, and the time of day in seconds
    (`time.time()`)."""

    type: str
    payload: dict[str, Any] = field(default_factory=dict)
    timestamp: float = field(default_factory=time.time)

    def __repr__(self) -> str:
        return f"Event({self.type}, {self.payload})"


Subscriber = Callable[[Event], None]


class EventBus:
    """Synchronous publish and subscribe: a subscriber is called on the emitting thread before :meth:`emit` returns.

    Subscribing and unsubscribing are allowed from any thread and from inside a subscriber; an emission that is under
    way goes to those who were subscribed when it began.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Tuples that are replaced, never changed, so that emit can walk them without the lock.
        self._subscribers: dict[str, tuple[Subscriber, ...]] = {}
        self._events: list[Event] = []
        self._recording = False
        # True while every event has a taker: a "*" subscriber, or a recording.
        self._everything = False
        # Whether anybody listens at all; a plain attribute, because the executor asks several times a block.
        self.active = False

    def wants(self, event_type: str) -> bool:
        """Whether an event of this type would reach a subscriber or the recording."""
        return self._everything or event_type in self._subscribers

    def subscribe(self, event_type: str, callback: Subscriber) -> None:
        """Calls `callback(event)` for every event of the type; "*" stands for all types. A callback that is
        subscribed twice is called twice."""
        if not callable(callback):
            raise TypeError(f"a subscriber must be callable, got {type(callback).__name__}")
        with self._lock:
            self._subscribers[event_type] = (*self._subscribers.get(event_type, ()), callback)
            self._refresh()

    def unsubscribe(self, event_type: str, callback: Subscriber) -> None:
        """Undoes one :meth:`subscribe`; without one it does nothing."""
        with self._lock:
            left = list(self._subscribers.get(event_type, ()))
            if callback not in left:
                return
            left.remove(callback)
            if left:
                self._subscribers[event_type] = tuple(left)
            else:
                del self._subscribers[event_type]
            self._refresh()

    def emit(self, event_type: str, **payload: Any) -> Event:
        """Makes an event, records it if a recording runs, and calls the type's subscribers, then those of "*".

        Every subscriber is called even if one before it raises. The first exception is then raised as it is; further
        ones go to the logger `eae_runtime`. KeyboardInterrupt and SystemExit are not held back.
        """
        event = Event(event_type, payload)
        if self._everything or event_type in self._subscribers:
            self._deliver(event)
        return event

    def start_recording(self) -> None:
        """Starts a new, empty log."""
        with self._lock:
            self._events = []
            self._recording = True
            self._refresh()

    def stop_recording(self) -> list[Event]:
        """Stops recording and returns the log, which stays readable through :attr:`log`."""
        with self._lock:
            self._recording = False
            self._refresh()
        return self._events

    @property
    def log(self) -> list[Event]:
        """A copy of what has been recorded since the last :meth:`start_recording`."""
        return list(self._events)

    def events_of_type(self, event_type: str) -> list[Event]:
        """The recorded events of one type, oldest first."""
        return [event for event in self._events if event.type == event_type]

    def _refresh(self) -> None:
        self._everything = self._recording or _ANY in self._subscribers
        self.active = self._recording or bool(self._subscribers)

    def _deliver(self, event: Event) -> None:
        if self._recording:
            self._events.append(event)
        first: Exception | None = None
        for callback in (*self._subscribers.get(event.type, ()), *self._subscribers.get(_ANY, ())):
            try:
                callback(event)
            except Exception as error:
                if first is None:
                    first = error
                else:
                    logging.getLogger("eae_runtime").error(
                        "a second subscriber of %s failed", event.type, exc_info=error
                    )
        if first is not None:
            raise first


def tell_rebuilt(
    bus: EventBus, name: str, index: int, grads: Sequence[torch.Tensor | None], payload: dict[str, Any]
) -> None:
    """The events of a block's VJP, with the joint norm of the gradients at its input; `payload` goes into
    SchedulerStep."""
    if bus.wants(EventType.BLOCK_RECONSTRUCTED):
        norms = [torch.linalg.vector_norm(grad.float()) for grad in grads if grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(norms)).item() if norms else 0.0
        bus.emit(EventType.BLOCK_RECONSTRUCTED, block=name, layer_id=index + 1, grad_norm=norm)
    if bus.wants(EventType.SCHEDULER_STEP):
        bus.emit(EventType.SCHEDULER_STEP, block_index=index, block_name=name, **payload)
