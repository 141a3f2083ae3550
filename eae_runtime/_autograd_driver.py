"""The autograd driver: blocks behind a model's own forward, driven by the user's `loss.backward()`.

Note [Who drives]
    The model's forward and PyTorch's engine keep the order. A block's forward is replaced by a `Door`: it runs the
    block without a graph and puts one node in its place. The node's backward rebuilds the block from its inputs and
    takes the VJP. Every leaf that the block reads is an input of the node, so that accumulation, hooks, DDP's buckets,
    its search for unused parameters and shared weights stay with the outer engine.
"""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.weak import WeakTensorKeyDictionary

from . import _tree
from ._ambient import Autocast, Generators
from ._autograd_node import Node, Run
from ._bits import overlapping
from ._block_finder import find_blocks
from ._checks import level
from ._hooks import homes_of, restricted
from ._records import Environment, Facts, Record, RestartStep
from ._structure import refuse_scripted
from ._waiting import Waiting
from .blockcall import BlockCall
from .boundary_store import BoundaryStore
from .config import RuntimeConfig
from .errors import BlockError, ConfigError, TensorTypeError
from .pipeline import AdjointPipeline

__all__ = ["Driver", "attach", "detach", "driver_of", "unwrap", "wrap"]

_WRITES = "it writes its input in place"

# Repetitions of a block's run in which it does something new each time.
_MOST_RUNS = 8


class Driver:
    """What the blocks of one wrapped model share.

    names: of the blocks, in the order of the model. `forwards`: forwards of the whole model with grad mode on so far.
    """

    def __init__(self, config: RuntimeConfig, names: list[str], lasts: set[int]) -> None:
        self.config = config
        self.names = names
        # The last block of each run of blocks: passes see the adjoint of its output too.
        self.lasts = lasts
        self.forwards = 0
        self.doors: dict[int, Door] = {}
        self._start()

    def _start(self) -> None:
        self.pipeline = AdjointPipeline(list(self.config.passes))
        self.generators = Generators()
        self.autocast: Autocast | None = None
        self.local = _Local()
        # Whether a runtime lends pipeline, generators and store.
        self.owned = False
        self.ended = False
        self._waiting: Waiting | None = None
        self.tell: Callable[[BlockCall, Sequence[torch.Tensor | None]], None] | None = None
        # The blocks that read a leaf.
        self._readers = WeakTensorKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config, "names": self.names, "lasts": self.lasts, "forwards": self.forwards}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.doors = {}
        self._start()

    @property
    def calls(self) -> list[BlockCall]:
        """The blocks, in order."""
        return [self.doors[index].call for index in sorted(self.doors)]

    @property
    def waiting(self) -> Waiting | None:
        """Where boundaries wait; None if they stay on the device."""
        if self._waiting is None and (self.config.tier != "device" or self.config.boundary_precision is not None):
            config = self.config
            self._waiting = Waiting(
                BoundaryStore(
                    precision=config.boundary_precision,
                    pin_memory=config.pin_memory,
                    tier=config.tier,
                    directory=config.disk_dir,
                    max_bytes=config.disk_max_bytes,
                    is_async=config.scheduler == "async",
                    timeout=config.timeout,
                    keep_buffers=config.memory != "none",
                ),
                config.prefetch,
            )
        return self._waiting

    def level(self, call: BlockCall) -> int:
        """How closely the block is looked at in this run (see `_checks`)."""
        if self.config.boundary_precision is not None:
            return 0
        step = self.forwards - 1 if self.local.inside else call.forwards
        return level(self.config.verify_rebuild, call.index, step, len(self.names))

    def note_readers(self, index: int, leaves: list[torch.Tensor]) -> None:
        """Remembers that a block reads these leaves."""
        for leaf in leaves:
            self._readers.setdefault(leaf, set()).add(index)

    def is_shared(self, leaf: torch.Tensor) -> bool:
        """Whether several blocks were seen to read the leaf."""
        return len(self._readers.get(leaf, ())) > 1

    def use(
        self,
        pipeline: AdjointPipeline,
        store: BoundaryStore,
        generators: Generators,
        tell: Callable[[BlockCall, Sequence[torch.Tensor | None]], None],
    ) -> None:
        """Takes a runtime's parts in place of its own; the runtime closes them. `tell` is called after each VJP with
        the gradients of the block's inputs."""
        self.pipeline.close()
        self.owned = True
        self.pipeline, self.generators, self.tell = pipeline, generators, tell
        if store.offload or store.precision is not None:
            self._waiting = Waiting(store, self.config.prefetch)

    def close(self) -> None:
        """Ends the driver: doors that are still called (somebody has wrapped something around one) let everything
        through. Gives back what the core holds, if that is the driver's own."""
        self.ended = True
        if self.owned:
            return
        if self._waiting is not None:
            self._waiting.close()
            self._waiting = None
        self.pipeline.close()


