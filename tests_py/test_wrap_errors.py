"""`wrap` and what it cannot repeat: pins, mismatches and their causes, bad input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from eae_runtime import EAERuntime, RuntimeConfig, pin, unwrap, wrap
from eae_runtime._autograd_driver import driver_of
from eae_runtime.errors import BlockError, ConfigError, EAEError, RebuildMismatchError, TensorTypeError
from wrapped import IDS, Layer, Model, Row, assert_steps, cross, pair, same_grads

# -- pins and rebuilds that differ -----------------------------------------------------------------------------------


class Clocked(nn.Module):
    """Scales by what a source gives that nobody can replay."""

    def __init__(self, width: int, source: Callable[[], torch.Tensor], pinned: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.source = source
        self.pinned = pinned

    def forward(self, x: torch.Tensor, side: Any = None, *, scale: float = 1.0) -> torch.Tensor:
        value = self.source()
        if self.pinned:
            value = pin(value)
        return torch.tanh(self.linear(x)) * value


@pytest.mark.parametrize("pinned", [True, False])
def test_pin(pinned: bool) -> None:
    values = iter(torch.arange(1.0, 1000.0))
    source = lambda: next(values).clone()
    torch.manual_seed(0)
    ours = wrap(Model(layers=2, layer=lambda width: Clocked(width, source, pinned)), blocks=["layers.*"])
    if not pinned:
        with pytest.raises(RebuildMismatchError, match=r"block 1 \(layers.1\).*output.*random draw"):
            cross(ours(IDS)).backward()
        return
    for _ in range(4):
        cross(ours(IDS)).backward()


def test_pin_takes_choices_only() -> None:
    x = torch.ones(2)
    assert pin(x) is x
    with pytest.raises(TensorTypeError, match="requires grad"):
        pin(torch.ones(2, requires_grad=True) * 2)
    with pytest.raises(TensorTypeError, match="not int"):
        pin(3)


def mismatch(
    block: Callable[[torch.Tensor], torch.Tensor],
    between: Callable[[torch.Tensor], None] = lambda x: None,
    **settings: Any,
) -> str:
    ours = wrap(Row(nn.Linear(4, 4), block, nn.Linear(4, 4)), RuntimeConfig(**settings), blocks=["blocks.*"])
    x = torch.ones(2, 4)
    loss = ours(x).sum()
    between(x)
    with pytest.raises(RebuildMismatchError) as info:
        loss.backward()
    return str(info.value)


def test_causes_of_a_mismatch() -> None:
    count = [0.0]

    def counts(x: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        return x * min(count[0], 2.0)

    text = mismatch(counts)
    assert "block 1 (blocks.1)" in text and "state changed by forward" in text
    text = mismatch(lambda x: x * 2, between=lambda x: x.data.mul_(2))
    assert "block 0 (blocks.0)" in text and "in-place change of the block's input" in text


def test_verify_rebuild_off_does_not_compare() -> None:
    values = iter(torch.arange(1.0, 1000.0))
    ours = wrap(
        Row(nn.Linear(4, 4), lambda x: x * next(values)), RuntimeConfig(verify_rebuild="off"), blocks=["blocks.*"]
    )
    ours(torch.ones(2, 4)).sum().backward()


def test_a_late_branch_on_the_grad_mode_is_found() -> None:
    """Found when the block's turn comes; it runs in grad mode from then on."""
    late = [False]
    block = lambda x: x * (1 if torch.is_grad_enabled() or not late[0] else 3)
    ours = wrap(Row(nn.Linear(4, 4), nn.Linear(4, 4), block), blocks=["blocks.*"])
    x = torch.ones(2, 4)
    for _ in range(5):
        ours(x).sum().backward()
    late[0] = True
    found = 0
    for _ in range(8):
        try:
            ours(x).sum().backward()
        except RebuildMismatchError as error:
            assert "under no_grad" in str(error)
            found += 1
    assert found == 1


# -- bad input -------------------------------------------------------------------------------------------------------


def test_double_backward_is_refused() -> None:
    _, ours = pair()
    with pytest.raises(BlockError, match=r"block 3 \(layers.3\).*create_graph"):
        cross(ours(IDS)).backward(create_graph=True)


def test_a_parameter_changed_between() -> None:
    _, ours = pair()
    loss = cross(ours(IDS))
    with torch.no_grad():
        ours.layers[1].up.weight.add_(1)
    with pytest.raises(RebuildMismatchError, match=r"block 1 \(layers.1\).*'up.weight' was changed"):
        loss.backward()


