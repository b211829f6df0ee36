"""A small strange database: undeclared references, quoted and reserved names, a view, a BLOB, codes of a language."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from data.synthesis.schema import Understanding, understand
from shared.sql.database import Database
from tests.data.conftest import settings

_SCHEMA = """
CREATE TABLE tbl_customer (cust_id INTEGER, full_name TEXT, gender TEXT, country TEXT, is_active INTEGER,
                           "birth year" INTEGER);
CREATE TABLE "order" ("order id" INTEGER, cust_id INTEGER, "order date" TEXT, total_amt REAL, "group" TEXT, scan BLOB,
                      note TEXT, taxed REAL GENERATED ALWAYS AS (total_amt * 2) VIRTUAL);
CREATE TABLE empty_table (id INTEGER PRIMARY KEY, name TEXT);
CREATE VIEW big_orders AS SELECT * FROM "order" WHERE total_amt > 50;
"""


@pytest.fixture(scope="session")
def strange_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("strange") / "strange.sqlite"
    countries = ("Brazil", "France", "Japan", "Kenya")
    names = "Ana Bo Cy Dee Eli Flo Gus Hal Ida Jo Kai Lea Mo Ned Ola Pia Quin Rex Sue Tim".split()
    customers = [
        (i + 1, f"{name} O'Neil", "FM"[i % 2], countries[i * i % 4 if i % 3 else 3], int(i % 3 == 0), 1950 + i * 2)
        for i, name in enumerate(names)
    ]
    orders = []
    for i in range(60):
        day, size = f"20{10 + i % 9}-0{1 + i % 8}-1{i % 10}", "big small tiny".split()[i % 3 if i % 7 else 0]
        note = None if i % 4 else "sent to the old address by mistake"
        orders.append((i, 1 + i * i % 15, day, 3.5 + i * 1.5, size, b"\x00\x01", note))
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript(_SCHEMA)
        connection.executemany("INSERT INTO tbl_customer VALUES (?, ?, ?, ?, ?, ?)", customers)
        connection.executemany('INSERT INTO "order" VALUES (?, ?, ?, ?, ?, ?, ?)', orders)
    return path


@pytest.fixture(scope="session")
def strange(strange_file: Path) -> Database:
    return Database(strange_file, settings().sandbox)


@pytest.fixture(scope="session")
def about(strange: Database) -> Understanding:
    return understand(strange, {})
