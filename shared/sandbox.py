"""The process in which SQL written by a model runs. Started as a script by shared/database.py; standard library only.

The file is opened read-only and immutable, an authorizer lets through nothing but reading, a deadline stops long
queries, and lengths, rows, bytes and memory are capped. All of it is needed together: `mode=ro` alone still lets ATTACH
create files. SQLite looks at the deadline only between rows, so an alarm clock ends the whole process shortly after,
whatever C code it is in; the operating system caps its memory and lets it write no file.

One request after the other comes in on stdin and is answered on stdout; the end of stdin ends the process.
"""

from __future__ import annotations

import contextlib
import marshal
import re
import resource
import signal
import sqlite3
import sys
import time
from typing import IO, Any

ALARM_AFTER_DEADLINE = 0.2  # seconds
_MEMORY_BYTES = 1 << 30
_INSTRUCTIONS_PER_CHECK = 1_000
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


def send(stream: IO[bytes], value: Any) -> None:
    """Write one plain value (tuples, texts, numbers, bytes, None) as length and marshalled bytes."""
    data = marshal.dumps(value)
    stream.write(len(data).to_bytes(8) + data)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """Read what `send` wrote; EOFError when the other side is gone."""
    size = stream.read(8)
    data = stream.read(int.from_bytes(size)) if len(size) == 8 else b""
    if not data:
        raise EOFError
    return marshal.loads(data)


def connect(uri: str) -> sqlite3.Connection:
    """A connection that keeps text readable even where it is not valid UTF-8."""
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, cached_statements=0)
    connection.text_factory = lambda value: value.decode("utf-8", "replace")
    return connection


def answer(uri: str, sql: str, seconds: float, max_rows: int, max_bytes: int) -> tuple[Any, ...]:
    """("rows", columns, rows, truncated) or (kind of failure, message), "damage" for a file that no SQL can read."""
    deadline = time.monotonic() + seconds
    try:
        with contextlib.closing(_guarded(uri, deadline)) as connection:
            return _fetch(connection.execute(sql), max_rows, max_bytes)
    except MemoryError:
        return "too_large", "The query needs too much memory; select fewer rows or shorter values."
    except UnicodeDecodeError:  # a column name or an error message quotes bytes of the data
        return (
            "error",
            "The result names text that is not valid UTF-8; select other columns, or give them names with AS.",
        )
    except sqlite3.Error as error:
        return _failure(error, sql, f"{seconds:g}")


def unknown_name(uri: str, sql: str, seconds: float) -> str | None:
    """The first name in double quotes that is no column, which SQLite would read as a text; None if there is none."""
    try:
        with contextlib.closing(_guarded(uri, time.monotonic() + seconds)) as connection:
            connection.setconfig(sqlite3.SQLITE_DBCONFIG_DQS_DML, False)
            connection.execute(f"EXPLAIN {sql}")
    except (sqlite3.Error, UnicodeError, MemoryError) as error:
        found = re.match(r'no such column: "?(.*?)"?(?: - should this be .*)?$', str(error), re.DOTALL)
        return found[1] if found and f'"{found[1]}"' in sql else None
    return None


def _guarded(uri: str, deadline: float) -> sqlite3.Connection:
    """A connection that can only read, until `deadline` (seconds of the monotonic clock)."""
    connection = connect(uri)
    connection.setconfig(sqlite3.SQLITE_DBCONFIG_DEFENSIVE, True)
    connection.setconfig(sqlite3.SQLITE_DBCONFIG_TRUSTED_SCHEMA, False)
    connection.execute("PRAGMA query_only=1")
    connection.execute("PRAGMA temp_store=MEMORY")
    for limit, value in _SQLITE_LIMITS.items():
        connection.setlimit(limit, value)
    connection.set_authorizer(_authorize)
    connection.set_progress_handler(lambda: time.monotonic() >= deadline, _INSTRUCTIONS_PER_CHECK)
    return connection


def _authorize(action: int, _: str | None, function: str | None, *__: str | None) -> int:
    harmless = action != sqlite3.SQLITE_FUNCTION or (function or "").lower() not in _DENIED_FUNCTIONS
    return sqlite3.SQLITE_OK if action in _READING and harmless else sqlite3.SQLITE_DENY


def _fetch(cursor: sqlite3.Cursor, max_rows: int, max_bytes: int) -> tuple[Any, ...]:
    if cursor.description is None:
        return "error", "The SQL holds no query; send one SELECT statement."
    rows: list[tuple[Any, ...]] = []
    truncated = False
    for row in cursor:
        max_bytes -= sum(len(value) if isinstance(value, (str, bytes)) else 8 for value in row)
        if len(rows) >= max_rows or max_bytes < 0:
            truncated = True
            break
        rows.append(row)
    return "rows", tuple(column[0] for column in cursor.description), tuple(rows), truncated


def _failure(error: sqlite3.Error, sql: str, seconds: str) -> tuple[str, str]:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in _DAMAGE:
        return "damage", str(error)
    if code == sqlite3.SQLITE_INTERRUPT:
        return "timeout", timeout_message(seconds)
    if code == sqlite3.SQLITE_AUTH or str(error).startswith("not authorized"):
        return "denied", _denial(error, sql)
    if code == sqlite3.SQLITE_TOOBIG or isinstance(error, sqlite3.DataError):
        return "too_large", f"The query is too large for SQLite's limits ({error})."
    if "one statement at a time" in str(error):
        return "error", "Send one statement per call, without a second one after the semicolon."
    if "bindings supplied" in str(error):
        return "error", "Parameters such as ? or :name have no value here; write the values into the SQL."
    return "error", str(error)


def timeout_message(seconds: str) -> str:
    """What a model is told when its query took longer than `seconds`."""
    return f"The query was stopped after {seconds} s; filter earlier or join on keys."


def _denial(error: sqlite3.Error, sql: str) -> str:
    if "function" in str(error):
        return f"This is not allowed: {error}."
    words = re.sub(r"--[^\n]*|/\*.*?\*/", " ", sql, flags=re.DOTALL).split(maxsplit=1)
    first = words[0].upper() if words else ""
    what = "This statement" if first in ("SELECT", "WITH", "EXPLAIN", "VALUES") else first
    return f"{what} is not allowed, the database is read-only; only SELECT works."


def _cap(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _serve() -> None:
    _cap(resource.RLIMIT_AS, _MEMORY_BYTES)
    _cap(resource.RLIMIT_FSIZE, 0)
    _cap(resource.RLIMIT_CORE, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            name, uri, sql, seconds, *caps = receive(sys.stdin.buffer)
            signal.setitimer(signal.ITIMER_REAL, seconds + ALARM_AFTER_DEADLINE)
            result = answer(uri, sql, seconds, *caps) if name == "answer" else unknown_name(uri, sql, seconds)
            signal.setitimer(signal.ITIMER_REAL, 0)
            send(sys.stdout.buffer, result)


if __name__ == "__main__":
    _serve()
