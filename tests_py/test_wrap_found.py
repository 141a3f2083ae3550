"""Faults that were found by trying to break `wrap`: the smallest model of each, against plain PyTorch bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from eae_runtime import EAERuntime, RuntimeConfig, wrap
from eae_runtime.errors import BlockError, RebuildMismatchError
from models import chain


class Block(nn.Module):
    """A linear layer with a switch that training code turns."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.on = False
        self.register_buffer("scale", torch.ones(()))
        self.ema = torch.zeros(8)

    def forward(self, x: torch.Tensor) -> Any:
        return torch.tanh(self.a(x))


class Net(nn.Module):
    """Four blocks with code between them."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.join(x, layer)
        return self.head(x)

    def join(self, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        return layer(x)


Step = Callable[[nn.Module, int], Any]


def ordinary(model: nn.Module, _: int) -> Any:
    model(torch.randn(5, 8)).square().mean().backward()


def late(model: nn.Module, step: int) -> Any:
    """One layer does something new from the fifth step on."""
    model.layers[2].on = step >= 4
    return ordinary(model, step)


def all_late(model: nn.Module, step: int) -> Any:
    for layer in model.layers:
        layer.on = step >= 4
    return ordinary(model, step)


def same_steps(make: Callable[[], nn.Module], take: Step, steps: int = 8) -> None:
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    ours = wrap(make())
    for step in range(steps):
        made = []
        for model in (plain, ours):
            model.zero_grad()
            torch.manual_seed(step)
            found = take(model, step)
            made.append((found, [None if p.grad is None else p.grad.clone() for p in model.parameters()]))
            made[-1][1].append(torch.rand(1))
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p -= 0.1 * p.grad
        assert made[0][0] == made[1][0], step
        for a, b in zip(made[0][1], made[1][1], strict=True):
            assert (a is None) == (b is None) and (a is None or torch.equal(a, b)), step


class Noisy(Block):
    def forward(self, x: torch.Tensor) -> Any:
        h = torch.tanh(self.a(x))
        if h.requires_grad:
            h.register_hook(lambda g: g + torch.randn_like(g))
        return h


class Pair(Block):
    def forward(self, x: torch.Tensor) -> Any:
        h = torch.tanh(self.a(x)) + 0
        return h, h[:, :2]


class Writes(Net):
    def join(self, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        h, part = layer(x)
        h.mul_(2)
        return h + part.sum()


class Iterates(Block):
    def forward(self, x: torch.Tensor, skips: Any = ()) -> Any:
        h = torch.tanh(self.a(x))
        for skip in skips:
            h = h + skip
        return h


class Gives(Net):
    def join(self, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        return layer(x, (t for t in (x, x.sin())))


class Swaps(Block):
    def forward(self, x: torch.Tensor) -> Any:
        h = torch.tanh(self.a(x))
        z = h.detach().sum(1)
        return (z, h) if self.on else (h, z)


class Chooses(Net):
    def join(self, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        return next(t for t in layer(x) if t.dim() == 2)


class Averages(Block):
    def forward(self, x: torch.Tensor) -> Any:
        h = torch.tanh(self.a(x))
        if self.on:
            self.ema = self.ema * 0.9 + h.detach().mean(0)
            h = h * (1 + self.ema)
        return h


class Modes(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return torch.tanh(self.a(x)) * (2.0 if self.on and torch.is_grad_enabled() else 1.0)


class Draws(Block):
    def forward(self, x: torch.Tensor) -> Any:
        h = torch.tanh(self.a(x))
        return h * torch.rand(1) if self.on else h


class More(Block):
    def forward(self, x: torch.Tensor) -> Any:
        h = torch.tanh(self.a(x))
        return (h, h.mean()) if self.on else (h,)


class First(Net):
    def join(self, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        return sum(t for t in layer(x))


class HooksInput(Block):
    def forward(self, x: torch.Tensor) -> Any:
        if x.requires_grad:
            x.register_hook(lambda g: g * 0.5)
        return x + torch.tanh(self.a(x))


class Residual(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return x + torch.tanh(self.a(x).sin() + x)


class SkipsLate(Net):
    def join(self, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        return layer(x) + (x * 0.5 if layer.on else 0)


class Loops(Block):
    def forward(self, x: torch.Tensor, times: int = 1) -> Any:
        for _ in range(times):
            x = x + torch.tanh(self.a(x))
        return x


class Counts(Net):
    def join(self, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        return 0.2 * layer(x, 4 if layer.on else 2) + 0.1 * self.head(x).mean()


def collects(model: nn.Module, _: int) -> None:
    got: list[torch.Tensor] = []
    handles = [layer.register_forward_hook(lambda m, a, out: got.append(out)) for layer in model.layers]
    out = model(torch.randn(5, 8))
    for handle in handles:
        handle.remove()
    (out.square().mean() + sum(h.sin().mean() for h in got)).backward()


def freezes(model: nn.Module, step: int) -> None:
    """Frozen, or unfrozen, between forward and backward."""
    model.layers.requires_grad_(step % 2 == 0)
    loss = model(torch.randn(5, 8, requires_grad=True)).square().mean()
    model.layers.requires_grad_(step % 2 == 1)
    loss.backward()
    model.layers.requires_grad_(True)


@pytest.mark.parametrize(
    ("make", "take"),
    [
        (lambda: Net(Noisy), ordinary),
        (lambda: Writes(Pair), ordinary),
        (lambda: Gives(Iterates), ordinary),
        (lambda: Chooses(Swaps), all_late),
        (lambda: Net(Averages), late),
        (lambda: Net(Modes), late),
        (lambda: Net(Draws), late),
        (lambda: First(More), late),
        (lambda: Net(HooksInput), ordinary),
        (lambda: Net(Residual), collects),
        (lambda: SkipsLate(Residual), late),
        (lambda: SkipsLate(Residual), all_late),
        (lambda: Counts(Loops), all_late),
        (lambda: Net(Block), freezes),
    ],
    ids=[
        "draws in a backward",
        "outputs that share memory",
        "an iterator",
        "outputs change places",
        "an attribute becomes state",
        "begins to ask for the grad mode",
        "begins to draw",
        "another number of outputs",
        "hooks its input",
        "outputs collected by hooks",
        "a skip in one place",
        "a skip in all",
        "more loops",
        "frozen in between",
    ],
)
def test_found(make: Callable[[], nn.Module], take: Step) -> None:
    same_steps(make, take)


@pytest.mark.parametrize("tier", ["device", "host"])
def test_draws_in_a_backward_of_a_chain(tier: str) -> None:
    x = torch.randn(5, 8)
    torch.manual_seed(0)
    plain = chain(*[Noisy() for _ in range(4)])
    torch.manual_seed(0)
    ours = chain(*[Noisy() for _ in range(4)])
    with EAERuntime(ours, config=RuntimeConfig(boundary_tier=tier)) as runtime:
        for step in range(4):
            plain.zero_grad()
            ours.zero_grad()
            torch.manual_seed(step)
            plain(x).square().mean().backward()
            state = torch.get_rng_state()
            torch.manual_seed(step)
            runtime.train_step(x, lambda y: y.square().mean())
            assert torch.equal(torch.get_rng_state(), state), step
            for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
                assert torch.equal(p.grad, q.grad), step


def test_a_buffer_changed_between_forward_and_backward() -> None:
    class Scaled(Block):
        def forward(self, x: torch.Tensor) -> Any:
            return torch.tanh(self.a(x) * (self.scale * 1.0))

    model = wrap(Net(Scaled))
    for _ in range(4):
        ordinary(model, 0)
    loss = model(torch.randn(5, 8)).sum()
    model.layers[2].scale.mul_(0.9)
    with pytest.raises(RebuildMismatchError, match=r"block 2 \(layers.2\): buffer 'scale' was changed in place"):
        loss.backward()


def test_inputs_that_share_memory_and_are_written() -> None:
    def pair(x: torch.Tensor) -> Any:
        h = torch.tanh(x) + 0
        return h, h[:, :2]

    def writes(both: Any) -> torch.Tensor:
        return both[0].mul_(2) + both[1].sum()

    model = chain(nn.Linear(8, 8), pair, writes, nn.Linear(8, 2))
    with EAERuntime(model) as runtime, pytest.raises(BlockError, match="shares memory with another of its inputs"):
        runtime.train_step(torch.randn(5, 8), torch.sum)
