"""The list of actions from the Go core is what runs: a changed list is refused, and unchecked it misbehaves."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from counting import before_each_run, counted, forwards
from eae_runtime import EAERuntime, RuntimeConfig, _bridge
from eae_runtime._program import Program
from eae_runtime.errors import EAEError, ScheduleError, StoreKeyError
from eae_runtime.passes import RegularizationPass
from eae_runtime.schedulers.generated import GeneratedScheduler
from oracle import Named, clear, nothing_left, state_of

pytestmark = pytest.mark.filterwarnings("error")

STEPS = 4

SETTINGS: dict[str, dict[str, Any]] = {
    "sequential": {},
    "passes": {"passes": [RegularizationPass(0.25)]},
    "async host": {"scheduler": "async", "boundary_tier": "host"},
    "microbatches": {"scheduler": "pipeline", "num_microbatches": 2},
    "microbatches, one loss": {"scheduler": "pipeline", "num_microbatches": 2, "one loss": True},
}


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Linear(6, 6), nn.Linear(6, 6))


class Bench:
    """One model under one setting, whose list of actions can be replaced."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        settings = dict(SETTINGS[name])
        self.one_loss = settings.pop("one loss", False)
        self.model = make()
        self.runtime = EAERuntime(self.model, config=RuntimeConfig(**settings))
        specs: list[dict[str, Any]] = []
        real = GeneratedScheduler.schedule
        monkeypatch.setattr(GeneratedScheduler, "schedule", lambda s, spec: specs.append(spec) or real(s, spec))
        self.right = self.step()
        self.spec = json.dumps(specs[-1])
        [(self.key, program)] = self.runtime._programs.items()
        self.text = program.text

    def step(self) -> Named:
        clear(self.model)
        torch.manual_seed(1)
        x, target = torch.ones(4, 6), torch.zeros(4)
        if self.one_loss:
            self.runtime.train_step(x, lambda y: (y * y).mean())
        else:
            self.runtime.train_step(x, lambda y, t: (y * y).mean(), targets=target)
        return state_of(self.model)["grads"]

    def run(self, text: str) -> str:
        """What a step over that list, unchecked, comes to: "right", "wrong" or the name of the error."""
        self.runtime._programs[self.key] = Program(text)
        try:
            grads = self.step()
        except Exception as error:
            return type(error).__name__
        same = grads.keys() == self.right.keys() and all(torch.equal(grads[n], self.right[n]) for n in grads)
        return "right" if same else "wrong"

    def refusal(self, text: str) -> str | None:
        """What the validator says against a list."""
        try:
            _bridge.call("SchedValidate", self.spec, text)
        except ScheduleError as error:
            return str(error)
        return None


@pytest.fixture(params=SETTINGS)
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with nothing_left():
        made = Bench(request.param, monkeypatch)
        yield made
        made.runtime.close()
        del made


def mutants(text: str) -> Iterator[tuple[str, str]]:
    """Every list that differs by two neighbours swapped, one action left out, or one said twice."""
    forward, _, reverse = text.partition("\n")
    tokens = [*forward.split(), "\n", *reverse.split()]
    join = lambda made: " ".join(made).replace(" \n ", "\n").replace(" \n", "\n").replace("\n ", "\n")
    for i, token in enumerate(tokens):
        if token == "\n":
            continue
        yield f"without {token}", join(tokens[:i] + tokens[i + 1 :])
        yield f"{token} twice", join(tokens[: i + 1] + tokens[i:])
        if i + 1 < len(tokens) and tokens[i + 1] != "\n":
            yield f"{token} and {tokens[i + 1]} swapped", join([*tokens[:i], tokens[i + 1], token, *tokens[i + 2 :]])


def test_what_the_validator_accepts_is_right(bench: Bench) -> None:
    """Exhaustive, over every change of one place: an accepted list gives plain's bits; each refusal marks an action."""
    assert bench.refusal(bench.text) is None and bench.run(bench.text) == "right"
    verdicts = {"accepted": 0, "refused": 0}
    found: dict[str, int] = {}
    for name, text in mutants(bench.text):
        refusal = bench.refusal(text)
        outcome = bench.run(text)
        if refusal is None:
            verdicts["accepted"] += 1
            assert outcome == "right", name
        else:
            verdicts["refused"] += 1
            assert ">>" in refusal or "missing" in refusal or "never runs" in refusal, refusal
            found[outcome] = found.get(outcome, 0) + 1
    assert verdicts["refused"] > 10 * max(1, verdicts["accepted"]) / 2
    # Unchecked, most of the refused lists fail or give other gradients: the list is what runs.
    bad = sum(count for outcome, count in found.items() if outcome != "right")
    assert found.get("wrong", 0) >= 3 and bad > verdicts["refused"] / 3, found
    assert bench.run(bench.text) == "right"


