"""The ways in which a block is run once: with its graph, with a graph that is dropped, and without one.

Note [A forward without graph is still the plain forward]
    Under `no_grad` some modules run other kernels (an LSTM in training, attention in eval give other bits) or branch on
    the grad mode. So the first time that a block sees a mode and shape it runs in grad mode with every saved tensor
    dropped. The second time it runs both ways, and only if outputs, state and generators agree bit for bit, and every
    trainable parameter was seen in the graph, does it run under `no_grad` from then on.

Note [A block may write its input]
    In the first run a block gets a copy of its input (same strides, same alignment) and the version counter of the copy
    tells whether it wrote. A block that writes gets a copy every time, so the boundary and everything that aliases it
    stay as they were. A block that starts to write later is caught by the counter; it is then remembered and the step
    is repeated.

Note [A graph that is dropped must not be used]
    A block may hand a tensor of its graph out by a side door: an attribute (`self.aux_loss = ...`), a list, a hook. The
    graph behind it is dropped with the forward, and its gradient would be lost. So the first runs go through gates at
    the input, and what the graph saved are tokens: a token that outlives the forward shows that somebody holds the
    graph. Such a block always runs in grad mode, and a backward that comes to a token or a gate raises BlockError.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import zip_longest
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from . import _tree
from ._bits import exact_copy, overlapping
from ._leaves import graph_leaves, has_older, next_number
from ._records import Facts, Rebuilt, Record, RestartStep
from ._structure import Structure
from ._uses import edges_to
from .errors import BlockError, TensorTypeError

__all__ = ["BlockRuns"]

# The callers have grad mode on.
_set_grad_enabled = torch._C._set_grad_enabled

_strided = torch.strided

_is_autocast_on = torch._C._is_any_autocast_enabled

_LEAF_WRITE = "leaf Variable that requires grad is being used in an in-place operation"


class _Count:
    """How many tokens of one run are alive."""

    __slots__ = ("alive", "name", "running")

    def __init__(self, name: str) -> None:
        self.alive = 0
        self.running = True
        self.name = name

    def token(self, _: Any = None) -> _Token:
        return _Token(self)

    def unpack(self, _: Any) -> NoReturn:
        if self.running:
            raise _NeedsSaved
        raise BlockError(
            f"{self.name}: a tensor of this block's graph was kept outside of it (an attribute, a list, a hook) and a "
            "backward came to it, but that graph was dropped with the forward. Return the tensor from the block, or "
            "detach it, or leave this block out"
        )


class _Token:
    """Stands for a tensor that a graph would have saved, or for the graph's way to the input."""

    __slots__ = ("count",)

    def __init__(self, count: _Count) -> None:
        self.count = count
        count.alive += 1

    def __del__(self) -> None:
        self.count.alive -= 1


