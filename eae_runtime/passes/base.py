"""EAEPass: the interface of a pass."""

from __future__ import annotations

from typing import Any

from ..adjoint import AdjointState
from ..errors import PassError

__all__ = ["Context", "EAEPass"]

Context = dict[str, Any]


class EAEPass:
    """One stage of the adjoint pipeline. Subclass it, set `name`, write `process`.

    `process(adjoint, context)` returns the adjoint that travels on. It must not change the one it was given, nor that
    one's tensor: both may be in use elsewhere (autograd returns views). `adjoint.clone()` gives a copy whose `tensor`
    can be set.

    `context` holds what the runtime knows here: block_index, block_name, microbatch, rows, weight, event_bus; for a
    boundary of several tensors also tensor_index; with a loss scaler also loss_scale. Under `wrap` the training code's
    own microbatches and scale are not known: block_index, block_name and event_bus alone. Who calls a pass or pipeline
    may add step. Standalone it may be empty.

    A pass that carries something from step to step sets `stateful = True` and gives it out by `state()` as plain
    objects and tensors, and takes it back by `load_state(state)`.
    """

    name: str = "EAEPass"
    stateful: bool = False

    def process(self, adjoint: AdjointState, context: Context | None = None) -> AdjointState:
        raise NotImplementedError(f"{type(self).__name__} does not define process(adjoint, context)")

    def __call__(self, adjoint: AdjointState, context: Context | None = None) -> AdjointState:
        """`process`, and the pass's name in the history of what it returns."""
        result = self.process(adjoint, {} if context is None else context)
        if not isinstance(result, AdjointState):
            raise PassError(f"pass {self.name}: process returned {type(result).__name__}, not an AdjointState")
        if result is adjoint:
            result = adjoint.clone()
        result.record(self.name)
        return result

    def state(self) -> Any:
        """What the pass carries from step to step; None if nothing."""
        return None

    def load_state(self, state: Any) -> None:
        """Continues from a value of :meth:`state`."""
        if state is not None:
            raise PassError(f"pass {self.name} carries no state, but was given one to load")
