"""A wrapped model in two processes under DDP."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import multiprocessing

import ddp_worker

pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.parametrize("bucket_view", [False, True])
def test_two_processes_under_ddp(bucket_view: bool, tmp_path: Path) -> None:
    """Gradients of plain DDP, bitwise, over six steps with accumulation, branches and unused parameters."""
    multiprocessing.spawn(ddp_worker.work, args=(str(tmp_path), bucket_view), nprocs=2, join=True)
    assert (tmp_path / "done0").exists() and (tmp_path / "done1").exists()
