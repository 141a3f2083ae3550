"""What a module is made of, and whether it still is.

Note [A model may change between steps]
    Users freeze parts, switch to eval, put adapters in, add hooks. Whatever was learnt about a block holds for the
    structure it had then, so every forward asks whether it is the same. That question is put to whole lists at once, in
    C: asked attribute by attribute it would cost a third of a small block's forward.
"""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .errors import BlockError

__all__ = ["MACHINERY", "Structure", "own_attributes", "refuse_scripted"]

_training = attrgetter("training")
_requires_grad = attrgetter("requires_grad")


class Structure:
    """Everything about a module that can change what its forward does to leaves: submodules, training flags, numbers of
    hooks, parameters and whether they require grad. Also its non-empty buffer dictionaries, its dictionaries of forward
    hooks, and the random generators that its modules hold.

    `signature` is equal for equal structures of one module, and hashable.
    """

    __slots__ = (
        "_child_homes",
        "_children",
        "_counts",
        "_homes",
        "_needs",
        "_own",
        "_parameter_homes",
        "_parameter_ids",
        "buffers",
        "generators",
        "hooks",
        "lazy",
        "modules",
        "parameters",
        "signature",
        "trainable",
        "training",
    )

    def __init__(self, module: nn.Module) -> None:
        """Raises BlockError for a torch.jit.ScriptModule."""
        self.modules: list[nn.Module] = list(module.modules())
        refuse_scripted(module)
        self.training: list[bool] = [*map(_training, self.modules)]
        self.parameters: list[nn.Parameter] = list(module.parameters())
        # Whether there are parameters without a shape yet.
        self.lazy = any(map(is_lazy, self.parameters))
        self.buffers: list[dict[str, Any]] = [m._buffers for m in self.modules if m._buffers]
        self.hooks: list[dict[int, Any]] = [h for m in self.modules for h in (m._forward_pre_hooks, m._forward_hooks)]
        self.generators: list[Any] = _generators(self.modules)
        self._parameter_homes = [m._parameters for m in self.modules]
        self._child_homes = [m._modules for m in self.modules if m._modules]
        self._homes: list[Any] = [
            home for m in self.modules for home in (m._modules, m._forward_hooks, m._forward_pre_hooks)
        ]
        self._counts = [*map(len, self._homes)]
        self._children = [*chain.from_iterable(map(dict.values, self._child_homes))]
        self._own = [p for home in self._parameter_homes for p in home.values() if p is not None]
        self._parameter_ids = self._ids()
        self._needs = [*map(_requires_grad, self._own)]
        self.trainable = any(self._needs)
        self.signature = (
            tuple(self.modules),
            tuple(self.training),
            tuple(self._counts),
            tuple(self._parameter_ids),
            tuple(self._needs),
        )

    def _ids(self) -> list[int]:
        return [*map(id, chain.from_iterable(map(dict.values, self._parameter_homes)))]

    def holds(self) -> bool:
        """Whether the module still has this structure."""
        return (
            self.training_is(self.training)
            and [*map(len, self._homes)] == self._counts
            and self.same_parts()
            and [*map(_requires_grad, self._own)] == self._needs
        )

    def same_parameters(self, other: Structure) -> bool:
        """Whether both have the same parameters in the same places."""
        return self._parameter_ids == other._parameter_ids

    def same_modules(self) -> bool:
        """Whether the module still has the same submodules."""
        return [*chain.from_iterable(map(dict.values, self._child_homes))] == self._children

    def same_parts(self) -> bool:
        """Whether the module still has the same submodules and parameters."""
        return self.same_modules() and self._ids() == self._parameter_ids

    def tensors(self) -> list[Any]:
        """What stands in the places of parameters and buffers right now."""
        return [*chain.from_iterable(map(dict.values, (*self._parameter_homes, *self.buffers)))]

    @contextmanager
    def standing(self, tensors: list[Any]) -> Iterator[None]:
        """Has `tensors`, an earlier result of `tensors()`, stand in their places again (torch.func.functional_call puts
        others there for one forward). Afterwards the places are as before."""
        now = self.tensors()
        # Another number of places: a buffer was registered since, and the block's state is looked after elsewhere.
        if len(now) != len(tensors) or all(map(is_, now, tensors)):
            yield
            return
        places = [(home, name) for home in (*self._parameter_homes, *self.buffers) for name in home]
        try:
            for (home, name), tensor in zip(places, tensors, strict=True):
                home[name] = tensor
            yield
        finally:
            for (home, name), tensor in zip(places, now, strict=True):
                home[name] = tensor

    @contextmanager
    def needing(self) -> Iterator[None]:
        """Has the parameters require grad as they did when this was made; afterwards they are as before. Training code
        freezes and unfreezes between forward and backward (the discriminator in a generator's step)."""
        now = [*map(_requires_grad, self._own)]
        if now == self._needs:
            yield
            return
        try:
            for parameter, need in zip(self._own, self._needs, strict=True):
                parameter.requires_grad_(need)
            yield
        finally:
            for parameter, need in zip(self._own, now, strict=True):
                parameter.requires_grad_(need)

    def training_is(self, flags: list[bool]) -> bool:
        """Whether the modules' training flags are `flags`."""
        return [*map(_training, self.modules)] == flags


