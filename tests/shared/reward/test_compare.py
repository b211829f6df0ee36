"""The house rule for equal results."""

from __future__ import annotations

import itertools
import json
import math
import random
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.config.schema import SandboxConfig
from shared.reward.execution_match import execution_match
from shared.reward.queries import gold_is_ordered
from shared.sql.database import Database, QueryResult, SqlError
from tests.beside import REAL_DATA, needs_real_data


def result(*rows: tuple[Any, ...], truncated: bool = False, width: int | None = None) -> QueryResult:
    width = len(rows[0]) if rows else width or 1
    return QueryResult(tuple(f"c{i}" for i in range(width)), rows, truncated)


@pytest.mark.parametrize(
    ("gold", "prediction", "ordered", "same"),
    [
        ([(1,)], [(1,)], False, True),
        ([(1,)], [(1.0,)], False, True),
        ([(1,)], [("1",)], False, False),
        ([(1,)], [(None,)], False, False),
        ([(None,)], [(None,)], False, True),
        ([("a",)], [("A",)], False, False),
        ([("a",)], [(b"a",)], False, False),
        ([(0.1 + 0.2,)], [(0.3,)], False, True),
        ([(1e6,)], [(1e6 + 0.5,)], False, True),
        ([(1e6,)], [(1e6 + 2.0,)], False, False),
        ([(1_000_000_000,)], [(1_000_000_001,)], False, False),
        ([(0.0,)], [(5.6e-17,)], False, True),
        ([(math.inf,)], [(math.inf,)], False, True),
        ([(1,), (2,)], [(2,), (1,)], False, True),
        ([(1,), (2,)], [(2,), (1,)], True, False),
        ([(1,), (1,), (2,)], [(1,), (2,), (2,)], False, False),
        ([(1,), (1,)], [(1,)], False, False),
        ([(1, "a"), (2, "b")], [("b", 2), ("a", 1)], False, True),
        ([(1, "a"), (2, "b")], [("a", 1), ("b", 2)], True, True),
        ([(1, "a"), (2, "b")], [("b", 2), ("a", 1)], True, False),
        ([(1, 2), (2, 1), (3, 3)], [(2, 1), (1, 2), (3, 3)], False, True),
        ([(1, 2), (3, 4)], [(2, 1), (3, 4)], False, False),  # one order for all rows
        ([(1, 2), (3, 4)], [(1, 4), (3, 2)], False, False),  # equal columns, other rows
        ([(1, 1)], [(1,)], False, False),
        ([(1.5, "x"), (None, "y"), ("1.5", "z")], [("z", "1.5"), ("y", None), ("x", 1.5000000001)], False, True),
        ([], [], False, True),
        ([], [(1,)], False, False),
    ],
)
def test_house_rule(gold: list[Any], prediction: list[Any], ordered: bool, same: bool) -> None:
    assert execution_match(result(*gold), result(*prediction), ordered=ordered) is same
    assert execution_match(result(*prediction), result(*gold), ordered=ordered) is same


def test_two_empty_results_are_equal_whatever_their_columns() -> None:
    assert execution_match(result(width=1), result(width=3), ordered=True)


def test_a_result_cut_short_equals_nothing() -> None:
    assert not execution_match(result((1,), truncated=True), result((1,), truncated=True), ordered=False)


@pytest.mark.parametrize(
    ("sql", "ordered"),
    [
        ("SELECT a FROM t ORDER BY a", True),
        ("SELECT a FROM t order\n by a LIMIT 1;", True),
        ("SELECT a FROM t UNION SELECT b FROM u ORDER BY 1", True),
        ("WITH x AS (SELECT a FROM t ORDER BY a) SELECT a FROM x", False),
        ("SELECT a FROM (SELECT a FROM t ORDER BY a LIMIT 3)", False),
        ("SELECT rank() OVER (ORDER BY a) FROM t", False),
        ("SELECT a FROM t WHERE b = 'order by'", False),
        ('SELECT "order by" FROM t -- ORDER BY a', False),
        ("SELECT a FROM t", False),
    ],
)
def test_only_the_top_level_order_counts(sql: str, ordered: bool) -> None:
    assert gold_is_ordered(sql) is ordered


