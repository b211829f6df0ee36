"""What an official evaluator would see: it runs everything a model writes, here on a private copy in memory."""

from __future__ import annotations

import contextlib
import functools
import re
import sqlite3
import sys

from shared.sql.sandbox import READING, Answer, caught, connect, fetch, know_json, set_deadline

MAX_SQL_LENGTH = 1_000_000  # bytes, SQLite's own default
_HEAP_LIMITS = ("hard_heap_limit", "soft_heap_limit")  # of the whole process; each answers with its value
_QUIET_SETTINGS = ("data_store_directory", "temp_store", "temp_store_directory", "writable_schema")  # answer nothing
_CONCERNS_FILES = re.compile(r"\s*(ATTACH|VACUUM)\b", re.IGNORECASE)


def official(uri: str, statements: tuple[str, ...], seconds: float, decoding: str, max_bytes: int) -> list[Answer]:
    """Results of statements run one after another on one connection, as an official evaluator would see them.

    `decoding` says how text that is not UTF-8 is read: "strict", "ignore" or "replace". The list ends with the first
    failure. What is more than reading makes all of them run again, on a private copy in memory; ATTACH and VACUUM, which
    concern files, count as done there.
    """
    with contextlib.closing(connect(uri)) as connection:
        know_json(connection)
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
    set_deadline(connection, seconds)
    answers: list[Answer] = []
    for sql in statements:
        query = functools.partial(fetch, connection, sql, sys.maxsize, max_bytes)
        answers.append(caught(sql, seconds, query))
        if answers[-1][0] != "rows":
            break
    return answers


def _authorize_plain_reading(action: int, *_: str | None) -> int:
    return sqlite3.SQLITE_OK if action in READING else sqlite3.SQLITE_DENY


def _authorize_private_copy(action: int, name: str | None, value: str | None, *_: str | None) -> int:
    """All that stays inside the copy; settings that would reach beyond it are refused, or passed over without a word."""
    pragma = (name or "").lower() if action == sqlite3.SQLITE_PRAGMA and value is not None else ""
    if action in (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH) or pragma in _HEAP_LIMITS:
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_IGNORE if pragma in _QUIET_SETTINGS else sqlite3.SQLITE_OK
