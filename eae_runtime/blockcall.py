"""BlockCall: run one block, later rebuild it under the same state, and take its VJP. Both drivers stand on it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from . import _checks, _tree
from ._ambient import Autocast, read_source, write_source
from ._bits import same_bits, same_random
from ._diagnosis import explain
from ._fingerprint import fingerprint, first_difference
from ._hooks import EVERYWHERE, homes_of, noted, restricted
from ._pins import Pins
from ._pins import running as _running
from ._records import WATCHED, Environment, Facts, Rebuilt, Record, RestartStep
from ._runs import BlockRuns
from ._state import Watch, is_plain, same_value, swapped
from ._structure import Attributes, Structure
from .errors import RebuildMismatchError

__all__ = ["BlockCall"]

# Modes and shapes remembered a block; the oldest is forgotten and learnt again.
_MAX_FACTS = 64


class BlockCall(BlockRuns):
    """One block: `module` is called with one value. Shared by all steps; what it learns is in its facts.

    compute_dtype: floating inputs are cast to it; a block whose parameters have another floating type runs under
    autocast to it instead.
    entry: called with the value in the module's place. The module's own hooks are then the caller's affair.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        index: int,
        compute_dtype: torch.dtype | None = None,
        entry: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(module, name, index, compute_dtype, entry)
        self._facts: OrderedDict[Any, Facts] = OrderedDict()
        self._always_grad = any(
            type(m).__name__ == "OptimizedModule" or m._compiled_call_impl is not None for m in module.modules()
        )
        self._last: tuple[Any, Any, Any, tuple[bool, ...], Autocast, Facts] | None = None
        self._hook_homes = self._find_hooks()
        self._attributes = Attributes(self.structure.modules)
        self.label = "reconstruct:" + name
        # Runs that kept no graph, rebuilds, and those of them that were compared with their forward.
        self.forwards = 0
        self.rebuilds = 0
        self.compared = 0
        # Why this block keeps its graph as in plain PyTorch; None for one that is rebuilt.
        self.kept: str | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The block's parameters, as of its last new structure."""
        return self.structure.parameters

    # -- structure -------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Looks at the module anew if it is not what it was."""
        if not self.structure.holds():
            self.structure = Structure(self.module)
            self._attributes = Attributes(self.structure.modules)
            self._hook_homes = self._find_hooks()
            self._last = None
            # What was learnt with parameters that have gone would keep them alive.
            for key in [k for k, f in self._facts.items() if not f.structure.same_parameters(self.structure)]:
                del self._facts[key]
        elif not self._attributes.same():
            # Those that the block's own forward changes are state.
            own = {key for facts in self._facts.values() for key in facts.changing}
            if self._attributes.changed() - own:
                self._facts.clear()
                self._last = None
            self._attributes = Attributes(self.structure.modules)

    def constant_buffers(self) -> list[torch.Tensor]:
        """The buffers that no forward of the block was seen to write."""
        written = {key for facts in self._facts.values() for key in facts.written_buffers or ()}
        return [
            buffer
            for home in self.structure.buffers
            for name, buffer in home.items()
            if buffer is not None and (id(home), name) not in written
        ]

    def _find_hooks(self) -> list[dict[int, Any]]:
        """The dictionaries of forward hooks within the block that have hooks in them."""
        return [home for home in self.structure.hooks[0 if self._entry is self.module else 2 :] if home]

    def facts_for(
        self, tensors: Sequence[torch.Tensor], shape: _tree.Shape, needs: tuple[bool, ...], autocast: Autocast
    ) -> Facts:
        """The facts for the structure of the last `refresh` and this class of inputs, new ones if this is the first
        time."""
        inputs = tuple([(t.shape, t.dtype, t.stride()) for t in tensors])
        key = (self.structure.signature, needs, autocast if autocast.active else None, inputs, shape.kind())
        facts = self._facts.get(key)
        if facts is None:
            facts = self._facts[key] = Facts(self.structure)
            if len(self._facts) > _MAX_FACTS:
                self._facts.popitem(last=False)
        self._last = (*inputs[0], needs, autocast, facts) if shape.spec is None else None
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
        so that a failed step can put state back. Returns the outputs (detached), which of them need a gradient, the
        record for the rebuild, and the graph if `keep_graph`.

        Raises RestartStep when the block did something for the first time that this run was not prepared for.
        """
        autocast = env.autocast
        last = self._last
        first = tensors[0] if tensors else None
        if (
            last is not None
            and first is not None
            and last[0] == first.shape
            and last[1] is first.dtype
            and last[2] == first.stride()
            and last[3] == needs
            and last[4] is autocast
            and shape.spec is None
        ):
            facts = last[5]
        else:
            facts = self.facts_for(tensors, shape, needs, autocast)
        check = 0 if keep_graph else env.check(self.index)
        compare = facts.seen > 0 and facts.no_grad is None and not keep_graph and not self._always_grad
        relearn = check == _checks.LEARNT_ANEW
        record = Record(facts, shape, needs, env.before(facts, compare or relearn), autocast)
        watching = relearn or (not facts.learned if keep_graph else facts.seen < WATCHED)
        if watching or facts.sources:
            record.read_sources(watching)
        written = None if relearn else facts.written_buffers
        watch = (
            Watch(self.structure, written, facts.changing)
            if written is None or self.structure.buffers or facts.changing
            else None
        )
        undo.append(record)
        if autocast.active:
            # Casts that were cached without a graph would cut the weights off.
            torch.clear_autocast_cache()
        outside, _running.run = _running.run, record
        try:
            if compare or self._hook_homes or EVERYWHERE[0] or EVERYWHERE[1]:
                rebuilt, outputs = self._run(tensors, shape, needs, facts, record, env, keep_graph, compare, check)
            else:
                rebuilt, outputs = self._run_one_way(tensors, shape, needs, facts, record, keep_graph, check)
        finally:
            _running.run = outside
            # Also of a run that failed, so that it can be undone.
            if watch is not None:
                self._note_changes(record, watch)
        if watching:
            record.note_sources()
        if record.random is not None:
            record.random = env.after(facts, record.random)
        if len(outputs) != len(facts.out_needs):
            self._facts.clear()
            self._last = None
            raise RestartStep(self.where() + " returns another number of tensors than it did before")
        if not keep_graph:
            facts.seen += 1
            self.forwards += 1
        record.out_meta = [(t.shape, t.dtype) for t in outputs]
        if check:
            record.prints = [*map(fingerprint, outputs)], [*map(fingerprint, tensors)]
        return outputs, facts.out_needs, record, rebuilt

    def _run(
        self,
        tensors: Sequence[torch.Tensor],
        shape: _tree.Shape,
        needs: tuple[bool, ...],
        facts: Facts,
        record: Record,
        env: Environment,
        keep_graph: bool,
        compare: bool,
        check: int,
    ) -> tuple[Rebuilt | None, list[torch.Tensor]]:
        """One of the ways to run the block, with its hooks noted."""
        homes = homes_of(self._hook_homes)
        if homes:
            record.hooks = set()
            if compare:
                # The hooks of the run that counts alone are noted.
                with restricted(homes, facts.live_hooks):
                    trial = self._try_no_grad(tensors, shape, facts, record, env)
                with noted(homes, record.hooks):
                    outputs = self._compare_modes(trial, tensors, shape, needs, facts, record, env)
                facts.live_hooks |= record.hooks
                return None, outputs
            with noted(homes, record.hooks):
                found = self._run_one_way(tensors, shape, needs, facts, record, keep_graph, check)
            facts.live_hooks |= record.hooks
            return found
        if compare:
            trial = self._try_no_grad(tensors, shape, facts, record, env)
            return None, self._compare_modes(trial, tensors, shape, needs, facts, record, env)
        return self._run_one_way(tensors, shape, needs, facts, record, keep_graph, check)

    def _run_one_way(
        self,
        tensors: Sequence[torch.Tensor],
        shape: _tree.Shape,
        needs: tuple[bool, ...],
        facts: Facts,
        record: Record,
        keep_graph: bool,
        check: int,
    ) -> tuple[Rebuilt | None, list[torch.Tensor]]:
        if keep_graph:
            return self._run_in_grad_mode(tensors, shape, needs, facts, record, learn=not facts.learned)
        learn = check == _checks.LEARNT_ANEW
        if facts.no_grad and not learn:
            return None, self._run_no_grad(tensors, shape, facts, record)
        return None, self._run_dropping(tensors, shape, needs, facts, record, learn)

    def _try_no_grad(
        self, tensors: Sequence[torch.Tensor], shape: _tree.Shape, facts: Facts, record: Record, env: Environment
    ) -> tuple[list[torch.Tensor], Any, list[Any]]:
        """Runs the block under `no_grad` and undoes what that did: its outputs, the generators after it, and what it
        left in the places of the state that earlier runs changed."""
        watch = Watch(self.structure, facts.written_buffers, facts.changing)
        trial = Record(facts, shape, (), None, record.autocast)
        outside, _running.run = _running.run, trial
        try:
            outputs = self._run_no_grad(tensors, shape, facts, trial)
        except RestartStep:
            raise
        except Exception:
            # Whatever ails the trial, the run that counts shows it or does not have it.
            outputs = []
        finally:
            _running.run = outside
        random = env.generators.read()
        entries, _, _ = watch.changes()
        left = []
        for entry in entries:
            now = entry.now()
            left.append((entry.home, entry.name, now.detach().clone() if isinstance(now, torch.Tensor) else now))
        for entry in entries:
            entry.restore()
        record.write_sources()
        env.generators.write(record.random)
        return outputs, random, left

    def _compare_modes(
        self,
        trial: tuple[list[torch.Tensor], Any, list[Any]],
        tensors: Sequence[torch.Tensor],
        shape: _tree.Shape,
        needs: tuple[bool, ...],
        facts: Facts,
        record: Record,
        env: Environment,
    ) -> list[torch.Tensor]:
        """The run that counts, in grad mode, after a trial without it: whether the block may do without from now on."""
        tried, random, left = trial
        if env.autocast.active:
            torch.clear_autocast_cache()
        outputs = self._run_dropping(tensors, shape, needs, facts, record)
        agree = (
            len(tried) == len(outputs)
            and all(same_bits(a, b) and a.stride() == b.stride() for a, b in zip(tried, outputs, strict=True))
            and same_random(random, env.generators.read())
            and all(_alike(value, home.get(name)) for home, name, value in left)
        )
        # Only grad mode shows when a block that skipped parameters so far (layer drop, an expert that was not chosen)
        # uses them after all.
        seen = {id(leaf) for leaf in facts.leaves}
        complete = all(id(p) in seen for p in self.structure.parameters if p.requires_grad)
        can_differ = self.structure.trainable or any(needs)
        facts.no_grad = agree and complete and not facts.leaks and (facts.differentiable or not can_differ)
        return outputs

    def _note_changes(self, record: Record, watch: Watch) -> None:
        facts = record.facts
        record.state, keys, lost = watch.changes()
        facts.written_buffers = keys | (facts.written_buffers or set())
        if lost:
            raise RebuildMismatchError(
                f"{self.where()} wrote its buffer {', '.join(sorted(lost))} for the first time; its value from before "
                "the step was not kept and is lost. From now on it is kept: restore that buffer and run the step again"
            )

    # -- rebuild ---------------------------------------------------------------------------------------------------

    def rebuild(
        self, record: Record, tensors: Sequence[torch.Tensor], env: Environment, action: tuple[int, str, int]
    ) -> Rebuilt:
        """Runs the block again from its boundary under the state of `record`, with its graph. Leaves torch's generators
        where the block left them; the caller puts them back once after the sweep.

        Raises RebuildMismatchError if the outputs have another structure, shape or type than in the forward, or, where
        they are compared (see RuntimeConfig.verify_rebuild), other bits.
        """
        self.rebuilds += 1
        rebuilt, value = self._run_again(record, tensors, env)
        rebuilt.outputs, out_shape = self._outputs(value)
        del value
        self._check_kinds(record, rebuilt.outputs, out_shape, action)
        if record.prints is not None:
            self.compared += 1
            number = first_difference(rebuilt.outputs, record.prints[0])
            if number is not None:
                self._raise_mismatch(number, record, tensors, env, rebuilt.outputs, action)
        return rebuilt

    def _run_again(
        self, record: Record, tensors: Sequence[torch.Tensor], env: Environment, grad: bool = True
    ) -> tuple[Rebuilt, Any]:
        if record.random is not None:
            env.generators.write(record.random)
        plain = not record.state and not record.sources and record.hooks is None and record.pins is None
        if plain and env.reentered and grad:
            return self._run_with_graph(tensors, record.in_shape, record.needs, record.facts, learn=False)
        with self._as_at_forward(record), torch.set_grad_enabled(grad):
            return self._run_with_graph(tensors, record.in_shape, record.needs, record.facts, learn=False)

    def _check_kinds(
        self,
        record: Record,
        outputs: list[torch.Tensor],
        out_shape: _tree.Shape,
        action: tuple[int, str, int],
    ) -> None:
        if len(outputs) == 1 and out_shape.spec is None:
            output = outputs[0]
            shape, dtype = record.out_meta[0]
            if output.shape == shape and output.dtype is dtype and output.requires_grad == record.facts.out_needs[0]:
                return
        if (
            len(outputs) != len(record.out_meta)
            or any(t.shape != s or t.dtype != d for t, (s, d) in zip(outputs, record.out_meta, strict=True))
            or not out_shape.same_structure(record.out_shape)
        ):
            raise RebuildMismatchError(
                f"{self.where(action)}: the rebuilt output is {_describe(outputs)}, in the forward it was "
                f"{_describe_meta(record.out_meta)}. The block's forward must depend on its input, parameters and "
                "buffers alone; a choice that comes from elsewhere can be kept with eae_runtime.pin()"
            )
        needs = tuple([t.requires_grad for t in outputs])
        if needs != record.facts.out_needs:
            raise RebuildMismatchError(
                f"{self.where(action)}: which outputs require grad has changed since the forward "
                f"({record.facts.out_needs} then, {needs} now). Do not freeze or unfreeze parameters between forward "
                "and backward"
            )

    def _raise_mismatch(
        self,
        number: int,
        record: Record,
        tensors: Sequence[torch.Tensor],
        env: Environment,
        outputs: list[torch.Tensor],
        action: tuple[int, str, int],
    ) -> NoReturn:
        """Raises RebuildMismatchError with the likely cause, or RestartStep where that cures it."""

        def again(grad: bool) -> list[torch.Tensor]:
            return self._outputs(self._run_again(record, tensors, env, grad)[1])[0]

        assert record.prints is not None
        found = explain(self.structure, record, tensors, outputs, again)
        if found is None:
            record.facts.no_grad = False
            raise RestartStep(self.where() + " computes something else under no_grad than it did before")
        cause, cure = found
        name = _tree.paths(record.out_shape, "output")[number]
        raise RebuildMismatchError(
            f"{self.where(action)}: the rebuilt {name} has other bits than in the forward. Likely cause: {cause}. "
            f"{cure}"
        )

    @contextmanager
    def _as_at_forward(self, record: Record) -> Iterator[None]:
        """Training flags, state, autocast, generators of the host's side, hooks and pins as in the forward."""
        structure = record.facts.structure
        changed = [
            (m, m.training)
            for m, training in zip(structure.modules, structure.training, strict=True)
            if m.training is not training
        ]
        for module, training in changed:
            module.training = not training
        resume = [(source, read_source(source)) for source, _ in record.sources]
        record.write_sources()
        again = Record(record.facts, record.in_shape, (), None, record.autocast)
        # Without pins in the forward, one in the rebuild is one too many.
        again.pins = Pins(record.pins, replaying=True)
        outside, _running.run = _running.run, again
        homes = homes_of(self._hook_homes)
        try:
            if record.autocast.active:
                torch.clear_autocast_cache()
            with (
                swapped(record.state),
                restricted(homes, record.hooks or set()),
                record.autocast.region(),
                torch.enable_grad(),
            ):
                yield
        finally:
            _running.run = outside
            for source, state in resume:
                write_source(source, state)
            for module, training in changed:
                module.training = training

    def learn_leaves(self, record: Record, rebuilt: Rebuilt) -> list[torch.Tensor]:
        """The leaves of a rebuilt graph; those that were not known are remembered and returned."""
        known = {id(leaf) for leaf in record.facts.leaves}
        new = [leaf for leaf in self._leaves_of(rebuilt) if id(leaf) not in known]
        record.facts.leaves = record.facts.leaves + new if new else record.facts.leaves
        return new


def _alike(value: Any, now: Any) -> bool:
    """Whether two runs left the same in a place. Objects and containers are not compared: each run may make its own."""
    if isinstance(value, torch.Tensor) or isinstance(now, torch.Tensor):
        return isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and same_bits(value, now)
    return same_value(value, now) or not (is_plain(value) and is_plain(now))


def _describe(tensors: Sequence[torch.Tensor]) -> str:
    return _describe_meta([(t.shape, t.dtype) for t in tensors])


def _describe_meta(meta: Sequence[tuple[torch.Size, torch.dtype]]) -> str:
    return ", ".join(f"{str(d).removeprefix('torch.')}{list(s)}" for s, d in meta)
