"""The distributed scheduler, in groups of two and four processes that run all checks of a size one after another (see
distributed_checks.py), and in groups of their own where a process has to die."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from eae_runtime import EAERuntime, RuntimeConfig, _bridge
from eae_runtime._bits import same_bits
from eae_runtime._placement import place
from ranks import LIMIT, Workers


@pytest.fixture(scope="module")
def two() -> Iterator[Workers]:
    with Workers(2) as workers:
        yield workers


@pytest.fixture(scope="module")
def four() -> Iterator[Workers]:
    with Workers(4) as workers:
        yield workers


@pytest.fixture
def group(request: pytest.FixtureRequest, world: int) -> Workers:
    workers: Workers = request.getfixturevalue({2: "two", 4: "four"}[world])
    return workers


both = pytest.mark.parametrize("world", [2, 4])


def assert_equal(results: list[dict[str, Any]], blocks: int) -> None:
    """Every rank's losses and own blocks are the oracle's; every block is somewhere once."""
    for rank, result in enumerate(results):
        assert result["losses"] == result["expected"], f"rank {rank}"
        assert result["wrong"] == [], f"rank {rank}"
        assert result["left"] == 0
        assert result["generator untouched"]
    assert [i for result in results for i in result["own"]] == list(range(blocks))


# -- the same bits as one process --------------------------------------------------------------------------------------

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "mlp, dropout, last microbatch smaller": (5, {"model": "mlp"}),
    "mlp, one microbatch, no targets": (5, {"model": "mlp", "microbatches": 1, "targets": False}),
    "mlp, more microbatches than ranks, all inputs everywhere": (
        5,
        {"model": "mlp", "microbatches": 8, "rows": 8, "only_needed": False},
    ),
    "mlp, float64, gradients without optimizer": (5, {"model": "mlp", "double": True, "optimizer": False}),
    "language model, tied three times": (6, {"model": "language_model"}),
    "language model, gradients without optimizer": (6, {"model": "language_model", "optimizer": False}),
    "language model, eval mode": (6, {"model": "language_model", "evaluate": True}),
    "language model, clipped": (6, {"model": "language_model", "grad_clip_norm": 0.05}),
    "batch norm and writes in place": (5, {"model": "norms", "rows": 8, "microbatches": 2}),
    "trees with a mask and a transposed tensor": (5, {"model": "trees"}),
    "frozen first blocks": (5, {"model": "frozen"}),
    "host tier": (5, {"model": "mlp", "boundary_tier": "host"}),
    "disk tier": (6, {"model": "language_model", "boundary_tier": "disk"}),
    "released": (6, {"model": "language_model", "lose": "release", "grad_clip_norm": 0.1}),
}


@both
@pytest.mark.parametrize("case", CASES)
def test_bitwise_equal_to_one_process(group: Workers, world: int, case: str) -> None:
    blocks, options = CASES[case]
    assert_equal(group.run("equal", **options), blocks)


@both
@pytest.mark.parametrize("lose", ["meta", "none"])
def test_foreign_blocks_need_not_exist(group: Workers, world: int, lose: str) -> None:
    ranks = [0, 0, 1, 1, 1, 1] if world == 2 else [0, 1, 1, 2, 3, 3]
    assert_equal(group.run("equal", model="language_model", ranks=ranks, lose=lose), 6)


@both
def test_uneven_ranks(group: Workers, world: int) -> None:
    ranks = [0, 1, 1, 1, 1] if world == 2 else [0, 0, 1, 2, 3]
    assert_equal(group.run("equal", model="mlp", ranks=ranks), 5)


@both
def test_passes_see_what_they_see_in_one_process(group: Workers, world: int) -> None:
    results = group.run("passes")
    told = [entry for result in results for entry in result["told"]]
    assert sorted(told) == results[0]["all"]
    for result in results:
        assert result["losses"] == result["expected"] and result["wrong"] == []


@both
def test_a_step_is_repeated_on_all_ranks(group: Workers, world: int) -> None:
    for result in group.run("restarts"):
        assert result["losses"] == result["expected"] and result["wrong"] == []
        assert result["sweeps"] == 7  # six steps, one of them twice


@both
def test_a_tied_weight_ends_equal_everywhere_and_its_hooks_fire(group: Workers, world: int) -> None:
    results = group.run("hooks")
    reading = [r for r in results if r["reads"]]
    assert len(reading) == (2 if world == 2 else 3)
    # The rank of the earliest reader accumulates, once a microbatch; the others are given the total.
    assert [r["fired"] for r in reading] == [3] + [1] * (len(reading) - 1)
    assert all(r["grad"] == reading[0]["grad"] == r["last"] for r in reading)
    assert all(r["grad"] is None and r["fired"] == 0 for r in results if not r["reads"])


# -- what is counted ---------------------------------------------------------------------------------------------------


@both
def test_counts(group: Workers, world: int) -> None:
    micro = 4
    results = group.run("counts", microbatches=micro)
    placed = results[0]["placed"]
    assert placed == ([0, 0, 0, 1, 1] if world == 2 else [0, 0, 1, 2, 3])
    for rank, result in enumerate(results):
        own = [i for i, r in enumerate(placed) if r == rank]
        # Forward and rebuild of each microbatch, the last block forward alone; nothing of other ranks.
        expected = [2 * micro * (0 if i not in own else 1 if i == 4 else 2) for i in range(5)]
        assert result["forwards"] == expected
        # 1F1B: never more microbatches than ranks from here to the end.
        stored = len(own) - (rank == world - 1)
        assert result["most"] == stored * min(micro, world - rank)
        kinds = [p["kind"] for p in result["finished"]]
        first, last = rank == 0, rank == world - 1
        steps = 2 * micro
        assert {k: kinds.count(k) for k in set(kinds)} == {
            **({} if last else {"XF": steps, "YB": steps}),
            **({} if first else {"YF": steps, "XB": steps}),
        }
        assert result["started"] == len(kinds)
        for p in result["finished"]:
            assert p["rank"] == rank and abs(p["peer"] - rank) == 1 and 0 <= p["microbatch"] < micro
            assert p["bytes"] == 2 * 8 * 4  # two rows of eight float32
            assert not p["described"]  # shapes travel when they change, not each time
        assert f"rank {rank}" in result["lanes"]


@both
def test_descriptions_travel_when_they_change(group: Workers, world: int) -> None:
    for result in group.run("described"):
        first, second, smaller, again = result
        assert first and all(first[:1])
        assert not any(second)
        assert any(smaller) and not any(again)


@both
def test_each_rank_walks_its_part_of_a_validated_schedule(group: Workers, world: int) -> None:
    micro = 4
    texts = [r["text"] for r in group.run("counts", microbatches=micro)]
    placed = place(None, 5, world)
    spec = {
        "blocks": [{} for _ in range(5)],
        "world": world,
        "ranks": placed,
        "microbatches": micro,
        "targets": True,
        "prefetch": 2,
    }
    _bridge.call("SchedValidate", json.dumps(spec), "\n".join(texts))
    lines = texts[0].split("\n")
    lines[1] = " ".join(reversed(lines[1].split()))
    with pytest.raises(ValueError, match="rank 0"):
        _bridge.call("SchedValidate", json.dumps(spec), "\n".join(["\n".join(lines), *texts[1:]]))


@both
def test_release_foreign(group: Workers, world: int) -> None:
    for rank, result in enumerate(group.run("release")):
        assert result["freed"] == result["expected"] > 0
        assert result["alive"] == 0
        assert result["entries"] == [result["own"], 1]
        assert result["states"] == result["own"]
        assert result["again"] == 0
        # The tied weight stays where a block of this rank reads it, and is one object in all blocks.
        reads = world == 2 or rank != 2
        assert result["tied"] == ([0, 2, 5] if reads else [])
        assert result["one"] == 1


# -- failures ----------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("bad", "where", "action"),
    [
        (0, "forward", "0C1 (block 0, Trap_0)"),
        (0, "vjp", "0V0 (block 0, Trap_0)"),
        (1, "forward", "1R0 (block 1, Trap_1)"),
        (1, "vjp", "1V0 (block 1, Trap_1)"),
        (1, "pass", "P1 ("),
        (-1, "loss", "B0 ("),
        (-1, "targets", "the step, outside its actions"),
    ],
)
def test_a_failing_rank_ends_the_step_on_all(group: Workers, world: int, bad: int, where: str, action: str) -> None:
    bad %= world
    if (world, bad, where) == (4, 1, "forward"):
        action = "1C1 (block 1, Trap_1)"  # the trap's second run is still a forward
    results = group.run("failing", bad=bad, where=where)
    for rank, result in enumerate(results):
        assert result["undone"], f"rank {rank}"
        if rank == bad:
            assert result["error"] in ("ValueError", "PassError", "ConfigError")
            assert where == "targets" or any(action in note for note in result["notes"])
        else:
            assert result["error"] == "DistributedError"
            assert f"rank {bad} failed in " in result["text"] and action in result["text"]
            assert ("4 rows" if where == "targets" else "the trap was sprung") in result["text"]
        # The connections are in step: training goes on as if the step had not been tried.
        assert result["losses"] == result["expected"] and result["wrong"] == []


def alone(world: int, check: str, ranks: list[int], **options: Any) -> list[Any]:
    """A check in a group of its own, of which only `ranks` answer."""
    workers = Workers(world)
    try:
        workers.start(check, **options)
        return workers.results(ranks)
    finally:
        for process in workers.processes:
            process.kill()
        workers.close()


@pytest.mark.parametrize(("world", "how", "timeout"), [(2, "die", 60.0), (4, "die", 60.0), (3, "hang", 2.0)])
def test_a_lost_rank_ends_the_step_on_all_others(world: int, how: str, timeout: float) -> None:
    results = alone(world, "losing", list(range(world - 1)), how=how, timeout=timeout)
    for rank, result in enumerate(results):
        first, second = result["texts"]
        assert (
            first.startswith("DistributedError: rank ")
            and f"waiting for rank {rank + 1 if how == 'hang' else ''}" in first
        )
        assert "Nothing was updated" in first and "cannot be used any more" in first
        assert second.startswith(f"DistributedError: rank {rank}: the process group cannot be used any more")
        assert result["undone"]
        # A dead process is noticed at once, a silent one after the timeout.
        assert result["seconds"] < (timeout / 2 if how == "die" else timeout + 20)


def test_interrupted_while_waiting_for_another_rank() -> None:
    (result,) = alone(2, "waiting", [0])
    assert result["interrupted"] and result["seconds"] < 1.0 and result["closing"] < 2.0


@both
def test_bad_input(group: Workers, world: int) -> None:
    results = group.run("setup_errors")
    last = world - 1
    expected = {
        "length": "ConfigError: block_ranks=[0, 1]: ranks: 2 given for 5 blocks",
        "too high": f"block_ranks=[0, 0, 0, 1, {world}]: ranks: block 4 is on rank {world} of world {world}",
        "falling": "ConfigError: block_ranks=[0, 1, 0, 1, 1]: ranks: block 2 is on rank 0, before block 1's rank 1",
        "idle": f"ConfigError: block_ranks=[0, 0, 0, 0, 0]: rank 1 of {world} has no block",
        "too few": f"ConfigError: block_ranks: rank {last} of {world} has no block",
        "disagree": "ConfigError: the ranks disagree on num_microbatches: 2 on rank 0, 3 on rank 1",
        "none of mine": "is None but belongs to rank",
        "meta of mine": "has meta parameters in its own blocks",
        "streams": "ConfigError: random_streams=False",
        "other values": "ConfigError: the shared parameter 0.weight = 2.weight = 5.weight differs between ranks",
        "no targets": "PlanError: the distributed schedule calls the loss per microbatch: give targets=",
        "split": "PlanError: with blocks on several ranks a step runs as a whole: call train_step()",
        "fine after all": "",
        "steps": "ConfigError: the ranks are at different steps",
        "closed": "ClosedError",
        "frozen on one": "requires grad on some ranks only",
    }
    for name, text in expected.items():
        for rank, result in enumerate(results):
            assert (text in result[name]) if text else result[name] == "", (rank, name, result[name])
    # The rank at fault raises its own error, the others name it.
    for name, bad, text in [
        ("unknown name", 0, "ConfigError: shared: block 0 has no parameter '0.nothing'"),
        ("no input", 0, "TensorTypeError: the input is NoneType"),
        ("rows", last, "ConfigError: the tensors of targets= have 3 rows"),
        ("not a loss", last, "TensorTypeError: loss_fn is int"),
        ("borrowed", last, "PlanError: parameter 'weight' of block 0 (rank 0) is read on rank"),
    ]:
        for rank, result in enumerate(results):
            assert text in result[name], (rank, name, result[name])
            assert result[name].startswith(
                text.partition(":")[0] if rank == bad else f"DistributedError: rank {bad} failed in "
            )


@both
def test_any_rank(group: Workers, world: int) -> None:
    assert group.run("flags") == [[False, True]] * world


def test_nothing_is_left_when_the_runtimes_are_closed(two: Workers) -> None:
    for names in two.run("threads"):
        assert "eae-wait" not in names


# -- one process -------------------------------------------------------------------------------------------------------


def test_one_process_warns_and_is_sequential() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    with EAERuntime(model, None, RuntimeConfig(scheduler="distributed", block_ranks=[0, 1])) as runtime:
        with pytest.warns(RuntimeWarning, match="single process and is sequential"):
            loss = runtime.train_step(x, lambda y: y.square().sum())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            runtime.train_step(x, lambda y: y.square().sum())
        assert runtime.release_foreign() == 0
        assert runtime.any_rank(True) and not runtime.any_rank(False)
    grads = [p.grad for p in model.parameters()]
    for p in model.parameters():
        p.grad = None
    plain = model(x).square().sum()
    plain.backward()
    assert loss == plain.item()
    assert all(same_bits(g, p.grad) for g, p in zip(grads, model.parameters()))


# -- torchrun ----------------------------------------------------------------------------------------------------------

SCRIPT = """
    import os
    import torch
    import torch.distributed as dist
    from torch import nn
    from eae_runtime import EAERuntime, RuntimeConfig

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Dropout(0.1), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    config = RuntimeConfig(scheduler="distributed", num_microbatches=4, grad_clip_norm=1.0, timeout=60)
    runtime = EAERuntime(model, optimizer, config)
    freed = runtime.release_foreign()
    x = torch.randn(32, 8)
    y = (x[:, 0] > 0).long()
    losses = [runtime.train_step(x, nn.functional.cross_entropy, targets=y) for _ in range(30)]
    runtime.close()
    with open(os.path.join(os.environ["OUT"], f"{rank}.txt"), "w") as file:
        file.write(f"{freed} {[x.hex() for x in losses]}")
    dist.destroy_process_group()
"""


def test_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "OUT": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = ((tmp_path / f"{rank}.txt").read_text().partition(" ") for rank in range(2))
    assert first[2] == second[2]
    assert int(first[0]) > 0 and int(second[0]) > 0
    losses = [float.fromhex(text.strip("'")) for text in first[2].strip("[]").split(", ")]
    assert losses[-1] < losses[0] / 2
