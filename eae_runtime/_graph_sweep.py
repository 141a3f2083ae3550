"""One batch through a model whose own forward keeps the order: the autograd driver under EAERuntime.

The model's blocks are wrapped (see `_autograd_driver`), its forward is called as it is, and the engine walks back. What
is left here is what a step owns: microbatches, the loss, gradients into `.grad` or into a dictionary, and undoing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from . import _tree
from ._ambient import Generators, host_sources, read_source, write_source
from ._leaves import accumulate, capture, graph_leaves, reaches
from ._losses import Loss, no_gradient, pass_context, total_loss
from ._sharing import Collector
from ._state import Entry, Watch
from ._structure import Structure
from .errors import PlanError
from .pipeline import AdjointPipeline

__all__ = ["GraphSweep", "Whole", "call_model"]


def call_model(model: nn.Module, value: Any) -> Any:
    """A tuple is the model's arguments, a dictionary its keyword arguments, anything else its one argument."""
    if isinstance(value, dict):
        return model(**value)
    return model(*value) if isinstance(value, tuple) else model(value)


class Whole:
    """What is known of a whole model from step to step: its structure and which of its state a forward changes."""

    def __init__(self, model: nn.Module, generators: Generators, pipeline: AdjointPipeline) -> None:
        self.model = model
        self.generators = generators
        self.pipeline = pipeline
        self.structure = Structure(model)
        self._written: set[tuple[int, str]] | None = None
        self._changing: dict[tuple[int, str], tuple[dict[str, Any], str, bool]] = {}

    def refresh(self) -> None:
        """Looks at the model anew if it is not what it was."""
        if not self.structure.holds():
            self.structure = Structure(self.model)
            self._written = None

    def watch(self) -> Watch:
        """Looks at the model's state before a step. Frozen parameters are left out: the blocks look after theirs, and a
        forward that writes to one outside of its blocks is not worth a copy of all of them."""
        return Watch(self.structure, self._written, self._changing, frozen=False)

    def note(self, watch: Watch) -> tuple[list[Entry], list[str]]:
        """What has changed since, and the names of buffers that have and had no copy. They are watched from now on."""
        entries, keys, lost = watch.changes()
        self._written = keys | (self._written or set())
        return entries, lost