def swapped(text: str, a: str, b: str) -> str:
    return text.replace(a, "#").replace(b, a).replace("#", b)


def moved(text: str, token: str, before: str) -> str:
    assert text.count(f" {token}") == 1
    return text.replace(f" {token}", "").replace(before, f"{token} {before}")


NAMED = {
    # name: (the change, what the refusal says, what happens unchecked)
    "a drop one action early": (lambda t: moved(t, "2D0", "2R0"), r">>2D0<<.*dropped while needed", StoreKeyError),
    "a drop early, before the forward": (lambda t: moved(t, "1D0", "2C0"), r">>1D0<<", StoreKeyError),
    "two VJPs swapped": (lambda t: swapped(t, "1V0", "2V0"), r">>1V0<<.*no graph", "wrong"),
    "rebuild and VJP swapped": (lambda t: swapped(t, "2R0", "2V0"), r">>2V0<<.*no graph", "wrong"),
    "a VJP left out": (lambda t: t.replace(" 1V0", ""), r">>1D0<<.*: 1V0 comes after", "wrong"),
    "a rebuild left out": (lambda t: t.replace(" 0R0", ""), r">>0V0<<.*no graph", "wrong"),
    "two forwards swapped": (lambda t: swapped(t, "1C0", "0C0"), r">>1C0<<.*before it exists", "wrong"),
    "a forward left out": (lambda t: t.replace(" 2C0", ""), "before it exists", KeyError),
    "a boundary that is not kept": (lambda t: t.replace("2C0", "2N0"), r"boundary 2", EAEError),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_change_with_a_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, refusal, outcome = NAMED[name]
    bench = Bench("sequential", monkeypatch)
    assert bench.text == "0C0 1C0 2C0 3F0\n4B0 3V0 2R0 2V0 2D0 1R0 1V0 1D0 0R0 0V0 0D0"
    text = change(bench.text)
    assert text != bench.text
    with pytest.raises(ScheduleError, match=refusal):
        _bridge.call("SchedValidate", bench.spec, text)
    if outcome == "wrong":
        assert bench.run(text) == "wrong"
    else:
        bench.runtime._programs[bench.key] = Program(text)
        with pytest.raises(outcome):
            bench.step()
    bench.runtime.close()


def test_what_a_generator_writes_has_been_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that generates refuses a spec in which nothing valid can be written, and text is checked as it is."""
    with pytest.raises(ValueError, match="boundaries"):
        _bridge.call("SchedGenerate", "sequential", json.dumps({"blocks": [{}], "boundaries": []}))
    for text in ("0C0 1Q0", "0C0 1F", "C0", "0C0\n1F0\n2B0"):
        with pytest.raises(ScheduleError):
            _bridge.call("SchedValidate", json.dumps({"blocks": [{}, {}]}), text)


# -- counts --------------------------------------------------------------------------------------------------------


def four(*frozen: int) -> nn.Sequential:
    model = counted(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    for number in frozen:
        model[number].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("frozen", "step", "split"),
    [
        ((), [2, 2, 2, 1], [2, 2, 2, 2]),
        ((0,), [1, 2, 2, 1], [1, 2, 2, 2]),
        ((0, 1, 2), [1, 1, 1, 1], [1, 1, 1, 2]),
        ((1, 2), [2, 2, 2, 1], [2, 2, 2, 2]),
        ((3,), [2, 2, 2, 1], [2, 2, 2, 2]),
    ],
)
@pytest.mark.parametrize("tier", ["device", "host"])
def test_forwards(frozen: tuple[int, ...], step: list[int], split: list[int], tier: str) -> None:
    """One forward, one rebuild; the last block is not rebuilt in train_step; a frozen prefix runs once."""
    model, x = four(*frozen), torch.ones(3, 6)
    with EAERuntime(model, config=RuntimeConfig(boundary_tier=tier)) as runtime:
        for _ in range(3):
            runtime.train_step(x, torch.sum)
            runtime.compute_gradients(x, torch.sum)
        for _ in range(3):
            forwards(model)
            runtime.train_step(x, torch.sum)
            assert forwards(model) == step
            runtime.compute_gradients(x, torch.sum)
            assert forwards(model) == split
            runtime.forward(x)
            assert forwards(model) == [1, 1, 1, 1]


def test_forwards_of_the_first_steps() -> None:
    """Learning costs nothing in the first step and one more forward of each block without a graph in the second."""
    model = four()
    with EAERuntime(model) as runtime:
        found = []
        for _ in range(4):
            runtime.train_step(torch.ones(3, 6), torch.sum)
            found.append(forwards(model))
    assert found == [[2, 2, 2, 1], [3, 3, 3, 1], [2, 2, 2, 1], [2, 2, 2, 1]]


# -- the same list every time --------------------------------------------------------------------------------------

CALLS = [
    ({}, {}),
    ({}, {"split": True}),
    ({"scheduler": "async", "boundary_tier": "disk", "prefetch": 2}, {}),
    ({"scheduler": "pipeline", "num_microbatches": 3}, {"microbatches": 3, "targets": True}),
    ({"scheduler": "pipeline", "num_microbatches": 3, "boundary_tier": "host"}, {"microbatches": 3}),
]

SCRIPT = """
import json, sys
from torch import nn
from eae_runtime import EAERuntime, RuntimeConfig
for settings, call in json.loads(sys.argv[1]):
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(5)])
    print(json.dumps(EAERuntime(model, config=RuntimeConfig(**settings)).schedule(**call)))
