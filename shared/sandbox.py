"""The process in which SQL written by a model runs. Started as a script by shared/sandbox_pool.py; standard library only.

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

Not defended: bugs in SQLite's C code that would let SQL run machine code (there is no system-call filter), a file that
the user opens but does not trust, and what a result may reveal of the database itself.

Official evaluators run everything a model writes. `official` gives their results: reading as above but with SQLite's own
limits, everything else on a private copy in memory that is dropped with the request.

One request after the other comes in on stdin and is answered on stdout; the end of stdin ends the process.
"""

from __future__ import annotations

import contextlib
import functools
import marshal
import re
import resource
import signal
import sqlite3
import sys
import time
from collections.abc import Callable
from typing import IO, Any

ALARM_AFTER_DEADLINE = 0.05  # seconds
MAX_SQL_LENGTH = 50_000  # bytes
OFFICIAL_SQL_LENGTH = 1_000_000  # bytes, SQLite's own default
_MEMORY_BYTES = 192 << 20  # of address space beyond what the idle process has
_OFFICIAL_MEMORY_BYTES = 1 << 30
_KEPT_CONNECTIONS = 24
_KEPT_KIB = 1_000  # of pages in each
_BLOCK_ROWS = 32  # fetched before their bytes are counted
_SHORT_SECONDS = 0.01  # in which no query fills much memory
_INSTRUCTIONS_PER_CHECK = 1_000
_READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_DENIED_FUNCTIONS = frozenset(
    "load_extension fts3_tokenizer sqlite_log zeroblob randomblob readfile writefile edit".split()
)
_PLAIN_PRAGMAS = frozenset(
    "collation_list compile_options encoding foreign_key_check foreign_key_list function_list index_info index_list "
    "index_xinfo integrity_check module_list page_count page_size pragma_list quick_check schema_version table_info "
    "table_list table_xinfo user_version".split()
)
_CONCERNS_FILES = re.compile(r"\s*(ATTACH|VACUUM)\b", re.IGNORECASE)
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


def answer(uri: str, sql: str, seconds: float, mark: FileMark, max_rows: int, max_bytes: int) -> Answer:
    """The result of one query, or why there is none: "damage" for a file that no SQL can read.

    `mark` tells the states of the file apart: a connection is kept for later queries as long as it stays the same.
    """
    result = _caught(sql, seconds, lambda: _fetch(_kept(uri, mark, seconds), sql, max_rows, max_bytes))
    return ("error", "The SQL holds no query; send one SELECT statement.") if result[:2] == ("rows", ()) else result


def unknown_name(uri: str, sql: str, seconds: float) -> str | None:
    """The first name in double quotes that is no column, which SQLite would read as a text; None if there is none."""
    try:
        with contextlib.closing(_guarded(uri)) as connection:
            _set_deadline(connection, seconds)
            connection.setconfig(sqlite3.SQLITE_DBCONFIG_DQS_DML, False)
            connection.execute(f"EXPLAIN {sql}")
    except (sqlite3.Error, UnicodeError, MemoryError) as error:
        found = re.match(r'no such column: "?(.*?)"?(?: - should this be .*)?$', str(error), re.DOTALL)
        return found[1] if found and f'"{found[1]}"' in sql else None
    return None


def official(uri: str, statements: tuple[str, ...], seconds: float, decoding: str, max_bytes: int) -> list[Answer]:
    """Results of statements run one after another on one connection, as an official evaluator would see them.

    `decoding` says how text that is not UTF-8 is read: "strict", "ignore" or "replace". The list ends with the first
    failure. What is more than reading makes all of them run again, on a private copy in memory; ATTACH and VACUUM, which
    concern files, count as done there.
    """
    with contextlib.closing(connect(uri)) as connection:
        _know_json(connection)
        connection.set_authorizer(_authorize_plain_reading)
        answers = _all(connection, statements, seconds, decoding, max_bytes)
    if answers[-1][0] != "denied":
        return answers
    with contextlib.closing(sqlite3.connect(":memory:", cached_statements=0)) as copy:
        try:
            with contextlib.closing(connect(uri)) as connection:
                connection.backup(copy)
        except (MemoryError, sqlite3.Error) as error:
            return [("too_large", f"No private copy to write to can be made ({error}).")]
        copy.execute("PRAGMA temp_store=MEMORY")
        copy.set_authorizer(_authorize_private_copy)
        done = tuple("" if _CONCERNS_FILES.match(sql) else sql for sql in statements)
        return _all(copy, done, seconds, decoding, max_bytes)


