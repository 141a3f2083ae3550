"""What a boundary costs at the line between Python and Go: microseconds of a put and a get, and Go calls an action.

python benchmarks/crossing.py [--repeats 20000] [--quick]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn
from torch.nn import functional

from benchmarks._harness import report, runtimes
from benchmarks._harness.crossings import count_crossings
from benchmarks._harness.verdict import Ratio, bootstrap_interval

LIMIT_US = 10.0
SERIES = 15
BLOCKS = 8
# The core's functions that carry out an action on a boundary; set-up, statistics and closing are not among them.
BOUNDARY_CALLS = (
    "StorePut",
    "StorePutAll",
    "StorePutN",
    "StoreMove",
    "StoreLoad",
    "StoreGet",
    "StoreGetN",
    "StoreDrop",
    "ChainApply",
)


def put_and_get(repeats: int) -> Ratio:
    """Microseconds of one put, get and drop of a device-tier tensor (4 x 32 float32), as the executor does them."""
    from eae_runtime import BoundaryStore

    tensor = torch.randn(4, 32)
    series = []
    with BoundaryStore() as store:
        for _ in range(SERIES):
            start = time.perf_counter()
            for _ in range(repeats // SERIES):
                store.adopt(3, tensor)
                store.fetch(3)
                store.drop(3)
            series.append((time.perf_counter() - start) / (repeats // SERIES) * 1e6)
    return Ratio(median(series), *bootstrap_interval(series), len(series))


def calls_of_a_step(**config: Any) -> tuple[Counter[str], int]:
    """Go calls of one training step of a chain, after a first that sets things up; and its actions on boundaries.

    Those are the actions of the schedule that run, plus the put of each boundary that a `C` keeps and the get of each
    that an `R` starts from.
    """
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(BLOCKS)]
    x, target = torch.randn(4, 32), torch.randn(4, 32)
    engine = runtimes.engine(blocks, **config)
    with engine:
        engine.train_step(x, lambda y: functional.mse_loss(y, target))
        text = engine.schedule()
        with count_crossings() as calls:
            engine.train_step(x, lambda y: functional.mse_loss(y, target))
    kinds = Counter(token.strip("0123456789*") for token in text.split())
    actions = sum(kinds[kind] for kind in ("C", "R", "S", "L", "D", "P"))
    return calls, actions


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--repeats", type=int, default=30_000)
    options.add_argument("--quick", action="store_true", help="a tenth of the repeats, no claim")
    given = options.parse_args()
    torch.set_num_threads(1)
    microseconds = put_and_get(given.repeats // 10 if given.quick else given.repeats)
    from eae_runtime.passes import ClipPass, FP16Pass

    configurations: dict[str, dict[str, Any]] = {
        "default": {},
        "host tier": {"boundary_offload": True},
        "two Go passes": {"passes": [ClipPass(), FP16Pass()]},
    }
    steps = {name: calls_of_a_step(**config) for name, config in configurations.items()}
    rows, claims = [], [report.Claim("put + get + drop, device tier, us", microseconds, LIMIT_US)]
    for name, (calls, actions) in steps.items():
        boundary = sum(calls[call] for call in BOUNDARY_CALLS)
        listed = ", ".join(f"{call} {count}" for call, count in sorted(calls.items())) or "none"
        rows.append([name, str(actions), str(boundary), listed])
        claims.append(report.Claim(f"Go calls a boundary action, {name}", boundary / actions, 1.0))
    holds = report.show(
        f"One training step of {BLOCKS} blocks",
        ["configuration", "boundary actions", "Go calls for them", "all Go calls"],
        rows,
        claims,
    )
    document = {
        "put_get_drop_us": microseconds.as_dict(),
        "steps": {
            name: {"calls": dict(calls), "boundary_actions": actions} for name, (calls, actions) in steps.items()
        },
        "claims": [claim.as_dict() for claim in claims],
    }
    print(f"kept: {report.keep('crossing-quick' if given.quick else 'crossing', document)}")
    return 0 if holds or given.quick else 1


if __name__ == "__main__":
    sys.exit(main())
