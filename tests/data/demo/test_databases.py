"""The demo databases: believable, connected, and the same on every run."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from data.demo.build import make_rows, write_database
from data.demo.domains import DOMAINS
from data.demo.spec import Domain, Kind

domains = pytest.mark.parametrize("domain", DOMAINS, ids=lambda domain: domain.db_id)


def test_at_least_nine_domains_with_distinct_names() -> None:
    assert len({domain.db_id for domain in DOMAINS}) == len(DOMAINS) >= 9


def test_no_table_name_appears_in_two_domains() -> None:
    names = [table.name for domain in DOMAINS for table in domain.tables]
    assert len(set(names)) == len(names)


@domains
def test_three_to_six_tables_of_twenty_to_three_hundred_rows(domain: Domain) -> None:
    assert 3 <= len(domain.tables) <= 6
    assert all(20 <= table.rows <= 300 for table in domain.tables)


@domains
def test_files_are_identical_byte_for_byte(domain: Domain, tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_database(domain, make_rows(domain), tmp_path / name)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]


@domains
def test_every_foreign_key_leads_to_a_row(domain: Domain, tmp_path: Path) -> None:
    write_database(domain, make_rows(domain), tmp_path / "db")
    with closing(sqlite3.connect(tmp_path / "db")) as connection:
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        keys = [row for table in domain.tables for row in connection.execute(f"PRAGMA foreign_key_list({table.name})")]
    assert len(keys) == sum(len(table.of(Kind.REF)) for table in domain.tables) >= 2


@domains
def test_every_domain_has_missing_values_dates_and_categories(domain: Domain) -> None:
    rows = make_rows(domain)
    assert any(value is None for table in rows.values() for row in table for value in row.values())
    for kind in (Kind.DATE, Kind.CATEGORY, Kind.MEASURE, Kind.LABEL):
        assert any(table.of(kind) for table in domain.tables)


@domains
def test_categories_have_few_values_and_labels_are_unique(domain: Domain) -> None:
    rows = make_rows(domain)
    for table in domain.tables:
        for column in table.of(Kind.CATEGORY):
            assert 2 <= len({row[column.name] for row in rows[table.name]} - {None}) <= 10
        for column in table.of(Kind.LABEL):
            assert len({row[column.name] for row in rows[table.name]}) == table.rows


@domains
def test_two_references_to_one_table_name_different_rows(domain: Domain) -> None:
    rows = make_rows(domain)
    for table in domain.tables:
        references = table.of(Kind.REF)
        for one in references:
            for other in references:
                if one is not other and one.references == other.references:
                    assert all(row[one.name] != row[other.name] for row in rows[table.name])
