"""Which device a block runs on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .errors import ConfigError

__all__ = ["BackendManager"]


class BackendManager:
    """Resolves a backend's name to what this machine has.

    requested  the name given
    resolved   "cpu" or "cuda". "triton" and "rocm" run on devices that torch calls cuda. A name whose device is
               missing here becomes "cpu", so that one script runs everywhere.
    """

    SUPPORTED = ("cpu", "cuda", "triton", "rocm", "auto")

    def __init__(self, backend: str = "auto") -> None:
        self.requested = backend
        self.resolved = self._resolve(backend)

    @classmethod
    def _resolve(cls, backend: str) -> str:
        if backend not in cls.SUPPORTED:
            raise ConfigError(f"backend={backend!r}: allowed are {', '.join(map(repr, cls.SUPPORTED))}")
        return "cuda" if backend != "cpu" and torch.cuda.is_available() else "cpu"

    def device_for(self, block: Any = None) -> torch.device:
        """The device for a block: its `eae_backend` if it has one, else the runtime's."""
        wish = getattr(block, "eae_backend", None)
        return torch.device(self._resolve(wish) if wish else self.resolved)

    def autocast(self, enabled: bool = False, dtype: torch.dtype | None = None) -> AbstractContextManager[Any]:
        """A `torch.autocast` region for the resolved device (float16 unless told otherwise), or nothing when not
        enabled."""
        if not enabled:
            return nullcontext()
        return torch.autocast(device_type=self.resolved, dtype=dtype or torch.float16)

    def __repr__(self) -> str:
        return f"BackendManager(requested={self.requested!r}, resolved={self.resolved!r})"
