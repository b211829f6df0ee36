"""What a run prints and records of its steps and validations while the trainer runs."""

import dataclasses
import functools
import json
import sys
from pathlib import Path

import pytest

from shared.config.load import load_config
from shared.errors import UserError
from shared.processes.owned_process import OwnedProcess
from shared.records import Episode, JsonlTail, Reward, StopReason, Turn, append_jsonl, write_jsonl
from stage2_grpo.monitoring.step_log import reconcile_logs, refuse_silent_model, stream_steps

PIPELINE = Path(__file__).resolve().parents[3] / "pipeline.yaml"


def episode(split: str, step: int, total: float = 1.0) -> Episode:
    reward, turn = Reward(total == 1.0, 1.0, 1.0, 1.0, total), Turn("", "", (), (), (), (), 0, 300, 9, None)
    return Episode(
        "q1", (turn,), StopReason.ANSWERED, None, seconds=0.4, reward=reward, reward_seconds=0.1, split=split, step=step
    )


def step(number: int) -> dict[str, object]:
    return {"step": number, "data": {"training/reward": 0.5, "timing_s/step": 2.0}}


def test_every_step_and_validation_gets_its_line_also_a_skipped_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_skipped, of_next = episode("train", 1, total=0.0), episode("train", 3)
    played = [episode("train", 2), episode("train", 2, total=0.0), episode("val", 2)]
    written: dict[str, list[dict[str, object]]] = {
        "episodes.jsonl": [
            dataclasses.asdict(one) for one in (of_skipped, *played, of_next)
        ],  # the next step may begin before the row of this one is read
        "trainer_metrics.jsonl": [step(2)],
    }
    code = "import sys; [open(file, 'w').write(text) for file, text in zip(sys.argv[1::2], sys.argv[2::2])]"
    files = [
        part
        for name, rows in written.items()
        for part in (str(tmp_path / name), "".join(json.dumps(row) + "\n" for row in rows))
    ]
    (tmp_path / "episodes.jsonl").write_text("")
    with OwnedProcess([sys.executable, "-c", code, *files], name="writer") as process:
        for _ in stream_steps(load_config(PIPELINE, "cpu"), tmp_path, process, last=0, total=3):
            pass
    first, second, validation, third = capsys.readouterr().out.splitlines()
    assert first.startswith("step 1/3  no update")
    assert second.startswith("step 2/3  reward 0.500  accuracy 50%")
    assert second.endswith("idle 75%  2 s")
    assert validation.startswith("validation after step 2  reward 1.000")
    assert third.startswith("step 3/3  no update")
    (row,) = JsonlTail(tmp_path / "metrics.jsonl").new_rows()
    assert (row["step"], row["episodes"], row["validation_execution_accuracy"]) == (2, 2.0, 1.0)


def test_what_a_killed_run_saved_but_did_not_record_is_recorded_and_what_it_did_not_save_is_dropped(
    tmp_path: Path,
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "reward": 0.1}\n{"step": 4, "reward": 0.2}\n{"step": 3, "rew')
    write_jsonl(tmp_path / "trainer_metrics.jsonl", [step(2), step(3), step(4)])
    played = [("train", 1), ("train", 2), ("train", 3), ("train", 3), ("val", 3), ("train", 4)]
    write_jsonl(tmp_path / "episodes.jsonl", [episode(*one) for one in played])
    config = load_config(PIPELINE, "cpu")
    rows = reconcile_logs(config, tmp_path, saved=3)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[0] == {"step": 1, "reward": 0.1}
    assert (rows[1]["episodes"], "validation_episodes" in rows[1]) == (1.0, False)
    assert (rows[2]["episodes"], rows[2]["seconds"], rows[2]["validation_episodes"]) == (2.0, 2.0, 1.0)
    assert reconcile_logs(config, tmp_path, saved=3) == rows == JsonlTail(metrics).new_rows()
    assert [row["step"] for row in JsonlTail(tmp_path / "episodes.jsonl").new_rows()] == [1, 2, 3, 3, 3]


def test_a_controller_that_outlives_a_killed_run_records_for_the_next_one(tmp_path: Path) -> None:
    file = tmp_path / "episodes.jsonl"
    record = functools.partial(append_jsonl, file)
    for number in (1, 2):
        record(episode("train", number))
    reconcile_logs(load_config(PIPELINE, "cpu"), tmp_path, saved=1)
    record(episode("train", 2))
    assert [row["step"] for row in JsonlTail(file).new_rows()] == [1, 2]


def test_a_run_that_an_older_version_began_goes_on(tmp_path: Path) -> None:
    older = {"question_id": "q1", "turns": 1, "reward": {"total": 1.0, "correct": True}, "split": "train"}
    write_jsonl(tmp_path / "episodes.jsonl", [older, episode("train", 2)])
    write_jsonl(tmp_path / "trainer_metrics.jsonl", [step(1)])
    rows = reconcile_logs(load_config(PIPELINE, "cpu"), tmp_path, saved=1)
    assert [(row["step"], row["seconds"]) for row in rows] == [(1, 2.0)]
    assert JsonlTail(tmp_path / "episodes.jsonl").new_rows() == [older]


def test_a_step_that_was_saved_but_killed_before_the_trainer_wrote_its_row_is_recorded_from_its_episodes(
    tmp_path: Path,
) -> None:
    write_jsonl(tmp_path / "trainer_metrics.jsonl", [step(1)])
    write_jsonl(tmp_path / "episodes.jsonl", [episode("train", number) for number in (1, 1, 2, 3, 3)])
    rows = reconcile_logs(load_config(PIPELINE, "cpu"), tmp_path, saved=3)  # step 2 made no update: its line told so
    assert [(row["step"], row["episodes"], row["lost_episodes"]) for row in rows] == [(1, 2.0, 0.0), (3, 2.0, 0.0)]


def test_a_model_that_never_calls_a_tool_stops_the_first_step() -> None:
    refuse_silent_model(1, {"episodes": 4.0, "calls": 1.0})
    refuse_silent_model(2, {"episodes": 4.0, "calls": 0.0})
    with pytest.raises(UserError, match="nothing to learn from"):
        refuse_silent_model(1, {"episodes": 4.0, "calls": 0.0})