"""


def test_schedules_are_the_same_byte_for_byte() -> None:
    """In one runtime, in another, and in another process with another hash seed."""
    here = []
    for settings, call in CALLS:
        texts = set()
        for _ in range(2):
            model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(5)])
            with EAERuntime(model, config=RuntimeConfig(**settings)) as runtime:
                texts |= {runtime.schedule(**call), runtime.schedule(**call)}
        [text] = texts
        here.append(text)
    command = [sys.executable, "-c", SCRIPT, json.dumps(CALLS)]
    reply = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=120, env={"PYTHONHASHSEED": "7", "PATH": ""}
    )
    assert [json.loads(line) for line in reply.stdout.splitlines()] == here


def test_the_drawings() -> None:
    with EAERuntime(nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)])) as runtime:
        assert runtime.schedule() == "0C0 1C0 2F0\n3B0 2V0 1R0 1V0 1D0 0R0 0V0 0D0"
        assert runtime.schedule(split=True) == "0C0 1C0 2C0\n3B0 2R0 2V0 2D0 1R0 1V0 1D0 0R0 0V0 0D0 3D0"
        runtime.blocks[0].requires_grad_(False)
        assert runtime.schedule() == "0N0 1C0 2F0\n3B0 2V0 1R0 1V0 1D0"


# -- boundaries are freed at their last use ------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"scheduler": "async", "boundary_tier": "host"}, {"boundary_tier": "disk"}])
def test_boundaries_are_freed_at_their_last_use(settings: dict[str, Any]) -> None:
    """Five blocks: 0, 1, 2, 3, 4 boundaries when they run forward (each is kept when its reader has run), 4, 3, 2, 1
    when they are rebuilt, none after the step; with the split calls 5 and the output."""
    model, x = nn.Sequential(*[nn.Linear(6, 6) for _ in range(5)]), torch.ones(3, 6)
    seen: list[int] = []

    def stored() -> list[int]:
        found = list(seen)
        seen.clear()
        return found

    with EAERuntime(model, config=RuntimeConfig(**settings)) as runtime:
        for block in model:
            before_each_run(block, lambda: seen.append(len(runtime.boundary_store)))
        for step in range(5):
            seen.clear()
            runtime.train_step(x, torch.sum)
            # The second time that a block runs without a graph it runs twice, to be compared.
            assert step == 1 or stored() == [0, 1, 2, 3, 4, 4, 3, 2, 1]
            assert len(runtime.boundary_store) == 0
            seen.clear()
            output = runtime.forward(x)
            assert step < 2 or stored() == [0, 1, 2, 3, 4]
            assert len(runtime.boundary_store) == 6
            seen.clear()
            runtime.backward(output, torch.sum)
            assert stored() == [6, 5, 4, 3, 2]
            assert len(runtime.boundary_store) == 0


def test_a_new_forward_drops_what_the_last_one_stored() -> None:
    with EAERuntime(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))) as runtime:
        for _ in range(5):
            runtime.forward(torch.ones(3, 6))
            assert len(runtime.boundary_store) == 3
        runtime.train_step(torch.ones(3, 6), torch.sum)
        assert len(runtime.boundary_store) == 0
