"""What a block under `wrap` may look like: structures, arguments, state, generators, hooks."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from counting import Counted, forwards
from eae_runtime import unwrap, wrap
from eae_runtime._autograd_driver import driver_of
from wrapped import IDS, Model, Row, assert_steps, cross, pair, same_grads

# -- what a block may look like --------------------------------------------------------------------------------------


@dataclasses.dataclass
class State:
    h: torch.Tensor
    aux: dict[str, list[torch.Tensor]]


class Named(NamedTuple):
    h: torch.Tensor
    count: int


class Carrier:
    def __init__(self, h: torch.Tensor) -> None:
        self.h = h


STRUCTURES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "dataclass": (lambda x: State(2 * x, {"a": [3 * x]}), lambda s: s.h + s.aux["a"][0]),
    "named tuple": (lambda x: Named(2 * x, 3), lambda n: n.h * n.count),
    "plain object": (lambda x: Carrier(2 * x), lambda c: c.h * 3),
    "dictionary": (lambda x: {"h": 2 * x, "none": None, "flag": True}, lambda d: d["h"] * (2 if d["flag"] else 3)),
    "one-tuple": (lambda x: (2 * x,), lambda t: t[0] * len(t)),
    "same tensor twice": (lambda x: [h := 2 * x, h], lambda t: t[0] * t[1]),
    "integers and booleans": (
        lambda x: (x * 2, (x > 0), x.detach(), torch.arange(4)),
        lambda t: t[0] * t[1] + t[2] + t[3],
    ),
    "double": (lambda x: x.double(), lambda x: (x * x).float()),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_between_blocks(name: str) -> None:
    first, second = STRUCTURES[name]
    weight = nn.Linear(4, 4)
    plain, ours = pair(lambda: Row(weight, first, second, nn.Linear(4, 2)), blocks=["blocks.*"])
    seen: list[type] = []
    ours.blocks[2].register_forward_pre_hook(lambda m, args: seen.append(type(args[0])))
    x = torch.ones(3, 4)
    assert_steps(plain, ours, x, lambda y: y.square().sum())
    assert set(seen) == {type(first(x))}


def test_gradient_through_a_dataclass() -> None:
    ours = wrap(
        Row(lambda x: State(2 * x, {"a": [3 * x]}), lambda s: s.h.sum() + s.aux["a"][0].sum()), blocks=["blocks.*"]
    )
    x = torch.ones(4, requires_grad=True)
    ours(x).backward()
    assert torch.equal(x.grad, torch.full((4,), 5.0))


def test_which_outputs_require_grad() -> None:
    ours = wrap(Row(lambda x: (x * 2, x.long(), (x * 2).detach(), x > 0), lambda t: t), blocks=["blocks.0"])
    out = ours(torch.ones(3, requires_grad=True))
    assert [t.requires_grad for t in out] == [True, False, False, False]


def test_arguments_arrive_unchanged() -> None:
    seen: list[Any] = []

    class Any_(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x, nothing, *rest, flag, scale, mask, one):
            seen.append((nothing, rest, flag, scale, mask.tolist(), type(one), len(one)))
            return x * self.w * scale * mask + one[0]

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Any_(), Any_()])

        def forward(self, x):
            for block in self.blocks:
                x = block(x, None, 7, "s", flag=True, scale=0.5, mask=torch.tensor([1, 0, 1]), one=(x * 2,))
            return x

    plain, ours = pair(Caller)
    assert_steps(plain, ours, torch.ones(2, 3), lambda y: y.square().sum())
    assert set(map(repr, seen)) == {repr((None, (7, "s"), True, 0.5, [1, 0, 1], tuple, 1))}


def test_a_block_that_writes_its_input_keeps_its_graph() -> None:
    """The outer tensor changes too, as in plain PyTorch: a skip connection reads it afterwards."""

    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.blocks = nn.ModuleList([nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)) for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = block(x) + x
            return x

    plain, ours = pair(Skip, blocks=["blocks.*"])
    assert_steps(plain, ours, torch.randn(3, 4), lambda y: y.square().sum())
    assert {c.kept for c in driver_of(ours).calls} == {"it writes its input in place"}


def test_identity_then_a_write() -> None:
    plain, ours = pair(
        lambda: Row(nn.Linear(4, 4), nn.Identity(), nn.ReLU(inplace=True), nn.Linear(4, 2)), blocks=["blocks.*"]
    )
    assert_steps(plain, ours, torch.randn(3, 4), lambda y: y.square().sum())
    assert [c.kept is None for c in driver_of(ours).calls] == [True, False, False, True]


def test_frozen_parts_run_once() -> None:
    torch.manual_seed(0)
    ours = Row(*[Counted(nn.Linear(4, 4)) for _ in range(4)])
    for block in ours.blocks[:2]:
        block.requires_grad_(False)
    wrap(ours)
    for step in range(4):
        forwards(ours.blocks)
        ours(torch.ones(2, 4)).sum().backward()
        assert forwards(ours.blocks) == ([1, 1, 3, 3] if step == 1 else [1, 1, 2, 2])
    assert all(p.grad is None for p in ours.blocks[0].parameters())


def test_an_encoders_output_in_four_decoders() -> None:
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.k, self.v, self.q = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
            return x + F.scaled_dot_product_attention(self.q(x), self.k(memory), self.v(memory) * memory)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(6, 6)
            self.layers = nn.ModuleList([Cross() for _ in range(4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            memory = torch.tanh(self.encoder(x))
            for layer in self.layers:
                x = layer(x, memory)
            return x

    plain, ours = pair(Both)
    assert_steps(plain, ours, torch.randn(2, 5, 6), lambda y: y.square().sum(), steps=5)


def test_tied_and_borrowed_weights() -> None:
    class Twice(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(F.linear(torch.tanh(F.linear(x, self.weight)), self.weight)) * self.weight.mean()

    def make() -> Row:
        weight = nn.Parameter(torch.randn(5, 5))
        return Row(*[Twice(weight) for _ in range(4)])

    plain, ours = pair(make)
    assert_steps(plain, ours, torch.randn(3, 5), lambda y: y.square().sum(), steps=5)


class Uses(nn.Module):
    """Uses its input three times."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(self.norm(x))) * x + 0.3 * x


