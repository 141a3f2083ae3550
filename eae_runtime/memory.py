"""MemoryManager: tensors on request, from a policy that may pool them."""

from __future__ import annotations

import contextlib
import json
import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from . import _bridge
from .errors import BridgeError, ConfigError, TensorTypeError
from .events import EventBus, EventType

__all__ = ["MemoryManager", "MemoryPolicy", "NullMemoryPolicy", "PoolMemoryPolicy"]

Device = torch.device | str


class MemoryPolicy:
    """How tensors are made and given up. Subclass it, and give an instance as `RuntimeConfig(memory=...)`.

    allocate(shape, dtype, device)  a tensor with undefined contents, the caller's until `free`
    free(tensor)                    the caller is done with it, and with every view of it
    stats()                         active, peak, allocations, reuses, pooled: numbers of tensors
    reset()                         gives up what is pooled and counts from zero
    """

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: Device) -> torch.Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not define allocate(shape, dtype, device)")

    def free(self, tensor: torch.Tensor) -> None:
        raise NotImplementedError(f"{type(self).__name__} does not define free(tensor)")

    def stats(self) -> dict[str, int]:
        raise NotImplementedError(f"{type(self).__name__} does not define stats()")

    def reset(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} does not define reset()")


class NullMemoryPolicy(MemoryPolicy):
    """A new tensor for every request; nothing is kept."""

    def __init__(self) -> None:
        self._active = self._peak = self._allocations = 0

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: Device) -> torch.Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
        self._allocations += 1
        self._active += 1
        self._peak = max(self._peak, self._active)
        return tensor

    def free(self, tensor: torch.Tensor) -> None:
        self._active = max(0, self._active - 1)

    def stats(self) -> dict[str, int]:
        return {
            "active": self._active,
            "peak": self._peak,
            "allocations": self._allocations,
            "reuses": 0,
            "pooled": 0,
        }

    def reset(self) -> None:
        self._active = self._peak = self._allocations = 0


def _close_pool(handle: int) -> None:
    if not _bridge.in_child:
        _bridge.call("PoolClose", handle)


class PoolMemoryPolicy(MemoryPolicy):
    """Keeps freed CPU memory in the core's pool for the next request of the same shape and dtype.

    At most `max_pool_per_key` buffers of a kind are kept; each is 64-byte aligned. A tensor that did not come from
    this pool, or was freed before, is left alone by `free`. On other devices torch's caching allocator is such a pool
    already, so requests go to it and are only counted.
    """

    def __init__(self, max_pool_per_key: int = 8) -> None:
        if not isinstance(max_pool_per_key, int) or max_pool_per_key < 0:
            raise ConfigError(f"max_pool_per_key={max_pool_per_key!r}: allowed is a whole number from 0")
        self._handle: int = _bridge.call("PoolNew", max_pool_per_key)
        self._elsewhere = NullMemoryPolicy()
        # Not at exit: the process's memory goes with it.
        self._finalizer = weakref.finalize(self, _close_pool, self._handle)
        self._finalizer.atexit = False

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: Device) -> torch.Tensor:
        if torch.device(device).type != "cpu" or math.prod(shape) == 0:
            return self._elsewhere.allocate(shape, dtype, device)
        try:
            address = _bridge.core.api_PoolRequest(self._handle, ",".join(map(str, shape)), str(dtype)[6:])
        except RuntimeError as error:
            raise _bridge.translate(error) from None
        return _bridge.adopt(address)

    def free(self, tensor: torch.Tensor) -> None:
        if not tensor.is_cpu or tensor.numel() == 0:
            self._elsewhere.free(tensor)
            return
        # The core's refusal of memory that it has not lent.
        with contextlib.suppress(BridgeError):
            _bridge.call("PoolRelease", self._handle, tensor.data_ptr())

    def stats(self) -> dict[str, int]:
        pool = json.loads(_bridge.call("PoolStats", self._handle))
        other = self._elsewhere.stats()
        return {name: pool[name] + other[name] for name in other}

    def reset(self) -> None:
        _bridge.call("PoolReset", self._handle)
        self._elsewhere.reset()

    @property
    def handle(self) -> int:
        """The core's pool."""
        return self._handle

    def close(self) -> None:
        """Frees what is pooled; tensors still in use stay valid. A second call does nothing."""
        self._finalizer()


_POLICIES: dict[str, type[MemoryPolicy]] = {"pool": PoolMemoryPolicy, "none": NullMemoryPolicy}


def _policy(given: Any) -> MemoryPolicy:
    if isinstance(given, str):
        if given not in _POLICIES:
            raise ConfigError(f"memory={given!r}: allowed are 'pool', 'none', or a MemoryPolicy")
        return _POLICIES[given]()
    if isinstance(given, type) and issubclass(given, MemoryPolicy):
        return given()
    if isinstance(given, MemoryPolicy):
        return given
    raise TensorTypeError(f"a memory policy is a name or a MemoryPolicy, got {type(given).__name__}")


class MemoryManager:
    """Hands out tensors by a policy: "pool", "none", a MemoryPolicy, or a class of one.

    Emits MemoryAllocated (shape, dtype, device) and MemoryReleased (shape) on the bus.
    """

    def __init__(
        self, policy: str | MemoryPolicy | type[MemoryPolicy] = "pool", event_bus: EventBus | None = None
    ) -> None:
        self.policy = _policy(policy)
        # A policy that was given may outlive this manager, or the other way round.
        self._own = self.policy is not policy
        self.event_bus = event_bus or EventBus()

    def request(self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Device = "cpu") -> torch.Tensor:
        """A tensor with undefined contents."""
        tensor = self.policy.allocate(shape, dtype, device)
        if self.event_bus.wants(EventType.MEMORY_ALLOCATED):
            self.event_bus.emit(EventType.MEMORY_ALLOCATED, shape=tuple(shape), dtype=str(dtype), device=str(device))
        return tensor

    def release(self, tensor: torch.Tensor | None) -> None:
        """Gives a tensor up; its memory may be someone else's afterwards. None is allowed and does nothing."""
        if tensor is None:
            return
        shape = tuple(tensor.shape)
        self.policy.free(tensor)
        if self.event_bus.wants(EventType.MEMORY_RELEASED):
            self.event_bus.emit(EventType.MEMORY_RELEASED, shape=shape)

    def reuse(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor, set to zero."""
        with torch.no_grad():
            return tensor.zero_()

    def stats(self) -> dict[str, int]:
        """active, peak, allocations, reuses, pooled, as the policy counts them."""
        return self.policy.stats()

    def reset(self) -> None:
        """Gives up what is pooled and counts from zero."""
        self.policy.reset()

    @property
    def core_pool(self) -> int:
        """The core's pool that a runtime's store and passes share with the manager's own requests; 0 unless the manager
        has made the policy "pool" itself."""
        return self.policy.handle if self._own and isinstance(self.policy, PoolMemoryPolicy) else 0

    def close(self) -> None:
        """Closes the policy if it can be closed and the manager has made it."""
        close = getattr(self.policy, "close", None)
        if close is not None and self._own:
            close()
