"""Which leaves a graph reads, and how the gradient of a leaf that several blocks read is added up.

Note [Shared leaves add up as plain adds them]
    Plain autograd sums all contributions of one backward to a leaf and then adds the sum to `.grad` once; hooks fire
    once. Here each block has its own VJP. So a leaf that one block reads goes straight into `.grad`. For a leaf that
    several read, every VJP but the last one leaves its sum so far in a running tensor instead (its hooks held back),
    and each VJP gets the running sum as an extra root on the leaf: the terms then add up in plain's order and the last
    VJP delivers the total.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import Variable

__all__ = ["accumulate", "capture", "graph_leaves", "has_older", "held_back", "next_number", "reaches"]


# What `torch.autograd.backward` and `grad` call in the end. Their own checks cost more than a small block's VJP.
_run_backward = Variable._execution_engine.run_backward


def graph_leaves(roots: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves that require grad below `roots`, each once, found from the AccumulateGrad nodes. A root that is itself
    such a leaf counts."""
    found: dict[int, torch.Tensor] = {}
    stack: list[Any] = []
    for root in roots:
        node = root.grad_fn
        if node is not None:
            stack.append(node)
        elif root.requires_grad:
            found[id(root)] = root
    seen = set(stack)
    while stack:
        for following, _ in stack.pop().next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                try:
                    leaf = following.variable
                except AttributeError:
                    stack.append(following)
                else:
                    found[id(leaf)] = leaf
    return list(found.values())


def next_number() -> int:
    """The number that this thread's next node will have; later nodes have higher ones."""
    node = torch.ones((), requires_grad=True).view(1).grad_fn
    assert node is not None
    return int(node._sequence_nr()) + 1


def has_older(roots: Iterable[torch.Tensor], number: int) -> bool:
    """Whether a node below `roots` other than a leaf's was made before that with `number`."""
    stack: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if hasattr(node, "variable"):
            continue
        if node._sequence_nr() < number:
            return True
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return False


def reaches(root: torch.Tensor, targets: Sequence[torch.Tensor]) -> bool:
    """Whether the graph of `root` leads to one of `targets` (each a leaf or the output of a node)."""
    nodes = {t.grad_fn for t in targets if t.grad_fn is not None}
    leaves = {id(t) for t in targets if t.grad_fn is None}
    if any(root is t for t in targets):
        return True
    stack = [root.grad_fn] if root.grad_fn is not None else []
    seen = set(stack)
    while stack:
        node = stack.pop()
        if node in nodes:
            return True
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) in leaves:
            return True
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return False


def accumulate(roots: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None], retain: bool = False) -> None:
    """One VJP that adds into `.grad` of every leaf below `roots`."""
    _run_backward(tuple(roots), tuple(grads), retain, False, (), allow_unreachable=True, accumulate_grad=True)


def capture(
    roots: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
    inputs: Sequence[torch.Tensor],
    retain: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """One VJP that returns the gradients of `inputs` (None for one that the graph does not reach) and leaves `.grad`
    alone."""
    return tuple(
        _run_backward(
            tuple(roots), tuple(grads), retain, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
        )
    )


@contextmanager
def held_back(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """Holds the hooks of `leaves` back. The engine reads the hooks from these dictionaries at call time, so emptying
    them is enough."""
    saved: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for leaf in leaves:
        for hooks in (leaf._backward_hooks, getattr(leaf, "_post_accumulate_grad_hooks", None)):
            if hooks:
                saved.append((hooks, dict(hooks)))
                hooks.clear()
    try:
        yield
    finally:
        for hooks, content in saved:
            hooks.update(content)
