"""State of a block's modules that its forward changes: buffers, plain attributes, containers, frozen parameters.

Note [State changes once]
    What a forward wrote has a pre-image from before the block ran. The rebuild sees a copy of the pre-image in its
    place, and the real value comes back afterwards: swapping the object, not the values, leaves the version that the
    rebuilt graph has saved untouched. A failed step gets the pre-image's values back.

    At first sight of a block everything has a pre-image; from then on what was seen to change, and buffers up to 64 KiB
    (a block that starts to write one late can then still be undone). An attribute that is given another tensor in every
    forward (a cached attention map) needs no copy of the old one.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ._bits import same_bits
from ._structure import MACHINERY, Structure, own_attributes

__all__ = ["Entry", "Watch", "is_plain", "put_back", "same_value", "swapped"]

_SMALL_BUFFER = 64 * 1024

# Containers whose members are compared; longer ones are data, not state.
_LONGEST = 1000

_CONTAINERS = (list, dict, set, deque)


class _Missing:
    """Stands for an attribute that is not there."""

    def __repr__(self) -> str:
        return "missing"


MISSING = _Missing()


class Entry:
    """One place, `home[name]`: the object that stood there before the run, and its pre-image (the object itself if it
    cannot change)."""

    __slots__ = ("before", "home", "name", "object", "version")

    def __init__(self, home: dict[str, Any], name: str, value: Any, replaced: bool = False) -> None:
        """replaced: the forward puts another tensor into the place and leaves the old one as it is."""
        self.home = home
        self.name = name
        self.object = value
        self.version = -1
        if isinstance(value, torch.Tensor):
            self.version = value._version
            self.before: Any = value.detach() if replaced else value.detach().clone()
        else:
            self.before = copy.copy(value) if isinstance(value, _CONTAINERS) else value

    def now(self) -> Any:
        """What stands in the place."""
        return self.home.get(self.name, MISSING)

    def changed(self) -> bool:
        """Whether the place holds another object or value now."""
        now = self.now()
        if isinstance(self.object, torch.Tensor):
            # Batch norm's kernel writes its running statistics without moving their version: bits decide.
            return now is not self.object or not same_bits(now, self.before)
        if isinstance(self.object, _CONTAINERS):
            return now is not self.object or not _same_members(now, self.before)
        return now is not self.object and not same_value(now, self.object)

    @property
    def lost(self) -> bool:
        """Whether the forward wrote to the one copy that there was."""
        return (
            isinstance(self.object, torch.Tensor)
            and self.before.data_ptr() == self.object.data_ptr() != 0
            and self.object._version != self.version
        )

    def present(self, value: Any) -> None:
        """Puts `value` into the place."""
        if value is MISSING:
            self.home.pop(self.name, None)
        else:
            self.home[self.name] = value

    def restore(self) -> None:
        """Gives the place its object and values from before the run."""
        self.present(self.object)
        if isinstance(self.object, torch.Tensor):
            if not same_bits(self.object, self.before):
                with torch.no_grad():
                    self.object.copy_(self.before)
        elif isinstance(self.object, _CONTAINERS) and not _same_members(self.object, self.before):
            self.object.clear()
            if isinstance(self.object, (list, deque)):
                self.object.extend(self.before)
            else:
                self.object.update(self.before)


def _same_members(a: Any, b: Any) -> bool:
    if len(a) != len(b):
        return False
    if isinstance(a, dict):
        return all(x is y for x, y in zip(a, b, strict=True)) and all(
            x is y for x, y in zip(a.values(), b.values(), strict=True)
        )
    return all(x is y for x, y in zip(a, b, strict=True))


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a flag or a string."""
    return isinstance(value, (int, float, str, bool, complex))


def same_value(a: Any, b: Any) -> bool:
    """Whether two values are the same number, flag or string."""
    return type(a) is type(b) and is_plain(a) and bool(a == b)


