"""BlockCall under another driver: the user's own `loss.backward()`, alone and in two processes under DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import multiprocessing, nn

import ddp_worker
from autograd_driver import Driven
from counting import Interior
from models import CASES
from oracle import assert_same, build, listen, plain_step

pytestmark = pytest.mark.filterwarnings("error")

# Chains of one tensor between blocks. (A leaf that one block uses several times and another block too adds up in
# another order here.)
SINGLE = [
    "mlp",
    "cnn",
    "transformer",
    "transformer eval",
    "embedding",
    "attention",
    "attention eval",
    "lstm",
    "residual",
    "frozen prefix",
    "frozen middle",
    "write",
    "closure",
    "adapters in hooks",
    "noise",
    "buffers",
    "differentiates inside",
]


@pytest.mark.parametrize("name", SINGLE)
def test_the_users_own_backward(name: str) -> None:
    """Outputs, loss, gradients, buffers, random state, and each hook once with plain's value."""
    case = CASES[name]
    runs = []
    for driven in (False, True):
        model, x = build(case)
        log: list[Any] = []
        listen(model, log)
        if driven:
            loose = getattr(model, "loose", {})
            names = [n for n, _ in model.named_children()]
            for n in names:
                setattr(model, n, Unnamed(model._modules[n]))
            model.loose = loose
        runs.append([plain_step(model, x, case.loss, log) for _ in range(4)])
    for step, (plain, ours) in enumerate(zip(*runs, strict=True)):
        assert_same(ours, plain, step)


class Unnamed(Driven):
    """Driven, with the names of parameters and buffers as they were."""

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Any:
        return self.inner.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Any:
        return self.inner.named_buffers(prefix, recurse, remove_duplicate)

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
        return self.inner.named_modules(memo, prefix, remove_duplicate)


def test_nothing_but_the_input_is_kept() -> None:
    model = nn.Sequential(*[Driven(Interior(8)) for _ in range(4)])
    for _ in range(4):
        Interior.forget()
        loss = model(torch.randn(6, 8)).sum()
        assert Interior.held() == 0
        loss.backward()
        assert Interior.peak == 2 * 6 and Interior.held() == 0


# -- two processes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_view", [False, True])
def test_two_processes_under_ddp(bucket_view: bool, tmp_path: Path) -> None:
    """Gradients of plain DDP, bitwise, over six steps with accumulation, branches and unused parameters."""
    multiprocessing.spawn(ddp_worker.work, args=(str(tmp_path), bucket_view), nprocs=2, join=True)
    assert (tmp_path / "done0").exists() and (tmp_path / "done1").exists()
