"""Microbatches: plain accumulation over the same parts in the same order, bit for bit; the full batch to tolerance; and
an activation peak that falls with their number."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from counting import Interior
from eae_runtime import EAERuntime, PipelineScheduler, RuntimeConfig, _bridge
from eae_runtime.errors import ConfigError, LossError, PlanError
from models import CASES, Case, Scale, chain, rows
from oracle import (
    Outcome,
    assert_same,
    build,
    clear,
    default_dtype,
    fresh,
    kept,
    leaves,
    listen,
    nothing_left,
    plain_step,
    state_of,
)

pytestmark = pytest.mark.filterwarnings("error")

STEPS = 3

SETTINGS = [
    *[(torch.float32, tier) for tier in ("device", "host", "disk")],
    (torch.float64, "device"),
]

# More parts than any input has rows: each row is then a part.
MANY = 100


@pytest.fixture(params=SETTINGS, ids=lambda p: f"{str(p[0])[6:]}-{p[1]}")
def configure(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[int], RuntimeConfig]]:
    dtype, tier = request.param
    with default_dtype(dtype), nothing_left():
        yield lambda parts: RuntimeConfig(
            scheduler="pipeline", num_microbatches=parts, boundary_tier=tier, disk_dir=tmp_path
        )
        assert list(tmp_path.iterdir()) == []


# BatchNorm1d refuses a part of one row.
PAIRS = [(n, p) for n in CASES for p in (1, 2, 3, MANY) if not (n == "same module twice" and p > 2)]
every_case = pytest.mark.parametrize(("name", "parts"), PAIRS, ids=lambda v: str(v))


def cut(value: Any, parts: int) -> list[Any]:
    """Parts of ceil(rows / parts) rows, as documented."""
    count = len(pytree.tree_leaves(value)[0])
    size = -(-count // min(parts, count))
    slices = [slice(start, start + size) for start in range(0, count, size)]
    return [pytree.tree_map(lambda t, part=part: t[part], value) for part in slices]


def row_count(x: Any) -> int:
    return len(pytree.tree_leaves(x)[0])


def weighed(case: Case) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """The case's loss with targets: one number a row."""
    return lambda output, target: case.loss(output) * target.sum()


def accumulate(
    model: nn.Module, pieces: list[Any], loss_fn: Any, targets: list[Any], weights: list[float], hooks: list[Any]
) -> Outcome:
    """Plain accumulation: forward and backward a part at a time."""
    clear(model)
    hooks.clear()
    outputs, losses = [], []
    for piece, target, weight in zip(pieces, targets, weights, strict=True):
        output = model(piece)
        loss = loss_fn(output, target)
        loss = loss * weight if weight != 1.0 else loss
        loss.backward()
        outputs.append(output)
        losses.append(kept(loss))
    total = losses[0]
    for loss in losses[1:]:
        total = total + loss
    return Outcome(total, torch.get_rng_state(), hooks=list(hooks), **state_of(model))


def accumulate_one_loss(model: nn.Module, pieces: list[Any], loss_fn: Any, hooks: list[Any]) -> Outcome:
    """Every part forward, one loss on all of them, then back a part at a time."""
    clear(model)
    hooks.clear()
    outputs = [model(piece) for piece in pieces]
    whole = torch.cat(outputs).detach().requires_grad_()
    loss = loss_fn(whole)
    loss.backward()
    for output, grad in zip(outputs, whole.grad.split([len(o) for o in outputs]), strict=True):
        output.backward(grad)
    return Outcome(kept(loss), torch.get_rng_state(), hooks=list(hooks), **state_of(model))


@every_case
def test_with_targets(name: str, parts: int, configure: Callable[[int], RuntimeConfig]) -> None:
    case, reduction = CASES[name], "sum" if parts == 2 else "mean"
    theirs, x = build(case)
    target = torch.linspace(0.5, 1.5, row_count(x))
    pieces, targets = cut(x, parts), cut(target, parts)
    sizes = [len(t) / len(target) for t in targets]
    weights = sizes if reduction == "mean" else [1.0] * len(sizes)
    their_log: list[Any] = []
    listen(theirs, their_log)
    expected = [
        accumulate(theirs, cut(fresh(x), parts), weighed(case), targets, weights, their_log) for _ in range(STEPS)
    ]
    assert len(pieces) == min(parts, row_count(x)) or parts in (2, 3)

    model, x = build(case)
    log: list[Any] = []
    listen(model, log)
    with EAERuntime(model, config=configure(parts)) as runtime:
        for step, plain in enumerate(expected):
            clear(model)
            log.clear()
            loss = runtime.train_step(fresh(x), weighed(case), targets=target, loss_reduction=reduction)
            assert loss == plain.loss.item()
            assert_same(Outcome(plain.loss, torch.get_rng_state(), hooks=log, **state_of(model)), plain, step)
            assert len(runtime.boundary_store) == 0


