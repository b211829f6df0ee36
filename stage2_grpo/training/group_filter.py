"""Which groups of GRPO may teach: those whose episodes differ in the binary outcome.

A group's advantages are its rewards minus their mean. Where every episode of a question is wrong (or right), only the
small dense terms differ, and normalised by their own tiny spread they count as much as the difference between right and
wrong. VERL 0.8.0 declares a setting for it (`algorithm.filter_groups`), but none of its trainers, nor Agent Lightning's, reads
it. Equal rewards have the same effect: an advantage of exactly 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from statistics import fmean

from shared.reward.reward import EMPTY_GOLD_REWARD


def gate_on_outcome(rewards: Sequence[float], groups: Sequence[Hashable]) -> list[float]:
    """The rewards [episode], each group that is all right or all wrong flattened to its mean; `groups` stands parallel."""
    members: defaultdict[Hashable, list[int]] = defaultdict(list)
    for place, group in enumerate(groups):
        members[group].append(place)
    gated = list(rewards)
    for places in members.values():
        values = [rewards[place] for place in places]
        right = {
            value >= EMPTY_GOLD_REWARD for value in values
        }  # only right answers reach it (see shared.reward.reward)
        if len(right) == 1:
            for place in places:
                gated[place] = fmean(values)
    return gated
