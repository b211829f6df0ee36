"""Golds that need no understanding: constants, and results that a count or a whole table gives as well."""

from __future__ import annotations

from collections.abc import Iterator

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from shared.reward.execution_match import execution_match
from shared.sql.database import Database, QueryResult, SqlError


def reads_no_data(gold_sql: str, database: Database) -> bool:
    """True when the query names none of the database's tables."""
    return not _tables(gold_sql, database)


def trivial_query(gold_sql: str, gold: QueryResult, database: Database) -> str | None:
    """A query without any thought in it that gives the gold's result, or None; the gold itself does not count."""
    squeezed = "".join(gold_sql.lower().rstrip("; \n").replace('"', "").split())
    for sql in _trivial(gold):
        for table in database.schema.tables:
            query = sql.format('"' + table.name.replace('"', '""') + '"')
            if "".join(query.lower().replace('"', "").split()) == squeezed:
                continue
            try:
                result = database.execute(query, database.limits.max_compare_rows)
            except SqlError:
                continue
            if execution_match(gold, result, ordered=False):
                return query
    return None


def _trivial(gold: QueryResult) -> Iterator[str]:
    """Queries of one table that could give such a result; an empty result has many others and is a finding of its own."""
    if gold.rows and len(gold.columns) == 1 and len(gold.rows) == 1:
        yield "SELECT count(*) FROM {}"
    if gold.rows and len(gold.columns) > 1:
        yield "SELECT * FROM {}"


def _tables(sql: str, database: Database) -> set[str]:
    known = {table.name.lower() for table in database.schema.tables}
    try:
        tree = sqlglot.parse_one(sql, read="sqlite")
    except (SqlglotError, RecursionError):
        return {name for name in known if name in sql.lower()}
    return {table.name.lower() for table in tree.find_all(exp.Table)} & known
