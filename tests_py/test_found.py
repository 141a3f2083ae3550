"""Blocks whose use of their leaves changes after the runtime has learnt them, against plain backward, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from eae_runtime import EAEError, EAERuntime


class Switched(nn.Module):
    """A linear layer that is skipped while `use` is off, and multiplied by `leaf` where there is one."""

    def __init__(self, use: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.use = use
        self.leaf: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) if self.use else x
        return y * self.leaf[0] if self.leaf else y


def test_a_first_block_that_was_skipped_gets_its_gradient_when_it_is_used():
    torch.manual_seed(0)
    model = nn.Sequential(Switched(), nn.Linear(3, 3), nn.Linear(3, 3))
    x = torch.randn(4, 3)
    with EAERuntime(model) as runtime:
        for used in (True, False, False, True, True, False, True):
            model[0].use = used
            model.zero_grad()
            model(x).square().sum().backward()
            want = [p.grad for p in model.parameters()]
            model.zero_grad()
            runtime.train_step(x, lambda y: y.square().sum())
            for p, grad in zip(model.parameters(), want, strict=True):
                assert (p.grad is None) == (grad is None)
                assert grad is None or torch.equal(p.grad, grad)


def test_a_leaf_that_is_read_late_is_among_the_collected_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(Switched(), nn.Linear(3, 3), Switched(), nn.Linear(3, 3))
    leaf = torch.full((3,), 2.0, requires_grad=True)
    x = torch.randn(4, 3)
    with EAERuntime(model) as runtime:
        for step in range(7):
            if step == 4:
                model[0].leaf = model[2].leaf = [leaf]
            wanted = [*model.parameters(), *([leaf] if step >= 4 else [])]
            want = torch.autograd.grad(model(x).square().sum(), wanted)
            _, grads = runtime.compute_gradients(x, lambda y: y.square().sum())
            assert len(grads) == len(wanted)
            assert all(torch.equal(grads[t], grad) for t, grad in zip(wanted, want, strict=True))


def test_inference_mode_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    with EAERuntime(model) as runtime:
        with torch.inference_mode(), pytest.raises(EAEError, match="inference_mode"):
            runtime.train_step(torch.ones(2, 3), torch.sum)
        with torch.no_grad():
            assert runtime.train_step(torch.ones(2, 3), torch.sum) != 0.0
