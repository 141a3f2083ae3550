"""What each rank does in the tests of the distributed scheduler. A check is called on all ranks with (rank, world)
and its options; it returns what the test looks at. The oracle of most is the same training in this one process:
pipeline scheduler, same microbatches, same streams."""

from __future__ import annotations

import contextlib
import gc
import json
import tempfile
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from counting import Counted, forwards
from distributed_failures import failing, losing, restarts, waiting
from distributed_models import adam, build, data, differences, loss_fn, mlp
from eae_runtime import EAERuntime, EventType, RuntimeConfig
from eae_runtime._bits import same_bits
from eae_runtime.adjoint import AdjointState
from eae_runtime.passes import ClipPass, EAEPass
from eae_runtime.schedulers import DistributedScheduler

__all__ = ["failing", "losing", "restarts", "waiting"]


def equal(
    rank: int,
    world: int,
    model: str,
    microbatches: int = 3,
    rows: int = 7,
    steps: int = 3,
    ranks: list[int] | None = None,
    targets: bool = True,
    optimizer: bool = True,
    double: bool = False,
    only_needed: bool = True,
    lose: str = "",
    evaluate: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Trains on all ranks and alone. `lose`: how foreign blocks are left out: "meta", "none" or "release"."""
    dtype = torch.float64 if double else torch.float32
    x, y = data(model, rows)
    x = x.to(dtype) if x.is_floating_point() else x
    base: dict[str, Any] = {"num_microbatches": microbatches, "seed": 7, **options}
    fn: Any = loss_fn if targets else lambda out: loss_fn(out, y)

    alone = build(model).to(dtype).train(not evaluate)
    torch.manual_seed(7)
    oracle = EAERuntime(
        alone, adam(alone) if optimizer else None, RuntimeConfig(scheduler="pipeline", random_streams=True, **base)
    )
    expected = [oracle.train_step(x, fn, y if targets else None) for _ in range(steps)]
    oracle.close()

    mine = build(model).to(dtype).train(not evaluate)
    chain: list[Any] = list(mine)
    placed = ranks if ranks is not None else None
    scheduler: Any = "distributed"
    if lose in ("meta", "none"):
        assert ranks is not None
        own = [i for i, r in enumerate(ranks) if r == rank]
        if lose == "none":
            chain = [b if i in own else None for i, b in enumerate(chain)]
            scheduler = DistributedScheduler(
                shared=[("0.weight", "2.weight", "5.weight")] if model == "language_model" else ()
            )
        else:
            chain = meta_but(chain, own)
    torch.manual_seed(7)
    config = RuntimeConfig(scheduler=scheduler, block_ranks=placed, timeout=30, **base)
    trained = nn.ModuleList([b for b in chain if b is not None])
    runtime = EAERuntime(chain, adam(trained) if optimizer else None, config)
    freed = runtime.release_foreign() if lose == "release" else None
    before = torch.get_rng_state()
    got = []
    for _ in range(steps):
        needed_x, needed_y = (
            (x if rank == 0 or not only_needed else None),
            (y if rank == world - 1 or not only_needed else None),
        )
        got.append(runtime.train_step(needed_x, fn, needed_y if targets else None))
    untouched = same_bits(before, torch.get_rng_state())
    own, left = runtime._ranks.own, len(runtime.boundary_store)
    runtime.close()
    return {
        "losses": got,
        "expected": expected,
        "wrong": differences(runtime.blocks, alone, own),
        "own": own,
        "freed": freed,
        "left": left,
        "generator untouched": untouched,
    }


def meta_but(blocks: list[nn.Module], own: list[int]) -> list[nn.Module]:
    """The blocks, those that are not `own` on the meta device; ties are kept."""
    keep = {id(p) for i in own for p in blocks[i].parameters()}
    ghosts: dict[int, nn.Parameter] = {}
    for i, block in enumerate(blocks):
        if i in own:
            continue
        for module in block.modules():
            for name, p in module._parameters.items():
                if p is not None and id(p) not in keep:
                    ghosts.setdefault(id(p), nn.Parameter(p.detach().to("meta"), p.requires_grad))
                    module._parameters[name] = ghosts[id(p)]
    return blocks


# -- counts ------------------------------------------------------------------------------------------------------------


def counts(rank: int, world: int, microbatches: int) -> dict[str, Any]:
    """Two steps in the steady state: forwards a block, most boundaries stored, messages, by their events."""
    torch.manual_seed(1)
    model = nn.Sequential(*[Counted(b) for b in mlp()])
    x, y = data("mlp", 8)
    config = RuntimeConfig(scheduler="distributed", num_microbatches=microbatches, timeout=30, trace=True)
    runtime = EAERuntime(model, adam(model), config)
    for _ in range(3):
        runtime.train_step(x, loss_fn, y)
    forwards(model)
    most = 0

    def note(event: Any) -> None:
        nonlocal most
        most = max(most, len(runtime.boundary_store))

    runtime.event_bus.subscribe(EventType.COMMUNICATION_START, note)
    runtime.event_bus.start_recording()
    for _ in range(2):
        runtime.train_step(x, loss_fn, y)
    log = runtime.event_bus.stop_recording()
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(tempfile.NamedTemporaryFile(suffix=".json")).name
        runtime.trace(path)
        with open(path, encoding="utf-8") as file:
            trace = json.load(file)
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    lanes = {e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    runtime.close()
    return {
        "forwards": forwards(model),
        "placed": runtime._ranks.placed,
        "most": most,
        "started": sum(e.type == EventType.COMMUNICATION_START for e in log),
        "finished": [e.payload for e in log if e.type == EventType.COMMUNICATION_FINISH],
        "lanes": sorted(lanes),
        "text": runtime.schedule(microbatches, targets=True),
    }


# -- memory ------------------------------------------------------------------------------------------------------------


def release(rank: int, world: int) -> dict[str, Any]:
    """What release_foreign lets go: tensors by weak reference, optimizer entries."""
    model = build("language_model")
    optimizer = adam(model)
    for p in model.parameters():
        optimizer.state[p] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    runtime = EAERuntime(model, optimizer, RuntimeConfig(scheduler="distributed", timeout=30))
    placed = runtime._ranks.placed
    own = {id(p) for i, b in enumerate(model) if placed[i] == rank for p in b.parameters()}
    foreign = [p for p in model.parameters() if id(p) not in own]
    expected = sum(p.untyped_storage().nbytes() for p in foreign)
    storages = [weakref.ref(p) for p in foreign] + [weakref.ref(optimizer.state[p]["exp_avg"]) for p in foreign]
    count = len(foreign)
    del foreign, p
    freed = runtime.release_foreign()
    gc.collect()
    x, y = data("language_model")
    loss = runtime.train_step(x, loss_fn, y)
    result = {
        "freed": freed,
        "expected": expected,
        "foreign": count,
        "alive": sum(r() is not None for r in storages),
        "entries": [len(g["params"]) for g in optimizer.param_groups],
        "states": len(optimizer.state),
        "own": len(own),
        "tied": [i for i in (0, 2, 5) if not model[i].weight.is_meta],
        "one": len({id(model[i].weight) for i in (0, 2, 5)}),
        "again": runtime.release_foreign(),
        "loss": loss,
    }
    runtime.close()
    return result


# -- shared parameters -------------------------------------------------------------------------------------------------


def hooks(rank: int, world: int) -> dict[str, Any]:
    """Hooks and gradients of the tied weight, which every rank reads."""
    x, y = data("language_model")
    model = build("language_model")
    log: list[torch.Tensor] = []
    weight = model[0].weight
    weight.register_post_accumulate_grad_hook(lambda p: log.append(p.grad.clone()))
    ranks = [0, 0, 1, 1, 1, 1] if world == 2 else [0, 1, 2, 2, 3, 3]
    runtime = EAERuntime(
        model, None, RuntimeConfig(scheduler="distributed", num_microbatches=3, block_ranks=ranks, timeout=30)
    )
    runtime.train_step(x, loss_fn, y)
    runtime.close()
    grad = None if weight.grad is None else weight.grad.tolist()
    return {
        "reads": any(ranks[b] == rank for b in (0, 2, 5)),
        "fired": len(log),
        "last": log[-1].tolist() if log else None,
        "grad": grad,
    }


def setup_errors(rank: int, world: int) -> dict[str, str]:
    """What making a runtime, or its first step, raises for bad input, by name."""
    x, y = data("mlp")
    found: dict[str, str] = {}

    def attempt(name: str, fn: Callable[[], Any]) -> None:
        try:
            fn()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        else:
            found[name] = ""

    def make(model: Any = None, **options: Any) -> EAERuntime:
        return EAERuntime(
            build("mlp") if model is None else model,
            None,
            RuntimeConfig(scheduler=options.pop("scheduler", "distributed"), timeout=30, **options),
        )

    attempt("length", lambda: make(block_ranks=[0, 1]))
    attempt("too high", lambda: make(block_ranks=[0, 0, 0, 1, world]))
    attempt("falling", lambda: make(block_ranks=[0, 1, 0, 1, 1]))
    attempt("idle", lambda: make(block_ranks=[0] * 5))
    attempt("too few", lambda: make(build("mlp")[: world - 1] if world > 1 else None))
    attempt("disagree", lambda: make(num_microbatches=2 + rank))
    attempt("none of mine", lambda: make([None] * 5))
    attempt("meta of mine", lambda: make(build("mlp").to("meta")))
    attempt("streams", lambda: make(random_streams=False))
    attempt("other values", lambda: make(build("language_model", seed=rank)))
    attempt("unknown name", lambda: make(scheduler=DistributedScheduler(shared=[("0.nothing", "4.weight")])))
    with make(num_microbatches=2) as runtime:
        attempt("no targets", lambda: runtime.train_step(x, lambda out: out.sum()))
        attempt("rows", lambda: runtime.train_step(x, loss_fn, y[:3]))
        attempt("no input", lambda: runtime.train_step(None, loss_fn, y))
        attempt("not a loss", lambda: runtime.train_step(x, 3 if rank == world - 1 else loss_fn, y))
        attempt("split", lambda: runtime.forward(x))
        attempt("fine after all", lambda: runtime.train_step(x, loss_fn, y))
        runtime.steps += rank
        attempt("steps", lambda: runtime.train_step(x, loss_fn, y))
    attempt("closed", lambda: runtime.train_step(x, loss_fn, y))
    frozen_here = build("language_model")
    if rank == 0:
        frozen_here[0].requires_grad_(False)
    with make(frozen_here) as runtime:
        attempt("frozen on one", lambda: runtime.train_step(*reversed_none(data("language_model"))))
    borrowing = nn.Sequential(*mlp()[:-1], Borrowing())
    borrowing[-1].owner = [borrowing[0]]
    with make(borrowing) as runtime:
        attempt("borrowed", lambda: runtime.train_step(x, lambda out, t: out.sum(), y))
    return found


def reversed_none(pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, Any, Any]:
    return pair[0], loss_fn, pair[1]


class Borrowing(nn.Module):
    """Reads a parameter of another block that it has not registered."""

    owner: list[nn.Linear]

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h @ self.owner[0].weight


class Told(EAEPass):
    """Writes down what a pass is told."""

    name = "told"

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def process(self, adjoint: AdjointState, context: dict[str, Any] | None = None) -> AdjointState:
        assert context is not None
        self.seen.append(
            (
                adjoint.layer_id,
                context["microbatch"],
                context["rows"],
                context["weight"],
                adjoint.metadata.get("trail", 0),
            )
        )
        return AdjointState(
            tensor=adjoint.tensor, layer_id=adjoint.layer_id, metadata={"trail": adjoint.metadata.get("trail", 0) + 1}
        )


def passes(rank: int, world: int) -> dict[str, Any]:
    """Clipping and a Python pass on every boundary, against one process."""
    x, y = data("mlp")
    results = {}
    for kind in ("pipeline", "distributed"):
        model, told = build("mlp"), Told()
        torch.manual_seed(7)
        config = RuntimeConfig(
            scheduler=kind, num_microbatches=3, passes=[ClipPass(0.01), told], random_streams=True, timeout=30
        )
        runtime = EAERuntime(model, adam(model), config)
        losses = [runtime.train_step(x, loss_fn, y) for _ in range(2)]
        results[kind] = (model, losses, told.seen)
        ranks = runtime._ranks
        runtime.close()
    assert ranks is not None
    return {
        "losses": results["distributed"][1],
        "expected": results["pipeline"][1],
        "wrong": differences(list(results["distributed"][0]), results["pipeline"][0], ranks.own),
        "told": sorted(results["distributed"][2]),
        "all": sorted(results["pipeline"][2]),
    }


def flags(rank: int, world: int) -> list[bool]:
    with EAERuntime(build("mlp"), None, RuntimeConfig(scheduler="distributed", timeout=30)) as runtime:
        return [runtime.any_rank(False), runtime.any_rank(rank == world - 1)]


def described(rank: int, world: int) -> list[list[bool]]:
    """Whether each send of a step carried its description: first step, second, one with fewer rows, that once more."""
    x, y = data("mlp", 8)
    model = build("mlp")
    runtime = EAERuntime(model, None, RuntimeConfig(scheduler="distributed", num_microbatches=2, timeout=30))
    steps = []
    for rows in (8, 8, 4, 4):
        runtime.event_bus.start_recording()
        runtime.train_step(x[:rows], loss_fn, y[:rows])
        log = runtime.event_bus.stop_recording()
        sends = [e.payload for e in log if e.type == EventType.COMMUNICATION_FINISH and e.payload["kind"][0] == "X"]
        steps.append([p["described"] for p in sends])
    runtime.close()
    return steps


def threads(rank: int, world: int) -> list[str]:
    """The names of the threads that are left when a runtime is closed."""
    x, y = data("mlp")
    with EAERuntime(build("mlp"), None, RuntimeConfig(scheduler="distributed", timeout=30)) as runtime:
        runtime.train_step(x, loss_fn, y)
        assert "eae-wait" in [t.name for t in threading.enumerate()]
    gc.collect()
    return [t.name for t in threading.enumerate()]