class Around(nn.Module):
    """Code around the blocks uses what they take: before them, after them, and in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList([Uses(6) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.first(x)
        x = x + self.layers[0](x)
        early = torch.sin(x)
        y = self.layers[1](x)
        y += x
        skip = y
        y = self.layers[2](y) * early
        return self.layers[3](y) + skip, y


def test_code_around_the_blocks_uses_what_they_take() -> None:
    """Each use adds up where plain PyTorch adds it; what is handed out is used outside too."""
    plain, ours = pair(Around)
    loss = lambda pair: pair[0].square().sum() + torch.exp(pair[1]).sum() + pair[0].sum()
    assert_steps(plain, ours, torch.randn(4, 6), loss, steps=5)
    for model in (plain, ours):
        model.zero_grad()
        torch.manual_seed(1)
        x = torch.randn(4, 6)
        (loss(model(x)) + 2 * loss(model(x + 1))).backward()
    same_grads(ours, plain)
    # Alone, without the whole model's forward.
    for model in (plain, ours):
        model.zero_grad()
        x = torch.ones(4, 6, requires_grad=True)
        (model.layers[0](x) + x * model.layers[1](x)).sum().backward()
        model.seen = x.grad
    assert torch.equal(plain.seen, ours.seen)
    same_grads(ours, plain)


def test_the_same_module_twice() -> None:
    class Again(Model):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            for layer in (self.layers[0], self.layers[1], self.layers[0], self.layers[1]):
                x = layer(x)
            return self.head(x)

    plain, ours = pair(Again)
    assert_steps(plain, ours)


def test_parameters_that_are_not_used_have_no_gradient() -> None:
    class Router(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])

        def forward(self, x: torch.Tensor, side: Any = None, *, scale: float = 1.0) -> torch.Tensor:
            return x + self.experts[int(x.detach().sum().abs() * 100) % 3](x)

    plain, ours = pair(lambda: Model(layer=Router), blocks=["layers.*"])
    for step in range(12):
        ids = (IDS + step) % 11
        for model in (plain, ours):
            model.zero_grad()
            cross(model(ids)).backward()
        same_grads(ours, plain)


def test_a_compiled_block() -> None:
    torch.manual_seed(0)
    plain = Model(layers=2)
    ours = copy.deepcopy(plain)
    for model in (plain, ours):
        model.layers[0] = torch.compile(model.layers[0], backend="aot_eager")
        model.layers[1].compile(backend="aot_eager")
    wrap(ours, blocks=["layers.*"])
    for step in range(3):
        for model in (plain, ours):
            model.zero_grad()
            torch.manual_seed(step)
            cross(model(IDS)).backward()
        same_grads(ours, plain)
    assert all(c.rebuilds == 3 and c.kept is None for c in driver_of(ours).calls)
    unwrap(ours)
    assert list(ours.state_dict()) == list(plain.state_dict())


# -- state that must not move twice --------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Draws from everything that a host has."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.torch_generator = torch.Generator().manual_seed(1)
        self.numpy_generator = np.random.default_rng(2)
        self.python_generator = random.Random(3)

    def forward(self, x: torch.Tensor, side: Any = None, *, scale: float = 1.0) -> torch.Tensor:
        draws = [
            random.random(),
            float(np.random.randn()),
            torch.rand(1, generator=self.torch_generator).item(),
            self.numpy_generator.random(),
            self.python_generator.random(),
        ]
        return torch.tanh(self.linear(x)) * x * sum(draws) + torch.rand_like(x)


def test_generators_of_all_kinds() -> None:
    plain, ours = pair(lambda: Model(layer=Noisy))
    for step in range(5):
        ends = []
        for model in (plain, ours):
            model.zero_grad()
            torch.manual_seed(step)
            random.seed(step)
            np.random.seed(step)
            cross(model(IDS)).backward()
            states = [m.torch_generator.get_state().tolist() for m in model.layers]
            states += [m.numpy_generator.bit_generator.state for m in model.layers]
            states += [m.python_generator.getstate() for m in model.layers]
            ends.append((torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state()), states))
        same_grads(ours, plain)
        assert ends[0] == ends[1], step


class Stateful(nn.Module):
    """Changes a buffer, a plain tensor, a number, a list, a dictionary and a frozen parameter, and reads them all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("ema", torch.zeros(width))
        self.register_buffer("large", torch.zeros(200, 100))
        self.teacher = nn.Parameter(torch.ones(width), requires_grad=False)
        self.plain = torch.zeros(width)
        self.calls = 0
        self.history: list[float] = []
        self.cache: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor, side: Any = None, *, scale: float = 1.0) -> torch.Tensor:
        with torch.no_grad():
            mean = x.detach().mean((0, 1))
            self.ema.lerp_(mean, 0.1)
            self.large[0, : len(mean)] += mean
            self.teacher.lerp_(mean, 0.3)
            self.plain = self.plain + mean
            self.cache["last"] = mean * self.calls
        self.calls += 1
        self.history.append(self.calls * 0.5)
        factor = self.ema + self.large[0, : x.shape[-1]] + self.teacher + self.plain + self.cache["last"]
        return torch.tanh(self.linear(x)) * x * factor * sum(self.history) * self.calls


