"""Step lines: what the trainer and the episodes of a step add up to."""

import dataclasses
from typing import Any

import pytest

from shared.records import Episode, Reward, StopReason, ToolCall, Turn
from stage2_grpo.monitoring.step_metrics import step_line, step_metrics, time_shares, validation_line

CALL = ToolCall("execute_sql", {"sql": "SELECT 1"})
RIGHT, WRONG = Reward(True, 1.0, 1.0, 1.0, 1.0), Reward(False, 1.0, 1.0, 0.0, 0.1)


def turn(calls: int, tokens: int, merged: bool | None = True) -> Turn:
    return Turn("", "", (CALL,) * calls, (), ("",) * calls, (True,) * calls, calls, 300, tokens, merged)


PLAYED = (turn(1, 40, None), turn(1, 40), turn(0, 20))


def episode(**changes: Any) -> Episode:
    return Episode(
        **{
            "question_id": "q1",
            "turns": PLAYED,
            "stop": StopReason.ANSWERED,
            "submitted_sql": None,
            "reward": RIGHT,
            **changes,
        }
    )


LOST = episode(reward=None, stop=StopReason.INFRASTRUCTURE)


def test_figures_of_a_step() -> None:
    unread = [dataclasses.replace(each, hermes_calls=0) for each in PLAYED]
    wrong = episode(reward=WRONG, turns=(*unread[:2], dataclasses.replace(unread[2], merged=False)))
    values = step_metrics({"timing_s/step": 12.5, "guard/rollout_trainer_gap": 0.01}, [episode(), wrong, LOST], 3)
    assert values["reward"] == 0.55
    assert values["execution_accuracy"] == 0.5
    assert values["tool_call_rate"] == 0.5
    assert values["fallback_share"] == 0.5
    assert values["merged_share"] == 0.75
    assert (values["turns"], values["tokens"], values["seconds"]) == (3.0, 200.0, 12.5)
    assert (values["episodes"], values["lost_episodes"]) == (2.0, 1.0)
    assert values["episode_tokens"] == 100.0


def test_an_episode_that_never_started_is_lost_too() -> None:
    values = step_metrics({"training/n_unrewarded_rollouts": 3}, [episode(), LOST], 1)
    assert (values["episodes"], values["lost_episodes"]) == (1.0, 3.0)


def test_a_group_is_mixed_when_its_episodes_differ_in_being_right() -> None:
    other = dataclasses.replace(WRONG, total=0.2)
    groups = {"mixed": (RIGHT, WRONG), "solved": (RIGHT, RIGHT), "failed": (WRONG, other)}
    episodes = [episode(question_id=name, reward=reward) for name, group in groups.items() for reward in group]
    assert step_metrics({}, episodes, 1)["mixed_groups"] == pytest.approx(1 / 3)
    assert step_metrics({}, [], 1)["mixed_groups"] is None


def test_a_step_line_names_every_figure() -> None:
    line = step_line(
        2, 4, step_metrics({"timing_s/step": 12.5, "guard/rollout_trainer_gap": 0.01}, [episode(seconds=1.0)], 1)
    )
    assert line == (
        "step 2/4  reward 1.000  accuracy 100%  tool calls 100%  fallback 0%  merged 100%  turns 3.0  tokens 100  "
        "sync gap 0.0100  arrived –  idle 92%  12 s"
    )


def test_what_was_not_counted_is_a_dash_not_a_zero() -> None:
    values = step_metrics({}, [episode(turns=(turn(0, 100, None),))], 1)
    assert (values["fallback_share"], values["merged_share"]) == (None, None)
    assert "fallback –  merged –  turns 1.0" in step_line(1, 4, values)
    assert step_line(1, 4, step_metrics({}, [], 1)).startswith("step 1/4  reward –  accuracy –")


def test_a_validation_line_says_how_many_questions_it_rests_on() -> None:
    line = validation_line(16, [episode(), episode(reward=dataclasses.replace(WRONG, total=0.0))])
    assert line == "validation after step 16  reward 0.500  accuracy 50.0%  tool calls 100.0%  turns 3.0  questions 2"


TRAINER = {
    "timing_s/step": 100.0,
    "timing_s/gen": 50.0,
    "timing_s/old_log_prob": 5.0,
    "timing_s/update_actor": 30.0,
    "timing_s/update_weights": 4.0,
}


def test_shares_of_a_step_add_up_and_empty_places_are_idle() -> None:
    episodes = [episode(seconds=48.0, reward_seconds=2.0), episode(seconds=9.0, reward_seconds=1.0)]
    shares = time_shares(TRAINER, episodes, concurrency=64)
    expected = {"rollout": 0.285, "reward": 0.015, "update": 0.35, "sync": 0.04, "idle": 0.31}
    assert shares == pytest.approx({f"{name}_share": value for name, value in expected.items()})
    assert sum(shares.values()) == pytest.approx(1.0)


def test_no_more_places_are_counted_than_may_be_filled_at_once() -> None:
    episodes = [episode(seconds=25.0)] * 4
    assert time_shares(TRAINER, episodes, concurrency=2)["rollout_share"] == pytest.approx(0.5)


def test_without_times_there_are_no_shares() -> None:
    assert time_shares({}, [episode(seconds=1.0)], 1) == {}
    assert time_shares(TRAINER, [], 1) == {}
