"""`wrap` leaves what plain PyTorch leaves, bit for bit: the chains of models.py, driven by `loss.backward()`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from eae_runtime import RuntimeConfig, unwrap, wrap
from eae_runtime._autograd_driver import driver_of
from models import CASES
from oracle import assert_same, build, default_dtype, listen, nothing_left, plain_step

STEPS = 5

CONFIGS: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"boundary_tier": "host"},
    "async disk": {"scheduler": "async", "boundary_tier": "disk"},
    "always": {"verify_rebuild": "always"},
}


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> Iterator[RuntimeConfig]:
    with nothing_left():
        yield RuntimeConfig(**CONFIGS[request.param])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_steps(name: str, training: bool, config: RuntimeConfig) -> None:
    case = CASES[name]
    theirs, x = build(case)
    ours, _ = build(case)
    for model in (theirs, ours):
        model.train(training)
    logs: tuple[list[Any], list[Any]] = ([], [])
    listen(theirs, logs[0])
    listen(ours, logs[1])
    wrap(ours, config)
    for step in range(STEPS):
        torch.manual_seed(step)
        expected = plain_step(theirs, x, case.loss, logs[0])
        torch.manual_seed(step)
        assert_same(plain_step(ours, x, case.loss, logs[1]), expected, step)
    for call in driver_of(ours).calls:
        assert call.kept is not None or call.rebuilds <= call.forwards
    unwrap(ours)


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer", "lstm", "complex"])
def test_in_double_precision(name: str) -> None:
    with default_dtype(torch.float64):
        case = CASES[name]
        theirs, x = build(case)
        ours, _ = build(case)
        wrap(ours)
        for step in range(3):
            torch.manual_seed(step)
            expected = plain_step(theirs, x, case.loss)
            torch.manual_seed(step)
            assert_same(plain_step(ours, x, case.loss), expected, step)
