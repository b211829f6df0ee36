"""Where a step's time goes: shares that add up, with the rest called idle."""

import pytest

from shared.records import Episode, StopReason
from stage2_grpo.monitoring.step_timing import step_shares

TRAINER = {"timing_s/step": 100.0, "timing_s/gen": 50.0, "timing_s/old_log_prob": 5.0, "timing_s/update_actor": 30.0,
           "timing_s/update_weights": 4.0}  # fmt: skip


def episode(seconds: float, reward_seconds: float) -> Episode:
    return Episode("q1", (), StopReason.ANSWERED, None, seconds=seconds, reward_seconds=reward_seconds)


def test_shares_of_a_step_add_up_and_empty_places_are_idle() -> None:
    episodes = [episode(48.0, 2.0), episode(9.0, 1.0)]
    shares = step_shares(TRAINER, episodes, concurrency=64)
    assert shares == pytest.approx({"rollout_share": 0.285, "reward_share": 0.015, "update_share": 0.35, "sync_share": 0.04,
                                    "idle_share": 0.31})  # fmt: skip
    assert sum(shares.values()) == pytest.approx(1.0)


def test_no_more_places_are_counted_than_may_be_filled_at_once() -> None:
    episodes = [episode(25.0, 0.0)] * 4
    assert step_shares(TRAINER, episodes, concurrency=2)["rollout_share"] == pytest.approx(0.5)


def test_without_times_there_are_no_shares() -> None:
    assert step_shares({}, [episode(1.0, 0.0)], 1) == {}
    assert step_shares(TRAINER, [], 1) == {}
