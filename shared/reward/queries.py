"""Facts about a query: the tables it reads, its order, the values it compares with, whether it is a poor gold.

A gold measures poorly when ties leave its answer open, or when a trivial query gives the same answer.
"""

from __future__ import annotations

import enum
import re
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError
from sqlglot.tokens import TokenType

from shared.reward.execution_match import execution_match
from shared.sql.database import Database, QueryResult, SqlError, quoted

Value = int | float | str

_COMPARISONS = (exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.Between, exp.In, exp.Like, exp.Glob)


def parse(sql: str) -> exp.Expression | None:
    """The syntax tree of a query; None for a degenerate one, which SQLite may still run."""
    try:
        return sqlglot.parse_one(sql, read="sqlite")
    except (SqlglotError, RecursionError):
        return None


def gold_is_ordered(sql: str) -> bool:
    """True when the top-level query has an ORDER BY; one in a subquery, CTE or window does not count."""
    depth = 0
    try:
        tokens = sqlglot.tokenize(sql, read="sqlite")
    except SqlglotError:  # SQLite forgives an open comment; without tokens any ORDER BY counts
        return re.search(r"\border\s+by\b", sql, re.IGNORECASE) is not None
    for token in tokens:
        depth += (token.token_type is TokenType.L_PAREN) - (token.token_type is TokenType.R_PAREN)
        if token.token_type is TokenType.ORDER_BY and depth == 0:
            return True
    return False


def tables_read(sql: str, database: Database) -> set[str]:
    """Lower-case names of the database's tables that a query reads; by its words where it cannot be parsed."""
    known = {table.name.lower() for table in database.schema.tables}
    tree = parse(sql)
    if tree is None:
        return {name for name in known if name in sql.lower()}
    with_names = {cte.alias_or_name.lower() for cte in tree.find_all(exp.CTE)}
    return {table.name.lower() for table in tree.find_all(exp.Table)} & known - with_names


def reads_data(sql: str, database: Database) -> bool:
    """False for a query without tables and for one whose every output is a constant."""
    if not tables_read(sql, database):
        return False
    selects = [tree] if (tree := parse(sql)) else []
    outputs: list[exp.Expression] = []
    while selects:
        query = selects.pop()
        if isinstance(query, exp.SetOperation):  # UNION, INTERSECT or EXCEPT: either part gives rows
            selects += [query.left, query.right]
        elif isinstance(query, exp.Subquery):
            selects.append(query.this)
        else:
            outputs += query.expressions
    return tree is None or any(output.find(exp.Column, exp.Star, exp.AggFunc) for output in outputs)


def compared_values(queries: Iterable[str]) -> dict[str, list[Value]]:
    """By lower-case column name, the values that some query compares a column of that name with, each once, in order.

    Queries that cannot be parsed give nothing; wildcards are taken off patterns.
    """
    found: dict[str, dict[Value, None]] = defaultdict(dict)
    for tree in filter(None, map(parse, queries)):
        for comparison in tree.find_all(*_COMPARISONS):
            operands = list(comparison.iter_expressions())
            values: list[Value] = []
            for operand in operands:
                if isinstance(operand, exp.Column) and operand.this.quoted and not operand.table:
                    values.append(operand.name)  # a text in double quotes, unless there is a column of that name
                elif isinstance(operand, exp.Literal):
                    text = operand.this
                    number = float if any(mark in text for mark in ".eE") else int
                    values.append(text.strip("%_*") if operand.is_string else number(text))
            for operand in operands:
                if isinstance(operand, exp.Column):
                    found[operand.name.lower()].update(dict.fromkeys(values))
    return {name: list(values) for name, values in found.items()}


class Order(enum.Enum):
    """What the rows of a gold say about the order of an answer's rows."""

    GIVEN = "given"  # rows must come in this order
    FREE = "free"  # any order is right
    OPEN = "open"  # ties decide which rows there are at all: no answer can be judged by them


@lru_cache(maxsize=20_000)  # a gold is compared once per rollout
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
        rows = database.execute(query.sql(dialect="sqlite"), database.limits.max_compare_rows).rows
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
