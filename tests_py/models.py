"""Small chains that between them hold every kind of block that a boundary, a rebuild or a shared gradient may break."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


def square(y: Any) -> torch.Tensor:
    return (y * y).sum()


def mean_square(y: Any) -> torch.Tensor:
    return (y * y).mean()


def next_token(logits: torch.Tensor) -> torch.Tensor:
    labels = torch.arange(logits.shape[:-1].numel()) % logits.shape[-1]
    return F.cross_entropy(logits.flatten(0, -2), labels)


@dataclass(frozen=True)
class Case:
    """A chain with an input. `make` and `x` are called with the same seed and default dtype by the oracle and by ours.

    A model may have an attribute `loose`: {name: leaf} of trainable tensors that are not registered as parameters.
    """

    make: Callable[[], nn.Sequential]
    x: Callable[[], Any]
    loss: Callable[[Any], torch.Tensor] = square


class Fn(nn.Module):
    """A block from a function."""

    def __init__(self, fn: Callable[[Any], Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, value: Any) -> Any:
        return self.fn(value)


class Scale(nn.Module):
    """y = w * x, `times` times."""

    def __init__(self, w: nn.Parameter, times: int = 1) -> None:
        super().__init__()
        self.w = w
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = self.w * x
        return x


class Head(nn.Module):
    """Logits from an embedding's weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return F.linear(h, self.weight)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.silu(self.up(self.norm(x)))))


class Attention(nn.Module):
    def __init__(self, width: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, dropout=dropout, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], width: int) -> None:
        super().__init__()
        self.rnn = kind(width, width, num_layers=2, batch_first=True, dropout=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x)[0]


