"""Which units of a chain read a leaf together, and the running sums of their gradients (see Note [Shared leaves add up
as plain adds them])."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ._leaves import accumulate, capture, held_back

__all__ = ["Collector", "SharedLeaves"]

Gradients = dict[torch.Tensor, torch.Tensor]


class SharedLeaves:
    """For each unit (a block, or the loss with number L), the leaves that other units read too.

    `of(unit)` gives pairs of a leaf and whether this unit is the last one of its readers in the reverse pass, that is
    the earliest in the chain.
    """

    def __init__(self, readers: Iterable[tuple[int, Sequence[torch.Tensor]]]) -> None:
        units: dict[int, set[int]] = {}
        leaves: dict[int, torch.Tensor] = {}
        for unit, read in readers:
            for leaf in read:
                leaves[id(leaf)] = leaf
                units.setdefault(id(leaf), set()).add(unit)
        self._of: dict[int, list[tuple[torch.Tensor, bool]]] = {}
        for key, numbers in units.items():
            if len(numbers) > 1:
                first = min(numbers)
                for unit in sorted(numbers):
                    self._of.setdefault(unit, []).append((leaves[key], unit == first))

    def of(self, unit: int) -> Sequence[tuple[torch.Tensor, bool]]:
        """The shared leaves of a unit, each with whether its total is complete after this unit's VJP."""
        return self._of.get(unit, ())


class Collector:
    """Takes VJPs and brings the leaves' gradients home.

    With `into` None they accumulate straight into `.grad`, as `loss.backward()` does it. Otherwise `.grad` is left
    alone and they are added up in the dictionary `into`, keyed by the leaf.
    """

    def __init__(self, into: Gradients | None) -> None:
        self.into = into
        # By id of the leaf, the sum so far of those that are not complete.
        self.running: dict[int, torch.Tensor] = {}

    def vjp(
        self,
        roots: list[torch.Tensor],
        grads: list[torch.Tensor],
        inputs: Sequence[torch.Tensor | None],
        leaves: Sequence[torch.Tensor],
        shared: Sequence[tuple[torch.Tensor, bool]],
    ) -> list[torch.Tensor | None]:
        """One VJP from `roots` with cotangents `grads`. Returns the gradients of `inputs`, None where there is no input
        or the graph does not reach it. `leaves` are those of the graph, needed only when gradients are collected in a
        dictionary."""
        for leaf, _ in shared:
            running = self.running.pop(id(leaf), None)
            if running is not None:
                roots.append(leaf)
                grads.append(running)
        if not roots:
            return [None] * len(inputs)
        waiting = [leaf for leaf, complete in shared if not complete]
        if self.into is None:
            self._accumulate(roots, grads, waiting)
            return [None if t is None else t.grad for t in inputs]
        return self._capture(roots, grads, inputs, leaves, shared, waiting)

    def _accumulate(self, roots: list[torch.Tensor], grads: list[torch.Tensor], waiting: list[torch.Tensor]) -> None:
        if not waiting:
            accumulate(roots, grads)
            return
        before = [leaf.grad for leaf in waiting]
        try:
            for leaf in waiting:
                leaf.grad = None
            with held_back(waiting):
                accumulate(roots, grads)
            for leaf in waiting:
                if leaf.grad is not None:
                    self.running[id(leaf)] = leaf.grad
        finally:
            for leaf, grad in zip(waiting, before, strict=True):
                leaf.grad = grad

    def _capture(
        self,
        roots: list[torch.Tensor],
        grads: list[torch.Tensor],
        inputs: Sequence[torch.Tensor | None],
        leaves: Sequence[torch.Tensor],
        shared: Sequence[tuple[torch.Tensor, bool]],
        waiting: list[torch.Tensor],
    ) -> list[torch.Tensor | None]:
        assert self.into is not None
        wanted = {id(t): t for t in inputs if t is not None}
        wanted.update((id(leaf), leaf) for leaf in leaves)
        wanted.update((id(leaf), leaf) for leaf, _ in shared)
        with held_back(waiting):
            found = dict(zip(wanted, capture(roots, grads, list(wanted.values())), strict=True))
        result = [None if t is None else found.pop(id(t)) for t in inputs]
        postponed = {id(leaf) for leaf in waiting}
        for key, grad in found.items():
            if grad is None:
                continue
            if key in postponed:
                self.running[key] = grad
                continue
            leaf = wanted[key]
            total = self.into.get(leaf)
            self.into[leaf] = grad if total is None else total + grad
        return result
