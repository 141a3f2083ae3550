"""Measurements in turn, so that a machine that drifts slows every competitor alike.

One round goes through the competitors and back:

    A B C C B A

For each two of them that is one A B B A pair: under a linear drift the mean of a competitor's two measurements is the
value at the round's middle, the same instant for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping


def mirrored_rounds(
    measures: Mapping[str, Callable[[], float]], rounds: int, on_measure: Callable[[str, float], None] | None = None
) -> dict[str, list[float]]:
    """Runs `rounds` rounds and returns, per competitor, one mean of two measurements a round.

    `on_measure(name, value)` is called after each measurement (for progress).
    """
    names = list(measures)
    means: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        sums = dict.fromkeys(names, 0.0)
        for name in [*names, *reversed(names)]:
            value = measures[name]()
            sums[name] += value
            if on_measure is not None:
                on_measure(name, value)
        for name in names:
            means[name].append(sums[name] / 2)
    return means
