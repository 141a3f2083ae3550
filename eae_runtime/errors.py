"""The exception tree.

Every error that the runtime raises on its own account is an :class:`EAEError`. Each class also derives from the builtin
that a caller would expect, so `except ValueError` and `except KeyError` keep working. The Go core names these classes
in its error texts (``CODE|message``); :func:`eae_runtime._bridge.translate` looks the code up in :data:`BY_CODE`.
"""

from __future__ import annotations

__all__ = [
    "BlockError",
    "BridgeError",
    "ClosedError",
    "ConfigError",
    "DistributedError",
    "EAEError",
    "LossError",
    "PassError",
    "PlanError",
    "RebuildMismatchError",
    "ScheduleError",
    "StoreError",
    "StoreKeyError",
    "StoreTimeoutError",
    "TensorTypeError",
    "UpdateError",
]


class EAEError(Exception):
    """Base of all errors of this package."""


class ConfigError(EAEError, ValueError):
    """An option or argument has a value that is not allowed."""


class TensorTypeError(EAEError, TypeError):
    """A tensor of a kind that cannot be used here (sparse, meta, quantized), or an object of the wrong type."""


class PlanError(EAEError, ValueError):
    """What was asked for cannot be scheduled; the message says what would make it possible."""


class ScheduleError(EAEError, ValueError):
    """A schedule breaks a rule; the message marks the offending action."""


class RebuildMismatchError(EAEError, RuntimeError):
    """A block cannot be rebuilt as it ran in the forward: its input, parameters, mode or leaves have changed since."""


class BlockError(EAEError, RuntimeError):
    """A block does something that no rebuild can repeat or a schedule cannot deliver: it changes its arguments, or
    hands a tensor of its graph out by a side door that a backward then comes through."""


class LossError(EAEError, RuntimeError):
    """The loss is not a scalar, or does not depend on the model's output."""


class StoreError(EAEError, OSError):
    """A boundary cannot be stored or loaded: no space, a damaged file, a cap reached."""


class StoreKeyError(StoreError, KeyError):
    """A boundary was asked for that was never stored or has been dropped."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument, which would put the message in quotes.
        return str(self.args[0]) if self.args else ""


class StoreTimeoutError(StoreError, TimeoutError):
    """A wait for a tier ran past its deadline."""


class PassError(EAEError, RuntimeError):
    """A pass failed, or was given a gradient that it cannot transform."""


class BridgeError(EAEError, RuntimeError):
    """A tensor or call cannot cross to the Go core, or the core is used in a forked child."""


class ClosedError(EAEError, RuntimeError):
    """A closed object was used."""


class UpdateError(EAEError, RuntimeError):
    """The optimizer failed inside its step: parameters and optimizer state are undefined."""


class DistributedError(EAEError, RuntimeError):
    """A rank failed or fell silent; the message names rank, block and action."""


BY_CODE: dict[str, type[EAEError]] = {
    cls.__name__: cls
    for cls in (
        BridgeError,
        ClosedError,
        ConfigError,
        PassError,
        PlanError,
        ScheduleError,
        StoreError,
        StoreKeyError,
        StoreTimeoutError,
    )
}
