"""Small models for `wrap`, and how they are compared with plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from eae_runtime import RuntimeConfig, wrap
from models import Fn
from oracle import assert_same, plain_step


class Layer(nn.Module):
    """A pre-norm layer with a side input, a flag and a factor."""

    def __init__(self, width: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, side: torch.Tensor | None = None, *, scale: float = 1.0) -> torch.Tensor:
        h = self.norm(x)
        if side is not None:
            h = h + side * torch.sigmoid(side)
        return x + self.dropout(self.down(F.gelu(self.up(h)))) * scale


class Model(nn.Module):
    """Embedding, layers in a list, code between them, a head."""

    def __init__(self, width: int = 8, layers: int = 4, layer: Callable[[int], nn.Module] = Layer) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.side = nn.Linear(width, width)
        self.layers = nn.ModuleList([layer(width) for _ in range(layers)])
        self.head = nn.Linear(width, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        side = torch.tanh(self.side(x))
        for number, layer in enumerate(self.layers):
            x = layer(x, side if number % 2 else None, scale=0.5)
            if number == 1:
                x = x * 1.5
        return self.head(x)


class Row(nn.Module):
    """Blocks in a row, from functions or modules, with nothing between them."""

    def __init__(self, *blocks: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([b if isinstance(b, nn.Module) else Fn(b) for b in blocks])

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


IDS = torch.arange(15).remainder(11).reshape(3, 5)


def cross(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), IDS.flatten())


def pair(make: Callable[[], nn.Module] = Model, config: RuntimeConfig | None = None, **more: Any) -> Any:
    """The same model twice, the second one wrapped."""
    torch.manual_seed(0)
    plain = make()
    return plain, wrap(copy.deepcopy(plain), config, **more)


def assert_steps(plain: nn.Module, ours: nn.Module, x: Any = IDS, loss: Any = cross, steps: int = 4) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        expected = plain_step(plain, x, loss)
        torch.manual_seed(step)
        assert_same(plain_step(ours, x, loss), expected, step)


def grads(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def same_grads(a: nn.Module, b: nn.Module) -> None:
    one, two = grads(a), grads(b)
    assert {n for n, g in one.items() if g is None} == {n for n, g in two.items() if g is None}
    assert [n for n, g in one.items() if g is not None and not torch.equal(g, two[n])] == []
