"""`verify`: what it compares, the faults it has to see, and that it leaves the model as it was."""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from eae_runtime import RuntimeConfig, _autograd_node, _outcome, _runs, blockcall, parity, verify
from eae_runtime.errors import ConfigError
from models import CASES, Fn, Residual, chain
from oracle import nothing_left
from wrapped import IDS, Model, Row, cross


@pytest.mark.parametrize("driver", ["chain", "autograd"])
@pytest.mark.parametrize("name", CASES)
def test_the_chains(name: str, driver: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    with nothing_left():
        report = verify(case.make(), case.x(), case.loss, driver=driver)
    assert report.ok and report.exactness == "bitwise", str(report)
    assert report.driver == driver and report.compared["gradient"] and report.compared["random state"] >= 2


@pytest.mark.parametrize("settings", [{"boundary_tier": "disk"}, {"scheduler": "async", "boundary_offload": True}])
def test_a_module_with_code_between_its_blocks(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    report = verify(Model(), IDS, cross, RuntimeConfig(**settings))
    assert report.ok and report.driver == "autograd"
    assert [(b.name, b.forwards, b.rebuilds, b.kept) for b in report.blocks] == [
        (f"layers.{i}", 1, 1, None) for i in range(4)
    ]


def test_arguments() -> None:
    class Two(Model):
        def forward(self, ids: torch.Tensor, other: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            return {"logits": super().forward(ids if other is None else ids + other)}

    torch.manual_seed(0)
    loss = lambda out: cross(out["logits"])
    for inputs in (IDS, (IDS,), {"ids": IDS}, {"ids": IDS, "other": torch.zeros_like(IDS)}):
        report = verify(Two(), inputs, loss)
        assert report.ok and report.compared["output"] == 1
    x = torch.randn(3, 4, requires_grad=True)
    report = verify(Row(nn.Linear(4, 4), nn.Linear(4, 4)), (x,), lambda y: y.square().sum())
    assert report.ok and report.compared["input gradient"] == 1 and x.grad is None


def test_peak_and_rebuilt_blocks_are_in_the_report() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)) for _ in range(8)])
    report = verify(model, torch.randn(256, 64), lambda y: y.square().mean())
    # Eight interiors of two 512 kB tensors, against one and gradients.
    assert report.peak_plain > 8 * 2 * 524_288 and report.peak < 0.45 * report.peak_plain
    assert report.rebuilt == 7
    assert json.loads(json.dumps(report.to_dict()))["rebuilt"] == 7
    text = str(report)
    assert text.startswith("ok: bitwise, chain driver") and "blocks rebuilt       7 of 8" in text and "MB" in text


def test_what_is_not_compared_with_its_forward_is_named() -> None:
    class InPlace(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.mul_(0.5))

    torch.manual_seed(0)
    chain_of = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    writes = nn.Sequential(nn.Linear(8, 8), InPlace(8, 8), nn.Linear(8, 8))
    x, square = torch.randn(3, 8), lambda y: y.square().mean()

    def skipped(of: nn.Module, config: RuntimeConfig | None = None, driver: str = "chain") -> list[str | None]:
        report = verify(of, x, square, config, driver=driver)
        # Every block in two rounds, one more in the third.
        whole = [b for b in report.blocks if b.skipped is None]
        assert sum(b.compared for b in whole) in (0, 2 * len(whole), 2 * len(whole) + 1)
        assert f"{sum(b.compared for b in report.blocks):>5} compared with their forwards" in str(report)
        assert all(f"not compared: {b.name}, {b.skipped}" in str(report) for b in report.blocks if b.skipped)
        return [b.skipped for b in report.blocks]

    assert skipped(chain_of) == [None] * 3 + ["it is not rebuilt"]
    assert skipped(writes, driver="autograd") == [None, "it keeps its graph", None]
    assert skipped(chain_of, RuntimeConfig(verify_rebuild="off"))[0] == 'verify_rebuild="off"'
    rounded = skipped(chain_of, RuntimeConfig(boundary_precision=torch.float16))
    assert rounded[0] == "it is rebuilt from inputs rounded to torch.float16 (boundary_precision)"


