"""One readable line per GRPO step, from what the trainer and the controller wrote.

The trainer appends its metrics to a JSONL file (one line per step), the controller one line per episode. Steps are
synchronous: the training episodes that ended since the last step's line belong to the next one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class JsonlTail:
    """Reads the complete lines that were appended to a file since the last call; half a line waits."""

    path: Path
    _offset: int = field(default=0, init=False)

    def new_rows(self) -> list[dict[str, Any]]:
        try:
            with self.path.open("rb") as stream:
                stream.seek(self._offset)
                block = stream.read()
        except FileNotFoundError:
            return []
        complete = block[: block.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [json.loads(line) for line in complete.splitlines() if line.strip()]


def step_metrics(trainer: Mapping[str, Any], episodes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The figures of one step: what the trainer measured and what its episodes did.

    Shares are over episodes (accuracy, tool-call rate), executed calls (fallback) and turns after the first (merged).
    """
    judged = [episode for episode in episodes if episode["reward"]]
    values = {
        "reward": _mean(episode["reward"]["total"] for episode in judged),
        "execution_accuracy": _mean(float(episode["reward"]["correct"]) for episode in judged),
        "tool_call_rate": _mean(float(episode["hermes_calls"] > 0) for episode in judged),
        "fallback_share": _share(judged, "fallback_calls", "calls"),
        "merged_share": _share(judged, "merged_turns", "later_turns"),
        "calls": float(sum(episode["calls"] for episode in judged)),
        "turns": _mean(float(episode["turns"]) for episode in judged),
        "tokens": float(sum(episode["completion_tokens"] for episode in judged)),
        "episodes": float(len(judged)),
        "lost_episodes": float(len(episodes) - len(judged)),
    }
    renamed = {
        "seconds": "timing_s/step",
        "rollout_seconds": "timing_s/gen",
        "update_seconds": "timing_s/update_actor",
        "grad_norm": "actor/grad_norm",
        "zero_advantage_groups": "training/n_zero_adv_groups",
        "weight_gap": "guard/rollout_trainer_gap",
        "policy_moved": "guard/trainer_moved",
        "server_moved": "guard/server_moved",
    }
    return values | {name: float(trainer[key]) for name, key in renamed.items() if key in trainer}


def step_line(step: int, total: int, values: Mapping[str, float]) -> str:
    """The step as one line of at most 160 characters."""
    return (
        f"step {step}/{total}  reward {values['reward']:.3f}  accuracy {values['execution_accuracy']:.0%}  "
        f"tool calls {values['tool_call_rate']:.0%}  fallback {values['fallback_share']:.0%}  "
        f"merged {values['merged_share']:.0%}  turns {values['turns']:.1f}  tokens {values['tokens']:.0f}  "
        f"sync gap {values.get('weight_gap', float('nan')):.4f}  {values.get('seconds', float('nan')):.0f} s"
    )


def _mean(values: Iterable[float]) -> float:
    collected = list(values)
    return sum(collected) / len(collected) if collected else 0.0


def _share(episodes: Sequence[Mapping[str, Any]], part: str, whole: str) -> float:
    total = sum(episode[whole] for episode in episodes)
    return sum(episode[part] for episode in episodes) / total if total else 0.0
