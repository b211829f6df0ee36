"""The judges give the verdicts of the official evaluators, quirks included."""

from __future__ import annotations

import hashlib
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from shared.errors import UserError
from shared.evaluation.judges import bird_ex, soft_f1, spider_ex, spider_test_suite
from shared.evaluation.judges.bird import soft_f1_match
from shared.evaluation.judges.spider import Unreadable, first_statement_without_distinct, spider_match
from shared.sql.database import Rows
from tests.shared.examples import insurance_file

NAMES = "SELECT full_name FROM customers"
NOBODY = "SELECT full_name FROM customers WHERE customer_id > 9"


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return insurance_file(tmp_path)


@pytest.mark.parametrize(
    ("gold", "prediction", "spider", "bird"),
    [
        (NAMES, "select FULL_NAME\nfrom Customers ; ", True, True),
        (NAMES, f"{NAMES}; DROP TABLE customers", True, False),
        (NAMES, f"{NAMES} ORDER BY 1 DESC", True, True),
        (f"{NAMES} ORDER BY 1", f"{NAMES} ORDER BY 1 DESC", False, True),
        (f"{NAMES} WHERE full_name <> 'order by'", f"{NAMES} ORDER BY 1 DESC", False, True),
        ("SELECT kind FROM policies", "SELECT DISTINCT kind FROM policies", True, True),
        ("SELECT kind FROM policies", "SELECT kind FROM policies GROUP BY kind", False, True),
        ("SELECT count(DISTINCT kind) FROM policies", "SELECT count(kind) FROM policies", True, False),
        ("SELECT kind, premium FROM policies", "SELECT premium, kind FROM policies", True, False),
        ("SELECT 3", "SELECT 3.0", True, True),
        ("SELECT 3", "SELECT '3'", False, False),
        ("SELECT 0.3", "SELECT 0.1 + 0.2", False, False),
        ("SELECT NULL", "SELECT max(amount) FROM claims WHERE amount > 9999", True, True),
        ("SELECT 1, '1.'", "SELECT 1.0, '1.'", False, True),  # sorted as text the cells end in different places
        (NAMES, "SELECT full_name FROM customers WHERE customer_id > = 1", True, False),
        ("SELECT 2020 - 1", "SELECT year(curdate()) - 1", True, False),
        ("SELECT CAST(x'4aff' AS TEXT)", "SELECT 'J'", True, False),
        (NOBODY, "SELECT 1, 2 WHERE 0", True, True),
        (NOBODY, "", False, True),
        (NOBODY, "-- nothing", True, True),
        (NAMES, f"; {NAMES}", False, True),  # to Spider the first statement is the empty one
        (NOBODY, f";{NAMES}", True, False),
        (NOBODY, "DELETE FROM claims", True, True),
        (NOBODY, "PRAGMA busy_timeout", False, False),  # answers with a row
        (f"{NAMES} WHERE full_name LIKE 'BO LI'", "PRAGMA case_sensitive_like = 1", False, True),
        (NOBODY, "DELETE FROM claims RETURNING note", False, False),
        (NOBODY, "DROP TABLE customers", True, False),  # and then BIRD's gold fails
        (NAMES, "DELETE FROM customers", False, True),  # for BIRD both are empty then
        (NAMES, "INSERT INTO gone VALUES (1)", False, False),
        (NAMES, "ATTACH 'new.db' AS x", False, False),
        (NAMES, "SELECT ?", False, False),
        (NAMES, "SELECT '\0'", False, False),
        (NAMES, "SELECT '\ud800'", False, False),
        (NAMES, "SELECT " + "(" * 101 + "1" + ")" * 101, False, False),
    ],
)
def test_official_verdicts(gold: str, prediction: str, spider: bool, bird: bool, database: Path) -> None:
    before = hashlib.sha256(database.read_bytes()).hexdigest()
    assert spider_ex(gold, prediction, database) is spider
    assert bird_ex(gold, prediction, database) is bird
    assert hashlib.sha256(database.read_bytes()).hexdigest() == before
    assert [file.name for file in database.parent.iterdir()] == [database.name]


