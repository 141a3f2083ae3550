"""Worker processes that form a torch.distributed group and run checks together, several after one another."""

from __future__ import annotations

import importlib
import multiprocessing as mp
import os
import tempfile
import time
import traceback
from datetime import timedelta
from types import TracebackType
from typing import Any

# Seconds for one check on all ranks. Loaded machines are slow; a check that hangs ends here.
LIMIT = 90.0


def serve(rank: int, world: int, store: str, pipe: Any) -> None:
    """A worker: joins the group, then runs the checks that it is sent and answers (ok, result)."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=LIMIT)
    )
    checks = importlib.import_module("distributed_checks")
    pipe.send("ready")
    while (task := pipe.recv()) is not None:
        name, options = task
        try:
            pipe.send((True, getattr(checks, name)(rank, world, **options)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()
    pipe.send("done")


class Workers:
    """`world` workers. `run` gives every rank's result of a check."""

    def __init__(self, world: int) -> None:
        context = mp.get_context("spawn")
        self.world = world
        self._folder = tempfile.TemporaryDirectory()
        self.pipes = []
        self.processes = []
        for rank in range(world):
            here, there = context.Pipe()
            process = context.Process(
                target=serve, args=(rank, world, os.path.join(self._folder.name, "store"), there), daemon=True
            )
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)
        for rank in range(world):
            assert self._answer(rank) == "ready"

    def _answer(self, rank: int, limit: float = LIMIT) -> Any:
        if not self.pipes[rank].poll(limit):
            raise AssertionError(f"rank {rank} of {self.world} gave no answer within {limit:g} s")
        return self.pipes[rank].recv()

    def start(self, check: str, **options: Any) -> None:
        for pipe in self.pipes:
            pipe.send((check, options))

    def results(self, ranks: list[int] | None = None) -> list[Any]:
        """The ranks' results of the check that was started. Fails with the tracebacks of the ranks that raised."""
        numbers = list(range(self.world)) if ranks is None else ranks
        end = time.monotonic() + LIMIT
        answers = {rank: self._answer(rank, max(0.1, end - time.monotonic())) for rank in numbers}
        wrong = [f"rank {rank}: {text}" for rank, (ok, text) in answers.items() if not ok]
        assert not wrong, "\n".join(wrong)
        return [answers[rank][1] for rank in numbers]

    def run(self, check: str, **options: Any) -> list[Any]:
        self.start(check, **options)
        return self.results()

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                try:
                    pipe.send(None)
                except OSError:
                    continue
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
