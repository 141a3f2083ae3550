"""The chain that a runtime walks: its blocks, the parts that it reports to, and what follows from how the blocks are
made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from ._ambient import Autocast, Generators
from ._sharing import SharedLeaves
from ._structure import Attributes, Structure
from .blockcall import BlockCall
from .boundary_store import BoundaryStore
from .errors import BlockError
from .events import EventBus
from .pipeline import AdjointPipeline
from .profiler import Profiler
from .trace import Trace

__all__ = ["Chain"]


@dataclass
class Chain:
    """What a sweep runs on. Call `refresh` before each sweep.

    structure   of all blocks together: one question a step tells whether any of them has changed
    version     how often it has; whatever is derived from it may be kept as long as this stays
    parameters  of all blocks, each once
    autocast    the state in which the last sweep ran
    verify      RuntimeConfig.verify_rebuild
    hidden      blocks that turned out to have leaves which are not among their parameters
    """

    calls: list[BlockCall]
    store: BoundaryStore
    pipeline: AdjointPipeline
    events: EventBus
    profiler: Profiler
    trace: Trace | None
    generators: Generators
    device_types: tuple[str, ...]
    step_payload: dict[str, Any]
    verify: str = "off"
    hidden: set[int] = field(default_factory=set)
    autocast: Autocast | None = None
    version: int = 0
    # Readers of leaves that blocks of several ranks share: (block, leaf), for blocks of this rank and of others.
    _elsewhere: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    _attributes: Attributes = field(init=False)

    def __post_init__(self) -> None:
        self._modules = nn.ModuleList([call.module for call in self.calls])
        self._look()

    def refresh(self) -> None:
        """Looks at the blocks anew if they are not what they were. Raises BlockError under parametrize.cached()."""
        if parametrize._cache_enabled:
            raise BlockError(
                "parametrize.cached() is on: weights that blocks share through its cache have a graph that no block "
                "owns. Leave it out around the runtime, which computes them anew in each block"
            )
        if not self.structure.holds():
            for call in self.calls:
                call.refresh()
            self.version += 1
            self._look()
        elif not self._attributes.same():
            for call in self.calls:
                call.refresh()
            self._attributes = Attributes(self.structure.modules)
        if self.structure.lazy:
            raise BlockError(
                "the model has parameters without a shape (lazy modules); run it once under torch.no_grad() before the "
                "first step"
            )

    def _look(self) -> None:
        self.structure = Structure(self._modules)
        self._attributes = Attributes(self.structure.modules)
        owners: dict[int, set[int]] = {}
        unique: dict[int, nn.Parameter] = {}
        for call in self.calls:
            for parameter in call.parameters:
                unique[id(parameter)] = parameter
                owners.setdefault(id(parameter), set()).add(call.index)
        self.parameters = list(unique.values())
        self._known = set(unique)
        # By block, its trainable parameters that other blocks have registered too.
        self._co_owned: dict[int, list[torch.Tensor]] = {}
        for call in self.calls:
            for parameter in call.parameters:
                if parameter.requires_grad and len(owners[id(parameter)]) > 1:
                    self._co_owned.setdefault(call.index, []).append(parameter)
        self._last_sharing: tuple[list[int], list[list[torch.Tensor]], SharedLeaves, list[torch.Tensor]] | None = None

    def set_elsewhere(self, readers: list[tuple[int, torch.Tensor]]) -> None:
        """Tells of leaves that blocks on other ranks read too: pairs of a block and a leaf, with this rank's own
        blocks."""
        if [(b, id(leaf)) for b, leaf in readers] != [(b, id(leaf)) for b, leaf in self._elsewhere]:
            self._elsewhere = readers
            self._last_sharing = None

    def sharing(
        self, blocks: list[int], leaves: list[list[torch.Tensor]], unit: int, beside: Sequence[torch.Tensor]
    ) -> tuple[SharedLeaves, list[torch.Tensor]]:
        """Which leaves several blocks read, and the leaves that are no parameters of the chain.

        blocks, leaves: the blocks that ran and what each was seen to read, in lists that are replaced when they change.
        unit, beside: the unit (see SharedLeaves) that reads the loss's leaves, and these.
        """
        last = self._last_sharing
        if last is not None and not beside and last[0] == blocks and all(map(is_, last[1], leaves)):
            return last[2], last[3]
        readers: list[tuple[int, Sequence[torch.Tensor]]] = [
            (b, [*read, *self._co_owned.get(b, ())]) for b, read in zip(blocks, leaves, strict=True)
        ]
        readers.append((unit, beside))
        readers += [(b, (leaf,)) for b, leaf in self._elsewhere]
        strangers = [leaf for _, read in readers for leaf in read if id(leaf) not in self._known]
        shared = SharedLeaves(readers)
        if not beside:
            self._last_sharing = blocks, leaves, shared, strangers
        return shared, strangers
