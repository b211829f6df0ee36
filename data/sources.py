"""Read questions from other people's data sets: Spider, BIRD, JSON, JSONL and CSV.

    Spider   a folder with train_spider.json, train_others.json, dev.json or test.json, and database/<id>/<id>.sqlite
    BIRD     a folder with train.json, dev.json or mini_dev_sqlite.json, and train_databases/, dev_databases/ or
             databases/ beside them; `evidence` is kept
    a file   .jsonl (one object per line), .json (a list) or .csv (with a header)

A row has `question`, the gold under `sql`, `query`, `SQL` or `gold_sql`, the database under `database` or `db_id`, and
optionally `evidence` and `difficulty`. A database is found by name or path in the folder of databases: <name>,
<name>.sqlite, <name>.db, <name>.sqlite3 or <name>/<name>.sqlite.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import UserError

QUESTION_FILES = (
    "train_spider.json",
    "train_others.json",
    "train.json",
    "dev.json",
    "test.json",
    "mini_dev_sqlite.json",
)
_DATABASE_FOLDERS = ("database", "databases", "dev_databases", "train_databases", "test_database")
_SUFFIXES = ("", ".sqlite", ".db", ".sqlite3")
_SQLITE_MAGIC = b"SQLite format 3\0"
_LONGEST_CELL = 16_000_000  # characters of a CSV file
_GOLDS = ("sql", "query", "SQL", "gold_sql")
_DIFFICULTIES = {"simple": "easy", "moderate": "medium", "challenging": "hard"}  # BIRD's words for Spider's


class BadRowError(ValueError):
    """The reason why a row cannot be used. It ends with the fix."""


@dataclass(frozen=True)
class Place:
    """The position of a row: its file, and its line or, in a JSON list, the number of its entry, counted from 1."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}, row {self.line}" if self.file.endswith(".json") else f"{self.file}:{self.line}"


@dataclass(frozen=True)
class SourceRow:
    """One question as its source gives it."""

    place: Place
    database: str  # name or path
    question: str
    gold_sql: str
    evidence: str = ""  # BIRD's hint for the question
    difficulty: str = ""  # easy | medium | hard, or "" where the source does not rate it


@dataclass(frozen=True)
class Source:
    """Question files, and either the folders that hold their databases or the one database of all questions."""

    files: tuple[Path, ...]
    folders: tuple[Path, ...]
    only: Path | None = None

    def database(self, name: str) -> Path:
        """The SQLite file called `name`; a relative name never leads out of the folders.

        Raises BadRowError when there is none.
        """
        if self.only:
            return self.only
        if name and ".." not in Path(name).parts:
            for folder in self.folders:
                for inner in (name, f"{name}/{name}"):
                    for suffix in _SUFFIXES:
                        path = folder / f"{inner}{suffix}"
                        if os.path.isfile(path):  # unlike Path.is_file, False for a name that is too long
                            return path.resolve()
        raise BadRowError(
            f"its database {name[:80]!r} is not in {', '.join(map(str, self.folders))}; put it there, correct the "
            "name, or name another folder with --databases"
        )


def find_source(path: Path, databases: Path | None = None) -> Source:
    """What there is to read at `path`, a folder or a question file.

    `databases` replaces the usual folders beside it; if it is a file, it is the database of every question.

    Raises UserError when there are no questions or no folder of databases.
    """
    if databases and not databases.exists():
        raise UserError(
            f"--databases {databases} does not exist; give a folder of SQLite files, or one file for all questions."
        )
    only = databases.resolve() if databases and databases.is_file() else None
    folder = path if path.is_dir() else path.parent
    beside = [folder / name for name in _DATABASE_FOLDERS if (folder / name).is_dir()] or [folder]
    folders = (databases,) if databases else tuple(beside)
    if path.is_file():
        return Source((path,), folders, only)
    files = tuple(path / name for name in QUESTION_FILES if (path / name).is_file())
    if not files:
        raise UserError(
            f"{path} holds no question file ({', '.join(QUESTION_FILES)}). Databases alone are not enough: give a "
            "JSONL or CSV file with question, sql and database, and the folder as --databases."
        )
    return Source(files, folders, only)


