"""A step is all or nothing at every point where user code runs: the n-th call fails, for every n.

Parameters, `.grad`, buffers, optimizer, generators and the state of passes are bitwise what they were, the core holds
no more than before, and the steps that follow are those of a world in which nothing has failed.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from eae_runtime import _bridge
from eae_runtime.errors import EAEError, PassError, StoreError, UpdateError
from faults import Planned, World, differences
from oracle import nothing_left

pytestmark = pytest.mark.filterwarnings("error")

SETTINGS: dict[str, dict[str, Any]] = {
    "sequential": {},
    "host": {"boundary_tier": "host"},
    "async disk": {"boundary_tier": "disk", "scheduler": "async"},
    "microbatches": {"scheduler": "pipeline", "num_microbatches": 2},
}

# The step in which the fault happens: blocks are learnt in the first, compared in the second, settled in the fourth.
WHEN = [0, 1, 3]


def world(name: str, folder: Path) -> World:
    return World(**SETTINGS[name], disk_dir=folder)


def counts_of(name: str, when: int, folder: Path) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """How often each kind of user code runs in that step; and the states before it, after it and one step later."""
    plain = world(name, folder)
    for _ in range(when):
        plain.step()
    states = []
    plain.set_grads()
    states.append(plain.state())
    plain.trap.set("", 0)
    plain.step()
    counts = dict(plain.trap.counts)
    states.append(plain.state())
    plain.set_grads()
    plain.step()
    states.append(plain.state())
    plain.runtime.close()
    return counts, states


def notes_of(error: BaseException) -> str:
    """What the runtime has added to a user's exception."""
    return " ".join(getattr(error, "__notes__", ())) if sys.version_info >= (3, 11) else str(error.__cause__)


def failure(ours: World) -> BaseException | None:
    """What the step raises."""
    try:
        ours.step()
    except (Planned, PassError, KeyboardInterrupt) as error:
        return error
    return None


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("what", ["block", "pass", "loss", "subscriber", "tensor hook", "gradient hook"])
def test_the_nth_call_fails(what: str, name: str, when: int, tmp_path: Path) -> None:
    counts, (before, after, later) = counts_of(name, when, tmp_path)
    assert counts[what] > 0
    with nothing_left():
        for nth in range(1, counts[what] + 1):
            ours = world(name, tmp_path)
            for _ in range(when):
                ours.step()
            ours.set_grads()
            assert differences(ours.state(), before) == []
            ours.trap.set(what, nth, KeyboardInterrupt if nth % 3 == 0 and what in ("block", "loss") else Planned)
            caught = failure(ours)
            # The last event tells that the step is done.
            done = what == "subscriber" and nth == counts[what]
            if caught is None:
                # A block that is compared runs without gradients first. If only that fails, it counts for nothing.
                assert what == "block" and when < 3 and ours.trap.without_grad
                done = True
            assert differences(ours.state(), after if done else before) == [], nth
            assert len(ours.runtime.boundary_store) == 0
            if caught is not None:
                check(caught, what, ours, done)
                ours.steps += done
            del caught
            if not done:
                ours.step()
                assert differences(ours.state(), after) == [], nth
            ours.set_grads()
            ours.step()
            assert differences(ours.state(), later) == [], nth
            ours.runtime.close()
            del ours
    assert list(tmp_path.iterdir()) == []


def check(error: BaseException, what: str, ours: World, done: bool) -> None:
    """The error is the user's own, or names the pass; and it says where it happened."""
    if what == "pass":
        assert isinstance(error, PassError) and isinstance(error.__cause__, Planned)
        assert "TrapPass at boundary" in str(error)
    else:
        assert type(error) is ours.trap.error
    if isinstance(error, Planned) and what not in ("subscriber", "pass"):
        assert "action" in notes_of(error) and "undone" in notes_of(error)


def test_the_block_is_named_by_number_and_name(tmp_path: Path) -> None:
    ours = world("sequential", tmp_path)
    ours.trap.set("block", 3)
    with pytest.raises(Planned) as caught:
        ours.step()
    assert "action 2C0 (block 2, Trapped_2)" in notes_of(caught.value)
    ours.runtime.close()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_optimizer_that_fails_says_that_the_state_is_undefined(error: type[BaseException], tmp_path: Path) -> None:
    ours = world("sequential", tmp_path)
    ours.step()

    def step(*args: Any) -> None:
        raise error("by hand")

    ours.optimizer.step = step  # type: ignore[method-assign]
    if error is ValueError:
        with pytest.raises(UpdateError, match=r"Adam\.step\(\) failed: by hand.*half updated") as caught:
            ours.step()
        assert isinstance(caught.value, RuntimeError) and isinstance(caught.value.__cause__, ValueError)
    else:
        with pytest.raises(KeyboardInterrupt):
            ours.step()
    assert len(ours.runtime.boundary_store) == 0
    ours.runtime.close()


@pytest.mark.parametrize("scheduler", ["sequential", "async"])
def test_a_disk_that_is_full(scheduler: str, tmp_path: Path) -> None:
    """The third boundary does not fit under the cap."""
    plain = World()
    expected = plain.state()
    with nothing_left():
        ours = World(boundary_tier="disk", disk_dir=tmp_path, disk_max_bytes=1000, scheduler=scheduler)
        ours.set_grads()
        plain.set_grads()
        expected = plain.state()
        for _ in range(3):
            with pytest.raises(StoreError, match=r"1[,_ ]?000") as caught:
                ours.step()
            assert isinstance(caught.value, OSError) and isinstance(caught.value, EAEError)
            del caught
            assert differences(ours.state(), expected) == []
            assert len(ours.runtime.boundary_store) == 0
        ours.runtime.close()
        del ours
    assert list(tmp_path.iterdir()) == []
    plain.runtime.close()


def test_a_file_that_is_damaged_on_disk(tmp_path: Path) -> None:
    """Found by its checksum when it is read back; the step is undone, and the next one works."""
    ours = World(boundary_tier="disk", disk_dir=tmp_path)
    ours.set_grads()
    before = ours.state()
    real, damage = ours.loss, {"on": True}

    def loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if damage["on"]:
            file = max((p for p in tmp_path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
            content = bytearray(file.read_bytes())
            content[-5] ^= 255
            file.write_bytes(bytes(content))
        return real(y, target)

    ours.loss = loss  # type: ignore[method-assign]
    with pytest.raises(StoreError, match="checksum"):
        ours.step()
    assert differences(ours.state(), before) == []
    damage["on"] = False
    ours.step()
    ours.runtime.close()
    assert list(tmp_path.iterdir()) == []


def test_no_goroutine_and_no_file_is_left(tmp_path: Path) -> None:
    """After failures of every kind and a close, the core counts what it counted before: goroutines and files too."""
    gc.collect()
    _bridge.call("DrainReleases")
    before = json.loads(_bridge.live())
    for name in SETTINGS:
        ours = world(name, tmp_path)
        for what, nth in (("block", 3), ("pass", 2), ("loss", 1), ("subscriber", 4), ("block", 7)):
            ours.trap.set(what, nth)
            with pytest.raises((Planned, PassError)):
                ours.step()
        ours.runtime.close()
        del ours
    gc.collect()
    _bridge.call("DrainReleases")
    assert json.loads(_bridge.live()) == before
