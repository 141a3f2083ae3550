"""What a step tells: events with their payloads, profiler names, log lines, torch.profiler ranges, the trace file."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import eae_runtime.events
from eae_runtime import EAERuntime, Event, EventType, RuntimeConfig
from eae_runtime.passes import ClipPass, Int8QuantizationPass, LoggingPass
from models import chain
from oracle import nothing_left

pytestmark = pytest.mark.filterwarnings("error")

X = torch.ones(4, 3)


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return chain(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


NAMES = ["Linear_0", "Tanh_1", "Linear_2"]

# What API.md lists, the statistics of LoggingPass aside.
PAYLOADS = {
    "TrainStepStarted": set(),
    "ForwardStarted": {"num_blocks"},
    "ForwardFinished": {"num_boundaries"},
    "AdjointCreated": {"layer_id", "block"},
    "PassApplied": {"pass_name", "layer_id", "elapsed_seconds"},
    "AdjointModified": {
        *("layer_id", "block", "pass_name"),
        *("mean", "std", "min", "max", "norm", "numel", "has_nan", "has_inf"),
    },
    "BlockReconstructed": {"block", "layer_id", "grad_norm"},
    "SchedulerStep": {"block_index", "block_name"},
    "MemoryReleased": {"shape"},
    "TrainStepFinished": {"loss", "num_params_with_grad", "total_grad_norm"},
}


def recorded(call: Any = None, **settings: Any) -> list[Event]:
    """The events of one settled step."""
    with nothing_left(), EAERuntime(blocks(), config=RuntimeConfig(**settings)) as runtime:
        call = call or (lambda r: r.train_step(X, torch.sum))
        for _ in range(3):
            call(runtime)
        runtime.event_bus.start_recording()
        call(runtime)
        return runtime.event_bus.stop_recording()


def line(event: Event) -> str:
    """An event as a short text."""
    p = event.payload
    place = p.get("layer_id", p.get("block_index", p.get("num_blocks", p.get("num_boundaries", ""))))
    extra = [p["pass_name"]] if event.type == "PassApplied" else []
    extra += [f"m{p['microbatch']}"] if "microbatch" in p else []
    return " ".join([event.type, str(place), *extra]).rstrip()


def test_a_step_tells_in_order() -> None:
    log = recorded(passes=[ClipPass(100.0), LoggingPass()])
    drawing = """
        TrainStepStarted
        ForwardStarted 3
        ForwardFinished 2
        AdjointCreated 3
        AdjointModified 3
        PassApplied 3 ClipPass
        PassApplied 3 LoggingPass
        BlockReconstructed 3
        SchedulerStep 2
        AdjointModified 2
        PassApplied 2 ClipPass
        PassApplied 2 LoggingPass
        BlockReconstructed 2
        SchedulerStep 1
        AdjointModified 1
        PassApplied 1 ClipPass
        PassApplied 1 LoggingPass
        MemoryReleased
        BlockReconstructed 1
        SchedulerStep 0
        AdjointModified 0
        PassApplied 0 ClipPass
        PassApplied 0 LoggingPass
        MemoryReleased
        TrainStepFinished
    """
    # The core's passes of one call tell together, after it.
    assert [line(event) for event in log] == [text.strip() for text in drawing.strip().split("\n")]
    for event in log:
        assert set(event.payload) == PAYLOADS[event.type], event
    assert {event.type for event in log} == set(PAYLOADS)
    assert [event.timestamp for event in log] == sorted(event.timestamp for event in log)


def test_values_of_the_payloads() -> None:
    """y = x W1' W2' summed; the gradient norms and the loss are plain's."""
    torch.manual_seed(0)
    model = blocks()
    boundaries = [X.clone().requires_grad_()]
    for block in model:
        boundaries.append(block(boundaries[-1]))
        boundaries[-1].retain_grad()
    boundaries[-1].sum().backward()
    norms = {i + 1: b.grad.norm().item() for i, b in enumerate(boundaries[:3])}
    total = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
    log = recorded(passes=[LoggingPass()])
    by_type: dict[str, list[dict[str, Any]]] = {}
    for event in log:
        by_type.setdefault(event.type, []).append(event.payload)
    reconstructed = {p["layer_id"]: p for p in by_type["BlockReconstructed"]}
    assert {i: p["block"] for i, p in reconstructed.items()} == {i + 1: name for i, name in enumerate(NAMES)}
    assert {i: p["grad_norm"] for i, p in reconstructed.items()} == pytest.approx(norms)
    [finished] = by_type["TrainStepFinished"]
    assert finished == {
        "loss": pytest.approx(boundaries[-1].sum().item()),
        "num_params_with_grad": 4,
        "total_grad_norm": pytest.approx(total),
    }
    modified = {p["layer_id"]: p for p in by_type["AdjointModified"]}
    assert [modified[i]["block"] for i in range(4)] == [*NAMES, "output"]
    for i, boundary in enumerate(boundaries):
        grad = boundary.grad
        assert modified[i]["norm"] == pytest.approx(grad.norm().item()) and modified[i]["numel"] == grad.numel()
        assert modified[i]["max"] == pytest.approx(grad.max().item()) and not modified[i]["has_nan"]
    assert sorted(p["shape"] for p in by_type["MemoryReleased"]) == [(4, 3), (4, 5)]


