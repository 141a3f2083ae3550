"""Real text that is on every machine: the sources of the running Python's standard library, byte by byte."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

VOCABULARY = 256
# Every tenth file is held out whole, so that no held-out text has been seen in training.
HELD_OUT_EVERY = 10


@dataclass(frozen=True)
class Corpus:
    """Training and held-out text as uint8 tensors of one dimension, and the number of files of each."""

    training: torch.Tensor
    held_out: torch.Tensor
    training_files: int
    held_out_files: int


def standard_library() -> Corpus:
    """Reads the sources (about 10 MB or more), in the order of their paths. RuntimeError where there are too few."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    files = [path for path in sorted(root.rglob("*.py")) if not skipped.intersection(path.relative_to(root).parts)]
    held_out = files[::HELD_OUT_EVERY]
    chosen = set(held_out)
    training = [path for path in files if path not in chosen]
    corpus = Corpus(_read(training), _read(held_out), len(training), len(held_out))
    if corpus.held_out.numel() < 50_000:
        raise RuntimeError(f"{root} has too few Python sources to train on ({len(files)} files)")
    return corpus


def batch(text: torch.Tensor, rows: int, length: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows: inputs and the bytes that follow them, each (rows, length) int64."""
    starts = torch.randint(text.numel() - length, (rows,), generator=generator)
    windows = text[starts[:, None] + torch.arange(length + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def entropies(text: torch.Tensor) -> tuple[float, float]:
    """Unigram and bigram entropy in nats a byte.

    That is the loss of a model that knows how frequent each byte is, and of one that knows how frequent each byte is
    after the one before it.
    """
    codes = text.long()
    pairs = torch.bincount(codes[:-1] * VOCABULARY + codes[1:], minlength=VOCABULARY**2).double()
    pairs = pairs.view(VOCABULARY, VOCABULARY)
    singles = pairs.sum(dim=1)
    unigram = _entropy(singles)
    return unigram, _entropy(pairs.flatten()) - unigram


def _entropy(counts: torch.Tensor) -> float:
    p = counts[counts > 0] / counts.sum()
    return float(-(p * p.log()).sum())


def _read(files: list[Path]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)
