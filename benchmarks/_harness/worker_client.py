"""The outside of a competitor's process: starts it, asks it, ends it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from . import alloc_count

CHECKOUT = Path(__file__).resolve().parents[2]


class WorkerError(RuntimeError):
    """A competitor failed, ended, or did not answer in time; the message holds its traceback where there is one."""


class Worker:
    """One competitor in a process of its own.

    `factory` is `module:callable`, called with `spec` in the new process. `path` goes first on its import path
    (0.1.1's folder). `count` preloads the byte counter. The object is built while the constructor blocks.
    """

    def __init__(
        self,
        factory: str,
        spec: Mapping[str, Any],
        *,
        path: Sequence[Path] = (),
        env: Mapping[str, str] | None = None,
        count: bool = False,
        timeout: float = 600,
    ) -> None:
        self._timeout = timeout
        self._rest = b""
        merged = {**os.environ, **(env or {})}
        merged["PYTHONPATH"] = os.pathsep.join([*map(str, path), *filter(None, [merged.get("PYTHONPATH")])])
        if count:
            merged = alloc_count.environment(merged)
        # -c puts the working directory first on the import path: it must not be one that holds an eae_runtime.
        scratch = CHECKOUT / ".cache" / "worker"
        scratch.mkdir(parents=True, exist_ok=True)
        # The checkout goes last: an installed eae_runtime, or 0.1.1's folder, comes before the one lying there.
        code = f"import sys; sys.path.append({str(CHECKOUT)!r}); from benchmarks._harness.worker import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, factory, json.dumps(dict(spec))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=merged,
            cwd=scratch,
        )
        try:
            self._answer(factory)
        except BaseException:
            self.close()
            raise

    def call(self, method: str, **args: Any) -> Any:
        """Calls `method(**args)` over there and returns its JSON value; blocks. WorkerError when it raises."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write((json.dumps({"call": method, "args": args}) + "\n").encode())
            self._process.stdin.flush()
        except BrokenPipeError as gone:
            raise WorkerError(f"{method}: the competitor's process has ended ({self._process.poll()})") from gone
        return self._answer(method)

    def close(self) -> None:
        """Ends the process (its stdin closes; killed after 10 s). May be called twice."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self, what: str) -> Any:
        assert self._process.stdout is not None
        handle = self._process.stdout.fileno()
        while b"\n" not in self._rest:
            ready, _, _ = select.select([handle], [], [], self._timeout)
            if not ready:
                raise WorkerError(f"{what}: no answer within {self._timeout:.0f} s")
            chunk = os.read(handle, 1 << 16)
            if not chunk:
                raise WorkerError(f"{what}: the competitor's process has ended ({self._process.wait()})")
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerError(f"{what}:\n{reply['error']}")
        return reply["result"]