def test_state_of_all_kinds() -> None:
    plain, ours = pair(lambda: Model(layer=Stateful, layers=3))
    for step in range(5):
        for model in (plain, ours):
            model.zero_grad()
            cross(model(IDS)).backward()
        same_grads(ours, plain)
        for a, b in zip(plain.layers, ours.layers):
            assert (a.calls, a.history) == (b.calls, b.history) == (step + 1, [0.5 * (k + 1) for k in range(step + 1)])
            for name in ("ema", "large", "teacher", "plain"):
                assert torch.equal(getattr(a, name), getattr(b, name)), (step, name)
            assert torch.equal(a.cache["last"], b.cache["last"])


# -- hooks -----------------------------------------------------------------------------------------------------------


def put_hooks(model: nn.Module, log: list[Any]) -> None:
    def backward(what: str) -> Callable[..., None]:
        return lambda m, grads, *_: log.append((what, [g.clone() for g in grads if g is not None]))

    layer = model.layers[1]
    for module, name in ((layer, "layer"), (layer.up, "up")):
        module.register_forward_pre_hook(lambda m, args, name=name: log.append((name + " pre", [args[0].clone()])))
        module.register_forward_hook(lambda m, args, out, name=name: log.append((name + " out", [out.clone()])))
        module.register_full_backward_hook(backward(name + " backward"))
        module.register_full_backward_pre_hook(backward(name + " backward pre"))
    layer.down.register_forward_hook(lambda m, args, out: out * 1.25)
    layer.norm.register_forward_pre_hook(lambda m, args: (args[0] * 0.5,))
    for name, p in model.named_parameters():
        p.register_hook(lambda g, name=name: log.append((name + " hook", [g.clone()])))
        p.register_post_accumulate_grad_hook(lambda p, name=name: log.append((name + " post", [p.grad.clone()])))


