"""Reference cases: small inputs with their right values, one row of the table each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from counting import Interior, counted, forwards
from eae_runtime import EAERuntime, RuntimeConfig
from models import CASES, Attention, Counter, Recurrent, Residual, Scale, chain
from oracle import Outcome, assert_same, build, clear, kept, plain_step, state_of

pytestmark = pytest.mark.filterwarnings("error")

# A block is learnt in its first step, compared in its second, and may run without a graph from the third on.
STEPS = 4


def grads_of_inputs(
    config: RuntimeConfig, model: nn.Sequential, make: Callable[[], torch.Tensor], loss_fn: Any = torch.sum
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(gradient of the input, output) of one step after another."""
    seen: list[torch.Tensor] = []
    with EAERuntime(model, config=config) as runtime:
        for _ in range(STEPS):
            x = make().requires_grad_()
            seen.clear()
            runtime.train_step(x, lambda y: seen.append(kept(y)) or loss_fn(y))
            yield x.grad, seen[-1]


# -- random draws --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [nn.Dropout(0.5), lambda x: x * torch.randn_like(x)], ids=["dropout", "randn_like"])
def test_random_draws_replay(block: Any, config: RuntimeConfig) -> None:
    """sum(mask * ones): the gradient is the output."""
    states = []
    torch.manual_seed(5)
    for grad, y in grads_of_inputs(config, chain(block), lambda: torch.ones(1000)):
        assert torch.equal(grad, y) and 300 < (y != 0).sum() <= 1000
        states.append(torch.get_rng_state())
    torch.manual_seed(5)
    for state in states:
        chain(block)(torch.ones(1000))
        assert torch.equal(torch.get_rng_state(), state)


def test_three_dropout_blocks(config: RuntimeConfig) -> None:
    model = chain(nn.Dropout(0.5), nn.Dropout(0.3), nn.Dropout(0.2))
    for grad, y in grads_of_inputs(config, model, lambda: torch.ones(1000)):
        assert torch.equal(grad, y) and 0 < (y != 0).sum() < 1000


@pytest.mark.parametrize("parts", [2, 3])
def test_three_dropout_blocks_in_microbatches(parts: int) -> None:
    model = chain(nn.Dropout(0.5), nn.Dropout(0.3), nn.Dropout(0.2))
    config = RuntimeConfig(scheduler="pipeline", num_microbatches=parts)
    for grad, y in grads_of_inputs(config, model, lambda: torch.ones(1000)):
        assert torch.equal(grad, y) and 0 < (y != 0).sum() < 1000


@pytest.mark.parametrize("when", ["late", "now and then", "late dropout in a block of several"])
def test_a_block_that_starts_to_draw(when: str, config: RuntimeConfig) -> None:
    """Blocks that drew nothing for six steps, and then do: whatever was learnt of them, the draws are plain's."""
    torch.manual_seed(0)
    on = {"draws": False}
    inner = nn.Dropout(0.0)

    def block(x: torch.Tensor) -> torch.Tensor:
        if when == "late dropout in a block of several":
            inner.p = 0.5 if on["draws"] else 0.0
            return inner(x)
        return x * torch.rand_like(x) if on["draws"] else x * 2

    model = chain(nn.Linear(6, 6), nn.Tanh(), block, nn.Linear(6, 6), nn.Dropout(0.3), nn.Linear(6, 2))
    x = torch.randn(4, 6)
    with EAERuntime(model, config=config) as runtime:
        for step in range(12):
            on["draws"] = step % 3 == 2 if when == "now and then" else step >= 6
            torch.manual_seed(step)
            plain = plain_step(model, x, torch.sum)
            clear(model)
            torch.manual_seed(step)
            if step % 4 == 3:
                _, grads = runtime.compute_gradients(x, torch.sum)
                runtime.apply_gradients(grads)
            else:
                runtime.train_step(x, torch.sum)
            ours = Outcome(plain.loss, torch.get_rng_state(), outputs=plain.outputs, **state_of(model))
            assert_same(ours, plain, step)


