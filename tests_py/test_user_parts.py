"""What a user may write in Python: a scheduler, a memory policy, a pass. Each works inside the runtime."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from eae_runtime import (
    AdjointState,
    BaseScheduler,
    EAERuntime,
    MemoryPolicy,
    PipelineScheduler,
    ReconstructionEngine,
    RuntimeConfig,
    SequentialScheduler,
)
from eae_runtime.errors import EAEError, RebuildMismatchError
from eae_runtime.passes import EAEPass, RegularizationPass
from eae_runtime.schedulers import ReverseContext
from faults import differences, module_state, small, untouched
from models import CASES, chain
from oracle import Outcome, assert_same, build, clear, kept, leaves, nothing_left, plain_step, state_of

pytestmark = pytest.mark.filterwarnings("error")

STEPS = 4


class Mine(BaseScheduler):
    """The reverse pass as a user would write it, with scratch memory from the memory manager."""

    name = "Mine"

    def __init__(self) -> None:
        self.order: list[int] = []

    def run(self, context: ReverseContext) -> dict[torch.Tensor, torch.Tensor]:
        self.order.clear()
        grads: dict[torch.Tensor, torch.Tensor] = {}
        adjoint = context.initial_adjoint
        for i in reversed(range(len(context.blocks))):
            self.order.append(i)
            scratch = context.memory_manager.request(adjoint.tensor.shape, adjoint.tensor.dtype)
            scratch.copy_(adjoint.tensor)
            adjoint, updates = self._reconstruct_one(context, i, adjoint)
            context.memory_manager.release(scratch)
            self._accumulate(grads, updates)
        return grads


class Counting(MemoryPolicy):
    def __init__(self) -> None:
        self.allocated = self.freed = 0

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: Any) -> torch.Tensor:
        self.allocated += 1
        return torch.zeros(tuple(shape), dtype=dtype, device=device)

    def free(self, tensor: torch.Tensor) -> None:
        self.freed += 1

    def stats(self) -> dict[str, int]:
        return {"active": self.allocated - self.freed, "allocations": self.allocated}

    def reset(self) -> None:
        self.allocated = self.freed = 0


# Chains of one tensor between blocks, whose blocks share no leaf: what the 0.1.1 interface of a scheduler can hold.
SIMPLE = [
    "mlp",
    "cnn",
    "transformer",
    "transformer eval",
    "embedding",
    "attention eval",
    "lstm",
    "frozen prefix",
    "frozen middle",
    "broadcast",
    "views",
    "write",
    "noise",
    "buffers",
    "differentiates inside",
    "sparse gradient",
]


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("name", SIMPLE)
def test_a_scheduler_of_the_users_own(name: str, tier: str, tmp_path: Path) -> None:
    case = CASES[name]
    theirs, x = build(case)
    expected = [plain_step(theirs, x, case.loss) for _ in range(STEPS)]
    with nothing_left():
        model, x = build(case)
        mine, policy = Mine(), Counting()
        config = RuntimeConfig(scheduler=mine, memory=policy, boundary_tier=tier, disk_dir=tmp_path)
        with EAERuntime(model, config=config) as runtime:
            assert runtime.scheduler is mine and runtime.memory_manager.policy is policy
            for step, plain in enumerate(expected):
                clear(model)
                assert runtime.train_step(x, case.loss) == plain.loss.item()
                state = state_of(model)
                ours = Outcome(plain.loss, torch.get_rng_state(), outputs=plain.outputs, **state)
                assert_same(ours, plain, step)
                assert mine.order == list(reversed(range(len(model))))
                assert len(runtime.boundary_store) == 0
            assert runtime.memory_manager.stats() == {"active": 0, "allocations": STEPS * len(model)}
        del model, runtime, x, state, ours
    assert list(tmp_path.iterdir()) == []


def test_its_gradients_in_a_dictionary() -> None:
    case = CASES["mlp"]
    theirs, x = build(case)
    expected = [plain_step(theirs, x, case.loss) for _ in range(STEPS)]
    model, x = build(case)
    with EAERuntime(model, config=RuntimeConfig(scheduler=Mine())) as runtime:
        for step, plain in enumerate(expected):
            loss, grads = runtime.compute_gradients(x, case.loss)
            state = state_of(model)
            assert state["grads"] == {}
            state["grads"] = {n: kept(grads[p]) for n, p in leaves(model).items()}
            assert_same(Outcome(kept(loss), torch.get_rng_state(), outputs=plain.outputs, **state), plain, step)


@pytest.mark.parametrize("name", ["tied language model", "borrowed", "same module twice"])
def test_shared_leaves_add_up_to_tolerance(name: str) -> None:
    """`_accumulate` adds a block at a time: plain's mathematics in another order."""
    case = CASES[name]
    theirs, x = build(case)
    plain = plain_step(theirs, x, case.loss)
    model, x = build(case)
    with EAERuntime(model, config=RuntimeConfig(scheduler=Mine())) as runtime:
        runtime.train_step(x, case.loss)
    torch.testing.assert_close(state_of(model)["grads"], plain.grads)