class _Local(threading.local):
    """Whether the thread is in a forward of the whole model."""

    inside = False


class _Replaced:
    """A module's forward, replaced by this object as an attribute of the module. Copies and pickles go with the
    module."""

    def __init__(self, module: nn.Module, driver: Driver) -> None:
        self.module = module
        self.driver = driver
        # What stood there: an attribute of the instance, or nothing.
        self.own: Any = module.__dict__.get("forward")
        self.place = "forward"
        if module._compiled_call_impl is not None:
            self.place, self.own = "_compiled_call_impl", module._compiled_call_impl

    def enter(self) -> None:
        """Takes the place. Directly in the dictionary: a compiled module passes attributes on."""
        self.module.__dict__[self.place] = self

    def leave(self) -> None:
        """Gives the place back."""
        if self.own is None:
            self.module.__dict__.pop(self.place, None)
        else:
            self.module.__dict__[self.place] = self.own

    @property
    def inner(self) -> Callable[..., Any]:
        """The module's own forward."""
        return self.own if self.own is not None else types.MethodType(type(self.module).forward, self.module)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """For whoever asks for the signature of a model's forward, to see which columns of a data set it takes."""
        return self.inner

    @property
    def __func__(self) -> Callable[..., Any]:
        """For whoever takes a bound forward apart and binds it anew, around a wrapper of its own."""
        return lambda _, *args, **kwargs: self(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward that stands in the module's place."""
        raise NotImplementedError


class Root(_Replaced):
    """The forward of the whole model."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        local = self.driver.local
        if not torch.is_grad_enabled() or local.inside or self.driver.ended or torch.compiler.is_compiling():
            return self.inner(*args, **kwargs)
        driver = self.driver
        driver.forwards += 1
        local.inside = True
        try:
            return self.inner(*args, **kwargs)
        finally:
            local.inside = False


class Door(_Replaced):
    """The forward of one block."""

    def __init__(self, module: nn.Module, driver: Driver, index: int) -> None:
        super().__init__(module, driver)
        self.index = index
        self._start()
        driver.doors[index] = self

    def _start(self) -> None:
        self._call: BlockCall | None = None
        # By mode and shape, why the block keeps its graph.
        self._kept: weakref.WeakKeyDictionary[Facts, str] = weakref.WeakKeyDictionary()
        # The leaves that the driver has been told of.
        self._noted: list[torch.Tensor] = []

    def __getstate__(self) -> dict[str, Any]:
        return {n: getattr(self, n) for n in ("module", "driver", "own", "place", "index")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()
        self.driver.doors[self.index] = self

    @property
    def call(self) -> BlockCall:
        """Made when first asked for: a copy's module is not whole yet when its door is made."""
        if self._call is None:
            driver = self.driver
            self._call = BlockCall(
                self.module, driver.names[self.index], self.index, driver.config.compute_dtype, self._enter_block
            )
        return self._call

    def _enter_block(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.inner(value)
        args, kwargs = value
        return self.inner(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or self.driver.ended or torch.is_inference_mode_enabled() or _is_transformed():
            return self.inner(*args, **kwargs)
        if len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor:
            tensors, shape = [args[0]], _tree.SINGLE
        else:
            try:
                tensors, shape = _tree.flatten((args, kwargs))
            except TensorTypeError as error:
                return self._keep(str(error), args, kwargs)
        needs = tuple([t.requires_grad for t in tensors])
        call = self.call
        call.refresh()
        if call.structure.lazy:
            return self._keep("its parameters have no shape before its first forward", args, kwargs)
        if not call.structure.trainable and not any(needs):
            return self.inner(*args, **kwargs)
        driver = self.driver
        env = Environment(driver.generators, _device_types(tensors, call), driver.autocast)
        driver.autocast = env.autocast
        env.check = lambda _: driver.level(call)
        facts = call.facts_for(tensors, shape, needs, env.autocast)
        reason = self._kept.get(facts)
        if reason is None and shape.spec is not None and not facts.seen and _tree.holds_iterator(shape):
            reason = self._kept[facts] = "it takes an iterator, which can be used up once"
        if reason is None:
            ran = self._run([t.detach() for t in tensors], shape, needs, env, facts)
            if ran is not None:
                call.kept = None
                return self._deliver(tensors, needs, *ran)
            # Nothing outside has been touched yet, and the hooks that only watch have been called.
            with restricted(homes_of(call.structure.hooks[2:]), facts.live_hooks):
                return self._keep(self._kept[facts], args, kwargs)
        return self._keep(reason, args, kwargs)

    def _keep(self, reason: str, args: Any, kwargs: Any) -> Any:
        self.call.kept = reason
        return self.inner(*args, **kwargs)

    def _why_kept(
        self, tensors: list[torch.Tensor], outputs: list[torch.Tensor], out_needs: tuple[bool, ...], facts: Facts
    ) -> str | None:
        """Why only the block's own graph will do, if so."""
        if facts.writes:
            # The outer tensor has to change too.
            return _WRITES
        if facts.outer:
            return "it reads a tensor that has a graph and is not its input"
        if facts.leaks:
            # A loss may come through it: an auxiliary loss in an attribute.
            return "a tensor of its graph is held outside of it; detach() it if it is only looked at"
        given = {t.untyped_storage().data_ptr() for t in tensors}
        if facts.hooked:
            return "it puts a hook on its input"
        if any(out_needs) and overlapping(outputs):
            # What is written to one of them is written to the other.
            return "two of its outputs share memory"
        made = [t.untyped_storage().data_ptr() for t, need in zip(outputs, out_needs, strict=True) if need]
        if made and all(pointer in given for pointer in made):
            # There is nothing to save, and what is written to the output later is written to the boundary.
            return "its outputs are views of its inputs"
        return None

    def _run(
        self,
        tensors: list[torch.Tensor],
        shape: _tree.Shape,
        needs: tuple[bool, ...],
        env: Environment,
        facts: Facts,
    ) -> tuple[list[torch.Tensor], tuple[bool, ...], Record] | None:
        """Runs the block without a graph. A run that failed, or one that shows a reason to keep the graph (None is
        returned, and `_kept` has the reason), leaves everything as it was before."""
        random = env.generators.read()
        for _ in range(_MOST_RUNS):
            undo: list[Record] = []
            done = False
            try:
                outputs, out_needs, record, _ = self.call.forward(tensors, shape, needs, env, False, undo)
                reason = self._why_kept(tensors, outputs, out_needs, facts)
                if reason is not None:
                    self._kept[facts] = reason
                    return None
                done = True
                return outputs, out_needs, record
            except RestartStep:
                if facts.writes:
                    self._kept[facts] = _WRITES
                    return None
            finally:
                if env.autocast.active:
                    # What was cast for the block has no graph that goes on from here.
                    torch.clear_autocast_cache()
                if not done:
                    for one in undo:
                        one.undo()
                    env.generators.write(random)
        raise BlockError(f"{self.call.where()} does something new in every run of one forward")

    def _deliver(
        self,
        tensors: list[torch.Tensor],
        needs: tuple[bool, ...],
        outputs: list[torch.Tensor],
        out_needs: tuple[bool, ...],
        record: Record,
    ) -> Any:
        """The block's outputs, those that need a gradient as outputs of its node."""
        if any(out_needs):
            driver = self.driver
            if record.facts.leaves is not self._noted:
                self._noted = record.facts.leaves
                driver.note_readers(self.index, self._noted)
            run = Run(self, record, tensors, needs, outputs, out_needs)
            waiting = driver.waiting
            with nullcontext() if waiting is None else waiting.saving(tensors, needs):
                made = Node.apply(run, *[run.below[number] for number in run.slots])
            new = iter(made if isinstance(made, tuple) else (made,))
            outputs = [next(new) if need else output for output, need in zip(outputs, out_needs, strict=True)]
        return _tree.unflatten(outputs, record.out_shape)


def _device_types(tensors: list[torch.Tensor], call: BlockCall) -> tuple[str, ...]:
    devices = {t.device.type for t in tensors} | {p.device.type for p in call.structure.parameters[:1]}
    return ("cpu", *sorted(devices - {"cpu", "meta"}))


def _is_transformed() -> bool:
    """Whether the forward is being traced or transformed: then the block's own forward has to be seen."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
        # Parametrized weights are computed once for several blocks, with a graph that they share.
        or parametrize._cache_enabled > 0
    )


def wrap(model: nn.Module, config: RuntimeConfig | None = None, blocks: Iterable[str] | None = None) -> nn.Module:
    """Makes the repeated layers of `model` into blocks that keep only their inputs for the backward and are rebuilt
    there, bit for bit. Returns the same model; everything else about it stays: its class, `state_dict`, hooks, the
    training code with its own `loss.backward()` and optimizer.

    config: see RuntimeConfig. Of its fields, passes, boundary_tier, boundary_offload, boundary_precision, prefetch,
    disk_dir, disk_max_bytes, timeout, pin_memory, compute_dtype, memory and verify_rebuild apply, and the schedulers
    "sequential" and "async" (moves to tiers run ahead). loss_scaler, grad_clip_norm, num_microbatches, random_streams,
    block_ranks and trace raise ConfigError: training code and engine decide these. `seed` has been used by then; the
    others (backend, enable_profiler, log_level) concern a runtime and change nothing here.
    blocks: names of modules, with `*` and `?` (`["encoder.layer.*", "head"]`); None: the layers of an nn.Sequential, or
    those of the longest nn.ModuleList of one class.

    A block keeps its graph as in plain PyTorch where only that will do: it writes to its input in place, reads a tensor
    that has a graph and is no input of it, has a tensor of its graph held outside of it, returns views of its inputs or
    two tensors that share memory, hooks its input, takes an iterator, or has lazy parameters (`verify` names such
    blocks). `unwrap` undoes this. Copies and pickles of the model are wrapped alike.

    Raises ConfigError when no blocks are found, a name is wrong, or the model is wrapped already, BlockError for a
    block that is a torch.jit.ScriptModule. Later, the backward raises BlockError for `create_graph=True`, and
    RebuildMismatchError where parameters, submodules or inputs were changed since the forward or a rebuilt block has
    other bits.
    """
    config = config if config is not None else RuntimeConfig()
    _check_config(model, config)
    attach(model, config, blocks)
    return model


def attach(model: nn.Module, config: RuntimeConfig, blocks: Iterable[str] | None = None) -> Driver:
    """Wraps a model without looking at the config. Returns its driver."""
    if any(_replacement_of(module) is not None for module in model.modules()):
        raise ConfigError("this model is wrapped already; unwrap() it first")
    found = find_blocks(model, blocks)
    names = [name for name, _ in found]
    for name, module in found:
        refuse_scripted(module, name)
    lasts = {i for i, name in enumerate(names) if i + 1 == len(names) or _home(names[i + 1]) != _home(name)}
    driver = Driver(config, names, lasts)
    for index, (_, module) in enumerate(found):
        Door(module, driver, index).enter()
    if model not in {module for _, module in found}:
        Root(model, driver).enter()
    return driver


def _home(name: str) -> str:
    return name.rpartition(".")[0]


def _check_config(model: nn.Module, config: RuntimeConfig) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"wrap() takes an nn.Module, not {type(model).__name__}")
    if not isinstance(config, RuntimeConfig):
        raise ConfigError(f"config is {type(config).__name__}; it has to be a RuntimeConfig")
    config.validate()
    if config.scheduler not in ("sequential", "async"):
        raise ConfigError(
            f"scheduler={config.scheduler!r}: with wrap(), the model's own forward and the engine keep the order; "
            "allowed is 'sequential', 'async'"
        )
    plain = RuntimeConfig()
    for name in ("num_microbatches", "grad_clip_norm", "loss_scaler", "random_streams", "block_ranks", "trace"):
        if getattr(config, name) != getattr(plain, name):
            raise ConfigError(f"{name} has no effect under wrap(): the training code decides that; leave it out")


def _replacement_of(module: nn.Module) -> _Replaced | None:
    for place in ("forward", "_compiled_call_impl"):
        found = module.__dict__.get(place)
        if isinstance(found, _Replaced):
            return found
    return None


def driver_of(model: nn.Module) -> Driver:
    """The driver of a wrapped model. Raises ConfigError for one that is not wrapped."""
    for module in model.modules():
        door = _replacement_of(module)
        if door is not None:
            return door.driver
    raise ConfigError(f"{type(model).__name__} is not wrapped")


def unwrap(model: nn.Module) -> nn.Module:
    """Undoes `wrap`: the model's forwards are its own again. Returns the model. Does nothing for one that is not
    wrapped. Call it when no backward is pending: boundaries that wait on the host or disk tier go.

    Raises ConfigError for a model that an EAERuntime has wrapped for itself; its `close()` undoes that.
    """
    if any(replaced.driver.owned for replaced in _replacements(model)):
        raise ConfigError("this model is in use by an EAERuntime, which has wrapped it; close() that instead")
    return detach(model)


def detach(model: nn.Module) -> nn.Module:
    """`unwrap`, also for a runtime's model."""
    drivers = {}
    for replaced in _replacements(model):
        replaced.leave()
        drivers[id(replaced.driver)] = replaced.driver
    for driver in drivers.values():
        driver.close()
    return model


def _replacements(model: nn.Module) -> list[_Replaced]:
    return [replaced for replaced in map(_replacement_of, model.modules()) if replaced is not None]
