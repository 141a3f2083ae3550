"""The parts of the benchmarks that can be wrong: the byte counter, the bootstrap, the rounds, the workers."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._harness import action_bytes, alloc_count, competitors, rounds, verdict
from benchmarks._harness.worker_client import Worker, WorkerError

CHECKOUT = Path(__file__).resolve().parents[1]


class Probe:
    """What the tests run inside a worker."""

    def __init__(self, fail: bool = False) -> None:
        if fail:
            raise ValueError("refused to start")

    def known_allocation(self) -> list[int]:
        """Live bytes before, with, and after a tensor and a temporary; then the peak."""
        counter = alloc_count.open_counter()
        assert counter is not None
        before = counter.live()
        counter.take_peak()
        kept = torch.empty(300_001, dtype=torch.float32)
        passing = torch.empty(1_000_000, dtype=torch.uint8)
        both = counter.live()
        del passing
        one = counter.live()
        del kept
        none = counter.live()
        return [size - before for size in (both, one, none, counter.take_peak(), counter.take_peak())]

    def many_threads(self) -> list[int]:
        """Live bytes above the start while 4 threads' tensors are held, and after; each allocates and frees."""
        counter = alloc_count.open_counter()
        assert counter is not None
        before = counter.live()
        held: list[list[torch.Tensor]] = [[] for _ in range(4)]

        def churn(seed: int) -> None:
            draw = random.Random(seed)
            mine = held[seed]
            for _ in range(2000):
                if mine and draw.random() < 0.5:
                    mine.pop(draw.randrange(len(mine)))
                else:
                    mine.append(torch.empty(draw.randrange(1024, 40_000), dtype=torch.uint8))

        threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        expected = sum(t.numel() for mine in held for t in mine)
        counted = counter.live() - before
        held.clear()
        return [expected, counted, counter.live() - before]

    def bytes_by_action(self) -> list[list[Any]]:
        """Actions of one plain step of two linear blocks: label, peak and end in bytes."""
        counter = alloc_count.open_counter()
        assert counter is not None
        blocks = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(2)]
        x = torch.ones(512, 1024)
        optimizer = torch.optim.SGD([p for b in blocks for p in b.parameters()], lr=0.1)
        step = competitors.plain(blocks)

        def train(loss_fn: Any) -> None:
            step(x, loss_fn)
            optimizer.step()
            optimizer.zero_grad()

        resting = counter.live()
        recorder = action_bytes.ByteRecorder(counter, blocks, [0, 1], resting, fused_rebuild=False)
        return [[a.label, a.peak, a.end] for a in recorder.record(train, torch.sum, optimizer)]

    def environment_after(self) -> str:
        alloc_count.open_counter()
        return os.environ.get("LD_PRELOAD", "")

    def shout(self) -> str:
        print("not a reply")
        os.write(1, b"nor this\n")
        return "heard"

    def crash(self) -> None:
        os._exit(3)

    def boom(self) -> None:
        raise ZeroDivisionError("inside the competitor")


def probe(**args: Any) -> Worker:
    return Worker("tests_py.test_benchmarks_harness:Probe", args, count=True, timeout=60)


def test_the_counter_counts_a_known_allocation_exactly() -> None:
    with probe() as worker:
        first = 4 * 300_001
        assert worker.call("known_allocation") == [first + 1_000_000, first, 0, first + 1_000_000, 0]


def test_the_counter_is_exact_under_threads() -> None:
    with probe() as worker:
        expected, counted, after = worker.call("many_threads")
        assert counted == expected
        assert after == 0


def test_bytes_by_action_are_what_the_tensors_take() -> None:
    activation, weight = 4 * 512 * 1024, 4 * 1024 * 1024
    with probe() as worker:
        actions = worker.call("bytes_by_action")
    # label, most during it, held at its end. The last output is needed by no one after the loss (a sum keeps no input).
    expected = [
        ("0F", activation, activation),
        ("1F", 2 * activation, 2 * activation),
        ("2B", 2 * activation, activation),
        ("1V", 3 * activation + weight, activation + weight),
        ("0V", activation + 2 * weight, 2 * weight),
        ("U", 2 * weight, 0),
    ]
    assert [label for label, _, _ in actions] == [label for label, _, _ in expected]
    for (label, peak, end), (_, wanted_peak, wanted_end) in zip(actions, expected, strict=True):
        assert peak == pytest.approx(wanted_peak, abs=4096), label  # scalars
        assert end == pytest.approx(wanted_end, abs=4096), label


