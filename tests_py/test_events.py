"""Events: who is told what, in which order, and what it costs when nobody listens."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from eae_runtime.errors import ConfigError
from eae_runtime.events import Event, EventBus, EventType
from eae_runtime.logging_utils import attach_structured_logging, get_logger


def test_subscribers_of_the_type_come_before_those_of_every_type() -> None:
    bus, calls = EventBus(), []
    bus.subscribe("*", lambda event: calls.append(("any", event.type)))
    bus.subscribe("A", lambda event: calls.append(("A", event.payload["x"])))
    event = bus.emit("A", x=1)
    bus.emit("B")
    assert calls == [("A", 1), ("any", "A"), ("any", "B")]
    assert (event.type, event.payload) == ("A", {"x": 1}) and event.timestamp > 0


def test_wants_is_true_exactly_while_an_event_would_reach_someone() -> None:
    bus = EventBus()

    def listen(event: Event) -> None:
        pass

    assert not bus.wants("A")
    bus.subscribe("A", listen)
    assert bus.wants("A") and not bus.wants("B")
    bus.subscribe("*", listen)
    assert bus.wants("B")
    bus.unsubscribe("*", listen)
    bus.unsubscribe("A", listen)
    bus.unsubscribe("A", listen)
    assert not bus.wants("A")
    bus.start_recording()
    assert bus.wants("A")
    bus.stop_recording()
    assert not bus.wants("A")


def test_recording_keeps_events_in_order_until_the_next_recording() -> None:
    bus = EventBus()
    bus.emit("before")
    bus.start_recording()
    bus.emit("A", n=1)
    bus.emit("B")
    bus.emit("A", n=2)
    log = bus.stop_recording()
    bus.emit("after")
    assert [event.type for event in log] == ["A", "B", "A"]
    assert [event.payload["n"] for event in bus.events_of_type("A")] == [1, 2]
    assert bus.log == log and bus.log is not log
    bus.start_recording()
    assert bus.log == []


def test_a_failing_subscriber_keeps_no_other_from_its_event(caplog: pytest.LogCaptureFixture) -> None:
    bus, seen = EventBus(), []

    def fail(text: str) -> None:
        raise KeyError(text)

    bus.subscribe("A", lambda event: fail("first"))
    bus.subscribe("A", seen.append)
    bus.subscribe("*", lambda event: fail("second"))
    bus.subscribe("*", seen.append)
    with pytest.raises(KeyError, match="first"), caplog.at_level(logging.ERROR, "eae_runtime"):
        bus.emit("A")
    assert len(seen) == 2
    assert "second" in caplog.text


def test_ctrl_c_in_a_subscriber_is_not_held_back() -> None:
    bus, seen = EventBus(), []

    def interrupt(event: Event) -> None:
        raise KeyboardInterrupt

    bus.subscribe("A", interrupt)
    bus.subscribe("A", seen.append)
    with pytest.raises(KeyboardInterrupt):
        bus.emit("A")
    assert seen == []


def test_a_subscriber_may_unsubscribe_itself() -> None:
    bus, seen = EventBus(), []

    def once(event: Event) -> None:
        seen.append(event)
        bus.unsubscribe("A", once)

    bus.subscribe("A", once)
    bus.emit("A")
    bus.emit("A")
    assert len(seen) == 1


def test_only_callables_subscribe() -> None:
    with pytest.raises(TypeError, match="callable"):
        EventBus().subscribe("A", 3)  # type: ignore[arg-type]


def test_event_types_are_distinct_words() -> None:
    names = [value for key, value in vars(EventType).items() if key.isupper()]
    assert len(names) == len(set(names)) == 14


@pytest.fixture
def fresh_logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("eae_runtime")
    level, handlers = logger.level, list(logger.handlers)
    logger.setLevel(logging.NOTSET)
    yield logger
    logger.setLevel(level)
    logger.handlers[:] = handlers


def test_debug_writes_each_event_as_one_json_line(fresh_logger: logging.Logger) -> None:
    stream, bus = io.StringIO(), EventBus()
    handler = logging.StreamHandler(stream)
    fresh_logger.addHandler(handler)
    attach_structured_logging(bus, "debug")
    event = bus.emit("A", shape=(1, 2), what=EventBus, text="two\nlines")
    [line] = stream.getvalue().splitlines()
    assert json.loads(line) == {
        "event": "A",
        "timestamp": event.timestamp,
        "shape": [1, 2],
        "what": str(EventBus),
        "text": "two\nlines",
    }


@pytest.mark.parametrize("level", ["INFO", "WARNING", "error", "", None])
def test_a_higher_level_leaves_the_bus_without_listeners(level: str, fresh_logger: logging.Logger) -> None:
    bus = EventBus()
    attach_structured_logging(bus, level)
    assert not bus.wants("A")


def test_a_second_runtime_does_not_silence_the_first(fresh_logger: logging.Logger) -> None:
    get_logger("DEBUG")
    assert get_logger("WARNING").level == logging.DEBUG


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"LOUD.*DEBUG"):
        attach_structured_logging(EventBus(), "LOUD")
