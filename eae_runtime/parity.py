"""`verify`: plain PyTorch and the runtime side by side on one model and batch, compared bit for bit.

Note [What is compared]
    Every run starts from the same parameters, buffers, attributes, generators and training flags, and from no
    gradients. The runtime runs several rounds, since its first runs of a block learn: in the first a block's graph is
    looked at, in the second it is run with and without a graph, from the third on it is in its steady state. Plain
    PyTorch runs twice: what differs between these two is not blamed on the runtime.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from . import _tree
from ._ambient import same_source
from ._autograd_driver import driver_of, unwrap, wrap
from ._bits import different_places, same_bits
from ._graph_sweep import call_model
from ._outcome import Bench, Outcome, counting_hooks
from ._peak import peak_bytes
from .blockcall import BlockCall
from .config import RuntimeConfig
from .errors import ConfigError
from .runtime import EAERuntime

__all__ = ["BlockLine", "Difference", "Report", "verify"]

_ROUNDS = 3

# What the kinds of differences are called, by the field of an Outcome.
_TENSORS = {
    "outputs": "output",
    "loss": "loss",
    "gradients": "gradient",
    "input_gradients": "input gradient",
    "buffers": "buffer",
    "parameters": "parameter",
}

LossFn = Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class Difference:
    """One thing that the runtime left otherwise than plain PyTorch.

    kind      "output", "loss", "gradient", "lost leaf", "extra gradient", "input gradient", "buffer", "attribute",
              "parameter", "random state", "hook count" or "error"
    name      of the parameter, buffer, generator, hook ...
    detail    what differs
    relative  largest difference by the largest value, for tensors of floating point
    close     whether torch.testing.assert_close accepts it at its defaults
    round     in which of the runtime's rounds it was first seen, from 1
    """

    kind: str
    name: str
    detail: str
    relative: float | None = None
    close: bool = False
    round: int = 1

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.detail}"


@dataclass(frozen=True)
class BlockLine:
    """One block.

    forwards, rebuilds  how often it ran and was rebuilt in the last round
    kept                why it keeps its graph instead, if it does
    compared            rebuilds of all rounds whose outputs were compared with the forward's (verify_rebuild)
    skipped             why that cannot be done for this block, if it cannot
    """

    name: str
    forwards: int
    rebuilds: int
    kept: str | None
    compared: int = 0
    skipped: str | None = None


@dataclass
class Report:
    """What `verify` found. Print it for a table.

    exactness   "bitwise", "tolerance" (all differences are within torch.testing.assert_close's defaults) or "different"
    unstable    what differs between two runs of plain PyTorch, and is not compared
    peak_plain, peak  most bytes that a step holds beyond parameters, see `_peak.peak_bytes`
    """

    driver: str
    differences: list[Difference] = field(default_factory=list)
    unstable: list[str] = field(default_factory=list)
    blocks: list[BlockLine] = field(default_factory=list)
    compared: dict[str, int] = field(default_factory=dict)
    peak_plain: int = 0
    peak: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing differs, bit for bit."""
        return not self.differences

    @property
    def exactness(self) -> str:
        """The class that this comparison shows."""
        if self.ok:
            return "bitwise"
        return "tolerance" if all(d.close for d in self.differences) else "different"

    @property
    def rebuilt(self) -> int:
        """How many blocks were rebuilt in the last round."""
        return sum(block.rebuilds > 0 for block in self.blocks)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        found = asdict(self)
        found.update(ok=self.ok, exactness=self.exactness, rebuilt=self.rebuilt)
        return found

    def __str__(self) -> str:
        lines = [f"{'ok' if self.ok else 'DIFFERENT'}: {self.exactness}, {self.driver} driver"]
        whole = not any(d.kind == "error" for d in self.differences)
        lines += self._compared() if whole else []
        lines += [f"  * {difference} (round {difference.round})" for difference in self.differences]
        lines += [f"  plain PyTorch is not deterministic: {name}" for name in self.unstable]
        return "\n".join(lines + (self._blocks() if whole else []))

    def _compared(self) -> list[str]:
        lines = []
        for kind, count in self.compared.items():
            wrong = sum(d.kind == kind for d in self.differences)
            compared = count - sum(name.startswith(kind + " ") for name in self.unstable)
            lines.append(f"  {kind:<16} {compared:>5} compared  {f'{wrong} differ' if wrong else 'all the same'}")
        return lines

    def _blocks(self) -> list[str]:
        lines = [f"  blocks rebuilt   {self.rebuilt:>5} of {len(self.blocks)}"]
        lines += [f"  kept: {b.name}, {b.kept}" for b in self.blocks if b.kept is not None]
        lines.append(f"  rebuilds         {sum(b.compared for b in self.blocks):>5} compared with their forwards")
        lines += [f"  not compared: {b.name}, {b.skipped}" for b in self.blocks if b.skipped is not None]
        ratio = f" ({self.peak / self.peak_plain:.2f} x)" if self.peak_plain else ""
        lines.append(f"  step peak        {_size(self.peak)}, plain {_size(self.peak_plain)}{ratio}")
        return lines


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def verify(
    model: nn.Module | list[nn.Module],
    inputs: Any,
    loss_fn: LossFn,
    config: RuntimeConfig | None = None,
    *,
    driver: str | None = None,
    blocks: list[str] | None = None,
) -> Report:
    """Runs plain PyTorch and the runtime from the same state on the same batch and compares what they leave.

    inputs: a tensor for `model(x)`, a tuple for `model(*inputs)`, a dictionary for `model(**inputs)`; a chain
    (nn.Sequential, nn.ModuleList, list of modules) is given the value as it is.
    loss_fn: called with the output, returns a scalar.
    driver: "chain" (EAERuntime; on a module with a forward of its own that is the autograd driver too) or "autograd"
    (`wrap`, with `blocks` as there); None takes "chain" for chains and "autograd" for other modules. `report.driver`
    tells which one it was.

    The model is given back exactly as it was: parameters, `.grad`, buffers, attributes, flags, hooks, generators. An
    exception of plain PyTorch is raised; one of the runtime is a difference of kind "error", but for ConfigError, which
    is raised. Passes, `grad_clip_norm`, `random_streams` and `boundary_precision` change gradients on purpose, and are
    shown as differences.
    """
    chain = isinstance(model, (nn.Sequential, nn.ModuleList, list, tuple))
    driver = driver if driver is not None else ("chain" if chain else "autograd")
    if driver not in ("chain", "autograd"):
        raise ConfigError(f"driver={driver!r}: allowed is None, 'chain', 'autograd'")
    modules = model if isinstance(model, nn.Module) else nn.ModuleList(model)
    bench = Bench(modules, inputs)
    call = _caller(model, chain)
    report = Report(driver)
    side: _Side | None = None
    plain = _Plain(call, loss_fn)
    try:
        plain.before_backward = bench.learn_loose
        plain.step(bench)
        plain.before_backward = None
        expected, again = plain.outcome(bench), plain.outcome(bench)
        report.unstable = [f"{d.kind} {d.name}" for d in compare(again, expected)]
        report.compared = _counted(expected)
        report.peak_plain = _peak(plain, bench)
        bench.begin()
        try:
            side = (
                _Chain(model, config, loss_fn)
                if driver == "chain"
                else _Wrapped(modules, config, loss_fn, call, blocks)
            )
            _run_ours(side, bench, expected, report)
        except ConfigError:
            raise
        except Exception as error:
            report.differences.append(Difference("error", type(error).__name__, str(error)))
    finally:
        try:
            if side is not None:
                side.close()
        finally:
            bench.restore()
    return report


def _run_ours(side: _Side, bench: Bench, expected: Outcome, report: Report) -> None:
    report.driver = side.driver or report.driver
    unstable = set(report.unstable)
    seen: set[tuple[str, str]] = set()
    for number in range(1, _ROUNDS + 1):
        before = [(c.forwards, c.rebuilds) for c in side.calls()]
        for found in compare(side.outcome(bench), expected, number):
            if f"{found.kind} {found.name}" not in unstable and (found.kind, found.name) not in seen:
                seen.add((found.kind, found.name))
                report.differences.append(found)
        before += [(0, 0)] * (len(side.calls()) - len(before))
        report.blocks = [_line(c, f, r, side.config) for c, (f, r) in zip(side.calls(), before, strict=True)]
    report.peak = _peak(side, bench)


def _line(call: BlockCall, forwards: int, rebuilds: int, config: RuntimeConfig | None) -> BlockLine:
    """The block's line after a round. forwards, rebuilds: its counts before the round."""
    config = config if config is not None else RuntimeConfig()
    skipped = None
    if call.kept is not None:
        skipped = "it keeps its graph"
    elif call.rebuilds == 0:
        skipped = "it is not rebuilt"
    elif config.boundary_precision is not None:
        skipped = f"it is rebuilt from inputs rounded to {config.boundary_precision} (boundary_precision)"
    elif config.verify_rebuild == "off":
        skipped = 'verify_rebuild="off"'
    return BlockLine(call.name, call.forwards - forwards, call.rebuilds - rebuilds, call.kept, call.compared, skipped)


def _peak(side: _Side, bench: Bench) -> int:
    inputs = bench.begin()
    return peak_bytes(lambda: side.run(inputs), list(dict.fromkeys(p.device for p in bench.modules.parameters())))


def _counted(outcome: Outcome) -> dict[str, int]:
    counts = {kind: len(getattr(outcome, name)) for name, kind in _TENSORS.items()}
    counts |= {
        "attribute": len(outcome.attributes),
        "random state": len(outcome.random),
        "hook count": len(outcome.hooks),
    }
    return {kind: count for kind, count in counts.items() if count}


def _caller(model: Any, chain: bool) -> Callable[[Any], Any]:
    def call(inputs: Any) -> Any:
        if chain:
            for block in model:
                inputs = block(inputs)
            return inputs
        return call_model(model, inputs)

    # An nn.Sequential is called as a whole, for its own hooks.
    return model if isinstance(model, nn.Sequential) else call


class _Side:
    """One way to take a step. `run` leaves gradients in `.grad` and keeps outputs and loss."""

    outputs: Any
    loss: torch.Tensor
    # Which one it turned out to be, where that is not what was asked for.
    driver: str | None = None
    config: RuntimeConfig | None = None

    def run(self, inputs: Any) -> None:
        """Forward and backward."""
        raise NotImplementedError

    def calls(self) -> list[BlockCall]:
        """The runtime's blocks."""
        return []

    def close(self) -> None:
        """Gives back what this side holds, and the model."""

    def step(self, bench: Bench) -> Outcome:
        """A step from the beginning, and what it left."""
        with counting_hooks(bench.modules, bench.names()) as counts:
            self.run(bench.begin())
        return bench.collect(self.outputs, self.loss, counts)

    def outcome(self, bench: Bench) -> Outcome:
        """The same, without keeping the graph."""
        made = self.step(bench)
        self.loss = self.loss.detach()
        self.outputs = None
        return made


class _Plain(_Side):
    def __init__(self, call: Callable[[Any], Any], loss_fn: LossFn) -> None:
        self._call = call
        self._loss_fn = loss_fn
        self.before_backward: Callable[[torch.Tensor], None] | None = None

    def run(self, inputs: Any) -> None:
        with torch.enable_grad():
            self.outputs = self._call(inputs)
            self.loss = self._loss_fn(self.outputs)
            if self.before_backward is not None:
                self.before_backward(self.loss)
            self.loss.backward()


class _Wrapped(_Plain):
    def __init__(
        self,
        model: nn.Module,
        config: RuntimeConfig | None,
        loss_fn: LossFn,
        call: Callable[[Any], Any],
        blocks: list[str] | None,
    ) -> None:
        super().__init__(call, loss_fn)
        self.config = config
        self._model = wrap(model, config, blocks)
        self._calls = driver_of(model).calls

    def calls(self) -> list[BlockCall]:
        return self._calls

    def close(self) -> None:
        unwrap(self._model)


class _Chain(_Side):
    def __init__(self, model: Any, config: RuntimeConfig | None, loss_fn: LossFn) -> None:
        self.config = config
        self._runtime = EAERuntime(model, None, config)
        self._loss_fn = loss_fn
        if self._runtime._driver is not None:
            self.driver = "autograd"

    def run(self, inputs: Any) -> None:
        def loss_fn(output: Any) -> torch.Tensor:
            tensors, shape = _tree.flatten(output)
            self.outputs = _tree.unflatten([t.detach().clone() for t in tensors], shape)
            self.loss = self._loss_fn(output)
            return self.loss

        self._runtime.train_step(inputs, loss_fn)
        self.loss = self.loss.detach()

    def calls(self) -> list[BlockCall]:
        return self._runtime._chain.calls

    def close(self) -> None:
        self._runtime.close()


# -- comparing -----------------------------------------------------------------------------------------------------


def compare(ours: Outcome, plain: Outcome, number: int = 1) -> list[Difference]:
    """What differs between two steps."""
    found: list[Difference] = []
    for name, kind in _TENSORS.items():
        found += _compare_tensors(kind, getattr(ours, name), getattr(plain, name), number)
    for name in sorted(ours.attributes.keys() | plain.attributes.keys()):
        a, b = ours.attributes.get(name), plain.attributes.get(name)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            found += _compare_tensors("attribute", {name: a}, {name: b}, number)
        elif isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor) or a != b:
            found.append(Difference("attribute", name, f"{a!r} for {b!r}", round=number))
    for name, state in plain.random.items():
        if not same_source(ours.random[name], state):
            found.append(Difference("random state", name, "other numbers would be drawn next", round=number))
    for name, count in plain.hooks.items():
        if ours.hooks.get(name) != count:
            detail = f"called {ours.hooks.get(name)} times, by plain PyTorch {count} times"
            found.append(Difference("hook count", name, detail, round=number))
    return found


