"""Values that queries compare columns with: where a copy of a database should have rows on both sides."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

Value = int | float | str

_COMPARISONS = (exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.Between, exp.In, exp.Like, exp.Glob)


def compared_values(queries: Iterable[str]) -> dict[str, list[Value]]:
    """By lower-case column name, the values that some query compares a column of that name with, each once, in order.

    Queries that cannot be parsed give nothing; wildcards are taken off patterns.
    """
    found: dict[str, dict[Value, None]] = defaultdict(dict)
    for sql in queries:
        try:
            tree = sqlglot.parse_one(sql, read="sqlite")
        except (SqlglotError, RecursionError):
            continue
        for node in tree.find_all(*_COMPARISONS):
            columns = [child.name.lower() for child in node.iter_expressions() if isinstance(child, exp.Column)]
            for name in columns:
                found[name].update(dict.fromkeys(_values(node)))
    return {name: list(values) for name, values in found.items()}


def _values(node: exp.Expression) -> Iterable[Value]:
    for child in node.iter_expressions():
        if isinstance(child, exp.Column) and child.this.quoted and not child.table:
            yield child.name  # a text in double quotes, unless there is a column of that name
        if isinstance(child, exp.Literal):
            yield _number(child.this) if not child.is_string else child.this.strip("%_*")


def _number(text: str) -> Value:
    return float(text) if any(mark in text for mark in ".eE") else int(text)
