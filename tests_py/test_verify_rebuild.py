"""Rebuilds that verify themselves: when blocks are compared, what a mismatch says, and that the step is undone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from eae_runtime import EAERuntime, RuntimeConfig, pin
from eae_runtime import blockcall as blockcall_module
from eae_runtime._bits import exact_copy
from eae_runtime._checks import COMPARED, LEARNT_ANEW, level
from eae_runtime._fingerprint import fingerprint, first_difference
from eae_runtime.errors import ConfigError, RebuildMismatchError
from faults import differences, module_state
from models import chain

SCHEDULES: dict[str, dict[str, Any]] = {
    "sequential": {},
    "async disk": {"scheduler": "async", "boundary_tier": "disk"},
    "pipeline": {"scheduler": "pipeline", "num_microbatches": 2},
    "streams": {"random_streams": True},
}


# -- which blocks, when ------------------------------------------------------------------------------------------------


def test_levels() -> None:
    """Every block in the first two steps, then one a step in turn; every fourth turn it is looked at anew."""
    table = [[level("sample", b, step, 3) for b in range(3)] for step in range(15)]
    turns = [[COMPARED if step % 3 == b else 0 for b in range(3)] for step in range(2, 9)]
    anew = [[LEARNT_ANEW if step % 3 == b else 0 for b in range(3)] for step in range(9, 12)]
    again = [[COMPARED if step % 3 == b else 0 for b in range(3)] for step in range(12, 15)]
    assert table == [[COMPARED] * 3] * 2 + turns + anew + again
    assert {level("off", b, step, 3) for b in range(3) for step in range(15)} == {0}
    assert 0 not in {level("always", b, step, 3) for b in range(3) for step in range(15)}


COUNTS = {"off": [0] * 8, "sample": [3, 3, 1, 0, 1, 1, 1, 0], "always": [3] * 8}


@pytest.mark.parametrize(("mode", "counts"), COUNTS.items())
def test_how_many_rebuilds_are_compared(mode: str, counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Four blocks, of which the last one keeps its graph: in its turn there is nothing to compare."""
    seen = [0]

    def counting(*args: Any) -> Any:
        seen[0] += 1
        return first_difference(*args)

    monkeypatch.setattr(blockcall_module, "first_difference", counting)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    found = []
    with EAERuntime(model, config=RuntimeConfig(verify_rebuild=mode)) as runtime:
        for _ in range(8):
            before = seen[0]
            runtime.train_step(torch.ones(2, 4), torch.sum)
            found.append(seen[0] - before)
    assert found == counts


