"""The messages of a distributed schedule, rank by rank, worked out from the schedule before the first one is sent.

Note [What travels beside the schedule's own messages]
    A leaf that blocks on several ranks read is added up as on one process (Note [Shared leaves add up as plain adds
    them]): per microbatch the running sum goes from the rank of the later reader to that of the next earlier one (XS,
    YS), where it is an extra root of the next VJP; the rank of the earliest reader accumulates. XS stands behind the
    microbatch's XB and YS behind its YB, so that the messages between two ranks keep one order. At the end the totals
    go from the earliest reader's rank to the others (XT, YT).

Note [When a sent tensor is freed]
    A send returns at once, and its memory must stay until it has been taken. Asking would mean waiting, but the
    schedule knows: what a peer sends after it has taken a message proves that it has taken it. `proofs` lists for
    each receive which sends it proves.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Hop", "hops_of", "proofs"]

Action = tuple[str, int, int]


@dataclass(frozen=True)
class Hop:
    """One message as one rank sees it. kind: XF, YF, XB, YB, XS, YS, XT, YT; X sends, Y receives. block: the
    boundary's number, for XS to YT the block that reads the leaves at the other (X) or at this (Y) end. micro: -1 for
    totals."""

    kind: str
    block: int
    micro: int
    peer: int

    @property
    def sends(self) -> bool:
        return self.kind[0] == "X"

    def __str__(self) -> str:
        return f"{self.block}{self.kind}{'*' if self.micro < 0 else self.micro}"


def links(readers: Sequence[Sequence[int]], ranks: Sequence[int]) -> dict[tuple[int, int], list[int]]:
    """For each pair of ranks (from, to), the shared leaves (by number) whose running sum goes that way. `readers`:
    the blocks that read each leaf."""
    found: dict[tuple[int, int], list[int]] = {}
    for number, blocks in enumerate(readers):
        way = sorted({ranks[b] for b in blocks}, reverse=True)
        for source, target in itertools.pairwise(way):
            found.setdefault((source, target), []).append(number)
    return found


def totals(readers: Sequence[Sequence[int]], ranks: Sequence[int]) -> dict[tuple[int, int], list[int]]:
    """For each pair of ranks (from, to), the shared leaves whose total goes that way."""
    found: dict[tuple[int, int], list[int]] = {}
    for number, blocks in enumerate(readers):
        first, *others = sorted({ranks[b] for b in blocks})
        for other in others:
            found.setdefault((first, other), []).append(number)
    return found


def hops_of(rank: int, actions: Sequence[Action], ranks: Sequence[int], readers: Sequence[Sequence[int]]) -> list[Hop]:
    """The messages of one rank, in its order."""

    def reader(leaves: list[int], on: int) -> int:
        return min(b for b in readers[leaves[0]] if ranks[b] == on)

    sums = links(readers, ranks)
    out: list[Hop] = []
    for kind, b, m in actions:
        if kind == "XF":
            out.append(Hop(kind, b, m, ranks[b]))
        elif kind == "YF":
            out.append(Hop(kind, b, m, ranks[b - 1]))
        elif kind == "XB":
            out.append(Hop(kind, b, m, ranks[b - 1]))
            out += [Hop("XS", reader(n, to), m, to) for (source, to), n in sorted(sums.items()) if source == rank]
        elif kind == "YB":
            out.append(Hop(kind, b, m, ranks[b]))
            out += [Hop("YS", reader(n, rank), m, source) for (source, to), n in sorted(sums.items()) if to == rank]
    for (source, to), n in sorted(totals(readers, ranks).items()):
        if source == rank:
            out.append(Hop("XT", reader(n, to), -1, to))
        elif to == rank:
            out.append(Hop("YT", reader(n, rank), -1, source))
    return out


def proofs(rank: int, hops: Sequence[Sequence[Hop]]) -> dict[int, list[int]]:
    """For the place of each receive in `hops[rank]`, the places of the sends that it proves to have been taken."""
    mine = hops[rank]
    sent = {(h.kind[1], h.block, h.micro, h.peer): at for at, h in enumerate(mine) if h.sends}
    received = {(h.kind[1], h.block, h.micro, h.peer): at for at, h in enumerate(mine) if not h.sends}
    out: dict[int, list[int]] = {}
    for peer, theirs in enumerate(hops):
        taken: list[int] = []
        for h in theirs:
            if h.peer != rank:
                continue
            key = (h.kind[1], h.block, h.micro, peer)
            if not h.sends:
                taken.append(sent[key])
            elif taken:
                out.setdefault(received[key], []).extend(taken)
                taken = []
    return out
