"""One readable line per GRPO step and validation, from what the trainer and the controller wrote.

The trainer appends its metrics to a JSONL file (one line per step), the controller one line per episode, which names its
step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from shared.evaluation.metrics import mean, percent


def step_metrics(trainer: Mapping[str, Any], episodes: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """The figures of one step: what the trainer measured and what its episodes did.

    Shares are over episodes (accuracy, tool-call rate), executed calls (fallback), turns after the first (merged) and
    questions (mixed groups: those with right and wrong episodes); None where there was nothing to count. Lost episodes are
    those that the trainer got without a reward: one whose step ended before it could start has no record.
    """
    judged = [episode for episode in episodes if episode["reward"]]
    values: dict[str, float | None] = {
        "reward": mean(episode["reward"]["total"] for episode in judged),
        "execution_accuracy": mean(float(episode["reward"]["correct"]) for episode in judged),
        "tool_call_rate": mean(float(episode["hermes_calls"] > 0) for episode in judged),
        "fallback_share": _share(judged, "fallback_calls", "calls"),
        "merged_share": _share(judged, "merged_turns", "later_turns"),
        "calls": float(sum(episode["calls"] for episode in judged)),
        "turns": mean(float(episode["turns"]) for episode in judged),
        "tokens": float(sum(episode["completion_tokens"] for episode in judged)),
        "episode_tokens": mean(float(episode["completion_tokens"]) for episode in judged),
        "mixed_groups": _mixed_share(judged),
        "episodes": float(len(judged)),
        "lost_episodes": float(trainer.get("training/n_unrewarded_rollouts", len(episodes) - len(judged))),
    }
    renamed = {
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
    # VERL's file logger writes null for what is not finite.
    figures = {name: trainer[key] for name, key in renamed.items() if key in trainer}
    return values | {name: math.nan if value is None else float(value) for name, value in figures.items()}


def step_line(step: int, total: int, values: Mapping[str, float | None]) -> str:
    """The step as one line of at most 160 characters."""
    shares = {"accuracy": "execution_accuracy", "tool calls": "tool_call_rate", "fallback": "fallback_share",
              "merged": "merged_share"}  # fmt: skip
    return (
        f"step {step}/{total}  reward {_figure(values['reward'], '.3f')}  "
        + "".join(f"{label} {_figure(values[name], '.0%')}  " for label, name in shares.items())
        + f"turns {_figure(values['turns'], '.1f')}  tokens {values['tokens']:.0f}  "
        f"sync gap {_figure(values.get('weight_gap'), '.4f')}  idle {_figure(values.get('idle_share'), '.0%')}  "
        f"{_figure(values.get('seconds'), '.0f')} s"
    )


def skipped_line(step: int, total: int) -> str:
    """A step that the trainer made without an update, because too few episodes were left for a mini batch."""
    return f"step {step}/{total}  no update: its rewarded episodes did not fill one mini batch (grpo.mini_batch_size)"


def validation_line(step: int, values: Mapping[str, float | None]) -> str:
    """A validation as one line."""
    return (
        f"validation after step {step}  reward {_figure(values['reward'], '.3f')}  accuracy "
        f"{percent(values['execution_accuracy'])}  tool calls {percent(values['tool_call_rate'])}  "
        f"turns {_figure(values['turns'], '.1f')}  questions {values['episodes']:.0f}"
    )


def _figure(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _mixed_share(episodes: Sequence[Mapping[str, Any]]) -> float | None:
    outcomes: defaultdict[str, set[bool]] = defaultdict(set)
    for episode in episodes:
        outcomes[episode["question_id"]].add(episode["reward"]["correct"])
    return mean(float(len(seen) > 1) for seen in outcomes.values())


def _share(episodes: Sequence[Mapping[str, Any]], part: str, whole: str) -> float | None:
    total = sum(episode[whole] for episode in episodes)
    return sum(episode[part] for episode in episodes) / total if total else None
