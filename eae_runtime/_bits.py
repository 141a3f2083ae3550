"""Tensors compared and copied bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["different_places", "exact_copy", "overlapping", "same_bits", "same_random"]


def exact_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides and the same address modulo 64. A tensor that overlaps itself cannot be written in
    place by torch and is returned as it is."""
    shape, strides, size = tensor.shape, tensor.stride(), tensor.element_size()
    if tensor.numel() == 0:
        return tensor.clone()
    if torch._debug_has_internal_overlap(tensor) == 1:
        return tensor
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    shift = (tensor.data_ptr() % 64) // size
    memory = torch.empty(span + shift, dtype=tensor.dtype, device=tensor.device)
    copy = memory.as_strided(shape, strides, shift)
    copy.copy_(tensor.detach())
    return copy


def overlapping(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the memory of two of the tensors, each from its first to its last element, overlaps."""
    if len(tensors) < 2:
        return False
    spans = sorted(
        (t.data_ptr(), t.data_ptr() + t.element_size() * (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride()))))
        for t in tensors
        if t.numel()
    )
    return any(end > start for (_, end), (start, _) in itertools.pairwise(spans))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, type and bits (NaN equals the same NaN, 0.0 differs from -0.0)."""
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    if a.layout is not torch.strided or a.is_meta or a.is_quantized:
        return bool(torch.equal(a, b))
    return bool(torch.equal(_raw_bytes(a), _raw_bytes(b)))


def different_places(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many elements of two dense tensors of one shape and type differ in a bit."""
    size = a.element_size()
    return int((_raw_bytes(a).view(-1, size) != _raw_bytes(b).view(-1, size)).any(1).sum())


def _raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A dimension of one element may have any stride and the tensor still be contiguous; a view as bytes wants 1.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def same_random(a: Any, b: Any) -> bool:
    """Whether two states that `Generators.read` returned are the same."""
    if isinstance(a, torch.Tensor):
        return bool(torch.equal(a, b))
    return bool(torch.equal(a[0], b[0])) and all(torch.equal(s, t) for (_, s), (_, t) in zip(a[1], b[1], strict=True))
