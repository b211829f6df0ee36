"""Read-only SQLite behind limits: the only place where SQL written by a model runs.

The file is opened read-only and immutable, an authorizer lets through nothing but reading, a deadline stops long
queries, and lengths, rows, bytes and memory are capped. All of it is needed together: `mode=ro` alone still lets ATTACH
create files. Every call opens its own connection (a fraction of a millisecond), so calls may come from any thread and leave no state.

Limits: the deadline is looked at between SQLite's instructions, so a single call of a built-in function always ends
first; the length cap keeps such a call short. The memory cap is SQLite's own and holds for the whole process.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shared.config import SandboxConfig
from shared.errors import UserError

_READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_DENIED_FUNCTIONS = frozenset(
    "load_extension fts3_tokenizer sqlite_log zeroblob randomblob readfile writefile edit".split()
)
_DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN}
_SQLITE_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 1_000_000,  # bytes of one text, blob or row
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 50_000,
    sqlite3.SQLITE_LIMIT_COLUMN: 400,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 200,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 60,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 200_000,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1_000,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
_MEMORY_BYTES = 1 << 30
_INSTRUCTIONS_PER_CHECK = 1_000


class SqlError(Exception):
    """SQL that could not be run; `str(error)` is a message a model can act on.

    `kind` is "error" (SQLite refused it), "denied" (not a read), "timeout" or "too_large".
    """

    def __init__(self, message: str, kind: str = "error") -> None:
        super().__init__(message)
        self.kind = kind


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
        """The column of that name, upper and lower case alike."""
        return next((column for column in self.columns if column.name.lower() == name.lower()), None)


@dataclass(frozen=True)
class Schema:
    """All tables in order of creation."""

    tables: tuple[Table, ...]

    def table(self, name: str) -> Table | None:
        """The table of that name, upper and lower case alike."""
        return next((table for table in self.tables if table.name.lower() == name.lower()), None)


@dataclass(frozen=True)
class QueryResult:
    """Rows of one query; `truncated` says that a row or byte cap left some out."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    truncated: bool


