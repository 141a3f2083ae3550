"""Memory policies: counters are exact, buffers come back, and a user's own policy works."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eae_runtime.errors import ConfigError
from eae_runtime.events import EventBus, EventType
from eae_runtime.memory import MemoryManager, MemoryPolicy, NullMemoryPolicy, PoolMemoryPolicy

COUNTERS = {"active", "peak", "allocations", "reuses", "pooled"}


def counts(manager: MemoryManager) -> tuple[int, ...]:
    stats = manager.stats()
    assert set(stats) >= COUNTERS
    return tuple(stats[name] for name in ("active", "peak", "allocations", "reuses", "pooled"))


def test_pool_gives_the_same_memory_again() -> None:
    manager = MemoryManager("pool")
    first = manager.request((3, 4))
    assert (first.shape, first.dtype, first.data_ptr() % 64) == ((3, 4), torch.float32, 0)
    pointer = first.data_ptr()
    assert counts(manager) == (1, 1, 1, 0, 0)
    manager.release(first)
    assert counts(manager) == (0, 1, 1, 0, 1)
    second = manager.request((3, 4))
    assert second.data_ptr() == pointer
    assert counts(manager) == (1, 1, 1, 1, 0)
    other = manager.request((3, 4), torch.float64)
    assert other.dtype is torch.float64
    assert counts(manager) == (2, 2, 2, 1, 0)
    manager.release(second)
    manager.release(other)
    manager.reset()
    assert counts(manager) == (0, 0, 0, 0, 0)


def test_pool_keeps_at_most_so_many_of_a_kind() -> None:
    manager = MemoryManager(PoolMemoryPolicy(max_pool_per_key=2))
    for tensor in [manager.request((5,)) for _ in range(4)]:
        manager.release(tensor)
    assert counts(manager) == (0, 4, 4, 0, 2)


def test_pool_leaves_foreign_and_freed_tensors_alone() -> None:
    manager = MemoryManager("pool")
    foreign = torch.ones(4)
    manager.release(foreign)
    manager.release(None)
    mine = manager.request((4,))
    manager.release(mine)
    manager.release(mine)
    assert counts(manager) == (0, 1, 1, 0, 1)
    assert manager.request((4,)).data_ptr() != foreign.data_ptr()
    assert torch.equal(foreign, torch.ones(4))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.uint8, torch.bool]
)
def test_pool_knows_the_dtypes(dtype: torch.dtype) -> None:
    manager = MemoryManager("pool")
    tensor = manager.request((2, 3), dtype)
    assert tensor.dtype is dtype and tensor.is_contiguous()
    tensor.fill_(1)
    assert int(tensor.sum()) == 6


def test_a_tensor_outlives_its_manager() -> None:
    manager = MemoryManager("pool")
    tensor = manager.request((1000,))
    tensor.fill_(7)
    del manager
    gc.collect()
    assert torch.equal(tensor, torch.full((1000,), 7.0))


@pytest.mark.parametrize("policy", ["pool", "none"])
def test_shapes_without_elements_or_dimensions(policy: str) -> None:
    manager = MemoryManager(policy)
    empty, scalar = manager.request((0, 3)), manager.request(())
    assert empty.shape == (0, 3) and scalar.shape == ()
    assert manager.stats()["active"] == 2
    manager.release(empty)
    manager.release(scalar)
    assert manager.stats()["active"] == 0


@pytest.mark.parametrize("policy", ["pool", "none"])
def test_devices_other_than_the_cpu_are_torchs(policy: str) -> None:
    manager = MemoryManager(policy)
    tensor = manager.request((2,), device="meta")
    assert tensor.is_meta and manager.stats()["allocations"] == 1
    manager.release(tensor)
    assert manager.stats()["active"] == 0


def test_null_policy_pools_nothing() -> None:
    manager = MemoryManager("none")
    a, b = manager.request((2,)), manager.request((2,))
    manager.release(a)
    manager.release(b)
    assert counts(manager) == (0, 2, 2, 0, 0)


def test_reuse_sets_to_zero() -> None:
    manager = MemoryManager("none")
    tensor = torch.ones(3, requires_grad=True)
    assert manager.reuse(tensor) is tensor
    assert not tensor.any()


class Model:
    """The pool as a sentence: per kind a number of free buffers, never more than the cap."""

    def __init__(self, cap: int) -> None:
        self.cap, self.free = cap, {}  # type: ignore[var-annotated]
        self.active = self.peak = self.allocations = self.reuses = 0

    def request(self, kind: Any) -> None:
        if self.free.get(kind, 0):
            self.free[kind] -= 1
            self.reuses += 1
        else:
            self.allocations += 1
        self.active += 1
        self.peak = max(self.peak, self.active)

    def release(self, kind: Any) -> None:
        self.active -= 1
        self.free[kind] = min(self.cap, self.free.get(kind, 0) + 1)

    def counts(self) -> tuple[int, ...]:
        return self.active, self.peak, self.allocations, self.reuses, sum(self.free.values())


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40),
    cap=st.integers(0, 3),
)
def test_pool_counts_like_its_model(steps: list[tuple[bool, int]], cap: int) -> None:
    kinds = [((2,), torch.float32), ((2,), torch.float64), ((1, 2), torch.float32)]
    manager, model = MemoryManager(PoolMemoryPolicy(cap)), Model(cap)
    held: list[tuple[torch.Tensor, Any]] = []
    for take, number in steps:
        if take or not held:
            kind = kinds[number % 3]
            held.append((manager.request(*kind), kind))
            model.request(kind)
        else:
            tensor, kind = held.pop(number % len(held))
            manager.release(tensor)
            model.release(kind)
        assert counts(manager) == model.counts()
        assert len({tensor.data_ptr() for tensor, _ in held}) == len(held)


def test_events_tell_of_requests_and_releases() -> None:
    bus = EventBus()
    bus.start_recording()
    manager = MemoryManager("none", bus)
    manager.release(manager.request([2, 3], torch.float64))
    assert [(event.type, event.payload) for event in bus.log] == [
        (EventType.MEMORY_ALLOCATED, {"shape": (2, 3), "dtype": "torch.float64", "device": "cpu"}),
        (EventType.MEMORY_RELEASED, {"shape": (2, 3)}),
    ]


class Counting(MemoryPolicy):
    """A user's policy."""

    def __init__(self) -> None:
        self.live = 0

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        self.live += 1
        return torch.zeros(tuple(shape), dtype=dtype, device=device)

    def free(self, tensor: torch.Tensor) -> None:
        self.live -= 1

    def stats(self) -> dict[str, int]:
        return {"active": self.live}

    def reset(self) -> None:
        self.live = 0


@pytest.mark.parametrize("given_policy", [Counting, Counting()])
def test_a_policy_of_the_users_own(given_policy: Any) -> None:
    manager = MemoryManager(given_policy)
    tensor = manager.request((2,))
    assert manager.stats() == {"active": 1} and not tensor.any()
    manager.release(tensor)
    manager.reset()
    assert manager.stats() == {"active": 0}


def test_what_is_no_policy_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'swap'.*'pool'"):
        MemoryManager("swap")
    with pytest.raises(TypeError, match="int"):
        MemoryManager(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_pool_per_key"):
        PoolMemoryPolicy(-1)
    with pytest.raises(NotImplementedError, match="allocate"):
        MemoryManager(MemoryPolicy()).request((1,))


def test_null_is_a_policy() -> None:
    assert isinstance(MemoryManager("none").policy, NullMemoryPolicy)
    assert isinstance(MemoryManager().policy, PoolMemoryPolicy)
