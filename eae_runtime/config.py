"""RuntimeConfig: every option of the runtime, checked when it is made."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ._checks import MODES
from .backend import BackendManager
from .errors import ConfigError

__all__ = ["RuntimeConfig", "parse_level", "parse_precision"]

SCHEDULERS = ("sequential", "async", "pipeline", "distributed")
MEMORY_POLICIES = ("pool", "none")
TIERS = ("device", "host", "disk")

# What a loss scaler has to have.
_SCALER = ("scale", "unscale_", "step", "update", "get_scale", "state_dict", "load_state_dict")

_PRECISIONS: dict[Any, torch.dtype | None] = {
    None: None,
    torch.float16: torch.float16,
    torch.bfloat16: torch.bfloat16,
    torch.float32: torch.float32,
    "fp16": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp32": torch.float32,
    "float32": torch.float32,
}


def _bad(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{name}={value!r}: allowed is {allowed}")


def _names(values: Iterable[str]) -> str:
    return ", ".join(map(repr, values))


def parse_precision(value: object, name: str = "boundary_precision") -> torch.dtype | None:
    """The dtype in which boundaries are kept, from a dtype or its short name; None is the boundary's own."""
    try:
        return _PRECISIONS[value]
    except (KeyError, TypeError):
        allowed = "None, torch.float16 ('fp16'), torch.bfloat16 ('bf16'), torch.float32 ('fp32')"
        raise _bad(name, value, allowed) from None


def parse_level(value: object, name: str = "log_level") -> int:
    """The number of a level's name, in either case; None and "" mean no log."""
    if value is None or value == "":
        return logging.CRITICAL
    level = logging.getLevelName(value.upper()) if isinstance(value, str) else None
    if not isinstance(level, int):
        raise _bad(name, value, _names(("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")))
    return level


