"""Shows in a few seconds that an installed package works: training steps under three configurations, bit for bit
those of plain PyTorch, and nothing left behind.

Warnings are errors from the moment that torch is there, so that none of the package's own gets lost among torch's.
"""

from __future__ import annotations

import copy
import gc
import importlib.metadata
import json
import sys
import warnings
from typing import Any

import torch
from torch import nn

warnings.simplefilter("error")

import eae_runtime  # noqa: E402
from eae_runtime import EAERuntime, RuntimeConfig, _bridge  # noqa: E402
from eae_runtime.passes import ClipPass  # noqa: E402

STEPS = 3
# Of the core's census: what must be as before when a runtime is closed.
COUNTED = ("stores", "boundaries", "pools", "chains", "traces", "buffers", "tensors", "failed_releases")


class Rows(nn.Module):
    """(B, T, D) -> (B * T, D), so that BatchNorm1d fits behind it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(0, 1)


def make_model() -> nn.Sequential:
    """Token numbers (B, T) -> (B * T, 11): integer input, random draws, buffers."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(11, 16),
        nn.Linear(16, 32),
        nn.GELU(),
        nn.Dropout(0.25),
        Rows(),
        nn.BatchNorm1d(32),
        nn.Linear(32, 11),
    )


def loss_fn(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, targets)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draws = [torch.randint(0, 11, (4, 7), generator=generator) for _ in range(2 * STEPS)]
    return [(x, y.flatten()) for x, y in zip(draws[::2], draws[1::2])]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_plain(model: nn.Module) -> list[float]:
    optimizer, losses = optimizer_of(model), []
    for x, y in batches():
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_ours(model: nn.Sequential, options: dict[str, Any]) -> list[float]:
    with EAERuntime(model, optimizer_of(model), RuntimeConfig(**options)) as runtime:
        return [runtime.train_step(x, loss_fn, targets=y) for x, y in batches()]


def differences(options: dict[str, Any]) -> list[str]:
    """What is not plain's under these options; nothing, if all is well."""
    theirs = make_model()
    ours = copy.deepcopy(theirs)
    torch.manual_seed(2)
    expected = train_plain(theirs)
    random = torch.get_rng_state()
    before = json.loads(_bridge.live())
    torch.manual_seed(2)
    losses = train_ours(ours, options)
    found = []
    if losses != expected:
        found.append(f"losses {losses} against {expected}")
    if len(set(losses)) != STEPS:
        found.append(f"losses {losses}: nothing was trained")
    if not torch.equal(torch.get_rng_state(), random):
        found.append("another state of the random generator")
    wanted = theirs.state_dict()
    found += [f"{name} differs" for name, value in ours.state_dict().items() if not torch.equal(value, wanted[name])]
    gc.collect()
    after = json.loads(_bridge.live())
    found += [f"{name}: {before[name]} before, {after[name]} after" for name in COUNTED if after[name] != before[name]]
    return found


def main() -> int:
    version = importlib.metadata.version("eae-runtime")
    print(
        f"Python {sys.version.split()[0]}, torch {torch.__version__}, eae-runtime {version} at {eae_runtime.__file__}"
    )
    failed = False
    for options in (
        {},
        {"scheduler": "async", "boundary_tier": "host", "passes": [ClipPass(max_norm=1e9)]},
        {"scheduler": "async", "boundary_tier": "disk", "trace": True},
    ):
        found = differences(options)
        words = ", ".join(f"{name}={value if isinstance(value, str) else '...'}" for name, value in options.items())
        print(f"  {words or 'default'}: {STEPS} steps {'; '.join(found) if found else 'equal to plain, bit for bit'}")
        failed = failed or bool(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
