"""Run directories: a manifest means complete, and only for exactly what it was made from."""

import itertools
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from shared.errors import UserError
from shared.runs import manifest as runs
from shared.runs.manifest import (
    MANIFEST,
    RunDirectory,
    attempt,
    begin_stage,
    fingerprint,
    finish_stage,
    finished,
    installed_versions,
    read_manifest,
    set_aside,
    write_json,
)


def test_a_finished_stage_is_found_by_its_fingerprint_alone(tmp_path: Path) -> None:
    begin_stage(tmp_path / "sft", "a")
    assert finished(tmp_path / "sft", "a") is None
    model = tmp_path / "m"
    model.touch()
    finish_stage(tmp_path / "sft", "a", seconds=1.26, outputs={"model": str(model)}, traces=3)
    manifest = finished(tmp_path / "sft", "a")
    assert manifest is not None
    assert (manifest["seconds"], manifest["outputs"], manifest["traces"]) == (1.3, {"model": str(model)}, 3)
    assert finished(tmp_path / "sft", "b") is None


def test_a_moved_stage_is_still_finished_and_names_its_outputs_where_they_are_now(tmp_path: Path) -> None:
    folder, base = tmp_path / "runs" / "sft", tmp_path / "base"
    base.touch()
    begin_stage(folder, "a")
    (folder / "model").mkdir()
    finish_stage(folder, "a", seconds=1, outputs={"model": str(folder / "model"), "base": str(base)})
    assert str(folder) not in (folder / MANIFEST).read_text()
    shutil.move(tmp_path / "runs", tmp_path / "moved")
    manifest = finished(tmp_path / "moved" / "sft", "a")
    assert manifest is not None
    assert manifest["outputs"] == {"model": str(tmp_path / "moved" / "sft" / "model"), "base": str(base)}


def test_a_stage_whose_output_was_deleted_is_not_finished(tmp_path: Path) -> None:
    begin_stage(tmp_path / "sft", "a")
    finish_stage(tmp_path / "sft", "a", seconds=1, outputs={"model": str(tmp_path / "gone")})
    assert finished(tmp_path / "sft", "a") is None


def test_a_stage_whose_output_was_cut_is_not_finished(tmp_path: Path) -> None:
    begin_stage(tmp_path / "data", "a")
    rows = tmp_path / "data" / "train.jsonl"
    rows.write_text('{"id": "1"}\n{"id": "2"}\n')
    finish_stage(tmp_path / "data", "a", seconds=1, outputs={"train": str(rows)})
    assert finished(tmp_path / "data", "a")
    rows.write_text('{"id": "1"}\n')
    assert finished(tmp_path / "data", "a") is None


def test_a_finished_stage_that_no_longer_fits_is_set_aside(tmp_path: Path) -> None:
    for mark in "abc":
        begin_stage(tmp_path / "sft", mark)
        (tmp_path / "sft" / f"model of {mark}").touch()
        finish_stage(tmp_path / "sft", mark, seconds=1, outputs={})
    assert (tmp_path / "sft" / "model of c").exists()
    assert [file.name for file in (tmp_path / "sft.old").glob("model*")] == ["model of b"]


def test_an_unfinished_attempt_does_not_replace_the_model_that_was_set_aside(tmp_path: Path) -> None:
    begin_stage(tmp_path / "sft", "a")
    finish_stage(tmp_path / "sft", "a", seconds=1, outputs={})
    begin_stage(tmp_path / "sft", "b")
    begin_stage(tmp_path / "sft", "c")
    assert (tmp_path / "sft.old" / MANIFEST).exists()


def test_a_half_finished_attempt_is_kept_for_the_same_inputs_only(tmp_path: Path) -> None:
    begin_stage(tmp_path, "a")
    (tmp_path / "checkpoint").touch()
    begin_stage(tmp_path, "a")
    assert (tmp_path / "checkpoint").exists()
    begin_stage(tmp_path, "b")
    assert not (tmp_path / "checkpoint").exists()


def test_a_stage_killed_while_it_opened_its_folder_opens_it_again(tmp_path: Path) -> None:
    (tmp_path / "grpo").mkdir()
    (tmp_path / "grpo" / "started.json.partial").write_text('{"finger')
    begin_stage(tmp_path / "grpo", "a")
    assert [file.name for file in (tmp_path / "grpo").iterdir()] == ["started.json"]


def test_an_attempt_whose_inputs_are_refused_leaves_what_was_finished_before(tmp_path: Path) -> None:
    begin_stage(tmp_path / "sft", "a")
    finish_stage(tmp_path / "sft", "a", seconds=1, outputs={})
    with pytest.raises(UserError), attempt(tmp_path / "sft", "b"):
        raise UserError("The teacher does not answer.")
    assert finished(tmp_path / "sft", "a")


