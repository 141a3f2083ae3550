"""ClipPass."""

from __future__ import annotations

from typing import Any, ClassVar

from .core_pass import CorePass

__all__ = ["ClipPass"]


class ClipPass(CorePass):
    """Scales an adjoint down to the 2-norm `max_norm` where it is longer.

    The norm is over all elements of the boundary (all its tensors together) and in unscaled units: a loss scale is
    taken out first. Not row-wise: under microbatching each microbatch is clipped by itself.
    """

    name = "ClipPass"
    core_name: ClassVar[str] = "clip"

    def __init__(self, max_norm: float = 1.0) -> None:
        self.max_norm = max_norm

    def params(self) -> dict[str, Any]:
        return {"max_norm": self.max_norm}
