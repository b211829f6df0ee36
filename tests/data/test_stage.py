"""`python -m data`: runs once, again when something changed, and never leaves half of it as finished."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from data.stage import plan, run
from shared.errors import UserError
from shared.runs.manifest import MANIFEST, RunDirectory, read_manifest
from tests.data.conftest import ROOT, Command, SpiderWriter, settings

SMALL = ("data.questions_per_database=6", "data.copies=0")


@pytest.fixture
def pets(spider_folder: SpiderWriter) -> str:
    """The setting for 50 questions on one database."""
    rows = [{"db_id": "pets", "question": f"Above {i}?", "query": f"SELECT age > {i} FROM pets"} for i in range(50)]
    return f"data.sources={spider_folder(rows)}"


def digest(folder: Path) -> dict[str, str]:
    """Content of everything the stage made for others."""
    files = [*folder.glob("*.jsonl"), *folder.glob("databases/*"), *folder.glob("copies/*/*")]
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_the_same_settings_give_the_same_files_byte_for_byte_also_after_a_loss(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    config = settings(*SMALL, "data.copies=1")
    folder = run(config, directory)
    first = digest(folder)
    (folder / MANIFEST).unlink()
    (folder / "test.jsonl").write_text("half a fi")
    run(config, directory)
    assert digest(folder) == first
    (folder / "databases" / "insurance.sqlite").unlink()
    run(config, directory)
    assert digest(folder) == first
    assert {"train.jsonl", "val.jsonl", "test.jsonl", "databases/insurance.sqlite"} <= set(first)
    assert any(name.startswith("copies/") for name in first)


def test_a_finished_stage_is_skipped_until_a_setting_changes(
    pets: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory(tmp_path / "run")
    run(settings(pets), directory)
    before = (directory.data / MANIFEST).stat().st_mtime_ns
    capsys.readouterr()
    run(settings(pets), directory)
    assert "already prepared" in capsys.readouterr().out
    assert (directory.data / MANIFEST).stat().st_mtime_ns == before
    run(settings(pets, "seed=1"), directory)
    assert (directory.data / MANIFEST).stat().st_mtime_ns != before


@pytest.mark.parametrize(
    ("rows", "says"),
    [(None, r"data\.sources: there is no"), ("{}\n", r"data\.sources: no question can be read .*:1\) because")],
)
def test_a_wrong_source_to_avoid_leaves_what_was_prepared(
    pets: str, tmp_path: Path, rows: str | None, says: str
) -> None:
    directory, file = RunDirectory(tmp_path / "run"), tmp_path / "other.jsonl"
    run(settings(pets), directory)
    before = read_manifest(directory.data)
    if rows:
        file.write_text(rows)
    with pytest.raises(UserError, match=says):
        run(settings(f"data.sources=[{pets.partition('=')[2]}, {{path: {file}, use: avoid}}]"), directory)
    assert read_manifest(directory.data) == before


def test_a_changed_spider_file_prepares_again(spider_folder: SpiderWriter, tmp_path: Path) -> None:
    rows = [{"db_id": "pets", "question": f"Above {i}?", "query": f"SELECT age > {i} FROM pets"} for i in range(50)]
    config = settings(f"data.sources={spider_folder(rows)}", "data.unseen_databases=0")
    directory = RunDirectory(tmp_path / "run")
    run(config, directory)
    spider_folder(rows[:40])
    run(config, directory)
    manifest = read_manifest(directory.data)
    assert manifest is not None
    assert sum(manifest["counts"]["questions"].values()) == 40


def test_a_failed_stage_has_no_manifest(spider_folder: SpiderWriter, tmp_path: Path) -> None:
    config = settings(f"data.sources={spider_folder([{}])}")
    with pytest.raises(UserError):
        run(config, RunDirectory(tmp_path / "run"))
    assert read_manifest(tmp_path / "run" / "data") is None


def test_the_plan_names_source_and_files(tmp_path: Path) -> None:
    lines = plan(settings(), RunDirectory(tmp_path / "run"))
    assert lines[0] == "data: to be prepared"
    assert any("demo databases, 110 questions each" in line for line in lines)
    assert any(line.endswith("test.jsonl") for line in lines)


def test_the_command_prints_a_table_and_a_dry_run_changes_nothing(command: Command, pets: str, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    options = ["--profile", "cpu", "--set", f"runs_dir={runs}", "--set", pets]
    dry = command(*options, "--dry-run")
    assert dry.returncode == 0
    assert "to be prepared" in dry.stdout
    assert not runs.exists()
    done = subprocess.run([sys.executable, "-m", "data", *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert "0 of 1 databases held out for tests" in done.stdout
    assert "on seen databases; unseen: none" in done.stdout
    assert (runs / "main" / "data" / MANIFEST).exists()


def test_a_missing_spider_folder_ends_in_one_sentence(command: Command, tmp_path: Path) -> None:
    result = command("--profile", "cpu", "--set", f"runs_dir={tmp_path}", "--set", "data.sources=no/such/folder")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "data.sources: there is no no/such/folder" in result.stderr
