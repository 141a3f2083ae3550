"""One batch on its way through one rank's blocks: the actions that send and receive."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from . import _tree
from ._chain import Chain
from ._hops import Hop, links, totals
from ._p2p import Failure, Messenger, Packet, PeerFailed
from ._placement import SharedLeaf
from ._program import ALL
from ._streams import StreamedSweep
from .errors import DistributedError
from .events import EventType

if TYPE_CHECKING:
    from .runtime import EAERuntime

__all__ = ["DistributedSweep", "Shared"]

# Seconds for which a rank with a broken connection waits for the others to learn why.
_PARTING = 2.0


class Shared:
    """The leaves that several ranks share, and which of them travel to and from this rank."""

    def __init__(self, leaves: Sequence[SharedLeaf], ranks: Sequence[int], rank: int) -> None:
        readers = [leaf.blocks for leaf in leaves]
        self._leaves = leaves
        self._rank = rank
        self._sums, self._totals = links(readers, ranks), totals(readers, ranks)

    def of(self, hop: Hop) -> list[torch.Tensor]:
        """This rank's copies of the leaves that a message is about."""
        pairs = self._totals if hop.kind[1] == "T" else self._sums
        way = (self._rank, hop.peer) if hop.sends else (hop.peer, self._rank)
        found = [self._leaves[number].leaf for number in pairs[way]]
        return [leaf for leaf in found if leaf is not None]


