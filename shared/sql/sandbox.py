"""What SQL written by a model may do, and what stops it; standard library only.

It runs in processes of its own (shared/sql/sandbox_worker.py), which shared/sql/sandbox_pool.py keeps.

Threat model. The attacker writes SQL: a model under reinforcement learning that tries whatever pays, or a poisoned
question. It must not change the user's file or create another one, read anything but that database, load code, hold up
the run, eat the machine's memory, or leave something behind that the next query sees. Against each of these stands:

    writing            file opened `mode=ro` and `immutable` (no lock, no journal beside it), query_only, defensive mode,
                       an authorizer that lets through nothing but reading; the operating system allows no byte in a file
    other files        no ATTACH (it alone would create files despite `mode=ro`), no VACUUM INTO, no PRAGMA, no readfile;
                       few file handles
    code               no load_extension, no fts3_tokenizer; functions in views of the file itself are not trusted
    time               a deadline checked between SQLite's instructions; an alarm clock ends the process shortly after it,
                       whatever C code it is in; the parent ends a process that does not even die of that
    memory             lengths, columns, depth, rows and bytes are capped, and the address space of the process is
    leftovers          temporary tables cannot be made, several statements are refused, a connection that failed on
                       memory is dropped, temporary data stays in memory

Not defended: bugs in SQLite's C code that would let SQL run machine code, a file that the user opens but does not trust, and
what a result may reveal of the database itself. Against the first a system-call filter would help; there is none, because
Python's standard library cannot set one and the bindings of libseccomp on PyPI are no longer kept. A container does.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
import time
from collections.abc import Callable
from typing import Any

MAX_SQL_LENGTH = 50_000  # bytes
_KEPT_CONNECTIONS = 24
_KEPT_KIB = 1_000  # of pages in each
_BLOCK_ROWS = 32  # fetched before their bytes are counted
_INSTRUCTIONS_PER_CHECK = 1_000
READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_DENIED_FUNCTIONS = frozenset(
    "load_extension fts3_tokenizer sqlite_log zeroblob randomblob readfile writefile edit".split()
)
_DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN}
_SQLITE_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 1_000_000,  # bytes of one text, blob or row
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: MAX_SQL_LENGTH,
    sqlite3.SQLITE_LIMIT_COLUMN: 400,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 200,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 60,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 200_000,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1_000,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}

Answer = tuple[Any, ...]  # ("rows", columns, rows, truncated), or a kind of failure and its message
FileMark = tuple[int, ...]


def connect(uri: str) -> sqlite3.Connection:
    """A connection that keeps text readable even where it is not valid UTF-8."""
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, cached_statements=0)
    connection.text_factory = lambda value: value.decode("utf-8", "replace")
    return connection


def answer(uri: str, sql: str, seconds: float, mark: FileMark, max_rows: int, max_bytes: int) -> Answer:
    """The result of one query, or why there is none: "damage" for a file that no SQL can read.

    `mark` tells the states of the file apart: a connection is kept for later queries as long as it stays the same.
    """
    result = caught(sql, seconds, lambda: fetch(_kept(uri, mark, seconds), sql, max_rows, max_bytes))
    return ("error", "The SQL holds no query; send one SELECT statement.") if result[:2] == ("rows", ()) else result


def unknown_name(uri: str, sql: str, seconds: float) -> str | None:
    """The first name in double quotes that is no column, which SQLite would read as a text; None if there is none."""
    try:
        with contextlib.closing(_guarded(uri)) as connection:
            set_deadline(connection, seconds)
            connection.setconfig(sqlite3.SQLITE_DBCONFIG_DQS_DML, False)
            connection.execute(f"EXPLAIN {sql}")
    except (sqlite3.Error, UnicodeError, MemoryError) as error:
        found = re.match(r'no such column: "?(.*?)"?(?: - should this be .*)?$', str(error), re.DOTALL)
        return found[1] if found and f'"{found[1]}"' in sql else None
    return None


_connections: dict[tuple[str, FileMark], sqlite3.Connection] = {}  # the longest unused one first


def _kept(uri: str, mark: FileMark, seconds: float) -> sqlite3.Connection:
    connection = _connections.pop((uri, mark), None) or _guarded(uri)
    _drop_connections(all_but=_KEPT_CONNECTIONS - 1)
    _connections[uri, mark] = connection
    set_deadline(connection, seconds)
    return connection


def _drop_connections(all_but: int) -> None:
    while len(_connections) > all_but:
        _connections.pop(next(iter(_connections))).close()


def _guarded(uri: str) -> sqlite3.Connection:
    """A connection that can only read."""
    connection = connect(uri)
    connection.setconfig(sqlite3.SQLITE_DBCONFIG_DEFENSIVE, True)
    connection.setconfig(sqlite3.SQLITE_DBCONFIG_TRUSTED_SCHEMA, False)
    connection.execute("PRAGMA query_only=1")
    connection.execute("PRAGMA temp_store=MEMORY")
    connection.execute(f"PRAGMA cache_size=-{_KEPT_KIB}")
    know_json(connection)
    for limit, value in _SQLITE_LIMITS.items():
        connection.setlimit(limit, value)
    connection.set_authorizer(_authorize)
    return connection


def know_json(connection: sqlite3.Connection) -> None:
    """Let SQLite set up its JSON tables now: on their first use an authorizer would see that as a change of the schema."""
    with contextlib.suppress(sqlite3.OperationalError):
        connection.execute("SELECT 1 FROM json_each('0'), json_tree('0')").fetchall()


def set_deadline(connection: sqlite3.Connection, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    connection.set_progress_handler(lambda: time.monotonic() >= deadline, _INSTRUCTIONS_PER_CHECK)


def _authorize(action: int, _: str | None, function: str | None, *__: str | None) -> int:
    harmless = action != sqlite3.SQLITE_FUNCTION or (function or "").lower() not in _DENIED_FUNCTIONS
    return sqlite3.SQLITE_OK if action in READING and harmless else sqlite3.SQLITE_DENY


def caught(sql: str, seconds: float, query: Callable[[], Answer]) -> Answer:
    """The answer of `query`, its failure turned into a kind and a message."""
    try:
        return query()
    except MemoryError:
        _drop_connections(all_but=0)
        return "too_large", "The query needs too much memory; select fewer rows or shorter values."
    except UnicodeError:  # a column name or an error message quotes bytes of the data
        return (
            "error",
            "The result names text that is not valid UTF-8; select other columns, or give them names with AS.",
        )
    except (sqlite3.Error, sqlite3.Warning) as error:
        return _failure(error, sql, f"{seconds:g}")


def fetch(connection: sqlite3.Connection, sql: str, max_rows: int, max_bytes: int) -> Answer:
    """At most `max_rows` rows, whose cells have at most `max_bytes` together (a number counts 8)."""
    with contextlib.closing(connection.execute(sql)) as cursor:
        if cursor.description is None:
            return "rows", (), (), False
        rows: list[tuple[Any, ...]] = []
        while block := cursor.fetchmany(min(_BLOCK_ROWS, max_rows + 1 - len(rows))):
            for row in block:
                for value in row:
                    max_bytes -= len(value) if isinstance(value, (str, bytes)) else 8
                if len(rows) >= max_rows or max_bytes < 0:
                    return "rows", _names(cursor), tuple(rows), True
                rows.append(row)
        return "rows", _names(cursor), tuple(rows), False


def _names(cursor: sqlite3.Cursor) -> tuple[str, ...]:
    return tuple(column[0] for column in cursor.description)


def _failure(error: Exception, sql: str, seconds: str) -> tuple[str, str]:
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


def _denial(error: Exception, sql: str) -> str:
    if "function" in str(error):
        return f"This is not allowed: {error}."
    words = re.sub(r"--[^\n]*|/\*.*?\*/", " ", sql, flags=re.DOTALL).split(maxsplit=1)
    first = words[0].upper() if words else ""
    what = "This statement" if first in ("SELECT", "WITH", "EXPLAIN", "VALUES") else first
    return f"{what} is not allowed, the database is read-only; only SELECT works."
