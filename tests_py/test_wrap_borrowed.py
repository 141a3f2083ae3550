"""Blocks that run with tensors which are not theirs for long: functional_call, caches, graphs from outside, parts that
are replaced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from eae_runtime import EAERuntime, RuntimeConfig, wrap
from eae_runtime._autograd_driver import driver_of
from eae_runtime.errors import BlockError, RebuildMismatchError
from wrapped import IDS, Model, Row, assert_steps, pair


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.tanh(self.linear(x)))


def blocks() -> nn.Module:
    return Row(*[Block() for _ in range(4)])


def compare(
    make: Callable[[], nn.Module], step: Callable[[nn.Module], list[torch.Tensor]], steps: int = 8
) -> nn.Module:
    """The same steps on plain and wrapped; every tensor that a step returns, bit for bit. Returns the wrapped one."""
    plain, ours = pair(make)
    for number in range(steps):
        made = []
        for model in (plain, ours):
            torch.manual_seed(number)
            made.append([*step(model), torch.get_rng_state()])
        for a, b in zip(*made, strict=True):
            assert torch.equal(a, b), number
    return ours


@pytest.mark.parametrize("leaves", [True, False])
def test_functional_call(leaves: bool) -> None:
    """torch.func.functional_call puts other tensors in the parameters' places for one forward; the rebuild comes after
    it."""

    def step(model: nn.Module) -> list[torch.Tensor]:
        given = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
        used = given if leaves else {n: p * 1.5 for n, p in given.items()}
        output = torch.func.functional_call(model, used, (torch.randn(3, 6),))
        return [output.detach(), *torch.autograd.grad(output.square().sum(), list(given.values()))]

    ours = compare(blocks, step)
    driver = driver_of(ours)
    assert all((c.kept is None) == leaves for c in driver.calls)
    assert [c.rebuilds for c in driver.calls] == ([8] * 4 if leaves else [0] * 4)


def test_functional_call_keeps_no_old_parameters() -> None:
    ours = wrap(blocks())
    gone = []
    for _ in range(6):
        given = {n: p.detach().clone().requires_grad_() for n, p in ours.named_parameters()}
        torch.func.functional_call(ours, given, (torch.randn(3, 6),)).sum().backward()
        gone.append(torch.multiprocessing.reductions.StorageWeakRef(given["blocks.0.linear.weight"].untyped_storage()))
    del given
    assert sum(not ref.expired() for ref in gone) <= 1


def test_parametrizations_under_their_cache() -> None:
    def make() -> nn.Module:
        model = blocks()
        for block in model.blocks:
            parametrizations.weight_norm(block.linear)
        return model

    def step(model: nn.Module) -> list[torch.Tensor]:
        model.zero_grad()
        with parametrize.cached():
            (model(torch.randn(3, 6)) + model(torch.randn(3, 6))).square().sum().backward()
        model(torch.randn(3, 6)).sum().backward()
        return [p.grad for p in model.parameters()]

    compare(make, step)


def test_a_graph_from_outside() -> None:
    """An attribute that the model computes before its blocks run, with a graph that they share."""

    class Conditioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.condition = torch.zeros(())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(x)) * self.condition

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6))
            self.layers = nn.ModuleList([Conditioned() for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            condition = torch.sigmoid(self.weight)
            for layer in self.layers:
                layer.condition = condition
                x = layer(x)
            return x

    def step(model: nn.Module) -> list[torch.Tensor]:
        model.zero_grad()
        model(torch.randn(3, 6)).square().sum().backward()
        return [p.grad for p in model.parameters()]

    ours = compare(Outer, step)
    assert {c.kept for c in driver_of(ours).calls} == {"it reads a tensor that has a graph and is not its input"}


def test_a_submodule_replaced_between_forward_and_backward() -> None:
    plain, ours = pair(Model)
    assert_steps(plain, ours)
    for model in (plain, ours):
        output = model(IDS)
        model.layers[1].up = nn.Linear(8, 16)
        if model is plain:
            output.sum().backward()
        else:
            with pytest.raises(RebuildMismatchError, match=r"block 1 \(layers\.1\).*submodules were changed"):
                output.sum().backward()


def test_a_parameter_replaced_between_forward_and_backward() -> None:
    """Plain PyTorch goes back through the parameter that the forward used."""
    plain, ours = pair(blocks)
    for _ in range(5):
        grads = []
        for model in (plain, ours):
            torch.manual_seed(1)
            output = model(torch.randn(3, 6))
            old = model.blocks[1].linear.weight
            new = model.blocks[1].linear.weight = nn.Parameter(torch.ones(6, 6))
            output.square().sum().backward()
            assert new.grad is None and model.blocks[1].linear.weight is new
            grads.append(old.grad)
        assert torch.equal(*grads)


# -- the chain -------------------------------------------------------------------------------------------------------


def chain() -> nn.Sequential:
    return nn.Sequential(*[Block() for _ in range(3)])


def test_the_chain_refuses_the_cache_of_parametrizations() -> None:
    model = chain()
    with EAERuntime(model, None, RuntimeConfig()) as runtime, parametrize.cached():
        with pytest.raises(BlockError, match=r"parametrize\.cached"):
            runtime.train_step(torch.randn(3, 6), lambda y: y.sum())
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("what", ["parameter", "submodule"])
def test_parts_replaced_between_forward_and_backward(what: str) -> None:
    model = chain()
    with EAERuntime(model, None, RuntimeConfig()) as runtime:
        output = runtime.forward(torch.randn(3, 6))
        if what == "parameter":
            model[1].linear.weight = nn.Parameter(torch.ones(6, 6))
        else:
            model[1].linear = nn.Linear(6, 6)
        with pytest.raises(RebuildMismatchError, match="replaced between forward"):
            runtime.backward(output, lambda y: y.sum())
