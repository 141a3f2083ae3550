"""Counts calls into the Go core, by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _CountingCore:
    """Stands before the core and counts each call of one of its functions."""

    def __init__(self, core: Any, calls: Counter[str]) -> None:
        self._core = core
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._core, name)
        if not name.startswith("api_"):
            return function

        def counted(*args: Any) -> Any:
            self._calls[name.removeprefix("api_")] += 1
            return function(*args)

        return counted


@contextmanager
def count_crossings() -> Iterator[Counter[str]]:
    """Within the block, every call into the core is counted in what is yielded: {function: calls}.

    It relies on the shim's rule that core functions are looked up at call time.
    """
    from eae_runtime import _bridge

    calls: Counter[str] = Counter()
    core = _bridge.core
    _bridge.core = _CountingCore(core, calls)
    try:
        yield calls
    finally:
        _bridge.core = core
