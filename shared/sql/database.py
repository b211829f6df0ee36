"""A SQLite database that a model may query: schema, results, and errors it can act on.

The SQL itself runs in separate small processes; shared/sql/sandbox.py says what it may do there and what stops it.
Calls may come from any thread.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from shared.config.schema import SandboxConfig
from shared.errors import UserError
from shared.sql.sandbox import MAX_OFFICIAL_SQL_LENGTH, MAX_SQL_LENGTH, connect
from shared.sql.sandbox_pool import SandboxError, SqlError, ask

_OFFICIAL_BYTES = 256_000_000  # of all cells of one result, by far more than any gold of Spider or BIRD returns

Rows = tuple[tuple[Any, ...], ...]

__all__ = ["Column", "Database", "QueryResult", "SandboxError", "Schema", "SqlError", "Table", "quoted"]


@dataclass(frozen=True)
class Column:
    """One column as declared; `references` is "table.column" of a foreign key, or None."""

    name: str
    type: str
    primary_key: bool
    references: str | None
    not_null: bool


@dataclass(frozen=True)
class Table:
    """A table or view and its columns in declared order."""

    name: str
    columns: tuple[Column, ...]

    def column(self, name: str) -> Column | None:
        """The column of that name; case does not matter."""
        return next((column for column in self.columns if column.name.lower() == name.lower()), None)


@dataclass(frozen=True)
class Schema:
    """All tables in order of creation."""

    tables: tuple[Table, ...]

    def table(self, name: str) -> Table | None:
        """The table of that name; case does not matter."""
        return next((table for table in self.tables if table.name.lower() == name.lower()), None)


@dataclass(frozen=True)
class QueryResult:
    """Rows of one query; `truncated` means that a row or byte cap left some out."""

    columns: tuple[str, ...]
    rows: Rows
    truncated: bool
    seconds: float = field(default=0.0, compare=False)  # spent on the query alone, without the start of a process


class Database:
    """One SQLite file. Raises UserError when it is missing, damaged or empty. Safe to use from several threads."""

    def __init__(self, path: Path | str, limits: SandboxConfig) -> None:
        self.path = Path(path)
        self.limits = limits
        if not self.path.is_file():
            raise UserError(f"Database {self.path} does not exist; check the `database` path of the questions.")
        with self._blaming_the_file():
            self._file = self._file_with_all_changes().resolve()
            self._uri = f"{self._file.as_uri()}?mode=ro&immutable=1"
            if not self.schema.tables:
                raise UserError(f"Database {self.path} holds no table; check that it is the right file.")

    @cached_property
    def schema(self) -> Schema:
        """Tables, columns and keys. Views that SQLite itself cannot resolve are left out."""
        with self._blaming_the_file(), contextlib.closing(connect(self._uri)) as connection:
            names = connection.execute(
                "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') "
                "AND name NOT LIKE 'sqlite!_%' ESCAPE '!' AND name NOT IN "
                "(SELECT name FROM pragma_table_list WHERE type = 'shadow')"  # storage of virtual tables
            ).fetchall()
            tables = [_table(connection, name) for (name,) in names]
        return Schema(tuple(table for table in tables if table.columns))

    def execute(self, sql: str, max_rows: int | None = None, seconds: float | None = None) -> QueryResult:
        """Run one SELECT for at most `seconds` and return at most `max_rows` rows (defaults: those of `limits`).

        Raises SqlError for everything the author of the SQL can change, UserError for a damaged file.
        """
        if len(sql) > MAX_SQL_LENGTH:
            message = f"The SQL is too large, more than {MAX_SQL_LENGTH} characters; write a shorter one."
            raise SqlError(message, "too_large")
        with self._blaming_the_file():
            status = self._file.stat()
        file_state = status.st_ino, status.st_size, status.st_mtime_ns
        limits = self.limits
        wanted = limits.max_rows if max_rows is None else max_rows
        seconds = limits.timeout_seconds if seconds is None else max(0.01, min(seconds, limits.timeout_seconds))
        answer = ask("answer", self._uri, sql, seconds, file_state, wanted, limits.max_result_bytes)
        return self._result(answer)

    def text_in_double_quotes(self, sql: str) -> str | None:
        """The first "name" in `sql` that is no column, which SQLite reads as a text; None if there is none."""
        if '"' not in sql or len(sql) > MAX_SQL_LENGTH:
            return None
        found = ask("unknown_name", self._uri, sql, self.limits.timeout_seconds)
        return found if isinstance(found, str) else None

    def official(self, statements: tuple[str, ...], seconds: float, decoding: str) -> list[Rows]:
        """Rows of statements run one after another as an official evaluator does: writing ones work, on a private copy.

        Together they have `seconds`; SQLite's own limits apply and no row cap. `decoding` says how text that is not
        UTF-8 is read: "strict", "ignore" or "replace". Raises SqlError when one fails or returns too much to be
        compared.
        """
        if any(len(sql) > MAX_OFFICIAL_SQL_LENGTH for sql in statements):
            raise SqlError("SQLite does not read so long a text.", "too_large")
        answers = ask("official", self._uri, statements, seconds, decoding, _OFFICIAL_BYTES)
        results = [self._result(answer) for answer in answers]
        if any(result.truncated for result in results):
            raise SqlError("The result is too large to be compared.", "too_large")
        return [result.rows for result in results]

    def _result(self, answer: tuple[Any, ...]) -> QueryResult:
        kind, *parts = answer
        if kind == "damage":
            raise UserError(f"Database {self.path} cannot be read ({parts[0]}); restore or replace the file.")
        if kind != "rows":
            raise SqlError(parts[0], kind)
        return QueryResult(*parts)

    @contextlib.contextmanager
    def _blaming_the_file(self) -> Iterator[None]:
        """No model can repair a file, so a damaged one ends the run instead of counting as a wrong query."""
        try:
            yield
        except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
            raise UserError(f"Database {self.path} cannot be read ({error}); restore or replace the file.") from error

    def _file_with_all_changes(self) -> Path:
        """The file itself, or a private copy when a log beside it holds changes that an immutable read would miss."""
        logs = [Path(f"{self.path}{ending}") for ending in ("-wal", "-journal")]
        logs = [log for log in logs if log.is_file() and log.stat().st_size]
        if not logs:
            return self.path
        folder = Path(tempfile.mkdtemp(prefix="firstcall-"))
        weakref.finalize(self, shutil.rmtree, folder)
        for file in (self.path, *logs):
            shutil.copyfile(file, folder / file.name)
        copy = folder / self.path.name
        with contextlib.closing(sqlite3.connect(copy)) as connection:
            connection.execute("PRAGMA journal_mode=DELETE").fetchall()
        return copy


def quoted(name: str) -> str:
    """A table or column name as SQL takes it literally, whatever characters it holds."""
    return '"' + name.replace('"', '""') + '"'


def _table(connection: sqlite3.Connection, table: str) -> Table:
    """A table or view as declared, without columns if it is a view of something that is gone."""
    references: dict[str, str] = {}
    columns: list[Column] = []
    with contextlib.suppress(sqlite3.OperationalError):
        for parent, child, target in connection.execute(
            'SELECT "table", "from", "to" FROM pragma_foreign_key_list(?)', (table,)
        ).fetchall():
            primary_key = connection.execute("SELECT name FROM pragma_table_info(?) WHERE pk = 1", (parent,)).fetchone()
            column = target or (primary_key and primary_key[0])
            references.setdefault(child.lower(), f"{parent}.{column}" if column else parent)
        for name, kind, not_null, position in connection.execute(
            'SELECT name, type, "notnull", pk FROM pragma_table_xinfo(?) WHERE hidden <> 1', (table,)
        ):
            columns.append(Column(name, kind, bool(position), references.get(name.lower()), bool(not_null)))
    return Table(table, tuple(columns))
