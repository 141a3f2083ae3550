"""BlockCall: run one block, later rebuild it under the same state, and take its VJP. Both drivers stand on it.

Note [A forward without graph is still the plain forward]
    Under `no_grad` some modules run other kernels (an LSTM in training, attention in eval give other bits) or branch on
    the grad mode. So the first time that a block sees a mode and shape it runs in grad mode with every saved tensor
    dropped. The second time it runs both ways, and only if outputs, buffers and generators agree bit for bit does it
    run under `no_grad` from then on.

Note [A block may write its input]
    In the first run a block gets a copy of its input (same strides, same alignment) and the version counter of the copy
    tells whether it wrote. A block that writes gets a copy every time, so the boundary and everything that aliases it
    stay as they were. A block that starts to write later is caught by the counter; it is then remembered and the step
    is repeated.

Note [Buffers change once]
    A buffer that the forward wrote has a pre-image from before the block ran. The rebuild sees a copy of the pre-image
    in the buffer's place and the real buffer comes back afterwards: swapping the object, not the values, leaves the
    version that the rebuilt graph has saved untouched.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from operator import is_not
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from . import _tree
from ._ambient import Autocast
from ._bits import exact_copy, same_bits, same_random
from ._leaves import graph_leaves
from ._records import Environment, Facts, Rebuilt, Record, RestartStep
from ._structure import Structure
from .errors import RebuildMismatchError, TensorTypeError

# The callers of `forward` and `rebuild` have grad mode on.
_set_grad_enabled = torch._C._set_grad_enabled

__all__ = ["BlockCall"]

# Modes and shapes remembered a block; the oldest is forgotten and learnt again.
_MAX_FACTS = 64

# Buffers up to this size always get a pre-image: a block that starts to write one late can then still be undone.
_SMALL_BUFFER = 64 * 1024

_strided = torch.strided

_LEAF_WRITE = "leaf Variable that requires grad is being used in an in-place operation"


class _Gate(torch.autograd.Function):
    """The identity from a leaf to a tensor that a block may write to: `memory` holds the leaf's values."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return memory.data

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def _no_unpack(_: Any) -> torch.Tensor:
    raise _NeedsSaved


class _NeedsSaved(Exception):
    """The block differentiates inside its own forward, so its saved tensors cannot be dropped."""


def _drop(_: torch.Tensor) -> None:
    return None


