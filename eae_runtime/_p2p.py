"""Messages between ranks, on torch.distributed.

Note [Nothing waits without an end]
    A wait that times out breaks the connection it waited on, so each is made once, with the whole deadline, on a
    thread of its own; the main thread joins in slices of at most 100 ms, between which Ctrl-C gets through.

Note [Two groups, one for each direction]
    Activations go to higher ranks and adjoints to lower ones, each on a process group of its own. On a backend whose
    sends occupy the connection until they are taken (NCCL), two neighbours that both send first would otherwise wait
    for each other for ever.

A message is a header of eight numbers, then a description of its tensors (pickled) where it differs from that of the
last message about the same boundary, then the bytes of each tensor. A failed rank sends its failure in place of each
message that it owes, so that everybody learns of it at the next receive and the connections stay in step.
"""

from __future__ import annotations

import pickle
import queue
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ._hops import Hop
from ._wire import Slot, form_of, pack
from .errors import DistributedError, TensorTypeError

__all__ = ["Channels", "Failure", "Messenger", "Packet", "PeerFailed", "channels"]

_SLICE = 0.1

# How much later than its deadline a wait may come back before it is taken for hung, in seconds.
_GRACE = 5.0

_KINDS = {kind: number for number, kind in enumerate(("XF", "YF", "XB", "YB", "XS", "YS", "XT", "YT"), start=1)}

# Bytes that every rank contributes to an agreement at first; a longer one takes a second round.
_SLOT = 1024


@dataclass(frozen=True)
class Failure:
    """What went wrong, and where. `restart`: nothing did, but the step has to be repeated. `fatal`: the connections
    cannot be used again."""

    rank: int
    where: str
    text: str
    restart: bool = False
    fatal: bool = False


class PeerFailed(Exception):
    """A peer sent its failure in place of a message. A signal inside the runtime, turned into a DistributedError."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"rank {failure.rank} failed in {failure.where}: {failure.text}")
        self.failure = failure


@dataclass
class Packet:
    """What a message carries. tensors: None stands for one that is not there. about: any object that can be pickled;
    it travels only when it, or a tensor's form, has changed. rows and weight: of the microbatch."""

    tensors: Sequence[torch.Tensor | None]
    about: Any = None
    rows: int = 0
    weight: float = 0.0

    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors if t is not None)


@dataclass
class _Sent:
    """Sends under way, with the memory that they read."""

    works: list[Any]
    buffers: list[torch.Tensor]


class _Waiter:
    """The thread that waits."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], threading.Event, list[BaseException]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def run(self, job: Callable[[], None], seconds: float) -> None:
        """Runs a job that ends within `seconds`, raising what it raises. Raises TimeoutError if it does not end."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="eae-wait", daemon=True)
            self._thread.start()
        done, raised = threading.Event(), list[BaseException]()
        self._jobs.put((job, done, raised))
        end = time.monotonic() + seconds + _GRACE
        try:
            while not done.wait(_SLICE):
                if time.monotonic() > end:
                    raise TimeoutError(f"no answer within {seconds:g} s")
        except BaseException:
            # The thread is left to its wait and ends after it.
            self._jobs.put(None)
            self._jobs, self._thread = queue.SimpleQueue(), None
            raise
        if raised:
            raise raised[0]

    def stop(self) -> None:
        """Ends the thread; the next `run` starts another one."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(_GRACE)
            self._thread = None

    def _loop(self) -> None:
        jobs = self._jobs
        while (task := jobs.get()) is not None:
            job, done, raised = task
            try:
                job()
            except BaseException as error:
                raised.append(error)
            done.set()
            del task, job, done, raised


def _group(timeout: timedelta) -> Any:
    return dist.new_group(timeout=timeout)


class Channels:
    """The process groups of this process's runtimes. `broken` says why they cannot be used any more."""

    def __init__(self, timeout: float) -> None:
        self.world: Any = dist.group.WORLD
        self.timeout = timeout
        limit = timedelta(seconds=timeout)
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.up = _group(limit)
        self.down = _group(limit)
        self.broken = ""
        self.waiter = _Waiter()
        self.users = 0
        # "cpu:gloo,cuda:nccl": a backend for each type of device.
        pairs = [part.partition(":") for part in dist.get_backend_config(self.up).split(",")]
        self._backends = {device: backend for device, _, backend in pairs}
        kind = "cpu" if "cpu" in self._backends else next(iter(self._backends))
        self.device = (
            torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())
        )

    def carries(self, device: torch.device) -> bool:
        """Whether messages can be read from and written to memory of this device. Gloo's and MPI's go through host
        memory."""
        return device.type in self._backends and (
            device.type == "cpu" or self._backends[device.type] not in ("gloo", "mpi")
        )

    def toward(self, source: int, target: int) -> Any:
        """The group for messages from one rank to another."""
        return self.up if target > source else self.down


