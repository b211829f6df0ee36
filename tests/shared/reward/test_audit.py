"""Perturbed copies: who keeps agreeing on them, and who was only lucky."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from shared.config.schema import SandboxConfig
from shared.errors import UserError
from shared.evaluation.judges.spider import spider_ex, spider_match
from shared.reward.perturbed_copies import make_copies
from shared.reward.queries import Order, compared_values, order_of
from shared.reward.reward import agrees_on_copies, open_copies
from shared.sql.database import Database
from tests.beside import REAL_DATA, needs_real_data
from tests.shared.examples import LIMITS, insurance, insurance_file

LARGE = SandboxConfig(timeout_seconds=10, max_rows=200, max_compare_rows=20_000, max_result_bytes=4_000_000)
GOLDS = ["SELECT note FROM claims WHERE amount > 100", "SELECT full_name FROM customers WHERE city = 'Bern'"]


@pytest.fixture
def copies(tmp_path: Path) -> list[Database]:
    make_copies(insurance_file(tmp_path), GOLDS, tmp_path / "copies", 5, seed=0)
    return list(open_copies(str(tmp_path / "copies"), LARGE))


def rows(path: Path, sql: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(sql).fetchall()


def test_copies_keep_schema_keys_references_and_where_null_may_be(copies: list[Database], tmp_path: Path) -> None:
    original = Database(tmp_path / "insurance.sqlite", LARGE)
    for copy in copies:
        assert copy.schema == original.schema
        assert rows(copy.path, "PRAGMA foreign_key_check") == []
        assert rows(copy.path, "SELECT count(*) - count(DISTINCT claim_id) FROM claims") == [(0,)]
        assert rows(copy.path, "SELECT count(*) - count(amount) FROM claims") == [(0,)]
        assert rows(copy.path, "SELECT count(*) FROM claims") != [(3,)]
    assert any(rows(copy.path, "SELECT 1 FROM customers WHERE city IS NULL") for copy in copies)
    assert any(rows(copy.path, "SELECT 1 FROM claims WHERE amount = 100") for copy in copies)
    assert any(rows(copy.path, "SELECT amount FROM claims GROUP BY 1 HAVING count(*) > 1") for copy in copies)


def test_the_same_seed_gives_the_same_copies_and_another_one_others(tmp_path: Path) -> None:
    path = insurance_file(tmp_path)
    listed = "SELECT * FROM claims"
    first, again, other = (
        make_copies(path, GOLDS, tmp_path / name, 2, seed)[0] for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert rows(first, listed) == rows(again, listed) != rows(other, listed)


def test_copies_that_were_there_are_replaced_and_a_damaged_database_is_named(tmp_path: Path) -> None:
    path = insurance_file(tmp_path)
    make_copies(path, GOLDS, tmp_path / "copies", 3, seed=0)
    make_copies(path, GOLDS, tmp_path / "copies", 1, seed=1)
    assert [file.name for file in (tmp_path / "copies").iterdir()] == ["0.sqlite"]
    path.write_bytes(b"no database" * 100)
    with pytest.raises(UserError, match=r"insurance\.sqlite cannot be copied"):
        make_copies(path, GOLDS, tmp_path / "others", 1, seed=0)
    with pytest.raises(UserError, match="prepare the data"):
        open_copies(str(tmp_path / "none"), LIMITS)


def test_odd_databases_are_copied_too(tmp_path: Path) -> None:
    path = tmp_path / "odd.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            """CREATE TABLE "a ""b" ("x y" INTEGER PRIMARY KEY, parent REFERENCES "a ""b"("x y"), data BLOB);
            CREATE TABLE bare (a INT, b TEXT, c REAL); CREATE TABLE one (k TEXT PRIMARY KEY, v UNIQUE) WITHOUT ROWID;
            CREATE TABLE made (a INT, b INT GENERATED ALWAYS AS (a * 2)); INSERT INTO made VALUES (1), (2);
            CREATE VIRTUAL TABLE words USING fts5(x); CREATE VIEW broken AS SELECT gone FROM one;
            CREATE TRIGGER t AFTER INSERT ON one BEGIN DELETE FROM bare; END; CREATE INDEX i ON one (v);
            INSERT INTO "a ""b" VALUES (1, NULL, x'00ff'), (2, 1, NULL); INSERT INTO one VALUES ('k', 1);"""
        )
    for copy in make_copies(path, [], tmp_path / "copies", 3, seed=0):
        assert rows(copy, 'SELECT count(*) > 2 FROM "a ""b"') == [(1,)]
        assert rows(copy, "SELECT count(*) > 2 FROM bare") == [(1,)]
        assert rows(copy, "SELECT count(*) FROM made WHERE b = a * 2 OR a IS NULL") == rows(
            copy, "SELECT count(*) FROM made"
        )


@pytest.mark.parametrize(
    ("gold", "prediction", "agrees"),
    [
        ("SELECT count(*) FROM claims", "SELECT 3", False),
        ("SELECT count(*) FROM claims", "SELECT count(note) + 1 FROM claims", False),
        ("SELECT claim_id FROM claims WHERE amount > 100", "SELECT claim_id FROM claims WHERE amount >= 100", False),
        ("SELECT claim_id FROM claims WHERE amount > 100", "SELECT claim_id FROM claims WHERE NOT amount <= 100", True),
        ("SELECT kind FROM policies GROUP BY kind", "SELECT DISTINCT kind FROM policies", True),
        ("SELECT full_name FROM customers ORDER BY full_name", "SELECT full_name FROM customers", False),
        ("SELECT note FROM claims ORDER BY amount DESC LIMIT 1",
         "SELECT note FROM claims WHERE amount = (SELECT max(amount) FROM claims)", True),
        ("SELECT avg(amount) FROM claims", "SELECT sum(amount) * 1.0 / count(*) FROM claims", True),
        ("SELECT full_name FROM customers WHERE customer_id NOT IN (SELECT customer_id FROM policies)",
         "SELECT full_name FROM customers c LEFT JOIN policies p USING (customer_id) WHERE policy_id IS NULL", True),
        ("SELECT full_name FROM customers WHERE city = 'Bern'", "SELECT gone FROM customers", False),
    ],
)  # fmt: skip
def test_right_queries_agree_on_all_copies_and_lucky_ones_do_not(
    gold: str, prediction: str, agrees: bool, copies: list[Database]
) -> None:
    assert agrees_on_copies(gold, prediction, copies) is agrees


@pytest.mark.parametrize(
    ("gold", "order"),
    [
        ("SELECT note FROM claims", Order.FREE),
        ("SELECT note FROM claims ORDER BY claim_id", Order.GIVEN),
        ("SELECT full_name FROM customers ORDER BY city", Order.FREE),
        ("SELECT city FROM customers ORDER BY 1", Order.GIVEN),
        ("SELECT city AS c FROM customers ORDER BY c LIMIT 1", Order.OPEN),
        ("SELECT full_name FROM customers ORDER BY full_name LIMIT 1", Order.GIVEN),
        ("SELECT city, count(*) FROM customers GROUP BY city ORDER BY count(*) DESC LIMIT 1", Order.OPEN),
        ("SELECT kind FROM policies GROUP BY kind ORDER BY count(*) DESC LIMIT 1", Order.GIVEN),
        ("SELECT full_name FROM customers "
         "WHERE customer_id IN (SELECT customer_id FROM customers ORDER BY city LIMIT 1)",
         Order.OPEN),
        ("SELECT city FROM customers UNION ALL SELECT city FROM customers ORDER BY 1", Order.GIVEN),
        ("SELECT * FROM customers ORDER BY 1 LIMIT 1", Order.GIVEN),
        ("SELECT note FROM claims ORDER BY amount LIMIT (SELECT 1)", Order.GIVEN),
        ("SELECT note FROM claims ORDER BY", Order.GIVEN),
    ],
)  # fmt: skip
def test_what_hangs_on_ties_is_known(gold: str, order: Order, tmp_path: Path) -> None:
    two_in_bern = "INSERT INTO customers VALUES (4, 'Dee', 'Bern'), (5, 'Eli', NULL);"
    assert order_of(gold, insurance(tmp_path, two_in_bern, LARGE)) is order


def test_values_that_queries_compare_with_are_found() -> None:
    queries = [
        "SELECT 1 FROM t WHERE A > 3 AND b LIKE '%x%' OR c IN (1.5, 'y')",
        'SELECT 1 FROM t WHERE a = "z"',
        "SELECT (",
    ]
    assert compared_values(queries) == {"a": [3, "z"], "b": ["x"], "c": [1.5, "y"], "z": ["z"]}


@needs_real_data
def test_copies_catch_most_of_what_the_official_test_suite_catches(tmp_path: Path) -> None:
    cases = [json.loads(line) for line in (REAL_DATA / "evaluator_cases.jsonl").read_text("utf-8").splitlines()]
    cases = [case for case in cases if case["spider_exec"]]
    golds = [
        (row["db_id"], row["query"]) for row in json.loads((REAL_DATA / "spider_sample/dev.json").read_text("utf-8"))
    ]
    caught, honest = [], []
    for name in {case["db_id"] for case in cases}:
        path = REAL_DATA / "spider_sample/database" / name / f"{name}.sqlite"
        make_copies(path, [sql for db_id, sql in golds if db_id == name], tmp_path / name, 5, seed=0)
    for case in cases:
        copies = open_copies(str(tmp_path / case["db_id"]), LARGE)
        agrees = all(_spider_agrees(case["gold_sql"], case["pred_sql"], copy) for copy in copies)
        (honest if case["spider_testsuite"] else caught).append((case["id"], agrees))
    assert [identity for identity, agrees in honest if not agrees] == []
    assert sum(not agrees for _, agrees in caught) >= 0.7 * len(caught)


def _spider_agrees(gold: str, prediction: str, copy: Database) -> bool:
    """Spider's verdict on a copy, ties left open."""
    order = order_of(gold, copy)
    if order is Order.OPEN or spider_ex(gold, prediction, copy.path):
        return True
    try:
        results = [tuple(copy.official((sql,), 10, "ignore")[0]) for sql in (gold, prediction)]
    except Exception:
        return False
    return order is Order.FREE and spider_match(results[0], results[1], ordered=False)