CELLS = st.sampled_from([None, 0, 1, 2, "a", "1", 1.0, 2.5, 2.5000001])
TABLES = st.integers(1, 3).flatmap(lambda width: st.lists(st.tuples(*[CELLS] * width), min_size=1, max_size=4))


@settings(max_examples=200)
@given(TABLES, st.randoms(use_true_random=False))
def test_shuffled_rows_and_columns_still_match(rows: list[tuple[Any, ...]], shuffle: random.Random) -> None:
    order = shuffle.sample(range(len(rows[0])), len(rows[0]))
    other = [tuple(row[i] for i in order) for row in shuffle.sample(rows, len(rows))]
    assert execution_match(result(*rows), result(*other), ordered=False)


@settings(max_examples=400)
@given(TABLES, TABLES, st.booleans())
def test_the_search_agrees_with_trying_everything(gold: list[Any], prediction: list[Any], ordered: bool) -> None:
    assert execution_match(result(*gold), result(*prediction), ordered=ordered) is brute_force(
        gold, prediction, ordered
    )


def brute_force(gold: list[Any], prediction: list[Any], ordered: bool) -> bool:
    def close(x: Any, y: Any) -> bool:
        both = isinstance(x, (int, float)) and isinstance(y, (int, float))
        return math.isclose(x, y, rel_tol=1e-6) if both else x == y

    if len(gold) != len(prediction) or len(gold[0]) != len(prediction[0]):
        return False
    row_orders = [tuple(range(len(gold)))] if ordered else list(itertools.permutations(range(len(gold))))
    return any(
        all(
            close(x, prediction[r][c])
            for row, r in zip(gold, rows, strict=True)
            for x, c in zip(row, columns, strict=True)
        )
        for columns in itertools.permutations(range(len(gold[0])))
        for rows in row_orders
    )


@pytest.mark.parametrize("kind", ["texts", "floats", "interchangeable"])
def test_large_results_are_compared_quickly(kind: str) -> None:
    draw = random.Random(0)
    cell = {
        "texts": lambda: draw.choice("abcdefgh"),
        "floats": lambda: draw.random() * 1000,
        "interchangeable": lambda: draw.randrange(2),
    }[kind]
    rows = [tuple(cell() for _ in range(8)) for _ in range(5000)]
    other = [tuple(reversed(row)) for row in draw.sample(rows, len(rows))]
    start = time.monotonic()
    assert execution_match(result(*rows), result(*other), ordered=False)
    wrong = [*other[1:], (*other[0][1:], other[0][0])]
    execution_match(result(*rows), result(*wrong), ordered=False)
    assert time.monotonic() - start < 10


@needs_real_data
def test_verdicts_differ_from_spiders_only_where_the_rules_differ() -> None:
    limits = SandboxConfig(timeout_seconds=10, max_rows=200, max_compare_rows=20000, max_result_bytes=4_000_000)
    cases = [json.loads(line) for line in (REAL_DATA / "evaluator_cases.jsonl").read_text("utf-8").splitlines()]
    verdicts: Counter[tuple[bool, bool]] = Counter()
    for case in cases:
        database = Database(REAL_DATA / "spider_sample/database" / case["db_id"] / f"{case['db_id']}.sqlite", limits)
        house = house_verdict(database, case["gold_sql"], case["pred_sql"])
        verdicts[case["spider_exec"], house] += 1
        rule = any(
            word in (case["gold_sql"] + case["pred_sql"]).lower() for word in ("distinct", "intersect", "order by")
        )
        repaired = any(
            word in case["pred_sql"] for word in (";", "> =", "! =", "DELETE", "CURDATE")
        )  # Spider edits these
        assert house == case["spider_exec"] or rule or repaired, case["id"]
    assert verdicts[True, True] + verdicts[False, False] >= 0.89 * len(cases)


def house_verdict(database: Database, gold_sql: str, prediction_sql: str) -> bool:
    gold = database.execute(gold_sql, 20000)
    try:
        prediction = database.execute(prediction_sql, 20000)
    except SqlError:
        return False
    return execution_match(gold, prediction, ordered=gold_is_ordered(gold_sql))


@pytest.mark.parametrize(
    ("sql", "ordered"), [("SELECT a FROM t ORDER BY a /* open", True), ("SELECT a FROM t /* x", False)]
)
def test_an_open_comment_does_not_hide_the_order(sql: str, ordered: bool) -> None:
    assert gold_is_ordered(sql) is ordered
