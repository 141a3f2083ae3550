"""Profiler: totals by name."""

from __future__ import annotations

import threading

import pytest

from eae_runtime.profiler import Profiler


def test_report_adds_up() -> None:
    profiler = Profiler()
    for seconds in (0.5, 0.25, 1.0):
        profiler.record("a", seconds)
    profiler.record("b", 2.0)
    assert profiler.report() == {
        "a": {
            "count": 3,
            "total_seconds": 1.75,
            "mean_seconds": pytest.approx(1.75 / 3),
            "max_seconds": 1.0,
            "min_seconds": 0.25,
        },
        "b": {"count": 1, "total_seconds": 2.0, "mean_seconds": 2.0, "max_seconds": 2.0, "min_seconds": 2.0},
    }
    profiler.reset()
    assert profiler.report() == {}


def test_track_records_also_when_an_exception_leaves_it() -> None:
    profiler = Profiler()
    with pytest.raises(ValueError), profiler.track("a"):
        raise ValueError
    assert profiler.report()["a"]["count"] == 1


def test_disabled_records_nothing_and_keeps_what_was() -> None:
    profiler = Profiler()
    profiler.record("a", 1.0)
    profiler.enabled = False
    profiler.record("a", 1.0)
    with profiler.track("b"):
        pass
    assert {name: row["count"] for name, row in profiler.report().items()} == {"a": 1}


def test_a_long_run_does_not_grow() -> None:
    profiler = Profiler()
    for _ in range(10_000):
        profiler.record("a", 1.0)
    assert len(profiler._fresh) < 4096
    assert profiler.report()["a"]["count"] == 10_000
    assert len(profiler._totals) == 1 and len(profiler._fresh) == 0 and not hasattr(profiler._totals["a"], "__dict__")


def test_threads_lose_no_record() -> None:
    profiler = Profiler()

    def work() -> None:
        for _ in range(2000):
            profiler.record("a", 1.0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert profiler.report()["a"]["count"] == profiler.report()["a"]["total_seconds"] == 8000
