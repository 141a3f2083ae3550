"""Ready-made transformer blocks and a language model. The runtime itself does not import this package."""

from .transformer_blocks import (
    CausalSelfAttention,
    PreNormTransformerBlock,
    RMSNorm,
    RotaryPositionalEmbedding,
    SwiGLU,
    apply_rotary,
)

__all__ = [
    "CausalSelfAttention",
    "PreNormTransformerBlock",
    "RMSNorm",
    "RotaryPositionalEmbedding",
    "SwiGLU",
    "apply_rotary",
]
