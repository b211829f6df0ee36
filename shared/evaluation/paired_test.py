"""Two models on the same questions: who was right where, and is the difference more than chance?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shared.evaluation.metrics import bootstrap_interval


@dataclass(frozen=True)
class Paired:
    """Counts over the questions that both models answered; `difference` is the second accuracy minus the first."""

    both: int
    only_first: int
    only_second: int
    neither: int
    difference: float
    interval: tuple[float, float]  # 95 %, resampled by question
    p_value: float  # exact two-sided sign test (McNemar) on the questions where they differ

    @property
    def questions(self) -> int:
        return self.both + self.only_first + self.only_second + self.neither


def compare_pairs(
    first: Mapping[str, bool], second: Mapping[str, bool], *, samples: int = 2000, seed: int = 0
) -> Paired:
    """Compare verdicts by question id; raises ValueError when no question is common to both."""
    common = sorted(first.keys() & second.keys())
    if not common:
        raise ValueError("the two evaluations share no question")
    differences = [float(second[name]) - float(first[name]) for name in common]
    lost, won = differences.count(-1.0), differences.count(1.0)
    both = sum(first[name] and second[name] for name in common)
    return Paired(
        both=both,
        only_first=lost,
        only_second=won,
        neither=len(common) - both - lost - won,
        difference=math.fsum(differences) / len(common),
        interval=bootstrap_interval(differences, samples, seed),
        p_value=sign_test(won, lost),
    )


def sign_test(won: int, lost: int) -> float:
    """Chance of a split at least as uneven as this one when both sides are equally likely."""
    count = won + lost
    tail = sum(math.comb(count, i) for i in range(min(won, lost) + 1)) / 2**count
    return min(1.0, 2 * tail)
