"""The chain driver: walks a schedule action by action. The runtime owns the order; the order comes from the Go core.

A :class:`Sweep` is one batch on its way through the chain: its boundaries, records, graphs and adjoints, a set a
microbatch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.autograd.profiler import record_function

from . import _tree
from ._chain import Chain
from ._checks import level
from ._leaves import accumulate, graph_leaves, reaches
from ._losses import Loss, no_gradient, pass_context, total_loss
from ._program import ALL, Action, Program
from ._records import Environment, Rebuilt, Record, RestartStep
from ._sharing import Collector, SharedLeaves
from .adjoint import AdjointState
from .blockcall import BlockCall
from .errors import PassError, RebuildMismatchError
from .events import EventType, tell_rebuilt

__all__ = ["Sweep"]

# Bytes from which an output is let go before its VJP.
_LARGE = 1 << 16


class Sweep:
    """One batch through the chain. `inputs` are the microbatches' inputs.

    After a failure, `undo()` puts buffers and generators back and drops every boundary.
    """

    # Whether blocks draw from streams of their own.
    own_streams = False

    def __init__(
        self,
        chain: Chain,
        inputs: Sequence[Any],
        *,
        need_input_grad: bool,
        keep_output: bool,
        number: int = 0,
        program: Program | None = None,
    ) -> None:
        """program: what `go_forward` and `go_back` walk."""
        self.chain = chain
        self._program = program
        # How many sweeps there were before this one.
        self.number = number
        self.records: dict[tuple[int, int], Record] = {}
        self.out_values: dict[int, Any] = {}
        self.loss: torch.Tensor | None = None
        self.collector = Collector(None)
        self.where: Action | None = None
        self.parts = len(inputs)
        # Called with the leaves of a graph before its first VJP accumulates into them.
        self.before_vjp: Callable[[Sequence[torch.Tensor]], None] | None = None
        self._keep_output = keep_output
        self._undo: list[Record] = []
        self._env = Environment(chain.generators, chain.device_types, chain.autocast, chain.structure)
        chain.autocast = self._env.autocast
        self._env.sparse = True
        self._env.check = self._level
        self._random = chain.generators.read()
        self._now: dict[int, tuple[list[torch.Tensor], _tree.Shape, tuple[bool, ...]]] = {}
        # Of each microbatch's output, once its loss has been taken.
        self._rows: dict[int, int] = {}
        self._originals: dict[int, list[torch.Tensor]] = {}
        self._guards: dict[int, list[tuple[torch.Tensor, int]]] = {}
        self._graphs: dict[tuple[int, int], Rebuilt] = {}
        self._adjoints: dict[int, list[torch.Tensor | None]] = {}
        self._metadata: dict[tuple[int, int], dict[str, Any]] = {}
        self._roots: dict[int, tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]] = {}
        self._loss_fn: Loss | None = None
        self._losses: list[tuple[torch.Tensor, float]] = []
        self._shared: dict[int, SharedLeaves] = {}
        self._started: float = 0.0
        # Whether the last actions were reverse ones.
        self._reversing = False
        self._ops: dict[str, Callable[[int, int], None]] = {
            "F": self._keep_graph,
            "C": self._forward,
            "N": self._forward_only,
            "B": self._boundary_operator,
            "R": self._rebuild,
            "V": self._vjp,
            "P": self._passes,
            "S": self._store,
            "L": self._load,
            "D": self._drop,
        }
        self._given: list[list[torch.Size]] = []
        for m, value in enumerate(inputs):
            tensors, shape = _tree.flatten(value)
            self._given.append([t.shape for t in tensors])
            # An inference tensor has no version counter and cannot be saved by autograd; a copy can.
            tensors = [t.clone() if t.is_inference() else t for t in tensors]
            needs = tuple(
                [(t.requires_grad or need_input_grad) and (t.is_floating_point() or t.is_complex()) for t in tensors]
            )
            if any(t.requires_grad for t in tensors):
                self._originals[m] = tensors
            self._now[m] = (tensors, shape, needs)

    def _level(self, b: int) -> int:
        return level(self.chain.verify, b, self.number, len(self.chain.calls))

    # -- walking ---------------------------------------------------------------------------------------------------

    def go_forward(self) -> None:
        """The schedule's forward list."""
        assert self._program is not None
        self.run(self._program.forward)

    def go_back(self) -> None:
        """The schedule's reverse list."""
        assert self._program is not None
        self.run(self._program.reverse)

    def run(self, actions: Sequence[Action]) -> None:
        """Executes the actions in order. An exception leaves `where` at the action that failed."""
        ops = self._ops
        if self.chain.trace is not None or torch.autograd._profiler_enabled():
            self._run_observed(actions)
            return
        for action in actions:
            self.where = action
            kind, block, microbatch = action
            ops[kind](block, microbatch)
        self._env.verify()
        self.where = None

    def _run_observed(self, actions: Sequence[Action]) -> None:
        trace = self.chain.trace
        for action in actions:
            self.where = action
            kind, block, microbatch = action
            name = f"{block}{kind}{'*' if microbatch == ALL else microbatch}"
            start = time.time_ns()
            # With a word before it: the profiler takes "2C0" for a mangled C++ name and shows "C0".
            with record_function("eae " + name):
                self._ops[kind](block, microbatch)
            if trace is not None:
                trace.add("executor", name, start, time.time_ns(), self.chain.store)
        self._env.verify()
        self.where = None

    def finish(self) -> None:
        """Ends a run of reverse actions: what draws in a backward has moved the generators since the last forward."""
        if self._reversing:
            self._reversing = False
            self._env.known = None

    def undo(self) -> None:
        """Puts buffers and generators back to what they were before the sweep and drops what it holds."""
        for record in reversed(self._undo):
            record.undo()
        self.chain.generators.write(self._random)
        self.release()

    def release(self) -> None:
        """Drops graphs, adjoints, guards and boundaries."""
        self._graphs.clear()
        self._adjoints.clear()
        self._guards.clear()
        self._roots.clear()
        self._now.clear()
        self.chain.store.clear()

    # -- forward ---------------------------------------------------------------------------------------------------

    def _advance(self, b: int, m: int, keep_graph: bool) -> tuple[list[torch.Tensor], Record, Rebuilt | None]:
        if self._reversing:
            self.finish()
        tensors, shape, needs = self._now[m]
        call = self.chain.calls[b]
        outputs, out_needs, record, rebuilt = call.forward(tensors, shape, needs, self._env, keep_graph, self._undo)
        self._now[m] = (outputs, record.out_shape, out_needs)
        return tensors, record, rebuilt

    def _keep_graph(self, b: int, m: int) -> None:
        _, record, rebuilt = self._advance(b, m, True)
        assert rebuilt is not None
        self.records[b, m] = record
        self._graphs[b, m] = rebuilt

    def _forward(self, b: int, m: int) -> None:
        tensors, record, _ = self._advance(b, m, False)
        self.records[b, m] = record
        if b or m not in self._originals:
            self._put(b, m, tensors)
        if self._keep_output and b == len(self.chain.calls) - 1:
            self._put(b + 1, m, self._now[m][0])

    def _forward_only(self, b: int, m: int) -> None:
        self._advance(b, m, False)
        if any(self._now[m][2]):
            self.chain.hidden.add(b)
            raise RestartStep(self.chain.calls[b].where() + " has a trainable leaf that is not a parameter")
        if self._keep_output and b == len(self.chain.calls) - 1:
            self._put(b + 1, m, self._now[m][0])

    # -- boundaries ------------------------------------------------------------------------------------------------

    def _put(self, b: int, m: int, tensors: list[torch.Tensor]) -> None:
        key = b + (m << 20)
        if len(tensors) == 1:
            tensor = tensors[0]
            self._guards[key] = [(tensor, tensor._version)]
            self.chain.store.adopt(key, tensor)
        else:
            self._guards[key] = [(t, t._version) for t in tensors]
            self.chain.store.adopt(key, tensors)

    def _store(self, b: int, m: int) -> None:
        if b or m not in self._originals:
            key = b + (m << 20)
            self.chain.store.move(key)
            self._guards.pop(key, None)

    def _load(self, b: int, m: int) -> None:
        if b or m not in self._originals:
            self.chain.store.load(b + (m << 20))

    def _drop(self, b: int, m: int) -> None:
        key = b + (m << 20)
        events = self.chain.events
        if events.active and events.wants(EventType.MEMORY_RELEASED):
            record = self.records.get((b - 1, m))
            for shape in [s for s, _ in record.out_meta] if record else self._given[m]:
                events.emit(EventType.MEMORY_RELEASED, shape=tuple(shape))
        if b or m not in self._originals:
            # Before its guard: a tensor that Python knows as well is let go without Python's lock.
            self.chain.store.drop(key)
        self._guards.pop(key, None)

    def _fetch(self, b: int, m: int) -> list[torch.Tensor]:
        if not b and m in self._originals:
            return self._originals[m]
        key = b + (m << 20)
        guards = self._guards.get(key)
        if guards is not None:
            # The boundary has not moved: what guards it is what the store holds.
            for tensor, version in guards:
                if tensor._version != version:
                    raise RebuildMismatchError(
                        f"{self.chain.calls[b].where((b, 'R', m))}: its input, boundary {b}, was "
                        "modified in place after the "
                        "forward. "
                        "Do not write to the model's input or to a block's output between forward and backward"
                    )
            return [tensor for tensor, _ in guards]
        if self.records[b, m].in_shape.spec is None:
            return [self.chain.store.fetch(key)]
        return self.chain.store.fetch_all(key)

    # -- loss ------------------------------------------------------------------------------------------------------

    def set_loss(self, loss: Loss, collector: Collector) -> None:
        """The loss for the `B` actions, and where the leaves' gradients go."""
        self._loss_fn = loss
        self.collector = collector

    def output(self, m: int) -> Any:
        """The chain's output for a microbatch, detached."""
        tensors, shape, _ = self._now[m]
        return _tree.unflatten(tensors, shape)

    def whole_output(self) -> Any:
        """The chain's output for the whole batch: the microbatches' outputs joined along their first dimension."""
        parts = [self._now[m] for m in sorted(self._now)]
        if len(parts) == 1:
            return self.output(next(iter(self._now)))
        joined = [torch.cat(tensors) for tensors in zip(*(p[0] for p in parts), strict=True)]
        return _tree.unflatten(joined, parts[0][1])

    def _boundary_operator(self, b: int, m: int) -> None:
        """The loss at x_L and the adjoint a_L (paper, eq. 7-13; here the head is a block and B is the loss alone)."""
        loss_fn = self._loss_fn
        assert loss_fn is not None
        self.finish()
        self._env.verify()
        self._env.known = None
        graph = self._graphs.get((b - 1, m)) if m != ALL else None
        weight = 1.0 if m == ALL or loss_fn.weights is None else loss_fn.weights[m]
        self._note_rows(self._now if m == ALL else (m,))
        if weight == 0.0:
            # A part that does not count; its own mean may be 0/0.
            self._adjoints[m] = [None] * len(self._now[m][2])
            self._let_go(m)
            return
        if graph is not None and not len(self.chain.pipeline) and not self._wants_adjoint():
            # The last block has its graph and nobody looks at a_L: one VJP goes through loss and block.
            value = _tree.unflatten(graph.outputs, self.records[b - 1, m].out_shape)
            loss = self._call_loss(value, m)
            leaves = graph_leaves([loss])
            if not reaches(loss, graph.outputs):
                raise no_gradient()
            # From here on the loss's graph alone decides how long the output lives.
            graph.outputs = []
            inputs = {id(t) for t in graph.inputs}
            self._roots[m] = ([loss], [loss_fn.cotangent(loss, weight)], [t for t in leaves if id(t) not in inputs])
        else:
            loss = self._loss_on_leaves(b, m, weight)
        self._let_go(m)
        self._losses.append((loss.detach(), weight))

    def _let_go(self, m: int) -> None:
        """Forgets the output of a microbatch, or of all: for a language model it is larger than all boundaries."""
        if not self._keep_output:
            for k in list(self._now) if m == ALL else (m,):
                _, shape, needs = self._now[k]
                self._now[k] = ([], shape, needs)

    def _note_rows(self, microbatches: Iterable[int]) -> None:
        for k in microbatches:
            output = self._now[k][0][0]
            self._rows[k] = output.shape[0] if output.dim() else 0

    def _wants_adjoint(self) -> bool:
        events = self.chain.events
        return events.active and events.wants(EventType.ADJOINT_CREATED)

    def _loss_on_leaves(self, b: int, m: int, weight: float) -> torch.Tensor:
        if m == ALL:
            parts = [self._now[k] for k in sorted(self._now)]
            values = (
                parts[0][0] if len(parts) == 1 else [torch.cat(ts) for ts in zip(*(p[0] for p in parts), strict=True)]
            )
            _, shape, needs = parts[0]
        else:
            values, shape, needs = self._now[m]
        assert self._loss_fn is not None
        values = self.out_values.get(m, values)
        inputs = [t.detach().requires_grad_() if need else t.detach() for t, need in zip(values, needs, strict=True)]
        random = self.chain.generators.read()
        try:
            loss = self._call_loss(_tree.unflatten(inputs, shape), m)
        except RuntimeError as error:
            if "in-place operation" not in str(error):
                raise
            # The loss writes to its input, which a leaf does not allow and a copy does.
            self.chain.generators.write(random)
            loss = self._call_loss(_tree.unflatten([t.clone() for t in inputs], shape), m)
        wanted = [t if need else None for t, need in zip(inputs, needs, strict=True)]
        if not reaches(loss, [t for t in wanted if t is not None]):
            raise no_gradient()
        known = {id(t) for t in inputs}
        leaves = [t for t in graph_leaves([loss]) if id(t) not in known]
        sharing = self._sharing(0 if m == ALL else m, leaves)
        adjoints = self.collector.vjp([loss], [self._loss_fn.cotangent(loss, weight)], wanted, leaves, sharing.of(b))
        if m == ALL and len(self._now) > 1:
            start = 0
            for k in sorted(self._now):
                rows = self._rows[k]
                self._adjoints[k] = [None if a is None else a[start : start + rows] for a in adjoints]
                start += rows
        else:
            self._adjoints[0 if m == ALL else m] = adjoints
        if self._wants_adjoint():
            self.chain.events.emit(EventType.ADJOINT_CREATED, layer_id=b, block="output")
        return loss

    def _call_loss(self, value: Any, m: int) -> torch.Tensor:
        loss_fn = self._loss_fn
        assert loss_fn is not None
        with torch.enable_grad():
            loss = loss_fn(value, m)
        if not loss.requires_grad:
            needs = self._now[0 if m == ALL else m][2]
            if not any(needs):
                loss.backward()  # raises plain PyTorch's own error
            raise no_gradient()
        return loss

    def runs(self) -> list[tuple[BlockCall, Record, torch.Size]]:
        """Each block's run on the whole batch, with the shape of what it was given."""
        found = []
        shape = self._given[0][0]
        for b, call in enumerate(self.chain.calls):
            record = self.records[b, 0]
            found.append((call, record, shape))
            shape = record.out_meta[0][0]
        return found

    def loss_alone(self, b: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of the whole output and its adjoint a_L, without the passes; for a reverse pass that is not walked
        here."""
        self._note_rows((0,))
        loss = self._loss_on_leaves(b, 0, 1.0)
        adjoint = self._adjoints.pop(0)[0]
        assert adjoint is not None
        return loss.detach(), adjoint

    def total_loss(self) -> torch.Tensor:
        """The loss of the batch."""
        return total_loss(self._losses)

    # -- reverse ---------------------------------------------------------------------------------------------------

    def _sharing(self, m: int, loss_leaves: Sequence[torch.Tensor]) -> SharedLeaves:
        """Which leaves are shared in this microbatch. Made at the first VJP, when all blocks have run."""
        shared = self._shared.get(m)
        if shared is None:
            chain = self.chain
            length = len(chain.calls)
            numbers = [b for b in range(length) if (b, m) in self.records]
            leaves = [self.records[b, m].facts.leaves for b in numbers]
            beside: Sequence[torch.Tensor] = loss_leaves
            if m in self._roots:
                known = {id(t) for t in self.records[length - 1, m].facts.leaves}
                beside = [t for t in loss_leaves if id(t) not in known]
            shared, strangers = chain.sharing(numbers, leaves, length - 1 if m in self._roots else length, beside)
            if strangers and self.before_vjp is not None:
                self.before_vjp(strangers)
            self._shared[m] = shared
        return shared

    def _rebuild(self, b: int, m: int) -> None:
        if self.chain.profiler.enabled:
            self._started = time.perf_counter()
        record = self.records[b, m]
        if not record.facts.differentiable:
            return
        call = self.chain.calls[b]
        if not self._reversing:
            self._env.verify()
            self._reversing = True
            self._env.look()
        # The generators then stand where plain's do, for what draws in a backward (a hook that adds noise).
        random = self.chain.generators.read() if record.random is not None and not self.own_streams else None
        try:
            rebuilt = call.rebuild(record, self._fetch(b, m), self._env, (b, "R", m))
        finally:
            if random is not None:
                self.chain.generators.write(random)
        # A gradient that goes into a dictionary is asked for by leaf: one that is not known would be lost.
        asked = self.collector.into is not None
        if asked or self.number < 2 or self.number % len(self.chain.calls) == b:
            self._check_leaves(b, m, record, rebuilt)
        self._graphs[b, m] = rebuilt

    def _check_leaves(self, b: int, m: int, record: Record, rebuilt: Rebuilt) -> None:
        """Looks for leaves that the block did not read before. Shared parameters are known without this; a leaf that is
        not registered anywhere, read only now and then, by several blocks, is found here: in every block in the first
        two steps, then one block a step, since the walk costs as much as half a small block's forward."""
        call = self.chain.calls[b]
        new = call.learn_leaves(record, rebuilt)
        if new:
            elsewhere = {id(t) for (i, k), r in self.records.items() if k == m and i != b for t in r.facts.leaves}
            if any(id(t) in elsewhere for t in new):
                raise RestartStep(call.where() + " reads a leaf of another block that it did not read before")

    def _vjp(self, b: int, m: int) -> None:
        if self.chain.profiler.enabled and not self._started:
            self._started = time.perf_counter()
        record = self.records[b, m]
        rebuilt = self._graphs.pop((b, m), None)
        if rebuilt is None:
            # Nothing flows through this block, but a running sum may wait for it.
            self.collector.vjp([], [], [], (), self._sharing(m, ()).of(b))
            self._adjoints[m] = [None] * len(record.needs)
            self._started = 0.0
            return
        chain = self.chain
        if m in self._roots:
            shared = self._sharing(m, self._roots[m][2]).of(b)
            roots, grads, leaves = self._roots.pop(m)
        else:
            shared = self._sharing(m, ()).of(b)
            roots, grads = self._cotangents(b, m, rebuilt.outputs)
            leaves = record.facts.leaves
        inputs = rebuilt.inputs
        del rebuilt
        if shared or not roots or self.collector.into is not None:
            self._adjoints[m] = self.collector.vjp(roots, grads, inputs, leaves, shared)
        else:
            accumulate(roots, grads)
            self._adjoints[m] = [None if t is None else t.grad for t in inputs]
        if chain.profiler.enabled and self._started:
            chain.profiler.record(chain.calls[b].label, time.perf_counter() - self._started)
            self._started = 0.0
        if chain.events.active:
            self._report(b, m)

    def _cotangents(self, b: int, m: int, outputs: list[torch.Tensor]) -> tuple[list[Any], list[torch.Tensor]]:
        """The outputs of block b that an adjoint has come to, and their adjoints, which are given away."""
        roots: list[Any] = []
        grads = []
        for output, adjoint in zip(outputs, self._adjoints.pop(m), strict=True):
            if adjoint is not None and output.requires_grad:
                if adjoint.shape != output.shape:
                    raise PassError(
                        f"{self.chain.calls[b].where((b, 'V', m))}: the adjoint has shape "
                        f"{list(adjoint.shape)}, the block's "
                        "output "
                        f"{list(output.shape)}; a pass must not change the shape"
                    )
                # A large output need not live through its own VJP.
                node = output.grad_fn if output.nbytes >= _LARGE else None
                roots.append(output if node is None else GradientEdge(node, output.output_nr))
                grads.append(adjoint)
        return roots, grads

    def _report(self, b: int, m: int) -> None:
        payload = dict(self.chain.step_payload)
        if len(self._now) > 1:
            payload["microbatch"] = m
        tell_rebuilt(self.chain.events, self.chain.calls[b].name, b, self._adjoints[m], payload)

    def pass_context(self, m: int) -> dict[str, Any]:
        """What passes are told of a microbatch."""
        return pass_context(self._loss_fn, self.parts, m, self._rows.get(m, 0))

    def _passes(self, b: int, m: int) -> None:
        adjoints = self._adjoints.get(m)
        if adjoints is None:
            return
        length = len(self.chain.calls)
        name = "output" if b == length else self.chain.calls[b].name
        context = {
            "block_index": b,
            "block_name": name,
            **self.pass_context(m),
        }
        states = []
        numbers = [n for n, a in enumerate(adjoints) if a is not None]
        for n in numbers:
            adjoint = adjoints[n]
            assert adjoint is not None
            state = AdjointState(
                tensor=adjoint.detach(), layer_id=b, block=name, metadata=dict(self._metadata.get((m, n), {}))
            )
            if b < length:
                state.record(f"reconstruct:{name}")
            states.append(state)
        for n, state in zip(numbers, self.chain.pipeline.run_all(states, context), strict=True):
            adjoints[n] = state.tensor
            self._metadata[m, n] = state.metadata
