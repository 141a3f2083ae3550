"""Ways to take one training step of a model, compared with plain PyTorch bit for bit. Runs in a worker.

The comparison is written apart from the package's own `verify`, so that one can catch the other.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests_py"))

from models import CASES
from real_models import MODELS

STEPS = 3

# Chains of tests_py/models.py beside the real models.
CHAINS = ["mlp", "cnn", "transformer", "tied language model", "cross attention", "noise", "buffers", "lstm"]

# A step: (model, inputs, loss_fn, optimizer) -> loss.
Step = Callable[[nn.Module, Any, Any, torch.optim.Optimizer], torch.Tensor]


def names() -> list[str]:
    """All models, chains first."""
    return [*CHAINS, *MODELS]


def build(name: str) -> tuple[nn.Module, Any, Any]:
    """The model, its inputs and its loss."""
    torch.manual_seed(0)
    one = CASES[name] if name in CASES else MODELS[name]
    model = one.make()
    return model.train(), (one.x() if name in CASES else one.inputs()), one.loss


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(model, nn.Sequential):
        return model(inputs)
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def plain(model: nn.Module, inputs: Any, loss_fn: Any, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    loss = loss_fn(call(model, inputs))
    loss.backward()
    optimizer.step()
    return loss.detach()


class Way:
    """One way to train, made anew for each model: `prepare` gets the model once, `step` takes a step."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self._keep: Any = None

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        way = self.spec["way"]
        if way == "checkpoint":
            return self._checkpointed(model)
        if way == "0.1.1":
            return self._old(model, optimizer)
        return self._ours(model, optimizer)

    def _checkpointed(self, model: nn.Module) -> Step:
        reentrant = self.spec["reentrant"]
        for block in blocks_of(model):
            inner = block.forward
            block.forward = lambda *a, inner=inner, **k: checkpoint(inner, *a, use_reentrant=reentrant, **k)
        return plain

    def _old(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        from . import runtimes

        engine = runtimes.old_engine([*model] if isinstance(model, nn.Sequential) else [model], optimizer)

        def step(_: nn.Module, inputs: Any, loss_fn: Any, __: Any) -> torch.Tensor:
            loss, gradients = engine.compute_gradients(inputs, loss_fn)
            engine.apply_gradients(gradients)
            optimizer.step()
            return loss.detach()

        return step

    def _ours(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        import eae_runtime

        config = eae_runtime.RuntimeConfig(**self.spec["config"])
        if self.spec["way"] == "wrap":
            eae_runtime.wrap(model, config)
            return plain
        runtime = self._keep = eae_runtime.EAERuntime(model, None, config)

        def step(_: nn.Module, inputs: Any, loss_fn: Any, __: Any) -> torch.Tensor:
            values: list[torch.Tensor] = []

            def kept(output: Any) -> torch.Tensor:
                loss = loss_fn(output)
                values.append(loss.detach())
                return loss

            runtime.train_step(inputs, kept)
            optimizer.step()
            return values[-1]

        return step


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks that ours would find: the children of a chain, else the repeated layers."""
    if isinstance(model, nn.Sequential):
        return list(model)
    from eae_runtime._block_finder import repeated_layers

    return [module for _, module in repeated_layers(model)]


class Comparison:
    """Runs in a worker: `of(name)` says how a way's three steps differ from plain's."""

    def __init__(self, **spec: Any) -> None:
        self.spec = spec
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")

    def of(self, name: str) -> dict[str, Any]:
        """{"raises": text} or {"bitwise": bool, "relative": largest relative error, "worst": its name}."""
        try:
            return self._compare(name)
        except Exception as error:
            return {"raises": f"{type(error).__name__}: {error}".split("\n")[0][:160]}

    def _compare(self, name: str) -> dict[str, Any]:
        model, inputs, loss_fn = build(name)
        other = copy.deepcopy(model)
        way = Way(self.spec)
        pair = [(m, torch.optim.SGD(m.parameters(), lr=0.01)) for m in (model, other)]
        steps: list[Step] = [plain, way.prepare(*pair[1])]
        worst = (0.0, "")
        for number in range(STEPS):
            left = []
            for (one, optimizer), step in zip(pair, steps, strict=True):
                optimizer.zero_grad()
                torch.manual_seed(number)
                fresh = pytree.tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, inputs)
                left.append({"loss": step(one, fresh, loss_fn, optimizer), **state(one)})
            worst = max(worst, difference(*left))
        return {"bitwise": worst[1] == "", "relative": worst[0], "worst": worst[1]}


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients, parameters, buffers and the random state."""
    found = {f"gradient {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    found.update({f"value {n}": t for n, t in [*model.named_parameters(), *model.named_buffers()]})
    return {**{n: t.detach().clone() for n, t in found.items()}, "random state": torch.get_rng_state()}


def difference(theirs: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative error and its name; (0.0, "") where every bit is the same."""
    if theirs.keys() != ours.keys():
        return float("inf"), f"lost {sorted(theirs.keys() ^ ours.keys())[0]}"
    worst = (0.0, "")
    for name, a in theirs.items():
        b = ours[name]
        if a.shape == b.shape and torch.equal(bits(a), bits(b)):
            continue
        wide = torch.complex128 if a.is_complex() else torch.float64
        off = (a.to(wide) - b.to(wide)).abs().max() / a.to(wide).abs().max().clamp_min(1e-300)
        # Other bits of equal values (0.0 and -0.0) count too.
        worst = max(worst, (max(off.item(), 1e-300), name))
    return worst


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()).contiguous() if tensor.is_complex() else tensor.contiguous()
