"""Live and peak bytes of torch's CPU allocator, counted at the allocator.

The counting is done by `alloc_count.c`, a library preloaded in front of libc. A process gets it in one of two ways:
`environment()` for a child that is about to be started, or `ensure_preloaded()`, which restarts the running script
with it. Linux with glibc and a C compiler; elsewhere `ensure_preloaded` and `open_counter` say so by returning
False and None.

**Step peak** (used in every table): the highest sum of live tensor bytes during one step, less the parameters and the
optimizer's state; gradients count, and `.grad` is None when the step starts.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # importing torch takes seconds, which a script that is about to restart would spend twice
    import torch

SOURCE = Path(__file__).with_name("alloc_count.c")
BUILD = Path(__file__).resolve().parents[2] / ".cache" / "alloc_count"
# Set in a process that was started with the library, so that a failed preload cannot restart it for ever.
MARK = "ALLOC_COUNT_PRELOADED"


class Counter:
    """Reads the preloaded library's counts. All sizes are bytes, of blocks of at least ALLOC_COUNT_MIN_BYTES (1024)."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name in ("live", "take_peak", "allocations", "lost"):
            getattr(library, f"alloc_count_{name}").restype = ctypes.c_int64
        self._library = library

    def live(self) -> int:
        """Bytes held now."""
        return int(self._library.alloc_count_live())

    def take_peak(self) -> int:
        """The highest `live()` since the last call; the mark is then lowered to what is held now.

        RuntimeError when the library's table overflowed, which makes every count wrong.
        """
        if self._library.alloc_count_lost():
            raise RuntimeError("more live allocations than alloc_count.c has slots for: its counts are wrong")
        return int(self._library.alloc_count_take_peak())

    def allocations(self) -> int:
        """Blocks counted since the process started."""
        return int(self._library.alloc_count_allocations())


def build() -> Path | None:
    """Compiles the library (once per source text) and returns its path; None where that is not possible."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc" or compiler is None:
        return None
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    target = BUILD / f"alloc_count-{platform.machine()}-{digest}.so"
    if not target.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        # Compile beside the target and rename: two benchmarks may start at once.
        draft = target.with_suffix(f".{os.getpid()}")
        command = [
            *compiler.split(),
            "-O2",
            "-fPIC",
            "-shared",
            "-Wall",
            "-Wextra",
            "-o",
            str(draft),
            str(SOURCE),
            "-pthread",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        draft.replace(target)
    return target


def environment(base: dict[str, str]) -> dict[str, str]:
    """`base` with the library preloaded; unchanged where it cannot be built."""
    library = build()
    if library is None:
        return dict(base)
    preload = ":".join(filter(None, [str(library), base.get("LD_PRELOAD", "")]))
    return {**base, "LD_PRELOAD": preload, MARK: str(library)}


def ensure_preloaded() -> bool:
    """Restarts this very command with the library preloaded, unless it is there already.

    Does not return when it restarts. Returns True with the library there, False where it cannot be had. Call it first
    thing in a script: whatever ran before runs twice.
    """
    if os.environ.get(MARK):
        return open_counter() is not None
    env = environment(dict(os.environ))
    if MARK not in env:
        return False
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], env)


def open_counter() -> Counter | None:
    """The counter of this process; None when it was started without the library.

    Also takes the library out of the environment, so that the processes this one starts (compilers, data workers) do
    without it.
    """
    library = os.environ.get(MARK)
    if not library:
        return None
    rest = [part for part in os.environ.get("LD_PRELOAD", "").split(":") if part and part != library]
    os.environ.pop("LD_PRELOAD", None)
    if rest:
        os.environ["LD_PRELOAD"] = ":".join(rest)
    import torch

    counter = Counter(ctypes.CDLL(library))
    # The library may be loaded without being in front of libc (a static allocator, a loader that ignores LD_PRELOAD).
    before = counter.live()
    probe = torch.empty(1 << 20, dtype=torch.uint8)
    counted = counter.live() - before
    del probe
    return counter if counted == 1 << 20 else None


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors` (a tied weight counts once)."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def resting_bytes(parameters: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes of the parameters and the optimizer's state: what a step peak leaves out."""
    state: list[torch.Tensor] = []
    if optimizer is not None:
        entries: Iterable[dict[str, Any]] = optimizer.state.values()
        state = [value for entry in entries for value in entry.values() if hasattr(value, "untyped_storage")]
    return tensor_bytes([*parameters, *state])