class BlockCall:
    """One block of a chain: `module` is called with one value. Shared by all steps; what it learns is in its facts.

    compute_dtype: floating inputs are cast to it; a block whose parameters have another floating type runs under
    autocast to it instead.
    """

    def __init__(self, module: nn.Module, name: str, index: int, compute_dtype: torch.dtype | None = None) -> None:
        self.module = module
        self.name = name
        self.index = index
        self.compute_dtype = compute_dtype
        self._facts: OrderedDict[Any, Facts] = OrderedDict()
        self._always_grad = any(
            type(m).__name__ == "OptimizedModule" or m._compiled_call_impl is not None for m in module.modules()
        )
        self._keep_saved = False
        self.structure = Structure(module)
        self._last: tuple[Any, Any, Any, tuple[bool, ...], Autocast, Facts] | None = None
        self.label = "reconstruct:" + name

    def where(self, action: tuple[int, str, int] | None = None) -> str:
        """How messages name this block, and an action on it."""
        return f"block {self.index} ({self.name})" + (f", action {action[0]}{action[1]}{action[2]}" if action else "")

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The block's parameters, as of its last new structure."""
        return self.structure.parameters

    # -- structure -------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Looks at the module anew if it is not what it was."""
        if not self.structure.holds():
            self.structure = Structure(self.module)
            self._last = None

    def facts_for(self, tensors: Sequence[torch.Tensor], needs: tuple[bool, ...], autocast: Autocast) -> Facts:
        """The facts for the structure of the last `refresh` and this class of inputs, new ones if this is the first
        time."""
        inputs = tuple([(t.shape, t.dtype, t.stride()) for t in tensors])
        key = (self.structure.signature, needs, autocast if autocast.active else None, inputs)
        facts = self._facts.get(key)
        if facts is None:
            facts = self._facts[key] = Facts(self.structure)
            if len(self._facts) > _MAX_FACTS:
                self._facts.popitem(last=False)
        self._last = (*inputs[0], needs, autocast, facts) if len(inputs) == 1 else None
        return facts

    # -- forward ---------------------------------------------------------------------------------------------------

    def forward(
        self,
        tensors: Sequence[torch.Tensor],
        shape: _tree.Shape,
        needs: tuple[bool, ...],
        env: Environment,
        keep_graph: bool,
        undo: list[Record],
    ) -> tuple[list[torch.Tensor], tuple[bool, ...], Record, Rebuilt | None]:
        """Runs the block on the boundary `tensors`, which stay as they are.

        needs: for each tensor, whether a gradient has to come back to it. `undo` gets the record before the block runs,
        so that a failed step can put buffers back. Returns the outputs (detached), which of them need a gradient, the
        record for the rebuild, and the graph if `keep_graph`.

        Raises RestartStep when the block wrote to its input for the first time after runs in which it had not.
        """
        autocast = env.autocast
        last = self._last
        first = tensors[0]
        if (
            last is not None
            and last[0] == first.shape
            and last[1] is first.dtype
            and last[2] == first.stride()
            and last[3] == needs
            and last[4] is autocast
        ):
            facts = last[5]
        else:
            facts = self.facts_for(tensors, needs, autocast)
        compare = facts.seen > 0 and facts.no_grad is None and not keep_graph and not self._always_grad
        record = Record(facts, shape, needs, env.before(facts, compare), autocast)
        versions = self._guard_buffers(record) if self.structure.buffers else None
        undo.append(record)
        if autocast.active:
            # Casts that were cached without a graph would cut the weights off.
            torch.clear_autocast_cache()
        rebuilt: Rebuilt | None = None
        if keep_graph:
            rebuilt, outputs = self._run_in_grad_mode(tensors, shape, needs, facts, record)
        elif facts.no_grad:
            outputs = self._run_no_grad(tensors, shape, facts, record)
        elif compare:
            outputs = self._compare_modes(tensors, shape, needs, facts, record, env)
        else:
            outputs = self._run_dropping(tensors, shape, needs, facts, record)
        if versions is not None:
            self._note_written(record, versions)
        if record.random is not None:
            record.random = env.after(facts, record.random)
        if not keep_graph:
            facts.seen += 1
        record.out_meta = [(t.shape, t.dtype) for t in outputs]
        return outputs, facts.out_needs, record, rebuilt

    def _invoke(self, value: Any) -> Any:
        dtype = self.compute_dtype
        if dtype is None:
            return self.module(value)
        return self._invoke_cast(value, dtype)

    def _invoke_cast(self, value: Any, dtype: torch.dtype) -> Any:
        own = {p.dtype for p in self.module.parameters() if p.is_floating_point()}
        tensors, shape = _tree.flatten(value)
        if own <= {dtype}:
            cast = [t.to(dtype) if t.is_floating_point() else t for t in tensors]
            return self.module(_tree.unflatten(cast, shape))
        device = next((t.device.type for t in tensors), "cpu")
        with torch.autocast(device, dtype=dtype):
            return self.module(value)

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
                    f"{self.where()} returned {kind}, which cannot be a boundary; return a "
                    "dense tensor on a real device "
                    ""
                    "(for a sparse one: .to_dense() at the end of the block)"
                )
        return tensors, shape

    def _gated(
        self, tensors: Sequence[torch.Tensor], needs: Sequence[bool], facts: Facts, learn: bool
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
        """Leaves for the inputs that need a gradient, and what the block is called with."""
        leaves: list[torch.Tensor | None] = []
        arguments: list[torch.Tensor] = []
        for number, (tensor, need) in enumerate(zip(tensors, needs, strict=True)):
            copied = learn or number in facts.writes
            if need:
                if tensor.requires_grad:
                    # The model's own input: its graph goes on to the left.
                    leaves.append(None)
                    arguments.append(_Gate.apply(tensor, exact_copy(tensor)) if copied else tensor)
                    continue
                leaf = tensor.detach().requires_grad_()
                leaves.append(leaf)
                arguments.append(_Gate.apply(leaf, exact_copy(tensor)) if copied else leaf)
            else:
                leaves.append(None)
                arguments.append(exact_copy(tensor) if copied else tensor)
        return leaves, arguments

    def _run_with_graph(
        self, tensors: Sequence[torch.Tensor], shape: _tree.Shape, needs: tuple[bool, ...], facts: Facts, learn: bool
    ) -> tuple[Rebuilt, Any]:
        if shape.spec is None and needs[0] and not learn and not facts.writes and not tensors[0].requires_grad:
            # The usual case. A leaf that requires grad cannot be written, so there is nothing to watch.
            leaf = tensors[0].detach().requires_grad_()
            try:
                return Rebuilt([leaf], []), self.module(leaf) if self.compute_dtype is None else self._invoke(leaf)
            except RuntimeError as error:
                self._raise_late_write(error, facts, 1)
        leaves, arguments = self._gated(tensors, needs, facts, learn)
        versions = [t._version for t in arguments]
        try:
            value = self._invoke(arguments[0] if shape.spec is None else _tree.unflatten(arguments, shape))
        except RuntimeError as error:
            if learn or facts.writes:
                raise
            self._raise_late_write(error, facts, len(tensors))
        self._note_input_writes(tensors, arguments, versions, facts)
        return Rebuilt(leaves, []), value

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
            if argument._version != version and number not in facts.writes:
                facts.writes.add(number)
                if argument is tensors[number]:
                    raise RestartStep(self.where() + " starts to write its input")

    def _run_dropping(
        self, tensors: Sequence[torch.Tensor], shape: _tree.Shape, needs: tuple[bool, ...], facts: Facts, record: Record
    ) -> list[torch.Tensor]:
        """Grad mode, saved tensors dropped."""
        hooks = nullcontext() if self._keep_saved else saved_tensors_hooks(_drop, _no_unpack)
        try:
            with hooks:
                return self._run_in_grad_mode(tensors, shape, needs, facts, record)[1]
        except _NeedsSaved:
            self._keep_saved = True
            raise RestartStep(self.where() + " differentiates in its forward") from None

    def _run_in_grad_mode(
        self, tensors: Sequence[torch.Tensor], shape: _tree.Shape, needs: tuple[bool, ...], facts: Facts, record: Record
    ) -> tuple[Rebuilt, list[torch.Tensor]]:
        """The block with its graph, and its outputs detached. Learns what only a graph shows."""
        rebuilt, value = self._run_with_graph(tensors, shape, needs, facts, learn=not facts.learned)
        facts.learned = True
        outputs, record.out_shape = self._outputs(value)
        rebuilt.outputs = outputs
        facts.out_needs = tuple([t.requires_grad for t in outputs])
        facts.differentiable = any(facts.out_needs)
        leaves = self._leaves_of(rebuilt)
        if len(leaves) != len(facts.leaves) or any(map(is_not, leaves, facts.leaves)):
            facts.leaves = leaves
        return rebuilt, [t.detach() for t in outputs]

    def _run_no_grad(
        self, tensors: Sequence[torch.Tensor], shape: _tree.Shape, facts: Facts, record: Record
    ) -> list[torch.Tensor]:
        if shape.spec is None and not facts.writes and not tensors[0].requires_grad:
            # The usual case.
            boundary = tensors[0]
            version = boundary._version
            _set_grad_enabled(False)
            try:
                value = self.module(boundary) if self.compute_dtype is None else self._invoke(boundary)
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

    def _compare_modes(
        self,
        tensors: Sequence[torch.Tensor],
        shape: _tree.Shape,
        needs: tuple[bool, ...],
        facts: Facts,
        record: Record,
        env: Environment,
    ) -> list[torch.Tensor]:
        """Runs the block under `no_grad` and then in grad mode, which is the run that counts."""
        try:
            trial = self._run_no_grad(tensors, shape, facts, record)
        except RestartStep:
            raise
        except Exception:
            # Whatever ails the trial, the run that counts shows it or does not have it.
            trial = []
        trial_random = env.generators.read()
        trial_buffers = [(home[name], buffer) for home, name, buffer, _ in record.buffers]
        trial_values = [t.detach().clone() for t, _ in trial_buffers]
        env.generators.write(record.random)
        record.restore_buffers()
        if env.autocast.active:
            torch.clear_autocast_cache()
        outputs = self._run_dropping(tensors, shape, needs, facts, record)
        agree = (
            len(trial) == len(outputs)
            and all(same_bits(a, b) and a.stride() == b.stride() for a, b in zip(trial, outputs, strict=True))
            and same_random(trial_random, env.generators.read())
            and all(
                same_bits(value, home[name])
                for value, (home, name, _, _) in zip(trial_values, record.buffers, strict=True)
            )
        )
        # Only grad mode shows when a block that skipped its parameters so far (layer drop) uses them after all.
        can_differ = self.structure.trainable or any(needs)
        facts.no_grad = agree and (facts.differentiable or not can_differ)
        return outputs

    # -- buffers ---------------------------------------------------------------------------------------------------

    def _guard_buffers(self, record: Record) -> list[tuple[dict[str, Any], str, torch.Tensor, int]]:
        """Keeps pre-images: of all buffers while it is not known which are written, then of those and of small ones.
        Returns the versions now."""
        written = record.facts.written_buffers
        versions = []
        for home in self.structure.buffers:
            for name, buffer in home.items():
                if buffer is None:
                    continue
                versions.append((home, name, buffer, buffer._version))
                if written is None or (id(home), name) in written or buffer.nbytes <= _SMALL_BUFFER:
                    record.buffers.append((home, name, buffer, buffer.detach().clone()))
        return versions

    def _note_written(self, record: Record, versions: list[tuple[dict[str, Any], str, torch.Tensor, int]]) -> None:
        # Batch norm's kernel writes its running statistics without moving their version: where there is a pre-image,
        # bits decide.
        before = {(id(home), name): value for home, name, _, value in record.buffers}
        changed = set()
        for home, name, buffer, version in versions:
            key = (id(home), name)
            replaced = home.get(name) is not buffer or buffer._version != version
            if replaced or (key in before and not same_bits(buffer, before[key])):
                changed.add(key)
        kept = set(before)
        record.facts.written_buffers = changed | (record.facts.written_buffers or set())
        if not changed <= kept:
            names = ", ".join(sorted(name for _, name in changed - kept))
            raise RebuildMismatchError(
                f"{self.where()} wrote its buffer {names} for the first time; its value from before the step was not "
                "kept and "
                "is lost. From now on it is kept: restore that buffer and run the step again"
            )
        record.buffers = [entry for entry in record.buffers if (id(entry[0]), entry[1]) in changed]

    # -- rebuild ---------------------------------------------------------------------------------------------------

    def rebuild(
        self, record: Record, tensors: Sequence[torch.Tensor], env: Environment, action: tuple[int, str, int]
    ) -> Rebuilt:
        """Runs the block again from its boundary under the state of `record`, with its graph. Leaves generators where
        the block left them; the caller puts them back once after the sweep.

        Raises RebuildMismatchError if the outputs have another structure, shape or type than in the forward.
        """
        if record.random is not None:
            env.generators.write(record.random)
        if env.reentered and not record.buffers:
            rebuilt, value = self._run_with_graph(tensors, record.in_shape, record.needs, record.facts, learn=False)
        else:
            with self._as_at_forward(record):
                rebuilt, value = self._run_with_graph(tensors, record.in_shape, record.needs, record.facts, learn=False)
        rebuilt.outputs, out_shape = self._outputs(value)
        outputs = rebuilt.outputs
        if len(outputs) == 1 and out_shape.spec is None:
            output = outputs[0]
            shape, dtype = record.out_meta[0]
            if output.shape == shape and output.dtype is dtype and output.requires_grad == record.facts.out_needs[0]:
                return rebuilt
        if (
            len(outputs) != len(record.out_meta)
            or any(t.shape != s or t.dtype != d for t, (s, d) in zip(outputs, record.out_meta, strict=True))
            or not out_shape.same_structure(record.out_shape)
        ):
            raise RebuildMismatchError(
                f"{self.where(action)}: the rebuilt output is {_describe(outputs)}, in the forward it was "
                f"{_describe_meta(record.out_meta)}. The block's forward must depend on its input, parameters and "
                "buffers alone"
            )
        needs = tuple([t.requires_grad for t in outputs])
        if needs != record.facts.out_needs:
            raise RebuildMismatchError(
                f"{self.where(action)}: which outputs require grad has changed since the forward "
                f"({record.facts.out_needs} then, {needs} now). Do not freeze or unfreeze parameters between forward "
                "and backward"
            )
        return rebuilt

    @contextmanager
    def _as_at_forward(self, record: Record) -> Iterator[None]:
        structure = record.facts.structure
        changed = [
            (m, m.training)
            for m, training in zip(structure.modules, structure.training, strict=True)
            if m.training is not training
        ]
        for module, training in changed:
            module.training = not training
        swapped: list[tuple[dict[str, Any], str, Any]] = []
        for home, name, _, before in record.buffers:
            swapped.append((home, name, home.get(name)))
            home[name] = before.clone()
        try:
            if record.autocast.active:
                torch.clear_autocast_cache()
            with record.autocast.region(), torch.enable_grad():
                yield
        finally:
            for home, name, buffer in swapped:
                home[name] = buffer
            for module, training in changed:
                module.training = training

    def _leaves_of(self, rebuilt: Rebuilt) -> list[torch.Tensor]:
        """The leaves of the graph that are not the block's inputs."""
        inputs = {id(t) for t in rebuilt.inputs if t is not None}
        return [leaf for leaf in graph_leaves(rebuilt.outputs) if id(leaf) not in inputs]

    def learn_leaves(self, record: Record, rebuilt: Rebuilt) -> list[torch.Tensor]:
        """The leaves of a rebuilt graph; those that were not known are remembered and returned."""
        known = {id(leaf) for leaf in record.facts.leaves}
        new = [leaf for leaf in self._leaves_of(rebuilt) if id(leaf) not in known]
        record.facts.leaves = record.facts.leaves + new if new else record.facts.leaves
        return new


def _describe(tensors: Sequence[torch.Tensor]) -> str:
    return _describe_meta([(t.shape, t.dtype) for t in tensors])


def _describe_meta(meta: Sequence[tuple[torch.Size, torch.dtype]]) -> str:
    return ", ".join(f"{str(d).removeprefix('torch.')}{list(s)}" for s, d in meta)