# -- forward mode --------------------------------------------------------------------------------------------------

MODES = {
    "lstm in training": (lambda: chain(Recurrent(nn.LSTM, 8), nn.Linear(8, 2)), True),
    "attention in eval": (lambda: chain(nn.Linear(8, 8), Attention(8), Attention(8)), False),
    "encoder layer in eval": (lambda: chain(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Tanh()), False),
}


@pytest.mark.parametrize("name", MODES)
def test_forward_mode(name: str, config: RuntimeConfig) -> None:
    """Loss and every boundary are those of a plain forward with gradients on."""
    make, training = MODES[name]
    torch.manual_seed(0)
    model = make().train(training)
    x = torch.randn(2, 5, 8)
    with EAERuntime(model, config=config) as runtime:
        for step in range(STEPS):
            torch.manual_seed(step)
            boundaries = [x]
            for block in model:
                boundaries.append(block(boundaries[-1]))
            torch.manual_seed(step)
            output = runtime.forward(x)
            for i, boundary in enumerate(boundaries):
                assert torch.equal(runtime.boundary_store.get(i), boundary), (step, i)
            loss, _ = runtime.backward(output, torch.sum)
            assert torch.equal(loss, boundaries[-1].sum())


# -- buffers -------------------------------------------------------------------------------------------------------

COLUMN = torch.tensor([[0.0], [2.0]])


def statistics(norm: nn.Module) -> tuple[float, float, int]:
    return round(norm.running_mean.item(), 6), round(norm.running_var.item(), 6), norm.num_batches_tracked.item()


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("use", ["train_step", "compute_gradients", "forward and backward", "forward"])
def test_buffers_change_once(place: int, use: str, config: RuntimeConfig) -> None:
    """Momentum 0.1, batch mean 1, batch variance 2: 0.1, 0.9 + 0.2, 1; and so on, wherever the block stands."""
    blocks = [nn.Identity(), nn.Identity(), nn.Identity()]
    blocks[place] = norm = nn.BatchNorm1d(1, momentum=0.1)
    plain = nn.BatchNorm1d(1, momentum=0.1)
    with EAERuntime(chain(*blocks), config=config) as runtime:
        for step in range(STEPS):
            plain(COLUMN)
            if use == "forward and backward":
                runtime.backward(runtime.forward(COLUMN), torch.sum)
            elif use == "forward":
                runtime.forward(COLUMN)
            else:
                getattr(runtime, use)(COLUMN, torch.sum)
            if step == 0:
                assert statistics(norm) == (0.1, 1.1, 1)
            assert all(torch.equal(a, b) for a, b in zip(norm.buffers(), plain.buffers(), strict=True))


def test_every_buffer_changes_once(config: RuntimeConfig) -> None:
    """One written in place, one replaced, one through `.data`."""
    counter, plain = Counter(), Counter()
    x = torch.randn(4, 6)
    with EAERuntime(chain(nn.Linear(6, 6), counter, nn.Linear(6, 6)), config=config) as runtime:
        for _ in range(STEPS):
            plain(runtime.blocks[0](x))
            runtime.train_step(x, torch.sum)
            for (name, ours), theirs in zip(counter.named_buffers(), plain.buffers(), strict=True):
                assert torch.equal(ours, theirs), name


# -- in-place on a boundary ----------------------------------------------------------------------------------------


def write(h: torch.Tensor) -> torch.Tensor:
    h.mul_(2)
    return h**2


def test_in_place_on_a_boundary(config: RuntimeConfig) -> None:
    """y = (2x)^2, dy/dx = 8 at 1; a stored boundary that was written would give 16."""
    for grad, y in grads_of_inputs(config, chain(lambda x: x * 1, write, nn.Identity()), lambda: torch.ones(1)):
        assert grad.item() == 8.0 and y.item() == 4.0


