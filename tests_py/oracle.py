"""The oracle: the same chain and seed with plain `loss.backward()`; all that a step leaves is compared bit for bit."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from eae_runtime import _bridge
from eae_runtime._bits import same_bits
from models import Case

Named = dict[str, torch.Tensor]


def leaves(model: nn.Module) -> Named:
    """Every trainable leaf by name: parameters (a shared one under its first name) and loose tensors."""
    return {**dict(model.named_parameters()), **getattr(model, "loose", {})}


def kept(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor to compare with later."""
    tensor = tensor.detach()
    return tensor.to_dense() if tensor.is_sparse else tensor.clone()


@dataclass
class Outcome:
    """What one step leaves behind."""

    loss: torch.Tensor
    random: torch.Tensor
    grads: Named = field(default_factory=dict)
    buffers: Named = field(default_factory=dict)
    values: Named = field(default_factory=dict)
    outputs: list[torch.Tensor] = field(default_factory=list)
    hooks: list[tuple[str, torch.Tensor]] = field(default_factory=list)


def assert_same(ours: Outcome, plain: Outcome, step: object = "") -> None:
    """Fails with the names of all that differ."""
    wrong = []
    for what in ("grads", "buffers", "values"):
        a, b = getattr(ours, what), getattr(plain, what)
        wrong += [f"{what}: {sorted(a.keys() ^ b.keys())} on one side only"] if a.keys() != b.keys() else []
        wrong += [f"{what}[{n}]: {difference(a[n], b[n])}" for n in a.keys() & b.keys() if not same_bits(a[n], b[n])]
    if len(ours.outputs) != len(plain.outputs) or not all(map(same_bits, ours.outputs, plain.outputs)):
        wrong.append("outputs")
    if not same_bits(ours.loss, plain.loss):
        wrong.append(f"loss {ours.loss} for {plain.loss}")
    if not same_bits(ours.random, plain.random):
        wrong.append("random state")
    mine, theirs = sort_hooks(ours.hooks), sort_hooks(plain.hooks)
    if [n for n, _ in mine] != [n for n, _ in theirs]:
        wrong.append(f"hooks fired {[n for n, _ in mine]} for {[n for n, _ in theirs]}")
    elif not all(same_bits(a, b) for (_, a), (_, b) in zip(mine, theirs)):
        wrong.append("hook values")
    assert not wrong, f"step {step}: " + "; ".join(wrong)


def difference(a: torch.Tensor, b: torch.Tensor) -> str:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype}{list(a.shape)} for {b.dtype}{list(b.shape)}"
    return f"off by {(a.to(torch.complex128) - b.to(torch.complex128)).abs().max().item():.3g}"


def sort_hooks(log: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """By name: the order among leaves is the engine's own affair, the count and the values are not."""
    return sorted(log, key=lambda entry: entry[0])


def state_of(model: nn.Module) -> dict[str, Named]:
    """Copies of gradients, buffers and parameters, by name."""
    named = leaves(model)
    return {
        "grads": {n: kept(p.grad) for n, p in named.items() if p.grad is not None},
        "buffers": {n: kept(b) for n, b in model.named_buffers()},
        "values": {n: kept(p) for n, p in named.items()},
    }


def listen(model: nn.Module, log: list[tuple[str, torch.Tensor]], *, tensor_hooks: bool = True) -> None:
    """Writes down what every leaf's hooks are called with."""
    for name, leaf in leaves(model).items():
        if not leaf.requires_grad:
            continue
        if tensor_hooks:
            leaf.register_hook(lambda g, name=name: log.append((name + " hook", kept(g))))
        leaf.register_post_accumulate_grad_hook(lambda p, name=name: log.append((name + " post", kept(p.grad))))


def clear(model: nn.Module) -> None:
    for leaf in leaves(model).values():
        leaf.grad = None


def fresh(x: Any) -> Any:
    """A copy of an input, so that a block which writes it does not change the next step's."""
    return pytree.tree_map(lambda t: t.detach().clone().requires_grad_(t.requires_grad), x)


def build(case: Case, seed: int = 0) -> tuple[nn.Sequential, Any]:
    """A model and its input; equal for equal seeds."""
    torch.manual_seed(seed)
    model = case.make()
    x = case.x()
    torch.manual_seed(seed + 1)
    return model, x


def plain_step(model: nn.Module, x: Any, loss_fn: Any, hooks: list[Any] | None = None) -> Outcome:
    """Gradients and all else that plain PyTorch leaves after one backward, on cleared gradients."""
    clear(model)
    if hooks is not None:
        hooks.clear()
    output = model(fresh(x))
    outputs = [kept(t) for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]
    loss = loss_fn(output)
    loss.backward()
    return Outcome(kept(loss), torch.get_rng_state(), outputs=outputs, hooks=list(hooks or ()), **state_of(model))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# What the imports made is not looked at again by the collections below: 0.2 s each otherwise.
gc.freeze()


def live() -> dict[str, int]:
    """What the core holds now."""
    _bridge.call("DrainReleases")
    counts: dict[str, int] = json.loads(_bridge.live())
    return {name: counts[name] for name in counts if name not in ("goroutines", "files")}


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Fails if the core holds more of anything after the body than before. Models are cyclic garbage here and their
    gradients may lie in a boundary's memory, so a difference counts once that is collected."""
    before = live()
    yield
    after = live()
    if any(after[name] > before[name] for name in before):
        gc.collect()
        after = live()
    assert {n: after[n] for n in after if after[n] > before[n]} == {}