class Attributes:
    """What stands in the plain attributes of some modules, by identity.

    Note [What may change a block's ways]
        A plain attribute (a flag, a temperature, a list of adapters) can change what a forward does: which leaves it
        reads, whether it draws, what it returns. What is known of a block holds while its attributes are the same
        objects; those that its own forward replaces are its state and do not count.
    """

    __slots__ = ("_homes", "_keys", "_values")

    def __init__(self, modules: list[nn.Module]) -> None:
        self._homes: list[dict[str, Any]] = [m.__dict__ for m in modules]
        self._keys = [(id(home), name) for home in self._homes for name in home]
        self._values = self._now()

    def _now(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self._homes))]

    def same(self) -> bool:
        """Whether all of them still are."""
        now = self._now()
        return len(now) == len(self._values) and all(map(is_, now, self._values))

    def changed(self) -> set[tuple[int, str]]:
        """Those that are not, as (id of the module's dictionary, name), without what nn.Module keeps for itself."""
        then = dict(zip(self._keys, self._values, strict=True))
        now = {(id(home), name): value for home in self._homes for name, value in home.items()}
        missing = object()
        return {
            key
            for key in then.keys() | now.keys()
            if key[1] not in MACHINERY and then.get(key, missing) is not now.get(key, missing)
        }


def refuse_scripted(module: nn.Module, name: str = "") -> None:
    """Raises BlockError if the module is, or has in it, a torch.jit.ScriptModule. name: of the module."""
    for path, part in module.named_modules(prefix=name):
        if isinstance(part, torch.jit.ScriptModule):
            raise BlockError(
                f"{path or 'the block'} is a torch.jit.ScriptModule, whose parts cannot be looked at; use the module "
                "that it was made from, with torch.compile if it has to be compiled"
            )


# What nn.Module keeps in a module's `__dict__` for itself, and how a module is called.
MACHINERY = frozenset([*nn.Module().__dict__, "forward", "_compiled_call_impl"])


def own_attributes(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """The plain attributes of a module, and the members of its dictionaries, as (home, name, value)."""
    for name, value in module.__dict__.items():
        if name in MACHINERY:
            continue
        yield module.__dict__, name, value
        if type(value) is dict:
            for key, inner in value.items():
                if isinstance(inner, torch.Tensor):
                    yield value, key, inner


def _generators(modules: list[nn.Module]) -> list[Any]:
    """The generators that the modules hold in attributes, lists and dictionaries, or that their forward reads from its
    closure and its module's globals, each once."""
    found: dict[int, Any] = {}
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        kinds += (numpy_random.Generator, numpy_random.RandomState)
    for module in modules:
        for value in _held(module):
            # The defaults are known; they are not held by anyone.
            if isinstance(value, kinds) and value is not torch.default_generator:
                found[id(value)] = value
    return list(found.values())


def _held(module: nn.Module) -> Iterator[Any]:
    functions: list[Any] = [getattr(type(module), "forward", None)]
    for name, value in module.__dict__.items():
        if name in MACHINERY:
            continue
        if isinstance(value, (list, tuple)):
            yield from value
        elif isinstance(value, dict):
            yield from value.values()
        else:
            yield value
        functions.append(value)
    for function in functions:
        if isinstance(function, types.MethodType):
            function = function.__func__
        if isinstance(function, types.FunctionType):
            for cell in function.__closure__ or ():
                try:
                    yield cell.cell_contents
                except ValueError:
                    continue  # not filled yet
            for name in function.__code__.co_names:
                yield function.__globals__.get(name)
