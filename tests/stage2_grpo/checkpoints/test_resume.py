"""An interrupted run meets other data or settings: refused with their names, continued or started anew when told."""

from pathlib import Path
from typing import Any

import pytest

from shared.config.load import load_config
from shared.errors import UserError
from shared.runs import manifest as runs
from stage2_grpo.checkpoints.files import newest_step
from stage2_grpo.checkpoints.resume import adopted_step, begin, stage_inputs
from tests.stage2_grpo.checkpoints.checkpoint_folder import save_steps

PIPELINE = Path(__file__).resolve().parents[3] / "pipeline.yaml"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name in ("train.jsonl", "val.jsonl", "model"):
        (tmp_path / name).write_text(name)
    return tmp_path


def inputs(files: Path, *overrides: str) -> dict[str, Any]:
    config = load_config(PIPELINE, "cpu", overrides)
    return stage_inputs(config, files / "model", files / "train.jsonl", files / "val.jsonl")


def interrupted(files: Path) -> Path:
    folder = files / "grpo"
    begin(folder, inputs(files), "refuse")
    save_steps(folder / "checkpoints", 4, 8)
    return folder


def began(folder: Path, inputs: dict[str, Any], changed: str) -> int:
    """Begin as the stage does; the step that was adopted."""
    adopted = adopted_step(folder, inputs, changed)
    begin(folder, inputs, changed)
    return adopted


def test_the_same_run_goes_on(files: Path) -> None:
    folder = interrupted(files)
    patient = inputs(files, "grpo.episode_timeout_seconds=900", "safety.patience=3", "gate.min_pass=0.1")
    assert began(folder, patient, "refuse") == 0
    assert (folder / "checkpoints" / "global_step_8" / "data.pt").exists()


def test_a_changed_run_is_refused_with_what_changed(files: Path) -> None:
    folder = interrupted(files)
    (files / "train.jsonl").write_text("other questions")
    with pytest.raises(
        UserError, match=r"step 8 saved.*grpo\.learning_rate 5e-05 -> 0\.001; train\. Restore.*changed=continue"
    ):
        begin(folder, inputs(files, "grpo.learning_rate=1e-3"), "refuse")
    assert (folder / "checkpoints" / "global_step_8").exists()


def test_told_to_continue_it_keeps_the_checkpoint_and_remembers(files: Path) -> None:
    folder = interrupted(files)
    for _ in range(2):  # the second start is again that of an interrupted run
        assert began(folder, inputs(files, "grpo.learning_rate=1e-3"), "continue") == 8
        assert (folder / "checkpoints" / "global_step_8" / "data.pt").exists()


def test_other_rows_begin_their_order_anew(files: Path) -> None:
    folder = interrupted(files)
    (files / "train.jsonl").write_text("other questions")
    assert began(folder, inputs(files), "continue") == 8
    assert not (folder / "checkpoints" / "global_step_8" / "data.pt").exists()


def test_told_to_restart_it_starts_once_from_an_empty_folder(files: Path) -> None:
    folder = interrupted(files)
    assert began(folder, inputs(files, "seed=7"), "restart") == 0
    assert [file.name for file in folder.iterdir()] == [runs.STARTED]
    save_steps(folder / "checkpoints", 4)
    assert began(folder, inputs(files, "seed=7"), "restart") == 0  # the same command goes on where it was interrupted
    assert newest_step(folder / "checkpoints") == 4


def test_a_run_that_saved_nothing_may_change(files: Path) -> None:
    begin(files / "grpo", inputs(files), "refuse")
    assert began(files / "grpo", inputs(files, "seed=7"), "refuse") == 0


def test_a_finished_run_is_set_aside_not_refused(files: Path) -> None:
    folder = interrupted(files)
    runs.finish_stage(folder, runs.fingerprint(**inputs(files)), seconds=1, outputs={})
    assert began(folder, inputs(files, "seed=7"), "refuse") == 0
    assert (files / "grpo.old" / "checkpoints" / "global_step_8").exists()
