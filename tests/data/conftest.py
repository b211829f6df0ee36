"""Real fixtures: the demo prepared once, and small folders in Spider layout written by hand."""

import fcntl
import json
import signal
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from data.__main__ import main
from data.stage import prepare
from shared.cli.command_line import run_main
from shared.config.load import load_config
from shared.config.schema import Config
from shared.records import Question, read_questions

ROOT = Path(__file__).resolve().parents[2]


def settings(*overrides: str) -> Config:
    return load_config(ROOT / "pipeline.yaml", "cpu", overrides)


@dataclass(frozen=True)
class Prepared:
    folder: Path
    counts: dict[str, Any]
    splits: dict[str, list[Question]]

    @property
    def questions(self) -> list[Question]:
        return [question for split in self.splits.values() for question in split]


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """The demo data with the shipped settings, without the perturbed copies; made once for all processes of a run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / "demo"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        file = folder / "counts.json"
        counts = json.loads(file.read_text()) if file.exists() else prepare(settings("data.copies=0"), folder)
        file.write_text(json.dumps(counts))
    return Prepared(
        folder, counts, {name: list(read_questions(folder / f"{name}.jsonl")) for name in ("train", "val", "test")}
    )


Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `python -m data ARGUMENTS` in this process, because the start of one takes longer than most commands."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr("sys.argv", ["data", *map(str, arguments)])
        monkeypatch.chdir(ROOT)
        handler, status = signal.getsignal(signal.SIGTERM), 0
        try:
            run_main(main)
        except SystemExit as ending:
            status = int(ending.code or 0)
        finally:
            signal.signal(signal.SIGTERM, handler)
        output = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, status, output.out, output.err)

    return run


SpiderWriter = Callable[..., Path]


@pytest.fixture
def spider_folder(tmp_path: Path) -> SpiderWriter:
    """Writes dev.json with the given rows and one database `pets` of two rows."""

    def write(rows: Any, file: str = "dev.json") -> Path:
        database = tmp_path / "spider" / "database" / "pets"
        database.mkdir(parents=True, exist_ok=True)
        (database / "pets.sqlite").unlink(missing_ok=True)
        with closing(sqlite3.connect(database / "pets.sqlite")) as connection, connection:
            connection.execute("CREATE TABLE pets (pet_id INTEGER PRIMARY KEY, name TEXT, age INTEGER)")
            connection.executemany("INSERT INTO pets VALUES (?, ?, ?)", [(1, "Rex", 3), (2, "Mia", 9)])
        (tmp_path / "spider" / file).write_text(json.dumps(rows), encoding="utf-8")
        return tmp_path / "spider"

    return write