def read_rows(source: Source) -> Iterator[tuple[Place, SourceRow | BadRowError]]:
    """All rows in order; a bad row is given as the reason. Raises UserError for a file that cannot be read at all."""
    for file in source.files:
        for line, value in _entries(file, needs_database=source.only is None):
            place = Place(file.name, line)
            try:
                yield place, _row(place, value, needs_database=source.only is None)
            except BadRowError as reason:
                yield place, reason


def _entries(file: Path, *, needs_database: bool) -> Iterator[tuple[int, Any]]:
    """The entries of a question file with their line or number; an unreadable entry is given as BadRowError."""
    try:
        content = file.read_bytes()
        if content.startswith(_SQLITE_MAGIC):
            raise UserError(
                f"{file} is a SQLite database, not a question file; give the questions as a JSONL or CSV file, and "
                f"the database with --databases {file}."
            )
        text = content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read ({error}); give a UTF-8 file.") from error
    if file.suffix == ".jsonl":
        return _json_lines(text)
    if file.suffix == ".csv":
        return _csv_rows(text, file, needs_database=needs_database)
    try:
        document = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read as JSON ({error}); restore the file.") from error
    if not isinstance(document, list):
        raise UserError(f"{file} must hold a JSON list of questions; restore the file.")
    return enumerate(document, start=1)


def _json_lines(text: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield number, json.loads(line, object_pairs_hook=_object)
            except (ValueError, RecursionError) as error:
                yield number, BadRowError(f"it is not JSON ({error}); correct the line")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | BadRowError:
    """The JSON object of these pairs. A repeated name makes the row a bad one."""
    if twice := _repeated([name for name, _ in pairs]):
        return BadRowError(f"it names {twice!r} twice; keep one of them")
    return dict(pairs)


def _csv_rows(text: str, file: Path, *, needs_database: bool) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(_LONGEST_CELL)
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        names = reader.fieldnames or ()
        complete = "question" in names and set(_GOLDS) & set(names)
        if names and not (complete and (not needs_database or {"database", "db_id"} & set(names))):
            raise UserError(
                f"{file}, line 1: the header must name question, sql and database, separated by commas; it names "
                f"{', '.join(names)[:200]}. Without a database column, give the one database with --databases FILE."
            )
        if twice := _repeated([name for name in names if name]):
            raise UserError(f"{file}, line 1: the header names {twice} twice; keep one of these columns.")
        for row in reader:
            whole = None not in row and None not in row.values()
            uneven = BadRowError("its number of cells differs from the header's; put its texts in quotes")
            yield reader.line_num, row if whole else uneven
    except csv.Error as error:
        raise UserError(
            f"{file}, after line {reader.line_num}: this is not CSV ({error}); quote its texts, each of at most "
            f"{_LONGEST_CELL} characters."
        ) from error


def _repeated(names: Sequence[str]) -> str | None:
    return next((name for name, count in Counter(names).items() if count > 1), None)


def _row(place: Place, value: Any, *, needs_database: bool) -> SourceRow:
    if isinstance(value, BadRowError):
        raise value
    if not isinstance(value, dict):
        raise BadRowError("it is not a JSON object; write one with question, sql and database")
    gold = next((name for name in _GOLDS if value.get(name) and isinstance(value[name], str)), "sql")
    database = "db_id" if value.get("db_id") and not value.get("database") else "database"
    difficulty = _text(value, "difficulty", needed=False).lower()
    difficulty = _DIFFICULTIES.get(difficulty, difficulty)
    return SourceRow(
        place,
        _text(value, database, needed=needs_database),
        _text(value, "question"),
        _text(value, gold),
        _text(value, "evidence", needed=False),
        difficulty if difficulty in _DIFFICULTIES.values() else "",
    )


def _text(row: dict[str, Any], key: str, *, needed: bool = True) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        if not needed:
            return ""
        names = ", ".join(row)[:200].encode(errors="backslashreplace").decode()
        there = "" if key in row or not row else f", only under {names}"
        raise BadRowError(f'it has no text under "{key}"{there}; a row needs question, sql and database')
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRowError(f"its {key} holds half a character (a lone surrogate); write the whole character") from None
    return value.strip()