def test_in_place_on_the_input(config: RuntimeConfig) -> None:
    """The caller's tensor stays as it is."""
    linear = nn.Linear(1, 1)
    x = torch.ones(3, 1)
    with EAERuntime(chain(write, linear), config=config) as runtime:
        for _ in range(STEPS):
            runtime.train_step(x, torch.sum)
            assert torch.equal(x, torch.ones(3, 1)) and linear.weight.grad.item() == 12.0


def test_a_block_that_starts_to_write(config: RuntimeConfig) -> None:
    """Six steps without writing, then with: caught, and the step repeated with a copy."""
    calls = {"write": False}
    block = lambda h: write(h) if calls["write"] else h**2
    first = nn.Linear(1, 1, bias=False)
    nn.init.ones_(first.weight)
    with EAERuntime(chain(first, block, nn.Identity()), config=config) as runtime:
        for step in range(9):
            calls["write"] = step >= 6
            first.weight.grad = None
            runtime.train_step(torch.ones(1, 1), torch.sum)
            assert first.weight.grad.item() == (8.0 if step >= 6 else 2.0), step


# -- leaves --------------------------------------------------------------------------------------------------------


def test_a_leaf_in_a_closure(config: RuntimeConfig) -> None:
    s = torch.tensor(2.0, requires_grad=True)
    x = torch.tensor([1.0, 2.0, 3.0])
    with EAERuntime(chain(lambda x: x * s, nn.Identity()), config=config) as runtime:
        for _ in range(STEPS):
            s.grad = None
            runtime.train_step(x, torch.sum)
            assert s.grad.item() == 6.0
            _, grads = runtime.compute_gradients(x, torch.sum)
            assert list(grads) == [s] and grads[s].item() == 6.0


def test_adapters_added_by_a_hook_after_some_steps(config: RuntimeConfig) -> None:
    """Nothing that was learnt about the block hides them."""
    torch.manual_seed(0)
    model = chain(nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False), nn.Tanh(), nn.Linear(6, 6))
    a, b = torch.randn(2, 6, requires_grad=True), torch.randn(6, 2, requires_grad=True)
    x = torch.randn(4, 6)
    with EAERuntime(model, config=config) as runtime:
        for step in range(3 * STEPS):
            if step == STEPS:
                handle = model[1].register_forward_hook(lambda module, args, out: out + args[0] @ a.t() @ b.t())
            if step == 2 * STEPS:
                handle.remove()
            clear(model)
            a.grad = b.grad = None
            model(x).sum().backward()
            expected = [kept(t.grad) if t.grad is not None else None for t in (a, b, *model.parameters())]
            clear(model)
            a.grad = b.grad = None
            runtime.train_step(x, torch.sum)
            for t, want in zip((a, b, *model.parameters()), expected, strict=True):
                assert (t.grad is None) if want is None else torch.equal(t.grad, want), step


# -- tied weights --------------------------------------------------------------------------------------------------


def test_tied_weights(config: RuntimeConfig) -> None:
    """y = w (w x): dy/dw = 2 w x = 12; one hook call, one step of SGD to 3 - 0.1 * 12."""
    w = nn.Parameter(torch.tensor(3.0))
    seen: list[float] = []
    w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.item()))
    x = torch.tensor([2.0])
    model = chain(Scale(w), Scale(w))
    with EAERuntime(model, config=config) as runtime:
        for _ in range(STEPS):
            w.grad = None
            seen.clear()
            runtime.train_step(x, torch.sum)
            assert seen == [12.0]
            loss, grads = runtime.compute_gradients(x, torch.sum)
            assert loss.item() == 18.0 and [g.item() for g in grads.values()] == [12.0]
    with EAERuntime(model, torch.optim.SGD([w], lr=0.1), config) as runtime:
        runtime.train_step(x, torch.sum)
        assert w.item() == pytest.approx(1.8) and w.grad is None
        assert runtime.last_grad_stats == {"num_params_with_grad": 1, "total_grad_norm": 12.0}


