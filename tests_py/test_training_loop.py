"""EAERuntime in a training loop: loss scaler, accumulation, LR schedulers, clipping, batches from a DataLoader."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

from eae_runtime import EAERuntime, RuntimeConfig
from eae_runtime._graph_sweep import call_model
from eae_runtime.errors import ConfigError, EAEError, PassError, PlanError, TensorTypeError
from eae_runtime.passes import ClipPass, EAEPass
from eae_runtime.schedulers import ReverseContext, SequentialScheduler
from models import Fn
from wrapped import IDS, Model, cross

SCHEDULES: dict[str, dict[str, Any]] = {
    "sequential": {},
    "async host": {"scheduler": "async", "boundary_tier": "host"},
    "pipeline": {"scheduler": "pipeline", "num_microbatches": 2},
    "own": {"scheduler": "own"},
}

Make = Callable[[], nn.Module]


class Own(SequentialScheduler):
    """A scheduler of the user's own, as far as the runtime can see."""

    def run(self, context: ReverseContext) -> Any:
        return super().run(context)


def chain() -> nn.Sequential:
    layer = lambda: nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.GELU(), nn.Dropout(0.2), nn.Linear(12, 6))
    return nn.Sequential(nn.Linear(4, 6), layer(), layer(), nn.Linear(6, 3))


class Between(nn.Module):
    """The same with code between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        first, *layers, last = chain()
        self.first, self.layers, self.last = first, nn.ModuleList(layers), last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.last(x)


MODELS: dict[str, Make] = {"chain": chain, "module": Between}


def with_own(settings: dict[str, Any]) -> dict[str, Any]:
    return {**settings, "scheduler": Own()} if settings.get("scheduler") == "own" else settings


def twins(make: Make) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = make()
    return model, copy.deepcopy(model)


def batch(step: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(rows, 4, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def same(a: nn.Module, b: nn.Module, step: Any = "") -> None:
    one, two = a.state_dict(), b.state_dict()
    assert [n for n in one if not torch.equal(one[n], two[n])] == [], step


def same_grads(a: nn.Module, b: nn.Module, step: Any = "") -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters()):
        assert (p.grad is None) == (q.grad is None), (step, name)
        assert p.grad is None or torch.equal(p.grad, q.grad), (step, name)


def groups(model: nn.Module) -> torch.optim.Optimizer:
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 2e-2}], lr=1e-2)


# -- optimizers, LR schedulers, clipping -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("own_clip", [False, True])
@pytest.mark.parametrize(
    "optimize", [groups, lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True)]
)
@pytest.mark.parametrize(
    "plan",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    ],
)
def test_optimizers_and_lr_schedulers(kind: str, own_clip: bool, optimize: Any, plan: Any) -> None:
    theirs, ours = twins(MODELS[kind])
    plain, mine = optimize(theirs), optimize(ours)
    rates, my_rates = plan(plain), plan(mine)
    config = RuntimeConfig(grad_clip_norm=None if own_clip else 0.05)
    with EAERuntime(ours, None if own_clip else mine, config) as runtime:
        for step in range(6):
            x, y = batch(step)
            torch.manual_seed(step)
            plain.zero_grad()
            loss = F.cross_entropy(theirs(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
            plain.step()
            rates.step()
            torch.manual_seed(step)
            if own_clip:
                runtime.zero_grad()
                runtime.apply_gradients(runtime.compute_gradients(x, lambda out, y=y: F.cross_entropy(out, y))[1])
                nn.utils.clip_grad_norm_(ours.parameters(), 0.05)
                mine.step()
            else:
                assert runtime.train_step(x, lambda out, y=y: F.cross_entropy(out, y)) == loss.item()
            my_rates.step()
            same(theirs, ours, step)
        assert my_rates.get_last_lr() == rates.get_last_lr()


# -- loss scaler -----------------------------------------------------------------------------------------------------


def scaler(**more: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=65536.0, **more)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("settings", SCHEDULES.values(), ids=list(SCHEDULES))
def test_loss_scaler(kind: str, settings: dict[str, Any]) -> None:
    """Six steps of which the third one overflows; clipped on the unscaled gradients."""
    if "num_microbatches" in settings:
        settings = {**settings, "num_microbatches": 1}
    theirs, ours = twins(MODELS[kind])
    plain, mine = groups(theirs), groups(ours)
    one, two = scaler(growth_interval=2), scaler(growth_interval=2)
    config = RuntimeConfig(loss_scaler=two, grad_clip_norm=0.05, **with_own(settings))
    with EAERuntime(ours, mine, config) as runtime:
        for step in range(6):
            x, y = batch(step)
            factor = 1e36 if step == 2 else 1.0
            fn = lambda out, y=y, factor=factor: F.cross_entropy(out, y) * factor
            torch.manual_seed(step)
            plain.zero_grad()
            loss = fn(theirs(x))
            one.scale(loss).backward()
            one.unscale_(plain)
            nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
            one.step(plain)
            one.update()
            torch.manual_seed(step)
            assert runtime.train_step(x, fn) == loss.item()
            same(theirs, ours, step)
            assert two.state_dict() == one.state_dict()
    assert repr(mine.state_dict()) == repr(plain.state_dict())


class Counts(EAEPass):
    """Counts what it sees, and carries the count."""

    name = "Counts"
    stateful = True

    def __init__(self) -> None:
        self.seen = 0

    def process(self, adjoint: Any, context: Any = None) -> Any:
        self.seen += 1
        return adjoint.clone()

    def state(self) -> int:
        return self.seen

    def load_state(self, state: int) -> None:
        self.seen = state


@pytest.mark.parametrize("kind", MODELS)
def test_a_skipped_step_leaves_everything_but_the_scale(kind: str) -> None:
    """Inf in the last block computed: no parameter, no state of Adam or of a pass; the scale is halved."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    optimizer = torch.optim.Adam(model.parameters())
    counts, mine = Counts(), scaler()
    with EAERuntime(model, optimizer, RuntimeConfig(loss_scaler=mine, passes=[counts])) as runtime:
        x, y = batch(0)
        runtime.train_step(x, lambda out, y=y: F.cross_entropy(out, y))
        before = copy.deepcopy((list(model.parameters()), optimizer.state_dict(), counts.seen))
        assert counts.seen > 0
        first = next(model.parameters())
        handle = first.register_hook(lambda g: g * float("inf"))
        runtime.train_step(x, lambda out, y=y: F.cross_entropy(out, y))
        handle.remove()
        assert mine.get_scale() == 32768.0
        assert all(map(torch.equal, model.parameters(), before[0]))
        assert repr(optimizer.state_dict()) == repr(before[1]) and counts.seen == before[2]
        runtime.train_step(x, lambda out, y=y: F.cross_entropy(out, y))
        assert optimizer.state[first]["step"] == 2


