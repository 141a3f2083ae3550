"""Schedulers: the order in which blocks run, are rebuilt and differentiated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import ConfigError
from .async_scheduler import AsyncScheduler
from .base import BaseScheduler, ReverseContext
from .distributed import DistributedScheduler
from .pipeline_scheduler import PipelineScheduler
from .sequential import SequentialScheduler

__all__ = [
    "AsyncScheduler",
    "BaseScheduler",
    "DistributedScheduler",
    "PipelineScheduler",
    "ReverseContext",
    "SequentialScheduler",
    "build_scheduler",
]

_BY_NAME: dict[str, tuple[Callable[..., BaseScheduler], tuple[str, ...]]] = {
    "sequential": (SequentialScheduler, ()),
    "async": (AsyncScheduler, ("max_workers",)),
    "pipeline": (PipelineScheduler, ("num_microbatches",)),
    "distributed": (DistributedScheduler, ("block_ranks",)),
}


def build_scheduler(spec: str | BaseScheduler | type[BaseScheduler], **kwargs: Any) -> BaseScheduler:
    """A scheduler from its name ("sequential", "async", "pipeline", "distributed") and the options it takes; others are
    ignored. An instance is returned as it is, a class is called. Raises ConfigError (a ValueError) on an unknown
    name."""
    if isinstance(spec, BaseScheduler):
        return spec
    if isinstance(spec, type) and issubclass(spec, BaseScheduler):
        return spec()
    if not isinstance(spec, str) or spec not in _BY_NAME:
        raise ConfigError(f"unknown scheduler {spec!r}; choose one of {', '.join(_BY_NAME)}, or give a BaseScheduler")
    make, options = _BY_NAME[spec]
    return make(**{key: kwargs[key] for key in options if key in kwargs})
