"""The 12-block language model: step peak and time of a training step against plain, checkpoint and 0.1.1.

Width 512, 8 query and 4 key/value heads, SwiGLU 1408, tied head, vocabulary 8192, batch 8 x 512, float32, AdamW. A step
is forward, loss, backward, AdamW and clearing `.grad`; each competitor runs in a process of its own, in turn.
`_harness/alloc_count.py` says what a step's peak is.

    python benchmarks/lm.py [--pairs 9] [--side-pairs 2] [--quick]

`--pairs` is for ours against checkpoint, which the claims are about (a pair is four steps, about 50 s); the others get
`--side-pairs`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from benchmarks._harness import alloc_count, competitors, peer_011, report, rounds, runtimes
from benchmarks._harness.surround import surrounded
from benchmarks._harness.verdict import paired_ratio
from benchmarks._harness.worker_client import Worker

FULL = {"vocab": 8192, "dim": 512, "depth": 12, "heads": 8, "kv_heads": 4, "hidden": 1408, "batch": 8, "length": 512}
QUICK = {"vocab": 1024, "dim": 128, "depth": 4, "heads": 4, "kv_heads": 2, "hidden": 352, "batch": 4, "length": 128}
NAMES = {
    "ours": "eae-runtime, default",
    "checkpoint": "checkpoint a block, non-reentrant",
    "plain": "plain backward",
    "011": "eae-runtime 0.1.1 (embedding left out)",
    "host": "eae-runtime, async, host tier",
}
TIME_LIMIT = 1.03


class Competitor:
    """Runs in a worker: one way to train the model."""

    def __init__(self, name: str, size: dict[str, int]) -> None:
        torch.manual_seed(0)
        lm = runtimes.language_model()
        shape = {key: size[key] for key in ("vocab", "dim", "depth", "heads", "kv_heads", "hidden")}
        self.model = lm.build_lm(**shape, max_seq_len=size["length"])
        self.blocks: list[nn.Module] = list(self.model)
        tokens = torch.randint(size["vocab"], (size["batch"], size["length"] + 1))
        self.x, self.targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.loss_fn = lm.lm_loss
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self.last_loss = float("nan")
        self.counter = alloc_count.open_counter()
        self._step = getattr(self, f"_make_{name}")()

    def _make_plain(self) -> Any:
        return self._with_optimizer(competitors.plain(self.blocks))

    def _make_checkpoint(self) -> Any:
        return self._with_optimizer(competitors.checkpointed(self.blocks, reentrant=False, first=1, last=-1))

    def _make_ours(self) -> Any:
        return self._with_runtime()

    def _make_host(self) -> Any:
        return self._with_runtime(scheduler="async", boundary_offload=True)

    def _make_011(self) -> Any:
        engine = runtimes.old_engine(self.blocks[1:], self.optimizer)

        def step() -> float:
            with torch.no_grad():
                embedded = self.blocks[0](self.x)
            return float(engine.train_step(embedded, lambda output: self.loss_fn(output, self.targets)))

        return step

    def _with_runtime(self, **config: Any) -> Any:
        engine = runtimes.engine(self.blocks, self.optimizer, **config)
        return lambda: float(engine.train_step(self.x, self.loss_fn, targets=self.targets))

    def _with_optimizer(self, gradients: competitors.Step) -> Any:
        def step() -> float:
            value = []

            def loss_fn(output: torch.Tensor) -> torch.Tensor:
                loss = self.loss_fn(output, self.targets)
                value.append(loss.detach())
                return loss

            gradients(self.x, loss_fn)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            return float(value[0])

        return step

    def losses(self, steps: int) -> list[float]:
        """The losses of that many steps from now on."""
        return [self._step() for _ in range(steps)]

    def step_peak(self) -> int | None:
        """Bytes, as `alloc_count` defines a step's peak. The optimizer's state must be there: call `losses` first."""
        if self.counter is None:
            return None
        self.optimizer.zero_grad(set_to_none=True)
        resting = alloc_count.resting_bytes(self.model.parameters(), self.optimizer)
        self.counter.take_peak()
        self._step()
        return self.counter.take_peak() - resting

    def block_forwards(self) -> int:
        """How often a transformer block's forward runs in one step (embedding and head are not counted)."""
        runs: list[None] = []
        with ExitStack() as stack:
            for block in self.blocks[1:-1]:
                stack.enter_context(surrounded(block, before=lambda: runs.append(None)))
            self._step()
        return len(runs)

    def timed(self) -> float:
        """Seconds of one step."""
        start = time.perf_counter()
        self._step()
        return time.perf_counter() - start


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--pairs", type=int, default=9, help="A B B A pairs of ours against checkpoint")
    options.add_argument("--side-pairs", type=int, default=2, help="the same, against each of the others")
    options.add_argument("--quick", action="store_true", help="a small model, 3 pairs: a smoke test, no claim")
    options.add_argument("--only", help="comma-separated competitors")
    given = options.parse_args()
    size = QUICK if given.quick else FULL
    pairs, side_pairs = (3, 3) if given.quick else (given.pairs, given.side_pairs)
    names = given.only.split(",") if given.only else list(NAMES)
    workers: dict[str, Worker] = {}
    try:
        for name in names:
            path = [peer_011.installed()] if name == "011" else []
            workers[name] = Worker("benchmarks.lm:Competitor", {"name": name, "size": size}, path=path, count=True)
        losses = {name: worker.call("losses", steps=2) for name, worker in workers.items()}
        peaks = {name: worker.call("step_peak") for name, worker in workers.items()}
        forwards = {name: worker.call("block_forwards") for name, worker in workers.items()}
        measures = {name: partial(worker.call, "timed") for name, worker in workers.items()}
        main_pair: dict[str, Callable[[], float]] = {
            name: measures[name] for name in ("ours", "checkpoint") if name in measures
        }
        seconds = rounds.mirrored_rounds(main_pair, pairs, progress)
        # The others in turn with ours, whose own extra measurements serve as the other half of these pairs only.
        others = {name: measure for name, measure in measures.items() if name not in main_pair}
        side = rounds.mirrored_rounds(
            {**{n: measures[n] for n in names if n == "ours"}, **others}, side_pairs, progress
        )
    finally:
        for worker in workers.values():
            worker.close()
    check_losses(losses)
    ratios = {}
    if "ours" in names:
        ratios = {n: paired_ratio(side["ours"], side[n]) for n in others}
        if "checkpoint" in names:
            ratios["checkpoint"] = paired_ratio(seconds["ours"], seconds["checkpoint"])
    rows = [
        [
            NAMES[n],
            "not counted" if peaks[n] is None else f"{peaks[n] / 1e6:.0f}",
            f"{median((seconds if n in seconds else side)[n]):.2f}",
            str(ratios.get(n, "")),
            str(forwards[n]),
        ]
        for n in names
    ]
    claims = []
    if "checkpoint" in ratios:
        if peaks["ours"] is not None:
            claims.append(report.Claim("step peak, ours / checkpoint", peaks["ours"] / peaks["checkpoint"], 1.0))
        claims.append(report.Claim("block forwards, ours / checkpoint", forwards["ours"] / forwards["checkpoint"], 1.0))
        claims.append(report.Claim("time, ours / checkpoint", ratios["checkpoint"], TIME_LIMIT))
    shape = f"{size['depth']} blocks of width {size['dim']}, batch {size['batch']} x {size['length']}"
    holds = report.show(
        f"Language model, {shape}, AdamW; {pairs} pairs against checkpoint, {side_pairs} against the others",
        ["training step", "step peak, MB", "s a step", "time, ours / it", "block forwards"],
        rows,
        claims,
    )
    document = {
        "size": size,
        "step_peak_bytes": peaks,
        "block_forwards": forwards,
        "losses": losses,
        "seconds_main_pair": seconds,
        "seconds_side": side,
        "ratios": {n: r.as_dict() for n, r in ratios.items()},
        "claims": [claim.as_dict() for claim in claims],
    }
    print(f"kept: {report.keep('lm-quick' if given.quick else 'lm', document)}")
    return 0 if holds or given.quick else 1


def check_losses(losses: dict[str, list[float]]) -> None:
    """Raises unless all train the same model: two steps' losses agree (0.1.1 trains no embedding: its first only)."""
    reference = next(iter(losses.values()))
    for name, values in losses.items():
        for i, (value, expected) in enumerate(zip(values, reference, strict=True)):
            if abs(value - expected) > 1e-4 * abs(expected) and not (name == "011" and i > 0):
                raise RuntimeError(f"{name} is not training the same model: losses {losses}")


def progress(name: str, seconds: float) -> None:
    print(f"  {name}: {seconds:.2f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
