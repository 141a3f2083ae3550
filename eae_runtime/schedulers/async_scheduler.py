"""Sequential order with loads and stores moved ahead."""

from __future__ import annotations

from typing import Any, ClassVar

from ..errors import ConfigError
from .generated import GeneratedScheduler

__all__ = ["AsyncScheduler"]


class AsyncScheduler(GeneratedScheduler):
    """The sequential order, with boundaries stored and loaded by goroutines while blocks compute. Same bits as
    sequential.

    max_workers: how many boundaries may be on their way to or from the tier at once; the core takes at most 16.
    """

    name = "AsyncScheduler"
    generator = "async"
    step_payload: ClassVar[dict[str, Any]] = {"async_prefetch": True}

    def __init__(self, max_workers: int = 2) -> None:
        if not isinstance(max_workers, int) or max_workers < 1:
            raise ConfigError(f"max_workers={max_workers!r}: allowed is a whole number from 1")
        self.max_workers = max_workers
