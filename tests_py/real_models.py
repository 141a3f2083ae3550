"""Models that people train, built from small random configurations: nothing is downloaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"

BATCH, LENGTH, WIDTH, LAYERS, VOCABULARY = 4, 64, 64, 6, 97


@dataclass(frozen=True)
class Real:
    """A model with inputs (a dictionary for `model(**inputs)`, else a tensor) and a loss of its output.

    count: how many blocks are found in it.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    loss: Callable[[Any], torch.Tensor]
    count: int


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, shape)


def own_loss(output: Any) -> torch.Tensor:
    """Hugging Face models take labels and give the loss."""
    return output.loss


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH, n_layer=LAYERS, n_head=4, use_cache=False
        )
    )  # fmt: skip


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=LAYERS,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH, use_cache=False,
            attention_dropout=0.1,
        )
    )  # fmt: skip


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS,
            num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
            max_position_embeddings=LENGTH, use_cache=False,
        )
    )  # fmt: skip


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4,
            intermediate_size=4 * WIDTH, max_position_embeddings=LENGTH,
        )
    )  # fmt: skip


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY, d_model=WIDTH, d_kv=16, d_ff=4 * WIDTH, num_layers=4, num_decoder_layers=4,
            num_heads=4, use_cache=False, decoder_start_token_id=0,
        )
    )  # fmt: skip


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4, intermediate_size=4 * WIDTH,
            image_size=32, patch_size=4, num_labels=10, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
        )
    )  # fmt: skip


def resnet18() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(num_classes=10)


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        llama(), LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "up_proj"])
    )


class Twice(nn.Module):
    """Two convolutions, each with batch statistics, and what it adds to."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(outside, outside, 3, padding=1), nn.BatchNorm2d(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return F.relu(self.second(h) + h, inplace=True)


class UNet(nn.Module):
    """Down and up again, two blocks a level, with the down path's outputs concatenated to the up path's inputs between
    the blocks."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        sizes = [width * 2**k for k in range(depth)]
        level = lambda inside, outside: nn.Sequential(Twice(inside, outside), Twice(outside, outside))
        self.downs = nn.ModuleList([level(a, b) for a, b in zip([3, *sizes[:-1]], sizes)])
        self.middle = level(sizes[-1], sizes[-1])
        self.ups = nn.ModuleList([level(2 * b, a) for a, b in zip([width, *sizes[:-1]], sizes)][::-1])
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, skip in zip(self.ups, skips[::-1]):
            x = up(torch.cat([F.interpolate(x, scale_factor=2), skip], 1))
        return self.head(x)


class Translator(nn.Module):
    """nn.Transformer between embeddings and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 4, 3, 3, 4 * WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        x = self.transformer(self.embed(source), self.embed(target), tgt_mask=mask, tgt_is_causal=True)
        return self.head(x)


class Recurrent(nn.Module):
    """A norm, an LSTM of two layers with dropout, and what it adds to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.lstm(self.norm(x))[0]


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Recurrent() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def next_token(logits: torch.Tensor) -> torch.Tensor:
    labels = torch.arange(logits.shape[:-1].numel()) % VOCABULARY
    return F.cross_entropy(logits.flatten(0, -2), labels)


def classes(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, torch.arange(len(logits)) % logits.shape[1])


def language() -> dict[str, torch.Tensor]:
    ids = tokens(BATCH, LENGTH)
    return {"input_ids": ids, "labels": ids}


def padded() -> dict[str, torch.Tensor]:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[0, -9:] = 0
    return {**language(), "attention_mask": mask}


def translation() -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(BATCH, LENGTH), "labels": tokens(BATCH, LENGTH // 2)}


def images() -> torch.Tensor:
    return torch.randn(BATCH, 3, 32, 32)


MODELS: dict[str, Real] = {
    "GPT-2": Real(gpt2, language, own_loss, LAYERS),
    "Llama": Real(llama, padded, own_loss, LAYERS),
    "BERT": Real(bert, padded, own_loss, LAYERS),
    "T5": Real(t5, translation, own_loss, 8),
    "ViT": Real(vit, lambda: {"pixel_values": images(), "labels": torch.arange(BATCH)}, own_loss, LAYERS),
    "Mixtral": Real(mixtral, language, own_loss, LAYERS),
    "ResNet-18": Real(resnet18, lambda: torch.randn(2 * BATCH, 3, 128, 128), classes, 8),
    "U-Net": Real(UNet, images, lambda y: y.square().mean(), 14),
    "nn.Transformer": Real(
        Translator, lambda: {"source": tokens(BATCH, LENGTH), "target": tokens(BATCH, LENGTH)}, next_token, 6
    ),
    "LSTM": Real(Reader, lambda: tokens(BATCH, LENGTH), next_token, LAYERS),
    "LoRA": Real(lora, language, own_loss, LAYERS),
}
