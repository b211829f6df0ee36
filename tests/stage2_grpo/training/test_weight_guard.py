"""The weight guard's verdict: what counts as a rollout server that does not sample the trained policy."""

import pytest

from stage2_grpo.training.weight_guard import (
    GAP,
    SERVER_MOVED,
    TRAINER_MOVED,
    PolicyNotFinite,
    WeightsOutOfSync,
    judge,
    tolerance_for,
)


def figures(gap: float, trainer_moved: float, server_moved: float) -> dict[str, float]:
    return {GAP: gap, TRAINER_MOVED: trainer_moved, SERVER_MOVED: server_moved}


def test_a_server_that_follows_the_trainer_passes() -> None:
    judge(3, figures(0.02, 0.01, 0.012), tolerance=0.08)


def test_kernels_that_differ_from_the_start_widen_the_tolerance_and_other_weights_do_not() -> None:
    assert tolerance_for(0.02, 0.08) == 0.08
    assert tolerance_for(0.05, 0.08) == pytest.approx(0.15)
    assert tolerance_for(0.1, 0.08) == pytest.approx(0.3)
    assert tolerance_for(2.0, 0.08) == 0.08
    assert tolerance_for(float("nan"), 0.08) == 0.08


def test_an_update_without_any_gradient_passes() -> None:
    judge(3, figures(0.02, 0.0, 0.0), tolerance=0.08)


@pytest.mark.parametrize(
    ("gap", "trainer_moved", "server_moved", "says"),
    [
        (0.02, 0.01, 0.0, "unchanged"),
        (0.09, 0.01, 0.01, "0.0900 nats per token away"),
        (float("nan"), 0.01, 0.01, "nan nats per token away"),
    ],
)
def test_a_server_with_other_weights_stops_the_run(
    gap: float, trainer_moved: float, server_moved: float, says: str
) -> None:
    with pytest.raises(WeightsOutOfSync, match=says):
        judge(3, figures(gap, trainer_moved, server_moved), tolerance=0.08)


def test_a_policy_without_numbers_is_no_matter_of_the_server() -> None:
    nan = float("nan")
    with pytest.raises(PolicyNotFinite, match="training diverged"):
        judge(3, figures(nan, nan, 0.01), tolerance=0.08)
