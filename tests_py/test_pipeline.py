"""The pipeline: order, history, times, events, and one call for a run of core passes."""

from __future__ import annotations

import gc
import itertools
import json
from typing import Any

import pytest
import torch

from eae_runtime import _bridge
from eae_runtime.adjoint import AdjointState
from eae_runtime.errors import PassError
from eae_runtime.events import EventBus, EventType
from eae_runtime.passes import (
    ClipPass,
    EAEPass,
    FP16Pass,
    GaussianNoisePass,
    Int8QuantizationPass,
    LoggingPass,
    RegularizationPass,
)
from eae_runtime.pipeline import AdjointPipeline, PassManager
from eae_runtime.profiler import Profiler


class Add(EAEPass):
    """A Python pass."""

    name = "Add"

    def __init__(self, value: float) -> None:
        self.value = value
        self.contexts: list[dict[str, Any]] = []

    def process(self, adjoint: AdjointState, context: dict[str, Any] | None = None) -> AdjointState:
        self.contexts.append(dict(context or {}))
        new = adjoint.clone()
        new.tensor = new.tensor + self.value
        return new


class HalfClip(ClipPass):
    """A core pass with a `process` of the user's own."""

    name = "HalfClip"

    def process(self, adjoint: AdjointState, context: dict[str, Any] | None = None) -> AdjointState:
        new = super().process(adjoint, context)
        new.tensor = new.tensor / 2
        return new


