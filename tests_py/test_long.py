"""What takes minutes: long runs that must not grow, and a training that must not drift. `make test-long` runs them."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

from eae_runtime import EAERuntime, RuntimeConfig
from eae_runtime.contrib.lm import build_lm, lm_loss
from eae_runtime.passes import ClipPass, GaussianNoisePass, Int8QuantizationPass
from oracle import live, nothing_left

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("error")]

STEPS = 2000


def resident() -> int:
    """Bytes of the process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def slope(sizes: list[int]) -> float:
    """Bytes a sample, by least squares."""
    n = len(sizes)
    middle, mean = (n - 1) / 2, sum(sizes) / n
    return sum((i - middle) * (s - mean) for i, s in enumerate(sizes)) / sum((i - middle) ** 2 for i in range(n))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_two_thousand_steps_leave_nothing(tier: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1), nn.BatchNorm1d(64)) for _ in range(6)]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = torch.randn(32, 64), torch.randn(32, 64)
    passes = [ClipPass(1.0), Int8QuantizationPass(), GaussianNoisePass(std=1e-6, seed=1)]
    config = RuntimeConfig(scheduler="async", boundary_tier=tier, disk_dir=tmp_path, passes=passes)
    with nothing_left(), EAERuntime(model, optimizer, config) as runtime:
        sizes, counts = [], []
        for step in range(STEPS):
            runtime.train_step(x, lambda out: nn.functional.mse_loss(out, y))
            if step >= STEPS // 4 and step % 25 == 0:
                gc.collect()
                sizes.append(resident())
                counts.append({k: v for k, v in live().items() if k != "tensors"})
        assert all(count == counts[0] for count in counts)
        # 25 steps a sample: one boundary (8 KB) lost a step would be 200 KB a sample.
        print(f"{tier}: {slope(sizes):.0f} bytes a sample of 25 steps")
        assert slope(sizes) < 50_000
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("scheduler", ["sequential", "async"])
def test_sixty_steps_of_a_language_model_are_plains(scheduler: str, tmp_path: Path) -> None:
    losses = []
    for ours in (False, True):
        torch.manual_seed(0)
        model = build_lm(vocab=512, dim=64, depth=4, heads=4, kv_heads=2, hidden=176, max_seq_len=64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
        config = RuntimeConfig(scheduler=scheduler, boundary_tier="disk", disk_dir=tmp_path)
        runtime = EAERuntime(model, optimizer, config) if ours else None
        torch.manual_seed(1)
        run = []
        for _ in range(60):
            tokens = torch.randint(512, (4, 65)) // 2
            x, targets = tokens[:, :-1], tokens[:, 1:]
            if runtime is not None:
                run.append(runtime.train_step(x, lambda logits, t=targets: lm_loss(logits, t)))
            else:
                loss = lm_loss(model(x), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.append(loss.item())
            schedule.step()
        if runtime is not None:
            runtime.close()
        losses.append((run, [p.detach().clone() for p in model.parameters()]))
    assert losses[0][0] == losses[1][0] and losses[0][0][-1] < losses[0][0][0]
    assert all(map(torch.equal, losses[0][1], losses[1][1]))
