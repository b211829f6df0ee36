"""Rows of grpo/episodes.jsonl for tests."""

from typing import Any

from stage2_grpo.rollouts.agent import EpisodeRow


def turn(*, calls: int = 1, hermes_calls: int | None = 1, merged: bool | None = True, tokens: int = 25) -> dict[str, Any]:
    """A turn that made `calls` calls, of which the stock Hermes grammar reads `hermes_calls`."""
    return {
        "text": "",
        "content": "",
        "calls": [{"name": "search_schema", "arguments": {}}] * calls,
        "malformed": [],
        "observations": [""] * calls,
        "ok": [True] * calls,
        "hermes_calls": hermes_calls,
        "prompt_tokens": 50,
        "completion_tokens": tokens,
        "merged": merged,
    }


def episode_row(**changes: Any) -> EpisodeRow:
    """A right episode of three turns, two of them calls and 100 tokens in all, unless `changes` say otherwise."""
    row: dict[str, Any] = {
        "question_id": "q1",
        "turns": [turn(merged=None), turn(), turn(calls=0, hermes_calls=0, tokens=50)],
        "stop": "answered",
        "submitted_sql": None,
        "messages": [],
        "error": "",
        "seconds": 1.0,
        "rollout_id": "r1",
        "split": "train",
        "step": 1,
        "reward": {"total": 1.0, "correct": True},
        "reward_seconds": 0.0,
    }
    return EpisodeRow(**{**row, **changes})  # type: ignore[typeddict-item]