def test_a_refusal_keeps_what_an_interrupted_attempt_of_the_same_inputs_has_made(tmp_path: Path) -> None:
    begin_stage(tmp_path / "sft", "a")
    finish_stage(tmp_path / "sft", "a", seconds=1, outputs={})
    begin_stage(tmp_path / "sft", "b")
    (tmp_path / "sft" / "traces.jsonl").touch()
    with pytest.raises(UserError), attempt(tmp_path / "sft", "b"):
        raise UserError("The teacher does not answer.")
    assert (tmp_path / "sft" / "traces.jsonl").exists()
    assert finished(tmp_path / "sft.old", "a")


class Killed(BaseException):
    """Ends the work as kill -9 would: nothing in shared/runs/manifest.py handles it."""


def killed_at(number: int, work: Callable[[Path], None], folder: Path) -> bool:
    """Do the work up to the n-th line that shared/runs/manifest.py executes; whether it got that far."""
    lines, before = itertools.count(1), sys.gettrace()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != runs.__file__:
            return None
        if event == "line" and next(lines) == number:
            raise Killed
        return trace

    sys.settrace(trace)
    try:
        work(folder)
    except (Killed, UserError) as end:
        return isinstance(end, Killed)
    finally:
        sys.settrace(before)
    return False


def refused(folder: Path) -> None:
    with attempt(folder, "b"):
        raise UserError("The teacher does not answer.")


def redone(folder: Path) -> None:
    set_aside(folder)
    begin_stage(folder, "b")


@pytest.mark.parametrize("work", [refused, redone])
def test_after_a_kill_at_any_line_the_next_command_puts_back_what_was_finished_or_says_where_it_lies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], work: Callable[[Path], None]
) -> None:
    for mark in "za":
        begin_stage(tmp_path / "0" / "sft", mark)
        finish_stage(tmp_path / "0" / "sft", mark, seconds=1, outputs={})
    for number in itertools.count(1):
        folder = shutil.copytree(tmp_path / "0", tmp_path / str(number)) / "sft"
        killed = killed_at(number, work, folder)
        capsys.readouterr()
        other = shutil.copytree(folder.parent, tmp_path / f"{number}, other command") / "sft"
        begin_stage(other, "a")
        said = f"{other}.old is what was finished before" in capsys.readouterr().out
        assert finished(other, "a") or (said and finished(other.with_name("sft.old"), "a"))
        with pytest.raises(UserError):
            refused(folder)
        assert finished(folder, "a")
        if not killed:
            break
    assert number > 20


@pytest.mark.parametrize("text", ["", '{"fingerprint": ', "[1]"])
def test_a_damaged_manifest_or_marker_counts_as_unfinished(tmp_path: Path, text: str) -> None:
    begin_stage(tmp_path, "a")
    (tmp_path / MANIFEST).write_text(text)
    assert finished(tmp_path, "a") is None
    (tmp_path / "started.json").write_text("{")
    (tmp_path / "half").touch()
    begin_stage(tmp_path, "a")
    assert not (tmp_path / "half").exists()


def test_a_fingerprint_follows_values_and_file_contents(tmp_path: Path) -> None:
    file = tmp_path / "a" / "rows.jsonl"
    file.parent.mkdir()
    file.write_text("1")
    first = fingerprint(seed=0, rows=file)
    assert fingerprint(rows=file, seed=0) == first
    assert fingerprint(seed=1, rows=file) != first
    file.write_text("2")
    assert fingerprint(seed=0, rows=file) != first


def test_a_folder_enters_by_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    first = fingerprint(model=tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    assert fingerprint(model=tmp_path) != first


def test_a_missing_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Input .*gone cannot be read"):
        fingerprint(rows=tmp_path / "gone")


def test_writing_replaces_the_file_at_once(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"a": 1})
    write_json(tmp_path / "x.json", {"a": 2, "path": tmp_path})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 2, "path": str(tmp_path)}
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]


def test_a_stage_that_never_ran_has_no_manifest(tmp_path: Path) -> None:
    assert read_manifest(tmp_path / "nothing") is None


def test_stages_have_their_own_folders(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    folders = [run.data, run.sft, run.grpo, run.report, run.evaluation("sft")]
    assert len(set(folders)) == len(folders)
    assert all(tmp_path in folder.parents for folder in folders)


def test_versions_of_installed_packages_are_recorded() -> None:
    assert "sqlglot" in installed_versions()


def test_a_folder_that_no_run_made_is_never_touched(tmp_path: Path) -> None:
    thesis = tmp_path / "data" / "thesis.tex"
    thesis.parent.mkdir()
    thesis.touch()
    with pytest.raises(UserError, match="holds files that no run wrote"):
        begin_stage(thesis.parent, "a")
    assert thesis.exists()
