"""Snapshots of live databases, here of a SQLite file behind an address; other servers need their drivers."""

from __future__ import annotations

import datetime
import decimal
import importlib.util
import sqlite3
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from data.live import _plain, is_address, snapshot
from shared.database import Database
from shared.errors import UserError
from tests.shared.examples import LIMITS, insurance_file

INSTALLED = importlib.util.find_spec("sqlalchemy") is not None
needs_sqlalchemy = pytest.mark.skipif(not INSTALLED, reason="SQLAlchemy is not installed")


@pytest.mark.parametrize(
    ("text", "address"),
    [("postgresql+psycopg://me@host/x", True), ("duckdb:///a.db", True), ("databases/x.sqlite", False)],
)
def test_addresses_are_told_from_paths(text: str, address: bool) -> None:
    assert is_address(text) is address


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (True, 1),
        (2**70, float(2**70)),
        (decimal.Decimal("2.50"), 2.5),
        (decimal.Decimal("3"), 3),
        (datetime.datetime(2024, 1, 2, 3, 4), "2024-01-02 03:04:00"),
        (datetime.date(2024, 1, 2), "2024-01-02"),
        (memoryview(b"a"), b"a"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        ({"a": [1]}, '{"a": [1]}'),
        (None, None),
    ],
)
def test_values_are_stored_as_sqlite_knows_them(value: Any, stored: Any) -> None:
    assert _plain(value) == stored


@pytest.mark.skipif(INSTALLED, reason="SQLAlchemy is installed")
def test_without_sqlalchemy_the_way_out_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"needs the package SQLAlchemy .* install"):
        snapshot("postgresql://me:secret@host/x", tmp_path / "s.sqlite")


@needs_sqlalchemy
def test_a_snapshot_keeps_rows_keys_and_references(tmp_path: Path) -> None:
    path = insurance_file(tmp_path)
    copy = Database(snapshot(f"sqlite:///{path}", tmp_path / "new" / "s.sqlite"), LIMITS)
    original = Database(path, LIMITS)
    for table in original.schema.tables:
        sql = f"SELECT * FROM {table.name} ORDER BY 1"
        assert copy.execute(sql).rows == original.execute(sql).rows
        mine = copy.schema.table(table.name)
        assert mine is not None
        assert [(c.name, c.primary_key, c.references) for c in mine.columns] == [
            (c.name, c.primary_key, c.references) for c in table.columns
        ]
    with closing(sqlite3.connect(copy.path)) as connection:
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []


@needs_sqlalchemy
def test_only_the_named_tables_are_read(tmp_path: Path) -> None:
    path = insurance_file(tmp_path)
    copy = snapshot(f"sqlite:///{path}", tmp_path / "s.sqlite", ["claims"])
    assert [table.name for table in Database(copy, LIMITS).schema.tables] == ["claims"]
    with pytest.raises(UserError, match="holds no table zoo; it has: claims, customers, policies"):
        snapshot(f"sqlite:///{path}", tmp_path / "t.sqlite", ["zoo"])
    assert not list(tmp_path.glob("t.sqlite*"))