def test_async_says_so() -> None:
    log = recorded(scheduler="async", boundary_tier="host")
    steps = [e.payload for e in log if e.type == "SchedulerStep"]
    assert steps == [{"block_index": i, "block_name": NAMES[i], "async_prefetch": True} for i in (2, 1, 0)]


def test_microbatches_are_numbered() -> None:
    log = recorded(
        lambda r: r.train_step(X, lambda y, t: y.sum(), targets=torch.zeros(4)),
        scheduler="pipeline",
        num_microbatches=2,
    )
    steps = [(e.payload["block_index"], e.payload["microbatch"]) for e in log if e.type == "SchedulerStep"]
    assert steps == [(i, m) for m in (0, 1) for i in (2, 1, 0)]
    assert sum(e.type == "TrainStepFinished" for e in log) == 1


def test_the_split_calls() -> None:
    def call(runtime: EAERuntime) -> None:
        runtime.backward(runtime.forward(X), torch.sum)

    log = recorded(call)
    assert [line(e) for e in log if not e.type.startswith("Memory")] == [
        "ForwardStarted 3",
        "ForwardFinished 4",
        "AdjointCreated 3",
        "BlockReconstructed 3",
        "SchedulerStep 2",
        "BlockReconstructed 2",
        "SchedulerStep 1",
        "BlockReconstructed 1",
        "SchedulerStep 0",
    ]


def test_the_memory_manager_tells_through_the_runtimes_bus() -> None:
    with EAERuntime(blocks()) as runtime:
        runtime.event_bus.start_recording()
        runtime.memory_manager.release(runtime.memory_manager.request((2, 3)))
        log = runtime.event_bus.stop_recording()
    assert [(e.type, e.payload) for e in log] == [
        (EventType.MEMORY_ALLOCATED, {"shape": (2, 3), "dtype": "torch.float32", "device": "cpu"}),
        (EventType.MEMORY_RELEASED, {"shape": (2, 3)}),
    ]


# -- nothing when nobody listens -----------------------------------------------------------------------------------


class Tally:
    """Counts the events that are made and the statistics that are taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.norms = 0
        real_init, real_norm = Event.__init__, torch.linalg.vector_norm
        monkeypatch.setattr(Event, "__init__", lambda s, *a, **k: self.events.append(a[0]) or real_init(s, *a, **k))
        monkeypatch.setattr(torch.linalg, "vector_norm", self._norm(real_norm))

    def _norm(self, real: Any) -> Any:
        def norm(*args: Any, **options: Any) -> Any:
            self.norms += 1
            return real(*args, **options)

        return norm


@pytest.mark.parametrize("settings", [{}, {"scheduler": "async", "boundary_tier": "host"}, {"passes": [LoggingPass()]}])
def test_nothing_is_built_when_nobody_listens(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """No event, no norm, no `.item()` but the loss's own; one type listened to makes that type alone."""
    with nothing_left(), EAERuntime(blocks(), config=RuntimeConfig(**settings)) as runtime:
        runtime.train_step(X, torch.sum)
        tally = Tally(monkeypatch)
        items = 0
        real = torch.Tensor.item

        def item(tensor: torch.Tensor) -> Any:
            nonlocal items
            items += 1
            return real(tensor)

        monkeypatch.setattr(torch.Tensor, "item", item)
        for _ in range(3):
            runtime.train_step(X, torch.sum)
        assert (tally.events, tally.norms, items) == ([], 0, 3)

        seen: list[Event] = []
        runtime.event_bus.subscribe(EventType.SCHEDULER_STEP, seen.append)
        runtime.train_step(X, torch.sum)
        assert tally.events == ["SchedulerStep"] * 3 and len(seen) == 3 and tally.norms == 0
        runtime.event_bus.unsubscribe(EventType.SCHEDULER_STEP, seen.append)
        tally.events.clear()
        runtime.event_bus.subscribe(EventType.BLOCK_RECONSTRUCTED, seen.append)
        runtime.train_step(X, torch.sum)
        assert tally.events == ["BlockReconstructed"] * 3 and tally.norms > 0
        monkeypatch.undo()


