"""Finds the repeated layers of a model: the modules that `wrap` makes into blocks."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

from torch import nn

from .errors import ConfigError

__all__ = ["find_blocks", "repeated_layers"]

Named = list[tuple[str, nn.Module]]


def find_blocks(model: nn.Module, names: Iterable[str] | None = None) -> Named:
    """The blocks with their names in `model.named_modules()`.

    names: names of modules, or patterns with `*` and `?` for them; None looks for repeated layers: see
    `repeated_layers`. Raises ConfigError when nothing is found, a name stands for no module, or one block lies within
    another.
    """
    if names is None:
        blocks = repeated_layers(model)
        if not blocks:
            raise ConfigError(
                f"{type(model).__name__} has no repeated layers (an nn.Sequential, or an nn.ModuleList of one class): "
                "say which modules are the blocks, blocks=['encoder.*', 'head']"
            )
        return blocks
    if isinstance(names, str):
        raise ConfigError(f"blocks={names!r}: give a list of names, blocks=[{names!r}]")
    modules = dict(model.named_modules())
    chosen: dict[str, nn.Module] = {}
    for name in names:
        found = [key for key in modules if key and _matches(key, name)]
        if not found:
            some = ", ".join(repr(key) for key, _ in zip((k for k in modules if k), range(8), strict=False))
            raise ConfigError(f"blocks: {name!r} is no module of {type(model).__name__}; there are {some} ...")
        chosen.update((key, modules[key]) for key in found)
    blocks = [(key, modules[key]) for key in modules if key in chosen]
    for outer, module in blocks:
        for inner, other in blocks:
            if module is not other and any(other is part for part in module.modules()):
                raise ConfigError(f"blocks: {inner!r} lies within {outer!r}; a block cannot hold another one")
    if not blocks:
        raise ConfigError("blocks=[] names no module; leave it out to have the repeated layers found")
    return blocks


def _matches(key: str, pattern: str) -> bool:
    """Whether a module's name matches, part by part: `*` does not go across a dot."""
    parts, wanted = key.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def repeated_layers(model: nn.Module) -> Named:
    """The layers that a model repeats; empty if there are none.

    Of a model that is an nn.Sequential, its children (one that is an nn.Sequential of one class stands for its own
    children). Else the members of the longest nn.ModuleList or nn.Sequential of one class, with every other module of
    that class which stands in such a list; then the same for the longest list in what is left, and so on. Else the
    children of the longest nn.Sequential within the model.
    """
    if isinstance(model, nn.Sequential):
        return _children("", model)
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if name and isinstance(module, (nn.ModuleList, nn.Sequential)) and _of_one_class(module)
    ]
    lists.sort(key=lambda item: -len(item[1]))
    found: dict[str, nn.Module] = {}
    for _, longest in lists:
        kind = type(longest[0])
        for name, module in lists:
            if type(module[0]) is kind:
                members = [(f"{name}.{key}", child) for key, child in module.named_children()]
                if all(_apart(child, found.values()) for _, child in members):
                    found.update(members)
    if not found:
        inner = [(n, m) for n, m in model.named_modules() if n and isinstance(m, nn.Sequential) and len(m) > 1]
        if inner:
            name, longest_mix = max(inner, key=lambda item: len(item[1]))
            return _children(name + ".", longest_mix)
    order = {name: n for n, (name, _) in enumerate(model.named_modules())}
    unique: dict[int, tuple[str, nn.Module]] = {}
    for name in sorted(found, key=lambda key: order.get(key, len(order))):
        unique.setdefault(id(found[name]), (name, found[name]))
    return list(unique.values())


def _children(prefix: str, model: nn.Sequential) -> Named:
    blocks: dict[int, tuple[str, nn.Module]] = {}
    for key, child in model.named_children():
        name = prefix + key
        inner = child if isinstance(child, nn.Sequential) and _of_one_class(child) else None
        for found, module in [(name, child)] if inner is None else _children(name + ".", inner):
            blocks.setdefault(id(module), (found, module))
    return list(blocks.values())


def _of_one_class(module: nn.ModuleList | nn.Sequential) -> bool:
    """Whether a list's members are layers of one class. Lists of lists are not: their members' members are."""
    children = list(module)
    if len(children) < 2 or len({type(child) for child in children}) > 1:
        return False
    if any(isinstance(c, nn.ModuleList) or (isinstance(c, nn.Sequential) and _of_one_class(c)) for c in children):
        return False
    return any(True for _ in children[0].parameters())


def _apart(module: nn.Module, others: Iterable[nn.Module]) -> bool:
    """Whether a module neither holds one of the others nor lies within one. It may be one of them."""
    parts = set(module.modules())
    return not any(other is not module and (other in parts or module in set(other.modules())) for other in others)
