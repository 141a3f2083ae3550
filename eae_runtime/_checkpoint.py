"""What a runtime carries from step to step, as a dictionary that `torch.save` writes and `torch.load` reads.

The model, the optimizer and the LR scheduler have state dictionaries of their own.
"""

from __future__ import annotations

import copy
import importlib
from typing import TYPE_CHECKING, Any

import torch

from ._ambient import host_sources, read_source, write_source
from .errors import ConfigError

if TYPE_CHECKING:
    from .runtime import EAERuntime

__all__ = ["load_state", "state_of"]

VERSION = 1


def state_of(runtime: EAERuntime) -> dict[str, Any]:
    """See EAERuntime.state_dict."""
    scaler = runtime.config.loss_scaler
    names = _names(runtime)
    pending = runtime._training.pending
    return {
        "version": VERSION,
        "blocks": list(runtime.block_names),
        "passes": _pass_names(runtime),
        "pass_state": copy.deepcopy(runtime.pipeline.state()),
        "pass_state_before": copy.deepcopy(runtime._training.states_before) if pending else None,
        "random": _plain(runtime._chain.generators.read()),
        "host_random": {name: _plain(read_source(source)) for name, source in host_sources().items()},
        "seed": runtime._seed,
        "steps": runtime.steps,
        "pending": pending,
        "accumulate": runtime._training.accumulate,
        "gradients": {n: p.grad.clone() for n, p in names.items() if p.grad is not None} if pending else {},
        "loss_scaler": None if scaler is None else scaler.state_dict(),
    }


def load_state(runtime: EAERuntime, state: dict[str, Any]) -> None:
    """See EAERuntime.load_state_dict."""
    if not isinstance(state, dict) or "version" not in state:
        raise ConfigError("this is no state of an EAERuntime: it has no version")
    if state["version"] != VERSION:
        raise ConfigError(f"the state has version {state['version']}, this package reads version {VERSION}")
    for name, here in (("blocks", list(runtime.block_names)), ("passes", _pass_names(runtime))):
        if state[name] != here:
            raise ConfigError(f"the state was saved with the {name} {state[name]}, this runtime has {here}")
    scaler = runtime.config.loss_scaler
    if (state["loss_scaler"] is None) != (scaler is None):
        has, lacks = ("the state", "the runtime") if scaler is None else ("the runtime", "the state")
        raise ConfigError(f"{has} has a loss scaler and {lacks} has none; give RuntimeConfig(loss_scaler=...) or none")
    names = _names(runtime)
    unknown = [name for name in state["gradients"] if name not in names]
    if unknown:
        raise ConfigError(f"the state has gradients of {unknown}, which this runtime's blocks do not have")
    random = _random(state["random"], runtime)
    hosts = _host_states(state["host_random"])
    before = runtime.pipeline.state()
    try:
        runtime.pipeline.load_state(copy.deepcopy(state["pass_state"]))
        if scaler is not None:
            scaler.load_state_dict(state["loss_scaler"])
    except BaseException:
        runtime.pipeline.load_state(before)
        raise
    training = runtime._training
    training.pending, training.accumulate = state["pending"], state["accumulate"]
    training.states_before = copy.deepcopy(state["pass_state_before"])
    if state["pending"]:
        for name, parameter in names.items():
            grad = state["gradients"].get(name)
            parameter.grad = None if grad is None else grad.to(parameter.device, copy=True)
    runtime._seed, runtime.steps = state["seed"], state["steps"]
    runtime._chain.generators.write(random)
    for source, saved in hosts:
        write_source(source, saved)


def _names(runtime: EAERuntime) -> dict[str, torch.Tensor]:
    """All parameters by block and path; a shared one under its first name."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, module in runtime._named_modules():
        for path, parameter in module.named_parameters():
            found.setdefault(id(parameter), (f"{name}.{path}" if name else path, parameter))
    return dict(found.values())


def _pass_names(runtime: EAERuntime) -> list[str]:
    return [str(getattr(item, "name", None) or type(item).__name__) for item in runtime.pipeline.passes]


def _plain(state: Any) -> Any:
    """A generator's state in types that torch.load(weights_only=True) reads."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [_plain(value) for value in state]
    if isinstance(state, torch.device):
        return str(state)
    return state.tolist() if hasattr(state, "tolist") and not isinstance(state, torch.Tensor) else state


def _random(state: Any, runtime: EAERuntime) -> Any:
    """A saved state of torch's generators as this runtime's take it: on the CPU, wherever the checkpoint was loaded to,
    and without devices that are not used here."""
    cpu, others = (state, []) if isinstance(state, torch.Tensor) else state
    found = [(torch.device(device), one.cpu()) for device, one in others]
    here = runtime._chain.generators.devices
    used = [(device, one) for device, one in found if device in here]
    return (cpu.cpu(), used) if here else cpu.cpu()


def _host_states(states: dict[str, Any]) -> list[tuple[Any, Any]]:
    """The generators of the host's side with their saved states."""
    if "numpy.random" in states:
        # Its state has to be there when the first block draws.
        try:
            importlib.import_module("numpy.random")
        except ImportError:
            raise ConfigError("the state has one of numpy.random, and NumPy is not installed here") from None
    sources = host_sources()
    return [(sources[name], _source_state(saved)) for name, saved in states.items()]


def _source_state(state: Any) -> Any:
    """A state of Python's generator (a list of three) or of NumPy's (a dictionary) as they take it."""
    if isinstance(state, list):
        version, numbers, gauss = state
        return version, tuple(numbers), gauss
    import numpy

    inner = dict(state["state"])
    if isinstance(inner.get("key"), list):
        inner["key"] = numpy.array(inner["key"], dtype=numpy.uint32)
    return {**state, "state": inner}
