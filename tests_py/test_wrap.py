"""`wrap` as a citizen of ordinary training code: copies, pickles, modes, several forwards, tiers, passes."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from counting import Interior
from eae_runtime import RuntimeConfig, unwrap, wrap
from eae_runtime._autograd_driver import driver_of
from eae_runtime.errors import ConfigError
from eae_runtime.passes import EAEPass
from oracle import nothing_left
from wrapped import IDS, Layer, Model, Row, assert_steps, cross, grads, pair, same_grads

# -- the model stays what it was -----------------------------------------------------------------------------------


def test_the_model_stays_what_it_was() -> None:
    plain, ours = pair()
    assert type(ours) is Model and isinstance(ours.layers[0], Layer)
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in ours.named_modules()] == [n for n, _ in plain.named_modules()]
    plain.load_state_dict(ours.state_dict())
    ours.load_state_dict(plain.state_dict())
    assert repr(ours) == repr(plain)
    assert_steps(plain, ours)
    assert [(c.forwards, c.rebuilds, c.kept) for c in driver_of(ours).calls] == [(4, 4, None)] * 4


def copied(model: nn.Module, how: str) -> nn.Module:
    if how == "deepcopy":
        return copy.deepcopy(model)
    if how == "pickle":
        return pickle.loads(pickle.dumps(model))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_wrapped_alike(how: str, used: bool) -> None:
    plain, ours = pair()
    if used:
        assert_steps(plain, ours, steps=2)
    other = copied(ours, how)
    assert driver_of(other) is not driver_of(ours)
    assert [c.module for c in driver_of(other).calls] == list(other.layers)
    assert_steps(plain, other)
    assert all(c.rebuilds == 4 for c in driver_of(other).calls)
    assert_steps(plain, ours, steps=1)
    unwrap(other)
    assert "forward" not in other.layers[0].__dict__ and "forward" in ours.layers[0].__dict__


def test_unwrap() -> None:
    plain, ours = pair()
    assert_steps(plain, ours, steps=2)
    assert unwrap(ours) is ours
    assert all("forward" not in m.__dict__ for m in ours.modules())
    with pytest.raises(ConfigError, match="not wrapped"):
        driver_of(ours)
    assert unwrap(ours) is ours
    assert_steps(plain, ours, steps=2)
    assert_steps(plain, wrap(ours), steps=2)


def test_a_forward_that_was_set_on_the_instance_stays_in_force() -> None:
    """As accelerate and many patches do it."""
    torch.manual_seed(0)
    plain = Model()
    ours = copy.deepcopy(plain)
    for model in (plain, ours):
        for layer in model.layers:
            layer.forward = lambda x, side=None, *, scale=1.0, layer=layer: Layer.forward(
                layer, x, side, scale=2 * scale
            )
    wrap(ours)
    assert_steps(plain, ours)
    own = ours.layers[0].__dict__["forward"].own
    unwrap(ours)
    assert ours.layers[0].__dict__["forward"] is own


def test_nothing_but_the_input_is_kept() -> None:
    model = wrap(nn.Sequential(*[Interior(8) for _ in range(4)]))
    for _ in range(4):
        Interior.forget()
        loss = model(torch.randn(6, 8)).sum()
        assert Interior.held() == 0
        loss.backward()
        assert Interior.peak == 2 * 6 and Interior.held() == 0


# -- modes ---------------------------------------------------------------------------------------------------------


def test_evaluation_keeps_nothing() -> None:
    plain, ours = pair()
    assert_steps(plain, ours, steps=2)
    for model in (plain, ours):
        model.eval()
    with torch.no_grad():
        assert torch.equal(ours(IDS), plain(IDS))
    with torch.inference_mode():
        assert torch.equal(ours(IDS), plain(IDS))
    assert all(c.forwards == 2 for c in driver_of(ours).calls)
    assert_steps(plain, ours)


def test_the_mode_of_the_forward_is_that_of_the_rebuild() -> None:
    plain, ours = pair()
    for late in (False, True):
        for model in (plain, ours):
            model.zero_grad()
            model.train()
            torch.manual_seed(1)
            loss = cross(model(IDS))
            if late:
                model.eval()
            loss.backward()
        same_grads(ours, plain)
        assert not late or not ours.layers[0].training


def test_retain_graph() -> None:
    plain, ours = pair()
    for model in (plain, ours):
        torch.manual_seed(1)
        loss = cross(model(IDS))
        loss.backward(retain_graph=True)
        once = grads(model)
        loss.backward()
        assert all(torch.equal(g, 2 * once[n]) for n, g in grads(model).items())
    same_grads(ours, plain)


def test_a_second_backward_without_retain_is_plains_error() -> None:
    _, ours = pair()
    loss = cross(ours(IDS))
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_several_forwards_before_a_backward() -> None:
    plain, ours = pair()
    for step in range(4):
        for model in (plain, ours):
            model.zero_grad()
            torch.manual_seed(step)
            losses = [cross(model(IDS.roll(k, 1))) for k in range(3)]
            sum(losses).backward()
        same_grads(ours, plain)
        for model in (plain, ours):
            torch.manual_seed(step)
            first, second = [cross(model(IDS.roll(k, 1))) for k in range(2)]
            first.backward()
            second.backward()
        same_grads(ours, plain)


def test_two_losses() -> None:
    class Two(Model):
        def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.embed(ids)
            x = self.layers[1](self.layers[0](x))
            early = self.head(x)
            return early, self.head(self.layers[3](self.layers[2](x)))

    plain, ours = pair(Two)
    for step in range(3):
        for model in (plain, ours):
            torch.manual_seed(step)
            early, late = map(cross, model(IDS))
            early.backward(retain_graph=True)
            late.backward()
        same_grads(ours, plain)


def test_gradients_by_autograd_grad() -> None:
    plain, ours = pair()
    found = []
    for model in (plain, ours):
        torch.manual_seed(1)
        found.append(torch.autograd.grad(cross(model(IDS)), list(model.parameters())))
    assert all(map(torch.equal, *found))
    assert all(p.grad is None for p in ours.parameters())


def test_gradients_of_the_models_input() -> None:
    plain, ours = pair(lambda: Row(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)), blocks=["blocks.*"])
    for step in range(3):
        for model in (plain, ours):
            torch.manual_seed(step)
            x = torch.randn(4, 6, requires_grad=True)
            model(x).square().sum().backward()
            model.seen = x.grad
        assert torch.equal(plain.seen, ours.seen)


def test_autocast() -> None:
    plain, ours = pair()
    for step in range(4):
        for model in (plain, ours):
            model.zero_grad()
            torch.manual_seed(step)
            with torch.autocast("cpu", torch.bfloat16):
                loss = cross(model(IDS).float())
            loss.backward()
        same_grads(ours, plain)


def test_a_grad_scaler_and_an_optimizer() -> None:
    plain, ours = pair()
    parts = [
        (
            m,
            torch.optim.AdamW(m.parameters(), lr=1e-2),
            torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2),
        )
        for m in (plain, ours)
    ]
    for step in range(5):
        for model, optimizer, scaler in parts:
            torch.manual_seed(step)
            optimizer.zero_grad()
            scaler.scale(cross(model(IDS)) * (1e38 if step == 2 else 1)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        assert all(map(torch.equal, ours.state_dict().values(), plain.state_dict().values())), step
    assert parts[0][2].get_scale() == parts[1][2].get_scale()


@pytest.mark.parametrize("settings", [{"boundary_tier": "host"}, {"boundary_tier": "disk"}])
@pytest.mark.parametrize("scheduler", ["sequential", "async"])
def test_tiers(settings: dict[str, Any], scheduler: str) -> None:
    with nothing_left():
        plain, ours = pair(config=RuntimeConfig(scheduler=scheduler, **settings))
        assert_steps(plain, ours)
        for model in (plain, ours):
            model.zero_grad()
            torch.manual_seed(1)
            losses = [cross(model(IDS.roll(k, 1))) for k in range(2)]
            assert model is plain or len(driver_of(ours).waiting._store) >= 8
            losses[0].backward(retain_graph=True)
            (losses[0] + losses[1]).backward()
        same_grads(ours, plain)
        losses = None
        assert len(driver_of(ours).waiting._store) == 0
        unwrap(ours)


def test_a_codec_is_lossy_and_close() -> None:
    plain, ours = pair(config=RuntimeConfig(boundary_tier="host", boundary_precision="bf16"))
    for model in (plain, ours):
        torch.manual_seed(1)
        cross(model(IDS)).backward()
    for a, b in zip(plain.parameters(), ours.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=0.1, atol=0.02)
    assert not torch.equal(plain.embed.weight.grad, ours.embed.weight.grad)
    unwrap(ours)


# -- passes ----------------------------------------------------------------------------------------------------------


class Seen(EAEPass):
    name = "Seen"

    def __init__(self) -> None:
        self.layers: list[int] = []

    def process(self, adjoint: Any, context: Any = None) -> Any:
        self.layers.append(adjoint.layer_id)
        made = adjoint.clone()
        made.tensor = adjoint.tensor * 2
        return made


def test_passes_see_every_boundary() -> None:
    seen = Seen()
    torch.manual_seed(0)
    plain = Row(*[nn.Linear(4, 4) for _ in range(3)])
    ours = wrap(copy.deepcopy(plain), RuntimeConfig(passes=[seen]))
    x = torch.ones(2, 4, requires_grad=True)
    plain(x).sum().backward()
    theirs, x.grad = x.grad, None
    ours(x).sum().backward()
    assert seen.layers == [3, 2, 1, 0]
    assert torch.equal(x.grad, 16 * theirs)
    for number, factor in enumerate((8, 4, 2)):
        assert torch.equal(ours.blocks[number].weight.grad, factor * plain.blocks[number].weight.grad)