def test_a_codec_is_not_compared() -> None:
    """A boundary that was rounded gives other bits, as it has to."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    with EAERuntime(model, config=RuntimeConfig(boundary_precision="bf16", verify_rebuild="always")) as runtime:
        runtime.train_step(torch.randn(2, 4), torch.sum)


def test_mode_is_checked() -> None:
    for bad in ("sometimes", None, 1):
        with pytest.raises(ConfigError, match=r"verify_rebuild=.*'off', 'sample', 'always'"):
            RuntimeConfig(verify_rebuild=bad)


# -- fingerprints ------------------------------------------------------------------------------------------------------


DTYPES = [getattr(torch, n) for n in ["float32", "bfloat16", "float64", "int64", "bool", "complex64", "complex128"]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (5, 7), (129, 33), (0, 4)])
@pytest.mark.parametrize("kind", ["contiguous", "transposed", "strided"])
def test_one_bit_is_seen(dtype: torch.dtype, shape: tuple[int, ...], kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    wide = (*shape[:-1], 2 * shape[-1]) if shape else shape
    base = torch.randint(0, 2, wide, generator=generator).to(dtype)
    tensor = base
    if kind == "transposed" and base.dim() > 1:
        tensor = base.mT
    elif kind == "strided" and shape:
        tensor = base[..., ::2]
    kept = [fingerprint(tensor)]
    assert first_difference([exact_copy(tensor)], kept) is None
    for place in {0, tensor.numel() // 2, tensor.numel() - 1} if tensor.numel() else ():
        changed = exact_copy(tensor)
        at = torch.unravel_index(torch.tensor(place), tensor.shape)
        if dtype.is_floating_point:
            changed[at] = torch.nextafter(changed[at], torch.tensor(9.0, dtype=dtype))
        else:
            changed[at] = ~changed[at] if dtype is torch.bool else changed[at] + 1
        assert first_difference([tensor, changed], kept * 2) == 1


def test_fingerprints_tell_zeros_and_nans_apart() -> None:
    x = torch.zeros(5000)
    assert first_difference([-x], [fingerprint(x)]) == 0
    assert first_difference([x * float("nan")], [fingerprint(x * float("nan"))]) is None


def test_a_fingerprint_is_small() -> None:
    for tensor in (torch.randn(1 << 16), torch.randn(64, 64, 16).permute(2, 0, 1), torch.randn(1000, 1001)[:, ::2]):
        samples, total = fingerprint(tensor)
        assert samples.nbytes + total.nbytes <= 8192


# -- mismatches --------------------------------------------------------------------------------------------------------


def step_fails(block: Callable[[Any], Any] | nn.Module, settings: dict[str, Any], steps: int = 4) -> str:
    """The mismatch of a block in the middle of a chain, after which all is as before the step."""
    torch.manual_seed(0)
    model = chain(nn.Linear(4, 4), nn.BatchNorm1d(4), block, nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters())
    with EAERuntime(model, optimizer, RuntimeConfig(**settings)) as runtime:
        for _ in range(steps):
            before = module_state(model)()
            random = torch.get_rng_state()
            try:
                runtime.train_step(torch.ones(4, 4), lambda y: y.square().mean())
            except RebuildMismatchError as error:
                assert differences(module_state(model)(), before) == []
                assert torch.equal(torch.get_rng_state(), random)
                return str(error)
    raise AssertionError("no mismatch")


@pytest.mark.parametrize("settings", SCHEDULES.values(), ids=list(SCHEDULES))
def test_a_draw_that_nobody_can_replay(settings: dict[str, Any]) -> None:
    values = iter(torch.arange(1.0, 1000.0))
    text = step_fails(lambda x: x * next(values), settings)
    assert text.startswith("block 2 (Fn_2), action 2R") and "the rebuilt output has other bits" in text
    assert "random draw" in text


def test_state_outside_of_the_modules() -> None:
    count = [0.0]

    def counts(x: torch.Tensor) -> torch.Tensor:
        count[0] = min(count[0] + 1, 2.0)
        return x * count[0]

    assert "state changed by forward" in step_fails(counts, {})


def test_routing_by_a_choice_from_outside() -> None:
    class Routes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loads[0] = min(loads[0] + 1, 1)
            return self.experts[loads[0]](x)

    loads = [-1]
    text = step_fails(Routes(), {})
    assert "data-dependent routing" in text and "pin()" in text


def test_the_first_differing_tensor_is_named() -> None:
    values = iter(torch.arange(1.0, 1000.0))
    torch.manual_seed(0)
    made = lambda x: {"a": x * 2, "b": [x + 1, x * next(values)]}
    model = chain(nn.Linear(4, 4), made, lambda d: d["a"] + d["b"][1], nn.Linear(4, 2))
    with EAERuntime(model) as runtime, pytest.raises(RebuildMismatchError, match=r"the rebuilt output\['b'\]\[1\] has"):
        runtime.train_step(torch.ones(2, 4), torch.sum)


def test_pin_makes_it_exact() -> None:
    """A choice that the block cannot make again, pinned; the pinned copy is safe from the block."""
    values = iter(torch.arange(0, 1000))
    chosen: list[int] = []

    def routes(x: torch.Tensor) -> torch.Tensor:
        choice = pin(next(values) % 4)
        chosen.append(int(choice))
        mask = pin(torch.arange(4) != choice)
        kept = mask.clone()
        mask.logical_not_()
        return x * kept * (1 + choice)

    torch.manual_seed(0)
    model = chain(nn.Linear(4, 4), routes, nn.Linear(4, 4), nn.Linear(4, 2))
    plain = copy.deepcopy(model[:1]), copy.deepcopy(model[2:])
    x = torch.ones(2, 4)
    for settings in SCHEDULES.values():
        with EAERuntime(model, config=RuntimeConfig(verify_rebuild="always", **settings)) as runtime:
            for _ in range(4):
                runtime.zero_grad()
                runtime.train_step(x, torch.sum)
                if settings.get("num_microbatches", 1) == 1:
                    for part in plain:
                        part.zero_grad()
                    # The rebuild's, which is the forward's.
                    choice = chosen[-1]
                    plain[1](plain[0](x) * (torch.arange(4) != choice) * (1 + choice)).sum().backward()
                    assert torch.equal(plain[0][0].weight.grad, model[0].weight.grad)


def test_a_pin_more_in_the_rebuild() -> None:
    calls = [0]

    def block(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        x = x * pin(torch.tensor(2.0))
        return x * pin(torch.tensor(1.0)) if calls[0] > 1 else x

    model = chain(nn.Linear(4, 4), block, nn.Linear(4, 2))
    with EAERuntime(model) as runtime, pytest.raises(RebuildMismatchError, match="called more often in the rebuild"):
        runtime.train_step(torch.ones(2, 4), torch.sum)


def test_a_late_branch_on_the_grad_mode_is_healed() -> None:
    """When the block's turn comes the step is repeated with the block in grad mode: from then on plain's gradients."""
    late = [False]
    block = lambda x: x * (1 if torch.is_grad_enabled() or not late[0] else 3)
    model = chain(nn.Linear(4, 4), nn.Linear(4, 4), block, nn.Linear(4, 2))
    plain = copy.deepcopy(model.state_dict())
    x = torch.ones(2, 4)
    with EAERuntime(model) as runtime:
        for _ in range(5):
            runtime.train_step(x, torch.sum)
        expected = [p.grad.clone() for p in model.parameters()]
        late[0] = True
        for _ in range(4):
            runtime.train_step(x, lambda y: y.sum())
        losses = {runtime.train_step(x, lambda y: y.sum()) for _ in range(4)}
        assert len(losses) == 1 and all(map(torch.equal, expected, [p.grad for p in model.parameters()]))
    assert all(map(torch.equal, model.state_dict().values(), plain.values()))


def test_counters_and_caches_move_once_in_a_chain() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.last: torch.Tensor | None = None
            self.log: list[int] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.log.append(self.calls)
            scale = 1.0 if self.last is None else self.last.mean()
            self.last = x.detach()
            return torch.tanh(x) * self.calls * scale * len(self.log)

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), Counts(), nn.Linear(4, 4), Counts(), nn.Linear(4, 2))
    ours = copy.deepcopy(plain)
    x = torch.randn(3, 4)
    with EAERuntime(ours) as runtime:
        for step in range(6):
            plain.zero_grad()
            runtime.zero_grad()
            loss = plain(x).square().sum()
            loss.backward()
            assert runtime.train_step(x, lambda y: y.square().sum()) == loss.item()
            for p, q in zip(plain.parameters(), ours.parameters()):
                assert torch.equal(p.grad, q.grad), step
            for a, b in ((plain[1], ours[1]), (plain[3], ours[3])):
                assert (a.calls, a.log) == (b.calls, b.log) and torch.equal(a.last, b.last), step


@pytest.mark.parametrize("at", ["forward", "reverse"])
def test_a_failed_step_gives_counters_and_caches_back(at: str) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.log, self.made = 0, [0], {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.log.append(self.calls)
            self.made[self.calls] = 1
            self.fresh = x.detach()
            return x * 2

    armed = [False]

    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if armed[0] and (at == "forward" or not torch.equal(torch.tensor(0.0), x.sum() * 0)):
                raise ArithmeticError("no")
            return x * 3

    counts = Counts()
    model = nn.Sequential(counts, nn.Linear(4, 4), Fails(), nn.Linear(4, 2))
    with EAERuntime(model) as runtime:
        armed[0] = at == "forward"

        def loss(y: torch.Tensor) -> torch.Tensor:
            if at == "reverse":
                raise ArithmeticError("no")
            return y.sum()

        with pytest.raises(ArithmeticError):
            runtime.train_step(torch.ones(2, 4), loss)
        assert (counts.calls, counts.log, counts.made) == (0, [0], {}) and "fresh" not in counts.__dict__
        armed[0] = False
        runtime.train_step(torch.ones(2, 4), torch.sum)
        assert (counts.calls, counts.log, counts.made) == (1, [0, 1], {1: 1})
        armed[0] = at == "forward"
        before = counts.fresh
        with pytest.raises(ArithmeticError):
            runtime.train_step(torch.ones(2, 4) * 5, loss)
        assert (counts.calls, counts.log, counts.made) == (1, [0, 1], {1: 1}) and counts.fresh is before


def test_an_attribute_that_depends_on_the_grad_mode() -> None:
    """A block that notes how it was run goes on in grad mode, as plain PyTorch would run it."""

    class Notes(nn.Linear):
        mode = ""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mode = "training" if torch.is_grad_enabled() else "evaluation"
            return super().forward(x)

    torch.manual_seed(0)
    model = chain(*[Notes(4, 4) for _ in range(3)])
    with EAERuntime(model) as runtime:
        for _ in range(5):
            runtime.train_step(torch.ones(2, 4), torch.sum)
            assert [block.mode for block in model] == ["training"] * 3


def test_nan_is_no_random_draw() -> None:
    count = [0.0]

    def counts(x: torch.Tensor) -> torch.Tensor:
        count[0] = min(count[0] + 1, 2.0)
        return torch.cat([x * count[0], x.new_full((len(x), 1), float("nan"))], 1)

    torch.manual_seed(0)
    model = chain(nn.Linear(4, 4), counts, nn.Linear(5, 2))
    with EAERuntime(model) as runtime, pytest.raises(RebuildMismatchError, match="state changed by forward"):
        runtime.train_step(torch.ones(2, 4), torch.sum)
