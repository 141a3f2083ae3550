"""Events as JSON lines on the logger `eae_runtime`."""

from __future__ import annotations

import json
import logging

from .config import parse_level
from .events import Event, EventBus

__all__ = ["attach_structured_logging", "get_logger"]

_NAME = "eae_runtime"


def get_logger(level: str = "WARNING") -> logging.Logger:
    """The logger `eae_runtime`, let through from `level` on.

    It gets a handler (standard error) only where neither it nor a parent has one. A level that another runtime has
    lowered is not raised again.
    """
    logger = logging.getLogger(_NAME)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
    number = parse_level(level)
    if logger.level == logging.NOTSET or number < logger.level:
        logger.setLevel(number)
    return logger


def attach_structured_logging(
    event_bus: EventBus, level: str = "WARNING", logger: logging.Logger | None = None
) -> None:
    """Writes every event of the bus as one JSON object (event, timestamp, and the payload's fields) at level DEBUG.

    With a higher level nothing is subscribed, so that `event_bus.wants` stays False. A value that JSON does not know
    is written as its `str`.
    """
    target = logger or get_logger(level)
    if parse_level(level) > logging.DEBUG:
        return

    def write(event: Event) -> None:
        if target.isEnabledFor(logging.DEBUG):
            line = {"event": event.type, "timestamp": event.timestamp, **event.payload}
            target.debug("%s", json.dumps(line, default=str))

    event_bus.subscribe("*", write)