def test_a_test_suite_needs_every_variant(database: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = insurance_file(tmp_path / "other", "INSERT INTO customers VALUES (4, 'Dee', 'Bern');")
    assert spider_ex("SELECT count(*) FROM customers", "SELECT 3", database)
    assert not spider_test_suite("SELECT count(*) FROM customers", "SELECT 3", [database, other])
    assert spider_test_suite("SELECT count(*) FROM customers", "SELECT sum(1) FROM customers", [database, other])


def test_a_gold_that_fails_is_the_users_problem(database: Path) -> None:
    with pytest.raises(UserError, match=r"Gold SQL 'SELECT gone' cannot be run on .*no such column"):
        spider_ex("SELECT gone", NAMES, database)
    with pytest.raises(UserError, match="blank"):
        spider_ex(" ", NAMES, database)
    with pytest.raises(UserError, match="does not exist"):
        bird_ex(NAMES, NAMES, database.parent / "none.sqlite")


def test_a_prediction_without_end_is_wrong_in_time(database: Path) -> None:
    endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"
    start = time.monotonic()
    assert not spider_ex(NAMES, endless, database, seconds=0.2)
    assert not bird_ex(NAMES, endless, database, seconds=0.2)
    assert soft_f1(NAMES, endless, database, seconds=0.2) == 0.0
    assert time.monotonic() - start < 3


@pytest.mark.parametrize(
    ("gold", "prediction", "ordered", "same"),
    [
        ([(1, 2), (2, 1)], [(2, 1), (1, 2)], False, True),
        ([(1, 2), (2, 1)], [(2, 1), (1, 2)], True, True),  # by exchanging the columns
        ([(1, 2), (3, 4)], [(2, 1), (3, 4)], False, False),
        ([(1, 2), (3, 4)], [(1, 4), (3, 2)], False, False),
        ([(1,), (1,)], [(1,)], False, False),
        ([(1,), (1,), (2,)], [(1,), (2,), (2,)], False, False),
        ([(1, 1)], [(1,)], False, False),
        ([(b"a",)], [("a",)], False, False),
    ],
)
def test_spiders_comparison(gold: Rows, prediction: Rows, ordered: bool, same: bool) -> None:
    assert spider_match(tuple(gold), tuple(prediction), ordered=ordered) is same


def test_many_interchangeable_columns_do_not_hold_up_a_comparison() -> None:
    rows = tuple(tuple((i >> j) & 1 for j in range(12)) for i in range(4096))
    other = (*rows[1:], rows[1])
    start = time.process_time()
    assert spider_match(rows, tuple(row[::-1] for row in rows), ordered=False)
    assert not spider_match(rows, other, ordered=False)
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("gold", "prediction", "score"),
    [
        ([], [], 1.0),
        ([(1,)], [], 0.0),
        ([], [(1,)], 0.0),
        ([(1, "a"), (2, "b")], [(1, "a"), (2, "b"), (1, "a")], 1.0),
        ([(1, "a"), (2, "b")], [("a", 1), ("b", 2)], 1.0),
        ([(1, "a")], [(1,)], 2 / 3),
        ([(1,), (2,)], [(1,)], 2 / 3),
        ([(1,)], [(1, 5)], 2 / 3),
        ([(1,)], [(1,), (2,)], 2 / 3),
        ([(1,), (2,)], [(2,), (1,)], 0.0),  # rows are paired by position
    ],
)
def test_soft_f1_counts_shared_cells(gold: Rows, prediction: Rows, score: float) -> None:
    assert soft_f1_match(tuple(gold), tuple(prediction)) == pytest.approx(score)


def test_soft_f1_runs_both_queries(database: Path) -> None:
    assert soft_f1("SELECT full_name, city FROM customers", NAMES, database) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("sql", "read"),
    [
        ("SELECT DISTINCT a; SELECT b", "SELECT  a;"),
        ("SELECT 'distinct; x', \"distinct\", [distinct], `distinct`", None),
        ("SELECT count(distinct a) -- distinct; x\nFROM t", "SELECT count( a) -- distinct; x\nFROM t"),
        ("SELECT /* distinct; */ a", None),
        ("SELECT 'it''s; distinct'", None),
        ("SELECT case when 1 then 2 end; SELECT 3", "SELECT case when 1 then 2 end;"),
        ("CREATE TRIGGER x AFTER INSERT ON t BEGIN SELECT 1; END; SELECT 2",
         "CREATE TRIGGER x AFTER INSERT ON t BEGIN SELECT 1; END;"),
        ("BEGIN; SELECT 1", "BEGIN;"),
        ("BEGIN IMMEDIATE; SELECT 1", "BEGIN IMMEDIATE;"),
        ("SELECT count(*) AS GO FROM t", "SELECT count(*) AS GO"),
        ("SELECT t.begin, go(1) FROM t; x", "SELECT t.begin, go(1) FROM t;"),
        ("; SELECT 1", ";"),
    ],
)  # fmt: skip
def test_what_spider_reads_of_a_query(sql: str, read: str | None) -> None:
    assert first_statement_without_distinct(sql) == (sql if read is None else read)


@pytest.mark.parametrize("sql", ["", " \n", "SELECT " + "(" * 200, "SELECT 1" + ", 1" * 5000])
def test_what_spider_cannot_read(sql: str) -> None:
    with pytest.raises(Unreadable):
        first_statement_without_distinct(sql)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT name, city FROM people ORDER BY city, name DESC",
        "SELECT count(*) FROM (SELECT DISTINCT name FROM people)",
        "SELECT city, count(DISTINCT name) FROM people GROUP BY city",
        "SELECT name FROM people UNION SELECT city FROM people",
        "SELECT name, rank() OVER (ORDER BY score DESC) FROM people",
    ],
)
def test_golds_that_sort_many_rows_are_right(sql: str, hundred_thousand: Path) -> None:
    assert bird_ex(sql, sql, hundred_thousand)
    assert spider_ex(sql, sql, hundred_thousand)
    assert soft_f1(sql, sql, hundred_thousand) == 1.0


@pytest.fixture(scope="module")
def hundred_thousand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "people.sqlite"
    rows = 100_000
    people = ((i, f"person number {i * 7919 % rows:06d}", f"city {i % 977}", i * 0.37 % 100) for i in range(rows))
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE people (id INTEGER PRIMARY KEY, name TEXT, city TEXT, score REAL)")
        connection.executemany("INSERT INTO people VALUES (?, ?, ?, ?)", people)
    return path


def test_a_slow_gold_names_the_time_limit(database: Path) -> None:
    endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"
    with pytest.raises(UserError, match=r"takes longer than 0\.2 s; raise sandbox\.timeout_seconds"):
        spider_ex(endless, NAMES, database, seconds=0.2)


def test_a_prediction_of_any_length_is_judged_quickly(database: Path) -> None:
    endless_text, long_remainder = f"SELECT '{'x' * 20_000_000}'", f"{NAMES}; SELECT '{'x' * 20_000_000}'"
    started = time.monotonic()
    assert not spider_ex(NAMES, endless_text, database)
    assert spider_ex(NAMES, long_remainder, database)
    assert time.monotonic() - started < 5.0
