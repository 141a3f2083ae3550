"""Wall-clock totals by name. One small record a name, however often it is hit: a long run does not grow."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext

__all__ = ["Profiler"]

_FRESH = 4096

_NOTHING: AbstractContextManager[None] = nullcontext()


class _Total:
    __slots__ = ("count", "longest", "seconds", "shortest")

    def __init__(self, elapsed: float) -> None:
        self.count = 1
        self.seconds = self.shortest = self.longest = elapsed

    def add(self, elapsed: float) -> None:
        self.count += 1
        self.seconds += elapsed
        self.shortest = min(self.shortest, elapsed)
        self.longest = max(self.longest, elapsed)


class _Span(AbstractContextManager[None]):
    __slots__ = ("name", "profiler", "start")

    def __init__(self, profiler: Profiler, name: str) -> None:
        self.profiler = profiler
        self.name = name

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        self.profiler.record(self.name, time.perf_counter() - self.start)


class Profiler:
    """Adds up how often and how long each named thing ran. Safe to use from several threads.

    While `enabled` is False nothing is recorded; what was recorded before stays.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._totals: dict[str, _Total] = {}
        # Runs that are not in the totals yet: to append one is all that a step has time for.
        self._fresh: deque[tuple[str, float]] = deque()
        self._lock = threading.Lock()

    def record(self, name: str, elapsed_seconds: float) -> None:
        """Adds one run of `elapsed_seconds` to `name`."""
        if not self.enabled:
            return
        self._fresh.append((name, elapsed_seconds))
        if len(self._fresh) >= _FRESH:
            with self._lock:
                self._add_up()

    def _add_up(self) -> None:
        while self._fresh:
            name, elapsed = self._fresh.popleft()
            total = self._totals.get(name)
            if total is None:
                self._totals[name] = _Total(elapsed)
            else:
                total.add(elapsed)

    def track(self, name: str) -> AbstractContextManager[None]:
        """A context manager that records the time spent inside it, also when an exception leaves it."""
        return _Span(self, name) if self.enabled else _NOTHING

    def report(self) -> dict[str, dict[str, float]]:
        """`{name: {count, total_seconds, mean_seconds, max_seconds, min_seconds}}`, in the order of first use."""
        with self._lock:
            self._add_up()
            return {
                name: {
                    "count": total.count,
                    "total_seconds": total.seconds,
                    "mean_seconds": total.seconds / total.count,
                    "max_seconds": total.longest,
                    "min_seconds": total.shortest,
                }
                for name, total in self._totals.items()
            }

    def reset(self) -> None:
        """Forgets everything recorded so far."""
        with self._lock:
            self._fresh.clear()
            self._totals.clear()
