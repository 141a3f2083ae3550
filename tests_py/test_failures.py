"""Bad input: each a typed error that names the block and the cure, with nothing half-updated."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from eae_runtime import AdjointState, EAERuntime, RuntimeConfig, build_scheduler
from eae_runtime.errors import (
    ClosedError,
    ConfigError,
    EAEError,
    LossError,
    PassError,
    PlanError,
    RebuildMismatchError,
    TensorTypeError,
)
from eae_runtime.passes import ClipPass, EAEPass, Int8QuantizationPass
from faults import differences, module_state, small, untouched
from models import chain
from oracle import nothing_left
from test_fault_walk import notes_of

pytestmark = pytest.mark.filterwarnings("error")

SETTINGS = [("sequential", "device"), ("async", "host"), ("sequential", "disk"), ("pipeline", "device")]


@pytest.fixture(params=SETTINGS, ids="-".join)
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    scheduler, tier = request.param
    with nothing_left():
        yield {"scheduler": scheduler, "boundary_tier": tier, "disk_dir": tmp_path}
    assert list(tmp_path.iterdir()) == []


def calls_of(runtime: EAERuntime) -> list[Callable[[Any, Any], Any]]:
    """The ways into a step with an input and a loss."""
    return [runtime.train_step, runtime.compute_gradients, lambda x, _: runtime.forward(x)]


def refused(
    settings: dict[str, Any],
    error: type[Exception],
    text: str,
    x: Any = None,
    loss_fn: Any = torch.sum,
    model: nn.Sequential | None = None,
) -> None:
    """Every way into a step raises, twice, and changes nothing."""
    model = small() if model is None else model
    x = torch.randn(4, 3) if x is None else x
    with EAERuntime(model, config=RuntimeConfig(**settings)) as runtime:
        for call in calls_of(runtime):
            for _ in range(2):
                with untouched(runtime, module_state(model)), pytest.raises(error, match=text):
                    call(x, loss_fn)


def refused_by_the_reverse(
    settings: dict[str, Any], error: type[Exception], text: str, loss_fn: Any = torch.sum, passes: Any = ()
) -> None:
    """The same for a fault that the loss or what follows it shows; also for a backward alone, whose forward stays."""
    model, x = small(), torch.randn(4, 3)
    with EAERuntime(model, config=RuntimeConfig(passes=passes, **settings)) as runtime:
        for _ in range(2):
            for call in (runtime.train_step, runtime.compute_gradients):
                with untouched(runtime, module_state(model)), pytest.raises(error, match=text):
                    call(x, loss_fn)
            output = runtime.forward(x)
            before = module_state(model)()
            with pytest.raises(error, match=text):
                runtime.backward(output, loss_fn)
            assert differences(before, module_state(model)()) == []


# -- what a runtime is made of -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "error", "text"),
    [
        ([], ConfigError, "zero blocks"),
        (nn.Sequential(), ConfigError, "zero blocks"),
        (nn.ModuleList(), ConfigError, "zero blocks"),
        (None, TensorTypeError, "NoneType"),
        (3, TensorTypeError, "int"),
        (torch.sum, TensorTypeError, r"nn\.Sequential"),
        ([nn.Linear(1, 1), torch.tanh], TensorTypeError, "block 1"),
        (nn.ModuleDict({"a": nn.Linear(1, 1)}), TensorTypeError, "ModuleDict"),
    ],
    ids=str,
)
def test_models(model: Any, error: type[Exception], text: str) -> None:
    with nothing_left(), pytest.raises(error, match=text) as caught:
        EAERuntime(model)
    assert isinstance(caught.value, EAEError)


def test_other_arguments() -> None:
    with nothing_left():
        with pytest.raises(ConfigError, match=r"torch\.optim\.Optimizer"):
            EAERuntime(small(), optimizer="sgd")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="RuntimeConfig"):
            EAERuntime(small(), config={"scheduler": "async"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"scheduler": "psychic"}, "'sequential', 'async', 'pipeline', 'distributed'"),
        ({"scheduler": 3}, "3"),
        ({"memory": "swap"}, "'pool', 'none'"),
        ({"backend": "tpu"}, "'cuda'"),
        ({"boundary_tier": "tape"}, "'device', 'host', 'disk'"),
        ({"boundary_precision": torch.int8}, "fp16"),
        ({"boundary_precision": "int4"}, "bf16"),
        ({"compute_dtype": torch.int32}, "floating-point"),
        ({"compute_dtype": "fp16"}, "floating-point"),
        ({"passes": ["clip"]}, r"passes\[0\]"),
        ({"passes": [ClipPass]}, r"passes\[0\]"),
        ({"num_microbatches": 0}, "whole number from 1"),
        ({"grad_clip_norm": -1.0}, "above 0"),
        ({"log_level": "LOUD"}, "DEBUG"),
    ],
    ids=str,
)
def test_unknown_names_and_types(options: dict[str, Any], text: str) -> None:
    """A ValueError or TypeError that says what is allowed; also where the field was changed after it was checked."""
    with nothing_left():
        with pytest.raises((ConfigError, TensorTypeError), match=text):
            EAERuntime(small(), config=RuntimeConfig(**options))
        config = RuntimeConfig()
        for name, value in options.items():
            setattr(config, name, value)
        with pytest.raises((ConfigError, TensorTypeError), match=text):
            EAERuntime(small(), config=config)


def test_build_scheduler() -> None:
    with pytest.raises(ValueError, match="sequential, async, pipeline, distributed"):
        build_scheduler("psychic")


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with nothing_left(), pytest.raises((OSError, ValueError), match="nowhere"):
        config = RuntimeConfig(boundary_tier="disk", disk_dir=tmp_path / "file" / "nowhere")
        (tmp_path / "file").write_text("not a folder")
        EAERuntime(small(), config=config)


# -- inputs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("x", [3, "text", [1, 2], (), {"a": None}], ids=str)
def test_an_input_without_tensors(x: Any, settings: dict[str, Any]) -> None:
    refused(settings, TensorTypeError, "holds no tensor", x)


def test_an_input_of_another_shape(settings: dict[str, Any]) -> None:
    """PyTorch's own error, with the block named beside it."""
    model = chain(nn.Identity(), nn.Linear(3, 2))
    with EAERuntime(model, config=RuntimeConfig(**settings)) as runtime:
        for call in calls_of(runtime):
            with untouched(runtime, module_state(model)), pytest.raises(RuntimeError, match="shapes") as caught:
                call(torch.ones(4, 5), torch.sum)
            assert "block 1, Linear_1" in notes_of(caught.value)
            del caught