def test_a_subclass_of_a_built_in_scheduler() -> None:
    class Twice(SequentialScheduler):
        def run(self, context: ReverseContext) -> Any:
            return {leaf: 2 * grad for leaf, grad in super().run(context).items()}

    model, x = build(CASES["mlp"])
    theirs, _ = build(CASES["mlp"])
    plain = plain_step(theirs, x, CASES["mlp"].loss)
    with EAERuntime(model, torch.optim.SGD(model.parameters(), lr=0.0), RuntimeConfig(scheduler=Twice())) as runtime:
        torch.manual_seed(1)
        _, grads = runtime.compute_gradients(x, CASES["mlp"].loss)
    assert all(torch.equal(grads[p], 2 * plain.grads[n]) for n, p in model.named_parameters())


def test_a_subclass_that_cuts_the_batch_itself() -> None:
    """A `run` of the user's own gets the whole batch; PipelineScheduler's own then goes through it by parts. What a
    block has drawn for the whole batch cannot be drawn for a part: refused, not wrong."""

    class Parts(PipelineScheduler):
        def run(self, context: ReverseContext) -> Any:
            assert len(context.boundary_store.get(0)) == 4
            return super().run(context)

    model = chain(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    x = torch.randn(4, 3)
    plain = plain_step(model, x, torch.sum)
    with EAERuntime(model, config=RuntimeConfig(scheduler=Parts(2))) as runtime:
        clear(model)
        runtime.train_step(x, torch.sum)
    torch.testing.assert_close(state_of(model)["grads"], plain.grads)
    for block in (nn.Dropout(0.5), nn.BatchNorm1d(3)):
        model = chain(nn.Linear(3, 3), block, nn.Linear(3, 2))
        with (
            EAERuntime(model, config=RuntimeConfig(scheduler=Parts(2))) as runtime,
            untouched(runtime, module_state(model)),
            pytest.raises(RebuildMismatchError, match=r"block 1.*part"),
        ):
            runtime.train_step(x, torch.sum)


def test_the_context_that_a_scheduler_sees() -> None:
    seen: list[ReverseContext] = []

    class Look(Mine):
        def run(self, context: ReverseContext) -> Any:
            seen.append(context)
            assert len(context.boundary_store) == 4
            assert torch.equal(context.boundary_store.get(0), torch.ones(4, 3))
            return super().run(context)

    model = small()
    config = RuntimeConfig(scheduler=Look(), passes=[RegularizationPass(0.5)])
    with EAERuntime(model, config=config) as runtime:
        runtime.event_bus.start_recording()
        runtime.compute_gradients(torch.ones(4, 3), torch.sum)
        log = runtime.event_bus.stop_recording()
        [context] = seen
        for name in ("blocks", "block_names", "boundary_store", "reconstruction_engine", "pipeline", "memory_manager"):
            assert getattr(context, name) is getattr(runtime, name), name
        assert context.event_bus is runtime.event_bus and context.profiler is runtime.profiler
        # a_L went through the passes before the scheduler saw it.
        assert torch.equal(context.initial_adjoint.tensor, torch.full((4, 2), 0.5))
        assert context.initial_adjoint.layer_id == 3
    assert [e.payload["layer_id"] for e in log if e.type == "PassApplied"] == [3, 2, 1, 0]
    assert [e.payload["block_index"] for e in log if e.type == "SchedulerStep"] == [2, 1, 0]
    assert [e.payload["layer_id"] for e in log if e.type == "BlockReconstructed"] == [3, 2, 1]


@pytest.mark.parametrize("made", [None, [1], 3.0], ids=str)
def test_a_scheduler_that_returns_something_else(made: Any) -> None:
    class Wrong(BaseScheduler):
        def run(self, context: ReverseContext) -> Any:
            return made

    model = small()
    with EAERuntime(model, config=RuntimeConfig(scheduler=Wrong())) as runtime:
        for call in (runtime.train_step, runtime.compute_gradients):
            with untouched(runtime, module_state(model)), pytest.raises(EAEError, match=r"Wrong\.run returned"):
                call(torch.ones(4, 3), torch.sum)


@pytest.mark.parametrize("nth", range(4))
def test_a_scheduler_that_fails_half_way(nth: int) -> None:
    class Failing(Mine):
        def _reconstruct_one(self, context: Any, i: int, adjoint: AdjointState) -> Any:  # type: ignore[override]
            if len(self.order) > nth:
                raise ArithmeticError("by hand")
            return BaseScheduler._reconstruct_one(context, i, adjoint)

    model = small()
    with EAERuntime(model, config=RuntimeConfig(scheduler=Failing())) as runtime:
        for call in (runtime.train_step, runtime.compute_gradients):
            if nth == 3:
                call(torch.ones(4, 3), torch.sum)
                continue
            with untouched(runtime, module_state(model)), pytest.raises(ArithmeticError, match="by hand"):
                call(torch.ones(4, 3), torch.sum)


# -- passes --------------------------------------------------------------------------------------------------------


class Watch(EAEPass):
    """Writes down what it is called with."""

    name = "Watch"

    def __init__(self, change: Callable[[AdjointState], torch.Tensor] | None = None) -> None:
        self.change = change
        self.seen: list[tuple[AdjointState, dict[str, Any]]] = []

    def process(self, adjoint: AdjointState, context: dict[str, Any] | None = None) -> AdjointState:
        self.seen.append((adjoint, dict(context or {})))
        new = adjoint.clone()
        if self.change is not None:
            new.tensor = self.change(adjoint)
        return new


@pytest.fixture(params=[("sequential", 1), ("async", 1), ("pipeline", 1), ("pipeline", 2)], ids=str)
def scheduled(request: pytest.FixtureRequest) -> Iterator[tuple[dict[str, Any], int]]:
    scheduler, parts = request.param
    with nothing_left():
        yield {"scheduler": scheduler, "num_microbatches": parts}, parts


def test_what_a_pass_sees(scheduled: tuple[dict[str, Any], int]) -> None:
    """Every boundary from L to 0: its number, name, microbatch, rows and weight, and where the adjoint has been."""
    settings, parts = scheduled
    model = chain(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    item = Watch()
    with EAERuntime(model, config=RuntimeConfig(passes=[item], **settings)) as runtime:
        runtime.train_step(torch.ones(5, 3), lambda y, t: y.sum(), targets=torch.zeros(5))
        names = [*runtime.block_names, "output"]
        bus = runtime.event_bus
    rows = [5] if parts == 1 else [3, 2]
    assert [(c["block_index"], c["block_name"], c["microbatch"], c["rows"], c["weight"]) for _, c in item.seen] == [
        (b, names[b], m, rows[m], rows[m] / 5) for m in range(parts) for b in (3, 2, 1, 0)
    ]
    assert all(c["event_bus"] is bus for _, c in item.seen)
    for (adjoint, _), b in zip(item.seen, [3, 2, 1, 0] * parts, strict=True):
        assert adjoint.layer_id == b and adjoint.block == names[b]
        assert adjoint.tensor.shape[1] == (2 if b == 3 else 3) and not adjoint.tensor.requires_grad
        assert adjoint.history == ([] if b == 3 else [f"reconstruct:{names[b]}"])


def test_metadata_travels_with_the_adjoint(scheduled: tuple[dict[str, Any], int]) -> None:
    class Count(EAEPass):
        name = "Count"

        def process(self, adjoint: AdjointState, context: Any = None) -> AdjointState:
            new = adjoint.clone()
            new.metadata["count"] = adjoint.metadata.get("count", 0) + 1
            return new

    watch = Watch()
    settings, parts = scheduled
    with EAERuntime(small(), config=RuntimeConfig(passes=[Count(), watch], **settings)) as runtime:
        runtime.train_step(torch.ones(4, 3), lambda y, t: y.sum(), targets=torch.zeros(4))
    assert [a.metadata["count"] for a, _ in watch.seen] == [1, 2, 3, 4] * parts


def test_a_pass_changes_what_is_upstream(scheduled: tuple[dict[str, Any], int]) -> None:
    """Doubled at every boundary: the last block gets twice its gradient, the first one eight times."""
    settings, _ = scheduled
    model = chain(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    x = torch.randn(4, 3)
    step = lambda runtime: runtime.train_step(x, lambda y, t: y.sum(), torch.zeros(4))
    with EAERuntime(model, config=RuntimeConfig(**settings)) as runtime:
        step(runtime)
        plain = state_of(model)["grads"]
    with EAERuntime(model, config=RuntimeConfig(passes=[Watch(lambda a: a.tensor * 2)], **settings)) as runtime:
        for _ in range(3):
            clear(model)
            step(runtime)
            assert differences(
                state_of(model)["grads"],
                {n: g * (2 if n.startswith("2") else 8) for n, g in plain.items()},
            ) == []  # fmt: skip


def test_a_python_pass_between_go_passes_and_a_function() -> None:
    def halve(adjoint: AdjointState, context: dict[str, Any]) -> AdjointState:
        new = adjoint.clone()
        new.tensor = adjoint.tensor * 0.5
        return new

    passes = [RegularizationPass(0.5), Watch(lambda a: a.tensor * 4), RegularizationPass(0.75), halve]
    model = chain(nn.Linear(3, 3), nn.Linear(3, 2))
    x = torch.randn(4, 3)
    plain = plain_step(model, x, torch.sum)
    with EAERuntime(model, config=RuntimeConfig(passes=passes)) as runtime:
        clear(model)
        runtime.train_step(x, torch.sum)
    # 0.5 * 4 * 0.25 * 0.5 = 1/4 at each of the two boundaries behind block 0, one behind block 1.
    ours = state_of(model)["grads"]
    assert differences(ours, {n: g / (4 if n.startswith("1") else 16) for n, g in plain.grads.items()}) == []
    assert passes[1].seen[0][0].history == ["RegularizationPass"]


# -- memory --------------------------------------------------------------------------------------------------------


def test_a_policy_given_as_a_class() -> None:
    with EAERuntime(small(), config=RuntimeConfig(memory=Counting)) as runtime:
        tensor = runtime.memory_manager.request((2, 3))
        assert runtime.memory_manager.stats() == {"active": 1, "allocations": 1} and not tensor.any()
        runtime.memory_manager.release(tensor)
        assert runtime.memory_manager.stats() == {"active": 0, "allocations": 1}


@pytest.mark.parametrize("name", ["mlp", "buffers", "write", "differentiates inside", "noise"])
def test_the_reconstruction_engine_alone(name: str) -> None:
    """Block by block, without a runtime: the local VJP of each, buffers and generator as they were."""
    model, x = build(CASES[name])
    engine = ReconstructionEngine()
    for block in model:
        theirs = copy.deepcopy(block)
        leaf = x.detach().clone().requires_grad_()
        torch.manual_seed(2)
        y = theirs(leaf * 1)
        given = torch.randn_like(y)
        y.backward(given)
        torch.manual_seed(2)
        before = module_state(block)()
        adjoint, grads = engine.reconstruct(block, x, AdjointState(given, 1), "here")
        assert differences(before, module_state(block)()) == []
        assert torch.equal(adjoint.tensor, leaf.grad) and adjoint.layer_id == 0
        for ours, plain in zip(block.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(grads[ours], plain.grad) if plain.grad is not None else ours not in grads
        x = y.detach()
