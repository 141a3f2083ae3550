"""One training step of the same model in three ways: plain backward, torch.utils.checkpoint, this runtime."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks._harness import alloc_count, competitors
from benchmarks._harness.action_bytes import ActionBytes, ByteRecorder
from benchmarks._harness.rounds import mirrored_rounds
from eae_runtime import EAERuntime
from eae_runtime.contrib.lm import lm_loss

PLAIN, CHECKPOINT, OURS = "plain backward", "torch.utils.checkpoint", "eae-runtime"


@dataclass(frozen=True)
class Measured:
    """Seconds a step (median), and the step's actions; None where bytes cannot be counted."""

    seconds: float
    actions: list[ActionBytes] | None

    @property
    def peak(self) -> int | None:
        """The step's peak in bytes, as `alloc_count` defines it."""
        return max(action.peak for action in self.actions) if self.actions else None


class Contestant:
    """A copy of the model with an optimizer of its own, trained in one of the three ways."""

    def __init__(self, name: str, model: nn.Sequential, x: torch.Tensor, targets: torch.Tensor) -> None:
        self.model = copy.deepcopy(model)
        self.x, self.targets = x, targets
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.close: Callable[[], None] = lambda: None
        blocks = list(self.model)
        last = len(blocks) - 1
        if name == OURS:
            self._train = self._with_runtime()
            self.kept, self.fused = [last], False
        elif name == CHECKPOINT:
            self._train = self._with_optimizer(competitors.checkpointed(blocks, reentrant=False, first=1, last=-1))
            self.kept, self.fused = [0, last], True
        else:
            self._train = self._with_optimizer(competitors.plain(blocks))
            self.kept, self.fused = list(range(len(blocks))), False

    def _with_runtime(self) -> Callable[[Any], Any]:
        runtime = EAERuntime(self.model, self.optimizer)
        self.close = runtime.close
        return lambda loss_fn: runtime.train_step(self.x, loss_fn, targets=self.targets)

    def _with_optimizer(self, gradients: competitors.Step) -> Callable[[Any], Any]:
        def train(loss_fn: Any) -> float:
            losses = []

            def loss_of(output: torch.Tensor) -> torch.Tensor:
                losses.append(loss_fn(output, self.targets))
                return losses[0]

            gradients(self.x, loss_of)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            return losses.pop().item()

        return train

    def timed(self) -> float:
        """Seconds of one step: forward, loss, backward, AdamW, clearing `.grad`."""
        start = time.perf_counter()
        self._train(lm_loss)
        return time.perf_counter() - start

    def actions(self, counter: alloc_count.Counter, others: int) -> list[ActionBytes]:
        """The bytes of one step, after a first that creates the optimizer's state.

        `others` are the bytes that the process held before this contestant was made. What it keeps between steps
        besides parameters and optimizer state counts: it is there during the step.
        """
        self.timed()
        resting = others + alloc_count.resting_bytes(self.model.parameters(), self.optimizer)
        recorder = ByteRecorder(counter, list(self.model), self.kept, resting, fused_rebuild=self.fused)
        return recorder.record(self._train, lm_loss, self.optimizer)


def compare(
    model: nn.Sequential, x: torch.Tensor, targets: torch.Tensor, counter: alloc_count.Counter | None, rounds: int
) -> dict[str, Measured]:
    """Runs the three in turn, `rounds` rounds forth and back, each on a copy of `model`, which stays as it was."""
    contestants: dict[str, Contestant] = {}
    actions: dict[str, list[ActionBytes] | None] = {}
    for name in (PLAIN, CHECKPOINT, OURS):
        gc.collect()  # what earlier work left in cycles must not go during the step
        others = counter.live() if counter else 0
        contestants[name] = Contestant(name, model, x, targets)
        actions[name] = contestants[name].actions(counter, others) if counter else None
    seconds = mirrored_rounds({name: contestant.timed for name, contestant in contestants.items()}, rounds)
    for contestant in contestants.values():
        contestant.close()
    return {name: Measured(median(seconds[name]), actions[name]) for name in contestants}


def gradients_differ(model: nn.Sequential, x: torch.Tensor, targets: torch.Tensor) -> list[str]:
    """Names of the parameters whose gradient through the runtime is not plain `loss.backward()`'s, bit for bit."""
    plain, ours = copy.deepcopy(model), copy.deepcopy(model)
    lm_loss(plain(x), targets).backward()
    with EAERuntime(ours) as runtime:
        runtime.train_step(x, lm_loss, targets=targets)
    expected = dict(plain.named_parameters())
    different = []
    for name, parameter in ours.named_parameters():
        reference = expected[name].grad
        if reference is None or parameter.grad is None or not torch.equal(reference, parameter.grad):
            different.append(name)
    return different
