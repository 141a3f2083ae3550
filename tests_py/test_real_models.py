"""Models that people train give plain PyTorch's bits with less memory, under both doors to the autograd driver."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import real_models
from eae_runtime import EAERuntime, unwrap, verify, wrap
from eae_runtime._autograd_driver import driver_of
from eae_runtime._graph_sweep import call_model
from eae_runtime._peak import peak_bytes
from real_models import MODELS, Real

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

# Step peak by plain's. ResNet-18's first convolution, norm and pool are code between its blocks and hold a third of its
# activations, its gradients as much again.
PEAKS = dict.fromkeys(MODELS, 0.6) | {"ResNet-18": 0.95}


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def built(real: Real) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return real.make().train(), real.inputs()


def step(model: nn.Module, real: Real, inputs: Any, seed: int = 0, autocast: bool = False) -> torch.Tensor:
    torch.manual_seed(seed)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = real.loss(call_model(model, inputs)).float()
    loss.backward()
    return loss.detach()


def differing(a: nn.Module, b: nn.Module) -> list[str]:
    """Names of gradients, parameters and buffers that are not the same bits."""
    one = {f"grad of {n}": p.grad for n, p in a.named_parameters() if p.grad is not None} | dict(a.state_dict())
    two = {f"grad of {n}": p.grad for n, p in b.named_parameters() if p.grad is not None} | dict(b.state_dict())
    assert one.keys() == two.keys()
    return [n for n in one if not torch.equal(one[n], two[n])]


def test_parity(name: str) -> None:
    """Outputs, loss, gradients, buffers, random state and hooks by `verify`; every block is rebuilt."""
    real = MODELS[name]
    model, inputs = built(real)
    report = verify(model, inputs, real.loss)
    assert report.ok and not report.unstable, str(report)
    assert [(b.forwards, b.rebuilds, b.kept) for b in report.blocks] == [(1, 1, None)] * real.count
    assert report.peak <= PEAKS[name] * report.peak_plain, str(report)


def test_training(name: str) -> None:
    """Three steps of AdamW, with `wrap` and with EAERuntime."""
    real = MODELS[name]
    model, inputs = built(real)
    models = [model, wrap(copy.deepcopy(model)), copy.deepcopy(model)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in models]
    with EAERuntime(models[2], optimizers[2]) as runtime:
        for number in range(3):
            losses = []
            for one, optimizer in zip(models[:2], optimizers):
                optimizer.zero_grad()
                losses.append(step(one, real, inputs, number).item())
                optimizer.step()
            torch.manual_seed(number)
            losses.append(runtime.train_step(inputs, real.loss))
            assert len(set(losses)) == 1
            assert differing(models[0], models[1]) == []
            models[0].zero_grad()
            assert differing(models[0], models[2]) == []


def test_autocast(name: str) -> None:
    """Where the processor has no kernel for it (an LSTM in bfloat16), the error is plain PyTorch's."""
    real = MODELS[name]
    model, inputs = built(real)
    ours = wrap(copy.deepcopy(model))
    for number in range(2):
        model.zero_grad()
        ours.zero_grad()
        found = []
        for one in (model, ours):
            try:
                found.append(step(one, real, inputs, number, True).item())
            except RuntimeError as error:
                found.append(str(error))
        assert found[0] == found[1]
        assert differing(model, ours) == []


def test_two_forwards_before_a_backward(name: str) -> None:
    real = MODELS[name]
    model, inputs = built(real)
    ours = wrap(copy.deepcopy(model))
    for one in (model, ours):
        torch.manual_seed(1)
        first = real.loss(call_model(one, inputs))
        second = real.loss(call_model(one, inputs))
        (first + 2 * second).backward()
    assert differing(model, ours) == []


def test_evaluation_and_copies(name: str) -> None:
    real = MODELS[name]
    model, inputs = built(real)
    ours = wrap(copy.deepcopy(model))
    assert list(ours.state_dict()) == list(model.state_dict())
    copies = copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))
    step(model, real, inputs)
    for copied in copies:
        step(copied, real, inputs)
        assert differing(model, copied) == []
        assert all(call.rebuilds == 1 for call in driver_of(copied).calls)
    ours.eval()
    with torch.no_grad():
        held = peak_bytes(lambda: call_model(ours, inputs), [])
        unwrap(ours)
        assert held <= 1.05 * peak_bytes(lambda: call_model(ours, inputs), [])
    assert all("forward" not in module.__dict__ for module in ours.modules())


def test_a_key_value_cache_is_refused_by_name() -> None:
    from eae_runtime.errors import BlockError

    model = real_models.llama()
    model.config.use_cache = True
    wrap(model)
    with pytest.raises(BlockError, match=r"block 0 \(model.layers.0\) changes a container.*use_cache=False"):
        call_model(model.train(), real_models.language())
