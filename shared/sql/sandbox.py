"""What SQL written by a model may do, and what stops it. Standard library only.

The SQL runs in processes of its own, which shared/sql/sandbox_pool.py starts and reuses; `serve` is what they do.

Threat model. The attacker writes SQL: a model under reinforcement learning that tries whatever pays, or a poisoned
question. It must not change the user's file or create another one, read anything but that database, load code, hold up
the run, exhaust the machine's memory, or leave something behind that the next query sees. Each has its defence:

    writing            the file is opened `mode=ro` and `immutable` (no lock, no journal beside it), query_only,
                       defensive mode, an authorizer that permits reading alone; the operating system lets the process
                       write no file
    other files        no ATTACH (it alone would create files despite `mode=ro`), no VACUUM INTO, no PRAGMA; temporary
                       data stays in memory; few file handles
    code               one allow-list of functions, without load_extension and fts3_tokenizer; functions in views of the
                       file itself are not trusted
    time               a deadline checked between SQLite's instructions; an alarm ends the process shortly after it,
                       whatever C code is running; the parent kills a process that survives even that
    memory             lengths, columns, depth, and all that comes back (rows, bytes, names, error texts) are capped;
                       so is the address space of the process
    leftovers          temporary tables and several statements are refused; a connection that ran out of memory is
                       closed

The official evaluators run everything that a model writes, so `official` lets writing statements work on a private copy
in memory. All other defences hold there too.

Not defended: bugs in SQLite's C code that let SQL run machine code, a file that the user opens but does not trust, and
what a result reveals of the database itself. A system-call filter would help against the first, but Python's standard
library cannot set one, and the bindings of libseccomp on PyPI are no longer maintained. A container does the same.
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
from collections.abc import Callable
from typing import IO, Any

MAX_SQL_LENGTH = 50_000  # characters
MAX_OFFICIAL_SQL_LENGTH = 1_000_000  # SQLite's own default
_MAX_NAMES_LENGTH = 50_000  # characters of all column names of a result
_MAX_MESSAGE_LENGTH = 1_000  # characters of an error text
_KEPT_READERS = 24
_BLOCK_ROWS = 32  # fetched before their bytes are counted
_INSTRUCTIONS = 1_000  # of SQLite's virtual machine, between two looks at the clock
_READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}
_FUNCTIONS = frozenset(
    """
    -> ->> abs acos acosh asin asinh atan atan2 atanh avg bm25 ceil ceiling changes char coalesce concat concat_ws cos
    cosh count cume_dist current_date current_time current_timestamp date datetime degrees dense_rank exp first_value
    floor format glob group_concat hex highlight if ifnull iif instr json json_array json_array_insert
    json_array_length json_error_position json_extract json_group_array json_group_object json_insert json_object
    json_patch json_pretty json_quote json_remove json_replace json_set json_type json_valid jsonb jsonb_array
    jsonb_array_insert jsonb_extract jsonb_group_array jsonb_group_object jsonb_insert jsonb_object jsonb_patch
    jsonb_remove jsonb_replace jsonb_set julianday lag last_insert_rowid last_value lead length like likelihood likely
    ln log log10 log2 lower ltrim match matchinfo max median min mod nth_value ntile nullif octet_length offsets
    percent_rank percentile percentile_cont percentile_disc pi pow power printf quote radians random randomblob rank
    regexp replace round row_number rtrim sign sin sinh snippet soundex sqlite_source_id sqlite_version sqrt strftime
    string_agg substr substring subtype sum tan tanh time timediff total total_changes trim trunc typeof unhex unicode
    unistr unistr_quote unixepoch unlikely upper zeroblob
    """.split()
)
_DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN}
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 64_000_000,  # bytes of one text, blob or row; the database may hold long ones itself
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: MAX_SQL_LENGTH,
    sqlite3.SQLITE_LIMIT_COLUMN: 400,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 200,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 60,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 200_000,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1_000,
}
_ALARM_AFTER_DEADLINE = 0.05  # seconds
_MEMORY_BYTES = 192 << 20  # of address space beyond what the idle process has
_OFFICIAL_MEMORY_BYTES = 1 << 30
_SHORT_SECONDS = 0.01  # in which no query fills much memory
_HEAP_LIMITS = ("hard_heap_limit", "soft_heap_limit")  # PRAGMAs that change the whole process and answer with a value
_QUIET_SETTINGS = ("data_store_directory", "temp_store", "temp_store_directory", "writable_schema")  # answer nothing
_CONCERNS_FILES = re.compile(r"\s*(ATTACH|VACUUM)\b", re.IGNORECASE)

TIMEOUT = "The query was stopped after {:g} s; filter earlier or join on keys."

Answer = tuple[Any, ...]  # ("rows", columns, rows, truncated, seconds), or a kind of failure and its message


def connect(address: str, decoding: str = "replace") -> sqlite3.Connection:
    """A connection with the settings that all connections share; `decoding` says how text that is not UTF-8 is read."""
    connection = sqlite3.connect(address, uri=True, isolation_level=None, cached_statements=0)
    connection.text_factory = lambda value: value.decode("utf-8", decoding)
    connection.setconfig(sqlite3.SQLITE_DBCONFIG_DEFENSIVE, True)
    connection.setconfig(sqlite3.SQLITE_DBCONFIG_TRUSTED_SCHEMA, False)
    connection.setlimit(sqlite3.SQLITE_LIMIT_WORKER_THREADS, 0)
    connection.execute("PRAGMA temp_store=MEMORY")
    with contextlib.suppress(sqlite3.OperationalError):
        # Sets up virtual tables (full text search, R-Trees, JSON): later an authorizer would see a schema change.
        connection.execute("SELECT count(*) FROM pragma_table_list").fetchall()
        connection.execute("SELECT 1 FROM json_each('0'), json_tree('0')").fetchall()
    return connection


def answer(uri: str, sql: str, seconds: float, file_state: tuple[int, ...], max_rows: int, max_bytes: int) -> Answer:
    """The result of one query, or why there is none: "damage" for a file that no SQL can read.

    The connection serves later queries too, as long as `file_state`, which identifies a state of the file, is the same.
    """
    try:
        connection = _readers.pop((uri, file_state), None) or _open_reader(uri)
    except sqlite3.Error as error:
        return _failure(error, sql, seconds)
    while len(_readers) >= _KEPT_READERS:
        _readers.pop(next(iter(_readers))).close()
    _readers[uri, file_state] = connection
    (result,) = _run(connection, (sql,), seconds, max_rows, max_bytes)
    return ("error", "The SQL holds no query; send one SELECT statement.") if result[:2] == ("rows", ()) else result


def unknown_name(uri: str, sql: str, seconds: float) -> str | None:
    """The first name in double quotes that is no column, which SQLite would read as a text; None if there is none."""
    try:
        with contextlib.closing(_open_reader(uri)) as connection:
            connection.setconfig(sqlite3.SQLITE_DBCONFIG_DQS_DML, False)
            connection.execute(f"EXPLAIN {sql}")
    except (sqlite3.Error, UnicodeError, MemoryError) as error:
        found = re.match(r'no such column: "?(.*?)"?(?: - should this be .*)?$', str(error), re.DOTALL)
        return found[1] if found and f'"{found[1]}"' in sql else None
    return None


def official(uri: str, statements: tuple[str, ...], seconds: float, decoding: str, max_bytes: int) -> list[Answer]:
    """Results of statements run one after another on one connection, as an official evaluator would see them.

    Together they have `seconds`. The list ends with the first failure. Anything beyond reading makes all of them run
    again on a private copy in memory; ATTACH and VACUUM, which concern files, count as done there.
    """
    with contextlib.closing(connect(uri, decoding)) as connection:
        connection.set_authorizer(_authorize_reading)
        answers = _run(connection, statements, seconds, sys.maxsize, max_bytes)
    if answers[-1][0] != "denied":
        return answers
    with contextlib.closing(connect(":memory:", decoding)) as copy:
        try:
            with contextlib.closing(connect(uri)) as connection:
                connection.backup(copy)
        except (MemoryError, sqlite3.Error) as error:
            return [("too_large", f"No private copy to write to can be made ({error}).")]
        copy.isolation_level = "DEFERRED"  # Python's default, with which the evaluators run
        copy.set_authorizer(_authorize_private_copy)
        done = tuple("" if _CONCERNS_FILES.match(sql) else sql for sql in statements)
        return _run(copy, done, seconds, sys.maxsize, max_bytes)


_readers: dict[tuple[str, tuple[int, ...]], sqlite3.Connection] = {}  # the least recently used first


def _open_reader(uri: str) -> sqlite3.Connection:
    """A connection that can only read."""
    connection = connect(uri)
    connection.execute("PRAGMA query_only=1")
    connection.execute("PRAGMA cache_size=-1000")  # KiB of pages
    for limit, value in _LIMITS.items():
        connection.setlimit(limit, value)
    connection.set_authorizer(_authorize_reading)
    return connection


def _authorize_reading(action: int, name: str | None, value: str | None, *_: str | None) -> int:
    if action == sqlite3.SQLITE_FUNCTION:
        allowed = (value or "").lower() in _FUNCTIONS
    else:  # FTS5 looks at the data version before it reads
        allowed = action in _READING or (action == sqlite3.SQLITE_PRAGMA and (name, value) == ("data_version", None))
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def _authorize_private_copy(action: int, name: str | None, value: str | None, *_: str | None) -> int:
    """Permit all that stays inside the copy. Settings that would reach beyond it are refused or ignored."""
    pragma = (name or "").lower() if action == sqlite3.SQLITE_PRAGMA and value is not None else ""
    unknown_function = action == sqlite3.SQLITE_FUNCTION and (value or "").lower() not in _FUNCTIONS
    if action in (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH) or pragma in _HEAP_LIMITS or unknown_function:
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_IGNORE if pragma in _QUIET_SETTINGS else sqlite3.SQLITE_OK


def _run(
    connection: sqlite3.Connection, statements: tuple[str, ...], seconds: float, max_rows: int, max_bytes: int
) -> list[Answer]:
    """Run statements until one fails. Of each at most `max_rows` rows, whose cells have at most `max_bytes` together.

    A number counts 8 bytes.
    """
    started = time.monotonic()
    connection.set_progress_handler(lambda: time.monotonic() >= started + seconds, _INSTRUCTIONS)
    answers: list[Answer] = []
    for sql in statements:
        if "\0" in sql or sql.encode("utf-8", "ignore").decode() != sql:  # half a character is left out of the bytes
            return [*answers, ("error", "The SQL holds a character that SQLite cannot read; write plain text.")]
        rows: list[tuple[Any, ...]] = []
        bytes_left, truncated = max_bytes, False
        try:
            with contextlib.closing(connection.execute(sql)) as cursor:
                columns = tuple(column[0] for column in cursor.description or ())
                if sum(map(len, columns)) > _MAX_NAMES_LENGTH:
                    message = "The names of the result's columns are too long; give short ones with AS."
                    return [*answers, ("too_large", message)]
                while not truncated and (block := cursor.fetchmany(min(_BLOCK_ROWS, max_rows + 1 - len(rows)))):
                    for row in block:
                        bytes_left -= sum(len(value) if isinstance(value, (str, bytes)) else 8 for value in row)
                        if truncated := len(rows) >= max_rows or bytes_left < 0:
                            break
                        rows.append(row)
        except (MemoryError, UnicodeError, sqlite3.Error, sqlite3.Warning) as error:
            return [*answers, _failure(error, sql, seconds)]
        answers.append(("rows", columns, tuple(rows), truncated, time.monotonic() - started))
    return answers


def _failure(error: Exception, sql: str, seconds: float) -> Answer:
    """Kind and message of a failure, the message such that the author of the SQL can act on it."""
    code, text = getattr(error, "sqlite_errorcode", 0) & 0xFF, str(error)[:_MAX_MESSAGE_LENGTH]
    if isinstance(error, MemoryError):
        while _readers:
            _readers.popitem()[1].close()
        return "too_large", "The query needs too much memory; select fewer rows or shorter values."
    if isinstance(error, UnicodeError):  # a column name or an error message quotes bytes of the data
        hint = "select other columns, or give them names with AS"
        return "error", f"The result names text that is not valid UTF-8; {hint}."
    if code in _DAMAGE:
        return "damage", text
    if code == sqlite3.SQLITE_INTERRUPT:
        return "timeout", TIMEOUT.format(seconds)
    if "not authorized to use function" in text:
        return "denied", f"This is not allowed: {text}."
    if code == sqlite3.SQLITE_AUTH or text.startswith("not authorized"):
        words = re.sub(r"--[^\n]*|/\*.*?\*/", " ", sql, flags=re.DOTALL).split(maxsplit=1)
        first = words[0][:40].upper() if words else ""
        what = "This statement" if first in ("SELECT", "WITH", "EXPLAIN", "VALUES") else first
        return "denied", f"{what} is not allowed, the database is read-only; only SELECT works."
    if code == sqlite3.SQLITE_TOOBIG or isinstance(error, sqlite3.DataError):
        return "too_large", f"The query is too large for SQLite's limits ({text})."
    if "one statement at a time" in text:
        return "error", "Send one statement per call, without a second one after the semicolon."
    if "bindings supplied" in text:
        return "error", "Parameters such as ? or :name have no value here; write the values into the SQL."
    return "error", text


def send(stream: IO[bytes], value: Any) -> None:
    """Write one plain value (tuples, texts, numbers, bytes, None) as its length and marshalled bytes."""
    data = marshal.dumps(value)
    stream.write(len(data).to_bytes(8) + data)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """Read what `send` wrote. Raises EOFError when the other side is gone, also in the middle of a value."""
    size = stream.read(8)
    data = stream.read(int.from_bytes(size))
    if not data or len(data) < int.from_bytes(size):
        raise EOFError
    return marshal.loads(data)


def serve() -> None:
    """Say that this process is ready, then answer requests from stdin on stdout until stdin ends.

    Each answer comes with whether the process can take another request. The operating system limits its memory, its
    files and, by an alarm, the time of a request.
    """
    requests: dict[str, tuple[Callable[..., Any], int]] = {
        "answer": (answer, _MEMORY_BYTES),
        "unknown_name": (unknown_name, _MEMORY_BYTES),
        "official": (official, _OFFICIAL_MEMORY_BYTES),
    }
    idle = _mapped_bytes()
    for kind, value in ((resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 32)):
        _limit(kind, value)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    send(sys.stdout.buffer, "ready")
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            name, uri, sql, seconds, *rest = receive(sys.stdin.buffer)
            started = time.monotonic()
            work, memory = requests[name]
            _limit(resource.RLIMIT_AS, idle + memory)
            signal.setitimer(signal.ITIMER_REAL, seconds + _ALARM_AFTER_DEADLINE)
            result = work(uri, sql, seconds, *rest)
            # A process that has grown would refuse the next query for its memory.
            small = time.monotonic() < started + _SHORT_SECONDS or _mapped_bytes() < idle + _MEMORY_BYTES // 2
            try:
                send(sys.stdout.buffer, (result, small))
            except MemoryError:
                failure = "too_large", "The result needs too much memory; select fewer rows or shorter values."
                send(sys.stdout.buffer, ([failure] if isinstance(result, list) else failure, False))
            signal.setitimer(signal.ITIMER_REAL, 0)  # not before: a large answer takes seconds to send


def _limit(kind: int, value: int) -> None:
    """Set a limit of this process, within what its parent allows it."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _mapped_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