@every_case
def test_without_targets(name: str, parts: int, configure: Callable[[int], RuntimeConfig]) -> None:
    case = CASES[name]
    theirs, x = build(case)
    their_log: list[Any] = []
    listen(theirs, their_log)
    expected = [accumulate_one_loss(theirs, cut(fresh(x), parts), case.loss, their_log) for _ in range(STEPS)]

    model, x = build(case)
    log: list[Any] = []
    listen(model, log)
    with EAERuntime(model, config=configure(parts)) as runtime:
        for step, plain in enumerate(expected):
            clear(model)
            log.clear()
            loss = runtime.train_step(fresh(x), case.loss)
            assert loss == plain.loss.item()
            assert_same(Outcome(plain.loss, torch.get_rng_state(), hooks=log, **state_of(model)), plain, step)


@pytest.mark.parametrize(("name", "parts"), [pair for pair in PAIRS if pair[1] == 2])
def test_split_calls(name: str, parts: int, configure: Callable[[int], RuntimeConfig]) -> None:
    """forward and backward: the same gradients in a dictionary."""
    case = CASES[name]
    theirs, x = build(case)
    expected = [accumulate_one_loss(theirs, cut(fresh(x), parts), case.loss, []) for _ in range(STEPS)]

    model, x = build(case)
    with EAERuntime(model, config=configure(parts)) as runtime:
        for step, plain in enumerate(expected):
            output = runtime.forward(fresh(x))
            loss, grads = runtime.backward(output, case.loss)
            state = state_of(model)
            assert state["grads"] == {}
            state["grads"] = {n: kept(grads[p]) for n, p in leaves(model).items() if p in grads}
            assert_same(Outcome(kept(loss), torch.get_rng_state(), **state), plain, step)


NO_DRAWS = [
    "one block",
    "embedding",
    "tied everywhere",
    "attention eval",
    "transformer eval",
    "gru",
    "cross attention",
    "frozen middle",
    "views",
    "closure",
    "borrowed",
]


@pytest.mark.parametrize("name", NO_DRAWS)
@pytest.mark.parametrize("with_targets", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_full_batch_to_tolerance(name: str, with_targets: bool, reduction: str) -> None:
    """Where nothing is drawn and no statistic is taken over the batch, parts of 2, 2 and 1 rows are the full batch."""
    case = CASES[name]
    torch.manual_seed(0)
    x = pytree.tree_map(lambda t: torch.cat([t, t.flip(0), t])[:5], case.x())
    loss_fn = lambda y: (y * y).mean() if reduction == "mean" else (y * y).sum()
    theirs, _ = build(case)
    theirs.apply(lambda m: setattr(m, "dropout", 0.0) if isinstance(m, nn.RNNBase) else None)
    theirs.apply(lambda m: setattr(m, "p", 0.0) if isinstance(m, nn.Dropout) else None)
    plain = plain_step(theirs, x, loss_fn)
    model, _ = build(case)
    model.apply(lambda m: setattr(m, "dropout", 0.0) if isinstance(m, nn.RNNBase) else None)
    model.apply(lambda m: setattr(m, "p", 0.0) if isinstance(m, nn.Dropout) else None)
    with EAERuntime(model, config=RuntimeConfig(scheduler=PipelineScheduler(3))) as runtime:
        if with_targets:
            target = torch.zeros(5)
            fn = lambda y, t: loss_fn(y) + t.sum()
            loss = runtime.train_step(fresh(x), fn, targets=target, loss_reduction=reduction)
        else:
            loss = runtime.train_step(fresh(x), loss_fn)
    torch.testing.assert_close(torch.tensor(loss), plain.loss)
    torch.testing.assert_close(state_of(model)["grads"], plain.grads)


def test_loss_weight_for_ignored_positions() -> None:
    """cross_entropy's mean is over the positions that are not ignored: weighted by their number, the parts make the
    full batch's mean. A part in which everything is ignored has weight 0 and adds nothing, though its own mean is
    0/0."""
    ignored = -100
    target = torch.tensor([[1, 2, 3], [4, ignored, ignored], [ignored] * 3, [ignored] * 3, [5, 6, ignored]])
    loss_fn = lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten(), ignore_index=ignored)
    count = lambda t: (t != ignored).sum()
    make = lambda: chain(nn.Embedding(11, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 11))
    case = Case(make, lambda: torch.randint(0, 11, (5, 3)))
    theirs, x = build(case)
    plain = plain_step(theirs, x, lambda y: loss_fn(y, target))

    for parts, sizes in ((2, [3, 2]), (3, [2, 2, 1]), (MANY, [1] * 5)):
        pieces = list(zip(x.split(sizes), target.split(sizes), strict=True))
        clear(theirs)
        for piece, t in pieces:
            if count(t):
                (loss_fn(theirs(piece), t) * (count(t) / count(target)).item()).backward()
        model, x = build(case)
        config = RuntimeConfig(scheduler="pipeline", num_microbatches=parts)
        with EAERuntime(model, config=config) as runtime:
            for _ in range(3):
                clear(model)
                loss = runtime.train_step(x, loss_fn, targets=target, loss_weight=count)
                torch.testing.assert_close(torch.tensor(loss), plain.loss)
                ours = state_of(model)["grads"]
                torch.testing.assert_close(ours, plain.grads)
                assert all(torch.equal(ours[n], p.grad) for n, p in theirs.named_parameters())


