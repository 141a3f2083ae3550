"""Is it plain PyTorch's training, bit for bit? Models by drivers, schedulers and tiers, with the peers beside them.

Each cell is three steps of SGD from the same state as plain PyTorch's: loss, gradients, parameters, buffers and random
state are compared bit for bit after each step. "yes", or the largest relative error and where, or what was raised.
Class `bitwise` promises "yes" in every cell of ours. Below: what `verify_rebuild="sample"` costs against "off".
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks import lm
from benchmarks._harness import peer_011, report, rounds, ways
from benchmarks._harness.verdict import paired_ratio
from benchmarks._harness.worker_client import Worker

# By column, what the worker is told.
OURS: dict[str, dict[str, Any]] = {
    "runtime": {"way": "runtime", "config": {}},
    "runtime async host": {"way": "runtime", "config": {"scheduler": "async", "boundary_tier": "host"}},
    "runtime disk": {"way": "runtime", "config": {"boundary_tier": "disk"}},
    "runtime pipeline": {"way": "runtime", "config": {"scheduler": "pipeline"}},
    "wrap": {"way": "wrap", "config": {}},
    "wrap async host": {"way": "wrap", "config": {"scheduler": "async", "boundary_tier": "host"}},
    "wrap disk": {"way": "wrap", "config": {"boundary_tier": "disk"}},
}
PEERS: dict[str, dict[str, Any]] = {
    "checkpoint": {"way": "checkpoint", "reentrant": False},
    "checkpoint reentrant": {"way": "checkpoint", "reentrant": True},
    "eae-runtime 0.1.1": {"way": "0.1.1"},
}
LIMIT = 1.03
SIZE = {**lm.FULL, "vocab": 2048, "dim": 256, "hidden": 704, "batch": 4, "length": 256}


class Verifying(lm.Competitor):
    """Runs in a worker: the language model under the runtime, with one mode of verification."""

    def __init__(self, mode: str, size: dict[str, int]) -> None:
        self._mode = mode
        super().__init__("ours", size)

    def _make_ours(self) -> Any:
        return self._with_runtime(verify_rebuild=self._mode)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--pairs", type=int, default=9, help="A B B A pairs of sample against off")
    options.add_argument("--quick", action="store_true", help="three models, 3 pairs of a small one: no claim on time")
    given = options.parse_args()
    models = ["mlp", "cnn", "GPT-2"] if given.quick else ways.names()
    results = table(models)
    rows = [[name, *[cell(results[column][name]) for column in results]] for name in models]
    wrong = sum(not results[column][name].get("bitwise", False) for column in OURS for name in models)
    sample, seconds = sampling(lm.QUICK if given.quick else SIZE, 3 if given.quick else given.pairs)
    claims = [
        report.Claim("cells of ours that are not bitwise", float(wrong), 0.0),
        report.Claim('time, verify_rebuild="sample" / "off"', sample, LIMIT),
    ]
    holds = report.show("Three steps against plain PyTorch, CPU", ["model", *results], rows, claims)
    document = {
        "cells": results,
        "seconds": seconds,
        "claims": [claim.as_dict() for claim in claims],
    }
    print(f"kept: {report.keep('exactness-quick' if given.quick else 'exactness', document)}")
    return 0 if holds or given.quick else 1


def table(models: list[str]) -> dict[str, dict[str, dict[str, Any]]]:
    """By column and model, what the worker found."""
    results: dict[str, dict[str, dict[str, Any]]] = {}
    specs = {**OURS, **PEERS}
    for column, spec in specs.items():
        path = [peer_011.installed()] if spec["way"] == "0.1.1" else []
        worker = Worker("benchmarks._harness.ways:Comparison", spec, path=path)
        try:
            results[column] = {name: worker.call("of", name=name) for name in models}
        finally:
            worker.close()
        print(f"  {column}: done", file=sys.stderr, flush=True)
    return results


def cell(found: dict[str, Any]) -> str:
    """One cell of the table."""
    if "raises" in found:
        return "raises " + found["raises"].partition(":")[0]
    if found["bitwise"]:
        return "yes"
    what = found["worst"].split(" ")[0]
    return "lost gradient" if what == "lost" else f"{what} {found['relative']:.0e}"


def sampling(size: dict[str, int], pairs: int) -> tuple[Any, dict[str, list[float]]]:
    """The time of a step with one block verified against that without, in turn."""
    workers: dict[str, Worker] = {}
    try:
        for mode in ("sample", "off"):
            workers[mode] = Worker("benchmarks.exactness:Verifying", {"mode": mode, "size": size})
            workers[mode].call("losses", steps=3)
        measures = {mode: partial(worker.call, "timed") for mode, worker in workers.items()}
        seconds = rounds.mirrored_rounds(measures, pairs, lm.progress)
    finally:
        for worker in workers.values():
            worker.close()
    return paired_ratio(seconds["sample"], seconds["off"]), seconds


if __name__ == "__main__":
    sys.exit(main())
