"""Boundaries that share memory, and gradients that are views of each other: each with passes behind it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from eae_runtime import AdjointState, EAERuntime, RuntimeConfig
from eae_runtime.passes import EAEPass, RegularizationPass
from models import chain
from oracle import Named, clear, kept, nothing_left, plain_step, state_of

pytestmark = pytest.mark.filterwarnings("error")

STEPS = 3


@pytest.fixture(params=["device", "host", "disk"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    with nothing_left():
        yield {"boundary_tier": request.param, "disk_dir": tmp_path}


def negative_view(x: torch.Tensor) -> torch.Tensor:
    view = torch.complex(x, 2 * x).conj().imag
    assert view.is_neg()
    return view


def shifted(x: torch.Tensor) -> torch.Tensor:
    """A tensor that begins 4 bytes behind its memory's start."""
    return torch.nn.functional.pad(x.flatten(), (1, 0))[1:].unflatten(0, x.shape)


ALIASES = {
    "flatten": nn.Flatten(),
    "identity": nn.Identity(),
    "residual": lambda x: x + torch.tanh(x),
    "residual of nothing": lambda x: x + x,
    "broadcast": lambda x: x[:, None].expand(-1, 3, -1),
    "broadcast back": lambda x: x.unsqueeze(1).expand(-1, 3, -1).sum(1),
    "transpose": lambda x: x.t().contiguous().t(),
    "part": lambda x: x[1:],
    "negative view": negative_view,
    "4-byte offset": shifted,
    "twice": lambda x: (x, x),
    "overlapping": lambda x: (x[:, :4], x[:, 2:]),
}


def end(value: Any) -> torch.Tensor:
    """One tensor from whatever the alias gave."""
    return torch.cat([v.flatten(1) for v in value], 1) if isinstance(value, tuple) else value


def make(name: str) -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    return chain(nn.Linear(6, 6), ALIASES[name], nn.Identity(), end, nn.Tanh()), torch.randn(4, 6)


def run(model: nn.Sequential, x: torch.Tensor, passes: list[Any], settings: dict[str, Any]) -> list[Named]:
    found = []
    with EAERuntime(model, config=RuntimeConfig(passes=passes, **settings)) as runtime:
        for _ in range(STEPS):
            clear(model)
            runtime.train_step(x, lambda y: (y * y).sum())
            found.append(state_of(model)["grads"])
    return found


every_alias = pytest.mark.parametrize("name", ALIASES)


class Keep(EAEPass):
    """Changes nothing, and remembers what it saw."""

    name = "Keep"

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def process(self, adjoint: AdjointState, context: Any = None) -> AdjointState:
        self.seen.append(kept(adjoint.tensor))
        return adjoint.clone()


@every_alias
def test_passes_that_change_nothing(name: str, settings: dict[str, Any]) -> None:
    """Bitwise plain's, with Go passes that do nothing, with Python passes, with none."""
    model, x = make(name)
    plain = plain_step(model, x, lambda y: (y * y).sum())
    for passes in ([], [Keep()], [RegularizationPass(0.0), Keep()]):
        for grads in run(model, x, passes, settings):
            assert all(torch.equal(grads[n], plain.grads[n]) for n in plain.grads), passes


class Half(torch.autograd.Function):
    """The identity, whose gradient is halved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 0.5


class HalfAt(EAEPass):
    """Halves the adjoint of some boundaries, in new memory."""

    name = "HalfAt"

    def __init__(self, boundaries: set[int]) -> None:
        self.boundaries = boundaries

    def process(self, adjoint: AdjointState, context: Any = None) -> AdjointState:
        new = adjoint.clone()
        if adjoint.layer_id in self.boundaries:
            new.tensor = adjoint.tensor * 0.5
        return new


def plain_halved(name: str, boundaries: set[int]) -> Named:
    """Plain backward with the gradient halved at those boundaries, in each tensor."""
    model, value = make(name)
    for i, block in enumerate(model, 1):
        value = block(value)
        if i in boundaries:
            several = isinstance(value, tuple)
            # A tensor that stands at two places is one tensor of the boundary.
            made = {id(v): Half.apply(v) for v in (value if several else (value,))}
            value = tuple(made[id(v)] for v in value) if several else made[id(value)]
    (value * value).sum().backward()
    return state_of(model)["grads"]


@every_alias
@pytest.mark.parametrize("boundary", [1, 2, 3, 4, 5])
def test_a_pass_changes_only_its_own_adjoint(name: str, boundary: int, settings: dict[str, Any]) -> None:
    expected = plain_halved(name, {boundary})
    for grads in run(*make(name), [HalfAt({boundary})], settings):
        assert all(torch.equal(grads[n], expected[n]) for n in expected)


@every_alias
def test_a_go_pass_at_every_boundary(name: str, settings: dict[str, Any]) -> None:
    """Halved at 1 to 5 (at 0 too, behind which nothing is): five times in all, exactly, in place or not."""
    expected = plain_halved(name, {1, 2, 3, 4, 5})
    for grads in run(*make(name), [RegularizationPass(0.5)], settings):
        assert all(torch.equal(grads[n], expected[n]) for n in expected)


def test_a_pass_does_not_write_the_loss_functions_own_memory(settings: dict[str, Any]) -> None:
    """The adjoint of a sum is an expanded scalar, that of a product the other factor: both stay as they are."""
    weight = torch.arange(24.0).reshape(4, 6)
    model, x = chain(nn.Linear(6, 6), nn.Identity()), torch.ones(4, 6)
    with EAERuntime(model, config=RuntimeConfig(passes=[RegularizationPass(0.5)], **settings)) as runtime:
        for _ in range(STEPS):
            runtime.train_step(x, lambda y: (y * weight).sum())
            runtime.train_step(x, torch.sum)
    assert torch.equal(weight, torch.arange(24.0).reshape(4, 6)) and torch.equal(x, torch.ones(4, 6))


def test_the_input_may_alias_anything(settings: dict[str, Any]) -> None:
    """An expanded, a shifted and a negative input, and two that share memory."""
    base = torch.randn(8, 6)
    model = chain(lambda v: end(v)[:, :6], nn.Linear(6, 6), nn.Tanh())
    inputs = [
        base[:1].expand(4, 6),
        base.flatten()[1:25].unflatten(0, (4, 6)),
        negative_view(base[:4]),
        (base[:4], base[2:6]),
    ]
    before = kept(base)
    for x in inputs:
        plain = plain_step(model, x, torch.sum)
        with EAERuntime(model, config=RuntimeConfig(**settings)) as runtime:
            for _ in range(STEPS):
                clear(model)
                runtime.train_step(x, torch.sum)
                assert all(torch.equal(p.grad, plain.grads[n]) for n, p in model.named_parameters())
    assert torch.equal(base, before)
