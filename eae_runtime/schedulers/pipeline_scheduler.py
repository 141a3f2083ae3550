"""Microbatches on one process."""

from __future__ import annotations

from ..errors import ConfigError
from .generated import GeneratedScheduler

__all__ = ["PipelineScheduler"]


class PipelineScheduler(GeneratedScheduler):
    """Runs the batch in microbatches. With `targets=` in `train_step` each goes forward and back before the next one
    starts, so the activation peak falls with their number; without, every forward runs, then one loss, then the reverse
    pass a microbatch at a time.

    num_microbatches: parts of ceil(rows / parts) rows; more parts than rows are clamped.
    """

    name = "PipelineScheduler"
    generator = "pipeline"

    def __init__(self, num_microbatches: int = 1) -> None:
        if not isinstance(num_microbatches, int):
            raise ConfigError(f"num_microbatches={num_microbatches!r}: allowed is a whole number from 1")
        self.num_microbatches = max(1, num_microbatches)
