"""Groups gated on the binary outcome: dense rewards alone teach nothing."""

import pytest

from stage2_grpo.training.guarded_trainer import gate_on_outcome, mixed_first


def test_a_group_that_is_all_wrong_or_all_right_is_flattened() -> None:
    rewards = [0.1, 0.2, 1.0, 0.1, 1.0, 0.5]
    correct = [False, False, True, False, True, True]
    groups = ["wrong", "wrong", "mixed", "mixed", "right", "right"]
    gated = gate_on_outcome(rewards, correct, groups)
    assert gated[:2] == [pytest.approx(0.15)] * 2
    assert gated[0] == gated[1]
    assert gated[2:4] == [1.0, 0.1]
    assert gated[4:] == [0.75, 0.75]
    assert sum(gated) == pytest.approx(sum(rewards))


def test_a_wrong_episode_with_a_high_reward_is_still_wrong() -> None:
    assert gate_on_outcome([0.9, 0.1], [False, False], ["q", "q"]) == [0.5, 0.5]
    assert gate_on_outcome([0.2, 0.1], [True, False], ["q", "q"]) == [0.2, 0.1]


def test_members_of_a_group_need_not_stand_together() -> None:
    correct = [False, True, False, False]
    assert gate_on_outcome([0.0, 1.0, 0.2, 0.0], correct, ["a", "b", "a", "b"]) == [0.1, 1.0, 0.1, 0.0]


def test_no_episode_no_group() -> None:
    assert gate_on_outcome([], [], []) == []


def test_the_first_mixed_groups_train() -> None:
    groups = ["flat", "flat", "a", "a", "b", "b", "right", "right", "c", "c"]
    rewards = [0.1, 0.1, 0.0, 1.0, 1.0, 0.2, 1.0, 1.0, 0.0, 1.0]
    assert mixed_first(rewards, groups, 2) == ["a", "b"]
    assert mixed_first(rewards, groups, 4) == ["a", "b", "c", "flat"]
    assert mixed_first(rewards, groups, 9) == ["a", "b", "c", "flat", "right"]
    assert mixed_first([], [], 2) == []
