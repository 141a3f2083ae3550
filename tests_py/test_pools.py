"""Where boundaries and results of passes lie: pooled buffers that are the same from the second step on, exact counters,
codecs, no copy on the device tier, files that go."""

from __future__ import annotations

import gc
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from eae_runtime import AsyncScheduler, EAERuntime, RuntimeConfig, _bridge
from eae_runtime.boundary_store import BoundaryStore
from eae_runtime.errors import BridgeError
from eae_runtime.memory import PoolMemoryPolicy
from eae_runtime.passes import ClipPass, GaussianNoisePass, Int8QuantizationPass
from models import CASES, chain
from oracle import build, clear, fresh, kept, live, nothing_left, state_of

pytestmark = pytest.mark.filterwarnings("error")

WIDTHS = [7, 33, 128, 33, 5, 33]


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return chain(*[nn.Sequential(nn.Linear(a, b), nn.Dropout(0.2)) for a, b in itertools.pairwise(WIDTHS)])


X = torch.randn(9, 7, generator=torch.Generator().manual_seed(0))


def square(y: torch.Tensor) -> torch.Tensor:
    return (y * y).mean()


SETTINGS: dict[str, dict[str, Any]] = {
    "host": {"boundary_tier": "host"},
    "async host": {"boundary_tier": "host", "scheduler": "async"},
    "disk": {"boundary_tier": "disk"},
    "async disk": {"boundary_tier": "disk", "scheduler": "async"},
    "device fp16": {"boundary_precision": "fp16"},
    "host bf16": {"boundary_tier": "host", "boundary_precision": "bf16"},
    "async disk fp16": {"boundary_tier": "disk", "boundary_precision": "fp16", "scheduler": "async"},
    "passes": {"passes": [ClipPass(0.1), Int8QuantizationPass()]},
    "microbatches on disk": {"boundary_tier": "disk", "scheduler": "pipeline", "num_microbatches": 3},
}


@pytest.fixture(params=SETTINGS)
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    with nothing_left():
        yield {**SETTINGS[request.param], "disk_dir": tmp_path}
    assert list(tmp_path.iterdir()) == []


def pool_of(runtime: EAERuntime) -> dict[str, int]:
    """The pool's counters at rest, with releases that wait done."""
    _bridge.call("DrainReleases")
    return runtime.memory_manager.stats()


