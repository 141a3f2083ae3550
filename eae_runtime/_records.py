"""What a sweep remembers of its blocks: what surrounds them, what is known of each, and what a rebuild needs."""

from __future__ import annotations

import copy
from typing import Any

import torch

from . import _tree
from ._ambient import Autocast, Generators
from ._bits import same_bits, same_random
from ._structure import Structure

__all__ = ["Environment", "Facts", "Rebuilt", "Record", "RestartStep"]

# Runs of a block that are watched for random draws.
_WATCHED = 2


class RestartStep(Exception):
    """A block did something for the first time that its last run had not prepared for; it is remembered now. The step
    has to be undone and repeated."""


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

    __slots__ = ("_quiet", "autocast", "generators", "known", "reentered", "sparse", "structure")

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
        # Where the generators stand if the blocks that ran since then, those in `_quiet`, have drawn nothing.
        self.known: Any = None
        self._quiet: list[Facts] = []

    def before(self, facts: Facts, learning: bool) -> Any:
        """The generators' state for the rebuild of a block that is about to run; None for one that does not draw."""
        if self.sparse and facts.watched >= _WATCHED and not facts.draws and not learning:
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
        "differentiable",
        "draws",
        "learned",
        "leaves",
        "no_grad",
        "out_needs",
        "seen",
        "structure",
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
        # Which outputs require grad, and whether any does.
        self.out_needs: tuple[bool, ...] = ()
        self.differentiable = False
        # In a list that is replaced when they change: others keep what they have derived from it for as long as it is
        # the same one.
        self.leaves: list[torch.Tensor] = []


class Record:
    """What a rebuild needs beside the boundary: one run of one block."""

    __slots__ = ("autocast", "buffers", "facts", "in_shape", "needs", "out_meta", "out_shape", "random")

    def __init__(
        self, facts: Facts, in_shape: _tree.Shape, needs: tuple[bool, ...], random: Any, autocast: Autocast
    ) -> None:
        self.facts = facts
        self.in_shape = in_shape
        self.needs = needs
        self.random = random
        self.autocast = autocast
        # (dictionary of the module, name, the buffer, its pre-image)
        self.buffers: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = []
        self.out_shape: _tree.Shape = _tree.SINGLE
        self.out_meta: list[tuple[torch.Size, torch.dtype]] = []

    def for_input(self, needs: tuple[bool, ...]) -> Record:
        """The same run, rebuilt with gradients for other inputs."""
        if needs == self.needs:
            return self
        other = copy.copy(self)
        other.needs = needs
        return other

    def restore_buffers(self) -> None:
        """Puts the buffers that the run wrote back to what they were before it."""
        with torch.no_grad():
            for home, name, buffer, before in self.buffers:
                home[name] = buffer
                if not same_bits(buffer, before):
                    buffer.copy_(before)


class Rebuilt:
    """A block with its graph: `inputs` are the leaves at the input (None where no gradient is needed), `outputs` the
    distinct output tensors, `grad_outputs` those of them that require grad, by number."""

    __slots__ = ("inputs", "outputs")

    def __init__(self, inputs: list[torch.Tensor | None], outputs: list[torch.Tensor]) -> None:
        self.inputs = inputs
        self.outputs = outputs
