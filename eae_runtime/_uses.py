"""Where a graph uses a tensor: its edges to it, and what comes back along each of them.

Note [Every use comes back by itself]
    In plain PyTorch the gradient of a tensor is one sum over all its uses, added in the order in which the engine comes
    to them. A block that uses a tensor several times, while other code uses it too (a residual around the block, an
    encoder's output, a tied weight), must not add its own uses up first: that sum has other last bits. So the block's
    node takes such a tensor as often as the block uses it, and gives each use's gradient back by itself. The outer
    engine then adds all of them in plain's order.
    A tensor that one block alone uses is taken once, since then the block's own sum is plain's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["Contributions", "edges_to"]


def edges_to(roots: Sequence[torch.Tensor], targets: Sequence[torch.Tensor | None]) -> list[list[tuple[Any, int]]]:
    """For each target, the edges of the graph below `roots` that lead to it, as (node, number of the edge). A root that
    is a target counts as no edge. None has no edges."""
    nodes: dict[tuple[Any, int], list[int]] = {}
    leaves: dict[int, list[int]] = {}
    for number, target in enumerate(targets):
        if target is None:
            continue
        if target.grad_fn is None:
            leaves.setdefault(id(target), []).append(number)
        else:
            nodes.setdefault((target.grad_fn, target.output_nr), []).append(number)
    found: list[list[tuple[Any, int]]] = [[] for _ in targets]
    stack = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        for edge, (following, output) in enumerate(node.next_functions):
            if following is None:
                continue
            numbers = nodes.get((following, output))
            if numbers is None and leaves:
                variable = getattr(following, "variable", None)
                numbers = None if variable is None else leaves.get(id(variable))
            for number in numbers or ():
                found[number].append((node, edge))
            if following not in seen:
                seen.add(following)
                stack.append(following)
    return found


class Contributions:
    """Collects what a VJP sends along each edge to some tensors, in the order of the engine, in place of their sums.

    `found[k]` has the gradients of the k-th target's uses once the VJP has been taken.
    """

    def __init__(self, roots: Sequence[torch.Tensor], targets: Sequence[torch.Tensor | None]) -> None:
        self.found: list[list[torch.Tensor]] = [[] for _ in targets]
        edges: dict[Any, list[tuple[int, int]]] = {}
        for number, leading in enumerate(edges_to(roots, targets)):
            for node, edge in leading:
                edges.setdefault(node, []).append((edge, number))
        for node, taken in edges.items():
            node.register_hook(self._taking(sorted(taken)))

    def _taking(self, taken: list[tuple[int, int]]) -> Any:
        def hook(grads: tuple[torch.Tensor | None, ...], _: Any) -> tuple[torch.Tensor | None, ...]:
            left = list(grads)
            for edge, number in taken:
                grad = left[edge]
                if grad is not None:
                    self.found[number].append(grad)
                    left[edge] = None
            return tuple(left)

        return hook
