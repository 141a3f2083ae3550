"""Shows in a few seconds that an installed package works: one training step, bit for bit against plain PyTorch, and
nothing left behind."""

from __future__ import annotations

import copy
import importlib.metadata
import json
import sys

import torch
from torch import nn

import eae_runtime
from eae_runtime import _bridge


def main() -> int:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 4))
    plain = copy.deepcopy(model)
    x, target = torch.randn(5, 8), torch.randn(5, 4)

    def loss_fn(output: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(output, target)

    torch.manual_seed(1)
    expected = loss_fn(plain(x))
    expected.backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()

    before = json.loads(_bridge.live())
    torch.manual_seed(1)
    runtime = eae_runtime.EAERuntime(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = runtime.train_step(x, loss_fn)
    close = getattr(runtime, "close", None)
    if close is not None:
        close()
    after = json.loads(_bridge.live())

    same = all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), plain.parameters()))
    version = importlib.metadata.version("eae-runtime")
    print(
        f"Python {sys.version.split()[0]}, torch {torch.__version__}, eae-runtime {version} at {eae_runtime.__file__}: "
        f"loss {loss:.6f} against {expected.item():.6f}, parameters {'equal' if same else 'DIFFER'}"
    )
    if loss != expected.item() or not same:
        return 1
    if after["tensors"] > before["tensors"] or after["buffers"] > before["buffers"]:
        print(f"the core still holds something: {before} -> {after}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
