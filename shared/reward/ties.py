"""Does a gold's answer hang on how ties are broken? Then a query that breaks them otherwise is not wrong.

Looked at are the ORDER BYs of the whole query and of sub-queries that can be run by themselves.
"""

from __future__ import annotations

import enum

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from shared.reward.execution_match import gold_is_ordered
from shared.sql.database import Database, Rows, SqlError


class Order(enum.Enum):
    """What the rows of a gold say about the order of an answer's rows."""

    GIVEN = "given"  # rows must come in this order
    FREE = "free"  # any order is right
    OPEN = "open"  # even which rows there are hangs on ties: no answer can be judged by them


def order_of(gold_sql: str, database: Database) -> Order:
    """How the gold's rows on this database may be compared. A query that cannot be parsed keeps its order."""
    ordered = gold_is_ordered(gold_sql)
    try:
        tree = sqlglot.parse_one(gold_sql, read="sqlite")
    except (SqlglotError, RecursionError):
        return Order.GIVEN if ordered else Order.FREE
    free = not ordered
    for query in tree.find_all(exp.Select, exp.SetOperation):
        if query.args.get("order") and query.args.get("limit"):
            if _cut_through_a_tie(query, database):
                return Order.OPEN
        elif query is tree and ordered and _has_a_tie(query, database):
            free = True
    return Order.FREE if free else Order.GIVEN


def _cut_through_a_tie(query: exp.Query, database: Database) -> bool:
    """Is the last row within LIMIT no different, by its keys, from the first one beyond?"""
    limit = query.args["limit"].expression
    if not isinstance(limit, exp.Literal) or limit.is_string:
        return False
    count = int(limit.this)
    _, keys = _with_keys(query.limit(count + 1), database)
    return 0 < count < len(keys) and keys[count - 1] == keys[count]


def _has_a_tie(query: exp.Query, database: Database) -> bool:
    rows, keys = _with_keys(query, database)
    first: dict[tuple[object, ...], tuple[object, ...]] = {}
    return any(first.setdefault(key, row) != row for row, key in zip(rows, keys, strict=True))


def _with_keys(query: exp.Query, database: Database) -> tuple[Rows, Rows]:
    """Rows of a query and beside each the values it is sorted by; nothing where it cannot be run with them."""
    keys = [ordered.this for ordered in query.args["order"].expressions]
    if isinstance(query, exp.Select):
        shown = query.expressions
        named = {column.alias.lower(): column.this for column in shown if isinstance(column, exp.Alias)}
        extra = [_meant(key, shown, named) for key in keys]
        if None in extra:
            return (), ()
        query = query.select(*[key.copy() for key in extra if key is not None])
    elif all(isinstance(key, exp.Literal) and not key.is_string for key in keys):
        return _whole_rows(query, [int(key.this) - 1 for key in keys], database)
    else:
        return (), ()
    rows = _run(query, database)
    return tuple(row[: -len(keys)] for row in rows), tuple(row[-len(keys) :] for row in rows)


def _meant(key: exp.Expression, shown: list[exp.Expression], named: dict[str, exp.Expression]) -> exp.Expression | None:
    """The expression that an ORDER BY term stands for: its number, its alias, or itself."""
    if isinstance(key, exp.Literal) and not key.is_string:
        place = int(key.this) - 1
        found = shown[place].unalias() if place < len(shown) else None
        return None if isinstance(found, exp.Star) else found
    if isinstance(key, exp.Column) and not key.table:
        return named.get(key.name.lower(), key)
    return key


def _whole_rows(query: exp.Query, places: list[int], database: Database) -> tuple[Rows, Rows]:
    rows = _run(query, database)
    return rows, tuple(tuple(row[place] for place in places) for row in rows)


def _run(query: exp.Query, database: Database) -> Rows:
    try:
        return database.execute(query.sql(dialect="sqlite"), database.limits.max_compare_rows).rows
    except (SqlError, SqlglotError, IndexError):  # a sub-query that needs the query around it
        return ()
