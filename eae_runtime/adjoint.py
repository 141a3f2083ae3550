"""AdjointState: a gradient on its way back, with where it is and what has been done to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch

from .errors import ConfigError

__all__ = ["AdjointState"]


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """In at least float32, so that sums over half precision do not overflow."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


@dataclass
class AdjointState:
    """The adjoint a_i = dLoss/dx_i at one boundary (paper, eq. 1-2).

    tensor    the gradient, of the boundary's shape
    layer_id  the boundary's number: L behind the last block, 0 in front of the first
    block     the name of the block that made it
    dtype, device   taken from `tensor` when not given
    metadata  whatever passes want to say, by name
    history   the passes that have handled it, oldest first

    The methods that return an AdjointState leave this one as it was.
    """

    tensor: torch.Tensor
    layer_id: int
    block: str = ""
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    history: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.dtype is None:
            self.dtype = self.tensor.dtype
        if self.device is None:
            self.device = self.tensor.device

    def norm(self, p: float = 2.0) -> torch.Tensor:
        """The p-norm over all elements: a tensor without dimensions, on the adjoint's device (no host sync)."""
        return torch.linalg.vector_norm(_wide(self.tensor), ord=p)

    def statistics(self) -> dict[str, float]:
        """mean, std (of the whole population), min, max, norm, numel, has_nan, has_inf. Waits for the device once.

        An empty tensor has 0.0 everywhere.
        """
        tensor = _wide(self.tensor.detach())
        names = ("mean", "std", "min", "max", "norm", "has_nan", "has_inf")
        if tensor.numel() == 0:
            values = [0.0] * len(names)
        else:
            low, high = torch.aminmax(tensor)
            measured = (
                tensor.mean(),
                tensor.std(unbiased=False),
                low,
                high,
                torch.linalg.vector_norm(tensor),
                torch.isnan(tensor).any(),
                torch.isinf(tensor).any(),
            )
            values = torch.stack([value.to(tensor.dtype) for value in measured]).tolist()
        stats: dict[str, float] = dict(zip(names, values, strict=True))
        stats["numel"] = tensor.numel()
        stats["has_nan"] = bool(stats["has_nan"])
        stats["has_inf"] = bool(stats["has_inf"])
        return stats

    def quantize(self, dtype: torch.dtype = torch.float16) -> AdjointState:
        """With the tensor rounded to `dtype`."""
        return self._cast(dtype)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> AdjointState:
        """With the tensor widened to `dtype`; what :meth:`quantize` rounded off stays lost."""
        return self._cast(dtype)

    def compress(self, ratio: float = 0.5) -> AdjointState:
        """With all but the largest elements by magnitude set to zero.

        Exactly `floor(numel * (1 - ratio))` elements are kept, at least one; among equal magnitudes some are kept and
        some not.
        """
        if not 0.0 <= ratio <= 1.0:
            raise ConfigError(f"ratio={ratio!r}: the share of elements to drop lies between 0 and 1")
        new = self.clone()
        flat = new.tensor.reshape(-1)
        # In decimal fractions: 1000 * (1 - 0.9) is 99.99... in floating point.
        keep = max(1, int(flat.numel() * (1 - Fraction(repr(float(ratio))))))
        if keep < flat.numel():
            where = flat.abs().topk(keep, sorted=False).indices
            kept = torch.zeros_like(flat)
            kept[where] = flat[where]
            new.tensor = kept.view(new.tensor.shape)
        return new

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> AdjointState:
        """On `device` and in `dtype`; None leaves that side as it is."""
        new = self.clone()
        new.tensor = new.tensor.to(device=device or new.device, dtype=dtype or new.dtype)
        new.device = new.tensor.device
        new.dtype = new.tensor.dtype
        return new

    def clone(self) -> AdjointState:
        """A copy that shares the tensor and owns its metadata and history."""
        return AdjointState(
            tensor=self.tensor,
            layer_id=self.layer_id,
            block=self.block,
            dtype=self.dtype,
            device=self.device,
            metadata=dict(self.metadata),
            history=list(self.history),
        )

    def detach(self) -> AdjointState:
        """With the tensor cut off from any autograd graph; the memory is shared."""
        new = self.clone()
        new.tensor = new.tensor.detach()
        return new

    def record(self, pass_name: str) -> None:
        """Appends a name to the history of this very adjoint."""
        self.history.append(pass_name)

    def _cast(self, dtype: torch.dtype) -> AdjointState:
        new = self.clone()
        new.tensor = new.tensor.to(dtype)
        new.dtype = dtype
        return new

    def __repr__(self) -> str:
        return (
            f"AdjointState(layer_id={self.layer_id}, block={self.block!r}, shape={tuple(self.tensor.shape)}, "
            f"dtype={self.dtype}, device={self.device}, history={self.history})"
        )