def test_passes_see_unscaled_thresholds() -> None:
    """An adjoint whose unscaled norm is 0.02 stays as it is behind a ClipPass(1.0), at a scale of 65536."""
    model, twin = twins(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1, bias=False)))
    with torch.no_grad():
        model[1].weight.mul_(0.01 / model[1].weight.norm())
        twin.load_state_dict(model.state_dict())
    results = []
    for one, passes in ((model, []), (twin, [ClipPass(1.0)])):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        with EAERuntime(one, optimizer, RuntimeConfig(loss_scaler=scaler(), passes=passes)) as runtime:
            runtime.train_step(torch.ones(4, 4), lambda out: 0.02 * out.mean())
        results.append(one.state_dict())
    assert all(map(torch.equal, results[0].values(), results[1].values()))


class Contexts(EAEPass):
    """Remembers what it is told."""

    name = "Contexts"

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def process(self, adjoint: Any, context: Any = None) -> Any:
        self.seen.append(tuple(context.get(n) for n in ("loss_scale", "weight", "rows", "microbatch")))
        return adjoint.clone()


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("scheduler", ["sequential", "own"])
def test_passes_are_told_scale_and_weight(kind: str, scheduler: str) -> None:
    told = Contexts()
    torch.manual_seed(0)
    model = MODELS[kind]()
    x, y = batch(0)
    settings = with_own({"scheduler": scheduler, "loss_scaler": scaler(), "passes": [told]})
    with EAERuntime(model, groups(model), RuntimeConfig(**settings)) as runtime:
        runtime.train_step(x, F.cross_entropy, y, accumulate=2)
        assert set(told.seen) == {(65536.0, 0.5, 8, 0)}
        runtime.train_step(x, F.cross_entropy, y, accumulate=2)
        told.seen.clear()
        runtime.compute_gradients(x, lambda out: F.cross_entropy(out, y))
        assert {(seen[0], seen[1]) for seen in told.seen} == {(None, 1.0)}


