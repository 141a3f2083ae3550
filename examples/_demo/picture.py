"""Memory over one step, action by action, as a PNG."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from benchmarks._harness.action_bytes import ActionBytes

COLOURS = {
    "C": "#4c78a8",
    "F": "#4c78a8",
    "B": "#e45756",
    "R": "#f2b134",
    "V": "#72b7b2",
    "RV": "#f2b134",
    "U": "#888888",
}
MEANING = {
    "F": "forward (C: no graph kept)",
    "B": "loss",
    "R": "rebuild (RV: with its VJP)",
    "V": "VJP",
    "U": "optimizer",
}


def draw(steps: Mapping[str, list[ActionBytes]], target: Path, title: str) -> None:
    """Writes the picture: a panel a way, the same scale; a bar an action, as high as the most bytes held during it."""
    figure, panels = pyplot.subplots(len(steps), 1, sharey=True, figsize=(12, 2.9 * len(steps)), layout="constrained")
    for panel, (name, actions) in zip(panels, steps.items(), strict=True):
        kinds = [action.label.lstrip("0123456789") for action in actions]
        places = range(len(actions))
        panel.bar(places, [a.peak / 1e6 for a in actions], width=0.92, color=[COLOURS[k] for k in kinds])
        ends = [a.end / 1e6 for a in actions]
        panel.step(places, ends, where="mid", color="black", linewidth=1.2)
        peak = max(a.peak for a in actions) / 1e6
        panel.axhline(peak, color="#e45756", linewidth=0.8, linestyle="--")
        panel.set_title(f"{name}: peak {peak:.1f} MB", loc="left", fontsize=11)
        panel.set_xticks(list(places), [a.label for a in actions], fontsize=8, rotation=60)
        panel.set_xlim(-0.8, len(actions) - 0.2)
        panel.set_ylabel("MB")
        panel.spines[["top", "right"]].set_visible(False)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLOURS[kind]) for kind in MEANING]
    line = pyplot.Line2D([], [], color="black", linewidth=1.2)
    figure.legend(
        [*handles, line],
        [*MEANING.values(), "held when the action ends"],
        loc="outside lower center",
        ncols=6,
        fontsize=9,
    )
    figure.suptitle(title, fontsize=11)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=120)
    pyplot.close(figure)
