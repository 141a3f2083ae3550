"""Each pass against its formula, computed here with torch."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from eae_runtime.adjoint import AdjointState
from eae_runtime.errors import ConfigError, PassError
from eae_runtime.events import EventBus, EventType
from eae_runtime.passes import (
    BF16Pass,
    ClipPass,
    EAEPass,
    FP8Pass,
    FP16Pass,
    GaussianNoisePass,
    Int8QuantizationPass,
    LoggingPass,
    RegularizationPass,
    SyntheticGradientPass,
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def state(tensor: torch.Tensor, layer_id: int = 3) -> AdjointState:
    return AdjointState(tensor, layer_id, "block_2")


def samples(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(37, 41, generator=generator) * 10.0 ** torch.randint(-6, 3, (37, 41), generator=generator)
    edges = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, 2.5, 127.0, 1e-8, 448.0, -440.0])
    big = torch.randn(70_001, generator=generator)
    tensors = [wide, edges, big, torch.tensor(2.5), torch.zeros(4), torch.empty(0, 3), wide.t(), wide[::2, 1::3]]
    return [tensor.to(dtype) for tensor in tensors]


def int8(t: torch.Tensor) -> torch.Tensor:
    wide = t.float()
    if t.numel() == 0 or not wide.any():
        return t
    scale = wide.abs().max() / 127.0
    return (torch.clamp(torch.round(wide / scale), -127, 127) * scale).to(t.dtype)


EXACT: dict[str, tuple[EAEPass, Callable[[torch.Tensor], torch.Tensor]]] = {
    "fp16": (FP16Pass(), lambda t: t.half().to(t.dtype)),
    "bf16": (BF16Pass(), lambda t: t.bfloat16().to(t.dtype)),
    "int8": (Int8QuantizationPass(), int8),
    "e4m3": (FP8Pass(), lambda t: t.to(torch.float8_e4m3fn).to(t.dtype)),
    "e5m2": (FP8Pass(format="e5m2"), lambda t: t.to(torch.float8_e5m2).to(t.dtype)),
    "regularization": (RegularizationPass(0.3), lambda t: t * (1.0 - 0.3)),
    "regularization off": (RegularizationPass(), lambda t: t),
    "noise off": (GaussianNoisePass(), lambda t: t),
    "clip off": (ClipPass(1e30), lambda t: t),
    "logging": (LoggingPass(), lambda t: t),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_bitwise_against_torch(name: str, dtype: torch.dtype) -> None:
    item, formula = EXACT[name]
    for tensor in samples(dtype):
        before = tensor.clone()
        given = state(tensor)
        made = item(given)
        assert torch.equal(made.tensor, formula(tensor)), (name, tensor.shape)
        assert made.tensor.dtype is dtype and made.tensor.shape == tensor.shape
        assert torch.equal(tensor, before) and given.history == [] and given.metadata == {}
        assert made.history == [item.name] and made.layer_id == 3 and made.block == "block_2"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("max_norm", [0.5, 1.0, 100.0])
def test_clip(max_norm: float, dtype: torch.dtype) -> None:
    rtol = {torch.float32: 1e-5, torch.float64: 1e-6}.get(dtype, 1e-2)
    for tensor in samples(dtype):
        made = ClipPass(max_norm)(state(tensor)).tensor
        norm = float(torch.linalg.vector_norm(tensor.double()))
        if norm <= max_norm:
            assert torch.equal(made, tensor)
        else:
            torch.testing.assert_close(made, (tensor.double() * (max_norm / norm)).to(dtype), rtol=rtol, atol=1e-6)


def test_clip_thinks_in_unscaled_units() -> None:
    tensor = torch.tensor([0.012, 0.016]) * 65536
    made = ClipPass(1.0)(state(tensor), {"loss_scale": 65536.0})
    assert torch.equal(made.tensor, tensor)
    made = ClipPass(0.01)(state(tensor), {"loss_scale": 65536.0})
    torch.testing.assert_close(made.tensor, tensor / 2, rtol=1e-4, atol=0)


def test_parameters_are_read_at_every_use() -> None:
    item = ClipPass(1.0)
    tensor = torch.full((4,), 10.0)
    assert item(state(tensor)).norm().item() == pytest.approx(1.0, rel=1e-4)
    item.max_norm = 2.0
    assert item(state(tensor)).norm().item() == pytest.approx(2.0, rel=1e-4)


def test_int8_tells_its_scale_and_has_a_real_payload() -> None:
    item = Int8QuantizationPass()
    tensor = samples(torch.float32)[0]
    scale = item(state(tensor)).metadata["quantization_scale"]
    assert scale == (tensor.abs().max() / 127.0).item()
    payload, payload_scale = item.encode(tensor)
    assert payload.dtype is torch.int8 and payload.shape == tensor.shape and payload_scale == scale
    assert torch.equal(item.decode(payload, payload_scale), int8(tensor))
    assert item.decode(payload, payload_scale, torch.float64).dtype is torch.float64
    assert "quantization_scale" not in item(state(torch.zeros(3))).metadata


def test_fp8_formats_differ_and_are_checked() -> None:
    tensor = torch.tensor([1.0625, 3.3])
    assert not torch.equal(FP8Pass("e4m3")(state(tensor)).tensor, FP8Pass("e5m2")(state(tensor)).tensor)
    with pytest.raises(ConfigError, match=r"'e4m3'.*'e5m2'"):
        FP8Pass("e3m4")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_int8_does_not_turn_nan_or_inf_into_numbers(value: float) -> None:
    with pytest.raises(PassError, match="int8") as caught:
        Int8QuantizationPass()(state(torch.tensor([1.0, value])))
    assert "3" in str(caught.value)


def test_noise_is_normal_and_repeats_with_its_seed() -> None:
    zero = torch.zeros(200_000)
    before = torch.get_rng_state()
    first = GaussianNoisePass(2.0, seed=5)(state(zero)).tensor
    assert torch.equal(torch.get_rng_state(), before)
    assert first.mean().item() == pytest.approx(0.0, abs=0.03) and first.std().item() == pytest.approx(2.0, rel=0.01)
    assert (first.abs() < 2.0).float().mean().item() == pytest.approx(0.6827, abs=0.01)
    assert torch.equal(GaussianNoisePass(2.0, seed=5)(state(zero)).tensor, first)
    assert not torch.equal(GaussianNoisePass(2.0, seed=6)(state(zero)).tensor, first)
    assert not torch.equal(GaussianNoisePass(2.0, seed=5)(state(zero, 2)).tensor, first)


def test_noise_takes_its_seed_from_the_generator() -> None:
    generator = torch.Generator().manual_seed(42)
    assert GaussianNoisePass(1.0, generator).seed == 42
    with torch.random.fork_rng():
        torch.manual_seed(9)
        assert GaussianNoisePass(1.0).seed == 9
    with pytest.raises(ConfigError, match="not both"):
        GaussianNoisePass(1.0, generator, seed=1)


def test_noise_goes_on_where_it_stopped() -> None:
    zero = torch.zeros(100)
    through = GaussianNoisePass(1.0, seed=3)
    want = [through(state(zero)).tensor for _ in range(6)]
    assert not torch.equal(want[0], want[1])
    first = GaussianNoisePass(1.0, seed=3)
    got = [first(state(zero)).tensor for _ in range(3)]
    second = GaussianNoisePass(1.0, seed=3)
    second.load_state(first.state())
    third = copy.deepcopy(second)
    fourth = pickle.loads(pickle.dumps(first))
    for item in (second, third, fourth):
        rest = [item(state(zero)).tensor for _ in range(3)]
        assert all(torch.equal(a, b) for a, b in zip(want, got + rest, strict=True))


def test_noise_keeps_its_state_when_std_changes() -> None:
    zero = torch.zeros(100)
    through, changed = GaussianNoisePass(1.0, seed=3), GaussianNoisePass(1.0, seed=3)
    want = [through(state(zero)).tensor for _ in range(2)]
    changed(state(zero))
    changed.std = 2.0
    torch.testing.assert_close(changed(state(zero)).tensor, want[1] * 2)


def test_logging_emits_the_statistics() -> None:
    bus = EventBus()
    item = LoggingPass(bus)
    bus.start_recording()
    given = state(torch.tensor([1.0, 2.0, 3.0, 6.0]))
    item(given)
    [event] = bus.events_of_type(EventType.ADJOINT_MODIFIED)
    want = {"layer_id": 3, "block": "block_2", "pass_name": "LoggingPass", **given.statistics()}
    assert set(event.payload) == set(want)
    assert {key: event.payload[key] for key in want} == {
        key: pytest.approx(value, rel=1e-6) if isinstance(value, float) else value for key, value in want.items()
    }


def test_a_pass_without_state_refuses_one() -> None:
    assert ClipPass().state() is None
    ClipPass().load_state(None)
    for item in (ClipPass(), EAEPass()):
        with pytest.raises(PassError, match="no state"):
            item.load_state({"x": 1})


class Negate(EAEPass):
    name = "Negate"

    def process(self, adjoint: AdjointState, context: dict[str, Any] | None = None) -> AdjointState:
        new = adjoint.clone()
        new.tensor = -new.tensor
        return new


class Same(EAEPass):
    name = "Same"

    def process(self, adjoint: AdjointState, context: dict[str, Any] | None = None) -> AdjointState:
        return adjoint


class Lost(EAEPass):
    name = "Lost"

    def process(self, adjoint: AdjointState, context: dict[str, Any] | None = None) -> AdjointState:
        return None  # type: ignore[return-value]


def test_a_pass_of_the_users_own() -> None:
    given = state(torch.ones(2))
    assert torch.equal(Negate()(given).tensor, -torch.ones(2))
    assert Negate()(given).history == ["Negate"]
    assert Same()(given).history == ["Same"] and given.history == []
    with pytest.raises(PassError, match=r"Lost.*NoneType"):
        Lost()(given)
    with pytest.raises(NotImplementedError, match="process"):
        EAEPass()(given)


def test_synthetic_gradient_learns_and_replaces() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        item = SyntheticGradientPass(8, hidden_dim=16, lr=1e-2, warmup_steps=3, use_synthetic=True)
        assert item.last_loss is None
        given = state(torch.randn(4, 2, 4))
        with torch.no_grad():
            made = [item(given) for _ in range(60)]
    assert [m.tensor is given.tensor for m in made[:4]] == [True, True, True, False]
    assert made[4].tensor.shape == (4, 2, 4) and "synthetic_gradient_loss" in made[4].metadata
    assert item.last_loss is not None and item.last_loss < made[4].metadata["synthetic_gradient_loss"]
    assert SyntheticGradientPass(8)(given).tensor is given.tensor
    assert SyntheticGradientPass(5)(state(torch.ones(5))).history == ["SyntheticGradientPass"]
    with pytest.raises(PassError, match="feature_dim is 3"):
        SyntheticGradientPass(3)(given)


def test_synthetic_gradient_goes_on_where_it_stopped() -> None:
    tensors = [torch.randn(4, 8) for _ in range(6)]
    first, second = SyntheticGradientPass(8, use_synthetic=True), SyntheticGradientPass(8, use_synthetic=True)
    for tensor in tensors[:3]:
        first(state(tensor))
    saved = first.state()
    want = [first(state(tensor)).tensor for tensor in tensors[3:]]
    second.load_state(saved)
    got = [second(state(tensor)).tensor for tensor in tensors[3:]]
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_a_tensor_in_a_graph_is_accepted() -> None:
    tensor = torch.ones(3, requires_grad=True) * 2
    assert torch.equal(FP16Pass()(state(tensor)).tensor, torch.full((3,), 2.0))


def test_what_is_no_gradient_is_refused() -> None:
    for bad in (torch.ones(2, 2).to_sparse(), torch.ones(2, device="meta")):
        with pytest.raises(TypeError):
            ClipPass()(state(bad))
    with pytest.raises(PassError):
        ClipPass()(state(torch.arange(3)))