def test_an_empty_batch(settings: dict[str, Any]) -> None:
    refused(settings, ConfigError, "batch is empty", torch.empty(0, 3))
    refused(settings, ConfigError, "batch is empty", (torch.ones(2, 3), torch.empty(0, 3)))


def test_a_sparse_or_meta_input(settings: dict[str, Any]) -> None:
    refused(settings, TensorTypeError, r"sparse.*\.to_dense\(\)", torch.ones(4, 3).to_sparse())
    refused(settings, TensorTypeError, "meta", torch.ones(4, 3, device="meta"))


def test_a_sparse_or_meta_output(settings: dict[str, Any]) -> None:
    sparse = chain(nn.Linear(3, 3), lambda x: x.to_sparse(), nn.Linear(3, 2))
    refused(settings, TensorTypeError, r"block 1 \(Fn_1\).*sparse.*to_dense", model=sparse)
    meta = chain(nn.Linear(3, 3), lambda x: x.to("meta"), nn.Linear(3, 2))
    refused(settings, TensorTypeError, r"block 1 \(Fn_1\).*meta", model=meta)
    last = chain(nn.Linear(3, 3), lambda x: (x, x.to_sparse()))
    refused(settings, TensorTypeError, r"block 1 \(Fn_1\).*sparse", model=last)