def test_tied_weights_over_four_microbatches() -> None:
    """w = 3 in both blocks, y = w * (w * x), x = 2: each microbatch adds 2 w x = 12 and fires the hook once."""
    w = nn.Parameter(torch.tensor(3.0))
    fired: list[float] = []
    w.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad.item()))
    config = RuntimeConfig(scheduler="pipeline", num_microbatches=4)
    with EAERuntime(chain(Scale(w), Scale(w)), config=config) as runtime:
        for _ in range(3):
            w.grad = None
            fired.clear()
            runtime.train_step(torch.full((4,), 2.0), lambda y, _: y.sum(), targets=torch.ones(4), loss_reduction="sum")
            assert fired == [12.0, 24.0, 36.0, 48.0]


@pytest.mark.parametrize("scheduler", ["sequential", "async"])
def test_targets_without_microbatches(scheduler: str) -> None:
    """Other schedulers take targets= as one part: the weight is 1, the bits are those of a closure over the targets."""
    case = CASES["mlp"]
    theirs, x = build(case)
    target = torch.randn(4, 6)
    torch.manual_seed(3)
    plain = plain_step(theirs, x, lambda y: F.mse_loss(y, target))
    model, x = build(case)
    torch.manual_seed(3)
    with EAERuntime(model, config=RuntimeConfig(scheduler=scheduler, num_microbatches=4)) as runtime:
        loss = runtime.train_step(x, F.mse_loss, targets=target)
    assert loss == plain.loss.item()
    assert_same(Outcome(plain.loss, torch.get_rng_state(), outputs=plain.outputs, **state_of(model)), plain)


def test_targets_may_be_a_tree() -> None:
    case = Case(lambda: chain(nn.Linear(6, 3)), rows(5, 6))
    model, x = build(case)
    seen: list[tuple[int, int]] = []

    def loss_fn(y: torch.Tensor, t: dict[str, torch.Tensor]) -> torch.Tensor:
        seen.append((len(t["a"]), len(t["b"])))
        return F.mse_loss(y * t["b"][:, None], t["a"])

    targets = {"a": torch.randn(5, 3), "b": torch.rand(5)}
    with EAERuntime(model, config=RuntimeConfig(scheduler="pipeline", num_microbatches=2)) as runtime:
        loss = runtime.train_step(x, loss_fn, targets=targets)
    assert seen == [(3, 3), (2, 2)]
    torch.testing.assert_close(torch.tensor(loss), F.mse_loss(model(x) * targets["b"][:, None], targets["a"]).detach())


# -- what is held --------------------------------------------------------------------------------------------------