class Encode(nn.Module):
    """(source, target) -> (memory, state): what follows reads the memory as keys and values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(width, width)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        source, target = pair
        return torch.tanh(self.encoder(source)), target


class Decode(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.cross = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = nn.LayerNorm(width)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        memory, h = pair
        return memory, self.norm(h + self.cross(h, memory, memory)[0])


class Borrow(nn.Module):
    """Reads a parameter that another block owns and this one has not registered."""

    def __init__(self, owner: nn.Linear) -> None:
        super().__init__()
        self.owner = [owner]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.owner[0].weight)


class Counter(nn.Module):
    """Writes three buffers: one in place, one by a new tensor, one through `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("last", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.count.add_(1)
            self.average = 0.9 * self.average + 0.1 * x.mean(0)
            self.last.data.copy_(x[0])
        return x * (1 + 0.1 * self.count) + self.average + self.last


class Slope(nn.Module):
    """Differentiates inside its own forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            inner = x if x.requires_grad else x.detach().requires_grad_()
            energy = torch.tanh(self.linear(inner)).square().sum()
            (slope,) = torch.autograd.grad(energy, inner, create_graph=True)
        return slope + x


class Partly(nn.Module):
    """One parameter takes no part in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(6, 6)
        self.unused = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def chain(*blocks: Any) -> nn.Sequential:
    return nn.Sequential(*[b if isinstance(b, nn.Module) else Fn(b) for b in blocks])


def _cnn() -> nn.Sequential:
    return chain(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 3, 3, padding=1),
        nn.BatchNorm2d(3, momentum=None), nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(48, 5),
    )  # fmt: skip


def _transformer(training: bool) -> nn.Sequential:
    layers = [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=n) for n in (False, True)]
    return chain(nn.Linear(8, 8), *layers, nn.Linear(8, 3)).train(training)


def _tied_language_model() -> nn.Sequential:
    embedding = nn.Embedding(11, 8)
    return chain(embedding, Residual(8), Residual(8), Head(embedding.weight))


def _tied_everywhere() -> nn.Sequential:
    w = nn.Parameter(torch.tensor(3.0))
    return chain(Scale(w), Scale(w, 2), nn.Linear(6, 6), Scale(w, 3), nn.Tanh(), Scale(w))


def _same_module_twice() -> nn.Sequential:
    shared = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3))
    return chain(shared, nn.Tanh(), shared, nn.Linear(6, 6), shared)


def _borrowed() -> nn.Sequential:
    owner = nn.Linear(6, 6)
    return chain(nn.Linear(6, 6), Borrow(owner), nn.Tanh(), owner, Borrow(owner))


def _closure() -> nn.Sequential:
    s = torch.tensor(2.0, requires_grad=True)
    t = torch.ones(6, requires_grad=True)
    model = chain(lambda x: x * s, nn.Linear(6, 6), lambda x: torch.tanh(x * t) * s, nn.Linear(6, 2))
    model.loose = {"s": s, "t": t}
    return model


def _lora() -> nn.Sequential:
    a, b = torch.randn(2, 6, requires_grad=True), torch.randn(6, 2, requires_grad=True)
    first, second = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 6)
    for block in (first, second):
        block.register_forward_hook(lambda module, args, out: out + args[0] @ a.t() @ b.t())
    model = chain(nn.Flatten(), first, nn.GELU(), second)
    model.loose = {"a": a, "b": b}
    return model


def _frozen(*frozen: int) -> nn.Sequential:
    model = chain(nn.Linear(6, 6), nn.Dropout(0.2), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 2))
    for number in frozen:
        model[number].requires_grad_(False)
    return model


def _frozen_embedding() -> nn.Sequential:
    model = chain(nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 2))
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    return model


def _cross_attention() -> nn.Sequential:
    return chain(Encode(8), *[Decode(8) for _ in range(4)], lambda pair: pair[1], nn.Linear(8, 3))


def _broadcast() -> nn.Sequential:
    expand = lambda x: x[:, None, :].expand(-1, 3, -1)
    return chain(nn.Linear(6, 6), expand, nn.Linear(6, 6), lambda x: x.mean(1), nn.Linear(6, 2))


def _views() -> nn.Sequential:
    return chain(
        nn.Linear(6, 7), lambda x: x[:, 1:], nn.Linear(6, 6), lambda x: x.t(), lambda x: x.flip(0).t(),
        nn.Identity(), nn.Linear(6, 6), lambda x: x.unflatten(1, (2, 3)), nn.Flatten(),
    )  # fmt: skip


def _write_through_view() -> nn.Sequential:
    return chain(
        nn.Linear(6, 6), lambda h: h[:, :4], lambda h: h.mul_(2), lambda h: h**2, lambda h: F.relu_(h - 1),
        nn.Linear(4, 2),
    )  # fmt: skip


def _complex() -> nn.Sequential:
    dtype = torch.complex64 if torch.get_default_dtype() is torch.float32 else torch.complex128
    linear = lambda: nn.Linear(6, 6, dtype=dtype)
    return chain(linear(), lambda z: z.conj(), linear(), lambda z: z.conj().imag, nn.Linear(6, 2))


def _structured() -> nn.Sequential:
    return chain(
        nn.Linear(6, 6), lambda h: {"h": 2 * h, "aux": [3 * h, None], "flag": True, "mask": h.detach() > 0},
        lambda d: (d["h"] * d["mask"], d["aux"][0], d["mask"]), lambda t: (t[0], t[0] + t[1], t[1].detach()),
        nn.Identity(), lambda t: t[0] * t[1] + t[2],
    )  # fmt: skip


def _unused() -> nn.Sequential:
    two = nn.Linear(6, 12)
    return chain(Partly(), two, lambda h: h.chunk(2, 1), lambda pair: pair[0], nn.Linear(6, 2))


def _spectral() -> nn.Sequential:
    from torch.nn.utils.parametrizations import spectral_norm, weight_norm

    return chain(spectral_norm(nn.Linear(6, 6)), nn.Tanh(), weight_norm(nn.Linear(6, 6)), Counter(), nn.Linear(6, 2))


def _noise() -> nn.Sequential:
    return chain(lambda x: x * torch.randn_like(x), nn.Linear(6, 6), lambda x: x + torch.rand(()), nn.Dropout(0.5))


def _write() -> nn.Sequential:
    def block(h: torch.Tensor) -> torch.Tensor:
        h.mul_(2)
        return h**2

    return chain(nn.Linear(6, 6), lambda x: x * 1, block, nn.LayerNorm(6), nn.Identity(), block, nn.Linear(6, 2))


def rows(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(*shape)


def tokens(high: int, *shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randint(0, high, shape)


def _mlp() -> nn.Sequential:
    return chain(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 6), nn.LayerNorm(6))


CASES: dict[str, Case] = {
    "mlp": Case(_mlp, rows(4, 6), mean_square),
    "one block": Case(lambda: chain(nn.Linear(6, 2)), rows(4, 6)),
    "cnn": Case(_cnn, rows(3, 2, 6, 6)),
    "transformer": Case(lambda: _transformer(True), rows(2, 5, 8), mean_square),
    "transformer eval": Case(lambda: _transformer(False), rows(2, 5, 8), mean_square),
    "embedding": Case(lambda: chain(nn.Embedding(11, 6), Residual(6), nn.Linear(6, 11)), tokens(11, 2, 5), next_token),
    "tied language model": Case(_tied_language_model, tokens(11, 2, 5), next_token),
    "tied everywhere": Case(_tied_everywhere, rows(4, 6), mean_square),
    "same module twice": Case(_same_module_twice, rows(5, 6)),
    "attention": Case(lambda: chain(nn.Linear(8, 8), Attention(8), nn.Linear(8, 3)), rows(2, 5, 8)),
    "attention eval": Case(lambda: chain(nn.Linear(8, 8), Attention(8), nn.Linear(8, 3)).eval(), rows(2, 5, 8)),
    "lstm": Case(lambda: chain(nn.Linear(6, 6), Recurrent(nn.LSTM, 6), nn.Linear(6, 2)), rows(2, 5, 6)),
    "gru": Case(lambda: chain(Recurrent(nn.GRU, 6), nn.Linear(6, 2)), rows(2, 5, 6)),
    "residual": Case(lambda: chain(Residual(6), Residual(6), Residual(6)), rows(4, 6)),
    "cross attention": Case(_cross_attention, lambda: (torch.randn(2, 5, 8), torch.randn(2, 3, 8))),
    "frozen prefix": Case(lambda: _frozen(0, 2), rows(4, 6)),
    "frozen middle": Case(lambda: _frozen(2, 4), rows(4, 6)),
    "frozen suffix": Case(lambda: _frozen(4, 5), rows(4, 6)),
    "frozen embedding": Case(_frozen_embedding, tokens(11, 7)),
    "broadcast": Case(_broadcast, rows(4, 6)),
    "views": Case(_views, rows(4, 6)),
    "write": Case(_write, rows(4, 6), mean_square),
    "write through a view": Case(_write_through_view, rows(4, 6)),
    "closure": Case(_closure, rows(4, 6)),
    "adapters in hooks": Case(_lora, rows(4, 2, 3)),
    "borrowed": Case(_borrowed, rows(4, 6)),
    "noise": Case(_noise, rows(4, 6)),
    "structured": Case(_structured, rows(4, 6)),
    "unused": Case(_unused, rows(4, 6)),
    "buffers": Case(_spectral, rows(4, 6)),
    "differentiates inside": Case(lambda: chain(nn.Linear(6, 6), Slope(6), nn.Linear(6, 2)), rows(4, 6)),
    "sparse gradient": Case(lambda: chain(nn.Embedding(11, 6, sparse=True), nn.Linear(6, 2)), tokens(11, 7)),
    "complex": Case(_complex, lambda: torch.complex(torch.randn(4, 6), torch.randn(4, 6)), mean_square),
}