# -- the pool ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_optimizer", [False, True])
def test_nothing_new_from_the_second_step_on(with_optimizer: bool, settings: dict[str, Any]) -> None:
    """Above 0 in the first step; then as many buffers are lent again as the first step allocated or lent."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01) if with_optimizer else None
    with EAERuntime(model, optimizer, RuntimeConfig(**settings)) as runtime:
        idle = pool_of(runtime)
        counts, bytes_held = [idle], []
        for _ in range(6):
            clear(model)
            runtime.train_step(X, square)
            counts.append(pool_of(runtime))
            bytes_held.append(live()["bytes"])
        first = counts[1]
        assert first["allocations"] > idle["allocations"]
        for before, after in itertools.pairwise(counts[1:]):
            assert after["allocations"] == first["allocations"] and after["peak"] == first["peak"]
            assert after["active"] == idle["active"]
            assert after["pooled"] + after["active"] == after["allocations"]
            # As many loans a step as in the first one.
            assert after["reuses"] - before["reuses"] == first["allocations"] + first["reuses"] - idle["allocations"]
        assert len(set(bytes_held)) == 1


def test_split_calls_allocate_nothing_new_either(settings: dict[str, Any]) -> None:
    with EAERuntime(make(), config=RuntimeConfig(**settings)) as runtime:
        found = []
        for _ in range(5):
            runtime.backward(runtime.forward(X), square)
            found.append(pool_of(runtime)["allocations"])
        assert found[0] > 0 and len(set(found)) == 1


def test_counts_of_a_host_tier() -> None:
    """Four boundaries of 9 rows are kept, all at once: four buffers; two of them have the same size, so a step of two
    boundaries less would still need them."""
    with EAERuntime(make(), config=RuntimeConfig(boundary_tier="host")) as runtime:
        runtime.train_step(X, square)
        assert pool_of(runtime) == {"active": 0, "peak": 4, "allocations": 4, "reuses": 0, "pooled": 4}
        runtime.train_step(X, square)
        assert pool_of(runtime) == {"active": 0, "peak": 4, "allocations": 4, "reuses": 4, "pooled": 4}
        runtime.forward(X)
        # Now the last block's input too; the output stays where it is.
        assert pool_of(runtime)["active"] == 5
        stats = runtime.boundary_store.stats()
        assert stats["boundaries"] == 6 and stats["bytes_host"] == 9 * sum(WIDTHS[:-1]) * 4


def test_store_counters_are_exact(tmp_path: Path) -> None:
    """Three steps of four boundaries on disk: twelve files and moves, written and read once each, all removed."""
    with EAERuntime(make(), config=RuntimeConfig(boundary_tier="disk", disk_dir=tmp_path)) as runtime:
        for _ in range(3):
            runtime.train_step(X, square)
        stats = runtime.boundary_store.stats()
    counts = ("puts", "moves", "loads", "drops", "gets", "files_written", "files_removed")
    assert {name: stats[name] for name in counts} == dict.fromkeys(counts, 12)
    payload = 3 * 9 * sum(WIDTHS[:4]) * 4
    assert payload < stats["bytes_written"] == stats["bytes_read"] < payload + 12 * 1024
    assert stats["boundaries"] == stats["bytes_disk"] == stats["failures"] == 0


def test_memory_none_keeps_nothing() -> None:
    model = make()
    with nothing_left(), EAERuntime(model, config=RuntimeConfig(boundary_tier="host", memory="none")) as runtime:
        before = live()["bytes"]
        for step in range(3):
            clear(model)
            runtime.train_step(X, square)
            clear(model)
            assert live()["bytes"] == before
            stats = runtime.boundary_store.stats()
            assert (stats["buffers_allocated"], stats["buffers_pooled"]) == (4 * (step + 1), 0)


def test_a_policy_that_was_given_is_not_closed_with_the_runtime() -> None:
    policy = PoolMemoryPolicy()
    for _ in range(2):
        with EAERuntime(make(), config=RuntimeConfig(boundary_tier="host", memory=policy)) as runtime:
            runtime.train_step(X, square)
            tensor = runtime.memory_manager.request((3,))
            runtime.memory_manager.release(tensor)
    assert policy.stats()["allocations"] == 1 and policy.stats()["reuses"] == 1
    policy.close()


def test_requests_of_the_users_own_are_counted_beside() -> None:
    """At most max_pool_per_key = 8 of a shape are kept of those; the runtime's own buffers are all kept."""
    with EAERuntime(make(), config=RuntimeConfig(boundary_tier="host")) as runtime:
        runtime.train_step(X, square)
        for tensor in [runtime.memory_manager.request((9, 33)) for _ in range(10)]:
            runtime.memory_manager.release(tensor)
        assert pool_of(runtime) == {"active": 0, "peak": 10, "allocations": 14, "reuses": 0, "pooled": 12}
        runtime.train_step(X, square)
        assert pool_of(runtime)["allocations"] == 14
        runtime.memory_manager.reset()
        assert pool_of(runtime) == {"active": 0, "peak": 0, "allocations": 0, "reuses": 0, "pooled": 0}
        runtime.train_step(X, square)


# -- the device tier -----------------------------------------------------------------------------------------------


