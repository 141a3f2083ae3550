"""Boundaries as trees: a value that travels between blocks, taken apart into its distinct tensors and put together
again.

Beside the containers that torch.utils._pytree knows, dataclasses and plain objects that hold tensors are taken apart
into their attributes. What holds no tensor travels as it is.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .errors import TensorTypeError

__all__ = ["Shape", "flatten", "holds_iterator", "paths", "plain_state", "unflatten"]

# Objects whose attributes are nobody's business here.
_CLOSED = (
    nn.Module,
    torch.Generator,
    torch.dtype,
    torch.device,
    torch.Size,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.ModuleType,
    type,
    str,
    bytes,
    int,
    float,
    complex,
)

# Objects looked at in a search for tensors or changes. What lies beyond counts as constant: such a value is data (a
# tokenizer), and a block that reads a graph's tensor from it is noticed by its graph.
_MOST_OBJECTS = 5000


class Shape:
    """How to put a value together from its distinct tensors.

    `spec` is None for a value that is one tensor. Otherwise `slots` has one entry a leaf of the tree: the number of a
    tensor, a `Part` for an object that holds tensors, or a `Const` for any other.
    """

    __slots__ = ("slots", "spec")

    def __init__(self, spec: Any, slots: tuple[Any, ...]) -> None:
        self.spec = spec
        self.slots = slots

    def kind(self) -> tuple[Any, ...]:
        """Hashable; equal for shapes with the same flags, numbers and strings and the same types of other objects."""
        return tuple(
            [
                slot if isinstance(slot, int) else slot.shape.kind() if isinstance(slot, Part) else slot.kind()
                for slot in self.slots
            ]
        )

    def same_structure(self, other: Shape) -> bool:
        """Whether two values have the same containers and the same tensors at the same places."""
        if self.spec is None or other.spec is None:
            return self.spec is other.spec
        return (
            bool(self.spec == other.spec)
            and len(self.slots) == len(other.slots)
            and all(_same_slot(a, b) for a, b in zip(self.slots, other.slots, strict=True))
        )


class Const:
    """A leaf of a tree that holds no tensor."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def kind(self) -> Any:
        """A flag, number or string itself (it may decide what a block does), the type of anything else."""
        value = self.value
        return (type(value), value) if isinstance(value, (bool, str, int, float, complex)) else type(value)


class Part:
    """A leaf of a tree that is an object with tensors: its class and, as a tree, its attributes."""

    __slots__ = ("cls", "shape")

    def __init__(self, cls: type, shape: Shape) -> None:
        self.cls = cls
        self.shape = shape


SINGLE = Shape(None, ())


def _same_slot(a: Any, b: Any) -> bool:
    if isinstance(a, Const):
        return isinstance(b, Const)
    if isinstance(a, Part):
        return isinstance(b, Part) and a.cls is b.cls and a.shape.same_structure(b.shape)
    return bool(a == b)


def flatten(value: Any) -> tuple[list[torch.Tensor], Shape]:
    """The distinct tensors of a value in the order of the tree, and its shape. A tensor that stands at two places is
    one tensor."""
    if isinstance(value, torch.Tensor):
        return [value], SINGLE
    tensors: list[torch.Tensor] = []
    return tensors, _take_apart(value, tensors, {})


def _take_apart(value: Any, tensors: list[torch.Tensor], numbers: dict[int, int]) -> Shape:
    leaves, spec = pytree.tree_flatten(value)
    slots: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            number = numbers.get(id(leaf))
            if number is None:
                number = numbers[id(leaf)] = len(tensors)
                tensors.append(leaf)
            slots.append(number)
        elif _holds_tensors(leaf):
            if isinstance(leaf, (dict, list, tuple, set, frozenset)):
                raise TensorTypeError(
                    f"a {type(leaf).__name__} that holds tensors cannot be taken apart; register the class with "
                    "torch.utils._pytree.register_pytree_node, or use a plain dict, list or tuple"
                )
            slots.append(Part(type(leaf), _take_apart(_attributes(leaf), tensors, numbers)))
        else:
            slots.append(Const(leaf))
    return Shape(spec, tuple(slots))


def holds_iterator(shape: Shape) -> bool:
    """Whether an iterator stands in the value: running the block twice would find it used up."""
    for slot in shape.slots:
        if isinstance(slot, Const) and isinstance(slot.value, Iterator):
            return True
        if isinstance(slot, Part) and holds_iterator(slot.shape):
            return True
    return False


def unflatten(tensors: Sequence[torch.Tensor], shape: Shape) -> Any:
    """The value that `flatten` took apart, with `tensors` in place of its tensors. Containers and objects with tensors
    are new ones."""
    if shape.spec is None:
        return tensors[0]
    leaves = []
    for slot in shape.slots:
        if isinstance(slot, int):
            leaves.append(tensors[slot])
        else:
            leaves.append(slot.value if isinstance(slot, Const) else _put_together(tensors, slot))
    return pytree.tree_unflatten(leaves, shape.spec)


def _put_together(tensors: Sequence[torch.Tensor], part: Part) -> Any:
    made: Any = object.__new__(part.cls)
    for name, value in unflatten(tensors, part.shape).items():
        object.__setattr__(made, name, value)
    return made


def paths(shape: Shape, start: str) -> list[str]:
    """How to reach each tensor of a value that is called `start`: `start["h"][0]`."""
    if shape.spec is None:
        return [start]
    found: dict[int, str] = {}
    _name(shape, start, found)
    return [found[n] for n in range(len(found))]


def _name(shape: Shape, start: str, found: dict[int, str]) -> None:
    dummy = pytree.tree_unflatten(list(range(len(shape.slots))), shape.spec)
    for path, place in pytree.tree_flatten_with_path(dummy)[0]:
        slot = shape.slots[place]
        name = start + pytree.keystr(path)
        if isinstance(slot, Part):
            _name(slot.shape, name, found)
        elif isinstance(slot, int):
            found.setdefault(slot, name)


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, of its `__dict__` and, for a dataclass, of its slots."""
    found = dict(getattr(value, "__dict__", {}))
    if dataclasses.is_dataclass(value):
        for one in dataclasses.fields(value):
            if one.name not in found and hasattr(value, one.name):
                found[one.name] = getattr(value, one.name)
    return found


def _is_open(value: Any) -> bool:
    return not isinstance(value, _CLOSED) and (hasattr(value, "__dict__") or dataclasses.is_dataclass(value))


def _holds_tensors(value: Any) -> bool:
    return _is_open(value) and any(isinstance(v, torch.Tensor) for v in _reachable(value))


def _reachable(value: Any) -> Iterable[Any]:
    """What an object holds, through attributes, lists, tuples, sets and dictionaries, each once."""
    seen: set[int] = set()
    stack = [value]
    while stack and len(seen) < _MOST_OBJECTS:
        one = stack.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, torch.Tensor):
            continue
        if isinstance(one, dict):
            stack.extend(one.values())
        elif isinstance(one, (list, tuple, set, frozenset)):
            stack.extend(one)
        elif _is_open(one):
            stack.extend(_attributes(one).values())


def plain_state(value: Any) -> list[Any]:
    """What tells whether containers and objects in `value` were changed: compare it before and after."""
    state: list[Any] = []
    for one in _reachable(value):
        if isinstance(one, (dict, list, set)):
            state.append((id(one), [*map(id, one.values() if isinstance(one, dict) else one)]))
        elif _is_open(one) and not isinstance(one, torch.Tensor):
            inside = _attributes(one)
            state.append((id(one), list(inside), [*map(id, inside.values())]))
    return state
