"""EAERuntime: an ordinary model and optimizer, trained by a schedule of per-block actions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from . import _bridge, _tree
from ._ambient import Generators
from ._autograd_driver import Driver, attach, detach
from ._block_finder import repeated_layers
from ._chain import Chain
from ._checkpoint import load_state, state_of
from ._exclusive import exclusive, is_inside
from ._graph_sweep import GraphSweep, Whole
from ._losses import check_loss, split_rows
from ._program import ALL, Action, Program
from ._records import Remembered, RestartStep
from ._split import AnySweep, Split
from ._streams import StreamedSweep
from ._training import Request, Training
from ._transaction import annotate
from .backend import BackendManager
from .blockcall import BlockCall
from .blocks import BlockDecomposer
from .boundary_store import BoundaryStore
from .config import RuntimeConfig
from .distributed import Ranks
from .errors import (
    ClosedError,
    ConfigError,
    EAEError,
    PlanError,
    TensorTypeError,
)
from .events import EventBus, tell_rebuilt
from .executor import Sweep
from .forward_executor import ForwardExecutor
from .logging_utils import attach_structured_logging
from .memory import MemoryManager
from .pipeline import AdjointPipeline
from .profiler import Profiler
from .reconstruction import ReconstructionEngine
from .schedulers import (
    AsyncScheduler,
    BaseScheduler,
    DistributedScheduler,
    PipelineScheduler,
    build_scheduler,
)
from .schedulers.generated import GeneratedScheduler
from .trace import Trace

__all__ = ["EAERuntime"]

LossFn = Callable[..., Any]
Gradients = dict[torch.Tensor, torch.Tensor]


class EAERuntime:
    """Trains a model of blocks with the memory of their boundaries and one block's interior.

    model: a chain of blocks (an `nn.Sequential`, an `nn.ModuleList`, a list of modules), or an ordinary module: it
    keeps its own forward, and its repeated layers become blocks as with `wrap`; one without is a chain of one block.
    optimizer: stepped by :meth:`train_step`; None leaves the gradients in `.grad`.
    config: see :class:`RuntimeConfig`.

    A step is all or nothing: after an exception `.grad`, buffers, random generators and the state of passes are those
    from before it. `close()` (or leaving a `with` block) gives back everything that the runtime holds.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | None = None,
        config: RuntimeConfig | None = None,
    ) -> None:
        self.config = config = config if config is not None else RuntimeConfig()
        if not isinstance(config, RuntimeConfig):
            raise ConfigError(f"config is {type(config).__name__}; it has to be a RuntimeConfig")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"optimizer is {type(optimizer).__name__}; it has to be a torch.optim.Optimizer or None")
        config.validate()
        self.optimizer = optimizer
        self.scheduler: BaseScheduler = build_scheduler(config.scheduler, **self._scheduler_options())
        # A model with code between its blocks keeps its own forward, until close().
        driver = self._wrapped(model)
        try:
            self._build(model, driver)
        except BaseException:
            if isinstance(model, nn.Module) and driver is not None:
                detach(model)
            raise

    def _build(self, model: Any, driver: Driver | None) -> None:
        """Makes the parts. driver: of a model that keeps its own forward."""
        config = self.config
        # This process's part, where blocks are spread over several; `modules` has stand-ins for the blocks of others.
        self._ranks = ranks = Ranks.connect(self.scheduler, config, model, BlockDecomposer.decompose)
        self.blocks: list[nn.Module]
        self.block_names: list[str]
        if driver is not None:
            self.blocks, self.block_names = [call.module for call in driver.calls], list(driver.names)
        elif ranks is not None:
            self.blocks, self.block_names = ranks.blocks, ranks.names
        else:
            self.blocks = BlockDecomposer.decompose(model)
            self.block_names = [
                getattr(b, "eae_name", None) or f"{type(b).__name__}_{i}" for i, b in enumerate(self.blocks)
            ]
        modules = self.blocks if ranks is None else ranks.modules
        self.event_bus = EventBus()
        attach_structured_logging(self.event_bus, level=config.log_level)
        self.profiler = Profiler(enabled=config.enable_profiler)
        backend = config.backend
        self.backend_manager = backend if isinstance(backend, BackendManager) else BackendManager(backend)
        self.memory_manager = MemoryManager(policy=config.memory, event_bus=self.event_bus)
        self.boundary_store = BoundaryStore(
            offload=config.boundary_offload,
            precision=config.boundary_precision,
            pin_memory=config.pin_memory,
            tier=config.tier,
            directory=config.disk_dir,
            max_bytes=config.disk_max_bytes,
            is_async=isinstance(self.scheduler, AsyncScheduler),
            workers=getattr(self.scheduler, "max_workers", 2),
            timeout=config.timeout,
            pool=self.memory_manager.core_pool,
            keep_buffers=config.memory != "none",
        )
        self.forward_executor = ForwardExecutor(event_bus=self.event_bus, compute_dtype=config.compute_dtype)
        self.reconstruction_engine = ReconstructionEngine(event_bus=self.event_bus, compute_dtype=config.compute_dtype)
        self.pipeline = AdjointPipeline(passes=list(config.passes), event_bus=self.event_bus, profiler=self.profiler)
        self.pipeline.pool = self.memory_manager.core_pool
        self.last_loss: float | None = None
        self._trace = Trace() if config.trace else None
        if self._trace is not None:
            self.boundary_store.trace_into(self._trace.handle)
            self.pipeline.trace = self._trace.handle
        self._programs: dict[Any, Program] = {}
        # What was asked of `_program` last, and which one that was.
        self._last_key: tuple[Any, Any] = (None, None)
        self._last_grads: list[torch.Tensor] = []
        self._stats: dict[str, float] = {}
        self._split = Split(self)
        self._sweeps = 0
        # Steps and forwards so far: the number of the next one in the random streams (RuntimeConfig.random_streams).
        self.steps = 0
        self._seed = torch.initial_seed()
        self._closed = False
        self._training = Training(self)
        calls = (
            [
                BlockCall(block, name, i, config.compute_dtype)
                for i, (block, name) in enumerate(zip(modules, self.block_names, strict=True))
            ]
            if driver is None
            else driver.calls
        )
        self._chain = Chain(
            calls=calls,
            store=self.boundary_store,
            pipeline=self.pipeline,
            events=self.event_bus,
            profiler=self.profiler,
            trace=self._trace,
            generators=Generators(p.device for b in modules for p in b.parameters()),
            device_types=tuple(dict.fromkeys(["cpu", *(p.device.type for b in modules for p in b.parameters())])),
            step_payload=getattr(self.scheduler, "step_payload", {}),
            # A codec changes boundaries, and so the rebuilds.
            verify="off" if config.boundary_precision is not None else config.verify_rebuild,
        )

        self._driver = driver
        self._whole: Whole | None = None
        if driver is not None:
            assert isinstance(model, nn.Module)
            driver.use(self.pipeline, self.boundary_store, self._chain.generators, self._tell_rebuilt)
            self._whole = Whole(model, self._chain.generators, self.pipeline)

    def _wrapped(self, model: Any) -> Driver | None:
        """The driver of a module that is no chain but has repeated layers, which are wrapped now."""
        config = self.config
        plain = isinstance(model, nn.Module) and not isinstance(model, (nn.ModuleList, nn.ModuleDict))
        chain = isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward
        if not plain or chain or self._custom() or not repeated_layers(model):
            return None
        distributed = isinstance(self.scheduler, DistributedScheduler)
        if config.random_streams or distributed:
            raise PlanError(
                f"{'the distributed scheduler' if distributed else 'random_streams=True'} needs a chain of blocks "
                f"(nn.Sequential, nn.ModuleList, a list): {type(model).__name__} keeps its own forward"
            )
        return attach(model, config)

    def _tell_rebuilt(self, call: BlockCall, grads: Sequence[torch.Tensor | None]) -> None:
        """Events of a block's VJP under the autograd driver."""
        if self.event_bus.active:
            tell_rebuilt(self.event_bus, call.name, call.index, grads, dict(self._chain.step_payload))

    def _trained(self) -> list[nn.Parameter]:
        """Every parameter that a step may change, once."""
        return self._chain.parameters if self._whole is None else self._whole.structure.parameters

    def _named_modules(self) -> list[tuple[str, nn.Module]]:
        """What a step trains, by name."""
        if self._whole is not None:
            return [("", self._whole.model)]
        return list(zip(self.block_names, self.blocks, strict=True))

    def _scheduler_options(self) -> dict[str, Any]:
        return {"num_microbatches": self.config.num_microbatches, "block_ranks": self.config.block_ranks}

    # -- life ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Gives back boundaries, buffers, files and goroutines. Closing twice is fine; any other use afterwards raises
        ClosedError. Closing from inside a step (a block, a pass, an event subscriber) raises EAEError."""
        if self._closed:
            return
        if is_inside(self):
            raise EAEError(
                "this EAERuntime is inside a step and cannot be closed now; close it when the step has returned"
            )
        self._closed = True
        if _bridge.in_child:
            return  # what there is to give back is the parent's
        if self._ranks is not None:
            self._ranks.close()
        self._split.drop()
        self._last_grads = []
        if self._whole is not None:
            detach(self._whole.model)
        self.boundary_store.close()
        self.pipeline.trace = 0
        self.pipeline.close()
        self.pipeline.pool = 0
        self.memory_manager.close()
        if self._trace is not None:
            self._trace.close()

    def __enter__(self) -> EAERuntime:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        self._check_open()
        if torch.is_inference_mode_enabled():
            raise EAEError(
                "torch.inference_mode() is on: its tensors have no version counters, which the runtime needs; "
                "use torch.no_grad() or leave the region"
            )
        with exclusive(self, self.blocks, self.block_names):
            yield

    # -- schedules -------------------------------------------------------------------------------------------------

    def schedule(self, microbatches: int = 1, *, split: bool = False, targets: bool = False) -> str:
        """The list of actions as text: the forward list, a line break, the reverse list. `split` is that of forward()
        and backward(), otherwise that of train_step()."""
        if self._ranks is not None:
            return self._ranks.text(self, microbatches, targets)
        if self._whole is not None:
            raise PlanError("this model keeps its own forward and with it the order; there is no list of actions")
        return self._program(microbatches, split=split, targets=targets, input_grad=False).text

    def _program(self, microbatches: int, *, split: bool, targets: bool, input_grad: bool) -> Program:
        # forward() keeps every boundary, for whoever reads them; what needs no gradient is still not rebuilt.
        needs = input_grad or split
        chain = self._chain
        chain.refresh()
        with_passes = len(self.pipeline) > 0
        asked = (chain.version, len(chain.hidden), microbatches, split, targets, with_passes, input_grad)
        if self._last_key[0] == asked:
            return self._programs[self._last_key[1]]
        vjp = []
        for call in chain.calls:
            needs = needs or call.index in chain.hidden or call.structure.trainable
            vjp.append(needs)
        key = (tuple(vjp), *asked[2:])
        program = self._programs.get(key)
        if program is None:
            spec = {
                "blocks": [{"name": n, "needs_vjp": v} for n, v in zip(self.block_names, vjp, strict=True)],
                "microbatches": microbatches,
                "targets": targets,
                "keep_last": not split,
                "keep_output": split,
                "passes": with_passes,
                "input_grad": input_grad,
                "tier": self._schedule_tier(),
                "prefetch": self.config.prefetch,
            }
            scheduler = self.scheduler
            generator = scheduler if isinstance(scheduler, GeneratedScheduler) else build_scheduler("sequential")
            assert isinstance(generator, GeneratedScheduler)
            program = self._programs[key] = Program(generator.schedule(spec))
        self._last_key = asked, key
        return program

    def _schedule_tier(self) -> str:
        """The tier that the schedule moves boundaries to. A codec on the device tier is a move as well."""
        store = self.boundary_store
        if store.tier == "device" and store.precision in (torch.float16, torch.bfloat16):
            return "host"
        return store.tier

    def _custom(self) -> bool:
        """Whether the scheduler is a user's own `run`."""
        return type(self.scheduler).run is not GeneratedScheduler.run

    # -- inputs ----------------------------------------------------------------------------------------------------

    def _check_input(self, x: Any) -> list[torch.Tensor]:
        tensors, _ = _tree.flatten(x)
        if not tensors:
            raise TensorTypeError(f"the input is {type(x).__name__} and holds no tensor")
        for t in tensors:
            if t.layout is not torch.strided or t.is_meta:
                kind = "a meta tensor" if t.is_meta else f"a tensor of layout {t.layout}"
                raise TensorTypeError(
                    f"the input holds {kind}; give dense tensors on a real device (.to_dense() for a sparse one)"
                )
            if t.dim() and t.shape[0] == 0:
                raise ConfigError("the batch is empty: an input tensor has no rows; skip empty batches")
        return tensors

    def _parts(self, tensors: list[torch.Tensor]) -> int:
        """How many microbatches a batch is cut into: as many as asked for, but none empty."""
        scheduler = self.scheduler
        # A `run` of the user's own is given the whole batch.
        wanted = scheduler.num_microbatches if isinstance(scheduler, PipelineScheduler) and not self._custom() else 1
        if self._ranks is not None:
            wanted = self.config.num_microbatches
        if wanted <= 1:
            return 1
        rows = {t.shape[0] if t.dim() else None for t in tensors}
        if len(rows) != 1 or None in rows:
            raise PlanError(
                f"{wanted} microbatches were asked for, but the input's tensors have first dimensions "
                f"{sorted(map(str, rows))}; give tensors that "
                "share the batch dimension"
            )
        count = int(next(iter(rows)) or 1)
        chunk = -(-count // min(wanted, count))
        return -(-count // chunk)

    def _need_input_grad(self, tensors: list[torch.Tensor]) -> bool:
        """Passes and a `run` of the user's own see the adjoint of the input too, as in 0.1.1."""
        return (len(self.pipeline) > 0 or self._custom()) and any(t.is_floating_point() for t in tensors)

    def _training_sweep(self, x: Any, parts: int, tensors: list[torch.Tensor], targets: bool) -> AnySweep:
        """The sweep of a train_step."""
        if self._whole is not None:
            return self._new_graph_sweep(x, parts, tensors)
        input_grad = any(t.requires_grad for t in tensors)
        program = self._program(parts, split=False, targets=targets, input_grad=input_grad)
        return self._new_sweep(x, parts, tensors, program, keep_output=False)

    def _new_graph_sweep(self, x: Any, parts: int, tensors: list[torch.Tensor]) -> GraphSweep:
        assert self._whole is not None
        self._split.drop()
        self._chain.generators.add(t.device for t in tensors)
        return GraphSweep(self._whole, [x] if parts == 1 else split_rows(x, parts))

    def _new_sweep(
        self, x: Any, parts: int, tensors: list[torch.Tensor], program: Program, *, keep_output: bool
    ) -> Sweep:
        self._split.drop()
        self._sweeps += 1
        self._chain.generators.add(t.device for t in tensors)
        inputs = [x] if parts == 1 else split_rows(x, parts)
        options: dict[str, Any] = {
            "need_input_grad": self._need_input_grad(tensors),
            "keep_output": keep_output,
            "number": self._sweeps - 1,
            "program": program,
        }
        if self.config.random_streams:
            return StreamedSweep(self._chain, inputs, stream=(self._seed, self.steps), **options)
        return Sweep(self._chain, inputs, **options)

    # -- forward and backward, split -------------------------------------------------------------------------------

    def forward(self, x: Any) -> Any:
        """Runs the chain without keeping a graph and stores the boundaries 0..L. Returns the output, detached.

        After a failure nothing is stored and buffers and generators are as before.
        """
        with self._exclusive():
            output = self._split.forward(x)
            self.steps += 1
            return output

    def backward(self, output: Any, loss_fn: LossFn) -> tuple[torch.Tensor, dict[torch.Tensor, torch.Tensor]]:
        """The loss of `output` and the gradients of every leaf, for the last :meth:`forward`. `.grad` stays as it is.

        Returns (loss, {leaf: gradient}), after `grad_clip_norm`. Raises LossError (a RuntimeError) when the loss is no
        scalar or does not depend on the output, RebuildMismatchError when parameters have changed since the forward.
        """
        with self._exclusive():
            return self._split.backward(output, loss_fn)

    def apply_gradients(self, param_grads: dict[torch.Tensor, torch.Tensor]) -> None:
        """Adds gradients into `.grad` and then fires each leaf's post-accumulate hooks once.

        param_grads: by leaf, the second of what :meth:`backward` and :meth:`compute_gradients` return. Raises
        TensorTypeError for anything else, and for a gradient of another shape; nothing is added then.
        """
        self._check_open()
        if not isinstance(param_grads, dict):
            raise TensorTypeError(
                f"apply_gradients() takes the dictionary {{leaf: gradient}}, not {type(param_grads).__name__}; "
                "backward() and compute_gradients() return (loss, gradients)"
            )
        for leaf, grad in param_grads.items():
            if not isinstance(leaf, torch.Tensor) or not isinstance(grad, torch.Tensor):
                raise TensorTypeError(
                    f"apply_gradients() takes tensors by tensor, not {type(grad).__name__} by {type(leaf).__name__}"
                )
            if grad.shape != leaf.shape:
                raise TensorTypeError(
                    f"the gradient of {self._name_of(leaf)} has shape {list(grad.shape)}, not {list(leaf.shape)}"
                )
        with torch.no_grad():
            for leaf, grad in param_grads.items():
                leaf.grad = grad.clone() if leaf.grad is None else leaf.grad + grad
                for hook in list((getattr(leaf, "_post_accumulate_grad_hooks", None) or {}).values()):
                    hook(leaf)

    def zero_grad(self) -> None:
        """Sets `.grad` of every parameter to None; an accumulation under way begins anew."""
        for parameter in self.parameters():
            parameter.grad = None
        self._training.pending = 0

    def compute_gradients(self, x: Any, loss_fn: LossFn) -> tuple[torch.Tensor, dict[torch.Tensor, torch.Tensor]]:
        """forward() and backward() in one: (loss, {leaf: gradient}) without a step; `.grad` stays as it is."""
        check_loss(loss_fn)
        with self._exclusive():
            for _ in self._attempts():
                try:
                    found = self._split.both(x, loss_fn)
                except Remembered:
                    continue
                self.steps += 1
                return found
            raise AssertionError("unreachable")

    # -- a whole step ----------------------------------------------------------------------------------------------

    def train_step(
        self,
        x: Any,
        loss_fn: LossFn,
        targets: Any = None,
        loss_reduction: str = "mean",
        loss_weight: Callable[[Any], Any] | None = None,
        accumulate: int = 1,
    ) -> float:
        """One training step: zero, forward, loss, reverse, clip, optimizer step, zero. Returns the loss.

        accumulate: this call is one of so many whose gradients add up, each with its loss divided by their number, as
        `(loss / n).backward()` would add them; the last one clips and steps. The loss returned is the undivided one.

        targets: a tree whose tensors share the batch dimension with the input. The loss is then called as
        `loss_fn(output_rows, target_rows)` for each microbatch. loss_reduction: "mean" weights the microbatches by
        their rows, or by `loss_weight(target_rows)` where given (ignored positions, padding; one of weight 0 is left
        out); "sum" adds them.

        Gradients accumulate straight into `.grad`, as `loss.backward()` does it; hooks fire as often. All or nothing:
        see the class.
        """
        if self._ranks is None:
            check_loss(loss_fn)
        self._training.check(accumulate)
        request = Request(x, loss_fn, targets, loss_reduction, loss_weight, accumulate)
        with self._exclusive():
            for _ in self._attempts():
                try:
                    if self._ranks is not None:
                        return self._ranks.step(self, x, loss_fn, targets, loss_reduction, loss_weight)
                    if self._custom():
                        return self._training.custom_step(request)
                    return self._training.step(request)
                except (RestartStep, Remembered):
                    continue
            raise AssertionError("unreachable")

    def _attempts(self) -> Iterator[int]:
        """A step is repeated when a block does something new; each repetition has learnt something, so this ends."""
        yield from range(8 * len(self.blocks) + 8)
        raise EAEError("the step was repeated too often: a block's forward does something new every time")

    # -- seeing what happens ---------------------------------------------------------------------------------------

    @property
    def last_grad_stats(self) -> dict[str, float]:
        """{num_params_with_grad, total_grad_norm} of the last train_step, computed when read. The gradients are held
        for that until the next call of the runtime."""
        if not self._stats and self.last_loss is not None:
            grads = self._last_grads
            norm = 0.0
            if grads:
                norm = torch.linalg.vector_norm(
                    torch.stack([torch.linalg.vector_norm(g.float()) for g in grads])
                ).item()
            self._stats = {"num_params_with_grad": len(grads), "total_grad_norm": norm}
            self._last_grads = []
        return dict(self._stats)

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Writes what has happened so far as Chrome trace JSON, which opens in Perfetto. Needs
        RuntimeConfig(trace=True)."""
        self._check_open()
        if self._trace is None:
            raise ConfigError("nothing was traced; make the runtime with RuntimeConfig(trace=True)")
        self._trace.write(path)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The blocks' parameters, in order; one that several blocks share comes once a block, as in 0.1.1. Those of
        this rank's blocks where blocks are spread over several."""
        if self._whole is not None:
            yield from self._whole.model.parameters()
            return
        for call in self._chain.calls:
            yield from call.module.parameters()

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Calls of train_step(accumulate=n) whose gradients wait in `.grad` for an optimizer step."""
        return self._training.pending

    def state_dict(self) -> dict[str, Any]:
        """What the runtime carries from step to step beside model and optimizer: state of passes, random generators (of
        torch, and those of `random` and `numpy.random`), counters, loss scaler, gradients of an accumulation under way.
        For torch.save; torch.load reads it with weights_only=True if the passes' state allows that."""
        self._check_open()
        return state_of(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a value of :meth:`state_dict`, also under another scheduler or tier. Raises ConfigError, and
        changes nothing, when version, blocks or passes differ."""
        self._check_open()
        with self._exclusive():
            self._split.drop()
            load_state(self, state)

    # -- several ranks ---------------------------------------------------------------------------------------------

    def release_foreign(self) -> int:
        """Frees the blocks that other ranks run: their parameters and buffers become meta tensors (the modules stay),
        their entries leave the optimizer. A parameter that a block of this rank shares stays. Returns the bytes let go;
        they are free when nobody else holds the tensors (a list of parameters, a state dict). With one process it does
        nothing."""
        self._check_open()
        return 0 if self._ranks is None else self._ranks.release(self.optimizer)

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank, for decisions of your own that all ranks have to take alike (skip a step
        after an Inf). Every rank has to call it."""
        self._check_open()
        return bool(flag) if self._ranks is None else self._ranks.any(flag)

    def _restore_passes(self, states: list[Any] | None) -> None:
        if states is not None:
            self.pipeline.load_state(states)

    # -- small parts -----------------------------------------------------------------------------------------------

    def _name_of(self, leaf: torch.Tensor) -> str:
        for name, module in self._named_modules():
            for path, parameter in module.named_parameters():
                if parameter is leaf:
                    return f"{path!r} of block {name!r}" if name else repr(path)
        return f"a tensor of shape {list(leaf.shape)} that no block has registered"

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this EAERuntime is closed; make a new one")

    def _explain(self, error: BaseException, where: Action | None) -> None:
        """Adds block and action to an exception, once."""
        if where is None or isinstance(error, KeyboardInterrupt):
            return
        kind, b, m = where
        action = f"{b}{kind}{'*' if m == ALL else m}"
        name = self.block_names[b] if b < len(self.blocks) else "the loss"
        annotate(
            error,
            f"in action {action} (block {b}, {name}); the step was undone: .grad, buffers and generators are as before "
            "it",
        )
