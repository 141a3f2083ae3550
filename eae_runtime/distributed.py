"""Training a chain whose blocks are spread over the ranks of torch.distributed. See docs/distributed.md.

Note [What all ranks agree on]
    A step begins and ends with an agreement: one small all-gather. At the start, what the schedule depends on
    (microbatches, which blocks are trainable). At the end, whether every rank has got through, the loss, and the
    norms for the global clip. Nothing is updated before the second one. A rank that fails sends its failure in place
    of the messages that it still owes, so everybody ends the step and the connections stay in step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from . import _tree
from ._distributed_sweep import DistributedSweep, Shared
from ._hops import Hop, hops_of, proofs
from ._losses import Loss, check_loss, split_losses, split_rows
from ._p2p import Failure, Messenger, PeerFailed, channels
from ._placement import Foreign, SharedLeaf, free, groups_of, local_ties, place
from ._program import Program, parse_action
from ._records import RestartStep
from ._sharing import Collector
from ._transaction import Gradients
from .errors import ConfigError, DistributedError, PlanError
from .events import EventType
from .schedulers import BaseScheduler, DistributedScheduler

if TYPE_CHECKING:
    from .config import RuntimeConfig
    from .runtime import EAERuntime

__all__ = ["Ranks"]

# What has to be the same on every rank.
_SAME = ("num_microbatches", "grad_clip_norm", "block_ranks", "passes", "blocks")


class Ranks:
    """One rank's part in a runtime that runs on several. Making it is collective, and so is `step`."""

    def __init__(self, scheduler: DistributedScheduler, config: RuntimeConfig, blocks: list[nn.Module | None]) -> None:
        """`blocks` has None, meta blocks or whole blocks where other ranks have theirs. A None is replaced by a
        stand-in."""
        through = channels(config.timeout)
        self.rank, self.world = through.rank, through.size
        self._scheduler = scheduler
        self._trainable: list[bool] | None = None
        self._plans: dict[Any, tuple[Program, list[Hop], dict[int, list[int]]]] = {}
        self.blocks: list[nn.Module] = []
        self.placed: list[int] = []
        self.own: list[int] = []
        self.leaves: list[SharedLeaf] = []
        self.messenger = Messenger(through, torch.device("cpu"))
        try:
            answers = self._together(lambda: self._look(config, blocks), "making the runtime", setup=True)
            for field in _SAME:
                found = {repr(a[field]): r for r, a in reversed(list(enumerate(answers)))}
                if len(found) > 1:
                    seen = ", ".join(
                        f"{value} on rank {r}" for value, r in sorted(found.items(), key=lambda item: item[1])
                    )
                    raise ConfigError(f"the ranks disagree on {field}: {seen}")
            self.names: list[str] = [answers[r]["names"][i] for i, r in enumerate(self.placed)]
            self.seed: int = answers[0]["seed"]
            self._share([tie for a in answers for tie in a["ties"]])
        except BaseException:
            self.close()
            raise

    def _look(self, config: RuntimeConfig, blocks: list[nn.Module | None]) -> dict[str, Any]:
        """Places the blocks and says what the other ranks have to know."""
        scheduler = self._scheduler
        wanted = scheduler.block_ranks if scheduler.block_ranks is not None else config.block_ranks
        self.placed = place(wanted, len(blocks), self.world)
        self.own = [i for i, r in enumerate(self.placed) if r == self.rank]
        for i in self.own:
            if blocks[i] is None:
                raise ConfigError(
                    f"block {i} is None but belongs to rank {self.rank}; only blocks of other ranks may be left out"
                )
        self.blocks = [Foreign(i, self.placed[i]) if b is None else b for i, b in enumerate(blocks)]
        if config.random_streams is False:
            raise ConfigError("random_streams=False: ranks cannot share one generator; leave it None or set it True")
        tensors = [t for i in self.own for t in (*self.blocks[i].parameters(), *self.blocks[i].buffers())]
        if any(t.is_meta for t in tensors):
            raise ConfigError(
                f"rank {self.rank} has meta parameters in its own blocks {self.own}; materialize them (to_empty, then "
                "load or init)"
            )
        if tensors:
            self.messenger.home = tensors[0].device
        return {
            "num_microbatches": config.num_microbatches,
            "grad_clip_norm": config.grad_clip_norm,
            "block_ranks": self.placed,
            "passes": [str(getattr(p, "name", type(p).__name__)) for p in config.passes],
            "blocks": len(blocks),
            "names": {
                i: getattr(self.blocks[i], "eae_name", None) or f"{type(self.blocks[i]).__name__}_{i}" for i in self.own
            },
            "ties": [*local_ties(self.blocks), *scheduler.shared],
            "seed": torch.initial_seed(),
        }

    def _share(self, ties: list[Sequence[str]]) -> None:
        """Finds the parameters that blocks of several ranks share and checks that all have the same values."""

        def prints() -> list[Any]:
            self.leaves = groups_of(ties, self.blocks, self.placed, self.rank)
            return [leaf.print_of() for leaf in self.leaves]

        answers = self._together(prints, "comparing shared parameters", setup=True)
        for leaf, found in zip(self.leaves, zip(*answers, strict=True), strict=True):
            if len({p for p in found if p is not None}) > 1:
                seen = ", ".join(f"{p} on rank {r}" for r, p in enumerate(found) if p)
                raise ConfigError(
                    f"the shared parameter {' = '.join(leaf.names)} differs between ranks ({seen}: shape, type, "
                    "checksum); give all ranks the same values"
                )

    @staticmethod
    def connect(
        scheduler: BaseScheduler, config: RuntimeConfig, model: Any, decompose: Callable[..., list[Any]]
    ) -> Ranks | None:
        """The ranks of a distributed scheduler, or None where there is one process."""
        if (
            not isinstance(scheduler, DistributedScheduler)
            or not (dist.is_available() and dist.is_initialized())
            or dist.get_world_size() == 1
        ):
            return None
        return Ranks(scheduler, config, decompose(model, foreign=True))

    def close(self) -> None:
        """Ends the waiting thread."""
        self.messenger.close()

    @property
    def modules(self) -> list[nn.Module]:
        """The blocks of this rank, with stand-ins for all others."""
        return [
            b if r == self.rank else Foreign(i, r)
            for i, (b, r) in enumerate(zip(self.blocks, self.placed, strict=True))
        ]

    def release(self, optimizer: torch.optim.Optimizer | None) -> int:
        """Frees the blocks of other ranks."""
        return free(self.blocks, [self.blocks[i] for i in self.own], optimizer)

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank. Collective."""
        return any(self.messenger.gather(bool(flag), "agreeing on a flag"))

    # -- agreement -------------------------------------------------------------------------------------------------

    def _failure(self, error: BaseException, where: str) -> Failure:
        if isinstance(error, PeerFailed):
            return error.failure
        text = str(error) if isinstance(error, DistributedError) else f"{type(error).__name__}: {error}"
        return Failure(self.rank, where, text, isinstance(error, RestartStep), bool(self.messenger.channels.broken))

    def _together(self, make: Callable[[], Any], what: str, *, setup: bool = False) -> list[Any]:
        """Every rank's result of `make`. If it fails on one, it fails on all: there with its own error, elsewhere
        with DistributedError."""
        value, error = None, None
        try:
            value = make()
        except Exception as raised:
            error = raised
        failure = None if error is None else self._failure(error, what)
        answers = self.messenger.gather((value, failure), what)
        self._raise([f for _, f in answers], error, setup)
        return [v for v, _ in answers]

    def _raise(self, failures: Sequence[Failure | None], mine: BaseException | None, setup: bool = False) -> None:
        """Raises what this rank has to raise when any rank has failed."""
        real = [f for f in failures if f is not None and not f.restart]
        if real:
            if mine is not None and not isinstance(mine, (PeerFailed, RestartStep, DistributedError)):
                raise mine
            if setup:
                raise DistributedError(f"rank {real[0].rank} failed in {real[0].where}: {real[0].text}") from mine
            raise self._error(real[0]) from (mine if isinstance(mine, DistributedError) else None)
        if any(f is not None for f in failures):
            raise mine if isinstance(mine, RestartStep) else RestartStep("a block on another rank has to be run again")

    def _error(self, failure: Failure) -> DistributedError:
        end = (
            ""
            if not failure.fatal
            else ". The process group cannot be used any more: end all ranks and start them again"
        )
        begin = (
            failure.text
            if failure.text.startswith("rank ")
            else f"rank {failure.rank} failed in {failure.where}: {failure.text}"
        )
        return DistributedError(
            f"{begin}. Nothing was updated on any rank, and the step was undone on this one (rank {self.rank}){end}"
        )

    # -- schedule --------------------------------------------------------------------------------------------------

    def plan(
        self,
        runtime: EAERuntime,
        trainable: Sequence[bool],
        parts: int,
        targets: bool,
        input_grad: bool,
        shared: Sequence[SharedLeaf],
    ) -> tuple[Program, list[Hop], dict[int, list[int]]]:
        """This rank's program, its messages, and what each of them proves (Note [When a sent tensor is freed])."""
        key = (
            tuple(trainable),
            parts,
            targets,
            input_grad,
            len(runtime.pipeline) > 0,
            tuple(leaf.names for leaf in shared),
        )
        if key not in self._plans:
            first = trainable.index(True) if True in trainable else len(trainable)
            spec = {
                "blocks": [{"name": n, "needs_vjp": input_grad or i >= first} for i, n in enumerate(self.names)],
                "world": self.world,
                "ranks": self.placed,
                "microbatches": parts,
                "targets": targets,
                "passes": len(runtime.pipeline) > 0,
                "input_grad": input_grad,
                "tier": runtime._schedule_tier(),
                "prefetch": runtime.config.prefetch,
            }
            lines = self._scheduler.schedule(spec).split("\n")
            texts = ["\n".join(lines[2 * r : 2 * r + 2]) for r in range(self.world)]
            readers = [leaf.blocks for leaf in shared]
            lists = [
                hops_of(r, [parse_action(t) for t in text.split()], self.placed, readers)
                for r, text in enumerate(texts)
            ]
            self._plans[key] = Program(texts[self.rank]), lists[self.rank], proofs(self.rank, lists)
        return self._plans[key]

    def text(self, runtime: EAERuntime, parts: int, targets: bool) -> str:
        """This rank's schedule as text, with the trainable blocks of the last step (before the first one: all)."""
        trainable = self._trainable or [True] * len(self.placed)
        return self.plan(runtime, trainable, parts, targets, False, self.leaves)[0].text

    # -- a step ----------------------------------------------------------------------------------------------------

    def step(
        self,
        runtime: EAERuntime,
        x: Any,
        loss_fn: Callable[..., Any],
        targets: Any,
        reduction: str,
        weigh: Callable[[Any], Any] | None,
    ) -> float:
        """EAERuntime.train_step on this rank. The first rank uses `x`, the last one `targets`."""
        chain, runtime._last_grads = runtime._chain, []
        last = self.rank == self.placed[-1]

        def offer() -> dict[str, Any]:
            check_loss(loss_fn)
            chain.refresh()
            mine: dict[str, Any] = {
                "steps": runtime.steps,
                "trainable": {i: i in chain.hidden or chain.calls[i].structure.trainable for i in self.own},
                "shared": [None if s.leaf is None else s.leaf.requires_grad for s in self.leaves],
                "targets": targets is not None,
            }
            if self.rank == self.placed[0]:
                tensors = runtime._check_input(x)
                rows = tensors[0].shape[0] if tensors[0].dim() else 0
                mine.update(parts=runtime._parts(tensors), rows=rows, input_grad=any(t.requires_grad for t in tensors))
            return mine

        self.messenger.check()
        answers = self._together(offer, f"the beginning of step {runtime.steps}")
        front = answers[self.placed[0]]
        parts, input_grad = front["parts"], front["input_grad"]
        if len({a["steps"] for a in answers}) > 1:
            raise ConfigError(f"the ranks are at different steps: {[a['steps'] for a in answers]} (runtime.steps)")
        trainable = self._trainable = [answers[r]["trainable"][i] for i, r in enumerate(self.placed)]
        shared = self._trained([a["shared"] for a in answers])
        has_targets = answers[self.placed[-1]]["targets"]
        program, hops, proven = self.plan(runtime, trainable, parts, has_targets, input_grad, shared)
        # Readers on this rank and elsewhere: this rank's VJPs then know which sums go on and which are complete.
        chain.set_elsewhere([(b, s.leaf) for s in shared if s.leaf is not None for b in s.blocks])

        inputs: list[Any] = []
        if self.rank == self.placed[0]:
            inputs = [x] if parts == 1 else split_rows(x, parts)
        sweep = self._sweep(runtime, inputs, parts, Shared(shared, self.placed, self.rank), hops, proven)
        before = Gradients(chain.parameters)
        states = runtime.pipeline.state() if runtime.pipeline.stateful else None
        try:
            error: BaseException | None = None
            report: dict[str, Any] = {}
            try:
                before.clear_owned()
                sweep.before_vjp = lambda leaves: self._unregistered(leaves, before)
                if last:
                    loss = split_losses(loss_fn, targets, parts, front["rows"], reduction, weigh)
                else:
                    loss = Loss(loss_fn, None, [1.0] * parts)
                sweep.set_loss(loss, Collector(None))
                self._walk(runtime, sweep, program)
                report = self._report(runtime, sweep, shared, last)
            except Exception as raised:
                error = raised
                runtime._explain(error, sweep.where)
            failure = None if error is None else self._failure(error, sweep.place(runtime))
            if failure is not None and failure.fatal:
                self.messenger.channels.broken = self.messenger.channels.broken or failure.text
            failure = sweep.end(failure)
            if failure is not None and failure.fatal:
                self._raise([failure], error)
            answers = self.messenger.gather((report, failure), f"the end of step {runtime.steps}")
            self._raise([f for _, f in answers], error)
            self._clip(runtime, [r for r, _ in answers])
        except BaseException as raised:
            if not isinstance(raised, Exception):
                self.messenger.channels.broken = (
                    self.messenger.channels.broken or f"{type(raised).__name__} in the middle of a step"
                )
            sweep.undo()
            before.restore()
            runtime._restore_passes(states)
            raise
        sweep.release()
        total = answers[self.placed[-1]][0]["loss"]
        return runtime._training.commit(torch.tensor(total, dtype=torch.float64), chain.parameters)

    def _trained(self, flags: list[list[bool | None]]) -> list[SharedLeaf]:
        """The shared parameters that are trained in this step."""
        out = []
        for leaf, found in zip(self.leaves, zip(*flags, strict=True), strict=True):
            known = {f for f in found if f is not None}
            if len(known) > 1:
                raise ConfigError(
                    f"the shared parameter {' = '.join(leaf.names)} requires grad on some ranks only "
                    f"({', '.join(f'{f} on rank {r}' for r, f in enumerate(found) if f is not None)}); freeze it on "
                    "all or on none"
                )
            if known == {True}:
                out.append(leaf)
        return out

    def _unregistered(self, leaves: Sequence[torch.Tensor], before: Gradients) -> None:
        """Leaves that no block of this rank has registered. One that a block of another rank has would lose this
        rank's share of its gradient."""
        ids = {id(leaf) for leaf in leaves}
        for i, block in enumerate(self.blocks):
            if self.placed[i] == self.rank:
                continue
            for path, parameter in block.named_parameters():
                if id(parameter) in ids:
                    raise PlanError(
                        f"parameter {path!r} of block {i} (rank {self.placed[i]}) is read on rank {self.rank} by a "
                        "block or loss that has not registered it; make it a parameter of that block as well, so that "
                        "all ranks know that it is shared"
                    )
        before.add_borrowed(leaves)

    def _sweep(
        self,
        runtime: EAERuntime,
        inputs: list[Any],
        parts: int,
        shared: Shared,
        hops: list[Hop],
        proven: dict[int, list[int]],
    ) -> DistributedSweep:
        runtime._split.drop()
        runtime._sweeps += 1
        tensors = _tree.flatten(inputs)[0]
        runtime._chain.generators.add(t.device for t in tensors)
        return DistributedSweep(
            runtime._chain,
            inputs,
            stream=(self.seed, runtime.steps),
            need_input_grad=runtime._need_input_grad(tensors),
            keep_output=False,
            number=runtime._sweeps - 1,
            parts=parts,
            messenger=self.messenger,
            shared=shared,
            hops=hops,
            proven=proven,
        )

    def _walk(self, runtime: EAERuntime, sweep: DistributedSweep, program: Program) -> None:
        events = runtime.event_bus
        if events.wants(EventType.TRAIN_STEP_STARTED):
            events.emit(EventType.TRAIN_STEP_STARTED)
        with torch.enable_grad():
            if events.wants(EventType.FORWARD_STARTED):
                events.emit(EventType.FORWARD_STARTED, num_blocks=len(self.own))
            with runtime.profiler.track("forward"):
                sweep.run(program.forward)
            if events.wants(EventType.FORWARD_FINISHED):
                events.emit(EventType.FORWARD_FINISHED, num_boundaries=len(runtime.boundary_store))
            with runtime.profiler.track("reverse_pass"):
                sweep.run(program.reverse)
                sweep.exchange_totals()

    def _report(
        self, runtime: EAERuntime, sweep: DistributedSweep, shared: Sequence[SharedLeaf], last: bool
    ) -> dict[str, Any]:
        """What the final agreement needs of this rank: the loss, and the norm of each gradient that is not counted
        elsewhere."""
        report: dict[str, Any] = {}
        if last:
            report["loss"] = sweep.total_loss().item()
        if runtime.config.grad_clip_norm is not None:
            elsewhere = {id(s.leaf) for s in shared if min(self.placed[b] for b in s.blocks) != self.rank}
            grads = [p.grad for p in runtime._chain.parameters if p.grad is not None and id(p) not in elsewhere]
            norms = [torch.linalg.vector_norm(g).to(self.messenger.home, torch.float64) for g in grads]
            report["norms"] = torch.stack(norms).tolist() if norms else []
            report["double"] = any(g.dtype in (torch.float64, torch.complex128) for g in grads)
        return report

    @staticmethod
    def _clip(runtime: EAERuntime, reports: Sequence[dict[str, Any]]) -> None:
        """Scales this rank's gradients by the norm over all ranks, computed alike on each: in the order of the
        blocks."""
        limit = runtime.config.grad_clip_norm
        if limit is None:
            return
        kind = torch.float64 if any(r["double"] for r in reports) else torch.float32
        total = torch.linalg.vector_norm(torch.tensor([n for r in reports for n in r["norms"]], dtype=kind))
        nn.utils.clip_grads_with_norm_([p for p in runtime._chain.parameters if p.grad is not None], limit, total)
