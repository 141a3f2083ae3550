"""From a model to the list of its blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from .errors import ConfigError, TensorTypeError

__all__ = ["BlockDecomposer", "EAEBlock"]


class EAEBlock(nn.Module):
    """Optional base class of a block. Any `nn.Module` can be a block; this one adds two attributes to set.

    eae_name     the block's name in events, errors and the profiler (default: type name and number)
    eae_backend  the backend that this block wants, one of BackendManager.SUPPORTED (default: the runtime's)
    """

    eae_name: str | None = None
    eae_backend: str | None = None


class BlockDecomposer:
    """Turns a model into its blocks, in the order in which they run. The blocks are the model's own modules, not
    copies.

    A module that stands in a chain twice is two blocks with shared parameters. The blocks are called one by one, so
    hooks on the container itself do not run.
    """

    @staticmethod
    def from_sequential(seq: nn.Sequential) -> list[nn.Module]:
        """The members of a Sequential."""
        if not isinstance(seq, nn.Sequential):
            raise TensorTypeError(f"from_sequential takes an nn.Sequential, got {type(seq).__name__}")
        return _checked(seq, foreign=False)

    @staticmethod
    def from_list(modules: Sequence[nn.Module]) -> list[nn.Module]:
        """The modules given, as a new list."""
        return _checked(modules, foreign=False)

    @staticmethod
    def decompose(model: Any, *, foreign: bool = False) -> list[nn.Module]:
        """The blocks of a Sequential, a ModuleList or a list of modules; any other module is one block.

        A subclass of Sequential with a `forward` of its own does more than run its members, so it too is one block.
        With `foreign`, None is allowed in place of a block that lives on another rank.

        Raises TensorTypeError (a TypeError) for anything else, ConfigError (a ValueError) for zero blocks.
        """
        if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
            return _checked(model, foreign)
        if isinstance(model, (nn.ModuleList, list, tuple)):
            return _checked(model, foreign)
        if isinstance(model, nn.Module) and not isinstance(model, (nn.ModuleDict, nn.ParameterList, nn.ParameterDict)):
            return [model]
        raise TensorTypeError(
            f"{type(model).__name__} is not a model that can be cut into blocks; give an nn.Sequential, "
            "an nn.ModuleList, a list of nn.Module, or one nn.Module"
        )


def _checked(modules: Iterable[Any], foreign: bool) -> list[nn.Module]:
    blocks = list(modules)
    if not blocks:
        raise ConfigError("the model has zero blocks; give at least one nn.Module")
    for i, block in enumerate(blocks):
        if isinstance(block, nn.Module) or (foreign and block is None):
            continue
        raise TensorTypeError(
            f"block {i} is a {type(block).__name__}, not an nn.Module; "
            "put a plain function into the forward of a small module"
        )
    return blocks
