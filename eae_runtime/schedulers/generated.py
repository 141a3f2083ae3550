"""Schedulers whose order is a list of actions from the Go core."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from .. import _bridge
from .base import BaseScheduler, Gradients, ReverseContext, reverse_block

__all__ = ["GeneratedScheduler"]


class GeneratedScheduler(BaseScheduler):
    """A scheduler that names a generator of the Go core.

    generator: its name. num_microbatches: parts of the batch. step_payload: what SchedulerStep events carry beside the
    block.
    """

    generator: str = ""
    num_microbatches: int = 1
    step_payload: ClassVar[dict[str, Any]] = {}

    def schedule(self, spec: dict[str, Any]) -> str:
        """The validated schedule for a chain, as text: the forward list, a line break, the reverse list. The fields of
        `spec` are those of the Go package `sched`. Raises ConfigError, PlanError or ScheduleError."""
        return str(_bridge.call("SchedGenerate", self.generator, json.dumps(spec)))

    def run(self, context: ReverseContext) -> Gradients:
        """Walks the generator's reverse list over a context that somebody else filled. (The runtime itself does not
        come here: it walks the list with boundaries dropped at their last use.)"""
        rows = context.initial_adjoint.tensor.shape[0] if context.initial_adjoint.tensor.dim() else 1
        chunk = -(-rows // max(1, min(self.num_microbatches, rows)))
        parts = max(1, -(-rows // chunk))
        blocks = [{"name": name, "needs_vjp": True} for name in context.block_names]
        spec = {"blocks": blocks, "microbatches": parts, "keep_last": False, "keep_output": True, "passes": False}
        reverse = self.schedule(spec).partition("\n")[2]
        gradients: Gradients = {}
        adjoints = {}
        for m in range(parts):
            adjoints[m] = context.initial_adjoint.clone()
            if parts > 1:
                adjoints[m].tensor = context.initial_adjoint.tensor[m * chunk : (m + 1) * chunk]
        for token in reverse.split():
            i, kind, microbatch = split_token(token)
            if kind != "V":
                continue
            m = int(microbatch)
            x = context.boundary_store.get(i)
            payload = dict(self.step_payload)
            if parts > 1:
                x = x[m * chunk : (m + 1) * chunk]
                payload["microbatch"] = m
            adjoints[m], updates = reverse_block(context, i, adjoints[m], x, payload)
            self._accumulate(gradients, updates)
        return gradients


def split_token(token: str) -> tuple[int, str, str]:
    """`3R1` -> (3, "R", "1")."""
    kind = "".join(c for c in token if c.isalpha())
    block, _, microbatch = token.partition(kind)
    return int(block), kind, microbatch