@pytest.mark.parametrize("value", [None, 3.0, "text", [], {"a": 1}], ids=str)
def test_a_block_that_returns_no_tensor(value: Any, settings: dict[str, Any]) -> None:
    model = chain(nn.Linear(3, 3), lambda x: value, nn.Linear(3, 2))
    refused(settings, TensorTypeError, r"block 1 \(Fn_1\) returned no tensor", model=model)


# -- losses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss_fn", "error", "text"),
    [
        (lambda y: torch.tensor(1.0), LossError, "no gradient"),
        (lambda y: torch.tensor(1.0, requires_grad=True), LossError, "no gradient"),
        (lambda y: y.detach().sum(), LossError, "no gradient"),
        (lambda y: y, LossError, "scalar"),
        (lambda y: y.sum().item(), LossError, "float"),
        (lambda y: None, LossError, "NoneType"),
        (lambda y: (y.sum(), y), LossError, "tuple"),
        ("mse", TensorTypeError, "callable"),
        (None, TensorTypeError, "callable"),
    ],
    ids=str,
)
def test_losses(loss_fn: Any, error: type[Exception], text: str, settings: dict[str, Any]) -> None:
    refused_by_the_reverse(settings, error, text, loss_fn)


def test_the_error_for_no_gradient_is_the_one_of_0_1_1() -> None:
    with EAERuntime(small()) as runtime, pytest.raises(RuntimeError, match="no gradient"):
        runtime.backward(runtime.forward(torch.ones(4, 3)), lambda y: torch.tensor(1.0))


def test_another_loss_may_be_tried_after_one_that_failed(settings: dict[str, Any]) -> None:
    model = chain(nn.Linear(3, 2))
    with EAERuntime(model, config=RuntimeConfig(**settings)) as runtime:
        output = runtime.forward(torch.ones(4, 3))
        with pytest.raises(LossError):
            runtime.backward(output, lambda y: y)
        _, grads = runtime.backward(output, torch.sum)
        assert torch.equal(grads[model[0].weight], torch.full((2, 3), 4.0))


def test_an_integer_output(settings: dict[str, Any]) -> None:
    model = chain(nn.Linear(3, 3), lambda x: x.argmax(1))
    with (
        EAERuntime(model, config=RuntimeConfig(**settings)) as runtime,
        untouched(runtime, module_state(model)),
        pytest.raises(RuntimeError, match="does not require grad"),
    ):
        runtime.train_step(torch.ones(4, 3), lambda y: y.sum())


# -- passes --------------------------------------------------------------------------------------------------------


class Wrong(EAEPass):
    name = "Wrong"

    def __init__(self, made: Callable[[AdjointState], Any]) -> None:
        self.made = made

    def process(self, adjoint: AdjointState, context: Any = None) -> Any:
        return self.made(adjoint)


def shape_changed(adjoint: AdjointState) -> AdjointState:
    new = adjoint.clone()
    new.tensor = adjoint.tensor[..., :1]
    return new


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (Wrong(lambda adjoint: adjoint.tensor), "Wrong.*Tensor"),
        (Wrong(lambda adjoint: None), "Wrong.*NoneType"),
        (Wrong(shape_changed), "must not change the shape"),
        (Wrong(lambda adjoint: 1 / 0), "Wrong at boundary 3.*ZeroDivisionError"),
    ],
    ids=["tensor", "none", "shape", "exception"],
)
def test_passes(item: EAEPass, text: str, settings: dict[str, Any]) -> None:
    refused_by_the_reverse(settings, PassError, text, passes=[item])


def test_nan_in_a_go_pass(settings: dict[str, Any]) -> None:
    loss_fn = lambda y: (y * float("nan")).sum()
    passes = [ClipPass(10.0), Int8QuantizationPass()]
    refused_by_the_reverse(settings, PassError, "clip at boundary 3.*NaN", loss_fn, passes)


# -- between forward and backward ----------------------------------------------------------------------------------


def test_backward_without_forward(settings: dict[str, Any]) -> None:
    with EAERuntime(small(), config=RuntimeConfig(**settings)) as runtime:
        with pytest.raises(EAEError, match=r"forward\(\)"):
            runtime.backward(torch.ones(4, 2), torch.sum)
        output = runtime.forward(torch.ones(4, 3))
        runtime.backward(output, torch.sum)
        with pytest.raises(EAEError, match="one backward"):
            runtime.backward(output, torch.sum)