def test_statistics_are_computed_when_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model = blocks()
    with EAERuntime(model) as runtime:
        runtime.train_step(X, torch.sum)
        tally = Tally(monkeypatch)
        runtime.train_step(X, torch.sum)
        assert tally.norms == 0
        stats = runtime.last_grad_stats
        assert tally.norms > 0
        counted = tally.norms
        assert runtime.last_grad_stats == stats and tally.norms == counted
        monkeypatch.undo()
    expected = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
    assert stats == {"num_params_with_grad": 4, "total_grad_norm": pytest.approx(expected)}


# -- profiler ------------------------------------------------------------------------------------------------------


def test_profiler_names_and_counts() -> None:
    with EAERuntime(blocks(), config=RuntimeConfig(passes=[ClipPass(), Int8QuantizationPass()])) as runtime:
        for _ in range(3):
            runtime.train_step(X, torch.sum)
        report = runtime.profiler.report()
        counts = {name: row["count"] for name, row in report.items()}
        assert counts == {
            "forward": 3,
            "reverse_pass": 3,
            "pass:ClipPass": 12,
            "pass:Int8QuantizationPass": 12,
            "reconstruct:Linear_2": 3,
            "reconstruct:Tanh_1": 3,
            "reconstruct:Linear_0": 3,
        }
        assert all(row["total_seconds"] > 0 for row in report.values())
        assert report["reverse_pass"]["total_seconds"] > report["reconstruct:Linear_0"]["total_seconds"]


def test_profiler_off() -> None:
    with EAERuntime(blocks(), config=RuntimeConfig(enable_profiler=False, passes=[ClipPass()])) as runtime:
        runtime.train_step(X, torch.sum)
        runtime.compute_gradients(X, torch.sum)
        assert runtime.profiler.report() == {}


def test_ranges_under_torchs_profiler(tmp_path: Path) -> None:
    """Each action is a range; without a profiler none is opened. (`profile.events()` takes some names for mangled C++
    and would show "2F0" as "F0".)"""
    path = tmp_path / "torch.json"
    for settings in ({}, {"scheduler": "async", "boundary_tier": "host"}, {"passes": [ClipPass()]}):
        with EAERuntime(blocks(), config=RuntimeConfig(**settings)) as runtime:
            for _ in range(3):
                runtime.train_step(X, torch.sum)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                runtime.train_step(X, torch.sum)
            actions = runtime.schedule().split()
        profile.export_chrome_trace(str(path))
        found = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") == "user_annotation"]
        found.sort(key=lambda e: e["ts"])
        assert [e["name"] for e in found if e["name"].startswith("eae ")] == ["eae " + action for action in actions]
        shown = [e for e in profile.events() if e.name.startswith("eae ")]
        assert sorted(e.name for e in shown) == sorted("eae " + action for action in actions)


# -- log lines -----------------------------------------------------------------------------------------------------


@pytest.fixture
def lines() -> Iterator[list[str]]:
    logger = logging.getLogger("eae_runtime")
    level, handlers, found = logger.level, list(logger.handlers), []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            assert record.levelno == logging.DEBUG
            found.append(record.getMessage())

    logger.addHandler(Keep())
    logger.setLevel(logging.NOTSET)
    yield found
    logger.handlers[:] = handlers
    logger.setLevel(level)


def test_debug_writes_every_event_as_one_json_line(lines: list[str]) -> None:
    with EAERuntime(blocks(), config=RuntimeConfig(log_level="DEBUG", passes=[LoggingPass()])) as runtime:
        runtime.event_bus.start_recording()
        runtime.train_step(X, torch.sum)
        log = runtime.event_bus.stop_recording()
    assert len(lines) == len(log) > 15
    for text, event in zip(lines, log, strict=True):
        assert "\n" not in text
        read = json.loads(text)
        assert read.pop("event") == event.type and read.pop("timestamp") == event.timestamp
        payload = json.loads(json.dumps(event.payload, default=str))
        assert read == payload or read == {"payload": payload}


def test_other_levels_write_nothing_and_build_nothing(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    real = eae_runtime.events.Event.__init__
    monkeypatch.setattr(Event, "__init__", lambda s, *a, **k: made.append(a[0]) or real(s, *a, **k))
    with EAERuntime(blocks(), config=RuntimeConfig(log_level="INFO")) as runtime:
        runtime.train_step(X, torch.sum)
    assert lines == [] and made == []


# -- the trace file ------------------------------------------------------------------------------------------------


def traced(tmp_path: Path, call: Any = None, **settings: Any) -> dict[str, Any]:
    path = tmp_path / "trace.json"
    with nothing_left(), EAERuntime(blocks(), config=RuntimeConfig(trace=True, **settings)) as runtime:
        for _ in range(3):
            (call or (lambda r: r.train_step(X, torch.sum)))(runtime)
        runtime.trace(path)
        trace: dict[str, Any] = json.loads(path.read_text())
        trace["actions"] = runtime.schedule().split()
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]
    return trace