# -- planted faults: each breaks a mechanism of the runtime ------------------------------------------------------------


class Busy(nn.Module):
    """A layer with batch statistics and a parameter with hooks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, side: Any = None, *, scale: float = 1.0) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x.flatten(0, 1)).unflatten(0, x.shape[:2])))


def planted() -> Any:
    torch.manual_seed(0)
    model = Model(layer=Busy)
    model.layers[2].linear.weight.register_hook(lambda g: None)
    return verify(model, IDS, cross)


def found(report: Any) -> set[tuple[str, str]]:
    assert not report.ok and "DIFFERENT" in str(report)
    return {(d.kind, d.name) for d in report.differences}


def test_nothing_is_found_where_nothing_is_planted() -> None:
    assert planted().ok


def test_an_extra_random_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = _autograd_node._reverse

    def draws(*args: Any) -> Any:
        gradients = inner(*args)
        torch.rand(1)
        return gradients

    monkeypatch.setattr(_autograd_node, "_reverse", draws)
    assert found(planted()) == {("random state", "torch")}


def test_one_ulp_in_one_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = _autograd_node._reverse

    def nudges(door: Any, record: Any, leaves: list[torch.Tensor], *rest: Any) -> Any:
        gradients = inner(door, record, leaves, *rest)
        for number, leaf in enumerate(leaves, len(gradients) - len(leaves)):
            if leaf is door.module.linear.bias and door.index == 1:
                grad = gradients[number].clone()
                grad[3] = torch.nextafter(grad[3], torch.tensor(float("inf")))
                gradients[number] = grad
        return gradients

    monkeypatch.setattr(_autograd_node, "_reverse", nudges)
    report = planted()
    assert found(report) == {("gradient", "layers.1.linear.bias")} and report.exactness == "tolerance"
    [difference] = report.differences
    assert difference.detail.startswith("1 of 8 values differ") and 0 < difference.relative < 1e-6


def test_a_lost_leaf(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = _runs.graph_leaves
    monkeypatch.setattr(_runs, "graph_leaves", lambda roots: [t for t in inner(roots) if t.shape != (8, 8)])
    report = planted()
    names = {("lost leaf", f"layers.{i}.linear.weight") for i in range(4)}
    # The hook on one of them is then not called either.
    assert found(report) == names | {("hook count", "layers.2.linear.weight: tensor hook 0")}


def test_a_buffer_moved_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockcall, "swapped", lambda entries: nullcontext())
    names = ("running_mean", "running_var", "num_batches_tracked")
    assert found(planted()) == {("buffer", f"layers.{i}.norm.{name}") for i in range(4) for name in names}


def test_a_hook_fired_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_autograd_node, "held_back", lambda leaves: nullcontext())
    report = planted()
    assert found(report) == {("hook count", "layers.2.linear.weight: tensor hook 0")}
    assert report.differences[0].detail == "called 2 times, by plain PyTorch 1 times"


def test_a_block_that_cannot_be_rebuilt_is_an_error_in_the_report() -> None:
    values = iter(torch.arange(1.0, 1000.0))
    row = Row(nn.Linear(4, 4), lambda x: torch.tanh(x) + 0 * next(values))
    report = verify(row, torch.ones(2, 4), torch.sum, blocks=["blocks.*"])
    assert report.ok
    values = iter([1.0] * 4 + [float(k) for k in range(2, 100)])
    row = Row(nn.Linear(4, 4), lambda x: torch.tanh(x) * next(values))
    report = verify(row, torch.ones(2, 4), torch.sum, blocks=["blocks.*"])
    assert found(report) == {("error", "RebuildMismatchError")}
    assert "random draw" in str(report)


def test_plain_pytorch_that_is_not_deterministic_is_not_blamed_on_the_runtime() -> None:
    noise = iter(torch.arange(1.0, 1000.0))

    class Clocked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Residual(4), Residual(4)])
            self.head = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.head(x) * next(noise)

    report = verify(Clocked(), torch.randn(3, 4), torch.sum)
    assert report.ok and "loss loss" in report.unstable and "gradient head.bias" in report.unstable
    assert "plain PyTorch is not deterministic: loss loss" in str(report)


# -- the model comes back --------------------------------------------------------------------------------------------


def whole_state(model: nn.Module) -> Any:
    """All that can be seen of a model and of the process's generators; objects by identity, tensors by value too."""
    tensors = [*model.parameters(), *model.buffers()]
    return (
        [(id(t), t.detach().clone().tolist()) for t in tensors],
        [id(p.grad) for p in model.parameters()],
        [p.grad.tolist() for p in model.parameters() if p.grad is not None],
        [(m.training, dict(m._forward_hooks), dict(m._backward_hooks), sorted(m.__dict__)) for m in model.modules()],
        [dict(p._backward_hooks or {}) for p in model.parameters()],
        [(m.calls, id(m.seen)) for m in model.modules() if isinstance(m, Counting)],
        torch.get_rng_state().tolist(),
        random.getstate(),
        repr(np.random.get_state()),
    )


