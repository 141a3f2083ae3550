"""Adjoint passes on 16 M float32 values, ours against 0.1.1's, in turn; and how many crossings a run of passes takes.

Both are called through the same public interface (`PASS(AdjointState)`), each in a process of its own; the adjoint that
comes out is dropped at once, as the runtime drops it after the next block.

    python benchmarks/passes.py [--pairs 9] [--values N] [--quick]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks._harness import peer_011, report, rounds
from benchmarks._harness.crossings import count_crossings
from benchmarks._harness.verdict import paired_ratio
from benchmarks._harness.worker_client import Worker

VALUES = 16 << 20
KINDS = {"int8": "Int8QuantizationPass", "clip": "ClipPass", "fp16": "FP16Pass"}
# ours/0.1.1 at most; the claim is 6 times faster
LIMITS = {"int8": 1 / 6}


class Competitor:
    """Runs in a worker: the passes of the `eae_runtime` that the process imports."""

    def __init__(self, old: bool, values: int) -> None:
        if old:
            peer_011.assert_loaded()
        from eae_runtime import AdjointPipeline, AdjointState, passes

        torch.manual_seed(0)
        self.adjoint = AdjointState(tensor=torch.randn(values), layer_id=1, block="block")
        self.passes: dict[str, Any] = {kind: getattr(passes, name)() for kind, name in KINDS.items()}
        self.pipeline = AdjointPipeline(list(self.passes.values()))

    def timed(self, kind: str, repeats: int) -> float:
        """Mean seconds of one pass over `repeats`, after one that is not timed."""
        apply = self.pipeline.run if kind == "run" else self.passes[kind]
        apply(self.adjoint)
        start = time.perf_counter()
        for _ in range(repeats):
            apply(self.adjoint)
        return (time.perf_counter() - start) / repeats

    def checksum(self, kind: str) -> list[float]:
        """Norm and first values of what the pass makes."""
        made = self.passes[kind](self.adjoint).tensor.double()
        return [float(made.norm()), *made[:4].tolist()]

    def crossings(self) -> dict[str, int]:
        """Calls into the core for one run of all passes, after a first that sets them up."""
        self.pipeline.run(self.adjoint)
        with count_crossings() as calls:
            self.pipeline.run(self.adjoint)
        return dict(calls)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--pairs", type=int, default=9)
    options.add_argument("--repeats", type=int, default=5, help="passes a measurement")
    options.add_argument("--values", type=int, default=VALUES, help="size of the adjoint; the claim is for the default")
    options.add_argument("--quick", action="store_true", help="1 M values, 3 pairs: a smoke test, no claim")
    given = options.parse_args()
    # Smaller adjoints stay in the caches, where fresh pages cost nothing and the arithmetic shows.
    pairs, values = (3, 1 << 20) if given.quick else (given.pairs, given.values)
    kinds = [*KINDS, "run"]
    factory = "benchmarks.passes:Competitor"
    with (
        Worker(factory, {"old": False, "values": values}) as ours,
        Worker(factory, {"old": True, "values": values}, path=[peer_011.installed()]) as old,
    ):
        checksums = {kind: [ours.call("checksum", kind=kind), old.call("checksum", kind=kind)] for kind in KINDS}
        crossings = ours.call("crossings")
        seconds = {kind: rounds.mirrored_rounds(measures(kind, given.repeats, ours, old), pairs) for kind in kinds}
    ratios = {kind: paired_ratio(seconds[kind]["ours"], seconds[kind]["old"]) for kind in kinds}
    rows = [
        [
            KINDS.get(kind, "all three in a pipeline"),
            f"{median(seconds[kind]['ours']) * 1e3:.1f}",
            f"{median(seconds[kind]['old']) * 1e3:.1f}",
            str(ratios[kind]),
            f"{1 / ratios[kind].median:.1f} x",
        ]
        for kind in kinds
    ]
    claims = [
        report.Claim(f"{KINDS[kind]}, ours / 0.1.1", ratios[kind], limit)
        for kind, limit in LIMITS.items()
        if values == VALUES
    ]
    claims.append(report.Claim("crossings of a run of three passes", float(sum(crossings.values())), 1))
    holds = report.show(
        f"Passes on {values / 2**20:.0f} M float32 values, {pairs} pairs",
        ["pass", "ours, ms", "0.1.1, ms", "ours / 0.1.1", "faster"],
        rows,
        claims,
    )
    document = {
        "values": values,
        "seconds": seconds,
        "ratios": {kind: ratio.as_dict() for kind, ratio in ratios.items()},
        "crossings": crossings,
        "norm_and_first_values": checksums,
        "claims": [claim.as_dict() for claim in claims],
    }
    print(f"kept: {report.keep('passes' if values == VALUES else f'passes-{values}', document)}")
    return 0 if holds or given.quick else 1


def measures(kind: str, repeats: int, ours: Worker, old: Worker) -> dict[str, Any]:
    """The two measurements of one kind of pass, for `mirrored_rounds`."""
    return {
        "ours": lambda: ours.call("timed", kind=kind, repeats=repeats),
        "old": lambda: old.call("timed", kind=kind, repeats=repeats),
    }


if __name__ == "__main__":
    sys.exit(main())