def test_a_parameter_that_has_changed(settings: dict[str, Any]) -> None:
    model = chain(nn.Linear(3, 3), nn.Linear(3, 2))
    with EAERuntime(model, config=RuntimeConfig(**settings)) as runtime:
        output = runtime.forward(torch.ones(4, 3))
        with torch.no_grad():
            model[1].weight.mul_(2)
        with pytest.raises(RebuildMismatchError, match=r"'weight' of block 'Linear_1'.*forward\(\) again"):
            runtime.backward(output, torch.sum)


def test_a_parameter_that_was_frozen_in_between() -> None:
    model = chain(nn.Linear(3, 3), nn.Linear(3, 2))
    with EAERuntime(model) as runtime:
        output = runtime.forward(torch.ones(4, 3))
        model[0].requires_grad_(False)
        with pytest.raises(RebuildMismatchError, match=r"block 0 \(Linear_0\).*[Dd]o not freeze"):
            runtime.backward(output, torch.sum)


@pytest.mark.parametrize("which", ["input", "output of a block"])
def test_a_boundary_that_was_written(which: str) -> None:
    """A boundary on the device tier is the caller's own tensor; the version counter tells."""
    # A strong reference would show that the block's graph is held, and the block would get copies.
    kept: list[weakref.ref[torch.Tensor]] = []
    model = chain(nn.Linear(3, 3), lambda x: kept.append(weakref.ref(x)) or x * 2, nn.Linear(3, 2))
    x = torch.ones(4, 3)
    with EAERuntime(model) as runtime:
        for _ in range(3):
            runtime.train_step(x, torch.sum)
        kept.clear()
        output = runtime.forward(x)
        with torch.no_grad():
            (x if which == "input" else kept[0]()).add_(1)
        with pytest.raises(RebuildMismatchError, match=r"boundary [01].*modified in place"):
            runtime.backward(output, torch.sum)
        assert len(runtime.boundary_store) == 0


def test_a_block_that_is_rebuilt_into_something_else(settings: dict[str, Any]) -> None:
    calls = iter(range(10**6))
    model = chain(nn.Linear(3, 3), lambda x: x[:, : 2 + next(calls) % 2], lambda x: x.sum())
    with (
        EAERuntime(model, config=RuntimeConfig(**settings)) as runtime,
        untouched(runtime, module_state(model)),
        pytest.raises(RebuildMismatchError, match=r"block 1 \(Fn_1\), action 1R0.*float32\[4, [23]\]"),
    ):
        runtime.train_step(torch.ones(4, 3), torch.sum)


def test_gradients_of_another_shape() -> None:
    model = chain(nn.Linear(3, 2))
    with EAERuntime(model) as runtime:
        with pytest.raises(TensorTypeError, match=r"'weight' of block 'Linear_0'.*\[3\]"):
            runtime.apply_gradients({model[0].bias: torch.ones(2), model[0].weight: torch.ones(3)})
        assert model[0].bias.grad is None and model[0].weight.grad is None


# -- closed, twice, inside each other ------------------------------------------------------------------------------


def test_a_closed_runtime(settings: dict[str, Any]) -> None:
    model = small()
    runtime = EAERuntime(model, config=RuntimeConfig(**settings))
    output = runtime.forward(torch.ones(4, 3))
    runtime.close()
    runtime.close()
    x = torch.ones(4, 3)
    uses: list[Callable[[], Any]] = [
        lambda: runtime.forward(x),
        lambda: runtime.backward(output, torch.sum),
        lambda: runtime.train_step(x, torch.sum),
        lambda: runtime.compute_gradients(x, torch.sum),
        lambda: runtime.apply_gradients({}),
        lambda: runtime.trace("somewhere"),
    ]
    for use in uses:
        with pytest.raises(ClosedError, match="make a new one"):
            use()
    assert len(list(runtime.parameters())) == 4


