"""What each of two processes does in the DDP test. Started with spawn, so it stands in a module of its own."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from eae_runtime import wrap
from eae_runtime._bits import same_bits
from models import Attention, Recurrent, Residual


class Net(nn.Module):
    """A shared block, a block that is never used, and two of which each rank uses another one now and then."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2))
        self.shared = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        self.between = Residual(8)
        self.unused = nn.Linear(8, 8)
        self.left = nn.Linear(8, 8)
        self.right = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
        self.rows = Recurrent(nn.LSTM, 8)
        self.attention = Attention(8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        x = self.between(self.shared(self.first(x)))
        x = (self.left if left else self.right)(self.shared(x))
        return self.last(self.attention(self.rows(x.unflatten(0, (2, -1)))))


def names(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n.removeprefix("module."): p for n, p in model.named_parameters()}


def compare(ours: nn.Module, plain: nn.Module, where: Any) -> int:
    """Gradients, parameters and buffers, bit for bit. Returns how many parameters have no gradient."""
    mine, theirs = names(ours), names(plain)
    assert mine.keys() == theirs.keys()
    for name, parameter in theirs.items():
        assert same_bits(mine[name], parameter), (where, name)
        assert (mine[name].grad is None) == (parameter.grad is None), (where, name)
        if parameter.grad is not None:
            assert same_bits(mine[name].grad, parameter.grad), (where, name, "grad")
    for a, b in zip(ours.buffers(), plain.buffers(), strict=True):
        assert same_bits(a, b), (where, "buffer")
    return sum(p.grad is None for p in theirs.values())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> torch.Tensor:
    """Two accumulated parts, the first without communication in every third step; then an update."""
    torch.manual_seed(1000 * number + rank)
    parts = [torch.randn(4, 6) for _ in range(1 + (number % 3 == 0))]
    losses = []
    for i, x in enumerate(parts):
        # Ranks take the same branch, then each another one.
        left = number % 2 == 0 or rank == 0
        last = i == len(parts) - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = model(x, left).square().mean()
            loss.backward()
        losses.append(loss.detach().clone())
    return torch.stack(losses)


def work(rank: int, folder: str, bucket_view: bool) -> None:
    """One process: six steps of both models; leaves a file when all of them have agreed."""
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        nets = []
        for driven in (True, False):
            net = DistributedDataParallel(
                wrap(Net(), blocks=["*"]) if driven else Net(),
                find_unused_parameters=True,
                gradient_as_bucket_view=bucket_view,
                bucket_cap_mb=1,
            )
            nets.append((net, torch.optim.SGD(net.parameters(), lr=0.05)))
        for number in range(6):
            results = []
            for net, optimizer in nets:
                optimizer.zero_grad()
                results.append((step(net, optimizer, rank, number), torch.get_rng_state()))
            (ours, ours_random), (plain, plain_random) = results
            assert same_bits(ours, plain), (number, "loss")
            assert same_bits(ours_random, plain_random), (number, "random state")
            without = compare(nets[0][0], nets[1][0], (rank, number))
            # The weight and bias of `unused`, and in even steps of `right` too.
            assert without == (4 if number % 2 == 0 else 2), (number, without)
            for _, optimizer in nets:
                optimizer.step()
            compare(nets[0][0], nets[1][0], (rank, number, "updated"))
        total = torch.stack([p.detach().double().sum() for p in nets[0][0].parameters()])
        both = [torch.empty_like(total) for _ in range(2)]
        dist.all_gather(both, total)
        assert same_bits(both[0], both[1])
        Path(folder, f"done{rank}").touch()
    finally:
        dist.destroy_process_group()
    # All is compared and closed: a thread that torch leaves joinable in its teardown must not decide the exit code.
    os._exit(0)
