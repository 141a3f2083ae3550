"""The parts of a decoder-only transformer: root-mean-square norm, rotary positions, grouped-query attention, SwiGLU.

Shapes: B batch, T positions, D width, H query heads, K key/value heads, d = D / H the width of a head.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..blocks import EAEBlock
from ..errors import ConfigError

__all__ = [
    "CausalSelfAttention",
    "PreNormTransformerBlock",
    "RMSNorm",
    "RotaryPositionalEmbedding",
    "SwiGLU",
    "apply_rotary",
]


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019). (..., D) -> (..., D)."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class RotaryPositionalEmbedding(nn.Module):
    """Tables of the rotary position embedding (Su et al. 2021), computed once for `max_seq_len` positions.

    `forward(T)` gives (cos, sin), each (T, d / 2): row t turns pair j by the angle t * base^(-2 j / d). The tables
    are buffers that are not part of the state dict.
    """

    cos_cached: torch.Tensor
    sin_cached: torch.Tensor

    def __init__(self, head_dim: int, max_seq_len: int = 4096, base: float = 10000.0) -> None:
        super().__init__()
        if head_dim % 2:
            raise ConfigError(f"head_dim={head_dim}: rotary positions turn pairs, so it must be even")
        frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angle = torch.outer(torch.arange(max_seq_len, dtype=torch.float32), frequency)
        self.register_buffer("cos_cached", angle.cos(), persistent=False)
        self.register_buffer("sin_cached", angle.sin(), persistent=False)

    def forward(self, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        if seq_len > self.cos_cached.shape[0]:
            raise ConfigError(f"a sequence of {seq_len} positions: max_seq_len is {self.cos_cached.shape[0]}")
        return self.cos_cached[:seq_len], self.sin_cached[:seq_len]


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns the pairs (x[2j], x[2j + 1]) of each head's vector.

    x (B, heads, T, d), cos and sin (T, d / 2) -> (B, heads, T, d)
    """
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    if _views_as_complex(x):
        # One complex multiplication: a quarter of the time of the four real ones, and the same bits.
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.complex(cos, sin)
        return torch.view_as_real(turned).flatten(-2)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def _views_as_complex(x: torch.Tensor) -> bool:
    """Whether each pair lies where a complex number could."""
    if x.dtype not in (torch.float32, torch.float64) or x.storage_offset() % 2 or x.stride(-1) != 1:
        return False
    return all(step % 2 == 0 for step in x.stride()[:-1])


class CausalSelfAttention(nn.Module):
    """Causal self-attention with grouped queries and rotary positions. (B, T, D) -> (B, T, D).

    num_kv_heads  K; None is H (ordinary attention), 1 is multi-query attention
    dropout       on the attention weights, in training only
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        max_seq_len: int = 4096,
        dropout: float = 0.0,
        rope: bool = True,
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise ConfigError(f"dim={dim} must be a multiple of num_heads={num_heads}")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        if num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}")
        self.head_dim = dim // num_heads
        self.dropout = dropout
        kv_width = self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, kv_width, bias=False)
        self.v_proj = nn.Linear(dim, kv_width, bias=False)
        self.out_proj = nn.Linear(dim, dim, bias=False)
        self.rope = RotaryPositionalEmbedding(self.head_dim, max_seq_len) if rope else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self._heads(self.q_proj(x))
        k = self._heads(self.k_proj(x))
        v = self._heads(self.v_proj(x))
        if self.rope is not None:
            cos, sin = self.rope(x.shape[1])
            q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        grouped = self.num_kv_heads != self.num_heads
        if grouped and not _has_grouped_kernel(q):
            repeat = self.num_heads // self.num_kv_heads
            k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
            grouped = False
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=grouped)
        result: torch.Tensor = self.out_proj(out.transpose(1, 2).flatten(2))
        return result

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, heads * d) -> (B, heads, T, d), a view."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def _has_grouped_kernel(q: torch.Tensor) -> bool:
    """Whether a fused kernel takes fewer key heads than query heads; on an accelerator only the half-precision one
    does."""
    return q.device.type == "cpu" or q.dtype in (torch.float16, torch.bfloat16)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020). (..., D) -> (..., D).

    hidden_dim  the inner width; None is 8/3 D, rounded up to a multiple of `multiple_of`
    """

    def __init__(self, dim: int, hidden_dim: int | None = None, multiple_of: int = 256) -> None:
        super().__init__()
        if hidden_dim is None:
            hidden_dim = -(-(8 * dim // 3) // multiple_of) * multiple_of
        self.gate_proj = nn.Linear(dim, hidden_dim, bias=False)
        self.down_proj = nn.Linear(hidden_dim, dim, bias=False)
        self.up_proj = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class PreNormTransformerBlock(EAEBlock):
    """x + attention(norm(x)), then x + SwiGLU(norm(x)). (B, T, D) -> (B, T, D)."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        max_seq_len: int = 4096,
        ffn_hidden_dim: int | None = None,
        dropout: float = 0.0,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(dim, norm_eps)
        self.attn = CausalSelfAttention(dim, num_heads, num_kv_heads, max_seq_len, dropout)
        self.ffn_norm = RMSNorm(dim, norm_eps)
        self.ffn = SwiGLU(dim, ffn_hidden_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.attn_norm(x))
        out: torch.Tensor = x + self.ffn(self.ffn_norm(x))
        return out
