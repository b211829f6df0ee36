"""One readable line per GRPO step and validation, from what the trainer and the controller wrote.

The trainer appends its metrics to a JSONL file (one line per step), the controller one line per episode, which names its
step. What an episode's figures mean is defined in shared/evaluation/metrics.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from shared.evaluation.metrics import percent, summarise
from shared.records import Episode


def step_metrics(trainer: Mapping[str, Any], episodes: Sequence[Episode]) -> dict[str, float | None]:
    """The figures of one step: what the trainer measured and what its episodes did.

    Lost episodes are those that the trainer got without a reward: one whose step ended before it could start has no record.
    """
    played = summarise(episodes)
    values: dict[str, float | None] = {
        "reward": played.mean_reward,
        "execution_accuracy": played.execution_accuracy,
        "tool_call_rate": played.tool_call_rate,
        "fallback_share": played.fallback_share,
        "merged_share": played.merged_share,
        "calls": float(played.tool_calls),
        "turns": played.mean_turns,
        "tokens": (played.mean_completion_tokens or 0.0) * played.n,
        "episode_tokens": played.mean_completion_tokens,
        "mixed_groups": played.mixed_share,
        "episodes": float(played.n),
        "lost_episodes": float(trainer.get("training/n_unrewarded_rollouts", played.infrastructure_failures)),
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
