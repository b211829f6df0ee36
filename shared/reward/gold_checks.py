"""What makes a gold a poor measure: ties that leave its answer open, or a trivial query that gives the same answer."""

from __future__ import annotations

import enum
from typing import Any

from sqlglot import exp
from sqlglot.errors import SqlglotError

from shared.reward.execution_match import execution_match
from shared.reward.sql_text import gold_is_ordered, parse
from shared.sql.database import Database, QueryResult, Rows, SqlError, quoted


class Order(enum.Enum):
    """What the rows of a gold say about the order of an answer's rows."""

    GIVEN = "given"  # rows must come in this order
    FREE = "free"  # any order is right
    OPEN = "open"  # ties decide which rows there are at all: no answer can be judged by them


def order_of(gold_sql: str, database: Database) -> Order:
    """How the gold's rows on this database may be compared. A query that cannot be parsed keeps its order.

    Looks at the ORDER BYs of the whole query and of sub-queries that run by themselves.
    """
    order = Order.GIVEN if gold_is_ordered(gold_sql) else Order.FREE
    tree = parse(gold_sql)
    for query in tree.find_all(exp.Select, exp.SetOperation) if tree else ():
        if not query.args.get("order"):
            continue
        limit = query.args["limit"].expression if query.args.get("limit") else None
        if isinstance(limit, exp.Literal) and not limit.is_string:
            count = int(limit.this)
            keys = [key for _, key in _rows_with_keys(query.limit(count + 1), database)]
            if 0 < count < len(keys) and keys[count - 1] == keys[count]:  # the cut goes through a tie
                return Order.OPEN
        elif query is tree and limit is None:
            first: dict[tuple[Any, ...], tuple[Any, ...]] = {}
            if any(first.setdefault(key, row) != row for row, key in _rows_with_keys(query, database)):
                order = Order.FREE
    return order


def _rows_with_keys(query: exp.Query, database: Database) -> list[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """The rows of a query, each with the values it is sorted by; none where the query cannot be run with them."""
    keys = [ordered.this for ordered in query.args["order"].expressions]
    numbers = [int(key.this) - 1 if isinstance(key, exp.Literal) and not key.is_string else None for key in keys]
    places = [number for number in numbers if number is not None]
    if isinstance(
        query, exp.Select
    ):  # select what it is sorted by, too: the column of a number or of an alias, or itself
        shown = query.expressions
        named = {column.alias.lower(): column.this for column in shown if isinstance(column, exp.Alias)}
        for key, number in zip(keys, numbers, strict=True):
            if number is not None:
                key = shown[number].unalias() if number < len(shown) else exp.Star()
            elif isinstance(key, exp.Column) and not key.table:
                key = named.get(key.name.lower(), key)
            if isinstance(key, exp.Star):
                return []
            query = query.select(key.copy())
        places = list(range(-len(keys), 0))
    elif len(places) < len(keys):
        return []
    try:
        rows: Rows = database.execute(query.sql(dialect="sqlite"), database.limits.max_compare_rows).rows
        return [(row, tuple(row[place] for place in places)) for row in rows]
    except (SqlError, SqlglotError, IndexError):  # a sub-query that needs the query around it
        return []


def trivial_query(gold_sql: str, gold: QueryResult, database: Database) -> str | None:
    """A count or a whole table that gives the gold's result, or None; the gold itself does not count.

    An empty result is not looked at: many queries give it.
    """
    if not gold.rows or (len(gold.columns) == 1 and len(gold.rows) > 1):
        return None
    output = "count(*)" if len(gold.columns) == 1 else "*"
    squeezed = "".join(gold_sql.lower().rstrip("; \n").replace('"', "").split())
    for table in database.schema.tables:
        query = f"SELECT {output} FROM {quoted(table.name)}"
        if "".join(query.lower().replace('"', "").split()) == squeezed:
            continue
        try:
            result = database.execute(query, database.limits.max_compare_rows)
        except SqlError:
            continue
        if execution_match(gold, result, ordered=False):
            return query
    return None
