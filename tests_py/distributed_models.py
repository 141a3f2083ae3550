"""The chains that the tests of the distributed scheduler train, their data, and the comparison with one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from eae_runtime._bits import same_bits
from models import Residual

WIDTH, WORDS = 8, 13


class Head(nn.Module):
    """Logits from a parameter that an embedding owns as well."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return F.linear(h, self.weight)


class Extra(nn.Module):
    """Reads the embedding's weight twice, in the middle of the chain."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(h)) + self.weight[0] * self.weight[1]


class Split(nn.Module):
    """A dictionary with a float tensor, a transposed one, an integer mask, a plain object and one tensor twice."""

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"h": x, "turned": (2 * x).t(), "mask": (x > 0).long(), "scale": 0.5, "again": x}


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, parts: dict[str, Any]) -> torch.Tensor:
        return self.inner(parts["h"] * parts["mask"] * parts["scale"] + parts["turned"].t() + parts["again"])


class Writes(nn.Module):
    """Starts to write its input in place from its `after`-th forward on."""

    def __init__(self, after: int = 0) -> None:
        super().__init__()
        self.after = after
        self.calls = 0

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return (h.mul_(2) if self.calls > self.after else h * 2) ** 2


def mlp() -> list[nn.Module]:
    return [
        nn.Linear(WIDTH, WIDTH),
        Residual(WIDTH),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()),
        Residual(WIDTH),
        nn.Linear(WIDTH, 3),
    ]


def language_model() -> list[nn.Module]:
    embedding = nn.Embedding(WORDS, WIDTH)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.1, batch_first=True)
    return [embedding, layer, Extra(embedding.weight), Residual(WIDTH), nn.LayerNorm(WIDTH), Head(embedding.weight)]


def norms() -> list[nn.Module]:
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)),
        Writes(),
        nn.Linear(WIDTH, 3),
    ]


def trees() -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH), Split(), Join(), Split(), Join()]


def frozen() -> list[nn.Module]:
    blocks = mlp()
    for block in blocks[:3]:
        block.requires_grad_(False)
    return blocks


MODELS: dict[str, Callable[[], list[nn.Module]]] = {
    "mlp": mlp,
    "language_model": language_model,
    "norms": norms,
    "trees": trees,
    "frozen": frozen,
}


def data(model: str, rows: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    if model == "language_model":
        x = torch.randint(0, WORDS, (rows, 5), generator=generator)
        return x, x.roll(1, 1)
    x = torch.randn(rows, WIDTH, generator=generator)
    return x, torch.randint(0, 3, (rows,), generator=generator)


def loss_fn(y: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y.flatten(0, -2), targets.flatten())


def build(model: str, seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*MODELS[model]())


def adam(blocks: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(blocks.parameters(), lr=0.05)


def differences(ours: list[nn.Module], theirs: nn.Sequential, own: list[int]) -> list[str]:
    """Names of this rank's parameters, gradients and buffers that are not bit for bit the oracle's."""
    wrong = []
    for i in own:
        other = {**dict(theirs[i].named_parameters()), **dict(theirs[i].named_buffers())}
        for name, tensor in (*ours[i].named_parameters(), *ours[i].named_buffers()):
            if not same_bits(tensor, other[name]):
                wrong.append(f"{i}.{name}")
            mine, their = getattr(tensor, "grad", None), getattr(other[name], "grad", None)
            if (mine is None) != (their is None) or (mine is not None and not same_bits(mine, their)):
                wrong.append(f"{i}.{name}.grad")
    return wrong
