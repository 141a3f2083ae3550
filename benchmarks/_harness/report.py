"""Keeps a benchmark's result as JSON and prints it as a table."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .verdict import Ratio

RESULTS = Path(__file__).resolve().parents[1] / "results"


@dataclass(frozen=True)
class Claim:
    """One promise with what was measured. `limit` bounds the ratio from above."""

    text: str
    measured: Ratio | float
    limit: float

    @property
    def holds(self) -> bool:
        if isinstance(self.measured, Ratio):
            return not self.measured.fails(self.limit)
        return self.measured <= self.limit

    def as_dict(self) -> dict[str, Any]:
        value = self.measured.as_dict() if isinstance(self.measured, Ratio) else self.measured
        return {"claim": self.text, "measured": value, "limit": self.limit, "holds": self.holds}


def machine() -> dict[str, Any]:
    """What a reader needs to judge a number: processor, cores, versions, commit, load at the start."""
    checkout = Path(__file__).resolve().parents[2]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True, check=False)
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "load_1m": round(os.getloadavg()[0], 2),
        "commit": commit.stdout.strip() or None,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def keep(name: str, document: dict[str, Any]) -> Path:
    """Writes `benchmarks/results/NAME.json` (machine added) and returns its path. An older one is replaced."""
    RESULTS.mkdir(exist_ok=True)
    target = RESULTS / f"{name}.json"
    draft = target.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps({"benchmark": name, "machine": machine(), **document}, indent=2) + "\n")
    draft.replace(target)
    return target


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], claims: Sequence[Claim] = ()) -> bool:
    """Prints the table and, under it, each claim with its verdict. Returns whether all hold."""
    # A pipe has no width of its own; 80 columns would wrap every row.
    console = Console(width=None if os.isatty(1) else 140)
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for claim in claims:
        value = str(claim.measured) if isinstance(claim.measured, Ratio) else f"{claim.measured:.4g}"
        verdict = "[green]holds[/]" if claim.holds else "[red]FAILS[/]"
        console.print(
            f"  {verdict}  {claim.text}: ".rstrip(" ") + f" {value}  (limit {claim.limit:g})", highlight=False
        )
    return all(claim.holds for claim in claims)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
