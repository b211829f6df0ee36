"""When a GRPO run must stop, and which step is the best: pure rules over the rows of metrics.jsonl.

A row holds the figures of one step (step_metrics.py), of the validation after it (`validation_*`), or of both. Rows are
ordered by step. Drift tripwires compare the last `safety.window` steps with the first ones.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.config.schema import Config, SafetyConfig
from shared.evaluation.metrics import mean, percent

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Trip:
    """A run that went wrong.

    `since` is the first step whose checkpoint belongs to the fault. The episodes of a step show the policy that the
    previous step saved.
    """

    sentence: str
    since: int


def tripped(rows: Sequence[Row], safety: SafetyConfig) -> Trip | None:
    """The first tripwire that the newest step triggers; None when there is none."""
    steps = _steps(rows)
    if not steps:
        return None
    for name in ("loss", "grad_norm"):
        value = steps[-1].get(name)
        if value is not None and not math.isfinite(value):
            where = f"the {name.replace('_', ' ')} of step {steps[-1]['step']} is {value}"
            return Trip(f"{where}, so the training diverged; lower grpo.learning_rate", steps[-1]["step"])
    if not safety.window or len(steps) < safety.window:
        return None
    first, last = steps[: safety.window], steps[-safety.window :]
    sentence = None
    if all(row.get("mixed_groups") == 0.0 for row in last):
        accuracy = percent(mean(row["execution_accuracy"] for row in last))
        sentence = (
            f"no group of the last {len(last)} steps had both right and wrong episodes (accuracy {accuracy}), so there "
            "is nothing to learn from; bring easier or harder questions, or start from a better stage-1 checkpoint"
        )
    elif len(steps) >= 2 * safety.window:
        sentence = _drift(first, last, safety)
    return Trip(sentence, last[0]["step"] - 1) if sentence else None


def _drift(first: Sequence[Row], last: Sequence[Row], safety: SafetyConfig) -> str | None:
    ratios = {}
    for name in ("entropy", "episode_tokens", "tool_call_rate"):
        before, after = (mean(row[name] for row in rows if row.get(name) is not None) for rows in (first, last))
        if before and after is not None:
            ratios[name] = after / before
    entropy, length, calls = (ratios.get(name, 1.0) for name in ("entropy", "episode_tokens", "tool_call_rate"))
    compared = f"in the last {len(last)} steps, compared with the first"
    if entropy < safety.entropy_share:
        return (
            f"the entropy collapsed to {entropy:.0%} {compared} (safety.entropy_share), so the episodes of a group are "
            "all alike; lower grpo.learning_rate, or set grpo.entropy_coeff"
        )
    if "episode_tokens" in ratios and length > safety.length_factor:
        return (
            f"the episodes grew to {length:.1f} times their tokens {compared} (safety.length_factor); lower "
            "grpo.learning_rate, or agent.max_turn_tokens"
        )
    if calls < safety.tool_call_share:
        return (
            f"the tool-call rate fell to {calls:.0%} {compared} (safety.tool_call_share), so the policy unlearns its "
            "tools; lower grpo.learning_rate, or raise grpo.reward_valid_call"
        )
    return None


def best_step(rows: Sequence[Row], saved: Collection[int]) -> int | None:
    """The saved step of highest validation accuracy, the earliest among equals; None when none was validated."""
    accuracies = {step: value for step, value in _validations(rows).items() if step in saved}
    return max(accuracies, key=lambda step: accuracies[step], default=None)


def validations_since_best(rows: Sequence[Row]) -> int:
    """How many validations have passed since the one of highest accuracy; 0 when there is none."""
    accuracies = list(_validations(rows).values())
    return len(accuracies) - 1 - accuracies.index(max(accuracies)) if accuracies else 0


def kept_steps(rows: Sequence[Row], saved: Sequence[int], config: Config) -> set[int]:
    """The saved steps to keep: the newest ones, the best, and those that a tripwire may roll back to.

    A rollback needs the last step saved before the watched window, and the first one within it, which takes over as the
    window moves on.
    """
    steps, window = _steps(rows), config.safety.window
    first = steps[-window:][0]["step"] - 1 if window and steps else rows[-1]["step"] + 1
    before, within = [step for step in saved if step < first], [step for step in saved if step >= first]
    return {*saved[-config.grpo.keep_checkpoints :], *before[-1:], *within[:1], best_step(rows, saved) or 0}


def _steps(rows: Sequence[Row]) -> list[Row]:
    """The rows of steps. A step without an update has no row."""
    return [row for row in rows if "episodes" in row]


def _validations(rows: Sequence[Row]) -> dict[int, float]:
    """Accuracy by step; a step that a resumed run validates again counts once."""
    key = "validation_execution_accuracy"
    return {row["step"]: row[key] for row in rows if row.get(key) is not None}