def test_passes_of_a_module_are_told_each_microbatch() -> None:
    told = Contexts()
    torch.manual_seed(0)
    model = Between()
    x, y = batch(0, rows=7)
    config = RuntimeConfig(scheduler="pipeline", num_microbatches=2, passes=[told])
    with EAERuntime(model, groups(model), config) as runtime:
        runtime.train_step(x, F.cross_entropy, y)
    assert set(told.seen) == {(None, 4 / 7, 4, 0), (None, 3 / 7, 3, 1)}


def test_a_step_that_is_skipped_takes_all_its_calls_back_from_the_passes() -> None:
    """Two calls make a step; the second overflows. Also when the runtime was saved between the two."""
    x, y = batch(0)
    seen: list[int] = []
    for resumed in (False, True):
        torch.manual_seed(0)
        model, counts = chain(), Counts()
        optimizer = groups(model)
        runtime = EAERuntime(model, optimizer, RuntimeConfig(loss_scaler=scaler(), passes=[counts]))
        runtime.train_step(x, F.cross_entropy, y)
        before = counts.seen
        runtime.train_step(x, F.cross_entropy, y, accumulate=2)
        assert counts.seen > before
        if resumed:
            state = runtime.state_dict()
            runtime.close()
            counts = Counts()
            runtime = EAERuntime(model, optimizer, RuntimeConfig(loss_scaler=scaler(), passes=[counts]))
            runtime.load_state_dict(state)
        runtime.train_step(x, lambda out, y: F.cross_entropy(out, y) * 1e36, y, accumulate=2)
        assert counts.seen == before > 0
        seen.append(counts.seen)
        runtime.close()
    assert seen[0] == seen[1]


def test_scaler_with_the_split_calls() -> None:
    theirs, ours = twins(chain)
    plain, mine = groups(theirs), groups(ours)
    one, two = scaler(), scaler()
    with EAERuntime(ours, mine) as runtime:
        for step in range(3):
            x, y = batch(step)
            torch.manual_seed(step)
            plain.zero_grad()
            one.scale(F.cross_entropy(theirs(x), y)).backward()
            one.step(plain)
            one.update()
            torch.manual_seed(step)
            runtime.zero_grad()
            output = runtime.forward(x)
            _, gradients = runtime.backward(output, lambda out, y=y: two.scale(F.cross_entropy(out, y)))
            runtime.apply_gradients(gradients)
            two.step(mine)
            two.update()
            same(theirs, ours, step)


# -- accumulation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("settings", SCHEDULES.values(), ids=list(SCHEDULES))
def test_accumulation(kind: str, settings: dict[str, Any], scaled: bool) -> None:
    """Four calls a step, as plain adds `(loss / 4).backward()`; hooks see what plain's see."""
    parts = settings.get("num_microbatches", 1)
    theirs, ours = twins(MODELS[kind])
    plain, mine = groups(theirs), groups(ours)
    one, two = scaler(enabled=scaled), scaler(enabled=scaled)
    logs: list[list[torch.Tensor]] = [[], []]
    for model, log in zip((theirs, ours), logs):
        p = list(model.parameters())[2]
        p.register_post_accumulate_grad_hook(lambda p, log=log: log.append(p.grad.clone()))
    config = RuntimeConfig(grad_clip_norm=0.05, loss_scaler=two if scaled else None, **with_own(settings))
    with EAERuntime(ours, mine, config) as runtime:
        for step in range(8):
            x, y = batch(step)
            torch.manual_seed(step)
            for rows in zip(x.chunk(parts), y.chunk(parts)):
                loss = F.cross_entropy(theirs(rows[0]), rows[1])
                one.scale(loss / 4).backward(torch.tensor(1 / parts)) if parts > 1 else one.scale(loss / 4).backward()
            torch.manual_seed(step)
            runtime.train_step(x, F.cross_entropy, y, accumulate=4)
            assert runtime.pending == (step + 1) % 4 and runtime.steps == step + 1
            if step % 4 < 3:
                same_grads(theirs, ours, step)
                continue
            one.unscale_(plain)
            nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
            one.step(plain)
            one.update()
            plain.zero_grad()
            same(theirs, ours, step)
    assert len(logs[0]) == len(logs[1]) == 8 * parts and all(map(torch.equal, *logs))


