"""The state around a block that its rebuild has to see again: random generators, autocast, training flags.

Note [What a rebuild replays]
    A block's forward depends on more than its input: the generators it draws from, the autocast region it stands in and
    its training flags. All of it is recorded before the block runs and put back around its rebuild. Blocks that do not
    draw have no snapshot of the generators: see Note [Blocks that do not draw] in `_records.py`.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

__all__ = ["Autocast", "Generators", "host_sources", "read_source", "same_source", "write_source"]

_cpu = torch.default_generator


class Generators:
    """The default generators of the CPU and of every accelerator in use.

    `read` returns an opaque state, `write` puts it back. With the CPU alone, the state is its 5056-byte tensor, and
    both are the CPU generator's own methods.
    """

    __slots__ = ("_devices", "read", "write")

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        self._devices: tuple[torch.device, ...] = ()
        # What is called twice a block stands here without a frame of its own.
        self.read: Callable[[], Any] = _cpu.get_state
        self.write: Callable[[Any], Any] = _cpu.set_state
        self.add(devices)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The accelerators whose generators are included."""
        return self._devices

    def add(self, devices: Iterable[torch.device]) -> None:
        """Includes the generators of `devices`; the CPU's is always included."""
        known = dict.fromkeys(self._devices)
        known.update((d, None) for d in devices if d.type not in ("cpu", "meta"))
        self._devices = tuple(known)
        if self._devices:
            self.read, self.write = self._read_all, self._write_all

    def seed(self, number: int) -> None:
        """Seeds all generators with one number, as `torch.manual_seed` does it for those of the devices in use."""
        _cpu.manual_seed(number)
        for device in self._devices:
            module = torch.get_device_module(device.type)
            with module.device(device):
                module.manual_seed(number)

    def _read_all(self) -> Any:
        """The state of all generators now."""
        return _cpu.get_state(), [(d, torch.get_device_module(d.type).get_rng_state(d)) for d in self._devices]

    def _write_all(self, state: Any) -> None:
        """Sets all generators to a state that `read` returned."""
        if isinstance(state, torch.Tensor):
            _cpu.set_state(state)
            return
        cpu, others = state
        _cpu.set_state(cpu)
        for device, one in others:
            torch.get_device_module(device.type).set_rng_state(one, device)


def host_sources() -> dict[str, Any]:
    """The generators behind the functions of `random` and, where it is in use, of `numpy.random`, by these names."""
    sources: dict[str, Any] = {"random": random.seed.__self__}  # type: ignore[attr-defined]
    if "numpy.random" in sys.modules:
        sources["numpy.random"] = sys.modules["numpy.random"].mtrand._rand
    return sources


def read_source(source: Any) -> Any:
    """The state of a generator: a torch.Generator, a random.Random, a numpy.random.Generator or a RandomState."""
    if isinstance(source, torch.Generator):
        return source.get_state()
    if isinstance(source, random.Random):
        return source.getstate()
    if hasattr(source, "bit_generator"):
        return source.bit_generator.state
    return source.get_state(legacy=False)


def write_source(source: Any, state: Any) -> None:
    """Sets a generator to a state that `read_source` returned."""
    if isinstance(source, random.Random):
        source.setstate(state)
    elif hasattr(source, "bit_generator"):
        source.bit_generator.state = state
    else:
        source.set_state(state)


def same_source(a: Any, b: Any) -> bool:
    """Whether two states of one generator are the same."""
    if isinstance(a, torch.Tensor):
        return bool(torch.equal(a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_source(a[k], b[k]) for k in a)
    if hasattr(a, "tobytes"):
        return bool(a.tobytes() == b.tobytes())
    return bool(a == b)


class Autocast:
    """The autocast state of the calling thread for the CPU and one accelerator type.

    `region()` re-enters it; that costs nothing when the state is already so. `active` says whether any type is on.
    """

    __slots__ = ("_state", "active")

    def __init__(self, device_types: tuple[str, ...]) -> None:
        self._state = tuple(
            (t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t), torch.is_autocast_cache_enabled())
            for t in device_types
        )
        self.active = any(enabled for _, enabled, _, _ in self._state)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Autocast) and self._state == other._state

    def __hash__(self) -> int:
        return hash(self._state)

    def matches_now(self) -> bool:
        """Whether the calling thread is in this state."""
        for t, enabled, dtype, _ in self._state:
            if torch.is_autocast_enabled(t) != enabled or (enabled and torch.get_autocast_dtype(t) != dtype):
                return False
        return True

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        """Enters this state for the calling thread."""
        with contextlib.ExitStack() as stack:
            if not self.matches_now():
                for t, enabled, dtype, cache in self._state:
                    stack.enter_context(torch.autocast(t, dtype=dtype, enabled=enabled, cache_enabled=cache))
            yield
