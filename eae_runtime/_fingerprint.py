"""What is kept of a forward's tensors to tell whether a rebuild gives the same bits.

Of a small tensor a copy. Of a larger one the sum of its values read as integers, exact and in any order the same (two
tensors that differ in one bit never have the same), and the bits of some values spread over it: one pass, about 10 KiB
for up to four dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["Fingerprint", "fingerprint", "first_difference"]

# Bytes up to which a copy is kept.
_SMALL = 4096

_SAMPLES = 64

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Bits that are compared one by one, and the sum of all of them (None where they are all there).
Fingerprint = tuple[torch.Tensor, torch.Tensor | None]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as integers, without a copy where its type has an integer of the same size."""
    tensor = tensor.detach()
    if tensor.is_complex() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.element_size() == 16:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    """Of a dense tensor on a real device, where it lies."""
    bits = _bits(tensor)
    if bits.nbytes <= _SMALL:
        return bits.clone(), None
    if bits.is_contiguous():
        some = bits.view(-1)[:: bits.numel() // _SAMPLES]
    else:
        some = bits[tuple(slice(None, None, max(1, n // 4)) for n in bits.shape)]
    return some.clone(), bits.sum(dtype=torch.int64)


def first_difference(now: Sequence[torch.Tensor], then: Sequence[Fingerprint]) -> int | None:
    """The number of the first tensor that is not what it was, None if all are."""
    for number, (tensor, (samples, total)) in enumerate(zip(now, then, strict=True)):
        if total is None:
            same = torch.equal(_bits(tensor), samples)
        else:
            new_samples, new_total = fingerprint(tensor)
            same = new_total is not None and torch.equal(samples, new_samples) and torch.equal(total, new_total)
        if not same:
            return number
    return None
