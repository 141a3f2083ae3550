"""CorePass: the Python face of a pass that the Go core runs."""

from __future__ import annotations

from typing import Any, ClassVar

from ..adjoint import AdjointState
from .base import Context, EAEPass
from .core_chain import CoreChain, Report, core_context

__all__ = ["CorePass", "apply_core"]


class CorePass(EAEPass):
    """A pass of the core, by its registered name and parameters.

    Consecutive ones in a pipeline are applied in one call. A subclass that overrides `process` is an ordinary Python
    pass, which may call `super().process`.
    """

    core_name: ClassVar[str]

    # See Note [A pass has one state].
    home: CoreChain | None = None
    slot: int = 0
    _own: CoreChain | None = None
    _saved: Any = None

    def params(self) -> dict[str, Any]:
        """The parameters that the core's pass is made with, as JSON values. Read at every use, so attributes may
        change."""
        return {}

    def idle(self, context: Context) -> bool:
        """Whether the pass would change and report nothing now; the core is then not asked."""
        return False

    def note(self, adjoint: AdjointState, values: dict[str, Any], context: Context) -> None:
        """Takes what the core reported of this pass into the adjoint that it made."""

    def process(self, adjoint: AdjointState, context: Context | None = None) -> AdjointState:
        context = {} if context is None else context
        if self.idle(context):
            return adjoint.clone()
        if self._own is None or self._own.key != CoreChain.key_of((self,)):
            self._own = CoreChain((self,))
        [new] = apply_core(self._own, (self,), [adjoint], context)
        return new

    def state(self) -> Any:
        if self.home is not None:
            self._saved = self.home.state()[self.slot]
        elif self._saved is None and self.stateful:
            # That of a pass which has not run yet: a failed first step goes back to it.
            fresh = CoreChain((self,))
            self._saved = fresh.state()[0]
            fresh.close()
        return self._saved

    def load_state(self, state: Any) -> None:
        if not self.stateful:
            super().load_state(state)
            return
        self._saved, self.home = state, None

    def leave(self) -> None:
        """Takes the state out of the core, so that its home can be closed, and closes the chain of standalone use."""
        if self.home is not None:
            self._saved, self.home = self.state(), None
        if self._own is not None:
            self._own.close()
            self._own = None

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: everything but the handles, with the state as it is now."""
        fields = {**self.__dict__, "_saved": self.state() if self.stateful else None}
        for handle in ("home", "slot", "_own"):
            fields.pop(handle, None)
        return fields


def apply_core(
    chain: CoreChain, passes: tuple[CorePass, ...], adjoints: list[AdjointState], context: Context
) -> list[AdjointState]:
    """Applies a chain made for these passes to the adjoints of one boundary. The new adjoints have the passes in no
    history yet."""
    chain.settle(passes)
    noting = [type(item).note is not CorePass.note and not item.idle(context) for item in passes]
    asked = core_context(
        context,
        adjoints[0].layer_id,
        report=any(noting),
        stats=any(notes and item.core_name == "logging" for notes, item in zip(noting, passes, strict=True)),
    )
    tensors, reports = chain.apply([adjoint.tensor for adjoint in adjoints], asked)
    made = []
    for adjoint, tensor in zip(adjoints, tensors, strict=True):
        new = adjoint.clone()
        new.tensor = tensor
        made.append(new)
    for item, notes, report in zip(passes, noting, reports, strict=False):
        for index, new in enumerate(made if notes else ()):
            item.note(new, _share(report, index, len(made)), context)
    return made


def _share(report: Report, index: int, count: int) -> dict[str, Any]:
    """What a report says of one tensor: its entry of each list, and all that holds for the boundary as a whole."""
    return {
        key: value[index] if isinstance(value, list) and len(value) == count else value
        for key, value in report.items()
        if key != "name"
    }
