"""The only Python module that touches the Go core: loading it, tensors across it, its errors, and the fork guard.

Note [Who owns a tensor address]
    A tensor crosses as the address of a DLManagedTensor. An address that :func:`export` returns is owned by the caller
    until it is passed to the core, which owns it from then on, also when the call fails. An address that the core
    returns is owned by the caller until :func:`adopt` turns it into a tensor.

Note [Core functions are looked up at call time]
    Go's runtime does not survive a fork: a call in a forked child can hang for ever. After a fork the child's `core` is
    replaced by an object that raises. So callers write ``_bridge.core.api_X(...)`` and never keep a function of it.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, NoReturn

import torch

from . import errors
from ._core import _eae

__all__ = ["adopt", "call", "core", "export", "in_child", "live", "translate"]

core: Any = _eae

# True in a child process that was forked after the core was loaded.
in_child = False

_FORKED = (
    "the Go core was loaded in another process and this one was forked from it; it cannot be used here. "
    "Start the process with multiprocessing's 'spawn' or 'forkserver' method instead"
)


class _ForkedCore:
    """Stands in for the core in a forked child: every use raises before Go is entered."""

    def __getattr__(self, name: str) -> NoReturn:
        raise errors.BridgeError(_FORKED)


def _after_fork_in_child() -> None:
    global core, in_child
    in_child = True
    core = _ForkedCore()


os.register_at_fork(after_in_child=_after_fork_in_child)

# PyDLL keeps the GIL: a Python object is made.
_function = ctypes.PyDLL(_eae.__file__).eae_capsule_function
_function.argtypes = [ctypes.c_int]
_function.restype = ctypes.py_object
_take, _make = _function(0), _function(1)

_to_dlpack = torch._C._to_dlpack  # type: ignore[attr-defined]
_from_dlpack = torch._C._from_dlpack  # type: ignore[attr-defined]

_strided = torch.strided


def translate(error: RuntimeError) -> Exception:
    """The exception of this package for an error of the core (``CODE|message``); any other error is returned as it
    is."""
    code, bar, message = str(error).partition("|")
    cls = errors.BY_CODE.get(code) if bar else None
    return error if cls is None else cls(message)


def call(name: str, *args: Any) -> Any:
    """Calls `api_NAME` of the core and raises its errors as this package's."""
    try:
        return getattr(core, "api_" + name)(*args)
    except RuntimeError as error:
        if isinstance(error, errors.EAEError):
            raise
        raise translate(error) from None


def export(tensor: torch.Tensor) -> int:
    """The address of a DLManagedTensor on the memory of `tensor`, which must not require grad. No bytes are copied
    unless a negative or conjugate view has to be resolved, which DLPack would pass on with wrong values.

    Raises TensorTypeError for a tensor that DLPack cannot describe, naming the cure.
    """
    if tensor.layout is not _strided or tensor.is_neg() or tensor.is_conj() or tensor.is_meta:
        tensor = _resolve(tensor)
    if in_child:
        raise errors.BridgeError(_FORKED)
    address: int = _take(_to_dlpack(tensor))
    return address


def _resolve(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        raise errors.TensorTypeError("a meta tensor has no bytes; move the model and its input to a real device first")
    if tensor.layout is not _strided:
        raise errors.TensorTypeError(
            f"a tensor of layout {tensor.layout} cannot be a boundary or an adjoint; call .to_dense() at the end "
            "of the block"
        )
    return tensor.resolve_conj().resolve_neg()


def adopt(address: int) -> torch.Tensor:
    """A tensor on the memory that `address` describes. It has a version counter of its own."""
    tensor: torch.Tensor = _from_dlpack(_make(address))
    return tensor


def live() -> str:
    """What the core holds right now, as JSON: stores, pools, chains, buffers, tensors, goroutines, files, bytes."""
    return str(call("Live"))
