"""A resumed run is bit for bit the unbroken one, also in another process, under another scheduler or tier."""

from __future__ import annotations

import io
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from eae_runtime import EAERuntime, RuntimeConfig
from eae_runtime.passes import GaussianNoisePass, SyntheticGradientPass
from test_training_loop import Between, batch, chain


class Drawing(nn.Module):
    """Draws from Python's and NumPy's generators."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + 0.1 * random.random() + 0.1 * float(np.random.randn()))


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "async host": {"scheduler": "async", "boundary_tier": "host"},
    "disk": {"boundary_tier": "disk"},
    "streams": {"random_streams": True},
    "module": {},
}


def made(name: str, scaled: bool) -> tuple[nn.Module, Any, Any, EAERuntime]:
    """Model, optimizer, LR scheduler and runtime, all with a state to carry."""
    torch.manual_seed(3)
    model = Between() if name == "module" else nn.Sequential(Drawing(), *chain())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    passes: list[Any] = [GaussianNoisePass(0.01), GaussianNoisePass(0.02)]
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3) if scaled else None
    config = RuntimeConfig(passes=passes, loss_scaler=scaler, **SETTINGS[name])
    return model, optimizer, rates, EAERuntime(model, optimizer, config)


def go(parts: tuple[nn.Module, Any, Any, EAERuntime], first: int, last: int) -> list[float]:
    _, _, rates, runtime = parts
    losses = []
    for step in range(first, last):
        x, y = batch(step)
        losses.append(runtime.train_step(x, lambda out, y=y: F.cross_entropy(out, y), accumulate=3))
        if not runtime.pending:
            rates.step()
    return losses


def saved(parts: tuple[nn.Module, Any, Any, EAERuntime]) -> bytes:
    file = io.BytesIO()
    torch.save([part.state_dict() for part in parts], file)
    return file.getvalue()


def start() -> None:
    torch.manual_seed(5)
    random.seed(6)
    np.random.seed(7)


def end(parts: tuple[nn.Module, Any, Any, EAERuntime]) -> str:
    model, optimizer, rates, _ = parts
    with torch._tensor_str.printoptions(precision=9):
        return repr(
            (
                [(n, t.tolist()) for n, t in model.state_dict().items()],
                optimizer.state_dict(),
                rates.get_last_lr(),
                torch.get_rng_state().sum().item(),
                random.random(),
                float(np.random.randn()),
            )
        )


@pytest.mark.parametrize("at", [6, 7])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_resumed_and_unbroken(name: str, scaled: bool, at: int) -> None:
    """Stopped between two optimizer steps, and in the middle of an accumulation."""
    start()
    parts = made(name, scaled)
    losses = go(parts, 0, 12)
    expected = end(parts)
    parts[3].close()

    start()
    parts = made(name, scaled)
    first = go(parts, 0, at)
    state = saved(parts)
    parts[3].close()
    torch.manual_seed(99)
    parts = made(name, scaled)
    for part, one in zip(parts, torch.load(io.BytesIO(state), weights_only=True)):
        part.load_state_dict(one)
    assert parts[3].pending == at % 3
    assert first + go(parts, at, 12) == losses
    assert end(parts) == expected
    parts[3].close()


@pytest.mark.parametrize("other", ["async host", "disk"])
def test_resumed_under_another_plan(other: str) -> None:
    start()
    parts = made("async host" if other == "disk" else "disk", True)
    losses = go(parts, 0, 12)
    expected = end(parts)
    parts[3].close()
    start()
    parts = made("async host" if other == "disk" else "disk", True)
    first = go(parts, 0, 7)
    state = saved(parts)
    parts[3].close()
    parts = made(other, True)
    for part, one in zip(parts, torch.load(io.BytesIO(state), weights_only=True)):
        part.load_state_dict(one)
    assert first + go(parts, 7, 12) == losses
    assert end(parts) == expected
    parts[3].close()


CHILD = """
import io, sys
import torch
from test_resume import end, go, made
parts = made("default", True)
for part, one in zip(parts, torch.load(io.BytesIO(sys.stdin.buffer.read()), weights_only=True)):
    part.load_state_dict(one)
go(parts, 7, 12)
print(end(parts))
"""


def test_resumed_in_another_process() -> None:
    start()
    parts = made("default", True)
    go(parts, 0, 7)
    state = saved(parts)
    go(parts, 7, 12)
    expected = end(parts)
    parts[3].close()
    here = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", CHILD], input=state, capture_output=True, cwd=here)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().strip() == expected


def test_a_synthetic_gradients_network_is_carried() -> None:
    def runtime() -> EAERuntime:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        passes = [SyntheticGradientPass(4, warmup_steps=2, use_synthetic=True)]
        return EAERuntime(model, torch.optim.SGD(model.parameters(), lr=0.1), RuntimeConfig(passes=passes))

    x = torch.ones(3, 4)
    with runtime() as unbroken:
        losses = [unbroken.train_step(x, lambda y: y.square().mean()) for _ in range(8)]
    with runtime() as first:
        for _ in range(4):
            first.train_step(x, lambda y: y.square().mean())
        file = io.BytesIO()
        torch.save([first.state_dict(), [b.state_dict() for b in first.blocks]], file)
    with runtime() as second:
        file.seek(0)
        state, blocks = torch.load(file, weights_only=False)
        second.load_state_dict(state)
        for block, one in zip(second.blocks, blocks):
            block.load_state_dict(one)
        assert losses[4:] == [second.train_step(x, lambda y: y.square().mean()) for _ in range(4)]