class Counting(Busy):
    """Also counts, caches, and draws from everywhere."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.calls = 0
        self.seen: Any = None

    def forward(self, x: torch.Tensor, side: Any = None, *, scale: float = 1.0) -> torch.Tensor:
        self.calls += 1
        self.seen = x.detach()
        return super().forward(x) * (1 + random.random() * float(np.random.rand()) * torch.rand(1))


@pytest.mark.parametrize("where", ["nowhere", "loss", "block", "rebuild"])
def test_the_model_comes_back_as_it_was(where: str) -> None:
    torch.manual_seed(0)
    model = Model(layer=Counting)
    model.layers[1].register_forward_hook(lambda m, args, out: None)
    model.layers[1].linear.weight.register_hook(lambda g: None)
    model.layers[3].eval()
    cross(model(IDS)).backward()
    before = whole_state(model)
    runs = [0]

    def trap(name: str, at: int = 1) -> None:
        if where == name:
            runs[0] += 1
            if runs[0] >= at:
                raise ArithmeticError(name)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        trap("loss")
        return cross(logits)

    model.layers[2].forward = lambda *args, inner=model.layers[2].forward, **more: (
        trap("block"), trap("rebuild", 5), inner(*args, **more)
    )[2]  # fmt: skip
    before = whole_state(model)
    if where in ("nowhere", "rebuild"):
        report = verify(model, IDS, loss)
        assert report.ok == (where == "nowhere"), str(report)
        assert where == "nowhere" or found(report) == {("error", "ArithmeticError")}
    else:
        with pytest.raises(ArithmeticError, match=where):
            verify(model, IDS, loss)
    assert whole_state(model) == before


def test_gradients_of_leaves_that_nobody_registered_come_back() -> None:
    leaf = nn.Parameter(torch.ones(4))
    model = chain(nn.Linear(4, 4), lambda x: x * leaf, nn.Linear(4, 2))
    for grad in (None, torch.full((4,), 5.0)):
        leaf.grad = grad
        report = verify(model, torch.ones(2, 4), torch.sum)
        assert report.ok and report.compared["gradient"] == 5
        assert leaf.grad is grad and (grad is None or torch.equal(grad, torch.full((4,), 5.0)))


def test_an_error_of_the_runtime_at_its_start_is_in_the_report(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    report = verify(Model(), IDS, cross, RuntimeConfig(boundary_tier="disk", disk_dir=file / "below"))
    assert found(report) == {("error", "StoreError")}
    # Nothing was compared, and nothing says so.
    assert "all the same" not in str(report) and "step peak" not in str(report)


def test_zeros_of_two_signs_differ() -> None:
    made = _outcome.Outcome(gradients={"w": torch.tensor([0.0, 1.0])})
    other = _outcome.Outcome(gradients={"w": torch.tensor([-0.0, 1.0])})
    (difference,) = parity.compare(made, other)
    assert "1 of 2 values differ" in str(difference) and difference.close


def test_what_is_unstable_is_not_counted_as_compared() -> None:
    noise = iter(torch.arange(1.0, 1000.0))
    model = chain(nn.Linear(4, 4), nn.Linear(4, 2))
    text = str(verify(model, torch.ones(2, 4), lambda y: y.sum() * next(noise)))
    assert "loss                 0 compared" in text and "output               1 compared" in text


def test_a_frozen_model_raises_plains_own_error() -> None:
    with pytest.raises(RuntimeError, match="does not require grad"):
        verify(Model().requires_grad_(False), IDS, cross)


def test_what_cannot_be_pickled_can_be_verified() -> None:
    model = chain(nn.Linear(4, 4), lambda x: x * 2)
    with pytest.raises(Exception, match="pickle"):
        copy.deepcopy(model).__reduce_ex__(4) and __import__("pickle").dumps(model)
    assert verify(model, torch.ones(2, 4), torch.sum).ok


def test_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="driver='engine'"):
        verify(Model(), IDS, cross, driver="engine")
    with pytest.raises(ConfigError, match="no repeated layers"):
        verify(Fn(lambda x: x), torch.ones(2, requires_grad=True), torch.sum)


# -- the command line ------------------------------------------------------------------------------------------------

SCRIPT = """
import torch
from torch import nn
from neighbour import WIDTH