def test_hooks_fire_as_often_as_in_plain() -> None:
    """Also those within a block; one that takes part in the computation (it returns a value) runs again."""
    plain, ours = pair()
    logs: list[list[Any]] = [[], []]
    for model, log in zip((plain, ours), logs):
        put_hooks(model, log)
    for step in range(4):
        for model, log in zip((plain, ours), logs):
            log.clear()
            model.zero_grad()
            torch.manual_seed(step)
            cross(model(IDS)).backward()
        same_grads(ours, plain)
        theirs, mine = [sorted(log, key=lambda entry: entry[0]) for log in logs]
        assert [n for n, _ in mine] == [n for n, _ in theirs]
        for (name, a), (_, b) in zip(mine, theirs):
            assert all(map(torch.equal, a, b)), (step, name)


def test_a_hook_that_only_switches_requires_grad() -> None:
    """What Hugging Face's enable_input_require_grads does: the embedding's output starts to require grad."""

    def switch(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        out.requires_grad_(True)

    plain, ours = pair()
    for model in (plain, ours):
        model.embed.requires_grad_(False)
        model.side.requires_grad_(False)
        for layer in model.layers[:2]:
            layer.requires_grad_(False)
        model.layers[0].norm.register_forward_hook(switch)
    for model in (plain, ours):
        torch.manual_seed(1)
        cross(model(IDS)).backward()
    same_grads(ours, plain)


def test_older_norms_that_set_the_weight_in_a_hook() -> None:
    def make() -> nn.Module:
        model = Model(layers=2)
        for layer in model.layers:
            torch.nn.utils.spectral_norm(layer.up)
            torch.nn.utils.weight_norm(layer.down)
        return model

    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    ours = wrap(make())
    assert_steps(plain, ours, steps=5)


def test_a_hook_on_a_tensor_inside() -> None:

    def tell(log: list[torch.Tensor], module: nn.Module, args: Any, out: torch.Tensor) -> None:
        out.register_hook(lambda g: log.append(g.clone()))

    plain, ours = pair()
    logs: list[list[torch.Tensor]] = [[], []]
    for model, log in zip((plain, ours), logs):
        model.layers[2].up.register_forward_hook(partial(tell, log))
    for step in range(4):
        for model in (plain, ours):
            torch.manual_seed(step)
            cross(model(IDS)).backward()
    assert len(logs[0]) == len(logs[1]) == 4 and all(map(torch.equal, *logs))
