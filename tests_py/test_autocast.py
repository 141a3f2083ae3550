"""Autocast: a rebuild stands in the region that its forward stood in, whoever runs it, wherever."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from eae_runtime import EAERuntime, RuntimeConfig
from models import chain
from oracle import Outcome, assert_same, clear, kept, plain_step, state_of

pytestmark = pytest.mark.filterwarnings("error")

# A block is learnt in its first step, compared in its second, and may run without a graph from the third on.
STEPS = 4


def mixed() -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    return chain(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)), torch.randn(5, 8)


def bfloat16() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def autocast_plain() -> Outcome:
    model, x = mixed()
    with bfloat16():
        output = model(x)
    loss = output.float().square().mean()
    loss.backward()
    return Outcome(kept(loss), torch.get_rng_state(), outputs=[kept(output)], **state_of(model))


def in_thread(fn: Callable[[], Any]) -> Any:
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(fn()))
    thread.start()
    thread.join()
    return result[0]


@pytest.mark.parametrize("threaded", [False, True], ids=["here", "on another thread"])
def test_autocast_replays(threaded: bool, config: RuntimeConfig) -> None:
    """The region is around the forward alone; the rebuild stands in it again, in whichever thread."""
    plain = autocast_plain()
    model, x = mixed()
    with EAERuntime(model, config=config) as runtime:
        for step in range(STEPS):
            clear(model)
            with bfloat16():
                output = runtime.forward(x)
            back = lambda output=output: runtime.backward(output, lambda y: y.float().square().mean())
            loss, grads = in_thread(back) if threaded else back()
            runtime.apply_gradients(grads)
            assert output.dtype is torch.bfloat16 and model[0].weight.grad.dtype is torch.float32
            ours = Outcome(kept(loss), torch.get_rng_state(), outputs=[kept(output)], **state_of(model))
            assert_same(ours, plain, step)


def test_autocast_around_the_whole_step(config: RuntimeConfig) -> None:
    theirs, x = mixed()
    with bfloat16():
        loss_fn = lambda y: y.float().square().mean()
        plain = plain_step(theirs, x, loss_fn)
    model, x = mixed()
    with EAERuntime(model, config=config) as runtime:
        for step in range(STEPS):
            clear(model)
            with bfloat16():
                assert runtime.train_step(x, loss_fn) == plain.loss.item()
            assert_same(Outcome(plain.loss, plain.random, outputs=plain.outputs, **state_of(model)), plain, step)


def test_autocast_on_and_off_between_steps(config: RuntimeConfig) -> None:
    with_it, without = autocast_plain(), plain_step(*mixed(), lambda y: y.float().square().mean())
    model, x = mixed()
    with EAERuntime(model, config=config) as runtime:
        for step in range(2 * STEPS):
            clear(model)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=step % 2 == 0):
                output = runtime.forward(x)
            _, grads = runtime.backward(output, lambda y: y.float().square().mean())
            runtime.apply_gradients(grads)
            expected = (with_it if step % 2 == 0 else without).grads
            assert all(torch.equal(p.grad, expected[n]) for n, p in model.named_parameters()), step


def test_autocast_weight_cache(config: RuntimeConfig) -> None:
    """A forward without gradients leaves casts of the weights in the cache that lead nowhere; in one region with it,
    the rebuild still reaches the weights."""
    theirs, x = mixed()
    loss_fn = lambda y: y.float().square().mean()
    with bfloat16():
        plain = plain_step(theirs, x, loss_fn)
    model, x = mixed()
    with EAERuntime(model, config=config) as runtime:
        for step in range(STEPS):
            clear(model)
            with bfloat16():
                with torch.no_grad():
                    model(x)
                    output = runtime.forward(x)
                    model(x)
                    _, grads = runtime.backward(output, loss_fn)
                runtime.apply_gradients(grads)
            assert all(p.grad is not None for p in model.parameters())
            assert all(torch.equal(p.grad, plain.grads[n]) for n, p in model.named_parameters()), step


def test_an_input_that_is_used_more_than_once_is_cast_at_each_use() -> None:
    """As in plain PyTorch, where a boundary is no leaf: the gradients of the uses add up in float32."""

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.q(x) * self.k(x) * self.v(x)).float() + x

    torch.manual_seed(0)
    plain = nn.Sequential(nn.LayerNorm(8), Three(), Three(), nn.LayerNorm(8))
    ours = copy.deepcopy(plain)
    x = torch.randn(5, 8)
    with EAERuntime(ours) as runtime:
        for step in range(4):
            plain.zero_grad()
            ours.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = plain(x).square().mean()
                assert runtime.train_step(x, lambda y: y.square().mean()) == loss.item()
            loss.backward()
            for p, q in zip(plain.parameters(), ours.parameters()):
                assert torch.equal(p.grad, q.grad), step