class _Gate(torch.autograd.Function):
    """The identity from a leaf to a tensor that a block may write to: `memory` holds the leaf's values. With a `count`
    the graph is going to be dropped."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, memory: torch.Tensor, count: _Count | None) -> torch.Tensor:
        ctx.token = None if count is None else count.token()
        return memory.data

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.token is not None:
            ctx.token.count.unpack(None)
        return grads[0], None, None


def _drop(_: torch.Tensor) -> None:
    return None


class _NeedsSaved(Exception):
    """The block differentiates inside its own forward, so its saved tensors cannot be dropped."""


class BlockRuns:
    """One block and the ways to run it. `entry` is called with the block's input as one value."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        index: int,
        compute_dtype: torch.dtype | None = None,
        entry: Callable[[Any], Any] | None = None,
    ) -> None:
        self.module = module
        self.name = name
        self.index = index
        self.compute_dtype = compute_dtype
        self.structure = Structure(module)
        self._entry: Callable[[Any], Any] = module if entry is None else entry
        self._keep_saved = False

    def where(self, action: tuple[int, str, int] | None = None) -> str:
        """How messages name this block, and an action on it."""
        return f"block {self.index} ({self.name})" + (f", action {action[0]}{action[1]}{action[2]}" if action else "")

    # -- calling ---------------------------------------------------------------------------------------------------

    def _invoke(self, value: Any) -> Any:
        dtype = self.compute_dtype
        if dtype is None:
            return self._entry(value)
        own = {p.dtype for p in self.module.parameters() if p.is_floating_point()}
        tensors, shape = _tree.flatten(value)
        if own <= {dtype}:
            cast = [t.to(dtype) if t.is_floating_point() else t for t in tensors]
            return self._entry(_tree.unflatten(cast, shape))
        device = next((t.device.type for t in tensors), "cpu")
        with torch.autocast(device, dtype=dtype):
            return self._entry(value)

    def _invoke_tree(self, arguments: Sequence[torch.Tensor], shape: _tree.Shape, watch: bool) -> Any:
        """The same for a value that is more than one tensor. `watch`: see that the block leaves its containers and
        objects as they are; others may hold them too, and the rebuild gets copies."""
        value = _tree.unflatten(arguments, shape)
        if not watch:
            return self._invoke(value)
        if _tree.holds_iterator(shape):
            raise BlockError(f"{self.where()} is given an iterator, which can be used up once; give it a list")
        before = _tree.plain_state(value)
        result = self._invoke(value)
        if _tree.plain_state(value) != before:
            raise BlockError(
                f"{self.where()} changes a container or object that it is called with (a key/value cache, a list of "
                "losses): a rebuild would change it again. Return what is new instead, switch the cache off "
                "(use_cache=False), or leave this block out"
            )
        return result

    def _outputs(self, value: Any) -> tuple[list[torch.Tensor], _tree.Shape]:
        if type(value) is torch.Tensor and value.layout is _strided and not value.is_meta:
            return [value], _tree.SINGLE
        tensors, shape = _tree.flatten(value)
        if not tensors:
            raise TensorTypeError(
                f"{self.where()} returned no tensor but {type(value).__name__}; a block has to return its output"
            )
        for tensor in tensors:
            if tensor.layout is not torch.strided or tensor.is_meta:
                kind = "a meta tensor" if tensor.is_meta else f"a tensor of layout {tensor.layout}"
                raise TensorTypeError(
                    f"{self.where()} returned {kind}, which cannot be a boundary; return a dense tensor on a real "
                    "device (for a sparse one: .to_dense() at the end of the block)"
                )
        return tensors, shape

    # -- with a graph ----------------------------------------------------------------------------------------------

    def _gated(
        self, tensors: Sequence[torch.Tensor], needs: Sequence[bool], facts: Facts, learn: bool, count: _Count | None
    ) -> tuple[Rebuilt, list[torch.Tensor]]:
        """Leaves for the inputs that need a gradient, and what the block is called with."""
        entries: list[torch.Tensor | None] = []
        casts = _is_autocast_on() or self.compute_dtype is not None
        leaves: list[torch.Tensor | None] = []
        arguments: list[torch.Tensor] = []
        for number, (tensor, need) in enumerate(zip(tensors, needs, strict=True)):
            copied = learn or number in facts.writes
            if need:
                if tensor.requires_grad:
                    # The model's own input: its graph goes on to the left.
                    leaves.append(None)
                    entries.append(None)
                    arguments.append(_Gate.apply(tensor, exact_copy(tensor), count) if copied else tensor)
                    continue
                leaf = tensor.detach().requires_grad_()
                leaves.append(leaf)
                # Autocast keeps its cast of a leaf, as it does for weights, and would add up the gradients of all uses
                # in the cast's type.
                entry = leaf.view_as(leaf) if casts and not copied else leaf
                entry = _Gate.apply(leaf, exact_copy(tensor), count) if copied else entry
                entries.append(entry)
                arguments.append(entry)
            else:
                leaves.append(None)
                entries.append(None)
                arguments.append(exact_copy(tensor) if copied else tensor)
        return Rebuilt(leaves, [], entries), arguments

    def _run_with_graph(
        self,
        tensors: Sequence[torch.Tensor],
        shape: _tree.Shape,
        needs: tuple[bool, ...],
        facts: Facts,
        learn: bool,
        count: _Count | None = None,
    ) -> tuple[Rebuilt, Any]:
        if shape.spec is None and needs[0] and not learn and not facts.writes and not tensors[0].requires_grad:
            # The usual case. A leaf that requires grad cannot be written, so there is nothing to watch.
            leaf = tensors[0].detach().requires_grad_()
            casts = _is_autocast_on() or self.compute_dtype is not None
            given = leaf.view_as(leaf) if casts else leaf
            try:
                return Rebuilt([leaf], [], [given]), self._entry(given) if self.compute_dtype is None else self._invoke(
                    given
                )
            except RuntimeError as error:
                self._raise_late_write(error, facts, 1)
        rebuilt, arguments = self._gated(tensors, needs, facts, learn, count)
        versions = [t._version for t in arguments]
        try:
            value = (
                self._invoke(arguments[0]) if shape.spec is None else self._invoke_tree(arguments, shape, watch=learn)
            )
        except RuntimeError as error:
            if learn or facts.writes:
                raise
            self._raise_late_write(error, facts, len(tensors))
        self._note_input_writes(tensors, arguments, versions, facts)
        facts.hooked = facts.hooked or (learn and any(t._backward_hooks for t in arguments))
        return rebuilt, value

    def _raise_late_write(self, error: RuntimeError, facts: Facts, count: int) -> NoReturn:
        """RestartStep if the block tried to write one of its `count` inputs, else the error itself."""
        if _LEAF_WRITE in str(error):
            facts.writes.update(range(count))
            raise RestartStep(self.where() + " starts to write its input") from error
        raise error

    def _note_input_writes(
        self, tensors: Sequence[torch.Tensor], arguments: Sequence[torch.Tensor], versions: Sequence[int], facts: Facts
    ) -> None:
        for number, (argument, version) in enumerate(zip(arguments, versions, strict=True)):
            if argument._version == version:
                continue
            if overlapping(tensors) and any(
                overlapping([tensors[number], t]) for n, t in enumerate(tensors) if n != number
            ):
                raise BlockError(
                    f"{self.where()} writes to an input that shares memory with another of its inputs; give it copies "
                    "(.clone())"
                )
            if number not in facts.writes:
                facts.writes.add(number)
                if argument is tensors[number]:
                    raise RestartStep(self.where() + " starts to write its input")

    def _run_dropping(
        self,
        tensors: Sequence[torch.Tensor],
        shape: _tree.Shape,
        needs: tuple[bool, ...],
        facts: Facts,
        record: Record,
        learn: bool = False,
    ) -> list[torch.Tensor]:
        """Grad mode, saved tensors dropped."""
        learn = learn or facts.leaks or not facts.learned
        count = _Count(self.where())
        pack = count.token if learn else _drop
        hooks = nullcontext() if self._keep_saved else saved_tensors_hooks(pack, count.unpack)
        try:
            with hooks:
                outputs = self._run_in_grad_mode(tensors, shape, needs, facts, record, learn, count)[1]
        except _NeedsSaved:
            self._keep_saved = True
            raise RestartStep(self.where() + " differentiates in its forward") from None
        count.running = False
        if count.alive and not facts.leaks:
            # A reference cycle (an autograd.Function that keeps its output) is nobody's.
            gc.collect()
        if count.alive:
            facts.leaks = True
            facts.no_grad = False
        return outputs

    def _run_in_grad_mode(
        self,
        tensors: Sequence[torch.Tensor],
        shape: _tree.Shape,
        needs: tuple[bool, ...],
        facts: Facts,
        record: Record,
        learn: bool,
        count: _Count | None = None,
    ) -> tuple[Rebuilt, list[torch.Tensor]]:
        """The block with its graph, and its outputs detached. Learns what only a graph shows."""
        start = next_number() if learn else 0
        rebuilt, value = self._run_with_graph(tensors, shape, needs, facts, learn, count)
        facts.learned = True
        outputs, record.out_shape = self._outputs(value)
        rebuilt.outputs = outputs
        facts.out_needs = tuple([t.requires_grad for t in outputs])
        facts.differentiable = any(facts.out_needs)
        leaves = self._leaves_of(rebuilt)
        known = {id(leaf) for leaf in facts.leaves}
        new = [leaf for leaf in leaves if id(leaf) not in known]
        if new:
            facts.leaves = facts.leaves + new
        if learn:
            self._count_uses(rebuilt, facts)
            facts.outer = facts.outer or has_older(outputs, start)
        return rebuilt, [t.detach() for t in outputs]

    @staticmethod
    def _count_uses(rebuilt: Rebuilt, facts: Facts) -> None:
        targets = [*rebuilt.entries, *facts.leaves]
        edges = edges_to(rebuilt.outputs, targets)
        uses = [len(e) + sum(t is root for root in rebuilt.outputs) for t, e in zip(targets, edges, strict=True)]
        facts.uses = [max(a, b) for a, b in zip_longest(facts.uses, uses, fillvalue=0)]

    def _leaves_of(self, rebuilt: Rebuilt) -> list[torch.Tensor]:
        """The leaves of the graph that are not the block's inputs."""
        inputs = {id(t) for t in rebuilt.inputs if t is not None}
        return [leaf for leaf in graph_leaves(rebuilt.outputs) if id(leaf) not in inputs]

    # -- without a graph -------------------------------------------------------------------------------------------

    def _run_no_grad(
        self, tensors: Sequence[torch.Tensor], shape: _tree.Shape, facts: Facts, record: Record
    ) -> list[torch.Tensor]:
        if shape.spec is None and not facts.writes and not tensors[0].requires_grad:
            # The usual case.
            boundary = tensors[0]
            version = boundary._version
            _set_grad_enabled(False)
            try:
                value = self._entry(boundary) if self.compute_dtype is None else self._invoke(boundary)
            finally:
                _set_grad_enabled(True)
            if boundary._version != version:
                facts.writes.add(0)
                raise RestartStep(self.where() + " starts to write its input")
            outputs, record.out_shape = self._outputs(value)
            return outputs if not outputs[0].requires_grad else [t.detach() for t in outputs]
        if facts.writes:
            arguments = [exact_copy(t) if n in facts.writes else t for n, t in enumerate(tensors)]
        else:
            arguments = [t.detach() if t.requires_grad else t for t in tensors]
        versions = [t._version for t in arguments]
        # What `torch.no_grad()` does, at a tenth of its price.
        _set_grad_enabled(False)
        try:
            value = self._invoke(arguments[0] if shape.spec is None else _tree.unflatten(arguments, shape))
        finally:
            _set_grad_enabled(True)
        self._note_input_writes(tensors, arguments, versions, facts)
        outputs, record.out_shape = self._outputs(value)
        return [t.detach() if t.requires_grad else t for t in outputs]
