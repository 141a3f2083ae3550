"""From a model to its blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from eae_runtime.blocks import BlockDecomposer, EAEBlock
from eae_runtime.errors import ConfigError, TensorTypeError


def test_containers_give_their_own_modules_in_order() -> None:
    a, b = nn.Linear(2, 2), nn.ReLU()
    for model in (nn.Sequential(a, b), nn.ModuleList([a, b]), [a, b], (a, b)):
        blocks = BlockDecomposer.decompose(model)
        assert blocks[0] is a and blocks[1] is b and len(blocks) == 2
    assert BlockDecomposer.from_sequential(nn.Sequential(a, b)) == [a, b]
    assert BlockDecomposer.from_list([a, b]) == [a, b]
    assert BlockDecomposer.decompose(a) == [a]


def test_a_module_that_stands_twice_is_two_blocks() -> None:
    a = nn.Linear(2, 2)
    assert BlockDecomposer.decompose(nn.Sequential(a, nn.ReLU(), a))[::2] == [a, a]


def test_a_sequential_with_a_forward_of_its_own_is_one_block() -> None:
    class Doubled(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = 2 * super().forward(x)
            return out

    model = Doubled(nn.Linear(2, 2))
    assert BlockDecomposer.decompose(model) == [model]


@pytest.mark.parametrize(
    ("model", "error", "text"),
    [
        (nn.Sequential(), ConfigError, "zero blocks"),
        ([], ConfigError, "zero blocks"),
        (3, TensorTypeError, "int"),
        (nn.ModuleDict(), TensorTypeError, "ModuleDict"),
        ([nn.ReLU(), torch.relu], TensorTypeError, "block 1"),
        ([nn.ReLU(), None], TensorTypeError, "block 1"),
        ([[nn.ReLU()]], TensorTypeError, "block 0 is a list"),
    ],
)
def test_what_is_no_chain_is_refused(model: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        BlockDecomposer.decompose(model)
    assert issubclass(error, (ValueError, TypeError))


def test_from_sequential_takes_a_sequential() -> None:
    with pytest.raises(TypeError, match="list"):
        BlockDecomposer.from_sequential([nn.ReLU()])  # type: ignore[arg-type]


def test_blocks_of_other_ranks_may_be_none() -> None:
    block = nn.ReLU()
    assert BlockDecomposer.decompose([None, block], foreign=True) == [None, block]


def test_the_base_class_has_no_name_and_no_backend() -> None:
    class Named(EAEBlock):
        eae_name = "mine"

    assert (EAEBlock().eae_name, EAEBlock().eae_backend, Named().eae_name) == (None, None, "mine")
    assert list(Named().parameters()) == []
