"""RegularizationPass and GaussianNoisePass."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ..errors import ConfigError
from .base import Context
from .core_pass import CorePass

__all__ = ["GaussianNoisePass", "RegularizationPass"]


class RegularizationPass(CorePass):
    """Multiplies the adjoint by 1 - strength."""

    name = "RegularizationPass"
    core_name: ClassVar[str] = "regularization"

    def __init__(self, strength: float = 0.0) -> None:
        self.strength = strength

    def params(self) -> dict[str, Any]:
        return {"strength": self.strength}

    def idle(self, context: Context) -> bool:
        return self.strength == 0.0


class GaussianNoisePass(CorePass):
    """Adds independent noise N(0, std^2), std in unscaled units.

    The draws come from a counter-based generator keyed by seed, step, boundary and element: they depend on neither
    threads nor schedule, and torch's generators stay where they are. The seed is `seed`, else the `generator`'s
    initial seed, else torch's (`torch.initial_seed()`); passes in one pipeline need different seeds to draw different
    noise.
    """

    name = "GaussianNoisePass"
    core_name: ClassVar[str] = "gaussian_noise"
    stateful = True

    def __init__(self, std: float = 0.0, generator: torch.Generator | None = None, seed: int | None = None) -> None:
        if generator is not None and seed is not None:
            raise ConfigError("GaussianNoisePass takes a generator or a seed, not both")
        if seed is None:
            seed = torch.initial_seed() if generator is None else generator.initial_seed()
        self.std = std
        # The core counts in signed 64-bit numbers.
        self.seed = seed & (2**63 - 1)

    def params(self) -> dict[str, Any]:
        return {"std": self.std, "seed": self.seed}

    def idle(self, context: Context) -> bool:
        return self.std == 0.0