def make():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)])
    return model, torch.randn(5, WIDTH), lambda y: y.square().mean()

values = iter(range(1, 1000))

def drifts():
    model, x, loss = make()
    model[1].forward = lambda x: x * next(values)
    return model, x, loss

def three():
    return 3

def two():
    return 1, 2

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rest = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x):
        return self.rest[1](torch.tanh(self.rest[0](self.b(torch.tanh(self.a(x))))))

def own():
    return Own(), torch.randn(5, WIDTH), lambda y: y.square().mean()

def plain():
    return nn.Linear(WIDTH, 1), torch.randn(5, WIDTH), torch.sum

def raises():
    raise ArithmeticError("no model today")
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "neighbour.py").write_text("WIDTH = 6\n")
    (folder / "script.py").write_text(SCRIPT)
    return folder / "script.py"


@pytest.mark.parametrize(
    ("make", "code", "text"),
    [
        (lambda s: [f"{s}:make"], 0, "ok: bitwise, chain driver"),
        (lambda s: [f"{s}:make", "--driver", "autograd", "--tier", "disk"], 0, "ok: bitwise, autograd driver"),
        (lambda s: [f"{s}:make", "--json", "--scheduler", "async"], 0, '"exactness": "bitwise"'),
        (lambda s: [f"{s}:drifts"], 1, "error RebuildMismatchError"),
        (lambda s: [f"{s}"], 2, "give the script and the function"),
        (lambda s: ["nowhere.py:make"], 2, "nowhere.py: no such file"),
        (lambda s: [f"{s}:missing"], 2, "has no function 'missing'"),
        (lambda s: [f"{s}:three"], 2, "returned int; it has to return"),
        (lambda s: [f"{s}:two"], 2, "returned a tuple of 2; it has to return"),
        (lambda s: [f"{s}:own", "--blocks", "a", "b"], 0, "blocks rebuilt       2 of 2"),
        (lambda s: [f"{s}:own", "--driver", "chain"], 0, "ok: bitwise, autograd driver"),
        (lambda s: [f"{s}:plain"], 2, "Linear has no repeated layers"),
        (lambda s: [f"{s}:plain"], 2, "say which modules are the blocks, --blocks"),
        (lambda s: [f"{s}:raises"], 2, "the script raised ArithmeticError: no model today"),
        (lambda s: [f"{s}:make", "--scheduler", "fifo"], 2, "scheduler='fifo'"),
    ],
)
def test_the_command_line(script: Path, make: Callable[[Path], list[str]], code: int, text: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "eae_runtime", "verify", *make(script)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == code, done.stderr
    assert text in (done.stderr if code == 2 else done.stdout)


def test_the_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "eae_runtime", "--version"], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == f"eae-runtime {metadata.version('eae-runtime')}"


def test_lazy_modules_have_to_be_run_first() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(4))
    for driver in ("chain", "autograd"):
        with pytest.raises(ConfigError, match="run it once"):
            verify(model, torch.ones(2, 3), torch.sum, driver=driver)
