"""BoundaryStore: the boundaries x_0..x_L between forward and reverse, kept by the Go core on a tier.

Note [Boundary keys]
    One integer names a boundary of a microbatch: `boundary + (microbatch << 20)`.

Note [Boundaries that stay go over together]
    On the device tier without a codec a boundary does not move, so nothing happens when the core takes it over. The
    executor's boundaries of a whole forward therefore wait here, exported, and cross in one call before the next one
    that concerns the store.

Note [A wait can be interrupted]
    Inside a call into the core the interpreter sees no signal. So a wait for a tier is cut into calls of at most 100
    ms, and has an end: the store's timeout. That holds for a store that is not async too: its moves and loads are done
    when the call that asks for them returns, and may take long.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from . import _bridge
from .config import TIERS, parse_precision
from .errors import ClosedError, ConfigError, EAEError, StoreKeyError, StoreTimeoutError, TensorTypeError

__all__ = ["BoundaryStore", "boundary_key"]

_SLICE_MS = 100
_MOST_WORKERS = 16
_CODECS = {None: "raw", torch.float32: "raw", torch.float16: "fp16", torch.bfloat16: "bf16"}


def boundary_key(boundary: int, microbatch: int = 0) -> int:
    """See Note [Boundary keys]."""
    return boundary + (microbatch << 20)


def _close(handle: int, waiting: list[str]) -> None:
    if not _bridge.in_child:
        while waiting:
            _bridge.adopt(int(waiting.pop().partition(":")[2]))
        _bridge.call("StoreClose", handle)


class BoundaryStore:
    """Tensors by number, on the device, in host memory or on disk.

    offload     short for tier="host"
    precision   dtype in which floating-point tensors are kept (float16, bfloat16, float32, or their short names);
                None keeps every bit. One that is narrower than the tensor's rounds
    pin_memory  page-locked host buffers, where there is CUDA
    tier        "device", "host" or "disk"; None follows `offload`
    directory   folder of the disk tier; files in it are removed on close
    max_bytes   most bytes that the disk tier may hold
    is_async    tier traffic runs in the background
    workers     how many goroutines do that, at most 16
    pool        handle of the core's pool that the buffers come from, which is closed after the store; 0 is one of its
                own
    keep_buffers  whether buffers that come back are kept for the next boundary
    timeout     seconds that a wait for the tier may take (StoreTimeoutError)

    A closed store raises ClosedError. A store that is garbage-collected closes itself, except in a forked child.
    """

    def __init__(
        self,
        offload: bool = False,
        precision: torch.dtype | str | None = None,
        pin_memory: bool = False,
        *,
        tier: str | None = None,
        directory: str | Path | None = None,
        max_bytes: int | None = None,
        is_async: bool = False,
        workers: int = 2,
        timeout: float = 60.0,
        pool: int = 0,
        keep_buffers: bool = True,
    ) -> None:
        self.tier = tier if tier is not None else ("host" if offload else "device")
        if self.tier not in TIERS:
            raise ConfigError(f"tier={tier!r}: allowed are {', '.join(map(repr, TIERS))}")
        self.offload = self.tier != "device"
        self.precision = parse_precision(precision, "precision")
        self.pin_memory = bool(pin_memory) and torch.cuda.is_available()
        self.timeout = timeout
        # Whether a boundary has to be moved to where it waits and loaded back; a codec is such a move on the device
        # too.
        self._moves = self.offload or _CODECS[self.precision] != "raw"
        # Only background work is waited for: other stores do a move or load within the call that asks for it.
        self._waits = self._moves and is_async
        self._stay = not self.offload and self.precision is None
        self._closed = False
        # What the core does not bring back by itself: tensors that were moved or cast before they went in.
        self._origin: dict[int, list[tuple[torch.device, torch.dtype]]] = {}
        spec = {
            "tier": self.tier,
            "codec": _CODECS[self.precision],
            "dir": "" if directory is None else str(directory),
            "max_bytes": max_bytes or 0,
            "async": is_async,
            "workers": min(workers, _MOST_WORKERS),
            "pin": self.pin_memory,
            "timeout_seconds": timeout,
            "pool_buffers": keep_buffers,
        }
        self._handle: int = _bridge.call("StoreNew", json.dumps(spec), pool)
        # "key:address" of each, see Note [Boundaries that stay go over together].
        self._waiting: list[str] = []
        self._finalizer = weakref.finalize(self, _close, self._handle, self._waiting)

    # The user's side.

    def put(self, idx: int, tensor: torch.Tensor) -> None:
        """Keeps a copy of `tensor` under `idx`, in place of one that is there."""
        if not isinstance(tensor, torch.Tensor):
            raise TensorTypeError(f"boundary {idx}: a tensor is needed, got {type(tensor).__name__}")
        [kept] = self._prepared(idx, [tensor.detach()])
        self._hand_over()
        address = _bridge.export(kept)
        try:
            _bridge.core.api_StoreCopy(self._handle, idx, address)
            if self._moves and not _bridge.core.api_StoreMove(self._handle, idx):
                self._wait("StoreSettle", idx)
        except RuntimeError as error:
            self._fail(error)

    def get(self, idx: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The boundary, on its own device and in its own dtype unless told otherwise; KeyError where there is none.

        On the device tier it may share the store's memory: read it, do not write it.
        """
        if idx not in self:
            raise StoreKeyError(f"boundary {idx} is not in the store")
        if self._moves:
            self.load(idx)
        tensor = self.fetch(idx)
        assert isinstance(tensor, torch.Tensor)
        return tensor.to(device=device, dtype=dtype)

    def __contains__(self, idx: object) -> bool:
        return isinstance(idx, int) and bool(self._ask("StoreHas", idx))

    def __len__(self) -> int:
        return int(self._ask("StoreLen"))

    def clear(self) -> None:
        """Drops every boundary."""
        self._ask("StoreClear")
        self._origin.clear()

    def memory_bytes(self) -> int:
        """Bytes that the boundaries take on their tier, as they are kept (after `precision`)."""
        return int(self._ask("StoreBytes"))

    def stats(self) -> dict[str, Any]:
        """The core's counters of this store."""
        stats: dict[str, Any] = json.loads(self._ask("StoreStats"))
        return stats

    def trace_into(self, trace: int) -> None:
        """Has the core's trace of that handle record every move and load; 0 ends it."""
        self._ask("StoreTrace", trace)

    @property
    def closed(self) -> bool:
        """Whether the store has been closed."""
        return self._closed

    def close(self) -> None:
        """Drops everything, ends background work, removes files. A second call does nothing."""
        self._closed = True
        self._origin.clear()
        self._finalizer()

    def __enter__(self) -> BoundaryStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # The executor's side: at most one call into the core each, and one more for each slice of a wait.

    def adopt(self, key: int, tensors: torch.Tensor | Sequence[torch.Tensor]) -> None:
        """Keeps detached tensors of one boundary without a copy. Nobody may write them until :meth:`drop`."""
        if self._stay and isinstance(tensors, torch.Tensor) and not self._closed:
            self._waiting.append(f"{key}:{_bridge.export(tensors)}")
            return
        self._hand_over()
        try:
            if isinstance(tensors, torch.Tensor):
                [tensors] = self._prepared(key, [tensors])
                _bridge.core.api_StorePut(self._handle, key, _bridge.export(tensors))
            else:
                tensors = self._prepared(key, tensors)
                addresses = ",".join([str(_bridge.export(tensor)) for tensor in tensors])
                _bridge.core.api_StorePutN(self._handle, key, addresses)
        except RuntimeError as error:
            self._fail(error)

    def move(self, key: int) -> None:
        """Action `S`: starts moving a boundary to the store's tier; a store that is not async has moved it on
        return."""
        self._hand_over()
        try:
            if not _bridge.core.api_StoreMove(self._handle, key):
                self._wait("StoreSettle", key)
        except RuntimeError as error:
            self._fail(error)

    def load(self, key: int) -> None:
        """Action `L`: starts loading a boundary back; a store that is not async has loaded it on return."""
        self._hand_over()
        try:
            if not _bridge.core.api_StoreLoad(self._handle, key):
                self._wait("StoreSettle", key)
        except RuntimeError as error:
            self._fail(error)

    def fetch(self, key: int) -> torch.Tensor:
        """The boundary's tensor; waits for a load that is under way."""
        self._hand_over()
        if self._waits:
            self._wait("StoreWait", key)
        try:
            tensor = _bridge.adopt(_bridge.core.api_StoreGet(self._handle, key))
        except RuntimeError as error:
            self._fail(error)
        return self._restored(key, [tensor])[0]

    def fetch_all(self, key: int) -> list[torch.Tensor]:
        """The tensors of a boundary of several, in the order in which they were given."""
        self._hand_over()
        if self._waits:
            self._wait("StoreWait", key)
        try:
            reply = _bridge.core.api_StoreGetN(self._handle, key)
        except RuntimeError as error:
            self._fail(error)
        return self._restored(key, [_bridge.adopt(int(address)) for address in reply.split(",")])

    def drop(self, key: int) -> None:
        """Action `D`: forgets a boundary; tensors that were fetched stay valid."""
        if self._waiting:
            self._hand_over()
        if self._origin:
            self._origin.pop(key, None)
        try:
            _bridge.core.api_StoreDrop(self._handle, key)
        except RuntimeError as error:
            self._fail(error)

    def _wait(self, name: str, key: int) -> None:
        """Calls the core's `name` until it says that the boundary is there. See Note [A wait can be interrupted]."""
        end = time.monotonic() + self.timeout
        try:
            while not getattr(_bridge.core, "api_" + name)(self._handle, key, _SLICE_MS):
                if time.monotonic() > end:
                    raise StoreTimeoutError(
                        f"boundary {key} was not moved to or from the {self.tier} tier in {self.timeout} s"
                    )
        except RuntimeError as error:
            self._fail(error)

    def _prepared(self, key: int, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The tensors as the core takes them, with a note of what they were where that differs."""
        ready = [self._ready(tensor) for tensor in tensors]
        if all(new is old for new, old in zip(ready, tensors, strict=True)):
            self._origin.pop(key, None)
        else:
            self._origin[key] = [(tensor.device, tensor.dtype) for tensor in tensors]
        return ready

    def _ready(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            return tensor
        if self.precision is torch.float32 and tensor.dtype is torch.float64:
            tensor = tensor.float()
        return tensor if tensor.is_cpu or not self.offload else tensor.cpu()

    def _restored(self, key: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        origin = self._origin.get(key)
        if origin is None:
            return tensors
        return [tensor.to(device=place, dtype=dtype) for tensor, (place, dtype) in zip(tensors, origin, strict=True)]

    def _ask(self, name: str, *args: Any) -> Any:
        if self._closed:
            raise ClosedError("the boundary store is closed")
        self._hand_over()
        return _bridge.call(name, self._handle, *args)

    def _hand_over(self) -> None:
        """See Note [Boundaries that stay go over together]."""
        if self._waiting:
            pairs = ",".join(self._waiting)
            self._waiting.clear()
            try:
                _bridge.core.api_StorePutAll(self._handle, pairs)
            except RuntimeError as error:
                self._fail(error)

    def _fail(self, error: RuntimeError) -> NoReturn:
        if self._closed:
            raise ClosedError("the boundary store is closed") from None
        if isinstance(error, EAEError):
            raise error
        raise _bridge.translate(error) from None
