"""Spider's execution accuracy, on one database or on a test suite of them.

Source: `eval_exec_match` of taoyds/test-suite-sql-eval with its usual switches (values are the prediction's own,
DISTINCT is not kept). Of both queries only the first statement counts, without any DISTINCT, `> =` becomes `>=` and
YEAR(CURDATE()) becomes 2020. Rows must come in the gold's order if its text has "order by" anywhere, in a sub-query or
a quoted text too; duplicates count; the columns may come in one other order; cells are compared exactly; two empty
results are equal whatever their columns. With a test suite all this must hold on every database.

Where the original fails with an exception the prediction is wrong. It has no time limit; here there is one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from shared.errors import UserError
from shared.evaluation.judges.execution import SECONDS, outcome
from shared.reward.execution_match import Values, column_order_exists
from shared.sql.database import Rows, SqlError
from shared.sql.sandbox import MAX_OFFICIAL_SQL_LENGTH

_SPACED_OPERATORS = (("> =", ">="), ("< =", "<="), ("! =", "!="))
_CURRENT_YEAR = re.compile(r"YEAR\s*\(\s*CURDATE\s*\(\s*\)\s*\)\s*", re.IGNORECASE)
_TOKEN = re.compile(
    r"""
    (?:--|\#\ )[^\r\n]*             # a comment
    | /\*.*?\*/
    | `(?:``|[^`])*`                # a quoted name
    | (?<![\w\])])\[[^\]\[]+\]
    | '(?:''|\\'|[^'])*'            # a text; a backslash hides the quote after it if another one follows
    | "(?:""|\\"|[^"])*"
    | (?<!\w)[@:$?]\w+ | \\\w+      # a parameter, a command
    | \w[\w$\#]*                    # a word or number
    | .
    """,
    re.VERBOSE | re.DOTALL,
)
_MAX_TOKENS = 10_000
_MAX_NESTING = 100
_STEPS = {"(": 1, ")": -1, "BEGIN": 1, "END": -1}
_AFTER_BEGIN = frozenset("; TRANSACTION WORK TRAN DEFERRED IMMEDIATE EXCLUSIVE".split())  # then it opens no block


class Unreadable(ValueError):
    """The evaluator would fail on this text: it is blank, nested too deeply or far too long."""


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
        prediction = first_statement_without_distinct(prediction_sql)
    except Unreadable:
        return False
    try:
        gold = first_statement_without_distinct(gold_sql)
    except Unreadable as problem:
        raise UserError(f"Gold SQL {gold_sql[:120]!r} cannot be judged ({problem}); correct it.") from None
    for path in map(Path, databases):
        wanted, given = (
            outcome(path, (_CURRENT_YEAR.sub("2020", sql),), seconds, "ignore") for sql in (gold, prediction)
        )
        if isinstance(wanted, SqlError):
            slow = f"it takes longer than {seconds:g} s; raise sandbox.timeout_seconds"
            why = slow if wanted.kind == "timeout" else f"{wanted}; correct it"
            raise UserError(f"Gold SQL {gold_sql[:120]!r} cannot be run on {path} ({why}).")
        if isinstance(given, SqlError) or not spider_match(wanted[0], given[0], ordered="order by" in gold.lower()):
            return False
    return True


def spider_match(gold: Rows, prediction: Rows, *, ordered: bool) -> bool:
    """Spider's comparison of two results."""
    if len(gold) != len(prediction) or not gold:
        return len(gold) == len(prediction)
    # Each row's cells sorted as text: 1 and 1.0 can end in different places, and then the rows differ.
    own, other = ([tuple(sorted(row, key=lambda x: f"{x}{type(x)}")) for row in rows] for rows in (gold, prediction))
    if own != other if ordered else set(own) != set(other):
        return False
    collect: type = list if ordered else Counter

    def same_rows(left: Sequence[Values], right: Sequence[Values]) -> bool:
        return bool(collect(zip(*left, strict=True)) == collect(zip(*right, strict=True)))

    return column_order_exists(gold, prediction, same_rows)


def first_statement_without_distinct(sql: str) -> str:
    """What the evaluator runs of `sql`; raises Unreadable when there is nothing that could be run.

    It reads SQL with the Python package sqlparse, whose habits are kept: a word is left alone in quotes and comments, a
    semicolon inside parentheses or BEGIN … END ends nothing, the word GO ends a statement, and texts beyond its limits
    are not read at all.
    """
    sql = sql[: MAX_OFFICIAL_SQL_LENGTH + 1]  # SQLite refuses a longer statement; scanning it would take GBs of memory
    for spaced, operator in _SPACED_OPERATORS:
        sql = sql.replace(spaced, operator)
    if not sql.strip():
        raise Unreadable("blank")
    tokens: list[str] = []
    level = nesting = 0
    previous = ""
    for found in _TOKEN.finditer(sql):
        token = found[0]
        is_name = sql[found.end() : found.end() + 1] in ("(", ".") or previous == "."
        word = "" if is_name else token.upper()
        tokens.append(token)
        if token.isspace():
            continue
        level += _STEPS.get(token if token in "()" else word, 0) - (previous == "BEGIN" and word in _AFTER_BEGIN)
        nesting += (token == "(") - (token == ")")
        if nesting > _MAX_NESTING or len(tokens) > _MAX_TOKENS:
            raise Unreadable("nested too deeply" if nesting > _MAX_NESTING else "too many words")
        if (token == "GO" and not is_name) or (token == ";" and level <= 0):
            break
        previous = token.upper()
    return "".join(token for token in tokens if token.lower() != "distinct")