class Database:
    """One SQLite file. Raises UserError when it is missing, damaged or empty. Safe to use from several threads."""

    def __init__(self, path: Path | str, limits: SandboxConfig) -> None:
        self.path = Path(path)
        self.limits = limits
        if not self.path.is_file():
            raise UserError(f"Database {self.path} does not exist; check the `database` path of the questions.")
        self._private: tempfile.TemporaryDirectory[str] | None = None
        with self._damage_is_the_users():
            self._file = self._settled_file()
            if not self.schema.tables:
                raise UserError(f"Database {self.path} holds no table; check that it is the right file.")

    @property
    def name(self) -> str:
        """File name without its ending, e.g. `concert_singer`."""
        return self.path.stem

    @cached_property
    def schema(self) -> Schema:
        """Tables, columns and keys; views that SQLite itself cannot resolve are left out."""
        with self._damage_is_the_users(), contextlib.closing(self._open()) as connection:
            names = connection.execute(
                "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite!_%' ESCAPE '!'"
            ).fetchall()
            tables = [Table(name, _columns(connection, name)) for (name,) in names]
        return Schema(tuple(table for table in tables if table.columns))

    def execute(self, sql: str, max_rows: int | None = None) -> QueryResult:
        """Run one SELECT and return at most `max_rows` rows (default: `limits.max_rows`).

        Raises SqlError for everything the author of the SQL can change, UserError for a damaged file.
        """
        deadline = time.monotonic() + self.limits.timeout_seconds
        with self._damage_is_the_users(), contextlib.closing(self._guarded(deadline)) as connection:
            try:
                cursor = connection.execute(_encodable(sql))
                return self._fetch(cursor, self.limits.max_rows if max_rows is None else max_rows)
            except MemoryError:
                raise SqlError(
                    "The query needs too much memory; select fewer rows or shorter values.", "too_large"
                ) from None
            except sqlite3.Error as error:
                if getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGE:
                    raise
                raise self._explain(error, sql, time.monotonic() >= deadline) from None

    def text_in_double_quotes(self, sql: str) -> str | None:
        """The first "name" in `sql` that is no column, which SQLite therefore reads as a text; None if there is none."""
        if '"' not in sql:
            return None
        deadline = time.monotonic() + self.limits.timeout_seconds
        with contextlib.closing(self._guarded(deadline)) as connection:
            connection.setconfig(sqlite3.SQLITE_DBCONFIG_DQS_DML, False)
            try:
                connection.execute(f"EXPLAIN {sql}")
            except (sqlite3.Error, MemoryError) as error:
                found = re.match(r'no such column: "?(.*?)"?(?: - should this be .*)?$', str(error), re.DOTALL)
                return found[1] if found and f'"{found[1]}"' in sql else None
        return None

    def _open(self) -> sqlite3.Connection:
        uri = f"{self._file.resolve().as_uri()}?mode=ro&immutable=1"
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, cached_statements=0)
        connection.text_factory = lambda value: value.decode("utf-8", "replace")
        return connection

    def _guarded(self, deadline: float) -> sqlite3.Connection:
        """A connection that can only read, until `deadline` (seconds of the monotonic clock)."""
        connection = self._open()
        connection.setconfig(sqlite3.SQLITE_DBCONFIG_DEFENSIVE, True)
        connection.setconfig(sqlite3.SQLITE_DBCONFIG_TRUSTED_SCHEMA, False)
        connection.executescript(
            f"PRAGMA query_only=1; PRAGMA temp_store=MEMORY; PRAGMA hard_heap_limit={_MEMORY_BYTES};"
        )
        for limit, value in _SQLITE_LIMITS.items():
            connection.setlimit(limit, value)
        connection.set_authorizer(_authorizer(deadline))
        connection.set_progress_handler(lambda: time.monotonic() >= deadline, _INSTRUCTIONS_PER_CHECK)
        return connection

    def _fetch(self, cursor: sqlite3.Cursor, max_rows: int) -> QueryResult:
        if cursor.description is None:
            raise SqlError("The SQL holds no query; send one SELECT statement.")
        rows: list[tuple[Any, ...]] = []
        bytes_left = self.limits.max_result_bytes
        truncated = False
        for row in cursor:
            bytes_left -= sum(len(value) if isinstance(value, (str, bytes)) else 8 for value in row)
            if len(rows) >= max_rows or bytes_left < 0:
                truncated = True
                break
            rows.append(row)
        return QueryResult(tuple(column[0] for column in cursor.description), tuple(rows), truncated)

    def _explain(self, error: sqlite3.Error, sql: str, late: bool) -> SqlError:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if late and code in (sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_AUTH):
            seconds = f"{self.limits.timeout_seconds:g}"
            return SqlError(f"The query was stopped after {seconds} s; filter earlier or join on keys.", "timeout")
        if code == sqlite3.SQLITE_AUTH:
            return SqlError(_denial(error, sql), "denied")
        if code == sqlite3.SQLITE_TOOBIG or isinstance(error, sqlite3.DataError):
            return SqlError(f"The query is too large for SQLite's limits ({error}).", "too_large")
        if "one statement at a time" in str(error):
            return SqlError("Send one statement per call, without a second one after the semicolon.")
        if "bindings supplied" in str(error):
            return SqlError("Parameters such as ? or :name have no value here; write the values into the SQL.")
        return SqlError(str(error))

    @contextlib.contextmanager
    def _damage_is_the_users(self) -> Iterator[None]:
        """No model can repair a file, so a damaged one ends the run instead of counting as a wrong query."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise UserError(f"Database {self.path} cannot be read ({error}); restore or replace the file.") from error

    def _settled_file(self) -> Path:
        """The file itself, or a private copy when a log beside it holds changes that an immutable read would miss."""
        logs = [Path(f"{self.path}{ending}") for ending in ("-wal", "-journal")]
        logs = [log for log in logs if log.is_file() and log.stat().st_size]
        if not logs:
            return self.path
        self._private = tempfile.TemporaryDirectory(prefix="firstcall-")
        for file in (self.path, *logs):
            shutil.copyfile(file, Path(self._private.name) / file.name)
        copy = Path(self._private.name) / self.path.name
        with contextlib.closing(sqlite3.connect(copy)) as connection:
            connection.execute("PRAGMA journal_mode=DELETE").fetchall()
        return copy


def _columns(connection: sqlite3.Connection, table: str) -> tuple[Column, ...]:
    keys: dict[str, tuple[str, str | None]] = {}
    with contextlib.suppress(sqlite3.OperationalError):  # a view of something that is gone
        for parent, child, target in connection.execute(
            'SELECT "table", "from", "to" FROM pragma_foreign_key_list(?)', (table,)
        ):
            keys.setdefault(child.lower(), (parent, target or _primary_key(connection, parent)))
        return tuple(
            Column(name, kind, bool(position), _reference(keys.get(name.lower())), bool(not_null))
            for name, kind, not_null, position in connection.execute(
                'SELECT name, type, "notnull", pk FROM pragma_table_xinfo(?) WHERE hidden <> 1', (table,)
            )
        )
    return ()


def _primary_key(connection: sqlite3.Connection, table: str) -> str | None:
    found = connection.execute("SELECT name FROM pragma_table_info(?) WHERE pk = 1", (table,)).fetchone()
    return found[0] if found else None


def _reference(key: tuple[str, str | None] | None) -> str | None:
    if key is None:
        return None
    return f"{key[0]}.{key[1]}" if key[1] else key[0]


def _authorizer(deadline: float) -> Callable[[int, str | None, str | None, str | None, str | None], int]:
    """Allows reading until the deadline, which SQLite's planner would not look at by itself."""

    def decide(action: int, _: str | None, function: str | None, *__: str | None) -> int:
        harmless = action != sqlite3.SQLITE_FUNCTION or (function or "").lower() not in _DENIED_FUNCTIONS
        allowed = action in _READING and harmless and time.monotonic() < deadline
        return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY

    return decide


def _denial(error: sqlite3.Error, sql: str) -> str:
    if "function" in str(error):
        return f"This is not allowed: {error}."
    words = re.sub(r"--[^\n]*|/\*.*?\*/", " ", sql, flags=re.DOTALL).split(maxsplit=1)
    first = words[0].upper() if words else ""
    what = "This statement" if first in ("SELECT", "WITH", "EXPLAIN", "VALUES") else first
    return f"{what} is not allowed, the database is read-only; only SELECT works."


def _encodable(sql: str) -> str:
    if "\0" in sql or any("\ud800" <= character <= "\udfff" for character in sql):
        raise SqlError("The SQL holds a character that SQLite cannot read; write plain text.")
    return sql
