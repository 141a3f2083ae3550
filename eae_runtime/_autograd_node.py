"""A block in the outer graph of the autograd driver: one node that rebuilds the block when its gradient arrives.

Note [Shared tensors pass through the nodes]
    A tensor that several blocks take (an encoder's output, a tied weight) gets its gradient in plain PyTorch as one sum
    over all uses, from the last to the first. Sums made block by block have other last bits. So each node also gives
    out an alias of such a tensor, and the next block that takes the tensor is given the alias instead: the sum so far
    then comes to each node as the gradient of its alias, and is an extra root of the node's VJP.
    Aliases hold for one forward of the whole model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ._leaves import capture, held_back
from ._records import Environment, Record, RestartStep
from .adjoint import AdjointState
from .blockcall import BlockCall
from .errors import BlockError, RebuildMismatchError

if TYPE_CHECKING:
    from ._autograd_driver import Door, Driver

__all__ = ["Node", "Run"]


class Run:
    """One run of a block on its way to its node. `below` are the node's inputs: the boundary's tensors and the leaves,
    each in its latest alias."""

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
        self.leaves = record.facts.leaves
        self.tensors: list[torch.Tensor] | None = tensors
        self.needs = needs
        self.outputs = [t for t, need in zip(outputs, out_needs, strict=True) if need]
        self.out_needs = out_needs
        aliases = door.driver.local.aliases
        self.below: list[torch.Tensor] = [*tensors, *self.leaves]
        # The numbers in `below` that get a new alias, and whether each number's gradient is complete after this block.
        self.passing: list[int] = []
        self.first = [True] * len(tensors)
        if aliases is not None:
            driver = door.driver
            driver.note_readers(door.index, self.leaves)
            # As long as nobody knows what others read, every leaf passes.
            learning = record.facts.seen <= 1
            for number, tensor in enumerate(self.below):
                if number < len(tensors):
                    if not needs[number]:
                        continue
                elif not learning and not driver.is_shared(tensor) and id(tensor) not in aliases:
                    continue
                self.passing.append(number)
                known = aliases.get(id(tensor))
                if known is not None:
                    self.below[number] = known[1]
                    if number < len(tensors):
                        self.first[number] = False
        self.originals = [[*tensors, *self.leaves][number] for number in self.passing]

    def publish(self, made: tuple[torch.Tensor, ...]) -> None:
        """Makes the node's aliases the latest ones."""
        aliases = self.door.driver.local.aliases
        if aliases is not None:
            for tensor, alias in zip(self.originals, made[len(self.outputs) :], strict=True):
                aliases[id(tensor)] = (tensor, alias)
        self.originals = []
        self.outputs = []
        self.below = []
        self.tensors = None


