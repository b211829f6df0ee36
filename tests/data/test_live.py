"""Snapshots of live databases, here of SQLite and DuckDB files, which need only requirements/live.txt."""

from __future__ import annotations

import datetime
import decimal
import importlib.util
import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from data import importing, live
from data.live import _grants_writing, _plain, is_address, snapshot
from shared.errors import UserError
from shared.sql.database import Database
from tests.data.conftest import ROOT
from tests.data.live_examples import check_snapshot, create, foreign_key_problems
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
        (decimal.Decimal("Infinity"), float("inf")),
        (datetime.datetime(2024, 1, 2, 3, 4), "2024-01-02 03:04:00"),
        (datetime.date(2024, 1, 2), "2024-01-02"),
        (memoryview(b"a"), b"a"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        ({"ä": [1, decimal.Decimal("2.5")]}, '{"ä": [1, "2.5"]}'),
        ({"b", "a"}, "a,b"),
        (datetime.timedelta(days=1, seconds=4027), "25:07:07"),
        (-datetime.timedelta(microseconds=1_500_000), "-00:00:01.500000"),
        (None, None),
    ],
)
def test_values_are_stored_as_sqlite_knows_them(value: Any, stored: Any) -> None:
    assert _plain(value) == stored


@pytest.mark.parametrize(
    ("grant", "writing"),
    [
        ("GRANT USAGE ON *.* TO `me`@`%`", False),
        ("GRANT SELECT, SHOW VIEW ON `updates`.* TO `me`@`%`", False),
        ("GRANT SELECT (`insert`, `drop`) ON `a`.`b` TO `me`@`%`", False),
        ("GRANT SELECT, CREATE TEMPORARY TABLES ON `a`.* TO `me`@`%`", False),
        ("GRANT SELECT, INSERT (`x`) ON `a`.`b` TO `me`@`%`", True),
        ("GRANT ALL PRIVILEGES ON *.* TO `me`@`%` WITH GRANT OPTION", True),
        ("GRANT DELETE ON `a`.* TO `me`@`%`", True),
        ("GRANT FILE ON *.* TO `me`@`%`", True),
    ],
)
def test_grants_of_mysql_are_read(grant: str, writing: bool) -> None:
    assert _grants_writing(grant) is writing


def test_an_unsupported_database_is_named_before_any_package_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"mssql:// is not supported; give an address that begins with postgresql"):
        snapshot("mssql+pyodbc://me@host/x", tmp_path)


@pytest.mark.skipif(INSTALLED, reason="SQLAlchemy is installed")
def test_without_sqlalchemy_the_way_out_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"needs SQLAlchemy .* install .*requirements/live\.txt"):
        snapshot("postgresql://me:secret@host/x", tmp_path)


@needs_sqlalchemy
def test_a_snapshot_keeps_rows_keys_and_references(tmp_path: Path) -> None:
    path = insurance_file(tmp_path)
    copy = Database(snapshot(f"sqlite:///{path}", tmp_path / "new"), LIMITS)
    original = Database(path, LIMITS)
    for table in original.schema.tables:
        sql = f"SELECT * FROM {table.name} ORDER BY 1"
        assert copy.execute(sql).rows == original.execute(sql).rows
        mine = copy.schema.table(table.name)
        assert mine is not None
        assert [(c.name, c.type, c.primary_key, c.references) for c in mine.columns] == [
            (c.name, c.type, c.primary_key, c.references) for c in table.columns
        ]
    assert foreign_key_problems(copy.path) == []


@needs_sqlalchemy
def test_nothing_is_asked_while_the_rows_of_a_table_stream(tmp_path: Path) -> None:
    import sqlalchemy

    asked: list[str] = []
    on_each = (sqlalchemy.Engine, "before_cursor_execute", lambda _c, _cursor, statement, *_: asked.append(statement))
    sqlalchemy.event.listen(*on_each)
    try:
        snapshot(f"sqlite:///{insurance_file(tmp_path)}", tmp_path / "new", ["claims"])
    finally:
        sqlalchemy.event.remove(*on_each)
    assert "SELECT" in asked[-1]
    assert "LIMIT" in asked[-1]


@needs_sqlalchemy
def test_only_the_named_tables_and_views_are_read(tmp_path: Path) -> None:
    path = insurance_file(tmp_path, "CREATE VIEW small AS SELECT claim_id FROM claims WHERE amount < 100;")
    copy = snapshot(f"sqlite:///{path}", tmp_path / "new", ["claims", "small"])
    assert [table.name for table in Database(copy, LIMITS).schema.tables] == ["claims", "small"]
    assert Database(copy, LIMITS).execute("SELECT * FROM small").rows == ((2,),)
    assert foreign_key_problems(copy) == []  # the policies stayed where they are
    with pytest.raises(UserError, match="holds no table zoo; it has: claims, customers, policies"):
        snapshot(f"sqlite:///{path}", tmp_path / "none", ["zoo"])
    assert not list((tmp_path / "none").iterdir())


@needs_sqlalchemy
def test_a_table_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_ROWS", 2)
    with pytest.raises(UserError, match=r"Table claims has more than 2 rows; name the tables you need"):
        snapshot(f"sqlite:///{insurance_file(tmp_path)}", tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())


@needs_sqlalchemy
@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("postgresql://me:sec@ret@127.0.0.1:9/x", r"postgresql://…@127\.0\.0\.1:9/x cannot be read \(.*network"),
        ("postgresql://me:secret@host:port/x", "is not an address like"),
        ("nosuch://me:secret@host/x", "is not supported"),
        ("sqlite:////no/such/file", "cannot be read"),
    ],
)
def test_what_cannot_be_reached_is_named_without_its_password(address: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words) as caught:
        snapshot(address, tmp_path / "new")
    assert "sec" not in str(caught.value)


@pytest.fixture
def duckdb_address(tmp_path: Path) -> str:
    pytest.importorskip("sqlalchemy")
    pytest.importorskip("duckdb_sqlalchemy")
    address = f"duckdb:///{tmp_path / 'shop.duckdb'}"
    create(address, r"'\x00\xFF'::BLOB", "BLOB")
    return address


def test_a_duckdb_file_is_read(duckdb_address: str, tmp_path: Path) -> None:
    check_snapshot(duckdb_address, tmp_path / "new")


def test_questions_on_a_live_database_are_imported(
    duckdb_address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "questions.jsonl"
    rows = [{"question": "How many?", "sql": "SELECT count(*) FROM kinds"},
            {"question": "Casts?", "sql": "SELECT list_sum([1, 2]) FROM kinds"}]  # fmt: skip
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--databases", duckdb_address, "--config", str(ROOT / "pipeline.yaml"), "--out", str(tmp_path / "out")]
    importing.main([str(file), *options, "--bad-rows", "skip"])
    assert "questions.jsonl:2: its gold SQL fails" in capsys.readouterr().out
    written = json.loads((tmp_path / "out" / "dev.json").read_text())
    assert [(row["db_id"], row["question"]) for row in written] == [("shop", "How many?")]
    assert Database(tmp_path / "out" / "database" / "shop" / "shop.sqlite", LIMITS).path.stem == "shop"
