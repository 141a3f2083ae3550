"""RuntimeConfig: defaults, and every bad value refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from eae_runtime.config import RuntimeConfig
from eae_runtime.errors import ConfigError


def test_defaults() -> None:
    config = RuntimeConfig()
    assert (config.scheduler, config.memory, config.backend, config.passes) == ("sequential", "pool", "auto", [])
    assert (config.tier, config.prefetch, config.timeout, config.trace) == ("device", 2, 60.0, False)
    assert RuntimeConfig().passes is not config.passes


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (None, None),
        (torch.float16, torch.float16),
        ("fp16", torch.float16),
        ("bf16", torch.bfloat16),
        ("bfloat16", torch.bfloat16),
        (torch.float32, torch.float32),
        ("fp32", torch.float32),
    ],
)
def test_boundary_precision_becomes_a_dtype(given: Any, dtype: torch.dtype | None) -> None:
    assert RuntimeConfig(boundary_precision=given).boundary_precision is dtype


@pytest.mark.parametrize(
    ("options", "tier"),
    [
        ({"boundary_offload": True}, "host"),
        ({"boundary_tier": "disk"}, "disk"),
        ({"boundary_tier": "disk", "boundary_offload": True}, "disk"),
        ({"boundary_tier": "device"}, "device"),
    ],
)
def test_tier(options: dict[str, Any], tier: str) -> None:
    assert RuntimeConfig(**options).tier == tier


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("scheduler", "psychic", "'async'"),
        ("memory", "swap", "'pool'"),
        ("backend", "tpu", "'cuda'"),
        ("boundary_tier", "tape", "'disk'"),
        ("boundary_tier", 3, "'disk'"),
        ("boundary_precision", torch.int8, "fp16"),
        ("boundary_precision", "int4", "bf16"),
        ("boundary_precision", [], "bf16"),
        ("compute_dtype", torch.int64, "floating-point"),
        ("compute_dtype", "float32", "floating-point"),
        ("num_microbatches", 0, "from 1"),
        ("num_microbatches", 2.0, "from 1"),
        ("num_microbatches", True, "from 1"),
        ("prefetch", 0, "from 1"),
        ("disk_max_bytes", -1, "None or"),
        ("disk_dir", 7, "path"),
        ("grad_clip_norm", 0, "above 0"),
        ("grad_clip_norm", math.nan, "above 0"),
        ("timeout", 0.0, "seconds"),
        ("timeout", None, "seconds"),
        ("seed", "x", "whole number"),
        ("log_level", "LOUD", "'DEBUG'"),
        ("block_ranks", [0, -1], "rank"),
        ("block_ranks", "01", "rank"),
        ("passes", 3, "list"),
        ("passes", "clip", "list"),
        ("passes", ["clip"], "EAEPass"),
        ("passes", [RuntimeConfig], "EAEPass"),
    ],
)
def test_a_bad_value_is_refused_by_name(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RuntimeConfig(**{field: value})
    assert field in str(caught.value) and allowed in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_device_tier_and_offload_contradict() -> None:
    with pytest.raises(ConfigError, match="contradicts"):
        RuntimeConfig(boundary_tier="device", boundary_offload=True)


def test_validate_sees_a_later_change() -> None:
    config = RuntimeConfig()
    config.scheduler = "psychic"
    with pytest.raises(ConfigError, match="scheduler"):
        config.validate()


def test_seed_seeds_torch() -> None:
    with torch.random.fork_rng():
        RuntimeConfig(seed=7)
        drawn = torch.rand(3)
        torch.manual_seed(7)
        assert torch.equal(drawn, torch.rand(3))


def test_passes_may_be_any_iterable_of_callables() -> None:
    def identity(adjoint: Any, context: Any) -> Any:
        return adjoint

    assert RuntimeConfig(passes=(identity,)).passes == [identity]  # type: ignore[arg-type]
