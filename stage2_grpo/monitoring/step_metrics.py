"""The figures of one GRPO step or validation, from what the trainer and the controller recorded, and their printed lines.

The trainer appends its metrics to a JSONL file, one row per step. The controller appends one row per episode
(`stage2_grpo.rollouts.agent.EpisodeRow`), which names its step. Shares over episodes are defined in shared/evaluation/metrics.py.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from shared.evaluation.metrics import fallback_share, mean, merged_share, percent, tool_call_rate
from stage2_grpo.rollouts.agent import EpisodeRow, episode_of

_TRAINER_KEYS = {
    "seconds": "timing_s/step",
    "rollout_seconds": "timing_s/gen",
    "update_seconds": "timing_s/update_actor",
    "loss": "actor/pg_loss",
    "entropy": "actor/entropy_loss",
    "grad_norm": "actor/grad_norm",
    "zero_advantage_groups": "training/n_zero_adv_groups",
    "weight_gap": "guard/rollout_trainer_gap",
    "policy_moved": "guard/trainer_moved",
    "server_moved": "guard/server_moved",
}
_UPDATE_PHASES = ("old_log_prob", "ref", "adv", "update_actor")
_LOST = "training/n_unrewarded_rollouts"


def step_metrics(trainer: Mapping[str, Any], rows: Sequence[EpisodeRow], concurrency: int) -> dict[str, float | None]:
    """The figures of one step: what the trainer measured and what its episodes did.

    Infrastructure failures are only counted. They include rollouts that never started, which have no row. A group is
    mixed when it has right and wrong episodes. A figure with nothing to count is None.
    """
    judged = [(episode_of(row), row["reward"]) for row in rows if row["reward"]]
    episodes = [episode for episode, _ in judged]
    turns = [turn for episode in episodes for turn in episode.turns]
    outcomes: defaultdict[str, set[bool]] = defaultdict(set)
    for episode, reward in judged:
        outcomes[episode.question_id].add(reward["correct"])
    tokens = [float(sum(turn.completion_tokens for turn in episode.turns)) for episode in episodes]
    values: dict[str, float | None] = {
        "reward": mean(reward["total"] for _, reward in judged),
        "execution_accuracy": mean(float(reward["correct"]) for _, reward in judged),
        "tool_call_rate": tool_call_rate(episodes),
        "fallback_share": fallback_share(turns),
        "merged_share": merged_share(turns),
        "calls": float(sum(len(turn.calls) for turn in turns)),
        "turns": mean(float(len(episode.turns)) for episode in episodes),
        "tokens": sum(tokens),
        "episode_tokens": mean(tokens),
        "mixed_groups": mean(float(len(seen) > 1) for seen in outcomes.values()),
        "episodes": float(len(judged)),
        "lost_episodes": float(trainer.get(_LOST, len(rows) - len(judged))),
    }
    for name, key in _TRAINER_KEYS.items():
        if key in trainer:  # VERL's file logger writes null for a number that is not finite
            values[name] = math.nan if trainer[key] is None else float(trainer[key])
    return values | time_shares(trainer, rows, concurrency)


def time_shares(trainer: Mapping[str, Any], rows: Sequence[EpisodeRow], concurrency: int) -> dict[str, float]:
    """Shares of a step's seconds, which add up to 1; empty without VERL's `timing_s/step`.

    vLLM plays the episodes, then the trainer updates and syncs the weights. During the rollout each of up to
    grpo.concurrency places is busy or empty. `rollout` and `reward` average over these places; `idle` is the rest.
    """
    step = trainer.get("timing_s/step", 0.0)
    if not step or not rows:
        return {}
    place_seconds = step * min(concurrency, len(rows))
    shares = {
        "rollout_share": sum(row["seconds"] for row in rows) / place_seconds,
        "reward_share": sum(row["reward_seconds"] for row in rows) / place_seconds,
        "update_share": sum(trainer.get(f"timing_s/{name}", 0.0) for name in _UPDATE_PHASES) / step,
        "sync_share": trainer.get("timing_s/update_weights", 0.0) / step,
    }
    return {**shares, "idle_share": max(0.0, 1.0 - sum(shares.values()))}


def validation_metrics(rows: Sequence[EpisodeRow]) -> dict[str, float | None]:
    """What metrics.jsonl records of a validation."""
    values = step_metrics({}, rows, concurrency=1)
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
        f"sync gap {_figure(values.get('weight_gap'), '.4f')}  idle {_figure(values.get('idle_share'), '.0%')}  "
        f"{_figure(values.get('seconds'), '.0f')} s"
    )


def validation_line(step: int, rows: Sequence[EpisodeRow]) -> str:
    """A validation as one line."""
    values = step_metrics({}, rows, concurrency=1)
    return (
        f"validation after step {step}  reward {_figure(values['reward'], '.3f')}  accuracy "
        f"{percent(values['execution_accuracy'])}  tool calls {percent(values['tool_call_rate'])}  "
        f"turns {_figure(values['turns'], '.1f')}  questions {values['episodes']:.0f}"
    )


def _figure(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