def _compare_tensors(
    kind: str, ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], number: int
) -> list[Difference]:
    found = []
    for name in sorted(plain.keys() - ours.keys()):
        lost = "lost leaf" if kind == "gradient" else kind
        found.append(Difference(lost, name, "there is none; plain PyTorch has one", round=number))
    for name in sorted(ours.keys() - plain.keys()):
        extra = "extra gradient" if kind == "gradient" else kind
        found.append(Difference(extra, name, "plain PyTorch has none", round=number))
    for name, b in plain.items():
        a = ours.get(name)
        if a is not None and not same_bits(a, b):
            found.append(_tensor_difference(kind, name, a, b, number))
    return found


def _tensor_difference(kind: str, name: str, a: torch.Tensor, b: torch.Tensor, number: int) -> Difference:
    if a.shape != b.shape or a.dtype != b.dtype:
        return Difference(kind, name, f"{a.dtype}{list(a.shape)} for {b.dtype}{list(b.shape)}", round=number)
    close = True
    try:
        torch.testing.assert_close(a, b, equal_nan=True)
    except AssertionError:
        close = False
    wide = torch.complex128 if a.is_complex() else torch.float64
    off, top = (a.to(wide) - b.to(wide)).abs().max().item(), b.to(wide).abs().max().item()
    relative = off / top if top and math.isfinite(off) else off
    places = different_places(a, b)
    return Difference(
        kind, name, f"{places} of {b.numel()} values differ, by {relative:.2g} of the largest", relative, close, number
    )
