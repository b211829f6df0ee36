"""Figures over episodes and the log they go to."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shared.errors import UserError
from shared.evaluation.metrics import Estimate, estimate, summarise
from shared.records import Episode, Question, Reward, StopReason, ToolCall, Turn
from shared.runs.metrics_log import MetricsLog

CALL = ToolCall("execute_sql", {"sql": "SELECT 1"})
RIGHT, WRONG = Reward(True, 1.0, 1.0, 1.0, 1.0), Reward(False, 1.0, 1.0, 0.0, 0.1)


def turn(calls: int, hermes: int | None, merged: bool | None = None) -> Turn:
    return Turn("", "", (CALL,) * calls, (), ("",) * calls, (True,) * calls, hermes, 100, 10, merged)


def episode(
    number: int, *turns: Turn, stop: StopReason = StopReason.ANSWERED, reward: Reward | None = RIGHT
) -> Episode:
    return Episode(f"q{number}", turns, stop, "SELECT 1", seconds=float(number), reward=reward)


def question(number: int, split: str = "seen_database", difficulty: str = "easy") -> Question:
    return Question(f"q{number}", "db", "?", "SELECT 1", "db.sqlite", difficulty=difficulty, split_kind=split)


def test_a_summary_counts_what_the_table_shows() -> None:
    episodes = [
        episode(1, turn(2, 2), turn(1, 1, True), turn(0, 0, True)),
        episode(2, turn(1, 0), turn(0, 0, False), stop=StopReason.LENGTH, reward=WRONG),
        episode(3, turn(1, 0), turn(1, 1, True), stop=StopReason.TURN_LIMIT),
        episode(4, turn(1, 1), stop=StopReason.INFRASTRUCTURE, reward=None),
    ]
    questions = [question(1), question(2, "unseen_database"), question(3, "unseen_database", "hard"), question(4)]
    summary = summarise(episodes, questions, samples=100)
    assert (summary.n, summary.infrastructure_failures) == (3, 1)
    assert summary.accuracy
    assert (summary.accuracy.mean, summary.accuracy.n) == (pytest.approx(2 / 3), 3)
    assert summary.accuracy.low <= 2 / 3 <= summary.accuracy.high
    assert summary.tool_call_rate == pytest.approx(2 / 3)
    assert summary.fallback_share == pytest.approx(2 / 6)
    assert summary.repeated_share == pytest.approx(3 / 6)
    assert summary.merged_share == pytest.approx(3 / 4)
    assert summary.mean_turns == pytest.approx(7 / 3)
    assert summary.mean_completion_tokens == pytest.approx(70 / 3)
    assert summary.mean_prompt_tokens == 100.0
    assert summary.mean_seconds == 2.0
    assert summary.accuracy_by["split_kind"]["seen_database"] == Estimate(1.0, 1.0, 1.0, 1)
    shares = {kind: {name: found.mean for name, found in by.items()} for kind, by in summary.accuracy_by.items()}
    assert shares["split_kind"] == {"seen_database": 1.0, "unseen_database": 0.5}
    assert shares["difficulty"] == {"easy": 0.5, "hard": 1.0}
    assert summary.stops == {"answered": 1, "length": 1, "turn_limit": 1}


def test_a_call_repeats_an_earlier_one_of_its_own_episode_whatever_its_white_space() -> None:
    same, other = ToolCall("execute_sql", {"sql": "SELECT  1\n;"}), ToolCall("execute_sql", {"sql": "SELECT '1'"})
    turns = [dataclasses.replace(turn(1, 1), calls=calls) for calls in ((CALL, other), (same,), (other, CALL))]
    assert summarise([episode(1, *turns), episode(2, turns[0])]).repeated_share == pytest.approx(3 / 7)
    assert summarise([episode(1, turn(0, 0))]).repeated_share is None


def test_what_cannot_be_known_is_none() -> None:
    plain = summarise([episode(1, turn(1, None))], [question(1, split="")])
    assert (plain.tool_call_rate, plain.fallback_share, plain.merged_share) == (None, None, None)
    assert plain.accuracy_by["split_kind"] == {}
    nothing = summarise([episode(1, stop=StopReason.INFRASTRUCTURE, reward=None)], [question(1)])
    assert (nothing.n, nothing.accuracy, nothing.mean_turns) == (0, None, None)
    assert json.loads(json.dumps(dataclasses.asdict(nothing)))["infrastructure_failures"] == 1


def test_an_episode_without_its_reward_is_no_silent_zero() -> None:
    with pytest.raises(ValueError, match="q1"):
        summarise([episode(1, reward=None)], [question(1)])
    with pytest.raises(ValueError, match="q1"):
        summarise([episode(1)], [question(2)])


def test_the_interval_is_reproducible_and_narrows_with_more_values() -> None:
    few, many = [0.0, 1.0] * 10, [0.0, 1.0] * 500
    wide, narrow = estimate(few, 500, seed=1), estimate(many, 500, seed=1)
    assert wide == estimate(few, 500, seed=1)
    assert 0.46 < narrow.low < 0.5 < narrow.high < 0.54
    assert wide.high - wide.low > narrow.high - narrow.low
    assert estimate([1.0] * 7, 100, seed=0) == Estimate(1.0, 1.0, 1.0, 7)
    with pytest.raises(ValueError, match="at least one value"):
        estimate([], 100, seed=0)


def test_figures_are_appended_as_json_lines(tmp_path: Path) -> None:
    for step in (1, 2):
        with MetricsLog(tmp_path / "grpo", tensorboard=False, wandb=False) as log:
            log.log(step, {"reward": 0.5, "bad": float("nan"), "note": "é", "none": None})
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in (tmp_path / "grpo/metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows] == [1, 2]
    assert {key: rows[0][key] for key in ("reward", "bad", "note", "none")} == {
        "reward": 0.5,
        "bad": None,
        "note": "é",
        "none": None,
    }
    assert not (tmp_path / "grpo/tensorboard").exists()


def test_tensorboard_reads_the_same_figures(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, tensorboard=True, wandb=False) as log:
        log.log(1, {"reward": 0.25, "note": "text"})
        log.log(2, {"reward": 0.75})
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(point.step, point.value) for point in board.Scalars("reward")] == [(1, 0.25), (2, 0.75)]


def test_wandb_without_a_key_is_the_users_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with pytest.raises(UserError, match="WANDB_API_KEY"):
        MetricsLog(tmp_path, tensorboard=False, wandb=True)


def test_logging_and_rewards_need_no_torch(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; import shared.reward.reward, shared.agent.tools\n"
        "from shared.runs.metrics_log import MetricsLog\n"
        "MetricsLog(Path(sys.argv[1]), tensorboard=True, wandb=False).log(1, {'x': 1.0})\n"
        "print(sorted({'torch', 'transformers', 'ray', 'vllm', 'tensorflow'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
