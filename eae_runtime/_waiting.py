"""Boundaries of the autograd driver that wait on a tier until their node's backward.

They go there as autograd's saved tensors (torch.autograd.graph.saved_tensors_hooks): so the engine decides, as for any
node, how long they live, and what `retain_graph` and a second backward do.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from . import _bridge
from .boundary_store import BoundaryStore
from .errors import ClosedError, RebuildMismatchError

__all__ = ["Waiting"]

# Entries of the list of what was stored, after which the dead ones are thrown away.
_MOST = 4096


class _Held:
    """One tensor on the tier; it leaves the tier when nobody holds this object any more.

    Note [A finalizer that frees]
        Elsewhere memory is freed at a known action and no finalizer decides. Here the engine decides, as for any saved
        tensor, and tells nobody: it drops its references, and CPython runs `__del__` at that moment. A collector that
        ran later would keep memory longer, and nothing else.
    """

    def __init__(self, store: BoundaryStore, key: int) -> None:
        self.store = store
        self.key = key
        self._loaded = False

    def load(self) -> None:
        """Starts bringing it back, once."""
        if not self._loaded:
            self._loaded = True
            self.store.load(self.key)

    def __del__(self) -> None:
        if _bridge.in_child:
            return
        # Closed meanwhile, the store has let everything go.
        with suppress(ClosedError):
            self.store.drop(self.key)


class Waiting:
    """A store and the order in which boundaries went there. A tensor that several blocks take is stored once.

    prefetch: how many boundaries ahead of need a load starts.
    """

    def __init__(self, store: BoundaryStore, prefetch: int) -> None:
        self._store = store
        self._prefetch = prefetch
        self._next = 0
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, weakref.ref[_Held]]] = {}
        self._order: dict[int, weakref.ref[_Held]] = {}

    def saving(self, tensors: Sequence[torch.Tensor], needs: Sequence[bool]) -> saved_tensors_hooks:
        """A region in which a node saves `tensors`: those that need a gradient go to the tier, the others (masks,
        indices, position embeddings: many blocks share them) stay where they are."""
        rest = iter(zip(tensors, needs, strict=True))

        def pack(_: torch.Tensor) -> Any:
            tensor, need = next(rest)
            return self._put(tensor) if need else (tensor.detach(), tensor._version)

        return saved_tensors_hooks(pack, self._unpack)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, _Held):
            try:
                self._ahead(packed.key)
                packed.load()
                return self._store.fetch(packed.key)
            except ClosedError:
                raise ClosedError(
                    "a block's input waited on a tier that was closed before this backward: call unwrap(), or close "
                    "the runtime, when no backward is pending"
                ) from None
        tensor, version = packed
        if tensor._version != version:
            raise RebuildMismatchError(
                f"an input of a block, {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}, was modified in "
                "place between forward and backward; write to a copy"
            )
        return tensor

    def _put(self, tensor: torch.Tensor) -> _Held:
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == tensor._version:
            held = known[2]()
            if held is not None:
                return held
        key = self._next
        self._next += 1
        held = _Held(self._store, key)
        self._store.adopt(key, tensor.detach())
        self._store.move(key)
        if len(self._order) > _MOST:
            self._order = {n: ref for n, ref in self._order.items() if ref() is not None}
            self._known = {k: entry for k, entry in self._known.items() if entry[0]() is not None}
        self._known[id(tensor)] = (weakref.ref(tensor), tensor._version, weakref.ref(held))
        self._order[key] = weakref.ref(held)
        return held

    def _ahead(self, key: int) -> None:
        """Starts loading what was stored just before: it is needed next."""
        for earlier in range(key - 1, max(-1, key - 1 - self._prefetch), -1):
            ref = self._order.get(earlier)
            held = ref() if ref is not None else None
            if held is not None:
                held.load()

    def close(self) -> None:
        """Closes the store; what waits there is lost."""
        self._store.close()