class Node(torch.autograd.Function):
    """A block in the outer graph."""

    @staticmethod
    def forward(ctx: Any, run: Run, *below: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.count = len(run.outputs)
        ctx.passing = run.passing
        ctx.first = run.first
        ctx.door, ctx.record, ctx.leaves, ctx.needs = run.door, run.record, run.leaves, run.needs
        tensors = run.tensors
        assert tensors is not None
        ctx.save_for_backward(*tensors)
        ctx.versions = _versions(run.door.call, run.leaves)
        # Not the tensors that autograd knows: it would take an output for a view of an input.
        return tuple([t.detach() for t in (*run.outputs, *run.originals)])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        passing: list[int] = ctx.passing
        sums = dict(zip(passing, grads[ctx.count :], strict=True))
        count = len(ctx.needs) + len(ctx.leaves)
        if all(grad is None for grad in grads[: ctx.count]):
            # Only what later blocks found comes through.
            return None, *[sums.get(number) for number in range(count)]
        call: BlockCall = ctx.door.call
        if torch.is_grad_enabled():
            raise BlockError(
                f"{call.where()}: backward(create_graph=True) asks for a graph of the gradients, which a rebuilt block "
                "does not have; leave this block out of wrap(), or unwrap() the model"
            )
        tensors = list(ctx.saved_tensors)
        _check_versions(call, ctx.versions)
        return None, *_reverse(ctx.door, ctx.record, ctx.leaves, tensors, list(grads[: ctx.count]), sums, ctx.first)


def _reverse(
    door: Door,
    record: Record,
    leaves: list[torch.Tensor],
    tensors: list[torch.Tensor],
    grads: list[torch.Tensor | None],
    sums: dict[int, torch.Tensor | None],
    first: list[bool],
) -> list[torch.Tensor | None]:
    """Rebuilds the block and takes its VJP: the gradients of its inputs and leaves, with the sums so far."""
    call, driver = door.call, door.driver
    env = Environment(driver.generators, ("cpu",))
    resume = env.generators.read()
    if call.index in driver.lasts:
        grads = _passed(driver, call, call.index + 1, grads, [True] * len(grads))
    try:
        with torch.enable_grad():
            rebuilt = call.rebuild(record, [t.detach() for t in tensors], env, (call.index, "R", 0))
            new = call.learn_leaves(record, rebuilt)
            known = {id(leaf) for leaf in leaves}
            if any(id(leaf) not in known for leaf in new):
                raise RestartStep(call.where() + " reads a leaf that it did not read before")
            outputs = [t for t in rebuilt.outputs if t.requires_grad]
            roots = [t for t, grad in zip(outputs, grads, strict=True) if grad is not None]
            cotangents = [grad for grad in grads if grad is not None]
            below = [*rebuilt.inputs, *leaves]
            entries = [*rebuilt.entries, *leaves]
            for number, total in sums.items():
                root = entries[number]
                if total is not None and root is not None:
                    roots.append(root)
                    cotangents.append(total)
            rebuilt.outputs, rebuilt.entries, outputs, entries = [], [], [], []
            wanted = [t for t in below if t is not None]
            # The leaves' hooks are the outer engine's to call.
            with held_back(leaves):
                found = iter(capture(roots, cotangents, wanted))
    except RestartStep as restart:
        raise RebuildMismatchError(f"{restart}; it is remembered now: run forward and backward again") from None
    finally:
        env.generators.write(resume)
    gradients = [None if t is None else next(found) for t in below]
    inputs = len(rebuilt.inputs)
    if driver.tell is not None:
        driver.tell(call, gradients[:inputs])
    return _passed(driver, call, call.index, gradients[:inputs], first) + gradients[inputs:]


def _passed(
    driver: Driver, call: BlockCall, layer: int, grads: list[torch.Tensor | None], whole: list[bool]
) -> list[torch.Tensor | None]:
    """The adjoints of one boundary behind the passes; those that are not `whole` yet are left alone."""
    chosen = [(n, grad) for n, grad in enumerate(grads) if grad is not None and whole[n]]
    if not len(driver.pipeline) or not chosen:
        return grads
    states = [AdjointState(tensor=grad, layer_id=layer, block=call.name) for _, grad in chosen]
    made = driver.pipeline.run_all(states, {"block_index": layer, "block_name": call.name})
    result = list(grads)
    for (n, _), state in zip(chosen, made, strict=True):
        result[n] = state.tensor
    return result


def _versions(call: BlockCall, leaves: list[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    return [(t, t._version) for t in call.structure.parameters] + [(t, t._version) for t in leaves]


def _check_versions(call: BlockCall, versions: list[tuple[torch.Tensor, int]]) -> None:
    for tensor, version in versions:
        if tensor._version != version:
            names = [name for name, p in call.module.named_parameters() if p is tensor]
            what = f"parameter {names[0]!r}" if names else f"a leaf of shape {list(tensor.shape)}"
            raise RebuildMismatchError(
                f"{call.where()}: {what} was changed in place between forward and backward; call backward() before "
                "optimizer.step()"
            )
