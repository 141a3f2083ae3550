"""How a tensor travels between ranks: described by a few numbers, sent as the bytes of its memory.

Note [A tensor arrives as it was sent]
    A kernel's bits depend on strides and alignment, so these are part of the description: the receiver gets the
    strides and the address modulo 64 that the sender's tensor had. Gaps between elements and repeated elements (an
    expanded tensor) do not travel. Tensors that overlap themselves in another way arrive contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .errors import TensorTypeError

__all__ = ["Form", "Slot", "form_of", "pack"]


class Form(NamedTuple):
    """What the receiver has to know of a tensor. `shift` counts elements from a 64-byte boundary; `home` tells
    whether the tensor is on its rank's own device (and arrives on the receiver's) or on the CPU beside it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    shift: int
    home: bool

    @property
    def core(self) -> tuple[int, ...]:
        """The shape without the repetitions of an expanded tensor."""
        return tuple([1 if step == 0 and n else n for n, step in zip(self.shape, self.stride, strict=True)])

    @property
    def dense(self) -> bool:
        """Whether the core's elements lie side by side in some order."""
        expected = 1
        for step, n in sorted((s, n) for s, n in zip(self.stride, self.core, strict=True) if n != 1):
            if step != expected:
                return False
            expected *= n
        return True


def _count(shape: Sequence[int]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total


def form_of(tensor: torch.Tensor, home: torch.device) -> Form:
    """The form of a tensor of the rank whose blocks are on `home`. Raises TensorTypeError for one that has no plain
    memory."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        kind = "a meta tensor" if tensor.is_meta else f"a tensor of layout {tensor.layout}"
        raise TensorTypeError(f"{kind} cannot travel to another rank; make it dense (sparse=False, .to_dense())")
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    form = Form(
        shape, stride, tensor.dtype, (tensor.data_ptr() % 64) // tensor.element_size(), tensor.device.type == home.type
    )
    if not form.dense and torch._debug_has_internal_overlap(tensor.as_strided(form.core, stride)) == 1:
        form = form._replace(stride=tuple(torch.empty(shape, device="meta").stride()))
    return form


def pack(tensor: torch.Tensor, form: Form) -> torch.Tensor:
    """The bytes to send, as a flat uint8 tensor on the tensor's device; a view of its memory where that is possible."""
    core = tensor.detach().resolve_conj().resolve_neg()
    for dim, step in enumerate(form.stride):
        if step == 0 and form.shape[dim]:
            core = core.narrow(dim, 0, 1)
    if not form.dense:
        flat = core.contiguous().view(-1)
    else:
        if any(n != 1 and a != b for n, a, b in zip(form.core, core.stride(), form.stride, strict=True)):
            core = torch.empty_strided(form.core, form.stride, dtype=core.dtype, device=core.device).copy_(core)
        flat = core.as_strided((core.numel(),), (1,))
    return flat.view(torch.uint8)


class Slot:
    """Memory for a tensor on its way in. Receive into `buffer`, then take `tensor()`."""

    def __init__(self, form: Form, device: torch.device, staged: bool) -> None:
        """`staged`: the bytes come into host memory first."""
        self._form = form
        count = _count(form.core)
        span = count if form.dense else 1 + sum((n - 1) * s for n, s in zip(form.core, form.stride, strict=True))
        self._memory = torch.empty(span + form.shift if count else 0, dtype=form.dtype, device=device)
        self._direct = form.dense and not staged
        if self._direct:
            self._elements = self._memory[form.shift : form.shift + count]
        else:
            self._elements = torch.empty(count, dtype=form.dtype, device="cpu" if staged else device)
        self.buffer = self._elements.view(torch.uint8)

    def tensor(self) -> torch.Tensor:
        """The tensor, once the bytes are there."""
        form = self._form
        if not _count(form.shape):
            return torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=self._memory.device)
        if not self._direct:
            if form.dense:
                self._memory[form.shift :].copy_(self._elements)
            else:
                self._memory.as_strided(form.core, form.stride, form.shift).copy_(self._elements.view(form.core))
        return self._memory.as_strided(form.shape, form.stride, form.shift)
