"""Fixtures that several files use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from eae_runtime import RuntimeConfig
from oracle import nothing_left

SETTINGS = [
    *[(scheduler, tier) for scheduler in ("sequential", "async") for tier in ("device", "host", "disk")],
    ("pipeline", "device"),
    ("pipeline", "host"),
]


@pytest.fixture(params=SETTINGS, ids="-".join)
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RuntimeConfig]:
    """Every scheduler that runs in one process, on every tier. Then the core holds no more, the folder no file."""
    scheduler, tier = request.param
    with nothing_left():
        yield RuntimeConfig(scheduler=scheduler, boundary_tier=tier, disk_dir=tmp_path)
        assert list(tmp_path.iterdir()) == []
