"""The demo databases: believable, connected, and the same on every run."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from data.synthesis.demo import SCRIPTS, write_database
from data.synthesis.schema import Meaning, Understanding, understand
from shared.sql.database import Database
from tests.data.conftest import settings

scripts = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)


@pytest.fixture
def database(script: Path, tmp_path: Path) -> Iterator[sqlite3.Connection]:
    write_database(script, tmp_path / "db")
    with closing(sqlite3.connect(tmp_path / "db")) as connection:
        yield connection


def table_names(database: sqlite3.Connection) -> list[str]:
    return [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]


def about(script: Path, folder: Path) -> Understanding:
    write_database(script, folder / "understood.sqlite")
    return understand(Database(folder / "understood.sqlite", settings().sandbox), {})


def test_at_least_nine_domains_of_small_text() -> None:
    assert len(SCRIPTS) >= 9
    assert sum(script.stat().st_size for script in SCRIPTS) < 2_000_000


def test_no_table_name_appears_in_two_domains(tmp_path: Path) -> None:
    names = []
    for script in SCRIPTS:
        write_database(script, tmp_path / script.stem)
        with closing(sqlite3.connect(tmp_path / script.stem)) as connection:
            names += table_names(connection)
    assert len(set(names)) == len(names)


@scripts
def test_three_to_six_tables_of_twenty_to_three_hundred_rows(database: sqlite3.Connection) -> None:
    names = table_names(database)
    assert 3 <= len(names) <= 6
    for name in names:
        assert 20 <= database.execute(f"SELECT COUNT(*) FROM {name}").fetchone()[0] <= 300


@scripts
def test_files_are_identical_byte_for_byte(script: Path, tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_database(script, tmp_path / name)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]


@scripts
def test_every_foreign_key_leads_to_a_row_and_is_understood(
    database: sqlite3.Connection, script: Path, tmp_path: Path
) -> None:
    assert database.execute("PRAGMA foreign_key_check").fetchall() == []
    keys = [row for name in table_names(database) for row in database.execute(f"PRAGMA foreign_key_list({name})")]
    understood = [column for table in about(script, tmp_path).tables for column in table.of(Meaning.REFERENCE)]
    assert len(keys) == len(understood) >= 2


@scripts
def test_every_domain_has_missing_values_dates_and_categories(script: Path, tmp_path: Path) -> None:
    tables = about(script, tmp_path).tables
    assert any(column.has_null for table in tables for column in table.columns)
    for meanings in ((Meaning.DATE,), (Meaning.CATEGORY,), (Meaning.QUANTITY, Meaning.LEVEL), (Meaning.NAME,)):
        assert any(table.of(*meanings) for table in tables)


@scripts
def test_categories_have_few_values_and_names_of_rows_are_unique(script: Path, tmp_path: Path) -> None:
    for table in about(script, tmp_path).tables:
        assert all(2 <= len(set(column.values)) <= 10 for column in table.of(Meaning.CATEGORY))
        assert all(column.is_unique for column in table.title)


@scripts
def test_two_references_to_one_table_name_different_rows(database: sqlite3.Connection) -> None:
    for name in table_names(database):
        keys = [(row[2], row[3]) for row in database.execute(f"PRAGMA foreign_key_list({name})")]
        for parent, column in keys:
            for other_parent, other in keys:
                if column != other and parent == other_parent:
                    same = database.execute(f"SELECT COUNT(*) FROM {name} WHERE {column} = {other}").fetchone()[0]
                    assert same == 0