def test_two_runtimes_take_turns_on_one_model(settings: dict[str, Any]) -> None:
    model = chain(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    x = torch.ones(4, 3)
    with EAERuntime(model, config=RuntimeConfig(**settings)) as one, EAERuntime(model) as two:
        for _ in range(3):
            first, second = one.compute_gradients(x, torch.sum)[1], two.compute_gradients(x, torch.sum)[1]
            assert all(torch.equal(first[p], second[p]) for p in model.parameters())


PLACES = ["block", "loss", "pass", "subscriber", "hook"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("who", ["itself", "another runtime", "close"])
def test_re_entrance(place: str, who: str, settings: dict[str, Any]) -> None:
    """A runtime is called, or closed, from code that it is running: refused, and the step is undone."""
    x = torch.ones(4, 3)
    inside: dict[str, Any] = {"call": None}

    def enter(at: str) -> None:
        if at == place and inside["call"] is not None:
            inside["call"]()

    class Enter(EAEPass):
        name = "Enter"

        def process(self, adjoint: AdjointState, context: Any = None) -> AdjointState:
            enter("pass")
            return adjoint.clone()

    model = chain(nn.BatchNorm1d(3), lambda h: enter("block") or h * 2, nn.Linear(3, 2))
    model[2].weight.register_hook(lambda grad: enter("hook"))
    with (
        EAERuntime(model, config=RuntimeConfig(passes=[Enter()], **settings)) as runtime,
        EAERuntime(model[2:]) as other,
    ):
        runtime.event_bus.subscribe("BlockReconstructed", lambda event: enter("subscriber"))
        calls = {
            "itself": lambda: runtime.train_step(x, torch.sum),
            "another runtime": lambda: other.train_step(x, torch.sum),
            "close": runtime.close,
        }
        for step in range(4):
            inside["call"] = calls[who]
            with untouched(runtime, module_state(model)), pytest.raises(EAEError, match="inside a step"):
                runtime.train_step(x, lambda y: enter("loss") or y.sum())
            inside["call"] = None
            runtime.train_step(x, torch.sum)
            assert model[0].num_batches_tracked.item() == step + 1
        other.train_step(x, torch.sum)


def test_another_thread_is_refused_while_a_step_runs(settings: dict[str, Any]) -> None:
    """At once, not after a wait; and the step that runs is not disturbed."""
    found: list[BaseException] = []
    threads: list[threading.Thread] = []
    x = torch.ones(4, 3)

    def other() -> None:
        try:
            runtime.train_step(x, torch.sum)
        except EAEError as error:
            found.append(error)

    def block(h: torch.Tensor) -> torch.Tensor:
        threads.append(threading.Thread(target=other))
        threads[-1].start()
        threads[-1].join(20)
        assert not threads[-1].is_alive()
        return h

    model = chain(nn.Linear(3, 3), block, nn.Linear(3, 2))
    with EAERuntime(model, config=RuntimeConfig(**settings)) as runtime:
        runtime.train_step(x, torch.sum)
    assert len(found) == len(threads) >= 2
    assert ("inside a step" in str(found[0]) and "Fn_1" in str(found[0])) or "Linear_0" in str(found[0])


def test_inputs_that_share_no_batch_dimension() -> None:
    config = RuntimeConfig(scheduler="pipeline", num_microbatches=2)
    with EAERuntime(small(), config=config) as runtime, pytest.raises(PlanError, match="batch dimension"):
        runtime.train_step((torch.ones(4, 3), torch.ones(3, 3)), torch.sum)


def test_a_block_that_is_new_every_time_ends() -> None:
    """A forward that always does something unforeseen is not repeated for ever."""
    leaves: list[torch.Tensor] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        leaves.append(torch.ones(3, requires_grad=True))
        return x * leaves[-1]

    model = chain(nn.Identity(), block, nn.Linear(3, 2))
    with EAERuntime(model) as runtime:
        for _ in range(3):
            runtime.train_step(torch.ones(4, 3), torch.sum)
    assert len(leaves) < 100