def test_an_encoders_output_in_four_decoders(config: RuntimeConfig) -> None:
    case = CASES["cross attention"]
    theirs, x = build(case)
    plain = plain_step(theirs, x, case.loss)
    model, x = build(case)
    with EAERuntime(model, config=config) as runtime:
        for step in range(STEPS):
            clear(model)
            runtime.train_step(x, case.loss)
            assert all(torch.equal(p.grad, plain.grads[n]) for n, p in model.named_parameters()), step


# -- frozen parts --------------------------------------------------------------------------------------------------


def test_frozen_parts(config: RuntimeConfig) -> None:
    """The frozen prefix runs once, the block behind it twice, the last one once."""
    torch.manual_seed(0)
    model = counted(nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 2))
    model[:2].requires_grad_(False)
    ids = torch.randint(0, 11, (7,))
    model(ids).sum().backward()
    expected = {n: kept(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    assert len(expected) == 4
    with EAERuntime(model, config=config) as runtime:
        for step in range(STEPS + 1):
            clear(model)
            forwards(model)
            runtime.train_step(ids, torch.sum)
            assert {
                n: kept(p.grad) for n, p in model.named_parameters() if p.grad is not None
            }.keys() == expected.keys()
            assert all(torch.equal(p.grad, expected[n]) for n, p in model.named_parameters() if p.grad is not None)
            # In the second step each block that is rebuilt is compared with and without a graph.
            assert step == 1 or forwards(model) == [1, 1, 2, 1], step


def test_parts_that_are_frozen_and_thawed(config: RuntimeConfig) -> None:
    model = chain(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 2))
    x = torch.randn(4, 6)
    with EAERuntime(model, config=config) as runtime:
        for step in range(9):
            model[0].requires_grad_(step % 3 != 1)
            model[2].requires_grad_(step % 2 == 0)
            clear(model)
            model(x).sum().backward()
            expected = {n: kept(p.grad) for n, p in model.named_parameters() if p.grad is not None}
            clear(model)
            runtime.train_step(x, torch.sum)
            ours = {n: kept(p.grad) for n, p in model.named_parameters() if p.grad is not None}
            assert ours.keys() == expected.keys() and all(torch.equal(ours[n], expected[n]) for n in ours), step


# -- structured outputs --------------------------------------------------------------------------------------------


def test_outputs_that_need_no_grad(config: RuntimeConfig) -> None:
    """(float h, int64 mask, h.detach(), bool): only the first requires grad where the next block is rebuilt."""
    seen: list[list[bool]] = []

    def make(x: torch.Tensor) -> Any:
        h = 2 * x
        return h, (h > 0).long(), h.detach(), h > 1

    def use(value: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            seen.append([t.requires_grad for t in value])
        h, mask, cut, flag = value
        return h * mask + cut * flag

    for grad, _ in grads_of_inputs(config, chain(make, use, nn.Identity()), lambda: torch.tensor([1.0, -1.0, 3.0])):
        assert grad.tolist() == [2.0, 0.0, 2.0]
    assert seen and all(needs == [True, False, False, False] for needs in seen)


def test_a_boundary_nobody_uses(config: RuntimeConfig) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h, self.aux = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> Any:
            return self.h(x), self.aux(x)

    torch.manual_seed(0)
    two, last = Two(), nn.Linear(3, 1)
    model = chain(two, lambda pair: pair[0], last)
    x = torch.randn(4, 3)
    plain = plain_step(model, x, torch.sum)
    with EAERuntime(model, config=config) as runtime:
        for step in range(STEPS):
            clear(model)
            runtime.train_step(x, torch.sum)
            assert two.aux.weight.grad is None and two.aux.bias.grad is None
            assert all(torch.equal(p.grad, plain.grads[n]) for n, p in model.named_parameters() if n in plain.grads)
            assert two.h.weight.grad is not None, step


# -- a failed step -------------------------------------------------------------------------------------------------


def test_a_failed_step(config: RuntimeConfig) -> None:
    """An exception in block 3 of 4, BatchNorm in block 0."""
    fail = {"on": True}

    def third(x: torch.Tensor) -> torch.Tensor:
        if fail["on"]:
            raise ZeroDivisionError("by hand")
        return x

    norm = nn.BatchNorm1d(3)
    model = chain(norm, nn.Dropout(0.5), third, nn.Linear(3, 1))
    x = torch.randn(4, 3)
    with EAERuntime(model, config=config) as runtime:
        for step in range(2 * STEPS):
            fail["on"] = step % 2 == 0
            for p in model.parameters():
                p.grad = torch.full_like(p, 7.0)
            before, random = state_of(model), torch.get_rng_state()
            if not fail["on"]:
                runtime.train_step(x, torch.sum)
                continue
            with pytest.raises(ZeroDivisionError, match="by hand"):
                runtime.train_step(x, torch.sum)
            assert norm.num_batches_tracked.item() == step // 2
            after = state_of(model)
            assert all(torch.equal(after[w][n], before[w][n]) for w in before for n in before[w])
            assert torch.equal(torch.get_rng_state(), random)
            assert len(runtime.boundary_store) == 0


# -- late mode change ----------------------------------------------------------------------------------------------


def test_a_late_mode_change(config: RuntimeConfig) -> None:
    """train() -> eval() between forward and backward, and back: the rebuild runs in the forward's mode and leaves the
    flags as it found them."""
    torch.manual_seed(0)
    model = chain(Residual(6), nn.BatchNorm1d(6), Residual(6), nn.Linear(6, 2))
    x = torch.randn(4, 6)
    with EAERuntime(model, config=config) as runtime:
        for step in range(2 * STEPS):
            training = step % 2 == 0
            model.train(training)
            buffers = [kept(b) for b in model.buffers()]
            torch.manual_seed(step)
            plain = plain_step(model, x, torch.sum)
            for buffer, value in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(value)
            clear(model)
            torch.manual_seed(step)
            output = runtime.forward(x)
            model.train(not training)
            loss, grads = runtime.backward(output, torch.sum)
            assert all(m.training is not training for m in model.modules())
            runtime.apply_gradients(grads)
            ours = Outcome(kept(loss), torch.get_rng_state(), outputs=[kept(output)], **state_of(model))
            assert_same(ours, plain, step)


def test_applying_twice_is_exactly_twice(config: RuntimeConfig) -> None:
    torch.manual_seed(0)
    model = chain(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    x = torch.randn(4, 6)
    plain = plain_step(model, x, torch.sum)
    clear(model)
    with EAERuntime(model, config=config) as runtime:
        _, grads = runtime.compute_gradients(x, torch.sum)
        runtime.apply_gradients(grads)
        runtime.apply_gradients(grads)
    assert all(torch.equal(p.grad, 2 * plain.grads[n]) for n, p in model.named_parameters())


# -- memory is really saved ----------------------------------------------------------------------------------------


def test_memory_is_really_saved() -> None:
    """8 blocks Linear(256, 1024), GELU, Linear(1024, 256), batch 137: 8 block inputs of 137 x 256 x 4 bytes after the
    split forward and no interior; then one block's interior at a time."""
    model = nn.Sequential(*[Interior(256) for _ in range(8)])
    x = torch.randn(137, 256)
    with EAERuntime(model) as runtime:
        for step in range(STEPS):
            Interior.forget()
            output = runtime.forward(x)
            assert Interior.held() == 0
            store = runtime.boundary_store
            assert len(store) == 9 and store.get(8).data_ptr() == output.data_ptr()
            assert store.memory_bytes() - output.nbytes == 1_122_304
            assert store.get(0).data_ptr() == x.data_ptr()
            Interior.forget()
            runtime.backward(output, torch.sum)
            assert Interior.peak == 2 * 137, step
            assert Interior.held() == 0 and len(store) == 0

            Interior.forget()
            runtime.train_step(x, torch.sum)
            assert Interior.peak == 2 * 137, step
            assert Interior.held() == 0
