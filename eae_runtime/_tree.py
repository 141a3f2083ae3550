"""Boundaries as trees: a value that travels between blocks, taken apart into its distinct tensors and put together
again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["Shape", "flatten", "unflatten"]


class Shape:
    """How to put a value together from its distinct tensors.

    `spec` is None for a value that is one tensor. Otherwise `slots` has one entry a leaf of the tree: the number of a
    tensor, or a `Const` for a plain object.
    """

    __slots__ = ("slots", "spec")

    def __init__(self, spec: Any, slots: tuple[Any, ...]) -> None:
        self.spec = spec
        self.slots = slots

    def same_structure(self, other: Shape) -> bool:
        """Whether two values have the same containers and the same tensors at the same places."""
        if self.spec is None or other.spec is None:
            return self.spec is other.spec
        return (
            bool(self.spec == other.spec)
            and len(self.slots) == len(other.slots)
            and all(
                (isinstance(a, Const) and isinstance(b, Const)) or a == b
                for a, b in zip(self.slots, other.slots, strict=True)
            )
        )


class Const:
    """A leaf of a tree that is not a tensor."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


SINGLE = Shape(None, ())


def flatten(value: Any) -> tuple[list[torch.Tensor], Shape]:
    """The distinct tensors of a value in the order of the tree, and its shape. A tensor that stands at two places is
    one tensor."""
    if isinstance(value, torch.Tensor):
        return [value], SINGLE
    leaves, spec = pytree.tree_flatten(value)
    tensors: list[torch.Tensor] = []
    numbers: dict[int, int] = {}
    slots: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            number = numbers.get(id(leaf))
            if number is None:
                number = numbers[id(leaf)] = len(tensors)
                tensors.append(leaf)
            slots.append(number)
        else:
            slots.append(Const(leaf))
    return tensors, Shape(spec, tuple(slots))


def unflatten(tensors: Sequence[torch.Tensor], shape: Shape) -> Any:
    """The value that `flatten` took apart, with `tensors` in place of its tensors."""
    if shape.spec is None:
        return tensors[0]
    leaves = [slot.value if isinstance(slot, Const) else tensors[slot] for slot in shape.slots]
    return pytree.tree_unflatten(leaves, shape.spec)