class GraphSweep:
    """One batch. `inputs` are the microbatches' inputs. After a failure, `undo()` puts state and generators back;
    `lost` then names the buffers that it could not put back: large ones that were written for the first time."""

    where = None

    def __init__(self, whole: Whole, inputs: Sequence[Any]) -> None:
        self.parts = len(inputs)
        self.lost: list[str] = []
        self.before_vjp: Callable[[Sequence[torch.Tensor]], None] | None = None
        self._whole = whole
        whole.refresh()
        self._inputs = inputs
        self._outputs: list[Any] = []
        self._losses: list[tuple[torch.Tensor, float]] = []
        self._loss: Loss | None = None
        self._collector = Collector(None)
        self._watch = whole.watch()
        self._random = whole.generators.read()
        self._host = [
            (source, read_source(source)) for source in (*host_sources().values(), *whole.structure.generators)
        ]

    def set_loss(self, loss: Loss, collector: Collector) -> None:
        """The loss, and where the leaves' gradients go."""
        self._loss = loss
        self._collector = collector

    def go_forward(self) -> None:
        """The forwards, unless each microbatch goes forward and back before the next one."""
        if not self._one_by_one():
            self._outputs = [call_model(self._whole.model, value) for value in self._inputs]

    def _one_by_one(self) -> bool:
        return self.parts > 1 and self._loss is not None and self._loss.targets is not None

    def go_back(self) -> None:
        """Loss and backward."""
        if not self._one_by_one():
            self._backward(self._joined(), 0)
            return
        for number, value in enumerate(self._inputs):
            self._backward(call_model(self._whole.model, value), number)

    def _joined(self) -> Any:
        if len(self._outputs) == 1:
            return self._outputs[0]
        parts = [_tree.flatten(output) for output in self._outputs]
        if any(not t.dim() for tensors, _ in parts for t in tensors):
            raise PlanError(
                f"{self.parts} microbatches were asked for, but the model gives a tensor without a batch dimension "
                "(its own loss?); give targets= and a loss of the output's rows, or one microbatch"
            )
        joined = [torch.cat(tensors) for tensors in zip(*(tensors for tensors, _ in parts), strict=True)]
        return _tree.unflatten(joined, parts[0][1])

    def _backward(self, output: Any, number: int) -> None:
        assert self._loss is not None
        weight = 1.0 if self._loss.weights is None else self._loss.weights[number]
        self._outputs = []
        if weight == 0.0:
            return
        loss = self._checked(output, number)
        if self.before_vjp is not None:
            self.before_vjp(graph_leaves([loss]))
        context = self._pass_context(output, number)
        del output
        with self._whole.pipeline.within(context):
            accumulate([loss], [self._loss.cotangent(loss, weight)])
        self._losses.append((loss.detach(), weight))

    def _pass_context(self, output: Any, number: int) -> dict[str, Any]:
        """What the model's own backward cannot tell the passes. Where all microbatches go back at once, each block's
        adjoint is one of them, and which one is not known."""
        first = _tree.flatten(output)[0][0]
        alone = self.parts == 1 or self._one_by_one()
        return pass_context(self._loss, self.parts, number, first.shape[0] if alone and first.dim() else 0)

    def _checked(self, output: Any, number: int) -> torch.Tensor:
        assert self._loss is not None
        loss = self._loss(output, number)
        tensors = _tree.flatten(output)[0]
        if not loss.requires_grad:
            if not any(t.requires_grad for t in tensors):
                loss.backward()  # raises plain PyTorch's own error
            raise no_gradient()
        if not reaches(loss, [t for t in tensors if t.requires_grad]):
            raise no_gradient()
        return loss

    # -- split -----------------------------------------------------------------------------------------------------

    def whole_output(self) -> Any:
        """The output for the whole batch, detached."""
        tensors, shape = _tree.flatten(self._joined())
        return _tree.unflatten([t.detach() for t in tensors], shape)

    def gradients_into(self, output: Any, found: dict[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """The loss of `output`, a value of `whole_output`, and the gradients of all leaves into `found`."""
        made = self._joined()
        tensors = _tree.flatten(made)[0]
        given, shape = _tree.flatten(output)
        fresh = [g.detach().requires_grad_(t.requires_grad) for g, t in zip(given, tensors, strict=True)]
        loss = self._checked(_tree.unflatten(fresh, shape), 0)
        inputs = [t for t in fresh if t.requires_grad]
        known = {id(t) for t in inputs}
        beside = [leaf for leaf in graph_leaves([loss]) if id(leaf) not in known]
        assert self._loss is not None
        context = self._pass_context(made, 0)
        first = capture([loss], [self._loss.cotangent(loss, 1.0)], [*inputs, *beside])
        roots = [t for t in tensors if t.requires_grad]
        pairs = [(root, grad) for root, grad in zip([*roots, *beside], first, strict=True) if grad is not None]
        self._outputs = []
        leaves = list({id(leaf): leaf for leaf in (*graph_leaves(roots), *beside)}.values())
        del made
        with self._whole.pipeline.within(context):
            grads = capture([root for root, _ in pairs], [grad for _, grad in pairs], leaves)
        found.update({leaf: grad for leaf, grad in zip(leaves, grads, strict=True) if grad is not None})
        return loss.detach()

    # -- ends ------------------------------------------------------------------------------------------------------

    def total_loss(self) -> torch.Tensor:
        """The loss of the batch."""
        return total_loss(self._losses)

    def finish(self) -> None:
        """Remembers what the step has changed of the model's state."""
        self._whole.note(self._watch)

    def undo(self) -> None:
        """Puts state and generators back to what they were before the sweep."""
        entries, self.lost = self._whole.note(self._watch)
        for entry in entries:
            entry.restore()
        self._whole.generators.write(self._random)
        for source, state in self._host:
            write_source(source, state)
        self.release()

    def release(self) -> None:
        """Drops the graph."""
        self._outputs = []
