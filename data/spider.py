"""Reads questions in Spider layout: `dev.json` and/or `train_spider.json`, `database/<db_id>/<db_id>.sqlite`.

A row has db_id, question and query, and may have `evidence`, which is shown with the question, and a `difficulty`.
Both files go into one pool; which questions are for training and which for testing is decided by the splits. The schema
is read from the databases themselves, so `tables.json` is not needed. Every gold is run once: what cannot be run and
compared later is a bad row here, with its file, row number and reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data.databases import Databases
from data.sources import BadRowError, entries, whole_text
from data.sql_form import DIFFICULTIES, rate
from shared.config.schema import SandboxConfig
from shared.errors import UserError
from shared.records import Question

EVIDENCE = "\nEvidence: "  # between a question and what BIRD says beside it
FILES = ("train_spider.json", "dev.json")
_LONGEST_NAME = 248  # bytes: a file name may have 255, and ".sqlite" is added


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used; `row` counts from 1, `reason` ends with what to do about it."""

    file: str
    row: int
    reason: str


@dataclass
class Loaded:
    questions: list[Question] = field(default_factory=list)
    bad_rows: list[BadRow] = field(default_factory=list)
    empty_golds: int = 0  # golds that run but return no row; they are kept


def load(folder: Path, sandbox: SandboxConfig, *, skip_bad_rows: bool) -> Loaded:
    """All usable questions. Raises UserError for the first bad row, unless `skip_bad_rows` collects them instead."""
    rows = list(_rows(folder))
    databases = Databases(partial(_file, folder.resolve() / "database"), sandbox)
    loaded = Loaded()
    for file, number, row in tqdm(rows, desc="running golds", unit="question", delay=2):
        try:
            question, is_empty = _read(row, identity_of(file, number), databases)
        except BadRowError as problem:
            if not skip_bad_rows:
                raise UserError(f"{folder / file}, row {number}: {problem}, or leave such rows out with "
                                "--set data.bad_rows=skip.") from None  # fmt: skip
            loaded.bad_rows.append(BadRow(file, number, str(problem)))
            continue
        loaded.questions.append(question)
        loaded.empty_golds += is_empty
    return loaded


def _rows(folder: Path) -> Iterator[tuple[str, int, Any]]:
    found = [name for name in FILES if (folder / name).is_file()]
    if not found:
        raise UserError(f"Setting data.spider_dir: {folder} holds neither {FILES[0]} nor {FILES[1]}; "
                        "point it at a folder in Spider layout (dev.json, database/<id>/<id>.sqlite), as `python -m data import` writes it.")  # fmt: skip
    for name in found:
        yield from ((name, number, row) for number, row in entries(folder / name))


def _read(row: Any, identity: str, databases: Databases) -> tuple[Question, bool]:
    """The question of one row and whether its gold returns nothing."""
    if isinstance(row, BadRowError):
        raise row
    if not isinstance(row, dict):
        raise BadRowError("it is not a JSON object; write one with db_id, question and query")
    db_id, question, gold = (_text(row, key) for key in ("db_id", "question", "query"))
    result = databases.run_gold(db_id, gold)
    checked = {**row, "db_id": db_id, "question": question, "query": gold}
    return question_record(identity, checked, databases.get(db_id).path), not result.rows


def question_record(identity: str, row: dict[str, Any], database: Path) -> Question:
    """The question of a row whose texts have been checked."""
    text, evidence, rated = row["question"], row.get("evidence"), row.get("difficulty")
    if isinstance(evidence, str) and evidence.strip():
        text += EVIDENCE + evidence.strip()
    difficulty = rated if rated in DIFFICULTIES else rate(row["query"])
    return Question(identity, row["db_id"], text, row["query"], str(database), difficulty, "spider")


def identity_of(file: str, number: int) -> str:
    """Id of the `number`th row of a file, counted from 1."""
    return f"{Path(file).stem}-{number:05d}"


def _text(row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        what = "gold SQL" if key == "query" else key
        raise BadRowError(f'it has no {what}; add a text under "{key}"')
    return whole_text(value, key)


def _file(folder: Path, db_id: str) -> Path:
    if Path(db_id).name != db_id or db_id == ".." or "\0" in db_id or len(db_id.encode()) > _LONGEST_NAME:
        raise BadRowError(f"its db_id {db_id[:80]!r} cannot be the name of a folder; correct it")
    path = folder / db_id / f"{db_id}.sqlite"
    if not path.is_file():
        raise BadRowError(f"its database {path} does not exist; put it there")
    return path
