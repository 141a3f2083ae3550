"""Passes that round an adjoint to fewer bits and back: what the adjoint would be after travelling in that format."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ..adjoint import AdjointState
from ..errors import ConfigError, PassError
from .base import Context
from .core_pass import CorePass

__all__ = ["BF16Pass", "FP8Pass", "FP16Pass", "Int8QuantizationPass"]

# The core's names. "fn": finite, without infinities, so that what is too large becomes the largest value.
_FORMATS = {"e4m3": "e4m3fn", "e5m2": "e5m2"}


class FP16Pass(CorePass):
    """Rounds to float16 (nearest even) and back. Beyond 65504 the result is infinite."""

    name = "FP16Pass"
    core_name: ClassVar[str] = "fp16"


class BF16Pass(CorePass):
    """Rounds to bfloat16 (nearest even) and back."""

    name = "BF16Pass"
    core_name: ClassVar[str] = "bf16"


class Int8QuantizationPass(CorePass):
    """Rounds to q * scale, q a whole number from -127 to 127, scale = max |a| / 127, one for each tensor.

    The scale is left in the adjoint's metadata as `quantization_scale` (for a boundary of several tensors, in each
    its own); an adjoint of zeros has none. NaN or Inf raise PassError.
    """

    name = "Int8QuantizationPass"
    core_name: ClassVar[str] = "int8"

    def note(self, adjoint: AdjointState, values: dict[str, Any], context: Context) -> None:
        scale = values.get("quantization_scale")
        # A list is the scales of those tensors of several that are not all zeros; whose is whose cannot be told.
        if isinstance(scale, float):
            adjoint.metadata["quantization_scale"] = scale

    def encode(self, tensor: torch.Tensor) -> tuple[torch.Tensor, float]:
        """The payload to send or keep: q (int8, of the tensor's shape) and the scale (0.0 for a tensor of zeros)."""
        made = self.process(AdjointState(tensor, 0))
        scale = made.metadata.get("quantization_scale", 0.0)
        if scale == 0.0:
            return torch.zeros(tensor.shape, dtype=torch.int8, device=tensor.device), 0.0
        # q * scale / scale is within a quarter of q in every dtype.
        return (made.tensor.to(torch.float32) / scale).round_().to(torch.int8), scale

    def decode(self, payload: torch.Tensor, scale: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """q * scale in `dtype`: what the pass itself returns for the encoded tensor."""
        if payload.dtype is not torch.int8:
            raise PassError(f"pass {self.name}: a payload is int8, got {payload.dtype}")
        return (payload.to(torch.float32) * scale).to(dtype)


class FP8Pass(CorePass):
    """Rounds to an 8-bit float and back: "e4m3" (4 exponent bits, largest 448) or "e5m2" (5, largest 57344).

    Beyond the largest value, e4m3 stays at it and e5m2 becomes infinite.
    """

    name = "FP8Pass"
    core_name: ClassVar[str] = "fp8"

    def __init__(self, format: str = "e4m3") -> None:
        if format not in _FORMATS:
            raise ConfigError(f"format={format!r}: allowed are {', '.join(map(repr, _FORMATS))}")
        self.format = format

    def params(self) -> dict[str, Any]:
        return {"format": _FORMATS[self.format]}
