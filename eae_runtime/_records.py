"""What a sweep remembers of its blocks: what surrounds them, what is known of each, and what a rebuild needs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import _tree
from ._ambient import Autocast, Generators, host_sources, read_source, same_source, write_source
from ._bits import same_random
from ._fingerprint import Fingerprint
from ._hooks import HookKey
from ._pins import Pins
from ._state import Entry, put_back
from ._structure import Structure
from .errors import RebuildMismatchError

__all__ = ["Environment", "Facts", "Rebuilt", "Record", "Remembered", "RestartStep", "WATCHED"]

# Runs of a block that are watched for draws from generators.
WATCHED = 2


class Remembered(RebuildMismatchError):
    """A block did something new after its forward; it is known now: forward and backward, run again, are exact."""


class RestartStep(Exception):
    """A block did something for the first time that its last run had not prepared for; it is remembered now. The step
    has to be undone and repeated."""


def _no_check(_: int) -> int:
    return 0


class Environment:
    """What surrounds the blocks of one forward sweep: the generators in use and the autocast state of the caller.

    Note [Blocks that do not draw]
        A generator's state is 5 KB, and to copy it for every block costs a small block a tenth of its time. Where
        `sparse` is set, a block that was twice seen to draw nothing is run without a snapshot, and its rebuild sets
        none. A run of such blocks has to leave the generators as they were: that is checked before the next snapshot,
        and by `verify` at the end of a sweep's forward. If one of them has drawn after all, all of them are remembered
        as drawing and the step is repeated.

    `reentered` says whether everything is still so right now, without autocast and with grad mode on: then a rebuild
    has nothing to enter.
    """

    __slots__ = ("_quiet", "autocast", "check", "generators", "known", "reentered", "sparse", "structure")

    def __init__(
        self,
        generators: Generators,
        device_types: tuple[str, ...],
        autocast: Autocast | None = None,
        structure: Structure | None = None,
    ) -> None:
        """autocast: a state seen before, used again if it is still so (equal states are then the same object).
        structure: that of all blocks that are going to run, as it is now."""
        self.generators = generators
        self.structure = structure
        now = Autocast(device_types)
        self.autocast = autocast if autocast == now and autocast is not None else now
        self.reentered = False
        self.sparse = False
        # How closely a block is looked at in this sweep, by its number: see `_checks`.
        self.check: Callable[[int], int] = _no_check
        # Where the generators stand if the blocks that ran since then, those in `_quiet`, have drawn nothing.
        self.known: Any = None
        self._quiet: list[Facts] = []

    def before(self, facts: Facts, learning: bool) -> Any:
        """The generators' state for the rebuild of a block that is about to run; None for one that does not draw."""
        if self.sparse and facts.watched >= WATCHED and not facts.draws and not learning:
            if self.known is None:
                self.known = self.generators.read()
            self._quiet.append(facts)
            return None
        state = self.generators.read()
        if self._quiet:
            self._check(state)
        return state

    def after(self, facts: Facts, before: Any) -> Any:
        """Learns whether the block drew, from the state before it; gives what the rebuild needs of that."""
        self.known = self.generators.read()
        if not facts.draws:
            facts.watched += 1
            facts.draws = not same_random(before, self.known)
        return before if facts.draws or not self.sparse else None

    def verify(self) -> None:
        """See Note [Blocks that do not draw]. Raises RestartStep."""
        if self._quiet:
            self._check(self.generators.read())

    def _check(self, state: Any) -> None:
        quiet, self._quiet = self._quiet, []
        if not same_random(state, self.known):
            for facts in quiet:
                facts.draws = True
            raise RestartStep("a block draws random numbers that it did not draw before")

    def look(self) -> None:
        """Sets `reentered`; call it before the first rebuild of a run of rebuilds."""
        self.reentered = (
            self.structure is not None
            and self.structure.training_is(self.structure.training)
            and not self.autocast.active
            and torch.is_grad_enabled()
            and self.autocast.matches_now()
        )


