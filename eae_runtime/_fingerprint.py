"""What is kept of a forward's outputs to tell whether a rebuild gives the same bits.

A fingerprint is the sum of a tensor's values read as integers, exact and in any order the same, and the bits of up to
64 values spread over the tensor. Two tensors that differ in one bit never have the same sum. It costs one pass over
the tensor and 520 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["Fingerprint", "fingerprint", "first_difference"]

_SAMPLES = 64

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# (sum of the bits, some values)
Fingerprint = tuple[torch.Tensor, torch.Tensor]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as integers, without a copy where its type has an integer of the same size."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.element_size() == 16:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    """Of a dense tensor on a real device, where it lies."""
    bits = _bits(tensor)
    total = bits.sum(dtype=torch.int64)
    if bits.numel() <= _SAMPLES:
        return total, bits.reshape(-1).clone()
    places = torch.linspace(0, bits.numel() - 1, _SAMPLES, device=bits.device, dtype=torch.float64).long()
    if bits.is_contiguous():
        return total, bits.reshape(-1)[places]
    return total, bits[torch.unravel_index(places, bits.shape)]


def first_difference(now: Sequence[torch.Tensor], then: Sequence[Fingerprint]) -> int | None:
    """The number of the first tensor that is not what it was, None if all are."""
    for number, (tensor, (total, samples)) in enumerate(zip(now, then, strict=True)):
        new_total, new_samples = fingerprint(tensor)
        if not torch.equal(total, new_total) or not torch.equal(samples, new_samples):
            return number
    return None