def test_an_input_changed_between() -> None:
    ours = wrap(Row(nn.Linear(4, 4), nn.Linear(4, 4)))
    x = torch.ones(2, 4)
    loss = ours(x).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_block_that_returns_nothing() -> None:
    ours = wrap(Row(nn.Linear(4, 4), lambda x: None), blocks=["blocks.*"])
    with pytest.raises(TensorTypeError, match=r"block 1 \(blocks.1\) returned no tensor but NoneType"):
        ours(torch.ones(2, 4))


def test_an_output_unrelated_to_the_input() -> None:
    """As in plain PyTorch: nothing requires grad behind it."""
    ours = wrap(Row(nn.Linear(4, 4), lambda x: torch.ones(2, 4)), blocks=["blocks.*"])
    out = ours(torch.ones(2, 4))
    assert not out.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        out.sum().backward()


class Cache:
    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []


@pytest.mark.parametrize("make", [Cache, list, dict])
def test_a_cache_that_the_block_changes(make: Callable[[], Any]) -> None:
    class Caching(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
            h = self.linear(x)
            if isinstance(cache, dict):
                cache["h"] = h
            else:
                (cache.keys if isinstance(cache, Cache) else cache).append(h)
            return h

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Caching(4), Caching(4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            cache = make()
            for layer in self.layers:
                x = layer(x, cache=cache)
            return x

    ours = wrap(Holder())
    with pytest.raises(BlockError, match=r"block 0 \(layers.0\) changes a container.*use_cache=False"):
        ours(torch.ones(2, 4))


def test_a_tensor_of_the_graph_by_a_side_door() -> None:
    """A block whose graph others hold keeps it, since a loss may come through: an auxiliary loss in an attribute."""

    class Side(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, x: torch.Tensor, side: Any = None, *, scale: float = 1.0) -> torch.Tensor:
            h = self.linear(x)
            self.aux = h.mean() + x.mean()
            return torch.tanh(h)

    plain, ours = pair(lambda: Model(layer=Side))
    for _ in range(4):
        for model in (plain, ours):
            model.zero_grad()
            (cross(model(IDS)) + model.layers[1].aux).backward()
        same_grads(plain, ours)
    assert all("held outside" in call.kept for call in driver_of(ours).calls)


def test_a_tensor_of_the_graph_in_a_hook_of_the_first_run() -> None:
    """The hook that collects is not called twice, so what it holds belongs to the run that was dropped."""
    ours = wrap(Model())
    seen: list[torch.Tensor] = []
    ours.layers[1].up.register_forward_hook(lambda module, args, output: seen.append(output))
    loss = cross(ours(IDS)) + seen[0].mean()
    with pytest.raises(BlockError, match=r"block 1 \(layers.1\).*kept outside"):
        loss.backward()
    plain, ours = pair(Model)
    assert_steps(plain, ours)


def test_a_reference_cycle_is_not_somebody_who_holds_the_graph() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.mine = x * 2
            return ctx.mine

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    class Cycle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Doubled.apply(torch.tanh(self.linear(x)))

    ours = wrap(Row(Cycle(), Cycle()))
    for _ in range(3):
        ours(torch.ones(2, 4)).sum().backward()
    assert [call.rebuilds for call in driver_of(ours).calls] == [3, 3]


def test_scripted_and_lazy_blocks() -> None:
    scripted = nn.ModuleList([torch.jit.script(nn.Linear(4, 4)) for _ in range(2)])
    with pytest.raises(BlockError, match=r"blocks\.1\.0 is a torch\.jit\.ScriptModule"):
        wrap(Row(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(scripted[0])))
    with pytest.raises(BlockError, match="ScriptModule"):
        EAERuntime(nn.Sequential(nn.Linear(4, 4), scripted[1]), None)

    def lazy() -> nn.Module:
        return Row(*[nn.Sequential(nn.LazyLinear(5), nn.Tanh()) for _ in range(3)])

    models = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        models.append(wrap(lazy()) if wrapped else lazy())
        for _ in range(3):
            models[-1](torch.ones(2, 5)).sum().backward()
    for p, q in zip(models[0].parameters(), models[1].parameters()):
        assert torch.equal(p.grad, q.grad)
    assert [call.rebuilds for call in driver_of(models[1]).calls] == [2, 2, 2]
    with EAERuntime(nn.Sequential(nn.LazyLinear(5), nn.Tanh()), None) as runtime:
        with pytest.raises(BlockError, match="without a shape"):
            runtime.train_step(torch.ones(2, 5), lambda y: y.sum())
        runtime.blocks[0](torch.ones(2, 5))
        runtime.train_step(torch.ones(2, 5), lambda y: y.sum())


def test_blocks_are_named() -> None:
    plain, ours = pair(blocks=["layers.1", "layers.3", "head"])
    assert driver_of(ours).names == ["layers.1", "layers.3", "head"]
    assert_steps(plain, ours)


def test_finding_blocks() -> None:
    class Stages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            stage = lambda n: nn.ModuleDict(
                {"blocks": nn.ModuleList([Layer(4) for _ in range(n)]), "down": nn.Linear(4, 4)}
            )
            self.stages = nn.ModuleList([stage(2), stage(6)])
            self.tail = nn.Sequential(nn.Linear(4, 4), nn.GELU())

    names = driver_of(wrap(Stages())).names
    assert names == [f"stages.{s}.blocks.{b}" for s, n in ((0, 2), (1, 6)) for b in range(n)]
    inner = nn.Sequential(Layer(4), Layer(4))
    nested = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), inner, nn.Linear(4, 2))
    assert driver_of(wrap(nested)).names == ["0", "1", "2.0", "2.1", "3"]

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 3))

    assert driver_of(wrap(Mixed())).names == ["features.0", "features.1", "features.2"]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: wrap(nn.Linear(2, 2)), "no repeated layers"),
        (lambda: wrap(Model(), blocks=["layer.*"]), "'layer.\\*' is no module of Model"),
        (lambda: wrap(Model(), blocks=["layers.0", "layers.0.up"]), "'layers.0.up' lies within 'layers.0'"),
        (lambda: wrap(Model(), blocks=[]), "names no module"),
        (lambda: wrap(Model(), blocks="layers.*"), "list of names"),
        (lambda: wrap(wrap(Model())), "wrapped already"),
        (lambda: wrap([nn.Linear(2, 2)]), "takes an nn.Module, not list"),
        (lambda: wrap(Model(), {"passes": []}), "has to be a RuntimeConfig"),
        (lambda: wrap(Model(), RuntimeConfig(scheduler="pipeline")), "'sequential', 'async'"),
        (lambda: wrap(Model(), RuntimeConfig(grad_clip_norm=1.0)), "grad_clip_norm has no effect"),
        (lambda: wrap(Model(), RuntimeConfig(loss_scaler=torch.amp.GradScaler("cpu"))), "loss_scaler has no effect"),
        (lambda: wrap(Model(), RuntimeConfig(trace=True)), "trace has no effect"),
    ],
)
def test_bad_arguments(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        call()


# -- who has wrapped a model -------------------------------------------------------------------------------------------


def test_a_runtime_that_cannot_be_made_leaves_the_model_alone(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    model = Model()
    before = [sorted(m.__dict__) for m in model.modules()]
    with pytest.raises(EAEError):
        EAERuntime(model, config=RuntimeConfig(boundary_tier="disk", disk_dir=file / "below"))
    assert [sorted(m.__dict__) for m in model.modules()] == before
    wrap(model)


def test_a_runtimes_model_is_unwrapped_by_the_runtime() -> None:
    model = Model()
    with EAERuntime(model, config=RuntimeConfig(boundary_tier="host")) as runtime:
        with pytest.raises(ConfigError, match="close\\(\\) that instead"):
            unwrap(model)
        with pytest.raises(ConfigError, match="wrapped already"):
            wrap(model)
        runtime.train_step(IDS, cross)
    wrap(model)


def test_a_door_that_somebody_has_wrapped_lets_everything_through() -> None:
    """After `unwrap`, and after `wrap` has put another door around it."""
    plain, ours = pair(Model)
    layer = ours.layers[1]
    inner = layer.forward
    layer.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    counts = []
    for change in (lambda: None, lambda: unwrap(ours), lambda: wrap(ours)):
        change()
        before = inner.call.forwards
        plain.zero_grad()
        ours.zero_grad()
        for model in (plain, ours):
            torch.manual_seed(3)
            cross(model(IDS)).backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), ours.parameters()))
        counts.append(inner.call.forwards - before)
    assert counts == [1, 0, 0]
