"""Plain `loss.backward()`, bit for bit: outputs, loss, every gradient by name, buffers, random state, hooks.

Four steps each: the runtime learns a block in its first step (grad mode, saved tensors dropped), compares both grad
modes in the second, and may run without a graph from the third on.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from eae_runtime import EAERuntime, RuntimeConfig
from models import CASES
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

STEPS = 4

SETTINGS = [
    *[(torch.float32, scheduler, tier) for scheduler in ("sequential", "async") for tier in ("device", "host", "disk")],
    (torch.float64, "sequential", "device"),
    (torch.float64, "sequential", "host"),
    (torch.float64, "async", "disk"),
]


@pytest.fixture(params=SETTINGS, ids=lambda p: "-".join([str(p[0])[6:], *p[1:]]))
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RuntimeConfig]:
    dtype, scheduler, tier = request.param
    with default_dtype(dtype), nothing_left():
        yield RuntimeConfig(scheduler=scheduler, boundary_tier=tier, disk_dir=tmp_path)
        assert list(tmp_path.iterdir()) == []


every_case = pytest.mark.parametrize("name", CASES)


@every_case
def test_train_step_gradients(name: str, config: RuntimeConfig) -> None:
    """`.grad`, hooks and all else after train_step without an optimizer."""
    case = CASES[name]
    theirs, x = build(case)
    their_log: list[Any] = []
    listen(theirs, their_log)
    expected = [plain_step(theirs, x, case.loss, their_log) for _ in range(STEPS)]

    model, x = build(case)
    log: list[Any] = []
    listen(model, log)
    with EAERuntime(model, config=config) as runtime:
        for step, plain in enumerate(expected):
            clear(model)
            log.clear()
            loss = runtime.train_step(fresh(x), case.loss)
            assert loss == plain.loss.item()
            ours = Outcome(plain.loss, torch.get_rng_state(), outputs=plain.outputs, hooks=log, **state_of(model))
            assert_same(ours, plain, step)
            assert len(runtime.boundary_store) == 0


@every_case
def test_train_step_with_an_optimizer(name: str, config: RuntimeConfig) -> None:
    """Parameters after three updates."""
    case = CASES[name]
    runs: list[tuple[Outcome, list[float]]] = []
    for use_runtime in (False, True):
        model, x = build(case)
        optimizer = torch.optim.SGD([p for p in leaves(model).values() if p.requires_grad], lr=0.01)
        losses = []
        if use_runtime:
            with EAERuntime(model, optimizer, config) as runtime:
                losses = [runtime.train_step(fresh(x), case.loss) for _ in range(3)]
                assert runtime.last_loss == losses[-1]
        else:
            for _ in range(3):
                loss = case.loss(model(fresh(x)))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        runs.append((Outcome(torch.tensor(0.0), torch.get_rng_state(), **state_of(model)), losses))
    assert runs[1][1] == runs[0][1]
    assert_same(runs[1][0], runs[0][0])


@every_case
def test_compute_gradients(name: str, config: RuntimeConfig) -> None:
    """The dictionary equals plain's `.grad`, which itself stays alone, as do the hooks behind it."""
    case = CASES[name]
    theirs, x = build(case)
    expected = [plain_step(theirs, x, case.loss) for _ in range(STEPS)]

    model, x = build(case)
    log: list[Any] = []
    listen(model, log, tensor_hooks=False)
    with EAERuntime(model, config=config) as runtime:
        for step, plain in enumerate(expected):
            loss, grads = runtime.compute_gradients(fresh(x), case.loss)
            state = state_of(model)
            assert state["grads"] == {} and log == []
            state["grads"] = {n: kept(grads[p]) for n, p in leaves(model).items() if p in grads}
            assert_same(Outcome(kept(loss), torch.get_rng_state(), outputs=plain.outputs, **state), plain, step)


@every_case
def test_forward_then_backward_then_apply(name: str, config: RuntimeConfig) -> None:
    """The split calls: the output, and `.grad` with one firing of each post-accumulate hook."""
    case = CASES[name]
    theirs, x = build(case)
    their_log: list[Any] = []
    listen(theirs, their_log, tensor_hooks=False)
    expected = [plain_step(theirs, x, case.loss, their_log) for _ in range(STEPS)]

    model, x = build(case)
    log: list[Any] = []
    listen(model, log, tensor_hooks=False)
    with EAERuntime(model, config=config) as runtime:
        for step, plain in enumerate(expected):
            clear(model)
            log.clear()
            output = runtime.forward(fresh(x))
            outputs = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]
            assert not any(t.requires_grad for t in outputs)
            loss, grads = runtime.backward(output, case.loss)
            runtime.apply_gradients(grads)
            ours = Outcome(kept(loss), torch.get_rng_state(), hooks=log, **state_of(model))
            ours.outputs = [kept(t) for t in outputs]
            assert_same(ours, plain, step)


@every_case
def test_the_gradient_of_the_input(name: str) -> None:
    """An input that requires grad gets it, in every tensor of it."""
    case = CASES[name]
    wants = lambda x: pytree.tree_map(lambda t: t.requires_grad_(t.is_floating_point() or t.is_complex()), fresh(x))
    theirs, x = build(case)
    expected = []
    for _ in range(STEPS):
        clear(theirs)
        given = wants(x)
        case.loss(theirs(given)).backward()
        expected.append(([kept(t.grad) for t in pytree.tree_leaves(given) if t.grad is not None], state_of(theirs)))

    model, x = build(case)
    with EAERuntime(model) as runtime:
        for step, (inputs, state) in enumerate(expected):
            clear(model)
            given = wants(x)
            runtime.train_step(given, case.loss)
            found = [t.grad for t in pytree.tree_leaves(given) if t.grad is not None]
            assert len(found) == len(inputs) and all(map(torch.equal, found, inputs)), step
            assert_same(
                Outcome(torch.tensor(0.0), torch.tensor(0.0), **state_of(model)),
                Outcome(torch.tensor(0.0), torch.tensor(0.0), **state),
                step,
            )


def test_everything_frozen_is_plains_error(config: RuntimeConfig) -> None:
    case = CASES["mlp"]
    theirs, x = build(case)
    theirs.requires_grad_(False)
    with pytest.raises(RuntimeError) as plain:
        case.loss(theirs(x)).backward()
    model, x = build(case)
    model.requires_grad_(False)
    with EAERuntime(model, config=config) as runtime:
        for call in (runtime.train_step, runtime.compute_gradients):
            with pytest.raises(RuntimeError) as ours:
                call(x, case.loss)
            assert str(plain.value) in str(ours.value)


@pytest.mark.parametrize("name", ["mlp", "tied language model", "tied everywhere", "borrowed", "closure"])
def test_hooks_that_change_gradients(name: str, config: RuntimeConfig) -> None:
    """A leaf's hook sees the sum of all its readers' terms, once, and what it returns is what `.grad` gets."""
    case = CASES[name]
    expected: list[Outcome] = []
    for use_runtime in (False, True):
        model, x = build(case)
        log: list[Any] = []
        for leaf in leaves(model).values():
            leaf.register_hook(lambda g: torch.tanh(g) * 2)
        listen(model, log)
        if not use_runtime:
            expected = [plain_step(model, x, case.loss, log) for _ in range(STEPS)]
            continue
        with EAERuntime(model, config=config) as runtime:
            for step, plain in enumerate(expected):
                clear(model)
                log.clear()
                runtime.train_step(fresh(x), case.loss)
                ours = Outcome(plain.loss, torch.get_rng_state(), outputs=plain.outputs, hooks=log, **state_of(model))
                assert_same(ours, plain, step)
