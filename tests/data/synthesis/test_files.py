"""Databases as they are: odd names, encodings and files, and schemas of uncommon size."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from data.synthesis.generate import Taken, generate
from data.synthesis.schema import Meaning, understand
from shared.errors import UserError
from shared.sql.database import Database
from tests.bench.large_databases import many_columns, many_tables
from tests.data.conftest import settings

_KINDS = ("small", "large", "round")


def fill(connection: sqlite3.Connection, table: str, rows: int = 40) -> None:
    """Rows of a name, a kind and a price, without a key."""
    connection.execute(f'CREATE TABLE {table} ("the ""name""" TEXT, kind TEXT, "select" REAL)')
    values = [(f"Thing {i}", _KINDS[i * i % 3], i * 1.5) for i in range(rows)]
    connection.executemany(f"INSERT INTO {table} VALUES (?, ?, ?)", values)


def asked(path: Path, count: int = 30) -> list[str]:
    """Golds of so many questions; each one has answered in the sandbox."""
    database = Database(path, settings().sandbox)
    return [question.gold_sql for question in generate(database, understand(database, {}), count, 0, Taken())]


def test_a_table_without_keys_and_with_quotes_and_reserved_words_is_asked_about(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "odd.sqlite")) as connection, connection:
        fill(connection, '"my ""odd"" table"')
    golds = asked(tmp_path / "odd.sqlite")
    assert len(golds) == 30
    assert all('"my ""odd"" table"' in gold for gold in golds)
    assert any('"select"' in gold for gold in golds)
    assert any('"the ""name"""' in gold for gold in golds)


def test_rows_that_are_still_in_the_write_ahead_log_are_asked_about(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "wal.sqlite")) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        with connection:
            fill(connection, "things")
        assert (tmp_path / "wal.sqlite-wal").stat().st_size
        assert len(asked(tmp_path / "wal.sqlite")) == 30


def test_utf_16_and_text_that_is_not_utf_8_are_read(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "wide.sqlite")) as connection, connection:
        connection.execute("PRAGMA encoding = 'UTF-16le'")
        fill(connection, "things")
    with closing(sqlite3.connect(tmp_path / "latin.sqlite")) as connection, connection:
        fill(connection, "things")
        connection.execute("UPDATE things SET kind = CAST(x'6772fc6e' AS TEXT) WHERE kind = 'round'")
    assert len(asked(tmp_path / "wide.sqlite")) == len(asked(tmp_path / "latin.sqlite")) == 30


def test_a_table_of_500_columns_is_understood_and_asked_about(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "wide.sqlite")) as connection, connection:
        many_columns(connection)
    database = Database(tmp_path / "wide.sqlite", settings().sandbox)
    columns = understand(database, {}).table("station").columns
    assert len(columns) == 500
    assert {column.meaning for column in columns[2::2]} == {Meaning.CATEGORY}
    assert {column.meaning for column in columns[3::2]} == {Meaning.LEVEL}
    assert len(asked(tmp_path / "wide.sqlite", 5)) == 5


@pytest.mark.slow
def test_300_tables_are_asked_about(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "many.sqlite")) as connection, connection:
        many_tables(connection)
    assert len(asked(tmp_path / "many.sqlite", 40)) == 40


def test_a_database_without_rows_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "empty.sqlite")) as connection, connection:
        fill(connection, "things", rows=0)
    with pytest.raises(UserError, match=r"no table to ask about \(things: it has no rows\); give a database with rows"):
        asked(tmp_path / "empty.sqlite")
