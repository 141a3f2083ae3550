"""A block in the outer graph of the autograd driver: one node that rebuilds the block when its gradient arrives."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from ._leaves import capture, held_back
from ._records import Environment, Record, Remembered, RestartStep
from ._uses import Contributions
from .adjoint import AdjointState
from .blockcall import BlockCall
from .errors import BlockError, RebuildMismatchError

if TYPE_CHECKING:
    from ._autograd_driver import Door, Driver

__all__ = ["Node", "Run"]


# A tensor that a block uses more often than this (the cell of an unrolled loop) is taken once.
_MOST_USES = 16

# The same where no other block reads the leaf: it could still be read by the next forward before the backward.
_MOST_OWN_USES = 4


class Run:
    """One run of a block on its way to its node.

    `below` are the boundary's tensors and the leaves; `slots` are the node's inputs, as numbers in `below`, one for
    each use that has to come back by itself (see Note [Every use comes back by itself]).
    """

    def __init__(
        self,
        door: Door,
        record: Record,
        tensors: list[torch.Tensor],
        needs: tuple[bool, ...],
        outputs: list[torch.Tensor],
        out_needs: tuple[bool, ...],
    ) -> None:
        self.door = door
        self.record = record
        # An inference tensor cannot be saved; a copy can.
        self.tensors = tensors = [t.clone() if t.is_inference() else t for t in tensors]
        self.needs = needs
        self.leaves = record.facts.leaves
        self.outputs = [t for t, need in zip(outputs, out_needs, strict=True) if need]
        self.below: list[torch.Tensor] = [*tensors, *self.leaves]
        self.slots: list[int] = []
        for number in range(len(self.below)):
            self.slots += [number] * self._uses(number)

    def _uses(self, number: int) -> int:
        """How often the node takes a tensor."""
        driver, facts, inputs = self.door.driver, self.record.facts, len(self.tensors)
        uses = facts.uses[number] if number < len(facts.uses) else 1
        if uses < 2:
            return 1
        if number >= inputs:
            most = _MOST_USES if driver.is_shared(self.leaves[number - inputs]) else _MOST_OWN_USES
            return uses if uses <= most else 1
        # Passes see the sum of a block's uses.
        return 1 if len(driver.pipeline) > 0 or not self.needs[number] or uses > _MOST_USES else uses


class Node(torch.autograd.Function):
    """A block in the outer graph."""

    @staticmethod
    def forward(ctx: Any, run: Run, *_: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.door, ctx.record, ctx.leaves, ctx.slots = run.door, run.record, run.leaves, run.slots
        ctx.save_for_backward(*run.tensors)
        call = run.door.call
        ctx.versions = [(t, t._version) for t in (*call.parameters, *run.leaves, *call.constant_buffers())]
        ctx.standing = run.record.facts.structure.tensors()
        # Not the tensors that autograd knows: it would take an output for a view of an input.
        return tuple([t.detach() for t in run.outputs])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if all(grad is None for grad in grads):
            return None, *[None] * len(ctx.slots)
        call: BlockCall = ctx.door.call
        if torch.is_grad_enabled():
            raise BlockError(
                f"{call.where()}: backward(create_graph=True) asks for a graph of the gradients, which a rebuilt block "
                "does not have; leave this block out of wrap(), or unwrap() the model"
            )
        tensors = list(ctx.saved_tensors)
        _check_versions(call, ctx.versions)
        structure = ctx.record.facts.structure
        if not structure.same_modules():
            raise RebuildMismatchError(
                f"{call.where()}: its submodules were changed between forward and backward; call backward() first"
            )
        with structure.standing(ctx.standing), structure.needing():
            return None, *_reverse(ctx.door, ctx.record, ctx.leaves, tensors, list(grads), ctx.slots)


def _reverse(
    door: Door,
    record: Record,
    leaves: list[torch.Tensor],
    tensors: list[torch.Tensor],
    grads: list[torch.Tensor | None],
    slots: list[int],
) -> list[torch.Tensor | None]:
    """Rebuilds the block and takes its VJP: a gradient for each slot."""
    call, driver = door.call, door.driver
    env = Environment(driver.generators, ("cpu",))
    resume = env.generators.read()
    if call.index in driver.lasts:
        grads = _passed(driver, call, call.index + 1, grads)
    try:
        with torch.enable_grad():
            try:
                rebuilt = call.rebuild(record, [t.detach() for t in tensors], env, (call.index, "R", 0))
            finally:
                # Where plain's generators stand, for what draws in a backward (a hook that adds noise).
                env.generators.write(resume)
            known = {id(leaf) for leaf in leaves}
            if any(id(leaf) not in known for leaf in call.learn_leaves(record, rebuilt)):
                raise RestartStep(call.where() + " reads a leaf that it did not read before")
            outputs = [t for t in rebuilt.outputs if t.requires_grad]
            roots = [t for t, grad in zip(outputs, grads, strict=True) if grad is not None]
            cotangents = [grad for grad in grads if grad is not None]
            inputs, below = len(rebuilt.inputs), [*rebuilt.inputs, *leaves]
            single = {number for number, count in Counter(slots).items() if count == 1}
            entries = [*rebuilt.entries, *leaves]
            apart = Contributions(roots, [None if n in single else t for n, t in enumerate(entries)])
            # The VJP frees the graph as it goes; whoever holds a tensor of it would keep its memory.
            rebuilt.outputs, rebuilt.entries, outputs, entries = [], [], [], []
            wanted = [t for t in below if t is not None]
            # The leaves' hooks are the outer engine's to call.
            with held_back(leaves):
                sums = iter(capture(roots, cotangents, wanted))
    except RestartStep as restart:
        raise Remembered(f"{restart}; it is remembered now: run forward and backward again") from None
    totals = [None if t is None else next(sums) for t in below]
    totals[:inputs] = _passed(driver, call, call.index, totals[:inputs])
    if driver.tell is not None:
        driver.tell(call, totals[:inputs])
    return _into_slots(slots, totals, apart.found)


def _into_slots(
    slots: list[int], totals: list[torch.Tensor | None], apart: list[list[torch.Tensor]]
) -> list[torch.Tensor | None]:
    """A gradient for each slot: the total of a tensor that is taken once, else one of its uses, in their order. Uses
    beyond the slots are added to the last one."""
    left: list[torch.Tensor | None] = []
    counts = Counter(slots)
    for place, number in enumerate(slots):
        if counts[number] == 1:
            left.append(totals[number])
            continue
        uses, total = apart[number], totals[number]
        if total is not None:
            # A block that returns what it was given: that gradient came first.
            uses.insert(0, total)
            totals[number] = None
        if not uses:
            left.append(None)
            continue
        grad = uses.pop(0)
        last = place + 1 == len(slots) or slots[place + 1] != number
        while last and uses:
            grad = grad + uses.pop(0)
        left.append(grad)
    return left


def _passed(driver: Driver, call: BlockCall, layer: int, grads: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The adjoints of one boundary behind the passes."""
    chosen = [(n, grad) for n, grad in enumerate(grads) if grad is not None]
    if not len(driver.pipeline) or not chosen:
        return grads
    states = [AdjointState(tensor=grad, layer_id=layer, block=call.name) for _, grad in chosen]
    made = driver.pipeline.run_all(states, {"block_index": layer, "block_name": call.name})
    result = list(grads)
    for (n, _), state in zip(chosen, made, strict=True):
        result[n] = state.tensor
    return result


def _check_versions(call: BlockCall, versions: list[tuple[torch.Tensor, int]]) -> None:
    for tensor, version in versions:
        if tensor._version != version:
            what = f"a leaf of shape {list(tensor.shape)}"
            for kind, named in (("parameter", call.module.named_parameters()), ("buffer", call.module.named_buffers())):
                what = next((f"{kind} {name!r}" for name, t in named if t is tensor), what)
            raise RebuildMismatchError(
                f"{call.where()}: {what} was changed in place between forward and backward; call backward() before "
                "optimizer.step()"
            )
