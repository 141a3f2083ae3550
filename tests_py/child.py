"""Runs code in an interpreter of its own, as a host process that uses the package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What every child starts with. `report` prints one JSON object, the last one is the result.
PRELUDE = """
import gc, json, os, signal, sys, threading, time
from pathlib import Path
import torch
from torch import nn
import eae_runtime
from eae_runtime import BoundaryStore, EAERuntime, RuntimeConfig, _bridge
from eae_runtime.errors import BridgeError
from eae_runtime.passes import ClipPass, GaussianNoisePass

FOLDER = Path(os.environ["EAE_TEST_FOLDER"])
COUNTED = ("stores", "boundaries", "pools", "chains", "traces", "buffers", "bytes", "goroutines", "tensors")

def report(**facts):
    print(json.dumps(facts), flush=True)

def live():
    gc.collect()
    census = json.loads(_bridge.live())
    return {name: census[name] for name in COUNTED}

def files():
    return sorted(path.name for path in FOLDER.rglob("*"))

def once_moving(act):
    '''Calls `act` on a thread as soon as the disk tier writes a boundary.'''
    def wait():
        while not any(".eaeb" in name for name in files()):
            time.sleep(0.01)
        act()
    threading.Thread(target=wait, daemon=True).start()

def slow_disk(seconds):
    '''The disk tier waits that long before each 256 KiB.'''
    real = _bridge.call
    def call(name, *args):
        if name == "StoreNew":
            args = (json.dumps({**json.loads(args[0]), "file_delay_seconds": seconds}), *args[1:])
        return real(name, *args)
    _bridge.call = call

def make(blocks=None, **options):
    torch.manual_seed(0)
    blocks = blocks or [nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Linear(8, 2)]
    model = nn.Sequential(*blocks)
    options = {"scheduler": "async", "boundary_tier": "disk", "disk_dir": FOLDER, "passes": [ClipPass(1e9)], **options}
    return EAERuntime(model, torch.optim.SGD(model.parameters(), lr=0.1), RuntimeConfig(**options))

def step(runtime, rows=4, width=8):
    return runtime.train_step(torch.ones(rows, width), lambda y: y.square().mean())
"""


@dataclass
class Ended:
    """How a child ended. `seconds` from its stamp `at` (a time.monotonic of its report), if there is one, to its
    end."""

    code: int
    result: dict[str, Any]
    errors: str
    seconds: float


def run(code: str, folder: Path, *, prelude: str = PRELUDE, timeout: float = 120, **env: str) -> Ended:
    """Runs the code behind the prelude, with `folder` for the disk tier. A child that hangs is an error of the test."""
    script = folder.parent / f"{folder.name}-child.py"
    script.write_text(prelude + code)
    folder.mkdir(exist_ok=True)
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "EAE_TEST_FOLDER": str(folder), **env}
    done = subprocess.run([sys.executable, str(script)], env=settings, capture_output=True, text=True, timeout=timeout)
    ended = time.monotonic()
    lines = done.stdout.splitlines()
    result = json.loads(lines[-1]) if lines else {}
    return Ended(done.returncode, result, done.stderr, ended - result.get("at", ended))


def result_of(code: str, folder: Path, **kwargs: Any) -> dict[str, Any]:
    """The result of a child that has to end well."""
    ended = run(code, folder, **kwargs)
    assert ended.code == 0, ended.errors
    return ended.result
