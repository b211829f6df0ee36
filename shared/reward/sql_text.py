"""What can be said of a query without running it: the tables it reads, its order, the values it compares with."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError
from sqlglot.tokens import TokenType

from shared.sql.database import Database

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
