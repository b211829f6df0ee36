"""A SQLite database that a model may query: schema, results, and errors it can act on.

The SQL itself runs in separate small processes (shared/sandbox.py) that are kept for the next query and end with this
one; a query that cannot be stopped otherwise takes only its own process with it. Calls may come from any thread.
Limit: SQLite's C code is trusted to be free of exploitable bugs; there is no system-call filter.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from shared import sandbox
from shared.errors import UserError
from shared.settings import SandboxConfig


class SqlError(Exception):
    """SQL that could not be run; `str(error)` is a message a model can act on.

    `kind` is "error" (SQLite refused it), "denied" (not a read), "timeout" or "too_large".
    """

    def __init__(self, message: str, kind: str = "error") -> None:
        super().__init__(message)
        self.kind = kind


class SandboxError(RuntimeError):
    """The process that runs the SQL could not start or broke; nobody's query is to blame."""


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
        with self._damage_is_the_users():
            self._uri = f"{self._settled_file().resolve().as_uri()}?mode=ro&immutable=1"
            if not self.schema.tables:
                raise UserError(f"Database {self.path} holds no table; check that it is the right file.")

    @property
    def name(self) -> str:
        """File name without its ending, e.g. `concert_singer`."""
        return self.path.stem

    @cached_property
    def schema(self) -> Schema:
        """Tables, columns and keys; views that SQLite itself cannot resolve are left out."""
        with self._damage_is_the_users(), contextlib.closing(sandbox.connect(self._uri)) as connection:
            names = connection.execute(
                "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite!_%' ESCAPE '!'"
            ).fetchall()
            tables = [Table(name, _columns(connection, name)) for (name,) in names]
        return Schema(tuple(table for table in tables if table.columns))

    def execute(self, sql: str, max_rows: int | None = None) -> QueryResult:
        """Run one SELECT and return at most `max_rows` rows (default: `limits.max_rows`).

        Raises SqlError for everything the author of the SQL can change, UserError for a damaged file.
        """
        if "\0" in sql or any("\ud800" <= character <= "\udfff" for character in sql):
            raise SqlError("The SQL holds a character that SQLite cannot read; write plain text.")
        wanted = self.limits.max_rows if max_rows is None else max_rows
        kind, *answer = self._ask("answer", sql, wanted, self.limits.max_result_bytes)
        if kind == "damage":
            raise UserError(f"Database {self.path} cannot be read ({answer[0]}); restore or replace the file.")
        if kind != "rows":
            raise SqlError(answer[0], kind)
        return QueryResult(*answer)

    def text_in_double_quotes(self, sql: str) -> str | None:
        """The first "name" in `sql` that is no column, which SQLite therefore reads as a text; None if there is none."""
        return self._ask("unknown_name", sql) if '"' in sql else None

    def _ask(self, name: str, sql: str, *caps: int) -> Any:
        seconds = self.limits.timeout_seconds
        while True:
            idle = _take_idle()
            worker = idle or _Worker()
            try:
                result = worker.ask((name, self._uri, sql, seconds, *caps))
            except BrokenPipeError:
                worker.close()
                if idle:  # it ended while it waited: take another one
                    continue
                raise
            _idle.append(worker)
            return result

    @contextlib.contextmanager
    def _damage_is_the_users(self) -> Iterator[None]:
        """No model can repair a file, so a damaged one ends the run instead of counting as a wrong query."""
        try:
            yield
        except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
            raise UserError(f"Database {self.path} cannot be read ({error}); restore or replace the file.") from error

    def _settled_file(self) -> Path:
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


class _Worker:
    """One sandbox process. It ends itself when its stdin closes, so none outlives this process."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-S", sandbox.__file__]
        # Libraries preloaded for vLLM would use up the sandbox's memory before it starts.
        variables = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        self._process = subprocess.Popen(
            command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )

    def ask(self, request: tuple[Any, ...]) -> Any:
        """Send one request and wait for its answer; raises SqlError when the query ended the process."""
        sandbox.send(_open(self._process.stdin), request)
        try:
            return sandbox.receive(_open(self._process.stdout))
        except EOFError:
            code = self.close()
        if code == -signal.SIGALRM:
            raise SqlError(sandbox.timeout_message(f"{request[3]:g}"), "timeout")
        if code < 0:
            raise SqlError("The query used up the memory of the sandbox; select less at once.", "too_large")
        raise SandboxError(f"the SQL sandbox ended with exit code {code}; its message stands above")

    def close(self) -> int:
        """End the process and return its exit code."""
        with contextlib.suppress(BrokenPipeError):
            _open(self._process.stdin).close()
        _open(self._process.stdout).close()
        return self._process.wait()


def _open(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


_idle: list[_Worker] = []  # append and pop are atomic


def _take_idle() -> _Worker | None:
    try:
        return _idle.pop()
    except IndexError:
        return None


def _close_idle() -> None:
    while worker := _take_idle():
        worker.close()


atexit.register(_close_idle)
os.register_at_fork(after_in_child=_idle.clear)  # the pipes belong to the parent


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
