"""Which rank holds which block, what stands in for a block of another rank, and which parameters blocks of several
ranks share."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from . import _bridge
from .errors import ConfigError, DistributedError, EAEError

__all__ = ["Foreign", "SharedLeaf", "free", "groups_of", "local_ties", "place"]


def place(block_ranks: Sequence[int] | None, blocks: int, world: int) -> list[int]:
    """The rank of each block; None deals them evenly. Raises ConfigError for a wrong length, a rank that is not
    there, ranks that fall, and a rank without a block."""
    spec: dict[str, Any] = {"blocks": [{}] * blocks, "world": world}
    given = "" if block_ranks is None else f"block_ranks={list(block_ranks)}: "
    if block_ranks is not None:
        spec["ranks"] = list(block_ranks)
    try:
        text = _bridge.call("SchedGenerate", "distributed", json.dumps(spec))
    except EAEError as error:
        raise ConfigError(f"{given}{error}") from None
    ranks = [0] * blocks
    busy = set()
    for number, line in enumerate(text.split("\n")):
        for token in line.split():
            block, _, rest = token.partition("F" if "F" in token else "C")
            if rest and block.isdigit():
                ranks[int(block)] = number // 2
                busy.add(number // 2)
    idle = sorted(set(range(world)) - busy)
    if idle:
        raise ConfigError(
            f"{given or 'block_ranks: '}rank {idle[0]} of {world} has no block ({blocks} blocks in all); give every "
            "rank at least one, or start fewer processes"
        )
    return ranks


class Foreign(nn.Module):
    """Stands where a block of another rank would be."""

    def __init__(self, index: int, rank: int) -> None:
        super().__init__()
        self.index = index
        self.rank = rank

    def forward(self, *_: Any) -> NoReturn:
        raise DistributedError(f"block {self.index} is on rank {self.rank} and cannot run here")


@dataclass
class SharedLeaf:
    """A parameter that blocks of several ranks read. leaf: this rank's copy, None where no block of this rank reads
    it."""

    names: tuple[str, ...]
    blocks: list[int]
    leaf: nn.Parameter | None

    def print_of(self) -> Any:
        """Shape, dtype and a checksum of the values, to compare between ranks."""
        if self.leaf is None:
            return None
        data = self.leaf.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return tuple(self.leaf.shape), str(self.leaf.dtype), zlib.crc32(data.numpy().tobytes())


def _named(block: nn.Module, index: int) -> Iterable[tuple[str, nn.Parameter]]:
    for path, parameter in block.named_parameters(remove_duplicate=False):
        yield f"{index}.{path}", parameter


def local_ties(blocks: Sequence[nn.Module]) -> list[list[str]]:
    """The names ("BLOCK.path") of each parameter that several blocks have registered, as far as this rank's objects
    show it."""
    names: dict[int, list[str]] = {}
    owners: dict[int, set[int]] = {}
    for index, block in enumerate(blocks):
        for name, parameter in _named(block, index):
            names.setdefault(id(parameter), []).append(name)
            owners.setdefault(id(parameter), set()).add(index)
    return [names[key] for key, where in owners.items() if len(where) > 1]


def groups_of(
    ties: Iterable[Sequence[str]], blocks: Sequence[nn.Module], ranks: Sequence[int], rank: int
) -> list[SharedLeaf]:
    """The parameters that blocks of several ranks share, from the ties that all ranks know of, in an order that is
    the same on all. Raises ConfigError for a name that does not exist or names that are different parameters on this
    rank."""
    root: dict[str, str] = {}

    def find(name: str) -> str:
        while root.setdefault(name, name) != name:
            name = root[name]
        return name

    for tie in ties:
        for name in tie[1:]:
            root[find(name)] = find(tie[0])
    members: dict[str, list[str]] = {}
    for name in sorted(root):
        members.setdefault(find(name), []).append(name)
    own = dict(pair for index, block in enumerate(blocks) if ranks[index] == rank for pair in _named(block, index))
    found = []
    for names in members.values():
        numbers = [int(name.partition(".")[0]) for name in names]
        if any(n >= len(blocks) for n in numbers):
            raise ConfigError(f"shared={names}: the chain has {len(blocks)} blocks")
        here = [name for name, n in zip(names, numbers, strict=True) if ranks[n] == rank]
        missing = [name for name in here if name not in own]
        if missing:
            raise ConfigError(
                f"shared: block {missing[0].partition('.')[0]} has no parameter {missing[0]!r} (names are BLOCK.path)"
            )
        leaves = {id(own[name]): own[name] for name in here}
        if len(leaves) > 1:
            raise ConfigError(f"shared={names}: {here} are different parameters on rank {rank}; make them one object")
        if len({ranks[n] for n in numbers}) > 1:
            found.append(SharedLeaf(tuple(names), sorted(set(numbers)), next(iter(leaves.values()), None)))
    return found


def free(blocks: Sequence[nn.Module], own: Sequence[nn.Module], optimizer: torch.optim.Optimizer | None) -> int:
    """Replaces the parameters and buffers of the blocks that are not in `own` by meta tensors (one that an own block
    has as well stays) and takes the parameters out of the optimizer, with their state. Returns the bytes of what was
    let go."""
    mine = {id(b) for b in own}
    keep = {id(t) for b in own for t in (*b.parameters(), *b.buffers())}
    gone: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for block in blocks:
        if id(block) in mine:
            continue
        for module in block.modules():
            for home in (module._parameters, module._buffers):
                for name, tensor in home.items():
                    if tensor is None or id(tensor) in keep or tensor.is_meta:
                        continue
                    if id(tensor) not in gone:
                        ghost: torch.Tensor = torch.empty_like(tensor, device="meta", requires_grad=False)
                        if isinstance(tensor, nn.Parameter):
                            ghost = nn.Parameter(ghost, requires_grad=tensor.requires_grad)
                        gone[id(tensor)] = tensor, ghost
                    home[name] = gone[id(tensor)][1]  # type: ignore[assignment]
    if optimizer is not None:
        away = {id(p) for b in blocks if id(b) not in mine for p in b.parameters()} - keep
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in gone or id(parameter) in away:
                    optimizer.state.pop(parameter, None)
            group["params"][:] = [p for p in group["params"] if id(p) not in gone and id(p) not in away]
    freed = sum(tensor.untyped_storage().nbytes() for tensor, _ in gone.values())
    for tensor, _ in gone.values():
        tensor.grad = None
    return freed
