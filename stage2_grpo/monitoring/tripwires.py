"""When a GRPO run must not go on, and which of its steps is the best: pure rules over the rows of metrics.jsonl.

A row holds the figures of one step (see progress.py), of the validation after it (`validation_*`), or of both; rows are
ordered by step. Tripwires that watch a drift compare the last `safety.window` steps with the first ones.
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
    """A run that went wrong: the sentence for the user, and the first step whose checkpoint belongs to the fault.

    What shows in the episodes of a step is the policy that the step before it has made and saved.
    """

    sentence: str
    since: int


def tripped(rows: Sequence[Row], safety: SafetyConfig) -> Trip | None:
    """The first tripwire that the newest step released, None while all is well."""
    steps = _steps(rows)
    if not steps:
        return None
    if trip := _not_finite(steps[-1]):
        return trip
    if not safety.window or len(steps) < safety.window:
        return None
    first, last = steps[: safety.window], _watched(steps, safety)
    sentence = _nothing_to_compare(last)
    if len(steps) >= 2 * safety.window:
        sentence = sentence or _drift(first, last, safety)
    return Trip(sentence, last[0]["step"] - 1) if sentence else None


def best_step(rows: Sequence[Row], saved: Collection[int]) -> int | None:
    """The saved step of highest validation accuracy, the earliest among equals; None when none was validated."""
    accuracies = {step: value for step, value in _validations(rows).items() if step in saved}
    return max(accuracies, key=lambda step: accuracies[step], default=None)


def validations_since_best(rows: Sequence[Row]) -> int:
    """How many validations have passed since the one of highest accuracy; 0 when there is none."""
    accuracies = list(_validations(rows).values())
    return len(accuracies) - 1 - accuracies.index(max(accuracies)) if accuracies else 0


def kept_steps(rows: Sequence[Row], saved: Sequence[int], config: Config) -> set[int]:
    """The saved steps to keep: the newest ones, the best, and what a tripwire may go back to.

    That is the last step saved before those whose policy the tripwires watch, and the first one among these, which takes its
    place as they move on.
    """
    watched = _watched(_steps(rows), config.safety)
    first = watched[0]["step"] - 1 if watched else rows[-1]["step"] + 1
    before, among = [step for step in saved if step < first], [step for step in saved if step >= first]
    return {*saved[-config.grpo.keep_checkpoints :], *before[-1:], *among[:1], best_step(rows, saved) or 0}


def _steps(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "episodes" in row]


def _watched(steps: Sequence[Row], safety: SafetyConfig) -> Sequence[Row]:
    """The last `safety.window` steps; a step that made no update has no row and is none of them."""
    return steps[-safety.window :] if safety.window else []


def _validations(rows: Sequence[Row]) -> dict[int, float]:
    """Accuracy by step; a step that was validated again after a resumption counts once."""
    key = "validation_execution_accuracy"
    return {row["step"]: row[key] for row in rows if row.get(key) is not None}


def _not_finite(step: Row) -> Trip | None:
    for name in ("loss", "grad_norm"):
        value = step.get(name)
        if value is not None and not math.isfinite(value):
            where = f"the {name.replace('_', ' ')} of step {step['step']} is {value}"
            return Trip(f"{where}, so the training diverged; lower grpo.learning_rate", step["step"])
    return None


def _nothing_to_compare(last: Sequence[Row]) -> str | None:
    """GRPO learns from the differences inside a group: all right or all wrong, it trains nothing."""
    if any(row.get("mixed_groups") != 0.0 for row in last):
        return None
    accuracy = mean(row["execution_accuracy"] for row in last)
    return (
        f"no group of the last {len(last)} steps had both right and wrong episodes (accuracy {percent(accuracy)}), so there is "
        "nothing to learn from; bring easier or harder questions, or start from a better stage-1 checkpoint"
    )


def _drift(first: Sequence[Row], last: Sequence[Row], safety: SafetyConfig) -> str | None:
    entropy, length, calls = (_ratio(name, first, last) for name in ("entropy", "episode_tokens", "tool_call_rate"))
    compared = f"in the last {len(last)} steps, compared with the first"
    if entropy is not None and entropy < safety.entropy_share:
        return (
            f"the entropy collapsed to {entropy:.0%} {compared} (safety.entropy_share), so the episodes of a group are all "
            "alike; lower grpo.learning_rate, or set grpo.entropy_coeff"
        )
    if length is not None and length > safety.length_factor:
        return (
            f"the episodes grew to {length:.1f} times their tokens {compared} (safety.length_factor); lower "
            "grpo.learning_rate, or agent.max_turn_tokens"
        )
    if calls is not None and calls < safety.tool_call_share:
        return (
            f"the tool-call rate fell to {calls:.0%} {compared} (safety.tool_call_share), so the policy unlearns its tools; "
            "lower grpo.learning_rate, or raise grpo.reward_valid_call"
        )
    return None


def _ratio(name: str, first: Sequence[Row], last: Sequence[Row]) -> float | None:
    """Mean of a figure over the last steps as a multiple of that over the first; None where it was not measured or 0."""
    before, after = (mean(row[name] for row in rows if row.get(name) is not None) for rows in (first, last))
    return after / before if before and after is not None else None
