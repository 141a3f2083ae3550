"""What one training step leaves behind, recorded so that two of them can be compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.nn.parameter import is_lazy

from . import _tree
from ._ambient import Generators, host_sources, read_source, write_source
from ._hooks import look
from ._leaves import graph_leaves
from ._state import Watch
from ._structure import Structure, own_attributes
from .errors import ConfigError

__all__ = ["Bench", "Outcome", "counting_hooks"]

Named = dict[str, torch.Tensor]


@dataclass
class Outcome:
    """Copies of what a step left, by name. `attributes` has tensors and plain values; `random` the states of the
    generators; `hooks` how often each hook was called."""

    outputs: Named = field(default_factory=dict)
    loss: Named = field(default_factory=dict)
    gradients: Named = field(default_factory=dict)
    input_gradients: Named = field(default_factory=dict)
    buffers: Named = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    parameters: Named = field(default_factory=dict)
    random: dict[str, Any] = field(default_factory=dict)
    hooks: dict[str, int] = field(default_factory=dict)


class Bench:
    """A model on the bench: every step on it starts from the state that it was brought in with, and `restore` gives
    that state back, object by object."""

    def __init__(self, modules: nn.Module, inputs: Any) -> None:
        if any(map(is_lazy, modules.parameters())):
            raise ConfigError("the model has lazy parameters without a shape; run it once before it is verified")
        self.modules = modules
        self._inputs = _tree.flatten(inputs)
        self._structure = Structure(modules)
        devices = [p.device for p in modules.parameters()] + [t.device for t in self._inputs[0]]
        self._generators = Generators(devices)
        self._sources: dict[str, Any] = {
            **host_sources(),
            **{f"generator {n} of a module": source for n, source in enumerate(self._structure.generators)},
        }
        self._random = self._generators.read()
        self._states = {name: read_source(source) for name, source in self._sources.items()}
        self._watch = Watch(self._structure, None, {})
        self._training = list(self._structure.training)
        self._parameters = [(p, p.grad, p.detach().clone()) for p in modules.parameters()]
        # Leaves that no module has registered; known after the first plain step.
        self.loose: list[torch.Tensor] = []
        self._loose_grads: list[torch.Tensor | None] = []
        self.fresh: Any = None

    def names(self) -> dict[str, torch.Tensor]:
        """Every leaf by its name."""
        found: dict[str, torch.Tensor] = dict(self.modules.named_parameters())
        for number, leaf in enumerate(self.loose):
            found[f"unregistered leaf {number} {list(leaf.shape)}"] = leaf
        return found

    def learn_loose(self, loss: torch.Tensor) -> None:
        """Finds the leaves of a plain graph that no module has registered, before its backward, and sets their
        gradients aside."""
        known = {id(p) for p, _, _ in self._parameters} | {id(t) for t in _tree.flatten(self.fresh)[0]}
        for leaf in graph_leaves([loss]):
            if id(leaf) not in known and all(leaf is not other for other in self.loose):
                self.loose.append(leaf)
                self._loose_grads.append(leaf.grad)
                leaf.grad = None

    def begin(self) -> Any:
        """Sets everything to the beginning, with no gradients. Returns a fresh copy of the inputs."""
        self._reset()
        for parameter, _, _ in self._parameters:
            parameter.grad = None
        for leaf in self.loose:
            leaf.grad = None
        tensors, shape = self._inputs
        copies = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
        self.fresh = _tree.unflatten(copies, shape)
        return self.fresh

    def _reset(self) -> None:
        for entry in self._watch.changes()[0]:
            entry.restore()
        for module, training in zip(self._structure.modules, self._training, strict=True):
            module.training = training
        with torch.no_grad():
            for parameter, _, value in self._parameters:
                if parameter.requires_grad and not torch.equal(parameter, value):
                    parameter.copy_(value)
        self._generators.write(self._random)
        for name, source in self._sources.items():
            write_source(source, self._states[name])

    def restore(self) -> None:
        """Gives the model and the generators back as they came."""
        self._reset()
        for parameter, grad, _ in self._parameters:
            parameter.grad = grad
        for leaf, grad in zip(self.loose, self._loose_grads, strict=True):
            leaf.grad = grad

    def collect(self, outputs: Any, loss: torch.Tensor, hooks: dict[str, int]) -> Outcome:
        """What the step that began with the last `begin` has left."""
        made = Outcome(hooks=dict(hooks))
        tensors, shape = _tree.flatten(outputs)
        made.outputs = {n: _copy(t) for n, t in zip(_tree.paths(shape, "output"), tensors, strict=True)}
        made.loss = {"loss": _copy(loss)}
        made.gradients = {n: _copy(p.grad) for n, p in self.names().items() if p.grad is not None}
        tensors, shape = _tree.flatten(self.fresh)
        for name, tensor in zip(_tree.paths(shape, "input"), tensors, strict=True):
            if tensor.grad is not None:
                made.input_gradients[name] = _copy(tensor.grad)
        made.buffers = {n: _copy(b) for n, b in self.modules.named_buffers()}
        made.parameters = {n: _copy(p) for n, p in self.modules.named_parameters()}
        for path, module in self.modules.named_modules():
            for home, name, value in own_attributes(module):
                place = ".".join(part for part in (path, str(name)) if part)
                if isinstance(value, torch.Tensor) and not value.is_meta:
                    made.attributes[place] = _copy(value)
                elif home is module.__dict__ and isinstance(value, (bool, int, float, str)):
                    made.attributes[place] = value
        state = self._generators.read()
        made.random["torch"] = state if isinstance(state, torch.Tensor) else state[0]
        if not isinstance(state, torch.Tensor):
            made.random.update({f"torch on {device}": one for device, one in state[1]})
        made.random.update({name: read_source(source) for name, source in self._sources.items()})
        return made


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor.clone()


@contextmanager
def counting_hooks(modules: nn.Module, leaves: dict[str, torch.Tensor]) -> Iterator[dict[str, int]]:
    """Counts the calls of all hooks on modules and leaves while the body runs, by a name that tells which. A forward
    hook that takes part in the computation is left out: a rebuild has to call it again."""
    counts: dict[str, int] = {}
    homes: list[tuple[str, Any]] = []
    for path, module in modules.named_modules():
        for what in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks"):
            homes.append((f"{path or 'model'}: {what.strip('_').replace('_', ' ')[:-1]}", getattr(module, what)))
    for what in ("_global_forward_pre_hooks", "_global_forward_hooks"):
        homes.append(("every module: " + what.strip("_").replace("_", " ")[:-1], getattr(nn_module, what)))
    for name, leaf in leaves.items():
        homes.append((f"{name}: tensor hook", leaf._backward_hooks))
        homes.append((f"{name}: post-accumulate hook", getattr(leaf, "_post_accumulate_grad_hooks", None)))
    saved = []
    live: set[str] = set()
    for name, home in homes:
        if home:
            saved.append((home, dict(home)))
            for number, (key, hook) in enumerate(list(home.items())):
                label = f"{name} {number}"
                counts[label] = 0
                home[key] = _counted(hook, label, counts, live if " forward " in label else None)
    try:
        yield counts
    finally:
        for home, hooks in saved:
            for key, hook in hooks.items():
                if key in home:
                    home[key] = hook
        for label in live:
            counts.pop(label, None)


def _counted(
    hook: Callable[..., Any], label: str, counts: dict[str, int], live: set[str] | None = None
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        counts[label] += 1
        before = None if live is None else look(args[0], args[1:])
        result = hook(*args, **kwargs)
        if live is not None and (result is not None or look(args[0], args[1:]) != before):
            live.add(label)
        return result

    return call
