"""The checkpoints of a run: what counts as saved, what is removed, where a run goes back to."""

from pathlib import Path

from stage2_grpo.checkpoints.files import clear_remains, newest_step, prune, rewind, saved_steps
from tests.stage2_grpo.checkpoints.checkpoint_folder import save_steps


def test_only_a_completely_saved_checkpoint_counts(tmp_path: Path) -> None:
    (tmp_path / "global_step_2" / "actor").mkdir(parents=True)
    assert newest_step(tmp_path) == 0
    save_steps(tmp_path, 1)
    assert saved_steps(tmp_path) == [1]  # step 2 was being written when the trainer was killed
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    assert (saved_steps(tmp_path), newest_step(tmp_path)) == ([1, 2], 2)


def test_what_is_not_kept_is_removed_but_never_what_is_being_written(tmp_path: Path) -> None:
    save_steps(tmp_path, 2, 4, 6)
    (tmp_path / "global_step_8").mkdir()
    prune(tmp_path, {4, 6})
    assert sorted(folder.name for folder in tmp_path.glob("global_step_*")) == [
        "global_step_4",
        "global_step_6",
        "global_step_8",
    ]


def test_a_trainer_killed_while_it_wrote_the_marker_had_saved_its_step(tmp_path: Path) -> None:
    save_steps(tmp_path, 2, 4)
    marker = tmp_path / "latest_checkpointed_iteration.txt"
    marker.write_text("")
    assert newest_step(tmp_path) == 4
    clear_remains(tmp_path)
    assert (marker.read_text(), saved_steps(tmp_path)) == ("4", [2, 4])


def test_what_a_kill_left_half_written_or_half_removed_is_cleared_before_it_can_count(tmp_path: Path) -> None:
    save_steps(tmp_path, 2, 4)
    for name in ("global_step_6", "removed_step_1", "tripped_step_8"):
        (tmp_path / name / "actor").mkdir(parents=True)
    clear_remains(tmp_path)
    left = {"global_step_2", "global_step_4", "tripped_step_8", "latest_checkpointed_iteration.txt"}
    assert {path.name for path in tmp_path.iterdir()} == left
    clear_remains(tmp_path / "of a run that saved nothing")


def test_going_back_keeps_the_later_steps_under_another_name(tmp_path: Path) -> None:
    save_steps(tmp_path, 2, 4, 6)
    rewind(tmp_path, 4)
    assert saved_steps(tmp_path) == [2, 4]
    assert (tmp_path / "tripped_step_6" / "actor").exists()
    rewind(tmp_path, 0)
    assert saved_steps(tmp_path) == []
    assert sorted(folder.name for folder in tmp_path.glob("tripped_step_*")) == ["tripped_step_2", "tripped_step_4"]
