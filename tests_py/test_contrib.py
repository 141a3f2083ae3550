"""Transformer blocks against their formulas, and the language model's shape."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from eae_runtime.contrib import (
    CausalSelfAttention,
    PreNormTransformerBlock,
    RMSNorm,
    RotaryPositionalEmbedding,
    SwiGLU,
    apply_rotary,
)
from eae_runtime.contrib.lm import build_lm, lm_loss
from eae_runtime.errors import ConfigError


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_rms_norm() -> None:
    norm = RMSNorm(8, eps=1e-5).double()
    with torch.no_grad():
        norm.weight.copy_(torch.randn(8))
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    want = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), want)
    assert RMSNorm(8).bfloat16()(x.bfloat16()).dtype is torch.bfloat16


def rotary_by_hand(x: torch.Tensor, base: float = 10000.0) -> torch.Tensor:
    out, d = torch.empty_like(x), x.shape[-1]
    for t in range(x.shape[2]):
        for j in range(d // 2):
            angle = t * base ** (-2 * j / d)
            a, b = x[:, :, t, 2 * j], x[:, :, t, 2 * j + 1]
            out[:, :, t, 2 * j] = a * math.cos(angle) - b * math.sin(angle)
            out[:, :, t, 2 * j + 1] = a * math.sin(angle) + b * math.cos(angle)
    return out


@pytest.mark.parametrize("layout", ["contiguous", "heads transposed", "offset by one", "half"])
def test_rotary_turns_pairs(layout: str) -> None:
    x = torch.randn(2, 3, 5, 8)
    want = rotary_by_hand(x)
    if layout == "heads transposed":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "offset by one":
        x = torch.cat((torch.zeros(1), x.flatten()))[1:].view(x.shape)
    elif layout == "half":
        x = x.half()
    turned = apply_rotary(x, *RotaryPositionalEmbedding(8, max_seq_len=16)(5))
    assert turned.dtype is x.dtype
    torch.testing.assert_close(turned.float(), want, rtol=1e-2 if layout == "half" else 1e-5, atol=5e-3)


def test_rotary_gradient() -> None:
    cos, sin = RotaryPositionalEmbedding(4, 8).double()(3)
    x = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: apply_rotary(v, cos, sin), x)


def test_rotary_tables_are_not_saved_and_have_an_end() -> None:
    rope = RotaryPositionalEmbedding(4, max_seq_len=6)
    assert list(rope.state_dict()) == []
    assert rope(6)[0].shape == (6, 2)
    with pytest.raises(ConfigError, match="max_seq_len is 6"):
        rope(7)


@pytest.mark.parametrize("kv_heads", [None, 4, 2, 1])
@pytest.mark.parametrize("rope", [True, False])
def test_attention_against_softmax(kv_heads: int | None, rope: bool) -> None:
    attention = CausalSelfAttention(16, 4, kv_heads, max_seq_len=8, rope=rope).double()
    x = torch.randn(2, 7, 16, dtype=torch.float64)

    def heads(projection: nn.Linear) -> torch.Tensor:
        split = projection(x).view(2, 7, -1, 4).transpose(1, 2)
        return split.repeat_interleave(4 // split.shape[1], dim=1)

    q, k, v = heads(attention.q_proj), heads(attention.k_proj), heads(attention.v_proj)
    if rope:
        q, k = rotary_by_hand(q.detach()), rotary_by_hand(k.detach())
    scores = (q @ k.mT / 2).masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -math.inf)
    want = attention.out_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 7, 16))
    torch.testing.assert_close(attention(x), want, rtol=1e-5, atol=1e-6)


def test_attention_drops_in_training_only() -> None:
    attention = CausalSelfAttention(8, 2, dropout=0.5)
    x = torch.randn(1, 6, 8)
    assert not torch.equal(attention(x), attention(x))
    attention.eval()
    assert torch.equal(attention(x), attention(x))


def test_attention_sees_no_later_position() -> None:
    attention = CausalSelfAttention(8, 2, 1)
    x = torch.randn(1, 6, 8)
    y = x.clone()
    y[:, 3:] += 1
    torch.testing.assert_close(attention(x)[:, :3], attention(y)[:, :3])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dim": 10, "num_heads": 4}, "num_heads=4"),
        ({"dim": 12, "num_heads": 4}, "head_dim=3"),
        ({"dim": 16, "num_heads": 4, "num_kv_heads": 3}, "num_kv_heads=3"),
    ],
)
def test_head_counts_must_fit(options: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        CausalSelfAttention(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("dim", "hidden", "width"), [(64, None, 256), (512, None, 1536), (512, 1408, 1408)])
def test_swiglu(dim: int, hidden: int | None, width: int) -> None:
    ffn = SwiGLU(dim, hidden)
    x = torch.randn(2, dim)
    assert ffn.gate_proj.out_features == ffn.up_proj.out_features == ffn.down_proj.in_features == width
    torch.testing.assert_close(ffn(x), ffn.down_proj(F.silu(ffn.gate_proj(x)) * ffn.up_proj(x)))


def test_block_is_two_residual_steps() -> None:
    block = PreNormTransformerBlock(16, 4, 2, max_seq_len=8, ffn_hidden_dim=24)
    x = torch.randn(2, 5, 16)
    h = x + block.attn(block.attn_norm(x))
    assert torch.equal(block(x), h + block.ffn(block.ffn_norm(h)))


def test_language_model() -> None:
    model = build_lm(50, 16, 3, 4, 2, 24, max_seq_len=8)
    assert [block.eae_name for block in model] == ["embedding", "block_0", "block_1", "block_2", "head"]
    assert model[0].weight is model[-1].weight
    ids = torch.randint(50, (2, 8))
    logits = model(ids)
    assert logits.shape == (2, 8, 50)
    loss = lm_loss(logits, ids)
    torch.testing.assert_close(loss, F.cross_entropy(logits.view(16, 50), ids.view(16)))
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert build_lm(50, 16, 1, 4, tied=False)[-1].weight.shape == (50, 16)


def test_the_papers_model_has_60_million_parameters() -> None:
    with torch.device("meta"):
        model = build_lm(49152, 512, 12, 8, 4, 1408)
    assert sum(parameter.numel() for parameter in model.parameters()) == 60_568_064


def test_an_untrained_model_guesses() -> None:
    model = build_lm(64, 32, 2, 4, 2, 48, max_seq_len=16)
    ids, targets = torch.randint(64, (8, 16)), torch.randint(64, (8, 16))
    assert lm_loss(model(ids), targets).item() == pytest.approx(math.log(64), abs=0.1)