def spans_of(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The spans of each lane, by start."""
    events = trace["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in lanes.values()}
    for event in events:
        if event["ph"] == "X":
            found[lanes[event["tid"]]].append(event)
    return {name: sorted(spans, key=lambda e: (e["ts"], -e["dur"])) for name, spans in found.items()}


def check_format(trace: dict[str, Any]) -> None:
    """What the viewers need: known phases, numbers, one process, names for every thread, spans nested or apart."""
    events = trace["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["eae-runtime"]
    assert {e["ph"] for e in events} <= {"M", "X", "C"} and {e["pid"] for e in events} == {1}
    for event in events:
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0 and isinstance(event["name"], str)
        if event["ph"] == "C":
            assert event["name"] == "bytes" and event["args"]["bytes"] >= 0 and event["ts"] >= 0
    for spans in spans_of(trace).values():
        ends: list[float] = []
        for span in spans:
            while ends and ends[-1] <= span["ts"] + 1e-9:
                ends.pop()
            end = span["ts"] + span["dur"]
            assert not ends or end <= ends[-1] + 1e-6
            ends.append(end)


def test_a_trace_has_every_action_in_order(tmp_path: Path) -> None:
    trace = traced(tmp_path)
    check_format(trace)
    assert [e["name"] for e in spans_of(trace)["executor"]] == 3 * trace["actions"]


def test_the_byte_counter_follows_the_store(tmp_path: Path) -> None:
    """It rises to both inputs that are kept, and is 0 at each step's end."""
    trace = traced(tmp_path)
    values = [e["args"]["bytes"] for e in trace["traceEvents"] if e["ph"] == "C"]
    assert max(values) == 4 * (3 + 5) * 4 and values[-1] == 0 and values.count(max(values)) >= 3


@pytest.mark.parametrize("settings", [{}, {"scheduler": "async"}], ids=["sequential", "async"])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_store_and_passes_have_lanes_of_their_own(tier: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Two boundaries go to the tier and come back in each of three steps (what lies in host memory is read there), and
    four go through the passes, each in one call."""
    trace = traced(tmp_path, passes=[ClipPass(), Int8QuantizationPass()], boundary_tier=tier, **settings)
    check_format(trace)
    found: dict[str, list[dict[str, Any]]] = {}
    for name, spans in spans_of(trace).items():
        found.setdefault(re.sub(r" \d+$", "", name), []).extend(spans)
    assert set(found) == {"executor", "store", "passes"}
    names = ["0S0", "1S0"] + (["0L0", "1L0"] if tier == "disk" else [])
    assert sorted(e["name"] for e in found["store"]) == sorted(3 * names)
    assert all(e["args"]["bytes"] >= 4 * 3 * 4 for e in found["store"])
    assert sorted(e["name"] for e in found["passes"]) == sorted(3 * ["0P0", "1P0", "2P0", "3P0"])
    # A pass works inside the executor's action of the same name.
    outside = {e["name"]: e for e in found["executor"]}
    for inner in sorted(found["passes"], key=lambda e: e["ts"])[-4:]:
        outer = outside[inner["name"]]
        assert outer["ts"] <= inner["ts"] + 1 and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1


def test_a_trace_needs_to_be_asked_for(tmp_path: Path) -> None:
    with EAERuntime(blocks()) as runtime:
        runtime.train_step(X, torch.sum)
        with pytest.raises(ValueError, match="trace=True"):
            runtime.trace(tmp_path / "trace.json")
    with EAERuntime(blocks(), config=RuntimeConfig(trace=True)) as runtime:
        runtime.trace(tmp_path / "empty.json")
        assert json.loads((tmp_path / "empty.json").read_text())["traceEvents"]
        with pytest.raises(ValueError, match="nowhere"):
            runtime.trace(tmp_path / "nowhere" / "trace.json")
    assert [p.name for p in tmp_path.iterdir()] == ["empty.json"]


def test_tracing_changes_no_bit(tmp_path: Path) -> None:
    found = []
    for trace in (False, True):
        model = blocks()
        with EAERuntime(model, config=RuntimeConfig(trace=trace)) as runtime:
            for _ in range(3):
                runtime.train_step(X, torch.sum)
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
