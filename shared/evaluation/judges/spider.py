"""Spider's execution accuracy, on one database or on a test suite of them.

Source: `eval_exec_match` of taoyds/test-suite-sql-eval with its usual switches (values are the prediction's own,
DISTINCT is not kept). Of both queries only the first statement counts, without any DISTINCT, `> =` becomes `>=` and
YEAR(CURDATE()) becomes 2020. Rows must come in the gold's order if its text has "order by" anywhere, in a sub-query or
a quoted text too; duplicates count; the columns may come in one other order; cells are compared exactly; two empty
results are equal whatever their columns. With a test suite all this must hold on every database.

Where the original fails with an exception the prediction is wrong. It has no working time limit; here there is one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from shared.errors import UserError
from shared.evaluation.judges.execution import SECONDS, outcome
from shared.evaluation.judges.statements import Unreadable, first_statement_without_distinct
from shared.reward.execution_match import Values, column_order_exists
from shared.sql.database import Rows, SqlError

_SPACED_OPERATORS = (("> =", ">="), ("< =", "<="), ("! =", "!="))
_CURRENT_YEAR = re.compile(r"YEAR\s*\(\s*CURDATE\s*\(\s*\)\s*\)\s*", re.IGNORECASE)


def spider_ex(gold_sql: str, prediction_sql: str, database: Path | str, *, seconds: float = SECONDS) -> bool:
    """Spider's verdict on one database file; `seconds` is the time limit of a query.

    Raises UserError when the gold itself cannot be run.
    """
    return spider_test_suite(gold_sql, prediction_sql, [database], seconds=seconds)


def spider_test_suite(
    gold_sql: str, prediction_sql: str, databases: Sequence[Path | str], *, seconds: float = SECONDS
) -> bool:
    """Spider's verdict on all variants of a database, the original included. Raises UserError as `spider_ex` does."""
    try:
        prediction = _read(prediction_sql)
    except Unreadable:
        return False
    try:
        gold = _read(gold_sql)
    except Unreadable as problem:
        raise UserError(f"Gold SQL {gold_sql[:120]!r} cannot be judged ({problem}); correct it.") from None
    ordered = "order by" in gold.lower()
    for path in map(Path, databases):
        wanted, given = (_rows(sql, path, seconds) for sql in (gold, prediction))
        if isinstance(wanted, SqlError):
            raise UserError(f"Gold SQL {gold_sql[:120]!r} cannot be run on {path} ({wanted}); correct it.")
        if isinstance(given, SqlError) or not spider_match(wanted, given, ordered=ordered):
            return False
    return True


def spider_match(gold: Rows, prediction: Rows, *, ordered: bool) -> bool:
    """Spider's comparison of two results."""
    if not gold and not prediction:
        return True
    if len(gold) != len(prediction) or len(gold[0]) != len(prediction[0]):
        return False
    own, other = map(_cells_by_text, (gold, prediction))
    if own != other if ordered else set(own) != set(other):
        return False
    own_columns, other_columns = (list(zip(*rows, strict=True)) for rows in (gold, prediction))
    if ordered:
        return Counter(own_columns) == Counter(other_columns)
    counts = [Counter(column) for column in other_columns]
    fits = [[j for j, count in enumerate(counts) if count == Counter(column)] for column in own_columns]
    return column_order_exists(own_columns, other_columns, fits, _same_rows)


def _same_rows(gold: Sequence[Values], prediction: Sequence[Values]) -> bool:
    return Counter(zip(*gold, strict=True)) == Counter(zip(*prediction, strict=True))


def _cells_by_text(rows: Rows) -> list[tuple[object, ...]]:
    """Each row's cells sorted as text: 1 and 1.0 can end in different places, and then the rows differ."""
    return [tuple(sorted(row, key=lambda cell: f"{cell}{type(cell)}")) for row in rows]


def _read(sql: str) -> str:
    for spaced, operator in _SPACED_OPERATORS:
        sql = sql.replace(spaced, operator)
    return first_statement_without_distinct(sql)


def _rows(sql: str, path: Path, seconds: float) -> Rows | SqlError:
    result = outcome(path, (_CURRENT_YEAR.sub("2020", sql),), seconds, "ignore")
    return result if isinstance(result, SqlError) else result[0]