@pytest.mark.parametrize("kind", MODELS)
def test_a_failed_call_leaves_the_sums_of_those_before_it(kind: str) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]()
    with EAERuntime(model, groups(model)) as runtime:
        x, y = batch(0)
        runtime.train_step(x, F.cross_entropy, y, accumulate=3)
        before = [(p.grad, p.grad.clone()) for p in model.parameters()]
        state = copy.deepcopy(model.state_dict())
        random = torch.get_rng_state()
        first = next(model.parameters())

        def fail(g: torch.Tensor) -> None:
            raise ArithmeticError("at the end")

        handle = first.register_hook(fail)
        with pytest.raises(ArithmeticError, match="at the end"):
            runtime.train_step(x, F.cross_entropy, y, accumulate=3)
        handle.remove()
        for p, (grad, value) in zip(model.parameters(), before):
            assert p.grad is grad and torch.equal(grad, value)
        assert all(map(torch.equal, model.state_dict().values(), state.values()))
        assert torch.equal(torch.get_rng_state(), random) and runtime.pending == 1
        for _ in range(2):
            runtime.train_step(x, F.cross_entropy, y, accumulate=3)
        assert runtime.pending == 0 and all(p.grad is None for p in model.parameters())


def test_accumulation_refuses() -> None:
    model = chain()
    x, y = batch(0)
    with EAERuntime(model, groups(model)) as runtime:
        for bad in (0, -1, 1.5, True, "2"):
            with pytest.raises(ConfigError, match="accumulate="):
                runtime.train_step(x, F.cross_entropy, y, accumulate=bad)
        runtime.train_step(x, F.cross_entropy, y, accumulate=3)
        with pytest.raises(ConfigError, match="in the middle of an accumulation over 3 calls, of which 1"):
            runtime.train_step(x, F.cross_entropy, y)
        runtime.zero_grad()
        assert runtime.pending == 0
        runtime.train_step(x, F.cross_entropy, y)
    with pytest.raises(ConfigError, match=r"loss_scaler=3: allowed is None or a torch\.amp\.GradScaler"):
        RuntimeConfig(loss_scaler=3)
    alone = EAERuntime(model, None, RuntimeConfig(loss_scaler=scaler()))
    with alone, pytest.raises(ConfigError, match="loss_scaler needs an optimizer"):
        alone.train_step(x, F.cross_entropy, y)


def test_split_calls_accumulate() -> None:
    theirs, ours = twins(chain)
    with EAERuntime(ours) as runtime:
        for step in range(3):
            x, y = batch(step)
            torch.manual_seed(step)
            F.cross_entropy(theirs(x), y).backward()
            torch.manual_seed(step)
            output = runtime.forward(x)
            runtime.apply_gradients(runtime.backward(output, lambda out, y=y: F.cross_entropy(out, y))[1])
        same_grads(theirs, ours)


# -- modules with code between their blocks --------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_a_module_keeps_its_own_forward(tier: str) -> None:
    theirs, ours = twins(Model)
    plain, mine = groups(theirs), groups(ours)
    with EAERuntime(ours, mine, RuntimeConfig(boundary_tier=tier)) as runtime:
        assert runtime.block_names == [f"layers.{i}" for i in range(4)] and runtime.blocks == list(ours.layers)
        assert {id(p) for p in runtime.parameters()} == {id(p) for p in ours.parameters()}
        for step in range(4):
            torch.manual_seed(step)
            plain.zero_grad()
            loss = cross(theirs(IDS))
            loss.backward()
            torch.manual_seed(step)
            total, gradients = runtime.compute_gradients(IDS, cross)
            assert torch.equal(total, loss) and all(p.grad is None for p in ours.parameters())
            for p, q in zip(theirs.parameters(), ours.parameters()):
                assert torch.equal(p.grad, gradients[q])
            assert len(gradients) == len(list(ours.parameters()))
            torch.manual_seed(step)
            assert runtime.train_step(IDS, cross) == loss.item()
            plain.step()
            same(theirs, ours, step)
        with pytest.raises(PlanError, match="keeps its own forward"):
            runtime.schedule()
    assert all("forward" not in m.__dict__ for m in ours.modules())


