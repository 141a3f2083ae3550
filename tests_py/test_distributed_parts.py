"""Parts of the distributed scheduler, without processes: random streams, tensors on their way, the plan of messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from eae_runtime import EAERuntime, RuntimeConfig
from eae_runtime._bits import same_bits
from eae_runtime._hops import hops_of, proofs
from eae_runtime._placement import place
from eae_runtime._program import parse_action
from eae_runtime._streams import stream_seed
from eae_runtime._wire import Slot, form_of, pack
from eae_runtime.schedulers import DistributedScheduler


class Draws(nn.Module):
    """Scales by fresh random numbers and writes them down."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.drawn: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(x.shape)
        self.drawn.append(noise)
        return x * noise * self.weight


def test_streams_depend_on_step_microbatch_and_block_alone() -> None:
    """The same numbers with blocks run in another order; other numbers in each place; the generator is left alone."""
    x, y = torch.ones(4, 3), torch.zeros(4, 3)

    def drawn(scheduler: str, targets: bool) -> list[list[torch.Tensor]]:
        blocks = [Draws(), Draws()]
        torch.manual_seed(3)
        config = RuntimeConfig(scheduler=scheduler, num_microbatches=2, random_streams=True)
        with EAERuntime(blocks, None, config) as runtime:
            before = torch.get_rng_state()
            for _ in range(2):
                if targets:
                    runtime.train_step(x, lambda out, t: (out - t).sum(), y)
                else:
                    runtime.train_step(x, lambda out: out.sum())
            assert same_bits(before, torch.get_rng_state())
        return [b.drawn for b in blocks]

    first, second = drawn("pipeline", True), drawn("pipeline", False)
    for a, b in zip(first, second):
        assert {t.numpy().tobytes() for t in a} == {t.numpy().tobytes() for t in b}
    distinct = {t.numpy().tobytes() for block in first for t in block}
    assert len(distinct) == 2 * 2 * 2  # steps, microbatches, blocks; a rebuild draws what its forward drew
    assert len({stream_seed(7, s, m, b) for s in range(5) for m in range(5) for b in range(5)}) == 125


def test_forward_moves_the_streams_on() -> None:
    block = Draws()
    with EAERuntime([block], None, RuntimeConfig(random_streams=True)) as runtime:
        runtime.forward(torch.ones(2, 3))
        runtime.forward(torch.ones(2, 3))
        assert runtime.steps == 2
        a, b = block.drawn[0], block.drawn[-1]
        assert not same_bits(a, b)
        runtime.steps = 0
        runtime.forward(torch.ones(2, 3))
        assert same_bits(block.drawn[-1], a)


# -- parts -------------------------------------------------------------------------------------------------------------

BASE = torch.arange(120.0).view(4, 6, 5)
TENSORS = {
    "dense": BASE,
    "transposed": BASE.transpose(0, 2),
    "with gaps": BASE[:, ::2],
    "shifted by 4 bytes": BASE.reshape(-1)[1:],
    "expanded": torch.randn(3, 1).expand(3, 4),
    "a repeated scalar": torch.tensor(2.0).expand(3, 4),
    "conjugate": torch.randn(3, 2, dtype=torch.complex64).conj().t(),
    "negative view": torch.randn(3, 2, dtype=torch.complex64).conj().imag,
    "empty": torch.zeros(0, 3),
    "empty, expanded": torch.zeros(3, 0).expand(2, 3, 0),
    "scalar": torch.tensor(5),
    "bool": torch.ones(3) == 1,
    "windows": BASE.unfold(1, 3, 1),
    "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "bfloat16": torch.randn(3).bfloat16(),
}


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_as_it_was_sent(name: str, staged: bool) -> None:
    tensor = TENSORS[name]
    form = form_of(tensor, torch.device("cpu"))
    slot = Slot(form, torch.device("cpu"), staged)
    data = pack(tensor, form)
    assert data.dtype == torch.uint8 and data.dim() == 1
    slot.buffer.copy_(data)
    arrived = slot.tensor()
    assert same_bits(arrived, tensor.resolve_conj().resolve_neg())
    assert arrived.stride() == tensor.stride()
    assert not tensor.numel() or arrived.data_ptr() % 64 == tensor.data_ptr() % 64


def test_a_sparse_tensor_cannot_travel() -> None:
    with pytest.raises(TypeError, match="cannot travel to another rank"):
        form_of(torch.eye(3).to_sparse(), torch.device("cpu"))


def rank_lists(world: int, blocks: int, micro: int, leaves: list[list[int]]) -> list[list[Any]]:
    placed = place(None, blocks, world)
    spec = {"blocks": [{} for _ in range(blocks)], "world": world, "microbatches": micro, "targets": True}
    lines = DistributedScheduler().schedule(spec).split("\n")
    lists = [[parse_action(t) for t in " ".join(lines[2 * r : 2 * r + 2]).split()] for r in range(world)]
    return [hops_of(r, actions, placed, leaves) for r, actions in enumerate(lists)]


@pytest.mark.parametrize(("world", "blocks", "micro"), [(2, 4, 3), (3, 5, 1), (4, 6, 7)])
@pytest.mark.parametrize("leaves", [[], [[0, 3]], [[0, 1, 3], [1, 3], [0, 2]]])
def test_messages_match_end_to_end(world: int, blocks: int, micro: int, leaves: list[list[int]]) -> None:
    """Between two ranks, in one direction, what is sent is what is received, in that order; and run side by side,
    every rank gets to its end with no send that is proven before its time."""
    hops = rank_lists(world, blocks, micro, leaves)
    for a in range(world):
        for b in range(world):
            sent = [(h.kind[1], h.block, h.micro) for h in hops[a] if h.sends and h.peer == b]
            taken = [(h.kind[1], h.block, h.micro) for h in hops[b] if not h.sends and h.peer == a]
            assert sent == taken
    proven = [proofs(r, hops) for r in range(world)]
    at = [0] * world
    queues: dict[tuple[int, int], list[int]] = {}
    received: set[tuple[int, int]] = set()  # sends, as (rank, place), that have been taken
    moved = True
    while moved:
        moved = False
        for r in range(world):
            while at[r] < len(hops[r]):
                hop = hops[r][at[r]]
                if hop.sends:
                    queues.setdefault((r, hop.peer), []).append(at[r])
                elif queues.get((hop.peer, r)):
                    received.add((hop.peer, queues[hop.peer, r].pop(0)))
                    assert all((r, send) in received for send in proven[r].get(at[r], ()))
                else:
                    break
                at[r] += 1
                moved = True
    assert at == [len(h) for h in hops]
    assert not any(queues.values())
    # In the steady state sends are let go while the step runs: a rank in the middle holds few at a time.
    if micro == 7:
        for r in range(world - 1):
            let_go = sum(len(sends) for sends in proven[r].values())
            assert let_go >= 6
