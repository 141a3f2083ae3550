"""A small world in which anything can be made to fail, and the comparison of all of its state before and after."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from eae_runtime import AdjointState, EAERuntime, Event, RuntimeConfig
from eae_runtime._bits import same_bits
from eae_runtime.passes import EAEPass, GaussianNoisePass
from models import Counter, Head, chain
from oracle import kept


class Planned(Exception):
    """The fault that a test has asked for."""


@dataclass
class Trap:
    """Counts the calls of `spring` by name, and raises at the n-th one of `what`."""

    what: str = ""
    nth: int = 0
    error: type[BaseException] = Planned
    counts: dict[str, int] = field(default_factory=dict)
    # Whether it was raised where gradients were off.
    without_grad: bool = False

    def set(self, what: str, nth: int, error: type[BaseException] = Planned) -> None:
        self.what, self.nth, self.error, self.counts = what, nth, error, {}

    def spring(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1
        if what == self.what and self.counts[what] == self.nth:
            self.without_grad = not torch.is_grad_enabled()
            raise self.error(f"{what} {self.nth}")


class TrapPass(EAEPass):
    name = "TrapPass"
    stateful = True

    def __init__(self, trap: Trap) -> None:
        self.trap = trap
        self.calls = 0

    def process(self, adjoint: AdjointState, context: Any = None) -> AdjointState:
        self.calls += 1
        self.trap.spring("pass")
        return adjoint.clone()

    def state(self) -> int:
        return self.calls

    def load_state(self, state: int) -> None:
        self.calls = state


class Trapped(nn.Module):
    def __init__(self, inner: nn.Module, trap: Trap) -> None:
        super().__init__()
        self.inner = inner
        self.trap = trap

    def forward(self, value: Any) -> Any:
        made = self.inner(value)
        self.trap.spring("block")
        return made


class World:
    """Five blocks with buffers, draws and tied weights; Adam, two stateful passes; a trap everywhere."""

    def __init__(self, **settings: Any) -> None:
        torch.manual_seed(0)
        self.trap = Trap()
        linear = nn.Linear(6, 6)
        inner = [nn.BatchNorm1d(6), nn.Dropout(0.3), linear, Counter(), Head(linear.weight)]
        self.model = nn.Sequential(*[Trapped(block, self.trap) for block in inner])
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        passes = [GaussianNoisePass(0.01, seed=1), TrapPass(self.trap)]
        self.runtime = EAERuntime(self.model, self.optimizer, RuntimeConfig(passes=passes, **settings))
        self.runtime.event_bus.subscribe("*", self._hear)
        for parameter in self.model.parameters():
            parameter.register_hook(lambda grad: self.trap.spring("tensor hook"))
            parameter.register_post_accumulate_grad_hook(lambda p: self.trap.spring("gradient hook"))
        self.steps = 0

    def _hear(self, event: Event) -> None:
        self.trap.spring("subscriber")
        if event.type == "TrainStepFinished":
            self.trap.spring("last subscriber")

    def loss(self, y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.trap.spring("loss")
        return ((y - target) ** 2).mean()

    def step(self) -> float:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(self.steps))
        value = self.runtime.train_step(x, self.loss, targets=torch.ones(4, 6))
        self.steps += 1
        return value

    def set_grads(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 3.0)

    def state(self) -> dict[str, Any]:
        """Everything that a step may change, copied."""
        found: dict[str, Any] = {"random": torch.get_rng_state(), "passes": self.runtime.pipeline.state()}
        for name, parameter in self.model.named_parameters():
            found[f"{name} value"] = kept(parameter)
            found[f"{name} grad"] = None if parameter.grad is None else kept(parameter.grad)
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{name} optimizer {key}"] = kept(value)
        found.update({f"{name} buffer": kept(buffer) for name, buffer in self.model.named_buffers()})
        return found


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """The names of what differs by a bit."""
    tensors = lambda x, y: isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
    same = lambda x, y: same_bits(x, y) if tensors(x, y) else (type(x) is type(y) and x == y)
    return sorted(n for n in a.keys() | b.keys() if n not in a or n not in b or not same(a[n], b[n]))


@contextlib.contextmanager
def untouched(runtime: EAERuntime, state: Callable[[], dict[str, Any]]) -> Iterator[None]:
    """Fails if the body leaves anything changed, or more boundaries stored."""
    before, stored = state(), len(runtime.boundary_store)
    yield
    assert differences(before, state()) == []
    assert len(runtime.boundary_store) in (0, stored)


def module_state(model: nn.Module) -> Callable[[], dict[str, Any]]:
    """The same for any model: values, gradients, buffers and the generator."""

    def state() -> dict[str, Any]:
        found: dict[str, Any] = {"random": torch.get_rng_state()}
        for name, parameter in model.named_parameters():
            found[name] = kept(parameter)
            found[f"{name} grad"] = None if parameter.grad is None else kept(parameter.grad)
        found.update({f"{name} buffer": kept(buffer) for name, buffer in model.named_buffers()})
        return found

    return state


def small() -> nn.Sequential:
    """Three blocks with a buffer, a draw and a parameter that has a gradient."""
    model = chain(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model
