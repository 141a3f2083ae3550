"""What each rank does in the tests of failures; see distributed_checks.py."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any, ClassVar

import torch
from torch import nn

from distributed_models import WIDTH, Writes, adam, data, differences, loss_fn
from eae_runtime import EAERuntime, RuntimeConfig
from eae_runtime._bits import same_bits
from eae_runtime.adjoint import AdjointState
from eae_runtime.passes import EAEPass


class Trap(nn.Module):
    """Raises where it is told to: "forward", "rebuild" or "vjp", once armed."""

    # Runs before it does. Not an attribute of the instance: that would be state, which a rebuild does not move.
    skip: ClassVar[list[int]] = [0]

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3))
        self.armed = ""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if self.armed == "forward" and self.skip[0] == 0:
            raise ValueError("the trap was sprung")
        self.skip[0] -= self.armed == "forward"
        y = self.inner(h)
        if self.armed == "vjp" and y.requires_grad:
            y.register_hook(self.spring)
        return y

    def spring(self, grad: torch.Tensor) -> None:
        raise ValueError("the trap was sprung")


class TrapPass(EAEPass):
    name = "trap"
    armed = False

    def process(self, adjoint: AdjointState, context: dict[str, Any] | None = None) -> AdjointState:
        if self.armed and context is not None and context["microbatch"] == 1:
            raise ValueError("the trap was sprung")
        return adjoint


def failing(rank: int, world: int, bad: int, where: str) -> dict[str, Any]:
    """Two good steps, one in which rank `bad` fails at `where`, two good ones. Compared with four good steps alone."""
    x, y = data("mlp", 9)

    def make() -> nn.Sequential:
        torch.manual_seed(2)
        return nn.Sequential(*[Trap() for _ in range(world)], nn.Linear(WIDTH, 3))

    placed = [*range(world), world - 1]
    alone = make()
    base: dict[str, Any] = {"num_microbatches": 3, "seed": 7}
    oracle = EAERuntime(alone, adam(alone), RuntimeConfig(scheduler="pipeline", random_streams=True, **base))
    expected = [oracle.train_step(x, loss_fn, y) for _ in range(4)]
    oracle.close()

    model, trap = make(), TrapPass()
    torch.manual_seed(7)
    config = RuntimeConfig(
        scheduler="distributed", block_ranks=placed, timeout=30, passes=[trap] if where == "pass" else [], **base
    )
    runtime = EAERuntime(model, adam(model), config)
    losses = [runtime.train_step(x, loss_fn, y) for _ in range(2)]
    before = {k: v.clone() for k, v in model.state_dict().items()}
    grads = {n: p.grad for n, p in model.named_parameters()}
    random = torch.get_rng_state()
    if rank == bad:
        trap.armed = True
        if where not in ("pass", "loss", "targets"):
            model[rank].armed = where
            Trap.skip[0] = 1
    fn = loss_fn
    if rank == bad and where == "loss":

        def fn(out: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            raise ValueError("the trap was sprung")

    error: BaseException | None = None
    try:
        runtime.train_step(x, fn, y[:4] if rank == bad and where == "targets" else y)
    except Exception as raised:
        error = raised
    after = model.state_dict()
    undone = (
        all(same_bits(before[k], after[k]) for k in before)
        and all(p.grad is grads[n] for n, p in model.named_parameters())
        and same_bits(random, torch.get_rng_state())
        and len(runtime.boundary_store) == 0
    )
    trap.armed = False
    for block in model[:-1]:
        block.armed = ""
    losses += [runtime.train_step(x, loss_fn, y) for _ in range(2)]
    runtime.close()
    return {
        "error": type(error).__name__,
        "text": str(error),
        "notes": list(getattr(error, "__notes__", [])),
        "undone": undone,
        "losses": losses,
        "expected": expected,
        "wrong": differences(runtime.blocks, alone, runtime._ranks.own),
    }


def restarts(rank: int, world: int) -> dict[str, Any]:
    """A block on the last rank starts to write its input in the third step: the step is repeated on all ranks."""

    def make(after: int) -> nn.Sequential:
        torch.manual_seed(2)
        return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(world)], Writes(after), nn.Linear(WIDTH, 3))

    x, y = data("mlp", 8)
    alone = make(10**6)
    oracle = EAERuntime(
        alone, adam(alone), RuntimeConfig(scheduler="pipeline", num_microbatches=2, random_streams=True)
    )
    expected = [oracle.train_step(x, loss_fn, y) for _ in range(6)]
    oracle.close()
    model = make(11)
    placed = [*range(world), world - 1, world - 1]
    runtime = EAERuntime(
        model, adam(model), RuntimeConfig(scheduler="distributed", block_ranks=placed, num_microbatches=2, timeout=30)
    )
    losses = [runtime.train_step(x, loss_fn, y) for _ in range(6)]
    runtime.close()
    return {
        "losses": losses,
        "expected": expected,
        "wrong": differences(runtime.blocks, alone, runtime._ranks.own),
        "sweeps": runtime._sweeps,
    }


class Slow(nn.Module):
    """Ends or stops its process in the n-th forward (what a rebuild counts is undone)."""

    def __init__(self, how: str, at: int) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.how, self.at, self.calls = how, at, 0

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.at:
            if self.how == "die":
                os._exit(7)
            time.sleep(1000)
        return self.inner(h)


def losing(rank: int, world: int, how: str, timeout: float) -> dict[str, Any]:
    """The last rank dies or hangs in the second step. What the others see, and how long after it."""
    torch.manual_seed(2)
    x, y = data("mlp", 8)
    model = nn.Sequential(
        *[nn.Linear(WIDTH, WIDTH) for _ in range(world - 1)],
        Slow(how, 4 if rank == world - 1 else -1),
        nn.Linear(WIDTH, 3),
    )
    runtime = EAERuntime(
        model,
        adam(model),
        RuntimeConfig(
            scheduler="distributed", block_ranks=[*range(world), world - 1], num_microbatches=2, timeout=timeout
        ),
    )
    runtime.train_step(x, loss_fn, y)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    texts = []
    began = time.monotonic()
    for _ in range(2):
        try:
            runtime.train_step(x, loss_fn, y)
            texts.append("")
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}")
    took = time.monotonic() - began
    undone = all(same_bits(before[k], v) for k, v in model.state_dict().items())
    runtime.close()
    return {"texts": texts, "undone": undone, "seconds": took}


def waiting(rank: int, world: int) -> dict[str, Any]:
    """Rank 0 waits for an adjoint while the last rank sleeps; SIGINT is sent to rank 0 from outside by itself."""
    torch.manual_seed(2)
    x, y = data("mlp", 8)
    model = nn.Sequential(
        *[nn.Linear(WIDTH, WIDTH) for _ in range(world - 1)],
        Slow("hang", 1 if rank == world - 1 else -1),
        nn.Linear(WIDTH, 3),
    )
    runtime = EAERuntime(
        model, None, RuntimeConfig(scheduler="distributed", block_ranks=[*range(world), world - 1], timeout=60)
    )
    sent = 0.0

    def interrupt() -> None:
        nonlocal sent
        time.sleep(1.0)
        sent = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    try:
        runtime.train_step(x, loss_fn, y)
    except KeyboardInterrupt:
        came = time.monotonic()
        runtime.close()
        return {"interrupted": True, "seconds": came - sent, "closing": time.monotonic() - came}
    return {"interrupted": False}
