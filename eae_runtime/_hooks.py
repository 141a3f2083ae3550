"""Forward hooks inside a block: watchers are called once, in the forward; hooks that take part in the computation are
called in the rebuild too.

Note [Which hooks a rebuild calls]
    A rebuild runs the block's forward again, and a hook that only watches (counts, logs, collects) must not see that.
    A hook that returned a value, wrote to a tensor, switched `requires_grad`, put a hook on a tensor or gave its module
    another tensor has changed the computation: LoRA adapters, quantizers, `enable_input_require_grads`, the older
    spectral norm work like that. So every run notes which
    hooks did any of it, and its rebuild calls those alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules import module as nn_module

from . import _tree

__all__ = ["EVERYWHERE", "HookKey", "homes_of", "look", "noted", "restricted"]

Home = dict[int, Any]

# (id of the dictionary, the hook's id in it)
HookKey = tuple[int, int]


EVERYWHERE: tuple[Home, Home] = (nn_module._global_forward_pre_hooks, nn_module._global_forward_hooks)


def homes_of(own: Sequence[Home]) -> Sequence[Home]:
    """The dictionaries of forward hooks that have hooks in them: `own`, and those that hold for all modules."""
    for home in EVERYWHERE:
        if home:
            return [*own, *[home for home in EVERYWHERE if home]]
    return own


def look(module: torch.nn.Module, values: tuple[Any, ...]) -> list[Any]:
    """What a hook can change about the tensors that it is given and those of its module."""
    tensors = _tree.flatten(values)[0]
    own = [t for t in module.__dict__.values() if isinstance(t, torch.Tensor)]
    own += [t for home in (module._parameters, module._buffers) for t in home.values() if t is not None]
    seen: list[Any] = [(id(t), t._version) for t in own if not t.is_inference()]
    for tensor in tensors:
        version = 0 if tensor.is_inference() else tensor._version
        seen.append((version, tensor.requires_grad, len(tensor._backward_hooks or ())))
    return seen


def _noting(hook: Callable[..., Any], key: HookKey, live: set[HookKey]) -> Callable[..., Any]:
    def call(module: torch.nn.Module, *values: Any) -> Any:
        before = look(module, values)
        result = hook(module, *values)
        if result is not None or look(module, values) != before:
            live.add(key)
        return result

    return call


@contextmanager
def noted(homes: Sequence[Home], live: set[HookKey]) -> Iterator[None]:
    """While the block runs, adds the hooks that take part in the computation to `live`."""
    saved = [(home, dict(home)) for home in homes]
    for home, hooks in saved:
        for number, hook in hooks.items():
            home[number] = _noting(hook, (id(home), number), live)
    try:
        yield
    finally:
        for home, hooks in saved:
            for number, hook in hooks.items():
                # One that removed itself stays away.
                if number in home:
                    home[number] = hook


@contextmanager
def restricted(homes: Sequence[Home], live: set[HookKey]) -> Iterator[None]:
    """While the block runs, only the hooks in `live` are there."""
    saved = [(home, dict(home)) for home in homes]
    for home, hooks in saved:
        for number in hooks:
            if (id(home), number) not in live:
                del home[number]
    try:
        yield
    finally:
        for home, hooks in saved:
            present = dict(home)
            home.clear()
            for number, hook in hooks.items():
                if number in present or (id(home), number) not in live:
                    home[number] = hook
            for number, hook in present.items():
                home.setdefault(number, hook)