class Facts:
    """What is known of a block in one mode, for one class of input shapes."""

    __slots__ = (
        "__weakref__",
        "changing",
        "differentiable",
        "draws",
        "hooked",
        "leaks",
        "learned",
        "leaves",
        "live_hooks",
        "no_grad",
        "out_needs",
        "outer",
        "seen",
        "sources",
        "structure",
        "uses",
        "watched",
        "writes",
        "written_buffers",
    )

    def __init__(self, structure: Structure) -> None:
        # Forwards without a kept graph so far, and whether any forward has shown which inputs are written.
        self.seen = 0
        self.learned = False
        self.structure = structure
        # Whether a run was seen to draw random numbers, and how many were watched for it.
        self.draws = False
        self.watched = 0
        self.no_grad: bool | None = None
        self.writes: set[int] = set()
        self.written_buffers: set[tuple[int, str]] | None = None
        # See `_state.Watch`.
        self.changing: dict[tuple[int, str], tuple[dict[str, Any], str, bool]] = {}
        # The forward hooks that took part in the computation so far (see Note [Which hooks a rebuild calls]).
        self.live_hooks: set[HookKey] = set()
        # Generators of the host's side that the block draws from or holds.
        self.sources: list[Any] = list(structure.generators)
        # How often the graph uses each input and then each leaf, at first sight.
        self.uses: list[int] = []
        # Whether somebody outside has kept a tensor of the block's graph.
        self.leaks = False
        # Whether the block puts a hook on an input.
        self.hooked = False
        # Whether the block's graph goes on into one that was there before the block ran.
        self.outer = False
        # Which outputs require grad, and whether any does.
        self.out_needs: tuple[bool, ...] = ()
        self.differentiable = False
        # In a list that is replaced when they change: others keep what they have derived from it for as long as it is
        # the same one.
        self.leaves: list[torch.Tensor] = []


class Record:
    """What a rebuild needs beside the boundary: one run of one block."""

    __slots__ = (
        "autocast",
        "facts",
        "hooks",
        "in_shape",
        "needs",
        "out_meta",
        "out_shape",
        "pins",
        "prints",
        "random",
        "sources",
        "state",
    )

    def __init__(
        self, facts: Facts, in_shape: _tree.Shape, needs: tuple[bool, ...], random: Any, autocast: Autocast
    ) -> None:
        self.facts = facts
        self.in_shape = in_shape
        self.needs = needs
        self.random = random
        self.autocast = autocast
        # What the run changed of the modules' state.
        self.state: Sequence[Entry] = ()
        # Generators of the host's side that the block draws from, with their states before the run.
        self.sources: Sequence[tuple[Any, Any]] = ()
        self.pins: Pins | None = None
        # The forward hooks that took part in the run; None where there were no hooks.
        self.hooks: set[HookKey] | None = None
        # Of the outputs and of the inputs, where the rebuild is going to be compared.
        self.prints: tuple[list[Fingerprint], list[Fingerprint]] | None = None
        self.out_shape: _tree.Shape = _tree.SINGLE
        self.out_meta: Sequence[tuple[torch.Size, torch.dtype]] = ()

    def for_input(self, needs: tuple[bool, ...]) -> Record:
        """The same run, rebuilt with gradients for other inputs."""
        if needs == self.needs:
            return self
        other = copy.copy(self)
        other.needs = needs
        return other

    def read_sources(self, watching: bool) -> None:
        """Notes the host's generators before the run: those that the block is known to draw from; `watching`, all."""
        sources = self.facts.sources
        if watching:
            sources = sources + [s for s in host_sources().values() if not any(s is known for known in sources)]
        self.sources = [(source, read_source(source)) for source in sources]

    def note_sources(self) -> None:
        """After a watched run: remembers the generators that it drew from, and keeps the states of those alone."""
        known = self.facts.sources
        drawn = []
        for source, state in self.sources:
            if any(source is one for one in known):
                drawn.append((source, state))
            elif not same_source(state, read_source(source)):
                known.append(source)
                drawn.append((source, state))
        self.sources = drawn

    def write_sources(self) -> None:
        """Sets the host's generators to where they stood before the run."""
        for source, state in self.sources:
            write_source(source, state)

    def undo(self) -> None:
        """Puts what the run changed of the modules' state, and the host's generators, back to what they were before
        it."""
        put_back(self.state)
        self.write_sources()


class Rebuilt:
    """A block with its graph: `inputs` are the leaves at the input (None where no gradient is needed), `outputs` the
    distinct output tensors, `entries` what the block was called with in place of the inputs (views of them under
    autocast): uses are counted there."""

    __slots__ = ("entries", "inputs", "outputs")

    def __init__(
        self, inputs: list[torch.Tensor | None], outputs: list[torch.Tensor], entries: list[torch.Tensor | None]
    ) -> None:
        self.inputs = inputs
        self.outputs = outputs
        # Where the gradients of an input's uses meet: the input, or a view of it that the block was given.
        self.entries = entries
