"""Why a block's rebuild is not its forward: found by experiments, each run only after a mismatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ._bits import same_bits
from ._fingerprint import first_difference
from ._records import Record
from ._structure import Structure

__all__ = ["explain"]

# Runs the block again under the state of the forward: its outputs, with grad mode on or off.
Again = Callable[[bool], list[torch.Tensor]]


def explain(
    structure: Structure, record: Record, tensors: Sequence[torch.Tensor], outputs: list[torch.Tensor], again: Again
) -> tuple[str, str] | None:
    """The likely cause of a mismatch and what to do about it; None if it is that the forward ran under `no_grad`, where
    the block computes something else.

    tensors: the boundary that the rebuild started from; outputs: what it gave. `record.prints` has the fingerprints of
    both from the forward.
    """
    assert record.prints is not None
    then, boundary = record.prints
    number = first_difference(tensors, boundary)
    if number is not None:
        return (
            f"in-place change of the block's input (tensor {number}) after the forward, past its version counter",
            "Something writes to it through .data, NumPy or DLPack; let it write to a copy",
        )
    try:
        twice = [t.detach() for t in again(True)]
        if first_difference(twice, then) is None:
            return _not_repeatable()
        if len(twice) == len(outputs) and not all(map(same_bits, twice, outputs)):
            return _not_repeatable()
        if record.facts.no_grad and first_difference([t.detach() for t in again(False)], then) is None:
            return None
    except Exception as error:
        return (
            f"state changed by forward: run once more, the block raised {type(error).__name__}: {error}",
            "Keep what changes between runs in a registered buffer",
        )
    if any(not t.is_floating_point() and not t.is_complex() for t in outputs) or _chooses(structure):
        return (
            "data-dependent routing, or state changed by forward that is no attribute of a module",
            "Keep the choice from the forward with eae_runtime.pin(), and what changes between runs in a buffer",
        )
    return (
        "state changed by forward: the block depends on something that has changed since and is not its own (a "
        "global, a counter in a closure, a parameter written through .data, an attribute that the model sets between "
        "two calls)",
        "Keep what the forward changes in a buffer or an attribute of the module, and give what comes from outside as "
        "an argument",
    )


def _not_repeatable() -> tuple[str, str]:
    return (
        "random draw from a source that is not replayed (os.urandom, a clock, a generator in a place where it is not "
        "looked for), state outside its modules that every run changes (a counter in a closure), or a kernel that is "
        "not deterministic",
        "Draw from torch, random, numpy or a generator that a module holds; keep counters in attributes of the module; "
        "keep the sample or the choice with eae_runtime.pin(); or use torch.use_deterministic_algorithms(True)",
    )


def _chooses(structure: Structure) -> bool:
    """Whether the block has parts of which a forward may use some: several modules of one class side by side."""
    for module in structure.modules:
        kinds = [type(child) for child in module._modules.values() if child is not None]
        if len(kinds) > 1 and len(set(kinds)) == 1 and isinstance(module, torch.nn.ModuleList):
            return True
    return False