class DistributedSweep(StreamedSweep):
    """A sweep over one rank's blocks. Call `exchange_totals` after the last action, and `end` in any case.

    hops, proven: this rank's messages in order, and which sends each receive proves.
    """

    def __init__(
        self,
        chain: Chain,
        inputs: Sequence[Any],
        *,
        parts: int,
        messenger: Messenger,
        shared: Shared,
        hops: list[Hop],
        proven: dict[int, list[int]],
        **options: Any,
    ) -> None:
        super().__init__(chain, inputs, **options)
        self.parts = parts
        self._messenger = messenger
        self._sharers = shared
        self._hops = hops
        self._proven = proven
        self._at = 0
        self._under_way: dict[int, Any] = {}
        if not inputs:
            self._given = [[] for _ in range(parts)]
        self._ops["XF"] = self._send_activation
        self._ops["YF"] = self._receive_activation
        self._ops["XB"] = self._send_adjoint
        self._ops["YB"] = self._receive_adjoint

    # -- messages --------------------------------------------------------------------------------------------------

    def _tell(self, kind: str, hop: Hop, nbytes: int, described: bool) -> None:
        self.chain.events.emit(
            kind,
            kind=hop.kind,
            block=hop.block,
            microbatch=hop.micro,
            rank=self._messenger.rank,
            peer=hop.peer,
            bytes=nbytes,
            described=described,
        )

    def _exchange(self, packet: Packet | None) -> Packet:
        """The next message: sends `packet`, or receives one."""
        hop = self._hops[self._at]
        events, trace = self.chain.events, self.chain.trace
        start = time.time_ns()
        if events.wants(EventType.COMMUNICATION_START):
            self._tell(EventType.COMMUNICATION_START, hop, 0 if packet is None else packet.nbytes(), False)
        described = False
        if packet is not None:
            self._under_way[self._at], described = self._messenger.send(hop, packet)
            self._at += 1
        else:
            try:
                packet = self._messenger.receive(hop)
            except PeerFailed:
                self._at += 1
                raise
            proven = [self._under_way.pop(at) for at in self._proven.get(self._at, ())]
            self._at += 1
            self._messenger.settle(proven, f"action {hop}: sends to rank {hop.peer}")
        if events.wants(EventType.COMMUNICATION_FINISH):
            self._tell(EventType.COMMUNICATION_FINISH, hop, packet.nbytes(), described)
        if trace is not None:
            trace.add(f"rank {self._messenger.rank}", str(hop), start, time.time_ns())
        return packet

    def _follows(self, kind: str, m: int) -> bool:
        return self._at < len(self._hops) and self._hops[self._at].kind == kind and self._hops[self._at].micro == m

    # -- activations -----------------------------------------------------------------------------------------------

    def _send_activation(self, b: int, m: int) -> None:
        tensors, shape, needs = self._now.pop(m)
        self._exchange(Packet(tensors, (shape, needs)))

    def _receive_activation(self, b: int, m: int) -> None:
        packet = self._exchange(None)
        shape, needs = packet.about
        tensors = [t for t in packet.tensors if t is not None]
        self._given[m] = [t.shape for t in tensors]
        self._now[m] = (tensors, shape, needs)

    # -- adjoints --------------------------------------------------------------------------------------------------

    def _send_adjoint(self, b: int, m: int) -> None:
        adjoints = self._adjoints.pop(m)
        metadata = {n: self._metadata[m, n] for n in range(len(adjoints)) if self._metadata.get((m, n))}
        rows = self._rows[m]
        self._stand_in(m, rows)
        weights = self._loss_fn.weights if self._loss_fn is not None else None
        self._exchange(Packet(adjoints, metadata, rows, weights[m] if weights is not None else float(self.parts == 1)))
        running = self.collector.running
        while self._follows("XS", m):
            self._exchange(Packet([running.pop(id(leaf), None) for leaf in self._sharers.of(self._hops[self._at])]))

    def _receive_adjoint(self, b: int, m: int) -> None:
        packet = self._exchange(None)
        self._adjoints[m] = list(packet.tensors)
        for n, metadata in packet.about.items():
            self._metadata[m, n] = dict(metadata)
        # What passes are told of the microbatch: the rows of the chain's output, which is elsewhere, and the weight.
        self._stand_in(m, packet.rows)
        assert self._loss_fn is not None and self._loss_fn.weights is not None
        self._loss_fn.weights[m] = packet.weight
        while self._follows("YS", m):
            leaves = self._sharers.of(self._hops[self._at])
            for leaf, total in zip(leaves, self._exchange(None).tensors, strict=True):
                if total is not None:
                    self.collector.running[id(leaf)] = total

    def _stand_in(self, m: int, rows: int) -> None:
        """What is left of a microbatch whose output is elsewhere."""
        self._rows[m] = rows
        self._now[m] = ([], _tree.SINGLE, (False,))

    # -- the end ---------------------------------------------------------------------------------------------------

    def exchange_totals(self) -> None:
        """Gives the totals of shared leaves from the rank that accumulated them to the others, whose post-accumulate
        hooks then fire once."""
        while self._at < len(self._hops):
            hop = self._hops[self._at]
            self.where = (hop.kind, hop.block, ALL)
            leaves = self._sharers.of(hop)
            if hop.sends:
                self._exchange(Packet([leaf.grad for leaf in leaves]))
                continue
            for leaf, total in zip(leaves, self._exchange(None).tensors, strict=True):
                if total is not None:
                    leaf.grad = total
                    for hook in list((getattr(leaf, "_post_accumulate_grad_hooks", None) or {}).values()):
                        hook(leaf)
        self.where = None

    def place(self, runtime: EAERuntime) -> str:
        """Where the sweep stands, for messages."""
        if self.where is None:
            return "the step, outside its actions"
        kind, b, m = self.where
        what = f"block {b}, {runtime.block_names[b]}" if b < len(runtime.block_names) else "the loss"
        return f"action {b}{kind}{'*' if m == ALL else m} ({what})"

    def end(self, failure: Failure | None) -> Failure | None:
        """Brings the connections to the state that they have after a whole step: waits for the sends, and after a
        failure sends it in place of all messages still owed and takes those still to come. Returns the failure, with
        `fatal` set if the connections are broken."""
        messenger, unreachable = self._messenger, set[int]()
        for at in range(self._at, len(self._hops)):
            hop = self._hops[at]
            if failure is None or hop.peer in unreachable:
                continue
            try:
                if hop.sends:
                    self._under_way[at] = messenger.send_failure(hop, failure)
                elif not failure.fatal:
                    messenger.receive(hop)
            except PeerFailed:
                continue
            except DistributedError:
                unreachable.add(hop.peer)
                failure = replace(failure, fatal=True)
        self._at = len(self._hops)
        if failure is None or not failure.fatal:
            messenger.settle(list(self._under_way.values()), "the end of the step: sends")
        else:
            self._part(failure)
        self._under_way.clear()
        return failure

    def _part(self, failure: Failure) -> None:
        """Gives those who can still be reached a moment to take what was sent to them."""
        end = time.monotonic() + _PARTING
        for at, sent in self._under_way.items():
            if self._hops[at].peer != failure.rank:
                with contextlib.suppress(DistributedError):
                    self._messenger.settle([sent], f"action {self._hops[at]}", max(0.01, end - time.monotonic()))
