"""The median of paired ratios, its bootstrap interval, and when a claim fails."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

RESAMPLES = 4000


@dataclass(frozen=True)
class Ratio:
    """A ratio of two times (ours over theirs): its median over pairs and the 95 % bootstrap interval of that median."""

    median: float
    low: float
    high: float
    pairs: int

    def fails(self, limit: float) -> bool:
        """True only where the whole interval is beyond the limit: noise alone fails no claim."""
        return self.low > limit

    def as_dict(self) -> dict[str, float]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def paired_ratio(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> Ratio:
    """The ratio of two equally long lists, where the i-th entries were measured in one pair.

    Percentile bootstrap over pairs, seeded, so that a kept result can be recomputed. ValueError on empty lists or
    different lengths.
    """
    if not ours or len(ours) != len(theirs):
        raise ValueError(f"need two equally long, non-empty lists, got {len(ours)} and {len(theirs)} entries")
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    low, high = bootstrap_interval(ratios, seed)
    return Ratio(median(ratios), low, high, len(ratios))


def bootstrap_interval(values: Sequence[float], seed: int = 0, level: float = 0.95) -> tuple[float, float]:
    """The percentile interval, at `level`, of the median of `values` under resampling with replacement."""
    draw = random.Random(seed)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    tail = (1 - level) / 2
    return medians[int(tail * (RESAMPLES - 1))], medians[round((1 - tail) * (RESAMPLES - 1))]