def peaks(parts: int, with_targets: bool) -> tuple[int, int]:
    """The most rows alive in interiors and in stored boundaries over a step of 5 blocks and 12 rows."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Interior(8) for _ in range(5)])
    config = RuntimeConfig(scheduler="pipeline", num_microbatches=parts)
    stored = 0
    with EAERuntime(model, config=config) as runtime:
        store = runtime.boundary_store

        def look(module: nn.Module, args: Any) -> None:
            nonlocal stored
            stored = max(stored, store.memory_bytes() // (8 * 4))

        for block in model:
            block.register_forward_pre_hook(look)
        for step in range(4):
            Interior.forget()
            stored = 0
            targets = torch.zeros(12) if with_targets else None
            loss_fn = (lambda y, t: y.square().mean()) if with_targets else (lambda y: y.square().mean())
            runtime.train_step(torch.randn(12, 8), loss_fn, targets=targets)
            assert Interior.held() == 0, step
    return Interior.peak, stored


def test_with_targets_the_peak_falls_with_the_number() -> None:
    """One part of one block's interior (two tensors), and one part of the inputs of all blocks but the last, which
    keeps its graph."""
    assert {parts: peaks(parts, True) for parts in (1, 2, 3, 4, 12)} == {
        parts: (2 * 12 // parts, 4 * 12 // parts) for parts in (1, 2, 3, 4, 12)
    }


def test_without_targets_interiors_shrink_and_boundaries_do_not() -> None:
    found = {parts: peaks(parts, False) for parts in (2, 3, 4, 12)}
    assert {parts: interior for parts, (interior, _) in found.items()} == {p: 2 * 12 // p for p in (2, 3, 4, 12)}
    # Five blocks' inputs, of all parts but what the last one has not stored yet when its last block begins.
    assert all(stored >= 5 * 12 - 12 // parts for parts, (_, stored) in found.items())
    assert all(stored <= 5 * 12 for _, stored in found.values())


@pytest.mark.parametrize(
    ("asked", "rows_", "sizes"), [(1, 5, [5]), (2, 5, [3, 2]), (3, 5, [2, 2, 1]), (4, 5, [2, 2, 1]), (9, 2, [1, 1])]
)
def test_how_a_batch_is_cut(asked: int, rows_: int, sizes: list[int]) -> None:
    seen: list[int] = []
    loss_fn = lambda y, t: seen.append(len(y)) or y.mean()
    with pipeline(asked) as runtime:
        runtime.train_step(torch.randn(rows_, 3), loss_fn, targets=torch.zeros(rows_))
    assert seen == sizes


# -- what is refused -----------------------------------------------------------------------------------------------


def pipeline(parts: int = 2) -> EAERuntime:
    return EAERuntime(chain(nn.Linear(3, 2)), config=RuntimeConfig(scheduler="pipeline", num_microbatches=parts))


def test_one_forward_one_backward_needs_targets() -> None:
    spec = {"blocks": [{"name": str(i), "needs_vjp": True} for i in range(4)], "microbatches": 2, "world": 2}
    with pytest.raises(PlanError, match="targets="):
        _bridge.call("SchedGenerate", "distributed", json.dumps({**spec, "order": "1f1b", "targets": False}))
    _bridge.call("SchedGenerate", "distributed", json.dumps({**spec, "order": "1f1b", "targets": True}))


def test_what_cannot_be_cut_is_refused() -> None:
    with pipeline() as runtime:
        with pytest.raises(PlanError, match="batch dimension"):
            runtime.forward((torch.ones(4, 3), torch.ones(2, 3)))
        with pytest.raises(PlanError, match="batch dimension"):
            runtime.forward(torch.tensor(3.0))
        with pytest.raises(ConfigError, match="same number of rows"):
            runtime.train_step(torch.ones(4, 3), lambda y, t: y.sum(), targets=torch.zeros(1))
        with pytest.raises(ConfigError, match="same number of rows"):
            runtime.train_step(torch.ones(4, 3), lambda y, t: y.sum(), targets=torch.zeros(8))
        with pytest.raises(ConfigError, match="'mean', 'sum'"):
            runtime.train_step(torch.ones(4, 3), lambda y, t: y.sum(), torch.zeros(4), "average")
        with pytest.raises(ConfigError, match="targets="):
            runtime.train_step(torch.ones(4, 3), lambda y: y.sum(), loss_weight=len)
        with pytest.raises(ConfigError, match="above 0"):
            runtime.train_step(torch.ones(4, 3), lambda y, t: y.sum(), torch.zeros(4), loss_weight=lambda t: 0)
        with pytest.raises(LossError, match="scalar"):
            runtime.train_step(torch.ones(4, 3), lambda y, t: y, torch.zeros(4))
        assert all(p.grad is None for p in runtime.parameters())


def test_a_closure_over_the_whole_batch_is_called_once_on_the_whole_output() -> None:
    target = torch.randn(4, 2)
    seen: list[torch.Size] = []
    with pipeline() as runtime:
        runtime.train_step(torch.ones(4, 3), lambda y: seen.append(y.shape) or F.mse_loss(y, target))
    assert seen == [torch.Size([4, 2])]


def test_a_failure_in_the_last_microbatch_undoes_all() -> None:
    """BatchNorm has counted twice and `.grad` holds the first part's gradients when the second part's loss fails."""
    model = chain(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2))
    calls = 0

    def loss_fn(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls % 2 == 0:
            raise ArithmeticError("by hand")
        return y.sum()

    with pipeline() as runtime, EAERuntime(model, config=runtime.config) as ours:
        for _ in range(3):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            before, random = state_of(model), torch.get_rng_state()
            with pytest.raises(ArithmeticError, match="by hand"):
                ours.train_step(torch.randn(4, 3, generator=torch.Generator()), loss_fn, targets=torch.zeros(4))
            after = state_of(model)
            for what, tensors in before.items():
                assert after[what].keys() == tensors.keys()
                assert all(torch.equal(after[what][n], tensors[n]) for n in tensors), what
            assert torch.equal(torch.get_rng_state(), random)
            assert len(ours.boundary_store) == 0
