"""AdjointState against its definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eae_runtime.adjoint import AdjointState
from eae_runtime.errors import ConfigError


def adjoint(values: list[float] | torch.Tensor) -> AdjointState:
    return AdjointState(torch.as_tensor(values), 3, "b", metadata={"k": 1}, history=["p"])


def test_dtype_and_device_come_from_the_tensor_unless_given() -> None:
    state = AdjointState(torch.ones(2, dtype=torch.float64), 1)
    assert (state.dtype, state.device, state.block, state.metadata, state.history) == (
        torch.float64,
        torch.device("cpu"),
        "",
        {},
        [],
    )
    assert AdjointState(torch.ones(2), 1, dtype=torch.float16).dtype is torch.float16


@pytest.mark.parametrize(("p", "value"), [(2.0, 5.0), (1.0, 7.0), (math.inf, 4.0)])
def test_norm(p: float, value: float) -> None:
    assert adjoint([3.0, -4.0]).norm(p).item() == value


def test_norm_of_half_precision_does_not_overflow() -> None:
    assert adjoint(torch.full((4,), 60000.0, dtype=torch.float16)).norm().item() == 120000.0


def test_statistics() -> None:
    assert adjoint([1.0, 2.0, 3.0, 6.0]).statistics() == {
        "mean": 3.0,
        "std": pytest.approx(math.sqrt(3.5)),
        "min": 1.0,
        "max": 6.0,
        "norm": pytest.approx(math.sqrt(50)),
        "numel": 4,
        "has_nan": False,
        "has_inf": False,
    }
    bad = adjoint([math.nan, math.inf, 1.0]).statistics()
    assert bad["has_nan"] is True and bad["has_inf"] is True
    assert adjoint([]).statistics()["numel"] == 0
    assert adjoint([2.0]).statistics()["std"] == 0.0


@given(
    values=st.lists(st.sampled_from([0.0, 1.0, -1.0, 2.0, -2.0, 3.0]), min_size=1, max_size=40),
    ratio=st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.5, 0.9, 0.99, 1.0]),
)
def test_compress_keeps_exactly_the_largest(values: list[float], ratio: float) -> None:
    given_state = adjoint([v if v else 0.5 for v in values])
    before = given_state.tensor.clone()
    kept = given_state.compress(ratio).tensor
    n = len(values)
    count = max(1, n * round(100 * (1 - ratio)) // 100)
    assert int((kept != 0).sum()) == count
    assert torch.equal(kept[kept != 0], before[kept != 0])
    assert torch.equal(kept.abs().sort().values[n - count :], before.abs().sort().values[n - count :])
    assert torch.equal(given_state.tensor, before)


def test_compress_counts_in_decimals_and_keeps_the_shape() -> None:
    assert int((adjoint(torch.ones(10, 100)).compress(0.9).tensor != 0).sum()) == 100
    assert adjoint(torch.ones(10, 100)).compress(0.9).tensor.shape == (10, 100)
    assert adjoint([]).compress(0.5).tensor.numel() == 0


@pytest.mark.parametrize("ratio", [-0.1, 1.1, math.nan])
def test_compress_refuses_a_share_outside_0_and_1(ratio: float) -> None:
    with pytest.raises(ConfigError, match="ratio"):
        adjoint([1.0]).compress(ratio)


def test_casts() -> None:
    state = adjoint([1.0, 1 / 3])
    low = state.quantize()
    assert low.tensor.dtype is low.dtype is torch.float16
    assert torch.equal(low.dequantize().tensor, state.tensor.half().float())
    moved = state.to(device="cpu", dtype=torch.float64)
    assert moved.dtype is moved.tensor.dtype is torch.float64
    assert state.to().tensor is state.tensor
    assert state.dtype is torch.float32


def test_clone_shares_the_tensor_and_nothing_else() -> None:
    state = adjoint([1.0])
    twin = state.clone()
    twin.metadata["k"] = 2
    twin.record("q")
    assert twin.tensor is state.tensor
    assert (state.metadata, state.history, twin.history) == ({"k": 1}, ["p"], ["p", "q"])


def test_detach_leaves_the_graph() -> None:
    tensor = torch.ones(2, requires_grad=True) * 2
    state = AdjointState(tensor, 0)
    assert not state.detach().tensor.requires_grad and state.tensor.requires_grad
