"""The paper's decoder-only language model as a chain of blocks: embedding, pre-norm blocks, norm and tied head.

Shapes: B batch, T positions, D width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..blocks import EAEBlock
from .transformer_blocks import PreNormTransformerBlock, RMSNorm

__all__ = ["LMHead", "TokenEmbedding", "build_lm", "lm_loss"]


class TokenEmbedding(EAEBlock):
    """Token numbers (B, T), int64 -> vectors (B, T, D)."""

    eae_name = "embedding"

    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, dim))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


class LMHead(EAEBlock):
    """Final norm and projection on the vocabulary. (B, T, D) -> logits (B, T, V).

    `weight` (V, D) is used as it is: given the embedding's Parameter, the two are tied.
    """

    eae_name = "head"

    def __init__(self, weight: nn.Parameter, norm_eps: float = 1e-6) -> None:
        super().__init__()
        self.norm = RMSNorm(weight.shape[1], norm_eps)
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.norm(x), self.weight)


def build_lm(
    vocab: int,
    dim: int,
    depth: int,
    heads: int,
    kv_heads: int | None = None,
    hidden: int | None = None,
    *,
    max_seq_len: int = 1024,
    dropout: float = 0.0,
    norm_eps: float = 1e-6,
    tied: bool = True,
    init_std: float = 0.02,
) -> nn.Sequential:
    """A language model of `depth` transformer blocks between an embedding and a head: (B, T) int64 -> logits (B, T, V).

    The paper's model (Table 1, 60 M parameters) is `build_lm(49152, 512, 12, 8, 4, 1408)`.

    Matrices are drawn from N(0, init_std^2); those that write into the residual stream are smaller by
    sqrt(2 * depth), so that its variance does not grow with depth. The draws come from torch's global generator.
    """
    embedding = TokenEmbedding(vocab, dim)
    blocks = []
    for i in range(depth):
        block = PreNormTransformerBlock(dim, heads, kv_heads, max_seq_len, hidden, dropout, norm_eps)
        block.eae_name = f"block_{i}"
        blocks.append(block)
    head = LMHead(embedding.weight if tied else nn.Parameter(torch.empty(vocab, dim)), norm_eps)
    model = nn.Sequential(embedding, *blocks, head)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            into_stream = name.endswith(("out_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=init_std * (2 * depth) ** -0.5 if into_stream else init_std)
    return model


def lm_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per token. logits (B, T, V), targets (B, T) int64 -> a tensor without dimensions."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())