class Watch:
    """Looks at a block's state before a run and tells what the run changed.

    written: what earlier runs of the block changed, as (id of the home, name); None at first sight.
    changing: of `written` what is no buffer, as (home, name, whether it was replaced by another object); it is added
    to.
    frozen: whether frozen parameters are looked at.
    """

    __slots__ = ("_changing", "_entries", "_names", "_structure", "_versions")

    def __init__(
        self,
        structure: Structure,
        written: set[tuple[int, str]] | None,
        changing: dict[tuple[int, str], tuple[dict[str, Any], str, bool]],
        frozen: bool = True,
    ) -> None:
        self._structure = structure
        self._changing = changing
        self._versions: list[tuple[dict[str, Any], str, torch.Tensor, int]] = []
        self._entries: list[Entry] = []
        # At first sight, the names of each module's attributes.
        self._names: dict[int, set[str]] = {}
        for home in structure.buffers:
            for name, buffer in home.items():
                if buffer is not None:
                    self._versions.append((home, name, buffer, buffer._version))
                    if written is None or (id(home), name) in written or buffer.nbytes <= _SMALL_BUFFER:
                        self._entries.append(Entry(home, name, buffer))
        if written is None:
            self._look_at_everything(frozen)
        else:
            for home, name, replaced in changing.values():
                self._entries.append(Entry(home, name, home.get(name, MISSING), replaced))

    def _look_at_everything(self, frozen: bool) -> None:
        for module in self._structure.modules:
            for name, parameter in module._parameters.items():
                if frozen and parameter is not None and not parameter.requires_grad:
                    self._entries.append(Entry(module._parameters, name, parameter))
            self._names[id(module)] = set(module.__dict__)
            for home, name, value in own_attributes(module):
                if isinstance(value, torch.Tensor) and _is_foreign(value):
                    continue
                if isinstance(value, _CONTAINERS) and len(value) > _LONGEST:
                    continue
                self._entries.append(Entry(home, name, value))

    def changes(self) -> tuple[list[Entry], set[tuple[int, str]], list[str]]:
        """What the run changed: the entries with a pre-image, all of it as (id of the home, name), and the names of
        what has no pre-image."""
        changed = [entry for entry in self._entries if entry.changed()]
        keys = {(id(e.home), e.name) for e in changed}
        covered = {(id(e.home), e.name) for e in self._entries}
        lost = [e.name for e in self._entries if e.lost]
        for home, name, buffer, version in self._versions:
            key = (id(home), name)
            if key not in covered and (home.get(name) is not buffer or buffer._version != version):
                keys.add(key)
                lost.append(name)
        if self._names:
            changed += self._new_attributes()
        buffers = {id(home) for home in self._structure.buffers}
        for entry in changed:
            if id(entry.home) not in buffers:
                replaced = entry.now() is not entry.object
                self._changing.setdefault((id(entry.home), entry.name), (entry.home, entry.name, replaced))
        for entry in self._entries:
            if entry.lost:
                self._changing[id(entry.home), entry.name] = (entry.home, entry.name, False)
        return changed, keys, lost

    def _new_attributes(self) -> list[Entry]:
        """Entries for the attributes that the run has made."""
        return [
            Entry(module.__dict__, name, MISSING)
            for module in self._structure.modules
            for name in module.__dict__
            if name not in self._names[id(module)] and name not in MACHINERY
        ]


def _is_foreign(tensor: torch.Tensor) -> bool:
    """Whether a tensor attribute is none of a state's kind: a leaf that is trained, or one without memory here."""
    return (tensor.requires_grad and tensor.is_leaf) or tensor.is_meta or tensor.layout is not torch.strided


def put_back(entries: Sequence[Entry]) -> None:
    """Undoes what a run changed."""
    for entry in entries:
        entry.restore()


@contextmanager
def swapped(entries: Sequence[Entry]) -> Iterator[None]:
    """Copies of the pre-images in the places of what the run changed; afterwards what stands there now comes back."""
    now = [entry.now() for entry in entries]
    for entry in entries:
        value = entry.before
        if isinstance(value, torch.Tensor):
            value = value.clone()
        elif isinstance(value, _CONTAINERS):
            value = copy.copy(value)
        entry.present(value)
    try:
        yield
    finally:
        for entry, value in zip(entries, now, strict=True):
            entry.present(value)
