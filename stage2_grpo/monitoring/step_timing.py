"""Where the time of a GRPO step goes, and how much of it the hardware waits.

The halves of a step alternate: vLLM plays the episodes, then the trainer updates and sends the weights over. While episodes
are played, each of up to grpo.concurrency places is busy or empty; near the end of a step a few long episodes keep all
others waiting. That, polling and hand-overs are what `idle` counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shared.records import Episode

_UPDATE = ("old_log_prob", "ref", "adv", "update_actor")


def step_shares(trainer: Mapping[str, Any], episodes: Sequence[Episode], concurrency: int) -> dict[str, float]:
    """Shares of a step's seconds, which add up to 1; empty without VERL's `timing_s/step`.

    `rollout` and `reward` are the mean over the places that the step could have filled, of model and tools, and of judging.
    """
    step = trainer.get("timing_s/step", 0.0)
    if not step or not episodes:
        return {}
    places = step * min(concurrency, len(episodes))  # seconds of all of them
    shares = {
        "rollout_share": sum(episode.seconds for episode in episodes) / places,
        "reward_share": sum(episode.reward_seconds for episode in episodes) / places,
        "update_share": sum(trainer.get(f"timing_s/{name}", 0.0) for name in _UPDATE) / step,
        "sync_share": trainer.get("timing_s/update_weights", 0.0) / step,
    }
    return {**shares, "idle_share": max(0.0, 1.0 - sum(shares.values()))}
