"""Trains a small language model on real text through `EAERuntime`, and shows what that costs and saves.

A decoder-only transformer of the paper's shape (embedding, pre-norm blocks with grouped-query attention, RoPE and
SwiGLU, tied head) learns the running Python's own standard-library sources, byte by byte. About two minutes on 2 cores:

    python examples/demo.py [--seconds 90 | --steps N] [--out demo_out]

1. one step's gradients, bit for bit, against plain `loss.backward()`
2. step time and peak bytes against plain backward and torch.utils.checkpoint, in turn, and a picture of the bytes
3. training, with the loss on held-out files before and after
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from pathlib import Path
from typing import Any

# An installed package comes before the checkout's own folder, which may lack the built core.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks._harness import alloc_count

COUNTED = alloc_count.ensure_preloaded()

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: E402
from rich.table import Table  # noqa: E402
from torch import nn  # noqa: E402

from eae_runtime import EAERuntime  # noqa: E402
from eae_runtime.contrib.lm import build_lm, lm_loss  # noqa: E402
from examples._demo import contest, corpus, picture  # noqa: E402

# The paper's model is 12 blocks of width 512 with 8 query and 4 key/value heads and SwiGLU 1408.
SHAPE: dict[str, Any] = {"vocab": corpus.VOCABULARY, "dim": 128, "depth": 6, "heads": 4, "kv_heads": 2, "hidden": 352}
ROWS, LENGTH = 8, 128
RATE, WARM_UP, LAST_RATE = 3e-3, 20, 0.1
SECONDS_BETWEEN_LINES = 10


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seconds", type=float, default=90, help="how long to train")
    options.add_argument("--steps", type=int, help="train this many steps instead, however long they take")
    options.add_argument("--out", type=Path, default=Path("demo_out"), help="folder of the picture")
    given = options.parse_args()
    # Without a terminal there is no width to ask for, and 80 columns would break the table's rows.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    began = time.perf_counter()
    counter = alloc_count.open_counter() if COUNTED else None
    if counter is None:
        console.print("Bytes are not counted: that needs Linux with glibc and a C compiler.")

    text = corpus.standard_library()
    unigram, bigram = corpus.entropies(text.training)
    console.print(
        f"Text: {text.training_files} source files of Python {sys.version.split()[0]}'s standard library, "
        f"{text.training.numel() / 1e6:.1f} MB; held out: {text.held_out_files}, {text.held_out.numel() / 1e6:.1f} MB"
    )
    torch.manual_seed(0)
    model = build_lm(**SHAPE, max_seq_len=LENGTH)
    parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"Model: {SHAPE['depth']} blocks of width {SHAPE['dim']}, {SHAPE['heads']} query and {SHAPE['kv_heads']} "
        f"key/value heads, {parameters / 1e6:.2f} M parameters; batch {ROWS} x {LENGTH} bytes"
    )

    draws = torch.Generator().manual_seed(1)
    x, targets = corpus.batch(text.training, ROWS, LENGTH, draws)
    different = contest.gradients_differ(model, x, targets)
    if different:
        console.print(f"[red]Gradients differ from plain backward in: {', '.join(different)}")
        return 1
    console.print(
        f"[green]Gradients of all {len(list(model.parameters()))} parameters equal plain loss.backward()'s, bit for bit"
    )

    measured = contest.compare(model, x, targets, counter, rounds=5)
    before = held_out_loss(model, text)
    train(model, text, draws, given.seconds, given.steps, counter, console)
    after = held_out_loss(model, text)

    show_result(console, measured, before, after, unigram, bigram)
    if all(m.actions for m in measured.values()):
        target = given.out / "memory_over_one_step.png"
        title = "Bytes over one training step, action by action; parameters and optimizer state left out"
        picture.draw({name: m.actions for name, m in measured.items() if m.actions}, target, title)
        console.print(f"Picture: {target}")
    console.print(f"{time.perf_counter() - began:.0f} s in all")
    return 0


def train(
    model: nn.Sequential,
    text: corpus.Corpus,
    draws: torch.Generator,
    seconds: float,
    steps: int | None,
    counter: alloc_count.Counter | None,
    console: Console,
) -> None:
    """Trains with AdamW for `seconds`, or for `steps` where given. The learning rate follows the part that is done."""
    gc.collect()
    others = counter.live() if counter is not None else 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    columns = [
        TextColumn("training"),
        BarColumn(bar_width=30),
        TextColumn("step {task.fields[step]}  loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[rate]:,.0f} tokens/s  step peak {task.fields[peak]}"),
        TimeRemainingColumn(),
    ]
    smooth, peak, step, done = math.nan, 0, 0, 0.0
    start = spoken = time.perf_counter()
    with (
        EAERuntime(model, optimizer) as runtime,
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task("training", total=1.0, step=0, loss=smooth, rate=0.0, peak="")
        while done < 1:
            for group in optimizer.param_groups:
                group["lr"] = RATE * rate_factor(step, done)
            x, targets = corpus.batch(text.training, ROWS, LENGTH, draws)
            resting = 0
            if counter is not None:
                resting = others + alloc_count.resting_bytes([], optimizer)
                counter.take_peak()
            loss = runtime.train_step(x, lm_loss, targets=targets)
            # The first update creates the optimizer's state, which is no part of a step's peak.
            if counter is not None and step > 0:
                peak = max(peak, counter.take_peak() - resting)
            step += 1
            now = time.perf_counter()
            done = step / steps if steps else min(1.0, (now - start) / seconds)
            smooth = loss if step == 1 else 0.95 * smooth + 0.05 * loss
            rate = step * ROWS * LENGTH / (now - start)
            shown = megabytes(peak or None)
            progress.update(task, completed=done, step=step, loss=smooth, rate=rate, peak=shown)
            if not console.is_terminal and (now - spoken > SECONDS_BETWEEN_LINES or done >= 1):
                spoken = now
                console.print(f"step {step}  {done:4.0%}  loss {smooth:.3f}  {rate:,.0f} tokens/s  step peak {shown}")


def rate_factor(step: int, done: float) -> float:
    """The learning rate as a part of the highest: WARM_UP steps up, times a cosine over the part of training `done`."""
    cosine = LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * done))
    return min(1.0, (step + 1) / WARM_UP) * cosine


@torch.no_grad()
def held_out_loss(model: nn.Sequential, text: corpus.Corpus, batches: int = 16) -> float:
    """Mean loss in nats a byte on the same windows of the held-out files at every call."""
    draws = torch.Generator().manual_seed(2)
    losses = [
        lm_loss(model(x), targets)
        for x, targets in (corpus.batch(text.held_out, ROWS, LENGTH, draws) for _ in range(batches))
    ]
    return float(torch.stack(losses).mean())


def show_result(
    console: Console, measured: dict[str, contest.Measured], before: float, after: float, unigram: float, bigram: float
) -> None:
    """Prints the table and how the held-out loss stands to the text's own entropies."""
    ours = measured[contest.OURS]
    table = Table(title="One training step, three ways (same model, same batch, in turn)", title_justify="left")
    for name in ("", "ms a step", "ours / it", "peak bytes", "ours / it "):
        table.add_column(name, justify="right" if name else "left")
    for name, m in measured.items():
        memory = f"{ours.peak / m.peak:.2f}" if ours.peak and m.peak else ""
        table.add_row(name, f"{m.seconds * 1e3:.0f}", f"{ours.seconds / m.seconds:.2f}", megabytes(m.peak), memory)
    console.print(table)
    losses = Table(title="Loss in nats a byte", title_justify="left", show_header=False)
    losses.add_column()
    losses.add_column(justify="right")
    for name, value in (
        ("held-out, before training", before),
        ("training text's unigram entropy", unigram),
        ("training text's bigram entropy", bigram),
        ("held-out, after training", after),
    ):
        losses.add_row(name, f"{value:.3f}")
    console.print(losses)
    if after < bigram:
        console.print("[green]The held-out loss is below the bigram entropy: the model uses more than the byte before.")
    elif after < unigram:
        console.print(
            "[yellow]The held-out loss is below the unigram entropy, but the time was too short for the bigram entropy."
        )
    else:
        console.print("[red]The held-out loss is not below the unigram entropy: the time was too short.")


def megabytes(size: int | None) -> str:
    """A size in MB (10^6 bytes)."""
    return "not counted" if size is None else f"{size / 1e6:.1f} MB"


if __name__ == "__main__":
    sys.exit(main())
