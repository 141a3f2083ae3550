"""What happened when: spans for Chrome trace files, kept by the Go core."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from . import _bridge

if TYPE_CHECKING:
    from .boundary_store import BoundaryStore

__all__ = ["Trace"]

# Spans cross in batches of this many.
_BATCH = 256


class Trace:
    """A recorder in the Go core. `add` costs a list append; spans cross in batches."""

    def __init__(self) -> None:
        self._handle: int = _bridge.call("TraceNew", "{}")
        self._lines: list[str] = []

    @property
    def handle(self) -> int:
        """The recorder's handle, for parts of the core that record spans of their own."""
        return self._handle

    def add(self, lane: str, name: str, start: int, end: int, store: BoundaryStore | None = None) -> None:
        """One span, in nanoseconds of `time.time_ns()`. With a store, also its bytes at the end as a value of the
        counter track."""
        self._lines.append(f"{lane}\t{name}\t{start}\t{end}")
        if store is not None:
            self._lines.append(f"bytes\t{end}\t{store.memory_bytes()}")
        if len(self._lines) >= _BATCH:
            self.flush()

    def flush(self) -> None:
        """Sends the spans collected so far to the core."""
        if self._lines:
            lines, self._lines = self._lines, []
            _bridge.call("TraceAdd", self._handle, "\n".join(lines))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes Chrome trace JSON, which Perfetto and chrome://tracing open."""
        self.flush()
        _bridge.call("TraceWrite", self._handle, str(Path(path)))

    def close(self) -> None:
        """Frees the recorder."""
        if self._handle and not _bridge.in_child:
            _bridge.call("TraceClose", self._handle)
        self._handle = 0