def test_children_of_a_counted_process_are_not_counted() -> None:
    with probe() as worker:
        assert worker.call("environment_after") == ""


def test_a_process_without_the_library_has_no_counter() -> None:
    code = "from benchmarks._harness import alloc_count as a; assert a.open_counter() is None"
    env = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", alloc_count.MARK)}
    subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, env=env, check=True)


def test_a_script_restarts_itself_with_the_library(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(CHECKOUT)!r})\n"
        "from benchmarks._harness import alloc_count\n"
        "assert alloc_count.ensure_preloaded()\n"
        "print(sys.argv[1:], alloc_count.open_counter() is not None)\n"
    )
    env = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", alloc_count.MARK)}
    command = [sys.executable, str(script), "--a", "b c"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "['--a', 'b c'] True\n"


def test_resting_bytes_count_a_tied_weight_once_and_the_optimizer_state() -> None:
    linear = torch.nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1, momentum=0.9)
    linear(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    assert alloc_count.resting_bytes([linear.weight, linear.weight], None) == 400
    assert alloc_count.resting_bytes(linear.parameters(), optimizer) == 800


def test_a_worker_keeps_prints_out_of_its_replies() -> None:
    with probe() as worker:
        assert worker.call("shout") == "heard"


@pytest.mark.parametrize(("method", "message"), [("boom", "ZeroDivisionError"), ("crash", r"has ended \(3\)")])
def test_a_failing_worker_is_an_error_here(method: str, message: str) -> None:
    with probe() as worker, pytest.raises(WorkerError, match=message):
        worker.call(method)


def test_a_worker_that_cannot_start_says_why() -> None:
    with pytest.raises(WorkerError, match="refused to start"):
        probe(fail=True)


def test_rounds_mirror_the_order_and_cancel_a_linear_drift() -> None:
    clock = iter(range(1000))
    order: list[str] = []

    def measure() -> float:
        return float(next(clock))

    means = rounds.mirrored_rounds({"a": measure, "b": measure, "c": measure}, 2, lambda name, _: order.append(name))
    assert "".join(order) == "abccba" * 2
    assert means["a"] == means["b"] == means["c"] == [2.5, 8.5]


@pytest.mark.parametrize(
    ("ours", "theirs", "limit", "fails"),
    [
        ([1.0] * 9, [1.0] * 9, 1.0, False),
        ([1.1] * 9, [1.0] * 9, 1.0, True),
        ([1.3, 0.9, 1.2, 0.8, 1.1, 0.95, 1.05, 1.2, 0.9], [1.0] * 9, 1.0, False),  # straddles the limit
        ([0.5] * 9, [1.0] * 9, 0.62, False),
    ],
)
def test_a_claim_fails_only_where_the_whole_interval_is_beyond(
    ours: list[float], theirs: list[float], limit: float, fails: bool
) -> None:
    assert verdict.paired_ratio(ours, theirs).fails(limit) is fails


def test_the_ratio_is_taken_pair_by_pair() -> None:
    ratio = verdict.paired_ratio([1.0, 20.0, 3.0], [2.0, 40.0, 6.0])
    assert (ratio.median, ratio.low, ratio.high, ratio.pairs) == (0.5, 0.5, 0.5, 3)


def test_the_bootstrap_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    draw = random.Random(1)
    trials = 60
    inside = 0
    for trial in range(trials):
        low, high = verdict.bootstrap_interval([draw.gauss(1.0, 0.1) for _ in range(15)], seed=trial)
        inside += low <= 1.0 <= high
    assert inside >= 0.85 * trials


@pytest.mark.parametrize(("ours", "theirs"), [([], []), ([1.0], [1.0, 2.0])])
def test_ratios_need_pairs(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError, match="equally long"):
        verdict.paired_ratio(ours, theirs)