_made: list[Channels] = []


def channels(timeout: float) -> Channels:
    """The channels of the default process group, made at the first call; every rank has to call it as often, with the
    same timeout."""
    for known in _made:
        if known.world is dist.group.WORLD and known.timeout == timeout:
            return known
    _made[:] = [known for known in _made if known.world is dist.group.WORLD]
    _made.append(Channels(timeout))
    return _made[-1]


class Messenger:
    """One runtime's messages. home: the device of this rank's blocks."""

    def __init__(self, through: Channels, home: torch.device) -> None:
        self.channels = through
        self.home = home
        self.rank, self.size = through.rank, through.size
        self._open = True
        through.users += 1
        self._told: dict[tuple[str, int, int], bytes] = {}
        self._heard: dict[tuple[str, int, int], Any] = {}

    def close(self) -> None:
        """Ends the waiting thread with the last messenger of the process. The process groups stay, for the next
        runtime."""
        if self._open:
            self._open = False
            self.channels.users -= 1
            if not self.channels.users:
                self.channels.waiter.stop()

    # -- waiting ---------------------------------------------------------------------------------------------------

    def wait(self, works: Sequence[Any], what: str, seconds: float | None = None) -> None:
        """Waits until all have ended. Raises DistributedError, after which the channels count as broken."""
        limit = self.channels.timeout if seconds is None else seconds
        end = time.monotonic() + limit
        device = self.channels.device

        def job() -> None:
            for work in works:
                work.wait(timedelta(seconds=max(0.001, end - time.monotonic())))
            if device.type != "cpu":
                torch.get_device_module(device.type).current_stream(device).synchronize()

        try:
            self.channels.waiter.run(job, limit)
        except KeyboardInterrupt:
            self._break(f"{what} was interrupted")
            raise
        except Exception as error:
            raise self._break(f"{what}: {_first_line(error)}") from error

    def _break(self, why: str) -> DistributedError:
        self.channels.broken = self.channels.broken or why
        return DistributedError(f"rank {self.rank}, {why}")

    def check(self) -> None:
        """Raises DistributedError if the channels are broken."""
        if self.channels.broken:
            raise DistributedError(
                f"rank {self.rank}: the process group cannot be used any more ({self.channels.broken}); end all "
                "ranks, start them again and load a checkpoint"
            )

    # -- one to one ------------------------------------------------------------------------------------------------

    def send(self, hop: Hop, packet: Packet) -> tuple[_Sent, bool]:
        """Starts sending. Returns what `settle` is to be called with later, and whether the description had to
        travel."""
        forms = [None if t is None else form_of(t, self.home) for t in packet.tensors]
        parts = [
            pack(t, f)
            for t, f in zip(packet.tensors, forms, strict=True)
            if t is not None and f is not None and t.numel()
        ]
        try:
            text = pickle.dumps((forms, packet.about))
        except Exception as error:
            raise TensorTypeError(
                f"boundary {hop.block} holds an object that cannot travel to rank {hop.peer}: {error}. Between blocks "
                "of different ranks only tensors and picklable objects can stand"
            ) from error
        key = (hop.kind, hop.block, hop.peer)
        known = self._told.get(key) == text
        sent = self._start(hop, 0, b"" if known else text, parts, packet.rows, packet.weight)
        self._told[key] = text
        return sent, not known

    def send_failure(self, hop: Hop, failure: Failure) -> _Sent:
        """Sends a failure in place of a message that is owed."""
        return self._start(hop, 1, pickle.dumps(failure), [], 0, 0.0)

    def _start(self, hop: Hop, status: int, text: bytes, parts: list[torch.Tensor], rows: int, weight: float) -> _Sent:
        device = self.channels.device
        (bits,) = struct.unpack("<q", struct.pack("<d", weight))
        numbers = [_KINDS[hop.kind], hop.block, hop.micro, status, len(text), sum(p.numel() for p in parts), rows, bits]
        buffers = [torch.tensor(numbers, dtype=torch.int64, device=device)]
        if text:
            buffers.append(_bytes(text, device))
        buffers += [p if self.channels.carries(p.device) else p.cpu() for p in parts]
        group = self.channels.toward(self.rank, hop.peer)
        try:
            return _Sent([dist.isend(b, dst=hop.peer, group=group) for b in buffers], buffers)
        except Exception as error:
            raise self._break(f"action {hop}: rank {hop.peer} cannot be reached: {_first_line(error)}") from error

    def settle(self, sent: Sequence[_Sent], what: str, seconds: float | None = None) -> None:
        """Waits until the sends have been taken and frees their memory."""
        works = [work for one in sent for work in one.works]
        if works:
            self.wait(works, what, seconds)
        for one in sent:
            one.buffers.clear()

    def receive(self, hop: Hop) -> Packet:
        """Waits for a message. Raises PeerFailed if the peer sent its failure instead, DistributedError if nothing
        comes in time."""
        peer, device = hop.peer, self.channels.device
        group = self.channels.toward(peer, self.rank)
        what = f"action {hop} (boundary {hop.block}): waiting for rank {peer}"
        header = torch.empty(8, dtype=torch.int64, device=device)
        self._take([header], peer, group, what)
        numbers = header.tolist()
        try:
            return self._unpack(hop, numbers, group, what)
        except (PeerFailed, DistributedError):
            raise
        except Exception as error:
            # What follows the header has not been taken.
            raise self._break(f"{what}: {type(error).__name__}: {error}") from error

    def _unpack(self, hop: Hop, header: list[int], group: Any, what: str) -> Packet:
        code, block, micro, status, length, _, rows, bits = header
        peer, device = hop.peer, self.channels.device
        if (code, block, micro) != (_KINDS["X" + hop.kind[1]], hop.block, hop.micro):
            raise self._break(
                f"{what}: its message is number {code} of boundary {block}, microbatch {micro}; the ranks are out of "
                "step"
            )
        key = (hop.kind, block, peer)
        if length:
            text = torch.empty(length, dtype=torch.uint8, device=device)
            self._take([text], peer, group, what)
            told = pickle.loads(bytes(text.cpu().numpy()))
            if status:
                raise PeerFailed(told)
            self._heard[key] = told
        forms, about = self._heard[key]
        slots = [None if f is None else self._slot(f) for f in forms]
        self._take([s.buffer for s in slots if s is not None and s.buffer.numel()], peer, group, what)
        (weight,) = struct.unpack("<d", struct.pack("<q", bits))
        return Packet([None if s is None else s.tensor() for s in slots], about, rows, weight)

    def _slot(self, form: Any) -> Slot:
        device = self.home if form.home else torch.device("cpu")
        return Slot(form, device, staged=not self.channels.carries(device))

    def _take(self, buffers: list[torch.Tensor], peer: int, group: Any, what: str) -> None:
        if not buffers:
            return
        try:
            works = [dist.irecv(b, src=peer, group=group) for b in buffers]
        except Exception as error:
            raise self._break(f"{what}: {_first_line(error)}") from error
        self.wait(works, what)

    # -- all to all ------------------------------------------------------------------------------------------------

    def gather(self, value: Any, what: str) -> list[Any]:
        """Every rank's value, by rank. Every rank has to call it. Raises DistributedError."""
        self.check()
        data = pickle.dumps(value)
        head = struct.pack("<q", len(data))
        first = self._gather(head + data[: _SLOT - 8], _SLOT, what)
        lengths = [struct.unpack("<q", piece[:8])[0] for piece in first]
        if max(lengths) <= _SLOT - 8:
            return [pickle.loads(piece[8 : 8 + n]) for piece, n in zip(first, lengths, strict=True)]
        whole = self._gather(data, max(lengths), what)
        return [pickle.loads(piece[:n]) for piece, n in zip(whole, lengths, strict=True)]

    def _gather(self, data: bytes, size: int, what: str) -> list[bytes]:
        device = self.channels.device
        mine = _bytes(data.ljust(size, b"\0"), device)
        pieces = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(self.size)]
        try:
            work = dist.all_gather(pieces, mine, group=self.channels.up, async_op=True)
        except Exception as error:
            raise self._break(f"{what}: {_first_line(error)}") from error
        self.wait([work], what)
        return [bytes(piece.cpu().numpy()) for piece in pieces]


def _first_line(error: Exception) -> str:
    """What a backend says, without its source file and its advice."""
    line = str(error).partition("\n")[0]
    if line.startswith("["):
        line = line.partition("] ")[2] or line
    return line.partition(". This is typically")[0]


def _bytes(data: bytes, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