def test_the_device_tier_copies_nothing() -> None:
    """Every boundary is the tensor that the block made; no buffer is taken, no byte moved."""
    made: list[int] = []
    model = make()
    for block in model:
        block.register_forward_hook(lambda module, args, out: made.append(out.data_ptr()))
    with EAERuntime(model) as runtime:
        for _ in range(4):
            made.clear()
            output = runtime.forward(X)
            stored = [runtime.boundary_store.get(i).data_ptr() for i in range(6)]
            assert stored[0] == X.data_ptr() and stored[-1] == output.data_ptr()
            assert set(stored[1:]) <= set(made)
            runtime.backward(output, square)
            runtime.train_step(X, square)
        stats, pool = runtime.boundary_store.stats(), pool_of(runtime)
        assert stats["moves"] == stats["loads"] == stats["buffers_allocated"] == 0
        assert pool == {"active": 0, "peak": 0, "allocations": 0, "reuses": 0, "pooled": 0}


# -- async is sequential -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "cnn", "tied language model", "structured", "cross attention"])
@pytest.mark.parametrize("precision", [None, "fp16"])
def test_async_on_a_slow_disk_is_sequential(
    name: str, precision: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 ms before each piece of a file: loads overtake computation, computation waits for loads, the bits stay."""
    real = _bridge.call

    def call(function: str, *args: Any) -> Any:
        if function == "StoreNew":
            spec = {**json.loads(args[0]), "file_delay_seconds": 0.002}
            return real(function, json.dumps(spec), *args[1:])
        return real(function, *args)

    case, found = CASES[name], []
    with nothing_left():
        for scheduler, slow in (("sequential", False), ("async", True)):
            if slow:
                monkeypatch.setattr(_bridge, "call", call)
            model, x = build(case)
            config = RuntimeConfig(
                scheduler=scheduler, boundary_tier="disk", boundary_precision=precision, disk_dir=tmp_path
            )
            with EAERuntime(model, config=config) as runtime:
                steps = []
                for _ in range(3):
                    clear(model)
                    runtime.train_step(fresh(x), case.loss)
                    steps.append(state_of(model))
            found.append(steps)
        monkeypatch.undo()
    for ours, theirs in zip(*found, strict=True):
        for what in ours:
            assert all(torch.equal(ours[what][n], theirs[what][n]) for n in theirs[what]), what
    assert list(tmp_path.iterdir()) == []


# -- codecs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "relative"), [("fp16", 2.0**-10), ("bf16", 2.0**-7)])
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_codecs_stay_within_their_rounding(precision: str, relative: float, tier: str, tmp_path: Path) -> None:
    """Half the bytes; gradients off by a few roundings of the boundaries, and by something; the same on every tier."""
    grads = []
    for settings in ({}, {"boundary_tier": tier, "boundary_precision": precision}, {"boundary_precision": precision}):
        model = make()
        torch.manual_seed(1)
        with EAERuntime(model, config=RuntimeConfig(disk_dir=tmp_path, **settings)) as runtime:
            runtime.train_step(X, square)
            grads.append(state_of(model)["grads"])
            if settings:
                runtime.forward(X)
                size = runtime.boundary_store.memory_bytes()
                # The output is the caller's and stays as it is.
                half = 9 * (sum(WIDTHS[:-1]) * 2 + WIDTHS[-1] * 4)
                assert half <= size <= half + (5 * 1024 if tier == "disk" and len(settings) == 2 else 0)
    exact, coded, on_device = grads
    for name in exact:
        error = (coded[name] - exact[name]).norm() / exact[name].norm()
        assert error <= 8 * relative, name
        assert torch.equal(coded[name], on_device[name])
    assert any(not torch.equal(coded[n], exact[n]) for n in exact)


def test_a_codec_is_reported() -> None:
    """The store says what it keeps boundaries in, and integers keep every bit."""
    with EAERuntime(make(), config=RuntimeConfig(boundary_precision="fp16")) as runtime:
        assert runtime.boundary_store.precision is torch.float16
        assert runtime.config.boundary_precision is torch.float16
    model, x = build(CASES["embedding"])
    with EAERuntime(model, config=RuntimeConfig(boundary_precision="fp16", boundary_tier="host")) as runtime:
        runtime.forward(x)
        assert torch.equal(runtime.boundary_store.get(0), x)


# -- passes --------------------------------------------------------------------------------------------------------


def test_noise_is_the_same_under_every_scheduler_and_tier(tmp_path: Path) -> None:
    found = []
    for settings in ({}, {"scheduler": "async", "boundary_tier": "disk"}, {"scheduler": "pipeline"}):
        model = make()
        torch.manual_seed(1)
        config = RuntimeConfig(passes=[GaussianNoisePass(0.1, seed=4)], disk_dir=tmp_path, **settings)
        with EAERuntime(model, config=config) as runtime:
            for _ in range(3):
                clear(model)
                runtime.train_step(X, square)
        found.append(state_of(model)["grads"])
    assert all(torch.equal(found[0][n], other[n]) for other in found[1:] for n in other)


# -- files ---------------------------------------------------------------------------------------------------------

CRASH = """
import os, sys, torch
from torch import nn
from eae_runtime import EAERuntime, RuntimeConfig
model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
runtime = EAERuntime(model, config=RuntimeConfig(boundary_tier="disk", disk_dir=sys.argv[1]))
runtime.forward(torch.ones(32, 64))
print(len(runtime.boundary_store), flush=True)
os._exit(3) if sys.argv[2] == "crash" else None
"""


def run(folder: Path, how: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CRASH, str(folder), how]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_files_of_a_crashed_process_go_at_the_next_start(tmp_path: Path) -> None:
    reply = run(tmp_path, "crash")
    # The four blocks' inputs on disk, and the output.
    assert (reply.returncode, reply.stdout) == (3, "5\n"), reply.stderr
    left = [p for p in tmp_path.rglob("*") if p.is_file() and p.stat().st_size >= 32 * 64 * 4]
    assert len(left) == 4
    with EAERuntime(make(), config=RuntimeConfig(boundary_tier="disk", disk_dir=tmp_path)) as runtime:
        assert not any(p.exists() for p in left)
        runtime.train_step(X, square)
    assert list(tmp_path.iterdir()) == []


def test_files_of_a_process_that_ends_without_a_close(tmp_path: Path) -> None:
    reply = run(tmp_path, "end")
    assert reply.returncode == 0, reply.stderr
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_files_of_another_runtime_that_is_alive_stay(tmp_path: Path) -> None:
    config = RuntimeConfig(boundary_tier="disk", disk_dir=tmp_path)
    with EAERuntime(make(), config=config) as one:
        output = one.forward(X)
        files = {p for p in tmp_path.rglob("*") if p.is_file()}
        with EAERuntime(make(), config=config) as two:
            two.train_step(X, square)
        assert files <= {p for p in tmp_path.rglob("*") if p.is_file()}
        one.backward(output, square)
    assert list(tmp_path.iterdir()) == []


def test_close_in_the_middle(settings: dict[str, Any]) -> None:
    """Boundaries stored, nothing fetched: all of it goes with close, also when the output is kept."""
    runtime = EAERuntime(make(), config=RuntimeConfig(**settings))
    output = kept(runtime.forward(X))
    runtime.close()
    del runtime
    gc.collect()
    assert output.shape == (9, 33)


def test_a_bad_pool_handle_is_refused() -> None:
    with nothing_left(), pytest.raises(BridgeError, match="no pool"):
        BoundaryStore(tier="host", pool=10**9)


@pytest.mark.parametrize(("asked", "got"), [(1, 1), (3, 3), (99, 16)])
def test_the_async_schedulers_workers(asked: int, got: int) -> None:
    config = RuntimeConfig(scheduler=AsyncScheduler(max_workers=asked), boundary_tier="host")
    with EAERuntime(nn.Sequential(nn.Linear(2, 2)), config=config) as runtime:
        assert runtime.boundary_store.stats()["workers"] == got
