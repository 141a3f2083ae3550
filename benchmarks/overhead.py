"""What a block costs beyond its kernels: 64 tiny blocks (Linear 32x32 + GELU), batch 4, one thread.

Compared is the time of one forward and backward: plain, the bare loop of the design, torch.utils.checkpoint (both
kinds), eae-runtime 0.1.1 and this package in its default configuration, each in a process of its own, in turn. No
optimizer anywhere (`optimizer=None`): a timed step is forward, loss, backward, and clearing `.grad`.

    python benchmarks/overhead.py [--pairs 9] [--quick] [--threads 1]
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn
from torch.nn import functional

from benchmarks._harness import competitors, peer_011, report, rounds, runtimes
from benchmarks._harness.verdict import paired_ratio
from benchmarks._harness.worker_client import Worker

BLOCKS = 64
NAMES = {
    "ours": "eae-runtime, default",
    "bare": "bare loop",
    "checkpoint": "checkpoint, non-reentrant",
    "reentrant": "checkpoint, reentrant",
    "011": "eae-runtime 0.1.1",
    "plain": "plain backward",
}
# peer -> upper limit of ours/peer
LIMITS = {"checkpoint": 0.62, "reentrant": 1.0, "bare": 1.15}


class Competitor:
    """Runs in a worker: one way to get the gradients of the 64 blocks."""

    def __init__(self, name: str, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self.blocks = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(BLOCKS)]
        self.x, self.target = torch.randn(4, 32), torch.randn(4, 32)
        makers = {
            "plain": competitors.plain,
            "bare": competitors.bare_loop,
            "checkpoint": lambda blocks: competitors.checkpointed(blocks, reentrant=False),
            "reentrant": lambda blocks: competitors.checkpointed(blocks, reentrant=True),
            "011": lambda blocks: runtimes.old_engine(blocks).train_step,
            "ours": lambda blocks: runtimes.engine(blocks).train_step,
        }
        self.step = makers[name](self.blocks)

    def _one(self) -> None:
        self.step(self.x, lambda y: functional.mse_loss(y, self.target))

    def _clear(self) -> None:
        for block in self.blocks:
            for parameter in block.parameters():
                parameter.grad = None

    def gradient_norm(self) -> float:
        """Norm of all gradients of one step: every competitor has to have computed the same thing."""
        self._clear()
        self._one()
        return (
            sum(
                float(p.grad.double().square().sum()) for b in self.blocks for p in b.parameters() if p.grad is not None
            )
            ** 0.5
        )

    def timed(self, steps: int) -> float:
        """Mean seconds of one step over `steps`, after one that is not timed (the process had been asleep)."""
        self._clear()
        self._one()
        start = time.perf_counter()
        for _ in range(steps):
            self._clear()
            self._one()
        return (time.perf_counter() - start) / steps


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--pairs", type=int, default=9, help="A B B A pairs of each two competitors")
    options.add_argument("--steps", type=int, default=20, help="steps a measurement")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--quick", action="store_true", help="3 pairs of 5 steps: a smoke test, no claim")
    options.add_argument("--only", help="comma-separated competitors")
    given = options.parse_args()
    pairs, steps = (3, 5) if given.quick else (given.pairs, given.steps)
    names = given.only.split(",") if given.only else list(NAMES)
    workers: dict[str, Worker] = {}
    try:
        for name in names:
            path = [peer_011.installed()] if name == "011" else []
            spec = {"name": name, "threads": given.threads}
            workers[name] = Worker("benchmarks.overhead:Competitor", spec, path=path)
        norms = {name: worker.call("gradient_norm") for name, worker in workers.items()}
        for worker in workers.values():
            worker.call("timed", steps=steps)
        seconds = rounds.mirrored_rounds(
            {name: partial(worker.call, "timed", steps=steps) for name, worker in workers.items()}, pairs
        )
    finally:
        for worker in workers.values():
            worker.close()
    reference = next(iter(norms.values()))
    different = {name: norm for name, norm in norms.items() if abs(norm - reference) > 1e-6 * reference}
    if different:
        raise RuntimeError(f"not the same gradients: {norms}")
    ratios = {n: paired_ratio(seconds["ours"], seconds[n]) for n in names if n != "ours"} if "ours" in names else {}
    rows = [
        [NAMES[n], f"{median(seconds[n]) / BLOCKS * 1e6:.0f}", str(ratios[n]) if n in ratios else ""] for n in names
    ]
    claims = [report.Claim(f"ours / {NAMES[n]}", ratios[n], limit) for n, limit in LIMITS.items() if n in ratios]
    holds = report.show(
        f"{BLOCKS} tiny blocks, {given.threads} thread(s), {pairs} pairs of {steps} steps",
        ["forward + backward", "us a block", "ours / it"],
        rows,
        claims,
    )
    document = {
        "pairs": pairs,
        "steps": steps,
        "threads": given.threads,
        "seconds_a_step": seconds,
        "ratios": {n: r.as_dict() for n, r in ratios.items()},
        "claims": [claim.as_dict() for claim in claims],
    }
    print(f"kept: {report.keep('overhead-quick' if given.quick else 'overhead', document)}")
    return 0 if holds or given.quick else 1


if __name__ == "__main__":
    sys.exit(main())
