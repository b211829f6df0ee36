"""The figures of one GRPO step or validation, from what trainer and controller recorded, and their printed lines.

The trainer appends its metrics to a JSONL file, one row per step. The controller appends one row per episode, which
names its step. The figures of episodes are defined in shared/evaluation/metrics.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from shared.evaluation.metrics import percent, summarise
from shared.records import Episode

_TRAINER_KEYS = {
    "seconds": "timing_s/step",
    "rollout_seconds": "timing_s/gen",
    "update_seconds": "timing_s/update_actor",
    "loss": "actor/pg_loss",
    "entropy": "actor/entropy_loss",
    "grad_norm": "actor/grad_norm",
    "zero_advantage_groups": "training/n_zero_adv_groups",
    "discarded_groups": "training/n_discarded_groups",
    "weight_gap": "guard/rollout_trainer_gap",
    "policy_moved": "guard/trainer_moved",
    "server_moved": "guard/server_moved",
    "arrived_share": "guard/arrived_share",
}
_UPDATE_PHASES = ("old_log_prob", "ref", "adv", "update_actor")


def step_metrics(trainer: Mapping[str, Any], episodes: Sequence[Episode], concurrency: int) -> dict[str, float | None]:
    """The figures of one step: what the trainer measured and what its episodes did.

    Lost episodes are those without a reward. They include rollouts that never started, which have no record.
    """
    played = summarise(episodes)
    values: dict[str, float | None] = {
        "reward": played.mean_reward,
        "execution_accuracy": played.accuracy.mean if played.accuracy else None,
        "tool_call_rate": played.tool_call_rate,
        "fallback_share": played.fallback_share,
        "repeated_share": played.repeated_share,
        "merged_share": played.merged_share,
        "calls": float(played.tool_calls),
        "turns": played.mean_turns,
        "tokens": (played.mean_completion_tokens or 0.0) * played.n,
        "episode_tokens": played.mean_completion_tokens,
        "mixed_groups": played.mixed_share,
        "episodes": float(played.n),
        "lost_episodes": float(trainer.get("training/n_unrewarded_rollouts", played.infrastructure_failures)),
    }
    for name, key in _TRAINER_KEYS.items():
        if key in trainer:  # VERL's file logger writes null for a number that is not finite
            values[name] = math.nan if trainer[key] is None else float(trainer[key])
    return values | time_shares(trainer, episodes, concurrency)


def time_shares(trainer: Mapping[str, Any], episodes: Sequence[Episode], concurrency: int) -> dict[str, float]:
    """Shares of a step's seconds, which add up to 1; empty without VERL's `timing_s/step`.

    vLLM plays the episodes, then the trainer updates and syncs the weights. During the rollout each of up to
    grpo.concurrency places is busy or empty. `rollout` and `reward` average over these places; `idle` is the rest.
    """
    step = trainer.get("timing_s/step", 0.0)
    if not step or not episodes:
        return {}
    place_seconds = step * min(concurrency, len(episodes))
    shares = {
        "rollout_share": sum(episode.seconds for episode in episodes) / place_seconds,
        "reward_share": sum(episode.reward_seconds for episode in episodes) / place_seconds,
        "update_share": sum(trainer.get(f"timing_s/{name}", 0.0) for name in _UPDATE_PHASES) / step,
        "sync_share": trainer.get("timing_s/update_weights", 0.0) / step,
    }
    return {**shares, "idle_share": max(0.0, 1.0 - sum(shares.values()))}


def validation_metrics(episodes: Sequence[Episode]) -> dict[str, float | None]:
    """What metrics.jsonl records of a validation."""
    values = step_metrics({}, episodes, concurrency=1)
    return {f"validation_{name}": values[name] for name in ("reward", "execution_accuracy", "episodes")}


def step_line(step: int, total: int, values: Mapping[str, float | None]) -> str:
    """The step as one line of at most 160 characters."""
    shares = {
        "accuracy": "execution_accuracy",
        "tool calls": "tool_call_rate",
        "fallback": "fallback_share",
        "merged": "merged_share",
    }
    return (
        f"step {step}/{total}  reward {_figure(values['reward'], '.3f')}  "
        + "".join(f"{label} {_figure(values[name], '.0%')}  " for label, name in shares.items())
        + f"turns {_figure(values['turns'], '.1f')}  tokens {values['tokens']:.0f}  "
        f"sync gap {_figure(values.get('weight_gap'), '.4f')}  arrived {_figure(values.get('arrived_share'), '.0%')}  "
        f"idle {_figure(values.get('idle_share'), '.0%')}  "
        + (f"discarded {values['discarded_groups']:.0f}  " if values.get("discarded_groups") else "")
        + f"{_figure(values.get('seconds'), '.0f')} s"
    )


def validation_line(step: int, episodes: Sequence[Episode]) -> str:
    """A validation as one line."""
    values = step_metrics({}, episodes, concurrency=1)
    return (
        f"validation after step {step}  reward {_figure(values['reward'], '.3f')}  accuracy "
        f"{percent(values['execution_accuracy'])}  tool calls {percent(values['tool_call_rate'])}  "
        f"turns {_figure(values['turns'], '.1f')}  questions {values['episodes']:.0f}"
    )


def _figure(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