def _is_int(value: object, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 and not math.isnan(value)


@dataclass
class RuntimeConfig:
    """Options of :class:`EAERuntime`. A bad one raises ConfigError (a ValueError) that names the field and what is
    allowed.

    scheduler           "sequential", "async", "pipeline", "distributed", or a BaseScheduler
    memory              "pool", "none", or a MemoryPolicy
    backend             "auto", "cpu", "cuda", "triton", "rocm", or a BackendManager
    passes              adjoint passes, in the order in which they are applied at each boundary
    compute_dtype       blocks run in this dtype; None leaves inputs as they are
    boundary_offload    short for boundary_tier="host"
    boundary_precision  dtype in which boundaries are kept (torch.float16, torch.bfloat16, torch.float32, or "fp16",
                        "bf16", "fp32"); None keeps every bit. Anything that rounds makes gradients `lossy`
    pin_memory          host buffers are page-locked where there is CUDA
    num_microbatches    parts into which the pipeline and distributed schedulers cut a batch
    grad_clip_norm      largest global norm of the gradients; None leaves them
    seed                given to torch.manual_seed when the config is made
    enable_profiler     whether `runtime.profiler` adds up times
    log_level           "DEBUG" writes every event as a JSON line to the logger `eae_runtime`
    boundary_tier       where boundaries wait: "device" (no copy), "host" or "disk"; None follows boundary_offload
    disk_dir            folder of the disk tier; None is the system's folder for temporary files
    disk_max_bytes      most bytes that the disk tier may hold; None is limited by the free space alone
    prefetch            blocks ahead at which the async scheduler starts a load
    timeout             seconds after which a wait for a tier or for another rank fails
    block_ranks         rank of each block for the distributed scheduler; None spreads them evenly
    random_streams      whether each block draws from a stream of its own for each step and microbatch, so that draws do
                        not depend on order or rank; None: with several ranks. A single process with True is what they
                        are compared with
    verify_rebuild      how often a rebuilt block is compared, bit for bit, with its forward: "off", "sample" (every
                        block in the first two steps, then one block a step in turn), "always". A block that differs
                        raises RebuildMismatchError with the likely cause
    loss_scaler         a torch.amp.GradScaler (or what has its methods) for train_step: the loss is scaled, the
                        gradients are unscaled before they are clipped, a step with an Inf or NaN is skipped
    trace               whether spans are kept for `runtime.trace(path)`
    """

    scheduler: Any = "sequential"
    memory: Any = "pool"
    backend: Any = "auto"
    passes: list[Any] = field(default_factory=list)
    compute_dtype: torch.dtype | None = None
    boundary_offload: bool = False
    boundary_precision: Any = None
    pin_memory: bool = False
    num_microbatches: int = 1
    grad_clip_norm: float | None = None
    seed: int | None = None
    enable_profiler: bool = True
    log_level: str = "WARNING"
    boundary_tier: str | None = None
    disk_dir: str | Path | None = None
    disk_max_bytes: int | None = None
    prefetch: int = 2
    timeout: float = 60.0
    block_ranks: Sequence[int] | None = None
    random_streams: bool | None = None
    trace: bool = False
    verify_rebuild: str = "sample"
    loss_scaler: Any = None

    def __post_init__(self) -> None:
        self.validate()
        if self.seed is not None:
            torch.manual_seed(self.seed)

    @property
    def tier(self) -> str:
        """The tier in force: boundary_tier, or what boundary_offload stands for."""
        return self.boundary_tier or ("host" if self.boundary_offload else "device")

    def validate(self) -> None:
        """Checks every field, and turns boundary_precision into a dtype. Call it again after changing one."""
        self.boundary_precision = parse_precision(self.boundary_precision)
        parse_level(self.log_level)
        self._check_choices()
        self._check_numbers()
        self._check_passes()

    def _check_choices(self) -> None:
        for name, allowed in (
            ("scheduler", SCHEDULERS),
            ("memory", MEMORY_POLICIES),
            ("backend", BackendManager.SUPPORTED),
            ("boundary_tier", TIERS),
            ("verify_rebuild", MODES),
        ):
            value = getattr(self, name)
            if isinstance(value, str) and value not in allowed:
                raise _bad(name, value, _names(allowed))
        if self.boundary_tier is not None and not isinstance(self.boundary_tier, str):
            raise _bad("boundary_tier", self.boundary_tier, f"None, {_names(TIERS)}")
        if not isinstance(self.verify_rebuild, str):
            raise _bad("verify_rebuild", self.verify_rebuild, _names(MODES))
        if self.boundary_tier == "device" and self.boundary_offload:
            raise ConfigError("boundary_tier='device' contradicts boundary_offload=True; leave one of them out")
        if self.random_streams is not None and not isinstance(self.random_streams, bool):
            raise _bad("random_streams", self.random_streams, "None, True or False")
        dtype = self.compute_dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise _bad("compute_dtype", dtype, "None or a floating-point torch.dtype")
        scaler = self.loss_scaler
        if scaler is not None and not all(callable(getattr(scaler, name, None)) for name in _SCALER):
            raise _bad("loss_scaler", scaler, "None or a torch.amp.GradScaler")
        if self.disk_dir is not None and not isinstance(self.disk_dir, (str, Path)):
            raise _bad("disk_dir", self.disk_dir, "None or the path of a folder")

    def _check_numbers(self) -> None:
        for name, least in (("num_microbatches", 1), ("prefetch", 1), ("disk_max_bytes", 1)):
            value = getattr(self, name)
            optional = name == "disk_max_bytes"
            if not (_is_int(value, least) or (optional and value is None)):
                raise _bad(name, value, f"{'None or ' if optional else ''}a whole number from {least}")
        if self.grad_clip_norm is not None and not _is_positive(self.grad_clip_norm):
            raise _bad("grad_clip_norm", self.grad_clip_norm, "None or a number above 0")
        if not _is_positive(self.timeout):
            raise _bad("timeout", self.timeout, "a number of seconds above 0")
        if self.seed is not None and (not isinstance(self.seed, int) or isinstance(self.seed, bool)):
            raise _bad("seed", self.seed, "None or a whole number")
        ranks = self.block_ranks
        if ranks is not None and (isinstance(ranks, str) or not all(_is_int(rank, 0) for rank in ranks)):
            raise _bad("block_ranks", ranks, "None or one rank (a whole number from 0) for each block")

    def _check_passes(self) -> None:
        if isinstance(self.passes, (str, bytes)) or not isinstance(self.passes, Iterable):
            raise _bad("passes", self.passes, "a list of passes")
        self.passes = list(self.passes)
        for i, item in enumerate(self.passes):
            if isinstance(item, type) or not callable(item):
                raise _bad(f"passes[{i}]", item, "an instance of an EAEPass")
