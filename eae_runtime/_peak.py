"""The most bytes of tensors that a piece of code holds at once beyond what was there before it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

__all__ = ["peak_bytes"]


@contextmanager
def _quiet() -> Iterator[None]:
    """The profiler's library writes lines of its own to the process's error output unless it is told not to."""
    name = "KINETO_LOG_LEVEL"
    given = os.environ.get(name)
    os.environ.setdefault(name, "99")
    try:
        yield
    finally:
        if given is None:
            del os.environ[name]


def peak_bytes(run: Callable[[], object], devices: Sequence[torch.device]) -> int:
    """Runs `run` once and counts at PyTorch's allocators: on a CUDA device by its statistics, on the CPU by the memory
    events of the profiler. Kernels' temporaries that come from PyTorch's allocator count; scratch memory of the
    libraries below it (oneDNN, MKL) and buffers of the Go core on the host do not."""
    cuda = [d for d in devices if d.type == "cuda"]
    before = 0
    for device in cuda:
        torch.cuda.reset_peak_memory_stats(device)
        before += torch.cuda.memory_allocated(device)
    if cuda:
        run()
        return sum(torch.cuda.max_memory_allocated(device) for device in cuda) - before
    with _quiet(), torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profile:
        run()
    now = most = 0
    assert profile.kineto_results is not None
    # A node's backward may run on another thread; each thread's events come together.
    events = [e for e in profile.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