class Counted:
    """The core, with its calls written down."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self.real, name)


def state(*values: float) -> AdjointState:
    return AdjointState(torch.tensor(values), 2, "block_1", history=["before"])


def by_hand(passes: list[Any], adjoint: AdjointState, context: dict[str, Any] | None = None) -> AdjointState:
    for item in passes:
        adjoint = item(adjoint, context)
    return adjoint


def test_an_empty_pipeline_changes_nothing() -> None:
    pipeline, given = AdjointPipeline(), state(1.0)
    assert pipeline.run(given) is given and len(pipeline) == 0
    assert PassManager is AdjointPipeline


KINDS: dict[str, Any] = {
    "clip": lambda: ClipPass(2.0),
    "int8": Int8QuantizationPass,
    "regularization": lambda: RegularizationPass(0.25),
    "python": lambda: Add(0.5),
    "own": lambda: HalfClip(3.0),
    "off": RegularizationPass,
}


@pytest.mark.parametrize("names", list(itertools.product(KINDS, repeat=3)), ids="-".join)
def test_any_mix_is_its_passes_one_by_one(names: tuple[str, ...]) -> None:
    made = [KINDS[name]() for name in names]
    given = state(3.0, -4.0, 0.5)
    before = given.tensor.clone()
    pipeline = AdjointPipeline()
    for item in made:
        pipeline.add_pass(item)
    got, want = pipeline(given), by_hand(made, given)
    assert torch.equal(got.tensor, want.tensor)
    assert got.history == want.history == ["before", *(item.name for item in made)]
    assert got.metadata == want.metadata
    assert torch.equal(given.tensor, before) and given.history == ["before"] and given.metadata == {}


def test_a_run_of_core_passes_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = AdjointPipeline([ClipPass(), FP16Pass(), Int8QuantizationPass()], profiler=Profiler())
    pipeline.run(state(1.0, 2.0))
    core = Counted(_bridge.core)
    monkeypatch.setattr(_bridge, "core", core)
    pipeline.run(state(1.0, 2.0))
    monkeypatch.undo()
    assert core.calls == ["api_ChainApply"]


def test_passes_with_nothing_to_do_are_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = AdjointPipeline([RegularizationPass(), LoggingPass(), GaussianNoisePass()])
    core = Counted(_bridge.core)
    monkeypatch.setattr(_bridge, "core", core)
    made = pipeline.run(state(1.0))
    monkeypatch.undo()
    assert core.calls == []
    assert made.history == ["before", "RegularizationPass", "LoggingPass", "GaussianNoisePass"]


def test_events_and_times() -> None:
    bus, profiler = EventBus(), Profiler()
    pipeline = AdjointPipeline([ClipPass(), Int8QuantizationPass(), Add(1.0)], bus, profiler)
    bus.start_recording()
    pipeline.run(state(1.0, 2.0))
    names = ["ClipPass", "Int8QuantizationPass", "Add"]
    assert [event.type for event in bus.log] == [EventType.PASS_APPLIED] * 3
    assert [event.payload["pass_name"] for event in bus.log] == names
    for event in bus.log:
        assert set(event.payload) == {"pass_name", "layer_id", "elapsed_seconds"}
        assert event.payload["layer_id"] == 2 and 0 < event.payload["elapsed_seconds"] < 60
    report = profiler.report()
    assert list(report) == [f"pass:{name}" for name in names]
    assert all(row["count"] == 1 and row["total_seconds"] > 0 for row in report.values())


def test_logging_in_a_pipeline_uses_its_bus_too() -> None:
    bus = EventBus()
    pipeline = AdjointPipeline([RegularizationPass(0.5), LoggingPass(), RegularizationPass(0.5)], bus)
    bus.start_recording()
    pipeline.run(state(8.0, -8.0))
    [event] = bus.events_of_type(EventType.ADJOINT_MODIFIED)
    assert event.payload["max"] == 4.0 and event.payload["pass_name"] == "LoggingPass"


def test_python_passes_see_the_context() -> None:
    item = Add(1.0)
    pipeline = AdjointPipeline([item])
    given = {"block_index": 1, "loss_scale": 4.0}
    pipeline.run(state(1.0), given)
    assert item.contexts == [{"event_bus": pipeline.event_bus, "block_index": 1, "loss_scale": 4.0}]
    assert given == {"block_index": 1, "loss_scale": 4.0}


def test_several_tensors_are_clipped_by_their_joint_norm() -> None:
    pipeline = AdjointPipeline([ClipPass(1.0)])
    made = pipeline.run_all([state(3.0), state(4.0)])
    torch.testing.assert_close(torch.cat([m.tensor for m in made]), torch.tensor([0.6, 0.8]), rtol=1e-5, atol=0)
    assert [m.history for m in made] == [["before", "ClipPass"]] * 2


def test_several_tensors_go_to_a_python_pass_one_by_one() -> None:
    item = Add(1.0)
    made = AdjointPipeline([item, FP16Pass()]).run_all([state(1.0), state(2.0)])
    assert [m.tensor.item() for m in made] == [2.0, 3.0]
    assert [context["tensor_index"] for context in item.contexts] == [0, 1]


class Broken(EAEPass):
    name = "Broken"

    def process(self, adjoint: AdjointState, context: dict[str, Any] | None = None) -> AdjointState:
        raise ZeroDivisionError("by hand")


def test_a_failing_pass_is_named() -> None:
    with pytest.raises(PassError, match=r"Broken at boundary 2 \(block_1\).*ZeroDivisionError: by hand") as caught:
        AdjointPipeline([ClipPass(), Broken()]).run(state(1.0))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_plain_function_can_be_a_pass() -> None:
    def double(adjoint: AdjointState, context: dict[str, Any]) -> AdjointState:
        new = adjoint.clone()
        new.tensor = new.tensor * 2
        return new

    bus = EventBus()
    bus.start_recording()
    assert AdjointPipeline([double], bus).run(state(1.0)).tensor.item() == 2.0
    assert bus.log[0].payload["pass_name"] == "double"
    with pytest.raises(PassError, match="int"):
        AdjointPipeline([lambda adjoint, context: 3]).run(state(1.0))  # type: ignore[list-item, return-value]


def noise(count: int, item: GaussianNoisePass, pipeline: AdjointPipeline | None = None) -> list[torch.Tensor]:
    run = pipeline or item
    return [run(state(*([0.0] * 20))).tensor for _ in range(count)]


def test_a_pass_has_one_state_wherever_it_is_used() -> None:
    want = noise(6, GaussianNoisePass(1.0, seed=3))
    item = GaussianNoisePass(1.0, seed=3)
    one, two = AdjointPipeline([item]), AdjointPipeline([item, RegularizationPass()])
    got = noise(1, item, one) + noise(1, item, one) + noise(1, item) + noise(1, item, two) + noise(2, item)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_the_same_noisy_pass_twice_draws_twice() -> None:
    item = GaussianNoisePass(1.0, seed=3)
    first, second = noise(2, GaussianNoisePass(1.0, seed=3))
    [both] = noise(1, item, AdjointPipeline([item, item]))
    torch.testing.assert_close(both, first + second)


def test_pipeline_state() -> None:
    def make() -> AdjointPipeline:
        noisy = [GaussianNoisePass(1.0, seed=seed) for seed in (1, 2)]
        return AdjointPipeline([ClipPass(10.0), noisy[0], Add(0.0), noisy[1]])

    one, two = make(), make()
    assert one.stateful and not AdjointPipeline([ClipPass()]).stateful
    given = state(*([0.0] * 20))
    for _ in range(3):
        one.run(given)
    saved = one.state()
    assert saved[0] is None and saved[2] is None
    want = one.run(given).tensor
    two.load_state(saved)
    assert torch.equal(two.run(given).tensor, want)
    one.load_state(saved)
    assert torch.equal(one.run(given).tensor, want)
    with pytest.raises(PassError, match="pipeline of 4"):
        one.load_state([None])


def test_the_pass_list_may_change_between_runs() -> None:
    pipeline = AdjointPipeline([RegularizationPass(0.5)])
    assert pipeline.run(state(8.0)).tensor.item() == 4.0
    pipeline.passes.insert(0, RegularizationPass(0.75))
    assert pipeline.run(state(8.0)).tensor.item() == 1.0
    pipeline.passes[1].strength = 0.0  # type: ignore[union-attr]
    assert pipeline.run(state(8.0)).tensor.item() == 2.0
    pipeline.passes.clear()
    assert pipeline.run(state(8.0)).tensor.item() == 8.0


def test_closing_frees_the_core_and_keeps_the_state() -> None:
    gc.collect()
    before = json.loads(_bridge.live())
    item = GaussianNoisePass(1.0, seed=3)
    pipeline = AdjointPipeline([ClipPass(10.0), item])
    want = noise(3, item, AdjointPipeline([ClipPass(10.0), GaussianNoisePass(1.0, seed=3)]))
    got = noise(2, item, pipeline)
    pipeline.close()
    pipeline.close()
    got += noise(1, item, pipeline)
    pipeline.close()
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    del want, got
    gc.collect()
    assert json.loads(_bridge.live()) == before