@pytest.mark.parametrize("kind", MODELS)
def test_microbatches_of_a_module(kind: str) -> None:
    """The oracle is plain accumulation over the same microbatches in the same order."""
    theirs, ours = twins(MODELS[kind])
    with EAERuntime(ours, config=RuntimeConfig(scheduler="pipeline", num_microbatches=3)) as runtime:
        for step in range(3):
            x, y = batch(step)
            torch.manual_seed(step)
            theirs.zero_grad()
            for rows in zip(x.split(3), y.split(3)):
                F.cross_entropy(theirs(rows[0]), rows[1]).backward(torch.tensor(len(rows[0]) / 8))
            torch.manual_seed(step)
            runtime.zero_grad()
            runtime.train_step(x, F.cross_entropy, y)
            same_grads(theirs, ours, step)
            same(theirs, ours, step)


def test_a_failed_step_of_a_module_is_undone() -> None:
    torch.manual_seed(0)
    model = Between()
    with EAERuntime(model, groups(model)) as runtime:
        x, y = batch(0)
        for at in ("forward", "loss", "backward"):
            runtime.train_step(x, F.cross_entropy, y)
            state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()

            def fail(*_: Any) -> None:
                raise ArithmeticError("no")

            handle = {
                "forward": lambda: model.last.register_forward_hook(fail),
                "loss": lambda: None,
                "backward": lambda: model.first.weight.register_hook(fail),
            }[at]()
            with pytest.raises(ArithmeticError):
                runtime.train_step(x, fail if at == "loss" else F.cross_entropy, y)
            if handle is not None:
                handle.remove()
            assert all(map(torch.equal, model.state_dict().values(), state.values())), at
            assert torch.equal(torch.get_rng_state(), random)
            assert all(p.grad is None for p in model.parameters())


def test_what_cannot_be_put_back_is_named() -> None:
    """A buffer outside of the blocks, too large for a copy in every step, first written in a step that fails."""

    class Late(Between):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(70_000))
            self.late = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.late:
                self.table.add_(1)
            return super().forward(x)

    def fail(*_: Any) -> None:
        raise ArithmeticError("no")

    model = Late()
    x, y = batch(0)
    with EAERuntime(model, groups(model)) as runtime:
        runtime.train_step(x, F.cross_entropy, y)
        model.late = True
        with pytest.raises(ArithmeticError) as info:
            runtime.train_step(x, fail, y)
        if hasattr(info.value, "__notes__"):
            assert any("not put back: table" in note for note in info.value.__notes__)
        # From now on it is kept.
        before = model.table.clone()
        with pytest.raises(ArithmeticError):
            runtime.train_step(x, fail, y)
        assert torch.equal(model.table, before)


class Reads(nn.Module):
    """Reads a leaf that nobody has registered once it is told to."""

    def __init__(self, inner: nn.Module, leaf: torch.Tensor) -> None:
        super().__init__()
        self.inner = inner
        self.read = lambda: leaf
        self.late = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.read() if self.late else self.inner(x)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("scheduler", ["sequential", "own"])
def test_a_leaf_that_is_read_late_repeats_the_step(kind: str, scheduler: str) -> None:
    extra = nn.Parameter(torch.full((6,), 0.5))
    theirs, ours = twins(MODELS[kind])
    for model in (theirs, ours):
        layers = model.layers if kind == "module" else model
        for number in (0, 1) if kind == "module" else (1, 2):
            layers[number] = Reads(layers[number], extra)
    plain, mine = groups(theirs), groups(ours)
    x, y = batch(0)
    with EAERuntime(ours, mine, RuntimeConfig(**with_own({"scheduler": scheduler}))) as runtime:
        for step in range(6):
            got = []
            for model in (theirs, ours):
                (model.layers[0] if kind == "module" else model[1]).late = step >= 3
                extra.grad = None
                torch.manual_seed(step)
                if model is theirs:
                    plain.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    plain.step()
                else:
                    runtime.train_step(x, F.cross_entropy, y)
                got.append(extra.grad)
            same(theirs, ours, step)
            assert (got[0] is None) == (got[1] is None) == (step < 3), step
            assert step < 3 or torch.equal(*got), step


