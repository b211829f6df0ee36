"""Trained weights in bfloat16: a small update arrives whole and always alike; the guard notices when it does not."""

from pathlib import Path

import pytest

from stage2_grpo.training.weight_guard import ARRIVED, GAP, SERVER_MOVED, TRAINER_MOVED, WeightsOutOfSync, judge

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

from safetensors.torch import save_file  # noqa: E402

from stage2_grpo.training.rounding import UpdateShare, round_stochastically  # noqa: E402


@pytest.fixture
def weights(tmp_path: Path) -> tuple[Path, torch.Tensor]:
    """The folder of a start model of one tensor, and that tensor after an update far below a step of bfloat16."""
    torch.manual_seed(0)
    start = (0.05 * torch.randn(300, 400)).to(torch.bfloat16)
    save_file({"w": start}, tmp_path / "model.safetensors")
    return tmp_path, start.float() + 1e-5 * torch.randn(300, 400)


def share(folder: Path, trained: torch.Tensor, rounded: torch.Tensor) -> float:
    counted = UpdateShare(folder)
    counted.add("w", trained, rounded)
    assert counted.value is not None
    return counted.value


def test_a_small_update_arrives_whole(weights: tuple[Path, torch.Tensor]) -> None:
    folder, trained = weights
    rounded = round_stochastically(trained, "w", seed=0)
    assert rounded.dtype == torch.bfloat16
    assert share(folder, trained, rounded) == pytest.approx(1.0, abs=0.05)
    steps = (rounded.float() - trained).abs() / trained.abs()
    assert steps[trained.abs() > 1e-3].max() <= 2**-7  # never further than the next number on the grid


def test_rounding_to_nearest_swallows_it_and_the_guard_stops_the_run(weights: tuple[Path, torch.Tensor]) -> None:
    folder, trained = weights
    arrived = share(folder, trained, trained.to(torch.bfloat16))
    assert arrived < 0.3
    figures = {GAP: 0.004, TRAINER_MOVED: 0.01, SERVER_MOVED: 0.001, ARRIVED: arrived}
    with pytest.raises(
        WeightsOutOfSync, match=rf"After the update of step 2 {arrived:.0%} of the update so far arrived"
    ):
        judge(2, figures, tolerance=0.08)
    judge(2, figures | {ARRIVED: share(folder, trained, round_stochastically(trained, "w", 0))}, tolerance=0.08)


def test_the_same_policy_is_rounded_alike_and_another_seed_otherwise(weights: tuple[Path, torch.Tensor]) -> None:
    _, trained = weights
    one = round_stochastically(trained, "w", seed=0)
    assert torch.equal(one, round_stochastically(trained.clone(), "w", seed=0))
    assert not torch.equal(one, round_stochastically(trained, "w", seed=1))
    assert not torch.equal(one, round_stochastically(trained, "v", seed=0))


def test_what_needs_no_rounding_stays(weights: tuple[Path, torch.Tensor]) -> None:
    _, trained = weights
    on_grid = trained.to(torch.bfloat16)
    assert torch.equal(round_stochastically(on_grid.float(), "w", 0), on_grid)
    special = torch.tensor([float("inf"), -float("inf"), 0.0, -0.0, float("nan"), 0.1])
    rounded = round_stochastically(special, "w", 0)
    assert torch.equal(rounded[:4].float(), special[:4])
    assert rounded[4].isnan()


def test_nothing_is_counted_where_nothing_was_trained(weights: tuple[Path, torch.Tensor]) -> None:
    folder, trained = weights
    counted = UpdateShare(folder)
    counted.add("tied head, which the model does not store", trained, trained)
    assert counted.value is None