def _all(
    connection: sqlite3.Connection, statements: tuple[str, ...], seconds: float, decoding: str, max_bytes: int
) -> list[Answer]:
    connection.text_factory = lambda value: value.decode("utf-8", decoding)
    connection.setlimit(sqlite3.SQLITE_LIMIT_WORKER_THREADS, 0)
    _set_deadline(connection, seconds)
    answers: list[Answer] = []
    for sql in statements:
        query = functools.partial(_fetch, connection, sql, sys.maxsize, max_bytes)
        answers.append(_caught(sql, seconds, query))
        if answers[-1][0] != "rows":
            break
    return answers


_connections: dict[tuple[str, FileMark], sqlite3.Connection] = {}  # the longest unused one first


def _kept(uri: str, mark: FileMark, seconds: float) -> sqlite3.Connection:
    connection = _connections.pop((uri, mark), None) or _guarded(uri)
    _drop_connections(all_but=_KEPT_CONNECTIONS - 1)
    _connections[uri, mark] = connection
    _set_deadline(connection, seconds)
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
    _know_json(connection)
    for limit, value in _SQLITE_LIMITS.items():
        connection.setlimit(limit, value)
    connection.set_authorizer(_authorize)
    return connection


def _know_json(connection: sqlite3.Connection) -> None:
    """Let SQLite set up its JSON tables now: on their first use an authorizer would see that as a change of the schema."""
    with contextlib.suppress(sqlite3.OperationalError):
        connection.execute("SELECT 1 FROM json_each('0'), json_tree('0')").fetchall()


def _set_deadline(connection: sqlite3.Connection, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    connection.set_progress_handler(lambda: time.monotonic() >= deadline, _INSTRUCTIONS_PER_CHECK)


def _authorize(action: int, _: str | None, function: str | None, *__: str | None) -> int:
    harmless = action != sqlite3.SQLITE_FUNCTION or (function or "").lower() not in _DENIED_FUNCTIONS
    return sqlite3.SQLITE_OK if action in _READING and harmless else sqlite3.SQLITE_DENY


def _authorize_plain_reading(action: int, *_: str | None) -> int:
    return sqlite3.SQLITE_OK if action in _READING else sqlite3.SQLITE_DENY


def _authorize_private_copy(action: int, name: str | None, argument: str | None, *_: str | None) -> int:
    """All that stays inside the copy; settings of the process are passed over without a word."""
    if action in (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH):
        return sqlite3.SQLITE_DENY
    if action == sqlite3.SQLITE_PRAGMA and (name or "").lower() not in _PLAIN_PRAGMAS:
        return sqlite3.SQLITE_IGNORE
    return sqlite3.SQLITE_OK


def _caught(sql: str, seconds: float, query: Callable[[], Answer]) -> Answer:
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


def _fetch(connection: sqlite3.Connection, sql: str, max_rows: int, max_bytes: int) -> Answer:
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


def _cap(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _cap_memory(allowed: int) -> None:
    """Let the process map at most `allowed` bytes; a later request may be allowed more."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (allowed if hard == resource.RLIM_INFINITY else min(allowed, hard), hard))


def _mapped_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


_REQUESTS: dict[str, tuple[Callable[..., Any], int]] = {
    "answer": (answer, _MEMORY_BYTES),
    "unknown_name": (unknown_name, _MEMORY_BYTES),
    "official": (official, _OFFICIAL_MEMORY_BYTES),
}


def _serve() -> None:
    idle = _mapped_bytes()
    for kind, value in ((resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 32)):
        _cap(kind, value)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            name, uri, sql, seconds, *rest = receive(sys.stdin.buffer)
            started = time.monotonic()
            work, memory = _REQUESTS[name]
            _cap_memory(idle + memory)
            signal.setitimer(signal.ITIMER_REAL, seconds + ALARM_AFTER_DEADLINE)
            result = work(uri, sql, seconds, *rest)
            signal.setitimer(signal.ITIMER_REAL, 0)
            _reply(result)
            if time.monotonic() > started + _SHORT_SECONDS and _mapped_bytes() > idle + _MEMORY_BYTES // 2:
                return  # a process that stays large would refuse the next query


def _reply(result: Any) -> None:
    try:
        send(sys.stdout.buffer, result)
    except MemoryError:
        failure = "too_large", "The result needs too much memory; select fewer rows or shorter values."
        send(sys.stdout.buffer, [failure] if isinstance(result, list) else failure)


if __name__ == "__main__":
    _serve()