# -- batches ---------------------------------------------------------------------------------------------------------


class Pairs(Dataset):
    """Rows as dictionaries or tuples."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        x, shift = torch.full((4,), float(index)), torch.ones(4) * index
        return ({"x": x, "shift": shift} if self.kind is dict else (x, shift)), index % 3


class Shifted(nn.Module):
    def forward(self, value: Any) -> torch.Tensor:
        x, shift = (value["x"], value["shift"]) if isinstance(value, dict) else value
        return x + 0.1 * shift


class Taking(Between):
    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return super().forward(x + 0.1 * shift)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kind", [dict, tuple])
@pytest.mark.parametrize("make", [lambda: nn.Sequential(Shifted(), *chain()), Taking], ids=["chain", "module"])
def test_batches_from_a_data_loader(make: Make, kind: type, parts: int) -> None:
    theirs, ours = twins(make)
    plain, mine = groups(theirs), groups(ours)
    config = RuntimeConfig(scheduler="pipeline", num_microbatches=parts)
    with EAERuntime(ours, mine, config) as runtime:
        for step, (inputs, labels) in enumerate(DataLoader(Pairs(kind), batch_size=4)):
            inputs = inputs if kind is dict else tuple(inputs)
            torch.manual_seed(step)
            plain.zero_grad()
            for m, y in enumerate(labels.chunk(parts)):
                part = pytree.tree_map(lambda t, m=m: t.chunk(parts)[m], inputs)
                out = theirs(part) if isinstance(theirs, nn.Sequential) else call_model(theirs, part)
                F.cross_entropy(out, y).backward(torch.tensor(1 / parts))
            plain.step()
            torch.manual_seed(step)
            runtime.train_step(inputs, F.cross_entropy, targets=labels)
            same(theirs, ours, step)


# -- state_dict ------------------------------------------------------------------------------------------------------


def test_nothing_is_loaded_from_another_state() -> None:
    with EAERuntime(chain(), config=RuntimeConfig(passes=[ClipPass(1.0)])) as runtime:
        state = runtime.state_dict()
        for change, text in (
            ({"version": 99}, "version 99"),
            ({"blocks": ["a"]}, "saved with the blocks \\['a'\\]"),
            ({"passes": []}, "saved with the passes \\[\\]"),
            ({"loss_scaler": {}}, "the state has a loss scaler"),
            ({"gradients": {"nobody": torch.ones(1)}}, "gradients of \\['nobody'\\]"),
            ({"pass_state": [None, None]}, "state for 2 passes"),
        ):
            steps = runtime.steps
            with pytest.raises((ConfigError, PassError), match=text):
                runtime.load_state_dict({**state, **change, "steps": 77})
            assert runtime.steps == steps
        with pytest.raises(ConfigError, match="no state"):
            runtime.load_state_dict({"model": 1})
    with pytest.raises(EAEError, match="closed"):
        runtime.state_dict()
    with EAERuntime(Fn(lambda x: x)) as other, pytest.raises(ConfigError, match="blocks"):
        other.load_state_dict(state)


def test_what_apply_gradients_takes() -> None:
    with EAERuntime(chain()) as runtime:
        x, y = batch(0)
        found = runtime.compute_gradients(x, lambda out: F.cross_entropy(out, y))
        for given, text in (
            (found, "not tuple; backward\\(\\) and compute_gradients\\(\\) return \\(loss, gradients\\)"),
            ({"weight": torch.ones(1)}, "not Tensor by str"),
            ({runtime.blocks[0].weight: 1.0}, "not float by Parameter"),
            ({runtime.blocks[0].weight: torch.ones(1)}, "has shape \\[1\\]"),
        ):
            with pytest.raises(TensorTypeError, match=text):
                runtime.apply_gradients(given)
        assert all(p.grad is None for p in runtime.parameters())
        runtime.apply_gradients(found[1])


def test_what_needs_a_chain() -> None:
    for settings in ({"scheduler": "distributed"}, {"random_streams": True}):
        with pytest.raises(PlanError, match=r"needs a chain of blocks .* Between keeps its own forward"):
            EAERuntime(Between(), config=RuntimeConfig(**settings))
